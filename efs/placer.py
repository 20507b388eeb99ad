"""Finding slots for new records: free ones first, then those of the coldest records. Belongs to the loop's thread.

One placement runs at a time, because eviction has to wait for tables of its victims and two of them would choose the
same ones. A placement holds its slots reserved and the tables of their extents pinned; it ends in a job, or is
abandoned, and then what was evicted for it stays evicted and the disk is told by a later job.

*Evicting for a put.* The collector (`efs/collector.py`) keeps space free ahead of puts; a put evicts only where it
finds no free slot, or where the node would be above its reject mark. It then takes victims from a `Queue` of the
coldest records, of its own class when it needs slots, of any class when the node is too full, and `efs.gc.admit` says
which of its records get in: a put never drops a hotter record for a colder one. Deletes come in batches:
EVICT_AT_ONCE records or a 32nd of the class go together if they are colder than all that comes. A record of repair
also stays out when it is at or below the eviction horizon of its class. Taking an extent from another class moves no
horizon: what it drops says nothing about what is cold there.

Where a put finds too little to evict because the rest is in flight, it waits until a job has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.allocator import SlotRange
from efs.clock import Deadline
from efs.eviction import Piece, Queue, Snapshot, Victims, choose, slot_share
from efs.extent import SLOT_BITS, SlotClass, ranges_of
from efs.fill import Fill
from efs.gc import admit, bar, order_keys
from efs.index import IndexEntry
from efs.iothread import pass_on
from efs.limits import DELETE_BATCH, MAX_PROBE_BACKOFF_MS, PROBE_BACKOFF_MS
from efs.lookups import Lookups
from efs.nodeguard import Guard
from efs.nodestate import Locations, NodeState
from efs.tables import Table
from efs.writejob import Slots

EVICT_AT_ONCE: Final = DELETE_BATCH // 2
QUEUE_RECORDS: Final = 4_096
"""Victims chosen together for puts: choosing costs as much for one as for all of them."""
SNAPSHOT_EXTENTS: Final = 32
"""Extents copied before others get a turn of the loop."""
_SHARE_AT_ONCE: Final = 32


@dataclass(frozen=True)
class Newcomers:
    """Records that want slots of a class, in the order in which they should lie. ranks: (n,) uint64 and ties: (n,)
    uint32, as of `efs.gc.Records`. repair: they were rebuilt, and must not come back where they were given up."""

    slot_class: SlotClass
    ranks: NDArray[np.uint64]
    ties: NDArray[np.uint32]
    repair: bool = False

    def __len__(self) -> int:
        return len(self.ranks)

    @cached_property
    def keys(self) -> list[int]:
        """Their order keys; a node with room for all of them never asks."""
        return order_keys(self.ranks, self.ties)


@dataclass(frozen=True, slots=True)
class Lack:
    """What is missing: of a class, or with a scope of None of all together. amount: what must be freed. size: what one
    newcomer is in that unit, 1 where records are counted. records: how many victims that may take at most."""

    scope: SlotClass | None
    amount: int
    size: int
    records: int


@dataclass(slots=True)
class Placement:
    """Reserved slots in the order in which records should fill them, and what was evicted for them.

    rows: those of the newcomers that get the slots, ascending. too_cold: whether others stay out because something is
    held that is hotter, or was evicted lately.
    """

    rows: list[int] = field(default_factory=list)
    too_cold: bool = False
    ranges: list[SlotRange] = field(default_factory=list)
    evicted: list[IndexEntry] = field(default_factory=list)
    cleared: list[Slots] = field(default_factory=list)
    taken: set[int] = field(default_factory=set)
    pinned: list[Table] = field(default_factory=list)

    @property
    def count(self) -> int:
        return sum(slots.count for slots in self.ranges)

    def pin(self, tables: list[Table]) -> None:
        for table in tables:
            table.pins += 1
        self.pinned += tables

    def unpin(self) -> None:
        for table in self.pinned:
            table.pins -= 1
        self.pinned.clear()


class Placer:
    """Slots of one node."""

    def __init__(self, state: NodeState, guard: Guard, lookups: Lookups, fill: Fill) -> None:
        self._state = state
        self._guard = guard
        self._lookups = lookups
        self._fill = fill
        self._turn = asyncio.Lock()
        self._settled = asyncio.Event()
        self._no_space_until = 0.0
        self._no_space_ms = PROBE_BACKOFF_MS
        self._queues: dict[SlotClass | None, Queue] = {}

    def no_space(self) -> None:
        """The file system has no space for another extent: use those that there are for a while, longer each time."""
        self._no_space_until = self._guard.clock.monotonic() + self._no_space_ms / 1000
        self._no_space_ms = min(2 * self._no_space_ms, MAX_PROBE_BACKOFF_MS)

    def grew(self, extents: Iterable[int]) -> None:
        """Extents were formatted: they occupy their space from now on."""
        self._state.allocated.update(extents)
        self._no_space_ms = PROBE_BACKOFF_MS

    async def place(self, newcomers: Newcomers, deadline: Deadline) -> Placement:
        """Reserve slots for those of the newcomers that get in."""
        async with self._one_at_a_time(deadline) as placement:
            await self._admit(placement, newcomers, deadline)
            self._reserve(placement, newcomers.slot_class)
            await self._pin(placement, deadline)
        return placement

    async def evict(self, locations: Locations, ranks: NDArray[np.uint64], deadline: Deadline) -> Placement:
        """Only evict: those of the records that still have these ranks. The placement has no ranges, and its job must
        be submitted before anything else is awaited."""
        async with self._one_at_a_time(deadline) as placement:
            await self._drop(placement, locations, ranks, deadline)
        return placement

    async def choose(self, slot_class: SlotClass | None, amount: int, by_count: bool, deadline: Deadline) -> Queue:
        """What to evict, of one class or of all, so that `amount` becomes free (`efs.eviction.choose`)."""
        allocator = self._state.allocator
        extents = (np.flatnonzero(allocator.live_counts) if slot_class is None
                   else allocator.extents_of(slot_class)).tolist()
        pieces: list[Piece] = []
        for start in range(0, len(extents), SNAPSHOT_EXTENTS):
            pieces += self._state.eviction.snapshot(extents[start : start + SNAPSHOT_EXTENTS]).pieces
            await asyncio.sleep(0)
        self._guard.require_serving()
        # On the writer thread, on which whoever asks depends anyhow: reads may hang.
        work = partial(choose, Snapshot(tuple(pieces)), amount, by_count=by_count)
        return await self._guard.result(self._guard.submit(self._guard.writer, work, pass_on), deadline)

    def settled(self) -> None:
        """A job ended: what was in flight can be evicted now."""
        self._settled.set()

    def abandon(self, placement: Placement) -> None:
        """Give the slots back; what was evicted is owed to the disk."""
        placement.unpin()
        for slots in placement.ranges:
            self._state.allocator.release_range(slots)
        placement.ranges.clear()
        self._state.owe(placement.evicted, placement.cleared)
        self._state.release_unformatted()

    @asynccontextmanager
    async def _one_at_a_time(self, deadline: Deadline) -> AsyncIterator[Placement]:
        """A placement that is abandoned when the work on it fails."""
        try:
            async with asyncio.timeout(deadline.left()):
                await self._turn.acquire()
        except TimeoutError as error:
            raise self._guard.unavailable("no answer by the deadline") from error
        placement = Placement()
        try:
            yield placement
        except BaseException:
            self.abandon(placement)
            raise
        finally:
            self._turn.release()

    # -- who gets in

    async def _admit(self, placement: Placement, newcomers: Newcomers, deadline: Deadline) -> None:
        """Decide which rows get in and evict until there is space for them."""
        rows = self._above_horizon(newcomers)
        bars: Sequence[int] | None = None
        if len(rows) < len(newcomers):
            placement.too_cold = True
            self._note_given_up([newcomers.keys[row] for row in set(range(len(newcomers))) - set(rows)])
        while rows:
            lack = self._lack(newcomers.slot_class, len(rows))
            if lack is None:
                break
            self._settled.clear()
            victims = await self._victims(lack.scope, max(lack.records, self._at_once(newcomers.slot_class)), deadline)
            if lack.scope is not None and await self._take_extent(placement, lack.scope, victims, deadline):
                continue
            if len(victims.keys) < lack.records and await self._something_ended(deadline):
                continue
            bars = bars or self._bars(newcomers)
            admission = admit([newcomers.keys[row] for row in rows], victims.keys, lack.amount,
                              bars=[bars[row] for row in rows], newcomer_size=lack.size,
                              held_sizes=self._sizes(lack, victims), at_once=self._at_once(newcomers.slot_class))
            if len(admission.rows) < len(rows) and admission.evicted < len(victims.keys):
                placement.too_cold = True
                self._note_given_up([newcomers.keys[row] for row in set(rows) - {rows[at] for at in admission.rows}])
            rows = [rows[at] for at in admission.rows]
            gone = slice(0, admission.evicted)
            await self._drop(placement, victims.locations[gone], victims.ranks[gone], deadline)
        placement.rows = rows

    def _bars(self, newcomers: Newcomers) -> list[int]:
        """What each counts as against records that are held."""
        kept = self._fill.kept(newcomers.slot_class)
        return newcomers.keys if newcomers.repair else [bar(key, kept) for key in newcomers.keys]

    def _above_horizon(self, newcomers: Newcomers) -> list[int]:
        horizon = self._state.horizons.get(newcomers.slot_class)
        if horizon is None or not newcomers.repair:
            return list(range(len(newcomers)))
        minute = self._minute()
        return [row for row, key in enumerate(newcomers.keys) if not horizon.too_cold(key, minute)]

    def _lack(self, slot_class: SlotClass, count: int) -> Lack | None:
        """What is missing for so many of the class: slots, or else space and index entries, wherever."""
        allocator = self._state.allocator
        free_extents = allocator.free_extents
        free_extents[self._without_space()] = False
        usable = allocator.free_slots(slot_class)
        usable += int(np.count_nonzero(free_extents)) * allocator.geometry_for(slot_class).slots
        if usable < count:
            return Lack(slot_class, count - usable, 1, count - usable)
        need = self._fill.short_of(slot_class, count)
        if need is None:
            return None
        if need.by_count:
            return Lack(None, need.amount, 1, need.amount)
        smallest = min(self._fill.share_of(each) for each in (slot_class, *allocator.classes()))
        records = min(-(-need.amount // smallest), allocator.live_slots)
        return Lack(None, need.amount, self._fill.share_of(slot_class), records)

    def _sizes(self, lack: Lack, victims: Victims) -> list[int] | None:
        """What each victim frees, in the unit of what is missing."""
        if lack.size == 1:
            return None
        allocator = self._state.allocator
        shares = {extent: slot_share(geometry) for extent in np.unique(victims.locations >> SLOT_BITS).tolist()
                  if (geometry := allocator.geometry(extent)) is not None}
        return [shares[extent] for extent in (victims.locations >> SLOT_BITS).tolist()]

    def _at_once(self, slot_class: SlotClass) -> int:
        allocator = self._state.allocator
        own = len(allocator.extents_of(slot_class)) * allocator.geometry_for(slot_class).slots
        return min(EVICT_AT_ONCE, own // _SHARE_AT_ONCE)

    async def _something_ended(self, deadline: Deadline) -> bool:
        """Wait for a job that has slots in flight. False when there is none, or it takes too long. Nothing else that is
        queued could give this put anything, nor would its end be noticed here."""
        if not self._state.allocator.busy_extents.any() or deadline.passed():
            return False
        try:
            async with asyncio.timeout(deadline.left()):
                await self._settled.wait()
        except TimeoutError:
            return False
        return True

    # -- evicting

    async def _victims(self, slot_class: SlotClass | None, count: int, deadline: Deadline) -> Victims:
        """The coldest records of a class, or of any, as many as there are up to `count`."""
        if self._state.allocator.classes() == (slot_class,):
            slot_class = None
        eviction, queue = self._state.eviction, self._queues.get(slot_class)
        victims = eviction.peek(queue, count) if queue is not None else None
        if victims is None or len(victims.keys) < count:
            queue = await self.choose(slot_class, max(count, QUEUE_RECORDS), True, deadline)
            self._queues[slot_class] = queue
            victims = eviction.peek(queue, count)
        return victims

    async def _take_extent(self, placement: Placement, slot_class: SlotClass, victims: Victims,
                           deadline: Deadline) -> bool:
        """Take an extent from another class, if that is colder than what this one has. False when not."""
        state = self._state
        coldest = victims.keys[0] >> 64 if victims.keys else None
        extent = state.eviction.extent_to_take(slot_class, coldest, placement.taken)
        if extent is None:
            return False
        locations = state.allocator.live_slots_of(extent) + (extent << SLOT_BITS)
        await self._drop(placement, locations, None, deadline)
        if self._emptied(extent):
            state.end_extent(extent)
            placement.taken.add(extent)
        return True

    async def _drop(self, placement: Placement, locations: Locations, ranks: NDArray[np.uint64] | None,
                    deadline: Deadline) -> None:
        """Take records out of memory: those that still have their rank, or with ranks of None all that still live."""
        state = self._state
        async for rows in self._lookups.with_tables(locations, deadline):
            mine = locations[rows]
            stand = state.exists(mine) if ranks is None else state.eviction.standing(mine, ranks[rows])
            self._forget(placement, np.sort(mine[stand]), moves_horizon=ranks is not None)

    def _forget(self, placement: Placement, locations: Locations, moves_horizon: bool) -> None:
        if not len(locations):
            return
        state = self._state
        keys = state.eviction.keys(locations)
        for row, location, count in ranges_of(locations):
            geometry = state.allocator.geometry(location >> SLOT_BITS)
            assert geometry is not None, "a live slot has a geometry"
            placement.cleared.append(Slots(geometry, location, count))
            if moves_horizon:
                state.note_evicted(geometry.slot_class, max(keys[row : row + count]), self._minute())
        state.counters.add("node_evicted", len(locations))
        self._note_given_up(keys)
        placement.evicted += state.forget(locations)

    def _note_given_up(self, keys: Sequence[int]) -> None:
        """For whoever finds that this node lacks a record (`efs/warmth.py`)."""
        self._state.counters.raise_to("node_evicted_stamp", max(keys) >> 64)

    def _emptied(self, extent: int) -> bool:
        allocator = self._state.allocator
        if allocator.geometry(extent) is None or allocator.busy(extent):
            return False
        return not len(allocator.live_slots_of(extent))

    def _minute(self) -> int:
        return int(self._guard.clock.wall()) // 60

    # -- slots

    def _without_space(self) -> list[int]:
        """Extents that must not be opened, because the file system had no space for one lately."""
        if self._guard.clock.monotonic() >= self._no_space_until:
            return []
        return [extent for extent in range(self._state.allocator.extents) if extent not in self._state.allocated]

    def _reserve(self, placement: Placement, slot_class: SlotClass) -> None:
        """Take free slots for all rows: gaps of a chunk and more first, so that runs stay together."""
        allocator = self._state.allocator
        exclude = self._without_space()
        left = len(placement.rows)
        for shortest in (allocator.geometry_for(slot_class).chunk_slots, 1):
            if not left:
                break
            allocation = allocator.allocate(slot_class, left, shortest=shortest, exclude=exclude)
            for extent in allocation.fresh:
                self._state.begin_extent(extent, slot_class)
            placement.ranges += allocation.ranges
            left = allocation.short

    async def _pin(self, placement: Placement, deadline: Deadline) -> None:
        """Have the tables of all ranges in memory, and keep them there."""
        wanted = sorted({slots.location >> SLOT_BITS for slots in placement.ranges})
        for extent in wanted:
            table = self._state.tables.get(extent)
            while table is None:
                await self._lookups.load((extent,), deadline)
                table = self._state.tables.get(extent)
            placement.pin([table])
