"""What a full node drops first: the coldest chunks of the class in need, or the coldest extent of another one. Pure.

A chunk's stamp is the highest of its live slots. Chunks go in this order: lower stamp, then deeper in its chain (the
depth of a chunk is the smallest of its records', unknown counts as deepest), then the smaller key (the smallest of its
records', first eight bytes), so that nodes which hold the same records in the same chunks choose alike. A chunk with a
slot in flight is never chosen, nor one of an extent in `exclude`. An extent's stamp is the highest of its chunks'; one
without live slots is colder than any other.

A class takes chunks of its own unless some extent of another class is colder than each of them; then, or when it has
none, it takes the coldest extent whole. So no class keeps for ever what is colder than what another one must drop.

*How.* A figure is kept for each chunk: its stamp when `note` last announced a record in it, or when it was last looked
at. Stamps of live slots only rise, so the figure is a lower bound, and a chunk that comes first by its figure and
really has that stamp is the coldest; else it gets its real stamp and goes back into the order. The order is made for
ORDER_CHUNKS chunks at a time, by figure; the others wait for the next one, and none is taken that is not colder than
they can be. A figure is too high only where a record was dropped without its chunk: that record goes on counting (for
depth and key until the chunk was emptied and filled anew), and the chunk may stay longer than it should.

What is live in an extent when it is first met here (at start) counts with its stamp and with unknown depth until `note`
tells it; from then on every record that becomes live must be noted, or its chunk may be taken for an empty one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.allocator import LIVE, RESERVED, Allocator
from efs.errors import InvalidArgument
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry, SlotClass, location_of
from efs.limits import DEPTH_UNKNOWN
from efs.stamps import Stamps

ORDER_CHUNKS: Final = 1024
"""Chunks put in order at a time: ranking all of a 100 GB node takes milliseconds, which many puts then share."""
_NO_KEY: Final = 0xFFFF_FFFF_FFFF_FFFF
_NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class Victims:
    """Records to drop. `locations`: live slots, ascending within each chunk, coldest chunk first. `extent`: the extent
    to take from its class as a whole (its live slots are `locations`), None when chunks are freed in place.
    No locations and no extent: there is nothing to evict."""

    locations: NDArray[np.int64]
    extent: int | None


@dataclass(frozen=True, slots=True, order=True)
class _Chunk:
    """A chunk in order. `rank`: stamp, then depth from the deepest up, in 32 bits each."""

    rank: int
    key: int
    extent: int
    chunk: int

    @property
    def stamp(self) -> int:
        return self.rank >> 32


@dataclass(slots=True)
class _Order:
    """The coldest chunks of a class by their figures, as a heap; every other chunk's rank is `horizon` or more."""

    heap: list[_Chunk] = field(default_factory=list)
    horizon: int = 0


class Eviction:
    """Eviction order of one node's records. Reads the states and stamps that it was given and changes neither."""

    def __init__(self, allocator: Allocator, stamps: Stamps) -> None:
        self._allocator = allocator
        self._stamps = stamps
        self._classes: dict[int, SlotClass] = {}
        # By extent and chunk.
        self._stamp = np.zeros((allocator.extents, 0), np.int64)
        self._depth = np.zeros((allocator.extents, 0), np.uint32)
        self._key = np.zeros((allocator.extents, 0), np.uint64)
        self._orders: dict[SlotClass, _Order] = {}

    def note(self, locations: NDArray[np.int64], depths: NDArray[np.uint32], keys: NDArray[np.uint64]) -> None:
        """Records of one class were just marked live here and their stamps set. depths: (n,). keys: (n, 4) as in
        `entry_dtype`."""
        if not len(locations):
            return
        geometry = self._meet(np.unique(locations >> SLOT_BITS).tolist())
        size = geometry.chunk_slots
        firsts = (locations & ~SLOT_MASK) | (locations & SLOT_MASK) // size * size
        chunks, rows, noted = np.unique(firsts, return_inverse=True, return_counts=True)
        slots = (chunks[:, None] + np.arange(size)).reshape(-1)
        live = self._allocator.states(slots).reshape(-1, size) == LIVE
        stamps = self._stamps.get(slots).reshape(-1, size)
        places = (chunks >> SLOT_BITS, (chunks & SLOT_MASK) // size)
        known = live.sum(axis=1) > noted
        depth = np.where(known, self._depth[places], np.uint32(DEPTH_UNKNOWN))
        key = np.where(known, self._key[places], np.uint64(_NO_KEY))
        np.minimum.at(depth, rows, depths)
        np.minimum.at(key, rows, keys[:, 0].byteswap())
        self._depth[places], self._key[places] = depth, key
        self._stamp[places] = np.where(live, stamps, 0).max(axis=1)

    def victims(self, slot_class: SlotClass, slots: int, exclude: Collection[int] = ()) -> Victims:
        """What to drop so that at least `slots` slots of the class become free, as far as there is anything. Chooses
        only: the caller drops the records, then calls `release`, for an extent `unassign`."""
        chosen = self._coldest_chunks(slot_class, slots, exclude)
        other = self._coldest_extent(slot_class, exclude)
        if other is not None and (not chosen or other[1] < chosen[0].stamp):
            for chunk in chosen:
                heappush(self._orders[slot_class].heap, chunk)
            return Victims(self._allocator.live_slots_of(other[0]) + location_of(other[0], 0), other[0])
        found = [self._allocator.live_locations(chunk.extent, chunk.chunk) for chunk in chosen]
        return Victims(np.concatenate(found) if found else np.zeros(0, np.int64), None)

    # -- Chunks of the class itself

    def _coldest_chunks(self, slot_class: SlotClass, slots: int, exclude: Collection[int]) -> list[_Chunk]:
        """Chunks to free, coldest first; they are taken out of the order."""
        order = self._orders.setdefault(slot_class, _Order())
        chosen: list[_Chunk] = []
        apart: list[_Chunk] = []
        found = 0
        while found < slots:
            if not order.heap:
                self._fill(order, slot_class, slots, [*chosen, *apart])
                if not order.heap:
                    break
            chunk = heappop(order.heap)
            live, in_flight = self._look_at(chunk, slot_class)
            now = self._ranked(chunk) if live else chunk
            if now.rank > chunk.rank:
                if now.rank < order.horizon:
                    heappush(order.heap, now)
            elif in_flight or chunk.extent in exclude:
                apart.append(chunk)
            elif live:
                chosen.append(chunk)
                found += live
        for chunk in apart:
            heappush(order.heap, chunk)
        return chosen

    def _look_at(self, chunk: _Chunk, slot_class: SlotClass) -> tuple[int, bool]:
        """Live slots of a chunk, and whether one is in flight; brings its figure up to date. No live slots where the
        extent is no longer of the class."""
        if self._classes.get(chunk.extent) != slot_class or self._now(chunk.extent) != slot_class:
            return 0, False
        size = self._allocator.geometry_for(slot_class).chunk_slots
        slots = slice(chunk.chunk * size, (chunk.chunk + 1) * size)
        states = self._allocator.row(chunk.extent)[slots]
        live = states == LIVE
        stamps = self._stamps.row(chunk.extent)[slots][live]
        self._stamp[chunk.extent, chunk.chunk] = stamps.max() if len(stamps) else _NEVER
        return len(stamps), bool((states == RESERVED).any())

    def _ranked(self, chunk: _Chunk) -> _Chunk:
        place = (chunk.extent, chunk.chunk)
        rank = int(self._stamp[place]) << 32 | DEPTH_UNKNOWN - int(self._depth[place])
        return _Chunk(rank, int(self._key[place]), *place)

    def _fill(self, order: _Order, slot_class: SlotClass, slots: int, without: list[_Chunk]) -> None:
        """Put the coldest chunks of a class in order: enough for `slots` if each had one live slot."""
        extents = self._allocator.extents_of(slot_class)
        if not len(extents):
            return
        width = self._meet(extents.tolist()).chunks
        stamps = self._stamp[extents, :width]
        for chunk in without:
            stamps[extents == chunk.extent, chunk.chunk] = _NEVER
        rows, chunks = np.nonzero(stamps != _NEVER)
        places = (extents[rows], chunks)
        rank = stamps[rows, chunks].astype(np.uint64) << np.uint64(32)
        rank |= (DEPTH_UNKNOWN - self._depth[places]).astype(np.uint64)
        keys = self._key[places]
        wanted = max(ORDER_CHUNKS, slots)
        # Also where all chunks are in the order: what is written from now on is not, and comes behind them.
        order.horizon = int(rank.max(initial=0)) + 1
        if wanted < len(rank):
            limit = np.partition(rank, wanted)[wanted]
            # All of one rank belong together, or their keys would not decide.
            kept = np.flatnonzero(rank <= limit)
            rank, keys, places = rank[kept], keys[kept], (places[0][kept], places[1][kept])
            order.horizon = int(limit) + 1
        columns = zip(rank.tolist(), keys.tolist(), places[0].tolist(), places[1].tolist(), strict=True)
        order.heap = [_Chunk(*column) for column in columns]
        heapify(order.heap)

    # -- Extents

    def _coldest_extent(self, but: SlotClass, exclude: Collection[int]) -> tuple[int, int] | None:
        """(extent, stamp) of the coldest extent of all other classes, the lowest of several; None if there is none."""
        others = [self._allocator.extents_of(each) for each in self._allocator.classes() if each != but]
        extents = np.sort(np.concatenate(others)) if others else np.zeros(0, np.int64)
        extents = extents[~np.isin(extents, list(exclude)) & ~self._allocator.busy_extents[extents]]
        if not len(extents):
            return None
        known = np.array([self._classes.get(extent) == self._now(extent) for extent in extents.tolist()])
        figures = np.where(known, self._stamp[extents].max(axis=1, initial=_NEVER), _NEVER)
        figures[self._allocator.live_counts[extents] == 0] = _NEVER
        while True:
            coldest = int(np.argmin(figures))
            real = self._hottest(int(extents[coldest]))
            if real <= figures[coldest]:
                return int(extents[coldest]), real
            figures[coldest] = real

    def _hottest(self, extent: int) -> int:
        """The highest stamp of the live slots of an extent."""
        live = self._allocator.row(extent) == LIVE
        return int(np.where(live, self._stamps.row(extent), np.int64(_NEVER)).max(initial=_NEVER))

    # -- Inside

    def _now(self, extent: int) -> SlotClass | None:
        geometry = self._allocator.geometry(extent)
        return None if geometry is None else geometry.slot_class

    def _meet(self, extents: list[int]) -> Geometry:
        """The geometry of extents that are all of one class. What was kept of one for another class is forgotten."""
        slot_classes = {self._now(extent) for extent in extents}
        slot_class = slot_classes.pop()
        if slot_classes or slot_class is None:
            raise InvalidArgument("records of several classes, or of a free extent")
        geometry = self._allocator.geometry_for(slot_class)
        more = max(0, geometry.chunks - self._stamp.shape[1])
        if more:
            self._stamp = np.pad(self._stamp, ((0, 0), (0, more)), constant_values=_NEVER)
            self._depth = np.pad(self._depth, ((0, 0), (0, more)), constant_values=DEPTH_UNKNOWN)
            self._key = np.pad(self._key, ((0, 0), (0, more)), constant_values=_NO_KEY)
        for extent in extents:
            if self._classes.get(extent) != slot_class:
                self._classes[extent] = slot_class
                live = self._allocator.row(extent) == LIVE
                stamps = np.where(live, self._stamps.row(extent), np.int64(_NEVER))
                self._stamp[extent] = _NEVER
                self._stamp[extent, : geometry.chunks] = stamps.reshape(geometry.chunks, -1).max(axis=1)
                self._depth[extent] = DEPTH_UNKNOWN
                self._key[extent] = _NO_KEY
        return geometry
