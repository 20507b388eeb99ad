"""Shards that come right behind a node's table, before it is known which version of a block is read.

Nearly always every node holds one and the same version of every block. So a fetch asks a node that cannot answer from
memory for its table and for the shards that are then wanted, in one `Node.get`. They land where they belong while other
tables are still under way. Then versions are pinned, units are cut, and each of these spans is

- *taken* by its unit, here or still on its way, when the pinned versions of all its blocks lie on this node in just the
  slots that were read: from then on it is a request like any other, to be verified like any other;
- or *revoked*: nothing lands for it any more, and its shards are asked for as if they had not been.

All of that happens before the first byte is verified, so nothing that is revoked writes to good bytes. What had not
landed when its `get` ended is asked for with `Node.read`.

Both sides cut a table's locations into spans alike (`efs/spans.py`).
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from efs.contract import Landing, NodeTable, Span
from efs.hedge import Unit
from efs.limits import DATA_SHARDS, STRIPE_SHARDS, UNIT_BLOCKS
from efs.placement import rotation_of, shard_of_node, spare_shard_of
from efs.scratch import Scratch
from efs.spans import cuts
from efs.target import Target
from efs.unitread import Request, UnitReads, parity_landing

TableCame = Callable[[int, NodeTable], None]


@dataclass(slots=True)
class EarlySpan:
    """Blocks [start, start + span.count) of one shard. stretch: of which it is a part. here: whether it has landed.
    request: what it became when it was taken on its way."""

    shard: int
    start: int
    stretch: tuple[int, int]
    span: Span
    landing: Landing
    here: bool = False
    request: Request | None = None

    @property
    def stop(self) -> int:
        return self.start + self.span.count


class EarlyShards:
    """Those of one fetch. runs: (start, stop, placement group) of its blocks, as they are cut into units. `close` at
    its end, whatever happened."""

    def __init__(self, runs: Sequence[tuple[int, int, int]], target: Target, scratch: Scratch,
                 table_came: TableCame) -> None:
        self.target = target
        self.table_came = table_came
        self._runs = runs
        self._scratch = scratch
        self._parity: dict[tuple[int, int], bytearray] = {}
        self._named: dict[int, tuple[NDArray[np.int64], Sequence[EarlySpan]]] = {}
        self._reads: UnitReads | None = None
        self._closed = False

    def sink(self, node_index: int, *, wants_headers: bool) -> EarlySink:
        """For the `get` of one node."""
        return EarlySink(self, node_index, len(self.target.shape.segment_bytes) if wants_headers else 0)

    @property
    def over(self) -> bool:
        """Whether spans that are named now come too late to be taken."""
        return self._closed or self._reads is not None

    def wanted(self, node_index: int) -> list[tuple[int, int, int]]:
        """(shard, start, stop) of the stretches of blocks of which a node is to send its shard: what it is asked for
        without a reason (`Unit.first_asked`), by the first segment that needs it."""
        found: list[tuple[int, int, int]] = []
        for start, stop, group in self._runs:
            shard = shard_of_node(node_index, rotation_of(group))
            if shard != spare_shard_of(group):
                found += [(shard, first, min(first + UNIT_BLOCKS, stop)) for first in range(start, stop, UNIT_BLOCKS)]
        found.sort(key=lambda stretch: self._order[stretch[0]])
        return found

    @cached_property
    def _order(self) -> list[int]:
        """By shard the first segment that needs it; parity last."""
        segments = self.target.shape.segment_shards
        order = [len(segments)] * STRIPE_SHARDS
        for segment in reversed(range(len(segments))):
            for shard in segments[segment]:
                order[shard] = segment
        return order

    def landing(self, shard: int, stretch: tuple[int, int], start: int) -> Landing:
        """Where a shard of the blocks from `start` on belongs: the caller's buffer, or memory for parity."""
        if self.over:
            return Landing(memoryview(b""), (), revoked=True)
        if shard < DATA_SHARDS:
            return self.target.landing(shard, start)
        size = self.target.shape.shard_bytes
        buffer = self._parity.get((stretch[0], shard))
        if buffer is None:
            buffer = self._parity[stretch[0], shard] = self._scratch.take(size * (stretch[1] - stretch[0]))
        return parity_landing(buffer, start - stretch[0], size)

    def add(self, node_index: int, locations: NDArray[np.int64], spans: Sequence[EarlySpan]) -> None:
        """What a node goes on with behind its table, which has these locations."""
        if not self.over:
            self._named[node_index] = (locations, spans)

    def landed(self, early: EarlySpan) -> None:
        early.here = True
        if early.request is not None and self._reads is not None:
            self._reads.landed(early.request)

    def ended(self, spans: Sequence[EarlySpan]) -> None:
        """Nothing more comes for these: what is missing is asked for again by the units that took it."""
        left: list[Request] = []
        for early in spans:
            if early.request is not None:
                left.append(early.request)
            elif not early.here:
                early.landing.revoked = True
        if left and self._reads is not None:
            self._reads.ask_again(left)

    def hand_over(self, reads: UnitReads, units: Sequence[Unit]) -> None:
        """Let the units take what they can, and revoke the rest. From now on no span is added."""
        self._reads = reads
        now, starts = reads.context.clock.monotonic(), [unit.start for unit in units]
        for node_index, (locations, spans) in self._named.items():
            if any(early.here for early in spans):
                reads.context.lags.observe(node_index, 0.0, now)
            unlike = np.flatnonzero(reads.pins.location[node_index] != locations).tolist()
            for early in spans:
                at = bisect_right(starts, early.start) - 1
                alike = bisect_left(unlike, early.start) == bisect_left(unlike, early.stop)
                if at >= 0 and alike and not early.landing.revoked and _within(early, units[at]):
                    unit = units[at]
                    early.request = reads.take(unit, early.shard, early.start - unit.start, early.span, early.landing,
                                               here=early.here)
                else:
                    early.landing.revoked = True
        while self._parity:
            (start, shard), buffer = self._parity.popitem()
            at = bisect_right(starts, start) - 1
            if at < 0 or not reads.take_parity(units[at], start, shard, buffer):
                self._scratch.give(buffer)
        reads.ask_beside_taken()

    def close(self) -> None:
        """Nothing lands any more, and nobody is told of tables: what is late then holds neither fetch nor buffer."""
        self._closed = True
        self.table_came = _nobody
        for _, spans in self._named.values():
            for early in spans:
                early.landing.revoked = True
        for buffer in self._parity.values():
            self._scratch.give(buffer)
        self._parity.clear()


def _nobody(node_index: int, table: NodeTable) -> None:
    """Who is told of tables after the fetch."""


def _within(early: EarlySpan, unit: Unit) -> bool:
    """Whether a span lies in a unit; parity lands in memory of the unit's size, so of that all of the stretch."""
    if early.shard >= DATA_SHARDS:
        return early.stretch == (unit.start, unit.stop)
    return early.stop <= unit.stop


class EarlySink:
    """`efs.contract.GetSink` of one node in a fetch. locations: as its table says. headers: what came with it."""

    def __init__(self, early: EarlyShards, node_index: int, segments: int) -> None:
        self._early = early
        self._node_index = node_index
        self._wanted: list[tuple[int, int, int]] | None = None
        self._spans: list[EarlySpan] = []
        self.segments = segments
        self.answered = False
        self.locations: NDArray[np.int64] = np.zeros(0, np.int64)
        self.headers: NDArray[np.uint8] | None = None

    @property
    def shard_bytes(self) -> int:
        return self._early.target.shape.shard_bytes

    @property
    def slot_bytes(self) -> int:
        return self._early.target.shape.slot_bytes

    @property
    def stretches(self) -> Sequence[tuple[int, int]]:
        return [(start, stop) for _, start, stop in self._stretches]

    @property
    def _stretches(self) -> list[tuple[int, int, int]]:
        if self._wanted is None:
            self._wanted = self._early.wanted(self._node_index)
        return self._wanted

    def table_came(self, table: NodeTable, headers: NDArray[np.uint8] | None) -> None:
        self.answered = True
        self.locations, self.headers = table.location, headers
        self._early.table_came(self._node_index, table)

    def places(self) -> Sequence[tuple[Span, Landing]]:
        stretches, shard_bytes, slot_bytes = self.stretches, self.shard_bytes, self.slot_bytes
        found = zip(self._stretches, stretches, cuts(self.locations, stretches), strict=True)
        for (shard, *_), stretch, ranges in found:
            for first, location, count in ranges:
                landing = self._early.landing(shard, stretch, first)
                span = Span(location, count, shard_bytes, slot_bytes)
                self._spans.append(EarlySpan(shard, first, stretch, span, landing))
        self._early.add(self._node_index, self.locations, self._spans)
        return [(early.span, early.landing) for early in self._spans]

    def landed(self, index: int) -> None:
        self._early.landed(self._spans[index])

    def ended(self) -> None:
        """The get is over, in whatever way."""
        self._early.ended(self._spans)
