"""A small engine: one model, one store, paged KV, prefix hits under the forward pass. Ten lines of use:

    store = KVStore.blocking("/var/lib/kvstore")
    namespace = namespace_of(store, model, name="my-model")
    with gdr.Engine(model, store, namespace) as engine:
        sequence = engine.prefill(tokens)               # loads the stored prefix, computes the rest
        new = engine.decode(sequence, 64)               # greedy
        engine.finish(sequence)
        print(sequence.loaded_blocks, sequence.prefilled_tokens, new)
    store.close()

*Prefill.* The prompt's stored prefix is loaded (`gdr.prefix`), all but the last token at most, and the rest computed
in chunks that begin at multiples of `chunk_tokens`. With chunks of one block (the default) a warm run computes exactly
the chunks that the cold run computed, so its logits are equal bit for bit on one machine; larger chunks are faster and
equal up to the last bits. A sequence enters the forward pass when all its blocks are verified in host memory;
stream=True lets it enter on the store's promise. A pass that assumed more than came is abandoned whole and run again
on what there is.

*Decode.* One token a step, greedy. A sampled token has no KV until the next step, so 100 + 28 tokens are no full block.

*Write-back.* Blocks are put when they are full and computed, in the background; `flush` waits for it.

*Pages.* A sequence needs a page for each block begun. `gdr.scheduler.run_all` runs several sequences; when the pool is
empty it preempts the one that began last: its pages are given back and it starts again when there is room, from what
is stored by then. Tokens that it had generated are fed one by one again, as they were computed first, so a preempted
run gives the same tokens.

*Abort.* `abort` may be called from any thread in any phase. The call that runs the sequence ends with Aborted and
leaves nothing: no page, no region, no event that somebody could wait for.

All other methods belong to one thread at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence as Tokens
from dataclasses import dataclass
from types import TracebackType

from transformers import PreTrainedModel

from efs.clock import Clock, SystemClock
from gdr.counters import Counters
from gdr.device import Device, device_for
from gdr.errors import Aborted, EngineClosed, InvalidEngineArgument, PagesExhausted, RequestTooLarge, SwapInStalled
from gdr.formats import KvFormat
from gdr.limits import (
    CLOSE_FLUSH_MS,
    FLUSH_WAIT_MS,
    HOST_POOL_BYTES,
    HOST_POOL_WAIT_MS,
    HOST_REGIONS,
    PAGE_POOL_BYTES,
    STAGING_BYTES,
    SWAP_IN_WAIT_MS,
)
from gdr.pagedcache import PagedCache
from gdr.pages import Allocation, PagePool
from gdr.pinned import PinnedPool
from gdr.prefix import BlockStore, PrefixLoad, PrefixLoader, PrefixShortened
from gdr.runner import LayerRunner
from gdr.sequence import Phase, Sequence
from gdr.swapin import SwapIn
from gdr.timeline import Timeline
from gdr.writeback import WriteBack
from kvstore.keys import Namespace

_LOG = logging.getLogger("gdr.engine")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What a user may choose; sizes of 0 are chosen from `gdr.limits`.

    pages: blocks of KV on the device. host_regions: loads at once. region_blocks: most blocks of one load.
    staging_bytes: of each of the two buffers on the device. chunk_tokens: of prefill, a multiple of the block.
    load, write_back: whether stored prefixes are used and new blocks stored. page_align_bytes: what the stride of a
    page is rounded up to.
    """

    pages: int = 0
    host_regions: int = HOST_REGIONS
    region_blocks: int = 0
    staging_bytes: int = STAGING_BYTES
    chunk_tokens: int = 0
    stream: bool = False
    load: bool = True
    write_back: bool = True
    page_align_bytes: int = 1
    host_pool_wait_ms: float = HOST_POOL_WAIT_MS
    swap_in_wait_ms: float = SWAP_IN_WAIT_MS


class Engine:
    """See the module's docstring. The parts are made by methods, so that a test can replace one."""

    def __init__(self, model: PreTrainedModel, store: BlockStore, namespace: Namespace,
                 config: EngineConfig | None = None, *, device: Device | None = None, timeline: bool = False,
                 clock: Clock | None = None) -> None:
        self.config = config or EngineConfig()
        self.namespace = namespace
        self.clock = clock or SystemClock()
        self.counters = Counters()
        self.format = KvFormat.of(namespace.layout)
        self.device = device or device_for(model.device)
        self.timeline = Timeline(self.device, clock=self.clock) if timeline else None
        if model.dtype != self.format.dtype:
            raise InvalidEngineArgument(f"the model is {model.dtype}, the namespace's blocks are {self.format.dtype}")
        self.block_tokens = self.format.tokens
        self._chunk = self.config.chunk_tokens or self.block_tokens
        if self._chunk % self.block_tokens:
            raise InvalidEngineArgument(f"chunk_tokens is {self._chunk}, must be a multiple of {self.block_tokens}")
        self._runner = LayerRunner(model, self.format, self.device, timeline=self.timeline)
        try:
            self._make_parts(store)
        except BaseException:
            self._runner.close()
            raise
        self._closed = False

    def _make_parts(self, store: BlockStore) -> None:
        """Memory and threads."""
        block_bytes = self.namespace.layout.block_bytes
        self.pages = self.make_pages(self.config.pages or max(2, PAGE_POOL_BYTES // block_bytes))
        blocks = self.config.region_blocks or min(
            self.pages.pages, max(1, HOST_POOL_BYTES // self.config.host_regions // block_bytes)
        )
        self.host_pool = PinnedPool(self.device, blocks * block_bytes, self.config.host_regions, clock=self.clock)
        self.swap_in = self.make_swap_in()
        self.write_back = self.make_write_back(store) if self.config.write_back else None
        self._loader = PrefixLoader(
            store, self.host_pool, self.swap_in, block_bytes=block_bytes, counters=self.counters,
            timeline=self.timeline, pool_wait_ms=self.config.host_pool_wait_ms,
            swap_in_wait_ms=self.config.swap_in_wait_ms,
        )

    def make_pages(self, pages: int) -> PagePool:
        return PagePool(self.device, self.namespace.layout.shape.segment_bytes, pages,
                        align_bytes=self.config.page_align_bytes, clock=self.clock)

    def make_swap_in(self) -> SwapIn:
        return SwapIn(self.device, self.pages, staging_bytes=self.config.staging_bytes, counters=self.counters,
                      timeline=self.timeline)

    def make_write_back(self, store: BlockStore) -> WriteBack:
        return WriteBack(self.device, self.pages, store, counters=self.counters, timeline=self.timeline,
                         clock=self.clock)

    # -- sequences -----------------------------------------------------------------------------------------------------

    def sequence(self, tokens: Tokens[int]) -> Sequence:
        """A sequence that waits for its prefill. RequestTooLarge when the pool could never hold it."""
        if not len(tokens):
            raise InvalidEngineArgument("a prompt needs at least one token")
        self._check_size(len(tokens))
        return Sequence(tokens)

    def prefill(self, prompt: Tokens[int] | Sequence) -> Sequence:
        """KV of a whole prompt, or of a preempted sequence up to where it was; `logits` are those of the last token.

        PagesExhausted when there is no room now, Aborted when somebody asked for it. Either way nothing is held.
        """
        self._check_open()
        sequence = prompt if isinstance(prompt, Sequence) else self.sequence(prompt)
        if sequence.phase is not Phase.WAITING:
            raise InvalidEngineArgument(f"the sequence is {sequence.phase.value}, must be waiting")
        begun = self.clock.monotonic()
        logits = sequence.logits
        try:
            self._start(sequence)
        except BaseException as error:
            sequence.logits = logits
            self._end(sequence, Phase.ABORTED if isinstance(error, Aborted) else Phase.WAITING)
            raise
        sequence.load = None
        sequence.phase = Phase.RUNNING
        if sequence.prefill_s is None:
            sequence.prefill_s = self.clock.monotonic() - begun
        self._store_full_blocks(sequence)
        return sequence

    def step(self, sequence: Sequence, token: int | None = None) -> int:
        """Append one token, the likeliest or the given one, and return it.

        First computes the KV of the token that has none yet. PagesExhausted leaves the sequence as it was.
        """
        self._check_open()
        if sequence.phase is not Phase.RUNNING:
            raise InvalidEngineArgument(f"the sequence is {sequence.phase.value}, must be running")
        if sequence.kv_length < len(sequence.tokens):
            self._make_room(sequence, sequence.kv_length + 1)
            try:
                self._feed(sequence, sequence.kv_length, sequence.kv_length + 1)
            except Aborted:
                self._end(sequence, Phase.ABORTED)
                raise
            sequence.reached = sequence.kv_length
            self.counters.add("decoded_tokens")
            self._store_full_blocks(sequence)
        if sequence.logits is None:
            raise InvalidEngineArgument("the sequence has no logits: it was not prefilled")
        chosen = int(sequence.logits.argmax()) if token is None else token
        sequence.tokens.append(chosen)
        return chosen

    def decode(self, sequence: Sequence, count: int, stop_tokens: frozenset[int] = frozenset()) -> list[int]:
        """Up to `count` greedy tokens; the last one when it is a stop token."""
        new: list[int] = []
        while len(new) < count and not (new and new[-1] in stop_tokens):
            new.append(self.step(sequence))
        return new

    def finish(self, sequence: Sequence) -> None:
        """Give back a sequence's pages; what write-back still needs it holds itself."""
        self._end(sequence, Phase.FINISHED)

    def preempt(self, sequence: Sequence) -> None:
        """Give back the pages of a running sequence; `prefill` brings it back to where it was."""
        if sequence.phase is not Phase.RUNNING:
            raise InvalidEngineArgument(f"the sequence is {sequence.phase.value}, must be running")
        sequence.preemptions += 1
        self.counters.add("preemptions")
        self._end(sequence, Phase.WAITING)

    def pages_fit(self, sequence: Sequence) -> bool:
        """Whether a prefill of this sequence would find its pages now."""
        return self.pages.free >= self._blocks_for(sequence.reached)

    def abort(self, sequence: Sequence) -> None:
        """End a sequence, from any thread. The call that runs it ends with Aborted; between calls the next one does."""
        sequence.abort()

    # -- the whole -----------------------------------------------------------------------------------------------------

    def flush(self, wait_ms: float = FLUSH_WAIT_MS) -> bool:
        """Whether all write-backs were handled within `wait_ms`."""
        return self.write_back is None or self.write_back.flush(wait_ms)

    def close(self) -> None:
        """Take the hooks off the model, write back what is submitted, end the threads; every wait is bounded.

        A second close does nothing.
        """
        if self._closed:
            return
        self._closed = True
        self._runner.close()
        self.flush(CLOSE_FLUSH_MS)
        self._loader.close()
        if self.write_back is not None:
            self.write_back.close()
        self.swap_in.close()
        self.host_pool.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    # -- inside --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed")

    def _check_size(self, tokens: int) -> None:
        if self._blocks_for(tokens) > self.pages.pages:
            raise RequestTooLarge(
                f"{tokens} tokens need {self._blocks_for(tokens)} pages, the pool has {self.pages.pages}"
            )

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_tokens)

    def _start(self, sequence: Sequence) -> None:
        """Pages, the stored prefix into them, and the rest computed."""
        sequence.phase = Phase.LOADING
        target = self._allocate(sequence)
        # A new prompt's last token is computed in any case: its logits are needed. A resumed sequence has them.
        usable = sequence.reached - 1 if sequence.logits is None else sequence.reached
        usable = usable if self.config.load else 0
        chain = self.namespace.chain(sequence.tokens)[: usable // self.block_tokens]
        sequence.load = self._loader.load(
            chain, target, sequence.aborted, stream=self.config.stream, started=sequence.take_load
        )
        try:
            self._compute(sequence)
        except SwapInStalled as error:
            _LOG.warning("%s; the prefix is recomputed in other pages", error)
            self.counters.add("swap_in_stalled")
            self._give_back(sequence)
            self._allocate(sequence)
            self._compute(sequence)

    def _allocate(self, sequence: Sequence) -> Allocation:
        """Pages for all that must have KV; the compute stream waits for their last users. PagesExhausted."""
        target = self._take_pages(self._blocks_for(sequence.reached))
        sequence.pages = list(target.pages)
        sequence.cache = PagedCache(self.device, self.pages, self.format, sequence.pages)
        return target

    def _make_room(self, sequence: Sequence, tokens: int) -> None:
        self._check_size(tokens)
        missing = self._blocks_for(tokens) - len(sequence.pages)
        if missing > 0:
            sequence.pages.extend(self._take_pages(missing).pages)

    def _take_pages(self, count: int) -> Allocation:
        target = self.pages.allocate(count)
        if target is None:
            raise PagesExhausted(f"{count} pages needed, {self.pages.free} free")
        stream = self.device.compute_stream()
        for fence in target.fences:
            stream.wait(fence)
        return target

    def _compute(self, sequence: Sequence) -> None:
        """Prefill behind the loaded prefix, again when that turns out shorter than assumed."""
        sequence.phase = Phase.PREFILLING
        stream, load = self.device.compute_stream(), sequence.load
        blocks = load.assumed if load is not None else 0
        while True:
            self._rewind(sequence, blocks * self.block_tokens)
            try:
                self._prefill_from(sequence, blocks * self.block_tokens)
                break
            except PrefixShortened as error:
                _LOG.warning("%s: the pass is abandoned and run again", error)
                self.counters.add("abandoned_passes")
                blocks = load.settled(stream) if load is not None else 0
        sequence.loaded_blocks = sequence.written_blocks = blocks
        sequence.prefilled_tokens = sequence.reached - blocks * self.block_tokens
        self.counters.add("loaded_blocks", blocks)
        self.counters.add("prefilled_tokens", sequence.prefilled_tokens)

    def _rewind(self, sequence: Sequence, length: int) -> None:
        sequence.kv_length = length
        if sequence.cache is not None:
            sequence.cache.rewind(length)

    def _prefill_from(self, sequence: Sequence, start: int) -> None:
        """The prompt in aligned chunks; what a preempted sequence had generated one by one, as it was at first."""
        load, position = sequence.load, start
        while position < sequence.reached:
            if position < sequence.prompt_length:
                stop = min((position // self._chunk + 1) * self._chunk, sequence.prompt_length)
            else:
                stop = position + 1
                self.counters.add("replayed_tokens")
            self._feed(sequence, position, stop, load)
            position = stop
            if load is not None:
                # The first chunk has passed every gate: what it was promised is settled, or nearly so.
                load.confirm(self.device.compute_stream())
                load = None
        if load is not None:
            load.confirm(self.device.compute_stream())

    def _feed(self, sequence: Sequence, start: int, stop: int, load: PrefixLoad | None = None) -> None:
        """Compute KV and logits of tokens [start, stop), behind the swap-in of `load`."""
        if sequence.cache is None:
            raise InvalidEngineArgument("the sequence has no pages")
        sequence.logits = self._runner.run(sequence.cache, sequence.tokens[start:stop], load, sequence.aborted)
        sequence.kv_length = stop

    def _store_full_blocks(self, sequence: Sequence) -> None:
        """Hand blocks that are full and computed to write-back."""
        first, full = sequence.written_blocks, sequence.kv_length // self.block_tokens
        if self.write_back is None or full <= first:
            return
        chain = self.namespace.chain(sequence.tokens[: full * self.block_tokens])[first:full]
        if self.write_back.submit(chain, tuple(sequence.pages[first:full]), self.device.compute_stream().record()):
            sequence.written_blocks = full

    def _give_back(self, sequence: Sequence) -> None:
        """Drop pages and load; both are free when the device is done with them."""
        if sequence.load is not None:
            sequence.load.abort()
            sequence.load = None
        if sequence.pages:
            self.pages.drop(sequence.pages, [self.device.compute_stream().record()])
        sequence.pages = []
        sequence.cache = None

    def _end(self, sequence: Sequence, phase: Phase) -> None:
        self._give_back(sequence)
        sequence.kv_length = 0
        if phase is Phase.FINISHED and sequence.aborted.is_set():
            phase = Phase.ABORTED
        if phase is Phase.ABORTED and sequence.phase is not Phase.ABORTED:
            self.counters.add("aborts")
        sequence.phase = phase
