"""What a node gives up first, from memory: the order of `efs/gc.py` over a node's slots. Belongs to the loop's thread.

Beside states (`efs/allocator.py`) and stamps (`efs/stamps.py`) an order needs depth and tie of each record: 8 bytes a
slot, noted when a record becomes live. Nothing is kept in order. Whoever needs victims takes a `Snapshot` (private
copies, a few milliseconds for a million slots), has `choose` pick from it on a thread, and gets a `Queue`: records to
evict, coldest first. What happened since then shows when they are taken: a record that is gone, or was used since, is
passed over. A record that came since is not in the queue; it would have to be older than what is, which only a repair
can be.

*Extents.* A class in need that has extents evicts its own records, unless another class has an extent that is colder:
three quarters of its records were last used before the coldest record that the class would have to evict. An extent
without live records is colder than any. A class that has no extent, or nothing to evict, takes the coldest extent of
the others whole. So a new slot size gets space on a full node, and none keeps for ever what is colder than what
another one must drop. Where extents are compared, up to SAMPLED_SLOTS slots of each are looked at.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.allocator import LIVE, Allocator
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry, SlotClass, location_of
from efs.gc import Records, enough, order_keys, ranks_of, select
from efs.limits import EVICTION_WINDOW_SHARE
from efs.stamps import Stamps

SAMPLED_SLOTS: Final = 512
COLD_QUANTILE: Final = 0.75
"""Share of an extent's records that must be colder than what its taker would evict otherwise."""
_NO_STAMP: Final = -1


@dataclass(frozen=True, slots=True)
class Piece:
    """Private copies of one extent's state: (slots,) each."""

    extent: int
    geometry: Geometry
    live: NDArray[np.bool_]
    stamps: NDArray[np.uint32]
    depths: NDArray[np.uint32]
    ties: NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Extents as they were when each was copied."""

    pieces: tuple[Piece, ...]


@dataclass(slots=True)
class Queue:
    """Records to evict, coldest first: (n,) each. `ranks` as they were when they were chosen. `passed`: how many from
    the first on stand no more."""

    locations: NDArray[np.int64]
    ranks: NDArray[np.uint64]
    ties: NDArray[np.uint32]
    passed: int = field(default=0)


@dataclass(frozen=True, slots=True)
class Victims:
    """Records that can be evicted now, coldest first. ranks: (n,). keys: n order keys."""

    locations: NDArray[np.int64]
    ranks: NDArray[np.uint64]
    keys: list[int]


class Eviction:
    """Eviction order of one node's records. Reads the states and stamps that it was given and changes neither."""

    def __init__(self, allocator: Allocator, stamps: Stamps) -> None:
        self._allocator = allocator
        self._stamps = stamps
        # By extent and slot.
        self._depths = np.zeros((allocator.extents, 0), np.uint32)
        self._ties = np.zeros((allocator.extents, 0), np.uint32)

    def note(self, locations: NDArray[np.int64], depths: NDArray[np.uint32], ties: NDArray[np.uint32]) -> None:
        """Records were just marked live here."""
        if not len(locations):
            return
        extents, slots = locations >> SLOT_BITS, locations & SLOT_MASK
        self._widen(max(len(self._allocator.row(extent)) for extent in set(extents.tolist())))
        self._depths[extents, slots] = depths
        self._ties[extents, slots] = ties

    # -- Records in order

    def snapshot(self, extents: Sequence[int]) -> Snapshot:
        """Copies of those of the extents that hold something."""
        return Snapshot(tuple(self._copy(extent) for extent in extents if self._allocator.live_counts[extent]))

    def _copy(self, extent: int) -> Piece:
        geometry = self._allocator.geometry(extent)
        assert geometry is not None, "an extent with live slots has a class"
        slots = geometry.slots
        return Piece(extent, geometry, self._allocator.row(extent) == LIVE, self._stamps.row(extent).copy(),
                     self._depths[extent, :slots].copy(), self._ties[extent, :slots].copy())

    def peek(self, queue: Queue, count: int) -> Victims:
        """The first up to `count` records of a queue that still stand. Those before them that do not are passed for
        good; what is returned stays in the queue until it stands no more."""
        found: list[NDArray[np.intp]] = []
        missing, position = count, queue.passed
        while missing > 0 and position < len(queue.locations):
            part = slice(position, position + missing)
            standing = np.flatnonzero(self.standing(queue.locations[part], queue.ranks[part])) + position
            position = min(part.stop, len(queue.locations))
            if not found and not len(standing):
                queue.passed = position
            elif len(standing):
                found.append(standing)
            missing -= len(standing)
        rows = np.concatenate(found) if found else np.zeros(0, np.intp)
        ranks = queue.ranks[rows]
        return Victims(queue.locations[rows], ranks, order_keys(ranks, queue.ties[rows]))

    def standing(self, locations: NDArray[np.int64], ranks: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(n,) whether the slot still holds a record of this rank: it was neither removed nor used since."""
        standing: NDArray[np.bool_] = self._allocator.states(locations) == LIVE
        live = np.flatnonzero(standing)
        standing[live] = self.ranks(locations[live]) == ranks[live]
        return standing

    def ranks(self, locations: NDArray[np.int64]) -> NDArray[np.uint64]:
        """(n,) ranks of live records as they are now."""
        depths = self._depths[locations >> SLOT_BITS, locations & SLOT_MASK]
        return ranks_of(self._stamps.get(locations), depths)

    def keys(self, locations: NDArray[np.int64]) -> list[int]:
        """n order keys of live records as they are now."""
        return order_keys(self.ranks(locations), self._ties[locations >> SLOT_BITS, locations & SLOT_MASK])

    # -- Extents

    def extent_to_take(self, slot_class: SlotClass, own_coldest: int | None, exclude: Collection[int]) -> int | None:
        """The extent of another class that this one should take, the lowest of several; None if there is none or it
        should evict its own records. own_coldest: stamp of the coldest of these, None if there are none. Extents with
        slots in flight and those in `exclude` cannot be taken."""
        allocator = self._allocator
        others = [allocator.extents_of(each) for each in allocator.classes() if each != slot_class]
        extents = np.sort(np.concatenate(others)) if others else np.zeros(0, np.int64)
        extents = extents[~np.isin(extents, list(exclude)) & ~allocator.busy_extents[extents]]
        warmth, coldest = min(((self.warmth(extent), int(extent)) for extent in extents.tolist()), default=(0, None))
        if own_coldest is not None and warmth >= own_coldest:
            return None
        return coldest

    def warmth(self, extent: int) -> int:
        """The stamp below or at which COLD_QUANTILE of an extent's records were last used; -1 without records."""
        row = self._allocator.row(extent)
        step = -(-len(row) // SAMPLED_SLOTS)
        stamps = self._stamps.row(extent)[::step][row[::step] == LIVE]
        if not len(stamps):
            stamps = self._stamps.row(extent)[row == LIVE]
        if not len(stamps):
            return _NO_STAMP
        place = int(COLD_QUANTILE * (len(stamps) - 1))
        return int(np.partition(stamps, place)[place])

    def _widen(self, slots: int) -> None:
        more = slots - self._depths.shape[1]
        if more > 0:
            self._depths = np.pad(self._depths, ((0, 0), (0, more)))
            self._ties = np.pad(self._ties, ((0, 0), (0, more)))


def choose(snapshot: Snapshot, to_free: int, *, by_count: bool, window_share: float = EVICTION_WINDOW_SHARE) -> Queue:
    """What to evict from a snapshot so that `to_free` is freed: a number of records (by_count), or bytes of extents,
    where a slot counts as its share of its extent (`slot_share`). Takes about 40 ms for a million slots, on any
    thread."""
    pieces = [piece for piece in snapshot.pieces if piece.live.any()]
    sizes = [1 if by_count else slot_share(piece.geometry) for piece in pieces]
    if not pieces or to_free <= 0:
        return Queue(np.zeros(0, np.int64), np.zeros(0, np.uint64), np.zeros(0, np.uint32))
    stamps = np.concatenate([piece.stamps[piece.live] for piece in pieces])
    window = int(window_share * len(stamps))
    count = min(len(stamps), enough(to_free, window, min(sizes)))
    # Few records are as old as this; only of them the whole order key is made.
    last = np.partition(stamps, count - 1)[count - 1]
    rows = [np.flatnonzero(piece.live & (piece.stamps <= last)) for piece in pieces]
    pairs = list(zip(pieces, rows, strict=True))
    locations = np.concatenate([slots + location_of(piece.extent, 0) for piece, slots in pairs])
    ranks = np.concatenate([ranks_of(piece.stamps[slots], piece.depths[slots]) for piece, slots in pairs])
    ties = np.concatenate([piece.ties[slots] for piece, slots in pairs])
    chunks = np.concatenate([slots // piece.geometry.chunk_slots + location_of(piece.extent, 0)
                             for piece, slots in pairs])
    chunk_live = np.concatenate([
        piece.live.reshape(piece.geometry.chunks, -1).sum(axis=1)[slots // piece.geometry.chunk_slots]
        for piece, slots in pairs])
    size = np.repeat(np.array(sizes, np.int64), list(map(len, rows)))
    chosen = select(Records(ranks, ties, chunks, chunk_live, size), to_free, window)
    return Queue(locations[chosen], ranks[chosen], ties[chosen])


def slot_share(geometry: Geometry) -> int:
    """Bytes of an extent that one of its slots stands for, table and rounding included."""
    return geometry.extent_bytes // geometry.slots
