"""What a directory node knows in memory, and the changes to it that need no waiting. Belongs to the loop's thread.

Memory is changed first where something goes away and last where something comes: `forget` takes records out of the hot
map, the table, the allocator and the accounts before any job is submitted, so that nobody finds them any more; `keep`
puts records in after their job succeeded. What the disk has to be told of a forgotten record (its table entry must be
zeroed, its index entry deleted) is part of the job that reuses its space. When a job fails, that debt is *owed*: it
goes with the next job, filtered by what has happened since. A node that closes without debt is marked clean.

*In transit.* Between the commit of an index entry and the moment in which its job's result is applied here, index and
memory disagree rightfully. `coming` and `leaving` hold the index keys for which that is so; any other disagreement is
a stale index entry: counted, and owed for deletion.

*Look-ups in flight.* A look-up reads the index on another thread; keys that change meanwhile are recorded in every
`Resolution` that is running, which then looks again.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from efs.allocator import FREE, LIVE, Allocator
from efs.eviction import Eviction
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry, SlotClass, ranges_of
from efs.gc import Horizon, ties_of
from efs.hotmap import HotMap
from efs.index import Index, IndexEntry
from efs.limits import DELETE_BATCH, KEY_BYTES
from efs.metrics import CounterFile
from efs.nodedir import GENERATION_BITS, BootRecord, NodeConfig
from efs.slab import Slab
from efs.stamps import Stamps
from efs.tables import Table, Tables, stretches_of
from efs.writejob import Entries, Records, Slots

Locations = NDArray[np.int64]


@dataclass(slots=True)
class Resolution:
    """A look-up that is running: what it found, and the keys that changed since it last asked the index."""

    found: dict[bytes, tuple[int, ...]] = field(default_factory=dict)
    changed: set[bytes] = field(default_factory=set)


@dataclass(slots=True)
class NodeState:
    """All parts of an open node that are not threads."""

    config: NodeConfig
    boot: BootRecord
    slab: Slab
    index: Index
    allocator: Allocator
    stamps: Stamps
    eviction: Eviction
    tables: Tables
    counters: CounterFile
    unverified: int
    hot: HotMap = field(default_factory=HotMap)
    coming: dict[bytes, asyncio.Future[None]] = field(default_factory=dict)
    leaving: set[bytes] = field(default_factory=set)
    renewing: Counter[bytes] = field(default_factory=Counter)
    """Index keys of records that puts have found here and whose new arrival is on its way to disk and table."""
    buried: set[int] = field(default_factory=set)
    """Tenant tags, as little-endian words, of which nothing is held or taken in any more."""
    horizons: dict[SlotClass, Horizon] = field(default_factory=dict)
    resolutions: list[Resolution] = field(default_factory=list)
    owed_entries: dict[bytes, IndexEntry] = field(default_factory=dict)
    owed_slots: set[int] = field(default_factory=set)
    owed_restores: set[int] = field(default_factory=set)
    """Live slots whose entries on disk may be torn; the tables of their extents are pinned in `_restoring`."""
    unformatted: dict[int, int] = field(default_factory=dict)
    """Extents given to a class in memory whose format is not known to be on disk, with a number for each giving."""
    allocated: set[int] = field(default_factory=set)
    """Extents that occupy their space in the file system, free ones included."""
    unsettled: bool = False
    """Whether the disk may differ from memory in a way that only the next opening can mend."""
    _restoring: dict[int, Table] = field(default_factory=dict)
    _used_generations: int = 0
    _formats: int = 0

    # -- generations and classes

    def next_generations(self, count: int) -> NDArray[np.uint64]:
        """(count,) generations, greater than all given out before."""
        first = (self.boot.boots << GENERATION_BITS) + self._used_generations + 1
        self._used_generations += count
        return np.arange(first, first + count, dtype=np.uint64)

    def begin_extent(self, extent: int, slot_class: SlotClass) -> None:
        """A free extent was given to a class by the allocator: an empty table, no stamps, to be formatted."""
        geometry = self.allocator.geometry_for(slot_class)
        self.tables.add_empty(extent, geometry)
        self.stamps.attach(extent, geometry)
        self._formats += 1
        self.unformatted[extent] = self._formats

    def end_extent(self, extent: int) -> None:
        """Take an extent from its class. Its records must have been forgotten."""
        self.allocator.unassign(extent)
        self.tables.remove(extent)
        self.stamps.detach(extent)
        self.unformatted.pop(extent, None)
        self.owed_slots = {location for location in self.owed_slots if location >> SLOT_BITS != extent}

    def geometry_of(self, location: int, slot_bytes: int, count: int) -> Geometry | None:
        """Geometry of the extent of a range of slots; None when it has no such slots (any more)."""
        extent = location >> SLOT_BITS
        if not 0 <= extent < self.allocator.extents:
            return None
        geometry = self.allocator.geometry(extent)
        if geometry is None or geometry.slot_class.slot_bytes != slot_bytes:
            return None
        return geometry if (location & SLOT_MASK) + count <= geometry.slots else None

    def exists(self, locations: Locations) -> NDArray[np.bool_]:
        """(n,) whether each location is a live slot."""
        live: NDArray[np.bool_] = self.allocator.states(locations) == LIVE
        return live

    # -- records come and go

    def forget(self, locations: Locations) -> list[IndexEntry]:
        """Records go away, from memory. Their tables must be in memory and the slots live; the slots become free.
        Returns the index entries to delete, which are `leaving` until `gone` or `owe`."""
        entries: list[IndexEntry] = []
        for part in stretches_of(locations >> SLOT_BITS):
            entries += self._forget_in(locations[part])
        self.allocator.release(locations)
        self.leaving.update(entry.index_key for entry in entries)
        return entries

    def _forget_in(self, locations: Locations) -> list[IndexEntry]:
        table = self.table(int(locations[0]) >> SLOT_BITS)
        slots = locations & SLOT_MASK
        table.check(slots)
        valid = table.look["generation"][slots] != 0
        if not valid.all():
            # A damaged entry does not tell its key, so its index entry is found at the next opening only.
            self.unsettled = True
        slots, locations = slots[valid], locations[valid]
        rows, looks = table.rows(slots), table.look[slots]
        names = np.concatenate((rows["key"], rows["digest"]), axis=1).astype("<u8")
        index_keys = [name.tobytes() for name in names]
        places = locations.tolist()
        keys = [name[:KEY_BYTES] for name in index_keys]
        self.hot.forget_all(keys, places)
        self.note_changes(keys)
        self.unverified -= int(np.count_nonzero(looks["boot_epoch"] < self.boot.unverified_below))
        table.clear(slots)
        return [IndexEntry(*fields) for fields in zip(index_keys, places, looks["generation"].tolist(), strict=True)]

    def keep(self, parts: Sequence[Records], entries: Sequence[NDArray[np.uint8]], stamp: int) -> None:
        """Records are stored in reserved slots: each part's valid entries, (n, entry bytes), of this boot's epoch."""
        if not parts:
            return
        depths, ties, tags = [], [], []
        for part, raw in zip(parts, entries, strict=True):
            table = self.table(part.location >> SLOT_BITS)
            first = part.location & SLOT_MASK
            table.fill(first, raw)
            rows = table.entries[first : first + part.count]
            depths.append(rows["depth"])
            ties.append(ties_of(rows["key"], rows["digest"]))
            tags.append(np.array(rows["tenant_tag"]))
        locations = np.concatenate([part.locations() for part in parts])
        self.allocator.mark_live(locations, np.concatenate(tags))
        self.stamps.set(locations, stamp)
        self.eviction.note(locations, np.concatenate(depths), np.concatenate(ties))
        names = [name[:KEY_BYTES] for part in parts for name in part.index_keys]
        self.hot.add_all(names, locations.tolist())
        self.note_changes(names)

    def note_evicted(self, slot_class: SlotClass, highest: int, minute: int) -> None:
        """Records of a class were evicted in order, the hottest of them with this order key."""
        self.horizons[slot_class] = self.horizons.get(slot_class, Horizon()).note(highest, minute)

    def watch(self) -> Resolution:
        """Begin to record which keys change; ends with `unwatch`."""
        resolution = Resolution()
        self.resolutions.append(resolution)
        return resolution

    def unwatch(self, resolution: Resolution) -> None:
        self.resolutions = [running for running in self.resolutions if running is not resolution]

    def free_torn(self, location: int) -> None:
        """The index led to a slot whose entry is damaged: there is no record, so the slot is free."""
        place, slot = np.array([location]), location & SLOT_MASK
        table = self.tables.get(location >> SLOT_BITS)
        if table is None or self.allocator.states(place)[0] != LIVE:
            return
        if table.checked[slot] and not table.look["generation"][slot]:
            table.clear(np.array([slot]))
            self.allocator.release(place)
            self.owe((), (Slots(table.geometry, location, 1),))

    def note_changes(self, keys: Iterable[bytes]) -> None:
        """What is held of these keys changed: look-ups that are running look again."""
        if self.resolutions:
            for key in keys:
                for resolution in self.resolutions:
                    resolution.found.pop(key, None)
                    resolution.changed.add(key)

    def table(self, extent: int) -> Table:
        """The table of an extent that is known to be in memory."""
        table = self.tables.get(extent)
        assert table is not None, f"the table of extent {extent} is not in memory"
        return table

    # -- debts

    def gone(self, entries: Iterable[IndexEntry]) -> None:
        """Index entries were deleted. A look-up that read the index before that looks again."""
        for entry in entries:
            self.leaving.discard(entry.index_key)
            self.note_changes((entry.index_key[:KEY_BYTES],))

    def owe(self, entries: Iterable[IndexEntry], cleared: Iterable[Slots]) -> None:
        """A job failed or was never made: these index entries may still be there, and these table entries not
        zeroed."""
        for entry in entries:
            self.owed_entries[entry.index_key] = entry
            self.leaving.add(entry.index_key)
        for slots in cleared:
            extent = slots.location >> SLOT_BITS
            if extent in self.unformatted or self.allocator.geometry(extent) != slots.geometry:
                # The extent was taken from these records; they stand on disk until it is formatted.
                self.unsettled = True
            else:
                self.owed_slots.update(range(slots.location, slots.location + slots.count))

    def owe_restores(self, locations: Iterable[int]) -> None:
        """Rewriting these records' entries failed: their tables in memory are right, those on disk may be torn."""
        for location in locations:
            extent = location >> SLOT_BITS
            table = self.tables.get(extent)
            if table is not None and self.exists(np.array([location]))[0]:
                self.owed_restores.add(location)
                if extent not in self._restoring:
                    self._restoring[extent] = table
                    table.pins += 1

    def take_restores(self) -> list[Entries]:
        """Entries that the next job should write again. The caller pins their tables before it awaits."""
        slots = np.array(sorted(self.owed_restores), np.int64)
        ranges = []
        for _, location, count in ranges_of(slots[self.exists(slots)]):
            table, first = self.table(location >> SLOT_BITS), location & SLOT_MASK
            ranges.append(Entries(table.geometry, location, table.raw[first : first + count].copy()))
        for table in self._restoring.values():
            table.pins -= 1
        self._restoring.clear()
        self.owed_restores.clear()
        return ranges

    def take_owed(self) -> tuple[list[IndexEntry], list[Slots]]:
        """What the next job should delete and zero for earlier ones; slots that were used since are left out."""
        entries = [self.owed_entries.pop(name) for name in list(self.owed_entries)[:DELETE_BATCH]]
        slots = np.array(sorted(self.owed_slots), np.int64)
        self.owed_slots.clear()
        slots = slots[self.allocator.states(slots) == FREE]
        ranges = []
        for _, location, count in ranges_of(slots):
            geometry = self.allocator.geometry(location >> SLOT_BITS)
            if geometry is not None and location >> SLOT_BITS not in self.unformatted:
                ranges.append(Slots(geometry, location, count))
        return entries, ranges

    def release_unformatted(self) -> None:
        """Take back extents that were given to a class and hold nothing, because the job that needed them failed."""
        for extent in list(self.unformatted):
            if not self.allocator.busy(extent) and not len(self.allocator.live_slots_of(extent)):
                self.end_extent(extent)

    @property
    def in_debt(self) -> bool:
        return self.unsettled or self.owes

    @property
    def owes(self) -> bool:
        """Whether a job would have something to do for earlier ones."""
        return bool(self.owed_entries) or bool(self.owed_slots) or bool(self.owed_restores)
