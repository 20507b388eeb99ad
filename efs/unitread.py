"""The shards of one fetch: asked, landed, verified, rebuilt, unit by unit. Runs on the loop's thread only.

Invariants: a segment of a block is good only after its bytes in the caller's buffer were hashed and agreed with the
pinned version's header, and stays so: the caller may be using it. Before bytes are rebuilt in place, every landing that
could still write to them is revoked, and of a shard that is read or rebuilt once more only the pieces in segments that
are not good are written. What a node shows of its memory is copied before anything is awaited, a chunk of a segment
at a time, each hashed at once. `landed` and node failures only change state and set `event`; waiting is the caller's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from efs.clock import Clock, Deadline
from efs.codec import Codec
from efs.contract import ABSENT, Landing, Node, Span, Stride
from efs.errors import EfsError
from efs.hedge import Budget, Lags, Shard, Unit
from efs.limits import DATA_SHARDS, FANOUT, SCRATCH_BYTES, STRIPE_SHARDS, VERIFY_CHUNK_BYTES
from efs.metrics import CounterFile
from efs.pinning import Pins
from efs.scratch import Scratch
from efs.target import Target


@dataclass(frozen=True, slots=True)
class CorruptShard:
    """A record that failed its checks on a read: what to verify and mend. segments: how many its block has. stamp: of
    the moment of the read."""

    key: bytes
    digest: bytes
    node_index: int
    shard: int
    generation: int
    segments: int
    stamp: int


@dataclass(slots=True)
class ReadContext:
    """What outlives a call. `nodes[i]` is None where a node is not there at all."""

    nodes: Sequence[Node | None]
    codec: Codec
    counters: CounterFile
    clock: Clock
    report: Callable[[CorruptShard], None]
    lags: Lags = field(default_factory=Lags)
    budget: Budget = field(default_factory=Budget)
    scratch: Scratch = field(default_factory=lambda: Scratch(SCRATCH_BYTES))
    background: set[asyncio.Task[None]] = field(default_factory=set)


@dataclass(slots=True)
class Tally:
    """What one call counts; `rebuilt` is one bool per block, the others are shards."""

    rebuilt: NDArray[np.bool_]
    hedged: int = 0
    corrupt: int = 0
    missing: int = 0
    raced: int = 0


@dataclass(slots=True)
class Request:
    """Rows [low, high) of one shard of a unit, on their way."""

    unit: Unit
    shard: int
    low: int
    high: int
    span: Span
    landing: Landing


def stretches(flags: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
    """[low, high) of each maximal stretch of True."""
    if flags.all():
        return iter([(0, len(flags))] if len(flags) else [])
    edges = np.flatnonzero(np.diff(np.concatenate(([False], flags, [False])).astype(np.int8)))
    return iter([(int(low), int(high)) for low, high in edges.reshape(-1, 2)])


def parity_landing(buffer: bytearray, row: int, shard_bytes: int) -> Landing:
    """Where a parity shard from `row` on belongs in memory that has one for each block of a unit."""
    return Landing(memoryview(buffer), (Stride(0, shard_bytes, row * shard_bytes, shard_bytes),))


class UnitReads:
    """All units of one fetch. `expected[t]` lists the pinned header's hash of segment t for each block.

    good: (segments, n) bool. dead: (n,) bool, blocks that this call gives up. suspects: rows whose segment disagreed.
    stirred: units with news that `advance` has not dealt with yet and that may change what it decides.
    """

    def __init__(self, context: ReadContext, target: Target, pins: Pins, expected: list[list[int]],
                 tally: Tally, deadline: Deadline) -> None:
        self.context = context
        self.target = target
        self.pins = pins
        self.expected = expected
        self.tally = tally
        self.deadline = deadline
        self.event = asyncio.Event()
        blocks = pins.location.shape[1]
        self.good = np.zeros((len(target.shape.segment_bytes), blocks), np.bool_)
        self.dead = np.zeros(blocks, np.bool_)
        self.suspects: dict[tuple[Unit, int], None] = {}
        self.stirred: set[Unit] = set()
        self._shard_bytes, self._slot_bytes = target.shape.shard_bytes, target.shape.slot_bytes
        self._shards_of = [frozenset(shards) for shards in target.shape.segment_shards]
        self._segments_of = [[segment for segment, shards in enumerate(self._shards_of) if shard in shards]
                             for shard in range(STRIPE_SHARDS)]
        self._linked = np.diff(pins.location, axis=1) == 1
        self._parity: dict[tuple[int, int], bytearray] = {}
        self._shown: list[tuple[int, NDArray[np.uint8]]] = []
        self._queue: dict[int, list[Request]] = {}
        self._flying: dict[Unit, list[Request]] = {}
        self._taken: dict[Unit, set[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self, runs: Sequence[tuple[int, int, int, int]]) -> list[Unit]:
        """Units of the (start, stop, rotation, spare shard) stretches of blocks, each with what is contiguous in it.
        Their eleven shards a block are what the budget of speculative reads is a share of."""
        units = [Unit(*run) for run in runs]
        if not units:
            return units
        self.context.budget.earn(FANOUT * sum(unit.stop - unit.start for unit in units))
        starts = np.array([unit.start for unit in units])
        lasts = np.array([unit.stop - 1 for unit in units])
        breaks = np.zeros(self.pins.location.shape, np.int64)
        np.cumsum(~self._linked, axis=1, out=breaks[:, 1:])
        whole = breaks[:, starts] == breaks[:, lasts]
        firsts = np.where(whole, self.pins.location[:, starts], ABSENT)
        for unit, contiguous in zip(units, firsts.T.tolist(), strict=True):
            unit.contiguous = contiguous
            unit.shown = [None] * STRIPE_SHARDS
        for node_index, node in enumerate(self.context.nodes):
            if node is not None:
                self._look_at(node_index, node, [unit for unit in units if unit.contiguous[node_index] != ABSENT])
        return units

    def _look_at(self, node_index: int, node: Node, units: Sequence[Unit]) -> None:
        """Ask a node to show what it has in memory of the units whose slots are neighbours there."""
        try:
            views = node.views_now([Span(unit.contiguous[node_index], unit.stop - unit.start, self._shard_bytes,
                                         self._slot_bytes) for unit in units])
        except EfsError:
            return
        for unit, view in zip(units, views or (), strict=False):
            unit.shown[node_index] = view

    # -- asking ---------------------------------------------------------------------------------------------------

    def ask(self, unit: Unit, shard: int, rows: NDArray[np.bool_]) -> None:
        """Request a shard of the chosen rows of a unit."""
        self._ask(unit, shard, rows)
        self._store_shown(unit, 0, unit.stop - unit.start)

    def _ask(self, unit: Unit, shard: int, rows: NDArray[np.bool_] | None = None) -> bool:
        """Request a shard of the unit's blocks (all, or the chosen rows). True when every row of it is in hand, or is
        shown by its node and still to be copied by `_store_shown`."""
        node_index = (shard + unit.rotation) % STRIPE_SHARDS
        node = self.context.nodes[node_index]
        if node is None:
            return self._absent(unit, shard, np.ones(unit.stop - unit.start, np.bool_) if rows is None else rows)
        if rows is None and (first := unit.contiguous[node_index]) != ABSENT:
            view = unit.shown[node_index]
            if view is not None:
                self._shown.append((shard, view))
                unit.state[shard] = Shard.HAVE
                return True
            return self._request(unit, shard, 0, unit.stop - unit.start, node, first)
        location = self.pins.location[node_index]
        held = location[unit.start : unit.stop] != ABSENT
        wanted = held if rows is None else held & rows
        complete = True
        for low, high in self._spans(node_index, unit.start, wanted):
            for first, last in self._alike(unit, shard, low, high):
                complete &= self._request(unit, shard, first, last, node, int(location[unit.start + first]))
        absent = ~held if rows is None else rows & ~held
        return complete if not absent.any() else self._absent(unit, shard, absent)

    def take(self, unit: Unit, shard: int, low: int, span: Span, landing: Landing, *, here: bool) -> Request | None:
        """Rows from `low` on of a shard were asked for before there were units: they are in hand, or on their way."""
        high = low + span.count
        self._taken.setdefault(unit, set()).add(shard)
        if here:
            unit.state[shard, low:high] = Shard.HAVE
            return None
        return self._under_way(unit, shard, low, high, span, landing)

    def take_parity(self, unit: Unit, start: int, shard: int, buffer: bytearray) -> bool:
        """Where a parity shard of the blocks from `start` on was asked to land, if a unit took it from there."""
        if start != unit.start or shard not in self._taken.get(unit, ()):
            return False
        self._parity[unit.start, shard] = buffer
        return True

    def ask_beside_taken(self) -> None:
        """Ask for the rows of taken shards that were not taken."""
        for unit, shards in self._taken.items():
            for shard in shards:
                state = unit.state[shard]
                if (state == Shard.HAVE).all():
                    unit.whole.add(shard)
                    continue
                unit.piecemeal |= bool((state == Shard.HAVE).any())
                if (state == Shard.UNASKED).any():
                    self.ask(unit, shard, state == Shard.UNASKED)
        self._taken.clear()

    def ask_again(self, requests: Sequence[Request]) -> None:
        """Whoever was asked for these sends no more: what has not landed and is still wanted is read."""
        for request in requests:
            if not request.landing.revoked:
                self._queue.setdefault(request.unit.node_of(request.shard), []).append(request)
        self.flush()

    def move(self, unit: Unit, shard: int, row: int, location: int, generation: int) -> None:
        """Ask one shard of one block again, at the place to which its record has moved."""
        node_index = unit.node_of(shard)
        block = unit.start + row
        self.pins.location[node_index, block] = location
        self.pins.generation[node_index, block] = generation
        self._linked[node_index, max(0, block - 1) : block + 1] = False
        unit.contiguous[node_index] = ABSENT
        rows = np.zeros(unit.stop - unit.start, np.bool_)
        rows[row] = True
        self.ask(unit, shard, rows)

    def _absent(self, unit: Unit, shard: int, rows: NDArray[np.bool_]) -> bool:
        unit.state[shard, rows] = Shard.LOST
        unit.losses = True
        self.tally.missing += int(np.count_nonzero(rows))
        return False

    def _spans(self, node_index: int, start: int, wanted: NDArray[np.bool_]) -> Iterator[tuple[int, int]]:
        """Stretches of wanted rows whose slots are neighbours."""
        for low, high in stretches(wanted):
            broken = np.flatnonzero(~self._linked[node_index, start + low : start + high - 1])
            cuts = [low, *(int(at) + low + 1 for at in broken), high]
            yield from pairwise(cuts)

    def _alike(self, unit: Unit, shard: int, low: int, high: int) -> Iterator[tuple[int, int]]:
        """Rows [low, high) as they are where no segment that the shard is in is good, else row by row."""
        again = unit.piecemeal and shard < DATA_SHARDS
        if again and self.good[self._segments_of[shard], unit.start + low : unit.start + high].any():
            return pairwise(range(low, high + 1))
        return iter([(low, high)])

    def settled(self, unit: Unit, shard: int, row: int) -> bool:
        """Whether all that a block has of a data shard stands in segments that are good."""
        return shard < DATA_SHARDS and bool(self.good[self._segments_of[shard], unit.start + row].all())

    def _request(self, unit: Unit, shard: int, low: int, high: int, node: Node, location: int) -> bool:
        span = Span(location, high - low, self._shard_bytes, self._slot_bytes)
        try:
            landing = self._landing(unit, shard, low)
            if node.read_now(span, landing):
                unit.state[shard, low:high] = Shard.HAVE
                return True
        except EfsError:
            unit.state[shard, low:high] = Shard.LOST
            unit.losses = True
            self.tally.missing += high - low
            return False
        request = self._under_way(unit, shard, low, high, span, landing)
        self._queue.setdefault(node.node_index, []).append(request)
        return False

    def _under_way(self, unit: Unit, shard: int, low: int, high: int, span: Span, landing: Landing) -> Request:
        unit.state[shard, low:high] = Shard.PENDING
        request = Request(unit, shard, low, high, span, landing)
        unit.flying += 1
        unit.piecemeal |= high - low < unit.stop - unit.start
        self._flying.setdefault(unit, []).append(request)
        return request

    def _landing(self, unit: Unit, shard: int, low: int) -> Landing:
        if shard < DATA_SHARDS:
            block = unit.start + low
            again = self._segments_of[shard] if unit.piecemeal else ()
            return self.target.landing(shard, block, [segment for segment in again if self.good[segment, block]])
        return parity_landing(self._parity_buffer(unit, shard), low, self._shard_bytes)

    def _parity_buffer(self, unit: Unit, shard: int) -> bytearray:
        buffer = self._parity.get((unit.start, shard))
        if buffer is None:
            buffer = self._parity[unit.start, shard] = self.context.scratch.take(
                self._shard_bytes * (unit.stop - unit.start)
            )
        return buffer

    def _parity_rows(self, unit: Unit, shard: int) -> NDArray[np.uint8]:
        buffer = np.frombuffer(self._parity_buffer(unit, shard), np.uint8)
        return buffer.reshape(unit.stop - unit.start, self._shard_bytes)

    def _store_shown(self, unit: Unit, first: int, last: int) -> None:
        """Copy rows [first, last) of everything that nodes show."""
        for shard, view in self._shown:
            if shard < DATA_SHARDS:
                self.target.store_slots(shard, unit.start + first, view[first:last])
            else:
                self._parity_rows(unit, shard)[first:last] = view[first:last, : self._shard_bytes]
        if last == unit.stop - unit.start:
            self._shown.clear()

    @property
    def queued(self) -> int:
        """Requests that `flush` would hand over."""
        return sum(map(len, self._queue.values()))

    def flush(self) -> None:
        """Hand what is queued to the nodes' threads: one batched request a node."""
        queue, self._queue = self._queue, {}
        for node_index, requests in queue.items():
            task = asyncio.ensure_future(self._serve(node_index, requests))
            for keeper in (self._tasks, self.context.background):
                keeper.add(task)
                task.add_done_callback(keeper.discard)

    async def _serve(self, node_index: int, requests: Sequence[Request]) -> None:
        node = self.context.nodes[node_index]
        assert node is not None
        spans = [(request.span, request.landing) for request in requests]
        try:
            await node.read(spans, lambda index: self.landed(requests[index]), self.deadline)
        except EfsError:
            for request in requests:
                self._lose(request)
        finally:
            self.event.set()

    def _lose(self, request: Request) -> None:
        state = request.unit.state[request.shard, request.low : request.high]
        waiting = state == Shard.PENDING
        if not self._end(request) or not waiting.any():
            return
        state[waiting] = Shard.LOST
        request.unit.losses = True
        self.stirred.add(request.unit)
        self.tally.missing += int(np.count_nonzero(waiting))

    @staticmethod
    def _end(request: Request) -> bool:
        """Nothing more may land for a request; False when that was so before."""
        if request.landing.revoked:
            return False
        request.landing.revoked = True
        request.unit.flying -= 1
        return True

    def landed(self, request: Request) -> None:
        """The bytes of a request are in their places."""
        unit, shard = request.unit, request.shard
        now = self.context.clock.monotonic()
        unit.state[shard, request.low : request.high] = Shard.HAVE
        self._end(request)
        lag = 0.0 if unit.late_from is None else now - unit.late_from
        self.context.lags.observe(unit.node_of(shard), lag, now)
        if request.high - request.low == unit.stop - unit.start:
            unit.whole.add(shard)
        for segment in self._segments_of[shard]:
            if unit.piecemeal:
                self.verify_ready(unit, segment)
            elif unit.whole >= self._shards_of[segment]:
                self._verify(unit, segment, 0, unit.stop - unit.start)
                self._close_rows(unit)
                self.event.set()
        if unit.piecemeal or unit.flying <= STRIPE_SHARDS - DATA_SHARDS:
            # With more under way no block has ten shards, and no lag grace begins.
            self.stirred.add(unit)
            self.event.set()

    # -- verifying ------------------------------------------------------------------------------------------------

    def ensure(self, unit: Unit, segment: int) -> None:
        """First pass over one segment of a unit: ask its shards, verify; where one is lost take the unit whole."""
        shards = self.target.shape.segment_shards[segment]
        complete = sum(self._ask_once(unit, shard) for shard in shards) == len(shards)
        if complete:
            agreed = self._land_and_verify(unit, segment)
        if segment == len(self.good) - 1:
            self._ask_rest(unit)
        if complete:
            # At the last segment in any case: earlier ones may have come from the nodes' threads meanwhile.
            if not agreed or segment == len(self.good) - 1:
                self._close_rows(unit)
            return
        self._store_shown(unit, 0, unit.stop - unit.start)
        if unit.piecemeal or unit.losses:
            self.verify_ready(unit, segment)
        if unit.losses and (unit.state[list(shards)] == Shard.LOST).any():
            self._ask_rest(unit)
            self.advance(unit)

    def _land_and_verify(self, unit: Unit, segment: int) -> bool:
        """All rows of a segment whose shards are in hand or shown, a chunk at a time; whether all of them agreed."""
        rows = unit.stop - unit.start
        step = max(1, VERIFY_CHUNK_BYTES // self.target.shape.segment_bytes[segment]) if self._shown else rows
        agreed = True
        for low in range(0, rows, step):
            high = min(low + step, rows)
            self._store_shown(unit, low, high)
            agreed &= self._verify(unit, segment, low, high)
        return agreed

    def _ask_once(self, unit: Unit, shard: int) -> bool:
        """Ask a shard that was not asked yet. True when every row of it is in hand."""
        if shard in unit.whole:
            return True
        if unit.state[shard, 0] != Shard.UNASKED or not self._ask(unit, shard):
            return False
        unit.whole.add(shard)
        return True

    def _ask_rest(self, unit: Unit) -> None:
        for shard in unit.first_asked:
            self._ask_once(unit, shard)
        self._store_shown(unit, 0, unit.stop - unit.start)

    def verify_ready(self, unit: Unit, segment: int, only: int | None = None) -> None:
        """Verify the rows of a segment, or only one of them, whose shards are all in hand and that are not good yet."""
        shards = list(self.target.shape.segment_shards[segment])
        ready = unit.open & (unit.state[shards] == Shard.HAVE).all(axis=0)
        ready &= ~self.good[segment, unit.start : unit.stop]
        if only is not None:
            ready &= np.arange(len(ready)) == only
        for low, high in stretches(ready):
            self._verify(unit, segment, low, high)
        self._close_rows(unit)

    def _verify(self, unit: Unit, segment: int, low: int, high: int) -> bool:
        """Hash one segment of rows [low, high) in place, unless all are good; rows that disagree become suspects. True
        when all agreed."""
        start, stop = unit.start + low, unit.start + high
        if self.good[segment, start:stop].all():
            return True
        found = self.target.segment_hashes(segment, start, stop)
        expected = self.expected[segment][start:stop]
        if found == expected:
            self.good[segment, start:stop] = True
            return True
        for row, (one, other) in enumerate(zip(found, expected, strict=True), low):
            if one == other:
                self.good[segment, unit.start + row] = True
            else:
                self.suspects[unit, row] = None
        return False

    def disagrees(self, unit: Unit, row: int) -> bool:
        """Whether a segment of a block is all in hand and not what its header says. A suspect that was examined while
        more of its block landed may be in `suspects` once more, and the doubt be over."""
        block = unit.start + row
        return any(not self.good[segment, block] and (unit.state[list(shards), row] == Shard.HAVE).all()
                   for segment, shards in enumerate(self.target.shape.segment_shards))

    def _close_rows(self, unit: Unit) -> None:
        done = self.good[:, unit.start : unit.stop].all(axis=0) | self.dead[unit.start : unit.stop]
        unit.open &= ~done
        if not unit.open.any():
            self._give_parity(unit)

    def kill(self, unit: Unit, rows: NDArray[np.bool_]) -> None:
        """Give blocks up: a miss for this call."""
        self.dead[unit.start : unit.stop] |= rows & unit.open
        self._close_rows(unit)

    # -- rebuilding -----------------------------------------------------------------------------------------------

    def advance(self, unit: Unit) -> float | None:
        """Do what the unit's decision says until it asks for nothing more; returns when to look again, or None."""
        self.stirred.discard(unit)
        while unit.open.any():
            now = self.context.clock.monotonic()
            unit.note_arrival(now)
            decision = unit.decide(now, self.context.lags)
            if decision.dead.any():
                self.kill(unit, decision.dead)
            if decision.rebuild.any():
                self._rebuild(unit, decision.rebuild, now)
                continue
            if not decision.ask or not self._ask_more(unit, decision.ask, decision.speculative):
                return decision.wake_at
        return None

    def _ask_more(self, unit: Unit, shards: Sequence[int], speculative: bool) -> bool:
        for shard in shards:
            rows = unit.open & (unit.state[shard] == Shard.UNASKED)
            count = int(np.count_nonzero(rows))
            if speculative:
                if not self.context.budget.spend(count):
                    return False
                self.tally.hedged += count
            self.ask(unit, shard, rows)
        return True

    def _rebuild(self, unit: Unit, rows: NDArray[np.bool_], now: float) -> None:
        """Rebuild the missing data shards of these rows from ten that are in hand, then verify what they touch."""
        unit.piecemeal = True
        self._revoke(unit, rows, now)
        have = unit.state == Shard.HAVE
        pattern = (have * (1 << np.arange(STRIPE_SHARDS))[:, None]).sum(axis=0)
        for low, high in stretches(rows):
            cuts = [low, *(int(cut) + low + 1 for cut in np.flatnonzero(np.diff(pattern[low:high]))), high]
            for first, last in pairwise(cuts):
                self._rebuild_rows(unit, first, last, [int(s) for s in np.flatnonzero(have[:, first])])
        for segment in range(len(self.good)):
            self.verify_ready(unit, segment)

    def _revoke(self, unit: Unit, rows: NDArray[np.bool_], now: float) -> None:
        """Nothing in flight may land on these rows any more; rows of the same requests that still wait ask again."""
        for request in tuple(self._flying.get(unit, ())):
            if request.landing.revoked:
                continue
            inside = np.zeros(len(rows), np.bool_)
            inside[request.low : request.high] = True
            if not (inside & rows).any():
                continue
            self._end(request)
            if unit.late_from is not None:
                self.context.lags.observe(unit.node_of(request.shard), now - unit.late_from, now)
            unit.state[request.shard, inside] = Shard.LOST
            again = inside & ~rows & unit.open
            if again.any():
                self.ask(unit, request.shard, again)

    def _rebuild_rows(self, unit: Unit, low: int, high: int, have: Sequence[int]) -> None:
        start, stop = unit.start + low, unit.start + high
        sources = have[:DATA_SHARDS] if unit.rebuilds % 2 == 0 else have[-DATA_SHARDS:]
        wanted = [shard for shard in range(DATA_SHARDS) if shard not in have]
        present = {shard: self._rows_of(unit, shard, low, high) for shard in sources}
        targets = {shard: self.target.wanted_rows(shard, start, stop) for shard in wanted}
        self.context.codec.rebuild(present, targets)
        for shard, rows in targets.items():
            self.target.store_rows(shard, start, stop, rows, self.good[:, start:stop])
            unit.state[shard, low:high] = Shard.HAVE
            unit.computed[shard, low:high] = True
        self.tally.rebuilt[start:stop] = True

    def _rows_of(self, unit: Unit, shard: int, low: int, high: int) -> NDArray[np.uint8]:
        if shard < DATA_SHARDS:
            return self.target.shard_rows(shard, unit.start + low, unit.start + high)
        return self._parity_rows(unit, shard)[low:high]

    def payload_rows(self, unit: Unit, shard: int, row: int) -> NDArray[np.uint8]:
        """The bytes of one shard of one block as they are in hand, (1, shard_bytes)."""
        return self._rows_of(unit, shard, row, row + 1)

    # -- the end --------------------------------------------------------------------------------------------------

    def _give_parity(self, unit: Unit) -> None:
        for request in self._flying.pop(unit, ()):
            self._end(request)
        for shard in range(DATA_SHARDS, STRIPE_SHARDS):
            buffer = self._parity.pop((unit.start, shard), None)
            if buffer is not None:
                self.context.scratch.give(buffer)

    def abandon(self) -> None:
        """Revoke everything that could still land and stop waiting for it."""
        for requests in self._flying.values():
            for request in requests:
                self._end(request)
        self._flying.clear()
        self._queue.clear()
        for task in self._tasks:
            task.cancel()
        for buffer in self._parity.values():
            self.context.scratch.give(buffer)
        self._parity.clear()
