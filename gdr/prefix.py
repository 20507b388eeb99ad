"""From a chain of keys to blocks on their way to the device: match, host region, fetch, swap-in.

`PrefixLoader.load` never fails because of the store or the device: whatever is lost on the way makes the prefix
shorter, down to nothing, and is counted. The forward pass may *assume* `assumed` leading blocks; it asks
`wait_segment` before a layer reads its segment, and `confirm` when it has run. Both raise PrefixShortened when fewer
blocks came than assumed. The pass is then worthless; `settled` waits until nothing of the load is under way any more
and says how many blocks there are, and the pass runs again on those.

- By default the fetch is complete before `load` returns: `assumed` is what is verified in host memory, and only a
  refused copy can shorten it. With stream=True the fetch runs in a thread of its own, segments are copied as they are
  verified, and `assumed` is the store's promise (`match`), which the fetch may correct.
- The region belongs to the transfer from the start. It is settled to the end whatever happens, but never before
  `get_into` has returned, so that no byte of the store can land in a region that was given back.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any, Protocol

from efs.errors import EfsError
from efs.types import GetReport, PutReport
from gdr.counters import Counters
from gdr.device import Stream
from gdr.errors import Aborted, EngineError, SwapInStalled
from gdr.limits import CLOSE_WAIT_MS, HOST_POOL_WAIT_MS, SWAP_IN_WAIT_MS
from gdr.pages import Allocation
from gdr.pinned import PinnedPool
from gdr.swapin import SwapIn, Transfer
from gdr.timeline import Timeline
from kvstore.keys import Chain

_LOG = logging.getLogger("gdr.prefix")


class BlockStore(Protocol):
    """The three verbs that an engine needs, without await: `kvstore.BlockingKVStore` has them."""

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int: ...

    def get_into(self, chain: Chain, out: Any, *, on_segment: Callable[[int, int], None] | None = None,
                 deadline_ms: float | None = None) -> GetReport: ...

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport: ...


class PrefixShortened(EngineError):
    """A forward pass assumed more blocks than came: abandon it and run again."""


class PrefixLoad:
    """The blocks of one request on their way."""

    def __init__(self, assumed: int, transfer: Transfer | None, aborted: threading.Event, wait_ms: float) -> None:
        self.assumed = assumed
        self._transfer = transfer
        self._aborted = aborted
        self._wait_ms = wait_ms

    def wait_segment(self, segment: int, stream: Stream) -> None:
        """Make `stream` wait for one segment of the assumed blocks. PrefixShortened, Aborted, SwapInStalled."""
        if self.assumed == 0 or self._transfer is None:
            return
        blocks = self._transfer.gates[segment].wait(stream, self._wait_ms)
        self._raise_if_short(blocks)

    def confirm(self, stream: Stream) -> None:
        """After a pass: it had all blocks that it assumed, and `stream` has them all. PrefixShortened, SwapInStalled,
        Aborted."""
        if self._transfer is None:
            return
        self._wait_finished(self._transfer, stream)
        self._raise_if_short(self._transfer.blocks)

    def settled(self, stream: Stream) -> int:
        """Wait until nothing is under way; how many blocks the next pass may assume. SwapInStalled, Aborted.

        `stream` waits for whatever the abandoned load still copies: the next pass computes into some of its pages.
        """
        if self._transfer is None:
            return 0
        self._wait_finished(self._transfer, stream)
        self.assumed = self._transfer.blocks
        self._raise_if_short(self.assumed)
        return self.assumed

    def abort(self) -> None:
        """Nobody wants the blocks any more; waiters wake up."""
        if self._transfer is not None:
            self._transfer.abort()

    def _wait_finished(self, transfer: Transfer, stream: Stream) -> None:
        """Nothing of the transfer is under way on the host; `stream` waits for what is on the device."""
        if not transfer.wait_finished(self._wait_ms):
            raise SwapInStalled(f"the last copies did not end within {self._wait_ms:.0f} ms")
        if transfer.last_event is not None:
            stream.wait(transfer.last_event)

    def _raise_if_short(self, blocks: int) -> None:
        if self._aborted.is_set():
            raise Aborted("the request was aborted")
        if blocks < self.assumed:
            raise PrefixShortened(f"{blocks} blocks came, {self.assumed} were assumed")


class PrefixLoader:
    """Starts loads; one an engine."""

    def __init__(self, store: BlockStore, pool: PinnedPool, swap_in: SwapIn, *, block_bytes: int,
                 counters: Counters, timeline: Timeline | None = None, pool_wait_ms: float = HOST_POOL_WAIT_MS,
                 swap_in_wait_ms: float = SWAP_IN_WAIT_MS) -> None:
        self.timeline = timeline
        self._store = store
        self._pool = pool
        self._swap_in = swap_in
        self._block_bytes = block_bytes
        self._counters = counters
        self._pool_wait_ms = pool_wait_ms
        self._swap_in_wait_ms = swap_in_wait_ms
        self._fetches: list[threading.Thread] = []

    def load(self, chain: Chain, target: Allocation, aborted: threading.Event, *, stream: bool = False,
             started: Callable[[PrefixLoad], None] = lambda load: None) -> PrefixLoad:
        """Bring as many leading blocks of the chain as there are into the first pages of `target`.

        `started` gets the load before its fetch begins, so that it can be aborted meanwhile. Aborted.
        """
        limit = min(len(chain), len(target.pages), self._pool.region_bytes // self._block_bytes)
        nothing = PrefixLoad(0, None, aborted, self._swap_in_wait_ms)
        matched = self._match(chain[:limit]) if limit else 0
        _raise_if(aborted)
        if matched == 0:
            return nothing
        lease = self._pool.lease(self._pool_wait_ms)
        if lease is None:
            self._counters.add("host_pool_exhausted")
            return nothing
        try:
            transfer = self._swap_in.begin(lease, matched, target)
        except EngineError:
            lease.release()
            raise
        load = PrefixLoad(matched, transfer, aborted, self._swap_in_wait_ms)
        started(load)
        if stream:
            thread = threading.Thread(
                target=self._fetch, args=(chain[:matched], transfer, aborted, True), name="gdr-fetch", daemon=True
            )
            thread.start()
            self._fetches = [*(fetch for fetch in self._fetches if fetch.is_alive()), thread]
        else:
            load.assumed = self._fetch(chain[:matched], transfer, aborted, False)
            _raise_if(aborted)
        return load

    def close(self) -> bool:
        """Wait for fetches that still run, bounded; False when one was left running. Its region then stays leased."""
        for fetch in self._fetches:
            fetch.join(CLOSE_WAIT_MS / 1000)
        return not any(fetch.is_alive() for fetch in self._fetches)

    def _match(self, chain: Chain) -> int:
        try:
            matched = self._store.match(chain)
        except Exception as error:  # An engine outlives its store: without an answer there is no hit.
            self._lost("match", error)
            self._counters.add("match_failed")
            return 0
        matched = max(0, min(matched, len(chain)))
        self._counters.add("matched_blocks", matched)
        return matched

    def _fetch(self, chain: Chain, transfer: Transfer, aborted: threading.Event, stream: bool) -> int:
        """Fetch into the transfer's region and settle all segments; how many leading blocks are verified in it."""

        def on_segment(segment: int, leading: int) -> None:
            _raise_if(aborted)
            if stream:
                transfer.settle(segment, leading)

        begun = self.timeline.now() if self.timeline is not None else 0.0
        fetched = 0
        try:
            report = self._store.get_into(
                chain, transfer.lease.bytes(len(chain) * self._block_bytes), on_segment=on_segment
            )
            fetched = max(0, min(report.blocks, len(chain)))
        except Aborted:
            pass
        except Exception as error:  # As in _match; what was delivered cannot be told from what was not.
            self._lost("fetch", error)
            self._counters.add("fetch_failed")
        finally:
            transfer.shorten(fetched)
            transfer.settle_rest(fetched)
        if self.timeline is not None:
            self.timeline.host("fetch", f"{len(chain)} blocks", begun, self.timeline.now(), blocks=fetched,
                               bytes=fetched * self._block_bytes)
        self._counters.add("fetched_blocks", fetched)
        if fetched < len(chain):
            self._counters.add("short_fetches")
        return fetched

    def _lost(self, what: str, error: Exception) -> None:
        if isinstance(error, EfsError):
            _LOG.warning("%s failed, the prefix is recomputed: %s", what, error)
        else:
            _LOG.exception("%s failed, the prefix is recomputed", what)


def _raise_if(aborted: threading.Event) -> None:
    if aborted.is_set():
        raise Aborted("the request was aborted")
