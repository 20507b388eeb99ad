"""What a full node drops first: the coldest chunks of the class in need, or the coldest extent of another one. Pure.

A chunk's stamp is the highest of its live slots. Chunks go in this order: lower stamp, then deeper in its chain (the
depth of a chunk is the smallest of its records', unknown counts as deepest), then the smaller key (the smallest of its
records', first eight bytes), so that nodes which hold the same records in the same chunks choose alike. A chunk with a
slot in flight is never chosen, nor one of an extent in `exclude`. An extent's stamp is the highest of its chunks'; one
without live slots is colder than any other.

A class takes chunks of its own unless some extent of another class is colder than each of them; then, or when it has
none, it takes the coldest extent whole. So no class keeps for ever what is colder than what another one must drop.

The order of all chunks is computed for many victims at a time and kept. Later calls take from it and skip chunks that
were used or emptied since. Stamps of live slots only rise, so what is left stays in order, except for records that came
with an old stamp since (repair): they wait for the next computation.

Depth and key of a chunk are kept from the records that `note` announced. A record that was dropped goes on
counting there until its chunk has been emptied and filled anew: they break ties only.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.allocator import LIVE, RESERVED, Allocator
from efs.extent import SLOT_BITS, SLOT_MASK, SlotClass
from efs.limits import DEPTH_UNKNOWN
from efs.stamps import Stamps

ORDER_CHUNKS: Final = 1024
"""Chunks put in order at a time: sorting all of a 100 GB node takes milliseconds, which many puts then share."""
_NO_KEY: Final = 0xFFFF_FFFF_FFFF_FFFF
_NEVER: Final = -1


@dataclass(frozen=True, slots=True)
class Victims:
    """Records to drop. `locations`: live slots, ascending within each chunk, coldest chunk first. `extent`: the extent
    to take from its class as a whole (its live slots are `locations`), None when chunks are freed in place.
    No locations and no extent: there is nothing to evict."""

    locations: NDArray[np.int64]
    extent: int | None


@dataclass(frozen=True, slots=True)
class _Chunk:
    extent: int
    chunk: int
    stamp: int


class Eviction:
    """Eviction order of one node's records. Reads the states and stamps that it was given and changes neither."""

    def __init__(self, allocator: Allocator, stamps: Stamps) -> None:
        self._allocator = allocator
        self._stamps = stamps
        extents = allocator.extents
        self._seen_states = np.full(extents, _NEVER, np.int64)
        self._seen_stamps = np.full(extents, _NEVER, np.int64)
        self._hottest = np.full(extents, _NEVER, np.int64)
        # By extent and chunk: highest stamp of the live slots, or _NEVER where none is live or one is in flight.
        self._stamp = np.zeros((extents, 0), np.int64)
        self._depth = np.zeros((extents, 0), np.uint32)
        self._key = np.zeros((extents, 0), np.uint64)
        self._orders: dict[SlotClass, deque[_Chunk]] = {}

    def note(self, locations: NDArray[np.int64], depths: NDArray[np.uint32], keys: NDArray[np.uint64]) -> None:
        """Records were just marked live here. depths: (n,). keys: (n, 4) as in `entry_dtype`."""
        extents = locations >> SLOT_BITS
        firsts = keys[:, 0].byteswap()
        for extent in np.unique(extents).tolist():
            geometry = self._allocator.geometry(extent)
            if geometry is None:
                continue
            self._widen(geometry.chunks)
            mine = np.flatnonzero(extents == extent)
            chunks = (locations[mine] & SLOT_MASK) // geometry.chunk_slots
            live = self._allocator.row(extent).reshape(geometry.chunks, -1) == LIVE
            noted = np.bincount(chunks, minlength=geometry.chunks)
            new = np.flatnonzero((noted > 0) & (live.sum(axis=1) == noted))
            self._depth[extent, new] = DEPTH_UNKNOWN
            self._key[extent, new] = _NO_KEY
            np.minimum.at(self._depth[extent], chunks, depths[mine])
            np.minimum.at(self._key[extent], chunks, firsts[mine])

    def victims(self, slot_class: SlotClass, slots: int, exclude: Collection[int] = ()) -> Victims:
        """What to drop so that at least `slots` slots of the class become free, as far as there is anything. Chooses
        only: the caller drops the records, then calls `release`, for an extent `unassign`."""
        chosen = self._coldest_chunks(slot_class, slots, exclude)
        other = self._coldest_extent(slot_class, exclude)
        if other is not None and (not chosen or other[1] < chosen[0].stamp):
            self._orders.setdefault(slot_class, deque()).extendleft(reversed(chosen))
            live = self._allocator.live_slots_of(other[0])
            return Victims(live + (other[0] << SLOT_BITS), other[0])
        found = [self._allocator.live_locations(chunk.extent, chunk.chunk) for chunk in chosen]
        return Victims(np.concatenate(found) if found else np.zeros(0, np.int64), None)

    def _coldest_chunks(self, slot_class: SlotClass, slots: int, exclude: Collection[int]) -> list[_Chunk]:
        """Chunks to free, coldest first; they are taken out of the order."""
        chosen: list[_Chunk] = []
        found = 0
        for attempt in range(2):
            order = self._orders.get(slot_class)
            while order and found < slots:
                chunk = order.popleft()
                if chunk.extent not in exclude and self._still(chunk, slot_class):
                    chosen.append(chunk)
                    found += len(self._allocator.live_locations(chunk.extent, chunk.chunk))
            if found >= slots or attempt:
                break
            self._orders[slot_class] = self._ordered(slot_class, slots, exclude, chosen)
        return chosen

    def _still(self, chunk: _Chunk, slot_class: SlotClass) -> bool:
        """Whether the chunk is as cold as when it was put in order, and has something to free."""
        geometry = self._allocator.geometry(chunk.extent)
        if geometry is None or geometry.slot_class != slot_class:
            return False
        self._refresh(np.array([chunk.extent]))
        return _NEVER < int(self._stamp[chunk.extent, chunk.chunk]) <= chunk.stamp

    def _ordered(
        self, slot_class: SlotClass, slots: int, exclude: Collection[int], chosen: list[_Chunk]
    ) -> deque[_Chunk]:
        """The coldest chunks of a class in order, at least as many as hold `slots` live slots if there are."""
        extents = self._allocator.extents_of(slot_class)
        extents = extents[~np.isin(extents, list(exclude))]
        self._refresh(extents)
        geometry = self._allocator.geometry_for(slot_class)
        stamps = self._stamp[extents, : geometry.chunks]
        for chunk in chosen:
            stamps[extents == chunk.extent, chunk.chunk] = _NEVER
        places = np.flatnonzero(stamps.ravel() != _NEVER)
        rows, chunks = places // max(geometry.chunks, 1), places % max(geometry.chunks, 1)
        depths, keys = self._depth[extents[rows], chunks], self._key[extents[rows], chunks]
        rank = (stamps.ravel()[places].astype(np.uint64) << np.uint64(32)) | (DEPTH_UNKNOWN - depths).astype(np.uint64)
        # Each chunk frees at least one slot.
        wanted = max(ORDER_CHUNKS, slots)
        if wanted < len(rank):
            kept = np.flatnonzero(rank <= np.partition(rank, wanted)[wanted])
            rank, keys, places, rows, chunks = rank[kept], keys[kept], places[kept], rows[kept], chunks[kept]
        order = np.lexsort((places, keys, rank))[:wanted]
        found = zip(
            extents[rows[order]].tolist(), chunks[order].tolist(), (rank[order] >> np.uint64(32)).tolist(), strict=True
        )
        return deque(_Chunk(extent, chunk, stamp) for extent, chunk, stamp in found)

    def _coldest_extent(self, but: SlotClass, exclude: Collection[int]) -> tuple[int, int] | None:
        """(extent, stamp) of the coldest extent of all other classes, the lowest of several; None if there is none."""
        others = [self._allocator.extents_of(each) for each in self._allocator.classes() if each != but]
        extents = np.sort(np.concatenate(others)) if others else np.zeros(0, np.int64)
        extents = extents[~np.isin(extents, list(exclude)) & ~self._allocator.busy_extents[extents]]
        if not len(extents):
            return None
        self._refresh(extents)
        coldest = int(extents[np.argmin(self._hottest[extents])])
        return coldest, int(self._hottest[coldest])

    def _refresh(self, extents: NDArray[np.int64]) -> None:
        """Bring the chunk stamps of extents in use up to date."""
        states_now, stamps_now = self._allocator.versions, self._stamps.versions
        changed = self._seen_states[extents] != states_now[extents]
        changed |= self._seen_stamps[extents] != stamps_now[extents]
        for extent in extents[changed].tolist():
            geometry = self._allocator.geometry(extent)
            if geometry is not None:
                self._widen(geometry.chunks)
                states = self._allocator.row(extent).reshape(geometry.chunks, geometry.chunk_slots)
                stamps = self._stamps.row(extent).reshape(geometry.chunks, geometry.chunk_slots)
                highest = np.where(states == LIVE, stamps, np.int64(_NEVER)).max(axis=1)
                self._hottest[extent] = highest.max()
                highest[(states == RESERVED).any(axis=1)] = _NEVER
                self._stamp[extent, : geometry.chunks] = highest
        self._seen_states[extents] = states_now[extents]
        self._seen_stamps[extents] = stamps_now[extents]

    def _widen(self, chunks: int) -> None:
        have = self._stamp.shape[1]
        if chunks > have:
            more = ((0, 0), (0, chunks - have))
            self._stamp = np.pad(self._stamp, more, constant_values=_NEVER)
            self._depth = np.pad(self._depth, more, constant_values=DEPTH_UNKNOWN)
            self._key = np.pad(self._key, more, constant_values=_NO_KEY)
