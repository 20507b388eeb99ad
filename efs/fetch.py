"""One fetch: tables, pins, headers, shards, verification, rebuilding, segments.

Order of a call, all on the loop's thread:

1. Tables of all nodes; each block becomes pinned or a miss (`efs.pinning`). One table of each pinned block gives its
   header, and with it the segment hashes; a header was checked by its node, and its digest must be the pinned one.
   A node that does not answer from memory may send headers and shards right behind its table (`efs.early`).
2. First pass, segment by segment and unit by unit (`efs.unitread`): what memory and page cache can answer is copied to
   its place and verified while it is in the core's cache. What cannot is queued for the nodes' threads. A unit that
   misses a data shard of the segment is fetched whole and rebuilt at once.
3. Settling: arrivals, lag graces and failures drive `Unit.decide` until every block is good or dead, or the deadline
   has come.

Segment t fires when all its blocks are good or dead, in order, with the number of leading blocks that are good in
segments 0 … t; no segment fires before every block is pinned or a miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import pairwise
from math import inf

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline, stamp_of
from efs.contract import ABSENT, Node, NodeTable
from efs.early import EarlyShards, EarlySink
from efs.errors import EfsError
from efs.examine import examine
from efs.hedge import Shard, Unit
from efs.limits import DATA_SHARDS, FANOUT, INITIAL_LAG_GRACE_MS, STRIPE_SHARDS, UNIT_BLOCKS
from efs.pinning import Pins
from efs.placement import placement_group, rotation_of, runs, shard_of_node, spare_shard_of
from efs.shape import BlockShape
from efs.shard import check_headers, header_dtype
from efs.target import Part, PartTarget, Target
from efs.types import GetReport, PutItem
from efs.unitread import ReadContext, Tally, UnitReads, stretches

OnSegment = Callable[[int, int], None]

YIELD_SECONDS = 0.004
"""The loop gets its turn after this much uninterrupted work."""

FLUSH_REQUESTS = 64 * FANOUT
"""Spans that are handed to the nodes before all are known: enough for them to do, few requests for a large fetch."""


class Fetch:
    """One `get_into`: `run` once, then `abandon` whatever happened."""

    def __init__(self, context: ReadContext, keys: Sequence[bytes], shape: BlockShape, out: memoryview,
                 on_segment: OnSegment | None, deadline: Deadline, part: Part | None = None,
                 described: dict[int, PutItem] | None = None) -> None:
        """part: which blocks of `out` these are, when it has others besides. described: see `Reader.get_into`."""
        self._context = context
        self._keys = keys
        self._shape = shape
        self._target = Target(out, shape, len(keys)) if part is None else PartTarget(out, shape, part)
        self._on_segment = on_segment
        self._deadline = deadline
        self._described = described
        self._runs = [(start, stop, placement_group(keys[start])) for start, stop in _neighbours(keys, part)]
        rotation = np.empty(len(keys), np.uint8)
        for start, stop, group in self._runs:
            rotation[start:stop] = rotation_of(group)
        self._pins = Pins(rotation)
        self._tables: list[NodeTable | None] = [None] * STRIPE_SHARDS
        self._table_tasks: dict[int, asyncio.Task[None]] = {}
        self._event = asyncio.Event()
        self._tally = Tally(np.zeros(len(keys), np.bool_))
        first = self._runs[0][2] if self._runs else 0
        turns = [(first + turn) % STRIPE_SHARDS for turn in range(STRIPE_SHARDS)]
        self._header_nodes = [node_index for node_index in turns if context.nodes[node_index] is not None]
        """In the order in which they are asked for headers."""
        self._early = EarlyShards(self._runs, self._target, context.scratch, self._add_table)
        self._sinks: dict[int, EarlySink] = {}
        self._reads: UnitReads | None = None
        self._fired = 0
        self._started = self._breathed = context.clock.monotonic()

    async def run(self) -> GetReport:
        """The whole call; see the module docstring."""
        await self._fetch_tables()
        segments = len(self._shape.segment_bytes)
        expected = np.zeros((len(self._keys), segments), np.uint64)
        headed = await self._fetch_headers(expected)
        reads = UnitReads(
            self._context, self._target, self._pins, expected.T.tolist(), self._tally, self._deadline
        )
        self._reads = reads
        reads.dead[:] = ~headed
        units = reads.cut(self._stretches(headed))
        self._early.hand_over(reads, units)
        for segment in range(segments):
            for unit in units:
                if self._deadline.passed():
                    break
                reads.ensure(unit, segment)
                if reads.queued >= FLUSH_REQUESTS and self._breath_due:
                    reads.flush()
                await self._breathe_if_due()
            self._fire(reads)
        reads.flush()
        await self._settle(reads, units)
        self._fire(reads)
        return self._report(reads)

    @property
    def _breath_due(self) -> bool:
        return self._context.clock.monotonic() - self._breathed > YIELD_SECONDS

    async def _breathe_if_due(self) -> None:
        """Let others have the loop now and then."""
        if self._breath_due:
            await asyncio.sleep(0)
            self._breathed = self._context.clock.monotonic()

    # -- tables and headers ---------------------------------------------------------------------------------------

    async def _fetch_tables(self) -> None:
        first = next((index for index in self._header_nodes
                      if (node := self._context.nodes[index]) is not None and not node.suspect), None)
        for node_index, node in enumerate(self._context.nodes):
            if node is None:
                self._pins.fail(node_index)
                continue
            try:
                table = node.look_up_now(self._keys)
            except EfsError:
                self._pins.fail(node_index)
                continue
            if table is not None:
                self._add_table(node_index, table)
            else:
                wants_headers = node_index == first
                self._sinks[node_index] = self._early.sink(node_index, wants_headers=wants_headers)
                self._table_tasks[node_index] = asyncio.ensure_future(self._get(node_index, node))
        self._pins.resolve()
        settled_at: float | None = None
        while not self._deadline.passed():
            now = self._context.clock.monotonic()
            left = self._deadline.left()
            if self._pins.settled:
                settled_at = now if settled_at is None else settled_at
                left = min(left, settled_at + self._context.lags.grace(now) - now)
                if self._enough_tables(now):
                    break
                if left <= 0:
                    for node_index in self._pins.outstanding_nodes:
                        self._context.lags.observe(node_index, now - settled_at, now)
                    break
            elif not self._pins.outstanding:
                break
            await self._wait(self._event, left)
            self._pins.resolve()
        self._pins.missed |= ~self._pins.pinned
        for node_index in self._pins.outstanding_nodes & self._table_tasks.keys():
            self._table_tasks[node_index].cancel()

    def _enough_tables(self, now: float) -> bool:
        """Whether nobody worth waiting for is outstanding: only slow nodes, the one that holds no data shard of any
        run, or anybody where there is nothing to read. A table left out costs a rebuild of every block whose data
        shard its node holds: most of the time far more than the table is late by."""
        left_out = self._pins.outstanding_nodes
        if not self._pins.pinned.any():
            return True
        if len(left_out) <= STRIPE_SHARDS - FANOUT and not any(self._holds_data(node) for node in left_out):
            return True
        slow = self._context.lags.slow(now)
        return all(slow[node] for node in left_out)

    def _holds_data(self, node_index: int) -> bool:
        """Whether the node's shard of some run is a data shard."""
        return any(shard_of_node(node_index, rotation_of(group)) < DATA_SHARDS for _, _, group in self._runs)

    async def _get(self, node_index: int, node: Node) -> None:
        sink = self._sinks[node_index]
        try:
            with suppress(EfsError):
                await node.get(self._keys, sink, self._deadline)
        finally:
            sink.ended()
            if not sink.answered:
                self._pins.fail(node_index)
                self._event.set()

    def _add_table(self, node_index: int, table: NodeTable) -> None:
        if self._reads is None:
            self._tables[node_index] = table
            self._pins.add(node_index, table)
            self._event.set()

    async def _fetch_headers(self, expected: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """Fill the segment hashes of each pinned block; returns (n,) bool, blocks whose header was found.

        One node after the other is asked for what is missing, the first one by the first run's placement; who keeps the
        call waiting for INITIAL_LAG_GRACE_MS is asked no less, but the next one too."""
        headed = np.zeros(len(self._keys), np.bool_)
        asked: dict[asyncio.Task[NDArray[np.uint8]], NDArray[np.intp]] = {}
        try:
            for node_index in self._header_nodes:
                node = self._context.nodes[node_index]
                columns = np.flatnonzero(self._pins.pinned & ~headed & (self._pins.location[node_index] != ABSENT))
                if node is None or not len(columns):
                    continue
                location = self._pins.location[node_index, columns]
                generation = self._pins.generation[node_index, columns]
                try:
                    rows = self._early_headers(node_index, columns)
                    if rows is None:
                        rows = node.headers_now(location, generation, expected.shape[1])
                except EfsError:
                    continue
                if rows is not None:
                    self._take_headers(rows, columns, expected, headed)
                else:
                    call = node.headers(location, generation, expected.shape[1], self._deadline)
                    asked[asyncio.ensure_future(call)] = columns
                    await self._await_headers(asked, expected, headed, INITIAL_LAG_GRACE_MS / 1000)
            await self._await_headers(asked, expected, headed, self._deadline.left())
        finally:
            for task in asked:
                if not task.cancel() and not task.cancelled():
                    task.exception()  # Nobody else looks at it.
        return headed

    def _early_headers(self, node_index: int, columns: NDArray[np.intp]) -> NDArray[np.uint8] | None:
        """Those that came with the node's table, if any; zeros for what it holds in several versions and pinned is
        another than its table's first."""
        sink = self._sinks.get(node_index)
        if sink is None or sink.headers is None:
            return None
        rows: NDArray[np.uint8] = sink.headers[columns]
        rows[sink.locations[columns] != self._pins.location[node_index, columns]] = 0
        return rows

    async def _await_headers(self, asked: dict[asyncio.Task[NDArray[np.uint8]], NDArray[np.intp]],
                             expected: NDArray[np.uint64], headed: NDArray[np.bool_], seconds: float) -> None:
        """Take the answers that come within so many seconds, until nothing is missing or nobody is left."""
        until = self._context.clock.monotonic() + min(seconds, self._deadline.left())
        while asked and (self._pins.pinned & ~headed).any():
            left = until - self._context.clock.monotonic()
            done, _ = await asyncio.wait(asked, timeout=max(0.0, left), return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                columns = asked.pop(task)
                with suppress(EfsError):
                    self._take_headers(task.result(), columns, expected, headed)
            if left <= 0:
                return

    def _take_headers(self, rows: NDArray[np.uint8], columns: NDArray[np.intp], expected: NDArray[np.uint64],
                      headed: NDArray[np.bool_]) -> None:
        """Accept the headers that speak of the asked key, the pinned digest and the caller's shape."""
        segments = expected.shape[1]
        fields = np.ascontiguousarray(rows).view(header_dtype(segments))[:, 0]
        asked = np.frombuffer(b"".join([self._keys[column] for column in columns.tolist()]), np.uint64).reshape(-1, 4)
        sizes = np.array(self._shape.segment_bytes, np.uint32)
        right = (fields["key"] == asked).all(axis=1) & (fields["digest"] == self._pins.digest[columns]).all(axis=1)
        right &= (fields["block_bytes"] == self._shape.block_bytes) & (fields["segment_bytes"] == sizes).all(axis=1)
        chosen = columns[right]
        expected[chosen] = fields["segment_hashes"][right]
        headed[chosen] = True
        if self._described is not None:
            self._describe(np.ascontiguousarray(rows[right]), chosen, self._described)

    def _describe(self, rows: NDArray[np.uint8], columns: NDArray[np.intp], described: dict[int, PutItem]) -> None:
        """Depth and tenant tag are in no block digest: here the headers are checked whole."""
        fields = rows.view(header_dtype(len(self._shape.segment_bytes)))[:, 0]
        for row, (column, valid) in enumerate(zip(columns.tolist(), check_headers(rows).tolist(), strict=True)):
            if valid:
                described[column] = PutItem(self._keys[column], int(fields["depth"][row]),
                                            fields["tenant_tag"][row].tobytes(), fields["digest"][row].tobytes())

    def _stretches(self, headed: NDArray[np.bool_]) -> list[tuple[int, int, int, int]]:
        """(start, stop, rotation, spare shard) of neighbouring blocks of one run that have a header, cut at every
        UNIT_BLOCKS of the run, as what comes behind tables is."""
        return [
            (max(first, start + low), min(first + UNIT_BLOCKS, start + high), rotation_of(group), spare_shard_of(group))
            for start, stop, group in self._runs
            for low, high in stretches(headed[start:stop])
            for first in range(start + low - low % UNIT_BLOCKS, start + high, UNIT_BLOCKS)
        ]

    # -- settling -------------------------------------------------------------------------------------------------

    async def _settle(self, reads: UnitReads, units: Sequence[Unit]) -> None:
        left = [unit for unit in units if unit.open.any()]
        look_at = dict.fromkeys(left, 0.0)
        slow: Sequence[bool] = ()
        while left and not self._deadline.passed():
            reads.event.clear()
            await self._examine(reads)
            now = self._context.clock.monotonic()
            before, slow = slow, self._context.lags.slow(now)
            for unit in left:
                if unit in reads.stirred or look_at[unit] <= now or slow != before:
                    again = reads.advance(unit)
                    look_at[unit] = inf if again is None else again
                await self._breathe_if_due()
            reads.flush()
            self._fire(reads)
            left = [unit for unit in left if unit.open.any()]
            if left and not reads.suspects:
                wake_at = min(look_at[unit] for unit in left)
                await self._wait(reads.event, min(self._deadline.left(), wake_at - self._context.clock.monotonic()))
        for unit in left:
            self._tally.missing += int(np.count_nonzero(unit.open & (unit.state == Shard.PENDING)))
            reads.kill(unit, unit.open.copy())
        if left:
            self._context.counters.add("get_deadline")

    async def _examine(self, reads: UnitReads) -> None:
        """Deal with the rows that disagree, as long as there is time."""
        while reads.suspects and not self._deadline.passed():
            (unit, row), _ = reads.suspects.popitem()
            if unit.open[row] and reads.disagrees(unit, row):
                await examine(reads, self._keys, unit, row)
            await self._breathe_if_due()

    @staticmethod
    async def _wait(event: asyncio.Event, seconds: float) -> None:
        try:
            async with asyncio.timeout(max(0.0, seconds)):
                await event.wait()
        except TimeoutError:
            pass
        event.clear()

    def _fire(self, reads: UnitReads) -> None:
        while self._fired < len(reads.good):
            segment = self._fired
            if not (reads.good[segment] | reads.dead).all():
                return
            self._fired += 1
            if self._on_segment is not None:
                self._on_segment(segment, _leading(reads.good[: segment + 1].all(axis=0) & ~reads.dead))

    def _report(self, reads: UnitReads) -> GetReport:
        ok = reads.good.all(axis=0) & ~reads.dead
        now = self._context.clock.wall()
        for node, table in zip(self._context.nodes, self._tables, strict=True):
            if node is not None and table is not None:
                self._touch(node, table, ok, stamp_of(now))
        tally = self._tally
        tally.corrupt += self._pins.misplaced
        delivered = int(np.count_nonzero(ok))
        report = GetReport(
            blocks=_leading(ok),
            ok=tuple(ok.tolist()),
            rebuilt=int(np.count_nonzero(tally.rebuilt & ok)),
            hedged=tally.hedged,
            corrupt=tally.corrupt,
            missing=tally.missing,
            raced=tally.raced,
            bytes=delivered * self._shape.block_bytes,
            seconds=self._context.clock.monotonic() - self._started,
        )
        self._count(report)
        return report

    def _touch(self, node: Node, table: NodeTable, ok: NDArray[np.bool_], stamp: int) -> None:
        if ok.all():
            node.touch(self._keys, table.location, stamp)
        elif ok.any():
            node.touch([self._keys[column] for column in np.flatnonzero(ok).tolist()], table.location[ok], stamp)

    def _count(self, report: GetReport) -> None:
        counters = self._context.counters
        asked = self._described is None
        for name, count in (
            ("get_calls", asked),
            ("get_blocks", asked * sum(report.ok)),
            ("get_bytes", asked * report.bytes),
            ("get_missed_blocks", asked * (len(report.ok) - sum(report.ok))),
            ("rebuilt_blocks", report.rebuilt),
            ("hedged_shards", report.hedged),
            ("corrupt_shards", report.corrupt),
            ("missing_shards", report.missing),
            ("raced_shards", report.raced),
            ("mixed_versions", self._pins.mixed),
        ):
            if count:
                counters.add(name, count)

    def abandon(self) -> None:
        """End whatever is still running; after this nothing writes to the caller's buffer."""
        if self._reads is not None:
            self._reads.abandon()
        self._early.close()
        for task in self._table_tasks.values():
            task.cancel()
            # An ended task remembers the frames that it was cancelled in: held by those it would hold the buffer.
            self._context.background.add(task)
            task.add_done_callback(self._context.background.discard)
        self._table_tasks.clear()


def _leading(flags: NDArray[np.bool_]) -> int:
    return len(flags) if flags.all() else int(np.argmin(flags))


def _neighbours(keys: Sequence[bytes], part: Part | None) -> list[tuple[int, int]]:
    """[start, stop) of stretches of one placement group that are neighbours in the buffer too."""
    if part is None:
        return runs(keys)
    cut: list[tuple[int, int]] = []
    for start, stop in runs(keys):
        borders = [start, *part.breaks(start, stop), stop]
        cut += pairwise(borders)
    return cut
