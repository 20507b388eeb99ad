"""Calls on the store as a chaos run makes them: timed against their deadlines, journalled, and every byte compared."""

from __future__ import annotations

import asyncio
import time
import zlib
from collections import Counter, deque
from collections.abc import Awaitable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, TypeVar

from efs.errors import EfsError
from efs.limits import DATA_SHARDS, HUNG_MS
from kvstore import KVStore
from kvstore.keys import Chain
from tools.chaosrig.model import LAG_TURNS, LATE_BUFFERS, LAYOUT, Block, Claim, Ledger, Model, lateness_ms, stalled
from tools.chaosrig.probes import LagProbes

SURE_MS: Final = 20_000
"""Deadline of reads that must hit: so long that no slow machine makes a miss of them."""
AGAIN_S: Final = 30.0
AGAIN_PAUSE_S: Final = 0.25
"""A block that must be there and is a miss is read again and again for so long before it is called lost."""

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class Worst:
    """The most nodes that were damaged at any moment of one call."""

    damaged: int


class Watch:
    """Counts the nodes that are damaged, at worst, while a call runs."""

    def __init__(self) -> None:
        self.damaged = 0
        self._running: set[Worst] = set()

    def now(self, damaged: int) -> None:
        """So many are damaged from here on."""
        self.damaged = damaged
        for worst in self._running:
            worst.damaged = max(worst.damaged, damaged)

    @contextmanager
    def call(self) -> Iterator[Worst]:
        """While one call runs."""
        worst = Worst(self.damaged)
        self._running.add(worst)
        try:
            yield worst
        finally:
            self._running.remove(worst)


class Calls:
    """The verbs of one incarnation of a process. `sums` and `most` go into the journal (`note_sums`).

    at_once: what must hit must do so at the first attempt, unless the machine was too slow for that. Of servers it is
    not asked: that a connection was just lost is a legal reason for a miss, and only what stays a miss is lost."""

    def __init__(self, store: KVStore, ledger: Ledger, probes: LagProbes, *, at_once: bool) -> None:
        self.store = store
        self.watch = Watch()
        self.sums: Counter[str] = Counter()
        self.most: Counter[str] = Counter()
        self._ledger = ledger
        self._probes = probes
        self._at_once = at_once
        self._chains: dict[int, Chain] = {}
        self._buffers: deque[tuple[bytearray, int]] = deque()

    @property
    def model(self) -> Model:
        return self._ledger.model

    def chain(self, number: int) -> Chain:
        """A chain of the universe; its key derivation is kept."""
        known = self._chains.get(number)
        if known is None:
            known = self.model.universe.chain(number)
            if len(self._chains) < 1_000:
                self._chains[number] = known
        return known

    def violation(self, what: str) -> None:
        """Note that a promise was broken."""
        self.sums["violations"] += 1
        self._ledger.write(t="violation", what=what)

    def note_sums(self, struck: Counter[str]) -> None:
        """Write the sums so far into the journal."""
        sums = {**self.sums, **{f"struck_{kind}": count for kind, count in struck.items()}}
        self._ledger.write(t="sums", sums=sums, most=dict(self.most))

    async def timed(self, name: str, deadline_ms: float, call: Awaitable[T]) -> T | None:
        """The answer of a call, which must come by its deadline. None when it raised, which is a violation."""
        began = time.monotonic()
        try:
            return await call
        except EfsError as error:
            self.violation(f"{name} raised {type(error).__name__}: {error}")
            return None
        finally:
            elapsed_ms = (time.monotonic() - began) * 1000
            held_ms, thread_ms, lag_ms = (
                self._probes.held_ms(began), self._probes.thread_ms(began), self._probes.lag_ms(began))
            self.sums["calls"] += 1
            self.most["loop_held_ms"] = max(self.most["loop_held_ms"], int(held_ms))
            self.most["thread_lag_ms"] = max(self.most["thread_lag_ms"], int(thread_ms))
            self.most["past_deadline_ms"] = max(self.most["past_deadline_ms"], int(elapsed_ms - deadline_ms))
            lost_ms = self._probes.lost_ms(began + deadline_ms / 1000)
            if late_ms := lateness_ms(elapsed_ms, deadline_ms, lost_ms, lag_ms):
                self.sums["late_calls"] += 1
                self.violation(f"{name} with a deadline of {deadline_ms:.0f} ms took {elapsed_ms:.0f} ms: {late_ms:.0f}"
                               f" ms too long, with {lost_ms:.0f} ms behind the deadline in which the loop was late, "
                               f"and a lag of {lag_ms:.0f} ms")
            elif lateness_ms(elapsed_ms, deadline_ms, 0.0, 0.0):
                self.sums["late_with_machine"] += 1
            if stalled(held_ms, thread_ms):
                self.sums["loop_stalls"] += 1
                self.violation(f"the event loop was held up for {held_ms:.0f} ms while {name} ran, a thread only for "
                               f"{thread_ms:.0f} ms")

    async def read(self, number: int, first: int, count: int, deadline_ms: float) -> list[int]:
        """Read blocks of a chain and judge the answer. Returns the depths that were a miss, or all when the call
        failed."""
        blocks = [(number, depth) for depth in range(first, first + count)]
        out = bytearray(count * LAYOUT.block_bytes)
        settled: list[tuple[int, int]] = []
        self._ledger.follow()
        began, uses = time.monotonic(), self.model.uses
        claims = {block: (claim, claim.shards) for block in blocks if (claim := self.model.claims.get(block))}
        try:
            with self.watch.call() as worst:
                report = await self.timed("get_into", deadline_ms, self.store.get_into(
                    self.chain(number)[first : first + count], out, deadline_ms=deadline_ms,
                    on_segment=lambda segment, leading: settled.append((segment, leading))))
        finally:
            self._given_back(out)
        if report is None:
            return [depth for _, depth in blocks]
        self._judge_order(settled, report.blocks)
        rows = LAYOUT.from_segments(out).reshape(count, LAYOUT.block_bytes)
        self._ledger.follow()
        missed: list[int] = []
        hits: dict[Block, int] = {}
        for row, (block, found) in enumerate(zip(blocks, report.ok, strict=True)):
            must = self._stands(block, claims, worst.damaged)
            self.sums["claims_tested"] += must
            if not found:
                missed.append(block[1])
                if must:
                    await self._judge_miss(block, claims, worst.damaged, began)
            elif (version := self.model.version_of(block, rows[row].tobytes())) is None:
                self.sums["wrong_blocks"] += 1
                self.violation(f"wrong bytes under block {block[1]} of chain {number}")
            else:
                hits[block] = version
        self._hit(hits, uses)
        self.sums["reads"] += 1
        self.sums["hit_blocks"] += count - len(missed)
        self.sums["missed_blocks"] += len(missed)
        self.sums["rebuilt_blocks"] += report.rebuilt
        self.sums["corrupt_shards"] += report.corrupt
        return missed

    def _given_back(self, out: bytearray) -> None:
        """See "late bytes" in the model."""
        self._buffers.append((out, zlib.crc32(out)))
        if len(self._buffers) > LATE_BUFFERS:
            self._look_at_buffer()

    def _look_at_buffer(self) -> None:
        old, checksum = self._buffers.popleft()
        self.sums["buffers_looked_at"] += 1
        if zlib.crc32(old) != checksum:
            self.sums["late_bytes"] += 1
            self.violation("a buffer changed after its read had returned")

    def look_at_buffers(self) -> None:
        """At all that wait for it."""
        while self._buffers:
            self._look_at_buffer()

    def _judge_order(self, settled: Sequence[tuple[int, int]], leading: int) -> None:
        """on_segment: once for each segment, in order, with a count that never grows and ends at the report's."""
        counts = [count for _, count in settled]
        segments = [segment for segment, _ in settled]
        if segments != list(range(len(LAYOUT.segments))) or counts != sorted(counts, reverse=True):
            self.violation(f"segments settled as {settled}")
        elif counts[-1] != leading:
            self.violation(f"segments settled as {settled}, the report says {leading} leading blocks")

    def _stands(self, block: Block, claims: Mapping[Block, tuple[Claim, int]], damaged: int) -> bool:
        """Whether a block must be a hit by what was claimed of it before a call and still is."""
        claim, shards = claims.get(block, (None, 0))
        return (self.model.must_hit(block, damaged) and self.model.claims[block] is claim
                and shards - damaged >= DATA_SHARDS)

    async def _judge_miss(self, block: Block, claims: Mapping[Block, tuple[Claim, int]], damaged: int,
                          began: float) -> None:
        """Of a block that must be a hit. It is read again until it is one, or need not be one any more."""
        what = (f"block {block[1]} of chain {block[0]} was acknowledged, cannot be evicted yet, and is a miss with "
                f"{damaged} nodes damaged")
        slow = LAG_TURNS * self._probes.lag_ms(began) > HUNG_MS
        until = time.monotonic() + AGAIN_S
        with self.watch.call() as worst:
            while not await self._is_there(block):
                self._ledger.follow()
                if not self._stands(block, claims, max(damaged, worst.damaged)):
                    self.sums["misses_not_judged"] += 1
                    return
                if time.monotonic() > until:
                    self.sums["lost_blocks"] += 1
                    self.violation(f"{what}, and stays one")
                    return
                await asyncio.sleep(AGAIN_PAUSE_S)
        self.sums["hits_only_when_asked_again"] += 1
        if self._at_once and not slow:
            self.violation(what)

    async def _is_there(self, block: Block) -> bool:
        number, depth = block
        out = bytearray(LAYOUT.block_bytes)
        report = await self.store.get_into(self.chain(number)[depth : depth + 1], out, deadline_ms=SURE_MS)
        return report.blocks == 1

    async def put(self, number: int, first: int, count: int, version: int, deadline_ms: float) -> bool:
        """Put blocks of a chain. Returns whether all were acknowledged."""
        blocks = [(number, depth) for depth in range(first, first + count)]
        data = b"".join(self.model.universe.payload(block, version) for block in blocks)
        self._ledger.write(t="intent", b=blocks, v=version)
        report = await self.timed("put", deadline_ms, self.store.put(
            self.chain(number)[first : first + count], data, deadline_ms=deadline_ms))
        acknowledged = report is not None and report.failed == 0
        at_risk = report is not None and report.at_risk > 0
        self._ledger.write(t="put", b=blocks, acknowledged=acknowledged, at_risk=at_risk)
        self.sums["puts"] += 1
        if report is not None:
            if report.acked + report.already + report.failed != count:
                self.violation(f"a put of {count} blocks says {report}")
            self.sums["acked_blocks"] += report.acked
            self.sums["already_blocks"] += report.already
            self.sums["failed_blocks"] += report.failed
            self.sums["at_risk_blocks"] += report.at_risk
        return acknowledged

    async def match(self, number: int, first: int, count: int, deadline_ms: float) -> int:
        """Leading blocks that are promised."""
        found = await self.timed("match", deadline_ms, self.store.match(
            self.chain(number)[first : first + count], deadline_ms=deadline_ms))
        self.sums["matches"] += 1
        return found or 0

    async def look(self, blocks: Iterable[Block], deadline_ms: float) -> list[Block]:
        """Those of some blocks that do not have twelve sound shards of one version; the others are noted as whole."""
        lacking: list[Block] = []
        whole: list[Block] = []
        for block in blocks:
            key = self.chain(block[0]).keys[block[1]]
            shards = await self.timed("look_up_all", deadline_ms,
                                      self.store.filesystem.look_up_all(key, deadline_ms=deadline_ms))
            sound = {shard.node_index for shard in shards or () if shard.in_place and shard.sound}
            (whole if len(sound) == 12 else lacking).append(block)
        if whole:
            self._ledger.write(t="whole", b=whole)
        return lacking

    def missed(self, number: int, depths: Iterable[int]) -> None:
        """These were a miss: nothing more is claimed of those that may have been evicted."""
        gone = [(number, depth) for depth in sorted(depths) if not self.model.unevicted((number, depth))]
        if gone:
            self._ledger.write(t="forget", b=gone)

    def _hit(self, found: dict[Block, int], begun: int) -> None:
        if found:
            self._ledger.write(t="hit", b=list(found), v=list(found.values()), begun=begun)


async def cancelled(tasks: Sequence[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait for their end."""
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.wait(tasks)
