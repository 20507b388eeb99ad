"""Which slots of a node are free, in flight or live: one in-memory state, nothing on disk. Pure.

A slot is FREE, RESERVED (a put owns it, its record is not stored yet) or LIVE. The state array is the only source of
truth; the counters beside it change in the same call as the states, and `audit` recounts. After an open the tables fill
it (`assign`, then `mark_live`), never the index: a slot that the index forgot is thus never handed out while its
table entry still stands.

    allocate       FREE → RESERVED
    mark_live      RESERVED or FREE → LIVE
    release        RESERVED or LIVE → FREE

A transition from any other state is refused with InvalidArgument before anything changes.

*Tenants.* A live slot has the tenant tag of its record, a word of 8 bytes, 0 without a tenant. What each tag holds
(`tag_bytes`) changes in the same call as the states, so it cannot drift from them either.

*Placement.* `allocate` keeps a request together. Where a gap holds all that is left of it, it goes there: into the
extent whose longest gap is the shortest that suffices, there into the smallest such gap; a chunk or more starts on a
chunk border if that is possible. Else gaps of a chunk or more are filled, then free extents are opened, and the
remaining gaps come last; both go extent by extent, the one with the longest gap first, and in it by length. Ties go to
the lowest location.

Cost: a few vector operations over the extents of the node for each request, and one scan of each extent that changed.
Memory: nine bytes for each slot of an extent in use (rows are as long as the extent with most slots needs, but memory
that was never written is not backed).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from efs.errors import CorruptRecord, InvalidArgument
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry, SlotClass, location_of, require_extent_bytes
from efs.limits import MAX_EXTENTS

FREE: Final = 0
RESERVED: Final = 1
LIVE: Final = 2
_NO_CLASS: Final = -1
_Element = TypeVar("_Element", bound=np.generic)


@dataclass(frozen=True, slots=True)
class SlotRange:
    """`count` neighbouring slots of one extent from `location`."""

    location: int
    count: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Reserved slots of one request, in the order in which its records should fill them.

    fresh: extents that were free and now belong to the class in memory. On disk the caller must assign them
      (`Slab.assign`) before the first write, and before the write of any later request for them.
    short: slots that could not be had; evict and ask for them again.
    """

    ranges: tuple[SlotRange, ...]
    fresh: tuple[int, ...]
    short: int


@dataclass(frozen=True, slots=True)
class ClassUse:
    """Space of one class. Sizes in bytes of slots, without tables and header pages."""

    slot_class: SlotClass
    extents: int
    live_slots: int
    reserved_slots: int
    free_slots: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class _Gaps:
    """Maximal stretches of free slots of one extent, ascending."""

    starts: NDArray[np.int64]
    lengths: NDArray[np.int64]


class Allocator:
    """Slot states of all extents of a node."""

    def __init__(self, extent_bytes: int, extents: int) -> None:
        require_extent_bytes(extent_bytes)
        if not 0 < extents <= MAX_EXTENTS:
            raise InvalidArgument(f"extents is {extents}, must be 1 to {MAX_EXTENTS}")
        self.extent_bytes = extent_bytes
        self.extents = extents
        self._geometries: list[Geometry] = []
        self._class_numbers: dict[SlotClass, int] = {}
        self._class_of = np.full(extents, _NO_CLASS, np.int32)
        self._extents_of: dict[SlotClass, NDArray[np.int64]] = {}
        self._slots = np.zeros(extents, np.int64)
        self._live = np.zeros(extents, np.int64)
        self._reserved = np.zeros(extents, np.int64)
        self._states = np.zeros((extents, 0), np.uint8)
        self._tags = np.zeros((extents, 0), np.uint64)
        self._slot_bytes = np.zeros(extents, np.int64)
        self._tag_bytes: dict[int, int] = {}
        self._use: tuple[ClassUse, ...] | None = None
        self._gaps: dict[int, _Gaps] = {}
        self._stale = np.zeros(extents, np.bool_)
        self._longest = np.zeros(extents, np.int64)
        self._longest_aligned = np.zeros(extents, np.int64)

    # -- Extents

    def geometry(self, extent: int) -> Geometry | None:
        """None for a free extent."""
        number = int(self._class_of[self._checked(extent)])
        return None if number == _NO_CLASS else self._geometries[number]

    def geometry_for(self, slot_class: SlotClass) -> Geometry:
        """Geometry of a class on this node; InvalidArgument when its slots do not fit an extent."""
        return self._geometries[self._number(slot_class)]

    def extents_of(self, slot_class: SlotClass) -> NDArray[np.int64]:
        """Extents of a class, ascending; read-only."""
        mine = self._extents_of.get(slot_class)
        if mine is None:
            mine = _read_only(np.flatnonzero(self._class_of == self._class_numbers.get(slot_class, _NO_CLASS - 1)))
            self._extents_of[slot_class] = mine
        return mine

    def classes(self) -> tuple[SlotClass, ...]:
        """Classes that have an extent, in order."""
        return tuple(sorted(each for each in self._class_numbers if len(self.extents_of(each))))

    def assign(self, extent: int, slot_class: SlotClass) -> Geometry:
        """Give a free extent to a class, all slots free. InvalidArgument when it is not free."""
        if self.geometry(extent) is not None:
            raise InvalidArgument(f"extent {extent} is in use")
        number = self._number(slot_class)
        geometry = self._geometries[number]
        self._widen(geometry.slots)
        self._class_of[extent] = number
        self._extents_of.pop(slot_class, None)
        self._use = None
        self._slots[extent] = geometry.slots
        self._slot_bytes[extent] = slot_class.slot_bytes
        self._stale[extent] = True
        return geometry

    def unassign(self, extent: int) -> None:
        """Make an extent free, whatever is live in it. InvalidArgument while a slot of it is reserved."""
        if self.busy(extent):
            raise InvalidArgument(f"extent {extent} has slots in flight")
        held = self.live_slots_of(extent)
        self._count_tags(np.full(len(held), extent), held, -1)
        self._states[extent, : self._slots[extent]] = FREE
        if (geometry := self.geometry(extent)) is not None:
            self._extents_of.pop(geometry.slot_class, None)
        self._use = None
        self._class_of[extent] = _NO_CLASS
        self._slots[extent] = self._live[extent] = 0
        self._stale[extent] = True

    # -- Slots

    def allocate(
        self, slot_class: SlotClass, count: int, *, shortest: int = 1, exclude: Collection[int] = ()
    ) -> Allocation:
        """Reserve up to `count` slots. Gaps shorter than `shortest` serve only what fits into one as a whole; extents
        in `exclude` are left alone."""
        number = self._number(slot_class)
        chunk, shortest = self._geometries[number].chunk_slots, min(shortest, self._geometries[number].slots)
        allowed = np.ones(self.extents, np.bool_)
        allowed[list(exclude)] = False
        ranges: list[SlotRange] = []
        fresh: list[int] = []
        left = count
        while left > 0:
            mine = allowed & (self._class_of == number)
            self._refresh(mine)
            found = self._holding(mine, left, chunk) or self._longest_of(mine, left, max(chunk, shortest))
            if not found:
                opened = np.flatnonzero(allowed & (self._class_of == _NO_CLASS))[:1].tolist()
                if opened:
                    self.assign(opened[0], slot_class)
                    fresh += opened
                    continue
                found = self._longest_of(mine, left, shortest)
            if not found:
                break
            for taken in found:
                self._reserve(taken)
                left -= taken.count
            ranges += found
        return Allocation(tuple(ranges), tuple(fresh), max(left, 0))

    def mark_live(self, locations: NDArray[np.int64], tags: NDArray[np.uint64] | None = None) -> None:
        """RESERVED or FREE → LIVE. tags: (n,) tenant tags of the records, None when they have no tenant.
        InvalidArgument for a slot that is live, named twice, or does not exist."""
        self._move(locations, LIVE, tags)

    def release(self, locations: NDArray[np.int64]) -> None:
        """RESERVED or LIVE → FREE. InvalidArgument for a slot that is free, named twice, or does not exist."""
        self._move(locations, FREE)

    def release_range(self, slots: SlotRange) -> None:
        """`release` of neighbouring slots."""
        self.release(np.arange(slots.location, slots.location + slots.count, dtype=np.int64))

    def states(self, locations: NDArray[np.int64]) -> NDArray[np.uint8]:
        """(n,) FREE, RESERVED or LIVE; FREE also for a location that does not exist."""
        extents, slots, exist = self._split(locations)
        found = np.zeros(len(locations), np.uint8)
        found[exist] = self._states[extents[exist], slots[exist]]
        return found

    def tags(self, locations: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(n,) tenant tags of live slots; 0 for others."""
        extents, slots, exist = self._split(locations)
        found = np.zeros(len(locations), np.uint64)
        found[exist] = self._tags[extents[exist], slots[exist]]
        found[self.states(locations) != LIVE] = 0
        return found

    def row(self, extent: int) -> NDArray[np.uint8]:
        """(slots,) states of an extent, a read-only view; empty for a free extent."""
        return _read_only(self._states[extent, : self._slots[self._checked(extent)]])

    @property
    def busy_extents(self) -> NDArray[np.bool_]:
        """(extents,) whether a slot of the extent is reserved."""
        return self._reserved > 0

    @property
    def free_extents(self) -> NDArray[np.bool_]:
        """(extents,) whether the extent belongs to no class."""
        free: NDArray[np.bool_] = self._class_of == _NO_CLASS
        return free

    @property
    def live_counts(self) -> NDArray[np.int64]:
        """(extents,) live slots of each extent; read-only."""
        return _read_only(self._live)

    def live_slots_of(self, extent: int) -> NDArray[np.int64]:
        """Live slot numbers of an extent, ascending."""
        return np.flatnonzero(self.row(extent) == LIVE)

    def live_locations(self, extent: int, chunk: int) -> NDArray[np.int64]:
        """Live locations of one chunk, ascending."""
        geometry = self.geometry(extent)
        if geometry is None or not 0 <= chunk < geometry.chunks:
            raise InvalidArgument(f"extent {extent} has no chunk {chunk}")
        first = chunk * geometry.chunk_slots
        live = self._states[extent, first : first + geometry.chunk_slots] == LIVE
        return np.flatnonzero(live) + location_of(extent, first)

    def busy(self, extent: int) -> bool:
        """Whether a slot of the extent is reserved."""
        return bool(self._reserved[self._checked(extent)])

    # -- Accounting

    @property
    def live_slots(self) -> int:
        return int(self._live.sum())

    @property
    def live_bytes(self) -> int:
        """Bytes of live slots, the figure that watermarks count."""
        return sum(use.live_bytes for use in self.use())

    @property
    def extents_used(self) -> int:
        return int(np.count_nonzero(self._class_of != _NO_CLASS))

    def tag_bytes(self) -> dict[int, int]:
        """Bytes of live slots by tenant tag, of the tags that have any; they add up to `live_bytes`."""
        return dict(self._tag_bytes)

    def locations_of(self, tags: Collection[int], most: int) -> NDArray[np.int64]:
        """Live locations of records with one of these tenant tags, ascending, up to about `most`: extents are taken
        whole."""
        wanted = np.array([tag for tag in tags if tag in self._tag_bytes], np.uint64)
        found: list[NDArray[np.int64]] = []
        count = 0
        for extent in np.flatnonzero(self._live).tolist() if len(wanted) else ():
            held = self.live_slots_of(extent)
            held = held[np.isin(self._tags[extent, held], wanted)]
            if len(held):
                found.append(held + location_of(extent, 0))
                count += len(held)
            if count >= most:
                break
        return np.concatenate(found) if found else np.zeros(0, np.int64)

    def free_slots(self, slot_class: SlotClass) -> int:
        """Free slots in the extents of a class; free extents are not counted."""
        return next((use.free_slots for use in self.use() if use.slot_class == slot_class), 0)

    def use(self) -> tuple[ClassUse, ...]:
        """Space by class that has an extent, in order of class. Asked several times between two changes: counted
        once."""
        if self._use is None:
            self._use = tuple(self._use_of(slot_class) for slot_class in self.classes())
        return self._use

    def _use_of(self, slot_class: SlotClass) -> ClassUse:
        mine = self.extents_of(slot_class)
        live, reserved = int(self._live[mine].sum()), int(self._reserved[mine].sum())
        free = int(self._slots[mine].sum()) - live - reserved
        return ClassUse(slot_class, len(mine), live, reserved, free, live * slot_class.slot_bytes)

    def audit(self) -> None:
        """Recount everything from the states; CorruptRecord where a counter disagrees."""
        for extent in range(self.extents):
            row = self._states[extent]
            geometry = self.geometry(extent)
            counts = np.bincount(row, minlength=LIVE + 1)
            slots = 0 if geometry is None else geometry.slots
            if row[slots:].any() or len(counts) != LIVE + 1 or self._slots[extent] != slots:
                raise CorruptRecord(f"extent {extent}: a slot is in use that does not exist")
            if counts[RESERVED] != self._reserved[extent] or counts[LIVE] != self._live[extent]:
                raise CorruptRecord(f"extent {extent}: slot counters disagree with slot states")
        counted: dict[int, int] = {}
        for extent in np.flatnonzero(self._live).tolist():
            tags, counts = np.unique(self._tags[extent, self.live_slots_of(extent)], return_counts=True)
            for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
                counted[tag] = counted.get(tag, 0) + count * int(self._slot_bytes[extent])
        if counted != self._tag_bytes:
            raise CorruptRecord("bytes by tenant tag disagree with slot states")
        if self.use() != tuple(self._use_of(slot_class) for slot_class in self.classes()):
            raise CorruptRecord("the use of space that is remembered disagrees with slot counters")

    # -- Inside

    def _checked(self, extent: int) -> int:
        if not 0 <= extent < self.extents:
            raise InvalidArgument(f"extent is {extent}, the node has {self.extents}")
        return extent

    def _number(self, slot_class: SlotClass) -> int:
        number = self._class_numbers.get(slot_class)
        if number is None:
            self._geometries.append(Geometry(self.extent_bytes, slot_class))
            number = self._class_numbers[slot_class] = len(self._geometries) - 1
        return number

    def _widen(self, slots: int) -> None:
        if slots > self._states.shape[1]:
            wider = np.zeros((self.extents, slots), np.uint8)
            used = np.flatnonzero(self._class_of != _NO_CLASS)
            wider[used, : self._states.shape[1]] = self._states[used]
            tags = np.zeros((self.extents, slots), np.uint64)
            tags[used, : self._tags.shape[1]] = self._tags[used]
            self._states, self._tags = wider, tags

    def _split(self, locations: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.bool_]]:
        """Extent and slot of each location, and whether it exists; extents of those that do not may be out of range."""
        extents, slots = locations >> SLOT_BITS, locations & SLOT_MASK
        exist = (extents >= 0) & (extents < self.extents)
        exist &= slots < self._slots[np.where(exist, extents, 0)]
        return extents, slots, exist

    def _move(self, locations: NDArray[np.int64], target: int, tags: NDArray[np.uint64] | None = None) -> None:
        """Change states of locations that must all be in another state than `target`."""
        if not len(locations):
            return
        if tags is not None and len(tags) != len(locations):
            raise InvalidArgument(f"{len(tags)} tenant tags for {len(locations)} locations")
        extents, slots, exist = self._split(locations)
        if not exist.all():
            raise InvalidArgument(f"location {int(locations[~exist][0]):#x} does not exist")
        if not (locations[1:] > locations[:-1]).all() and len(np.unique(locations)) != len(locations):
            raise InvalidArgument("a location is named twice")
        before = self._states[extents, slots]
        if (before == target).any():
            wrong = int(locations[before == target][0])
            raise InvalidArgument(f"slot {wrong:#x} is {'live' if target == LIVE else 'free'} already")
        self._use = None
        self._states[extents, slots] = target
        left = np.bincount(extents[before == RESERVED], minlength=self.extents)
        self._reserved -= left
        if target == LIVE:
            self._live += np.bincount(extents, minlength=self.extents)
            self._tags[extents, slots] = 0 if tags is None else tags
            self._count_tags(extents, slots, 1)
        else:
            gone = before == LIVE
            self._live -= np.bincount(extents[gone], minlength=self.extents)
            self._count_tags(extents[gone], slots[gone], -1)
        self._stale[extents] = True

    def _count_tags(self, extents: NDArray[np.int64], slots: NDArray[np.int64], sign: int) -> None:
        """Live slots came or went."""
        if not len(slots):
            return
        tags = self._tags[extents, slots]
        sizes = self._slot_bytes[extents]
        for tag in ([int(tags[0])] if (tags == tags[0]).all() else np.unique(tags).tolist()):
            size = self._tag_bytes.get(tag, 0) + sign * int(sizes[tags == tag].sum())
            if size:
                self._tag_bytes[tag] = size
            else:
                del self._tag_bytes[tag]

    def _reserve(self, slots: SlotRange) -> None:
        extent, first = slots.location >> SLOT_BITS, slots.location & SLOT_MASK
        self._use = None
        self._states[extent, first : first + slots.count] = RESERVED
        self._reserved[extent] += slots.count
        self._stale[extent] = True

    # -- Gaps

    def _refresh(self, among: NDArray[np.bool_]) -> None:
        """Scan the changed extents for gaps."""
        for extent in np.flatnonzero(among & self._stale).tolist():
            chunk = self._geometries[int(self._class_of[extent])].chunk_slots
            edges = np.zeros(int(self._slots[extent]) + 2, np.int8)
            edges[1:-1] = self._states[extent, : self._slots[extent]] == FREE
            borders = np.flatnonzero(np.diff(edges))
            starts, lengths = borders[::2], borders[1::2] - borders[::2]
            self._gaps[extent] = _Gaps(starts, lengths)
            self._longest[extent] = lengths.max(initial=0)
            self._longest_aligned[extent] = (lengths - _to_border(starts, chunk)).max(initial=0)
            self._stale[extent] = False

    def _holding(self, mine: NDArray[np.bool_], count: int, chunk: int) -> list[SlotRange]:
        """One range of `count` slots in the tightest gap, on a chunk border if it is a chunk or more and can be."""
        for longest, aligned in ((self._longest_aligned, True), (self._longest, False)):
            if aligned and count < chunk:
                continue
            fitting = np.flatnonzero(mine & (longest >= count))
            if len(fitting):
                extent = int(fitting[np.argmin(longest[fitting])])
                gaps = self._gaps[extent]
                skipped = _to_border(gaps.starts, chunk) if aligned else np.zeros_like(gaps.starts)
                rooms = gaps.lengths - skipped
                held = np.flatnonzero(rooms >= count)
                best = held[np.argmin(rooms[held])]
                return [SlotRange(location_of(extent, int(gaps.starts[best] + skipped[best])), count)]
        return []

    def _longest_of(self, mine: NDArray[np.bool_], count: int, least: int) -> list[SlotRange]:
        """Whole gaps of at least `least` slots, at most `count` slots together: extent by extent, the one with the
        longest gap first, and in it by length. Stops at the first gap that is too long for the rest."""
        found: list[SlotRange] = []
        usable = np.flatnonzero(mine & (self._longest >= least))
        for extent in usable[np.argsort(-self._longest[usable], kind="stable")].tolist():
            gaps = self._gaps[extent]
            order = np.argsort(-gaps.lengths, kind="stable")
            starts, lengths = gaps.starts[order].tolist(), gaps.lengths[order].tolist()
            for start, length in zip(starts, lengths, strict=True):
                if length < least:
                    break
                if length > count:
                    return found
                found.append(SlotRange(location_of(extent, start), length))
                count -= length
        return found


def _read_only(array: NDArray[_Element]) -> NDArray[_Element]:
    view = array[:]
    view.flags.writeable = False
    return view


def _to_border(starts: NDArray[np.int64], chunk: int) -> NDArray[np.int64]:
    """Slots from each start to the next chunk border."""
    return -starts % chunk
