"""What a node holds of some keys: from memory when everything is there, else from the index and the tables.

Warm (`look_up_now`, `headers_now`): one `map` over the hot keys, one gather from the tables. Nothing is awaited between
the two, so a location from the hot map always belongs to its key.

Cold: the reader thread reads the index for the keys that are not known, then the tables that are not in memory. Each
version that the index names is compared with its table entry (key, digest and generation); the table wins. What was
learned stays in the hot map. Where a call needs more tables than should be in memory at once, they are taken in
turns of TABLES_AT_ONCE.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.batch import require_keys
from efs.clock import Deadline
from efs.contract import ABSENT, NodeTable, VersionRow
from efs.errors import InvalidArgument
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry
from efs.hotmap import SEVERAL
from efs.index import INDEX_KEY_BYTES, Held, IndexEntry
from efs.limits import KEY_BYTES, MAX_KEYS_PER_CALL, TABLE_CACHE_BYTES
from efs.nodeguard import Guard
from efs.nodestate import Locations, NodeState, Resolution
from efs.shard import header_bytes
from efs.slab import Slab
from efs.tables import LOOK, Table, stretches_of

KEYS_AT_ONCE: Final = 4_096
"""Keys looked up in the index by one piece of work of the reader thread: a few milliseconds."""
TABLES_AT_ONCE: Final = 16
"""Tables that one call holds in memory at once beyond what the cache keeps anyway."""
_NAME_WORDS: Final = INDEX_KEY_BYTES // 8


class Lookups:
    """The look-up side of one node. Belongs to the loop's thread."""

    def __init__(self, state: NodeState, guard: Guard) -> None:
        self._state = state
        self._guard = guard

    # -- tables of keys

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        """See the contract."""
        locations = self._state.hot.locate(keys)
        if locations is None:
            return None
        if len(keys) and int(locations.min()) < 0:
            return self._mixed_table(keys, locations)
        look = self._state.tables.look(locations)
        if look is None:
            return None
        generation = look["generation"]
        if not generation.all():
            self._lose(keys, np.flatnonzero(generation == 0))
            return None
        trusted = look["boot_epoch"] >= self._state.boot.unverified_below
        return NodeTable(look["digest"], locations, generation, look["shard"], trusted, ())

    def _lose(self, keys: Sequence[bytes], rows: NDArray[np.intp]) -> None:
        """Hot keys whose entries turned out to be damaged: nothing is known of them, the index has to be asked."""
        for row in rows.tolist():
            self._state.hot.forget(keys[row])

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        """See the contract."""
        require_keys(keys)
        table = self.look_up_now(keys)
        if table is not None:
            return table
        found = await self.resolve(keys, deadline)
        table = self.look_up_now(keys)
        if table is not None:
            return table
        versions = [self.versions(key, found) for key in keys]
        rows = np.repeat(np.arange(len(keys)), [len(places) for places in versions])
        locations = np.array([place for places in versions for place in places], np.int64)
        look = await self._gather(locations, [keys[row] for row in rows.tolist()], deadline)
        return self._assemble(len(keys), rows, locations, look)

    def versions(self, key: bytes, found: dict[bytes, tuple[int, ...]]) -> tuple[int, ...]:
        """All locations of a key that `resolve` has just made known."""
        places = found.get(key)
        return places if places is not None else self._state.hot.locations(key) or ()

    def _mixed_table(self, keys: Sequence[bytes], locations: Locations) -> NodeTable | None:
        """A warm answer in which some keys are absent or have several versions."""
        if bool((locations == ABSENT).all()):
            return self._as_table(locations, np.zeros(len(keys), LOOK), ())
        several = np.flatnonzero(locations == SEVERAL).tolist()
        versions = {row: self._state.hot.locations(keys[row]) or () for row in several}
        present = np.flatnonzero(locations >= 0)
        rows = np.concatenate((present, np.repeat(several, [len(versions[row]) for row in several]))).astype(np.intp)
        more = [place for row in several for place in versions[row]]
        places = np.concatenate((locations[present], np.array(more, np.int64)))
        look = self._state.tables.look(places)
        if look is None:
            return None
        if not look["generation"].all():
            self._lose(keys, rows[look["generation"] == 0])
            return None
        return self._assemble(len(keys), rows, places, look)

    def _assemble(self, count: int, rows: NDArray[np.intp], locations: Locations, look: NDArray[np.void]) -> NodeTable:
        """The table of `count` keys from (row, location, LOOK) of each version; rows may come several times. Versions
        without a generation are not there."""
        held = np.flatnonzero(look["generation"] != 0)
        rows, locations, look = rows[held], locations[held], look[held]
        _, first = np.unique(rows, return_index=True)
        all_locations = np.full(count, ABSENT, np.int64)
        all_locations[rows[first]] = locations[first]
        whole = np.zeros(count, LOOK)
        whole[rows[first]] = look[first]
        extra = []
        for place in np.setdiff1d(np.arange(len(rows)), first).tolist():
            one = look[place]
            extra.append(VersionRow(int(rows[place]), one["digest"].tobytes(), int(locations[place]),
                                    int(one["generation"]), int(one["shard"]),
                                    int(one["boot_epoch"]) >= self._state.boot.unverified_below))
        return self._as_table(all_locations, whole, tuple(extra))

    def _as_table(self, locations: Locations, look: NDArray[np.void], extra: tuple[VersionRow, ...]) -> NodeTable:
        generation = look["generation"]
        trusted = look["boot_epoch"] >= self._state.boot.unverified_below
        held = generation != 0
        if not held.all():
            # Absent, or gone since the index was asked.
            locations = np.where(held, locations, ABSENT)
            trusted &= held
        return NodeTable(look["digest"], locations, generation, look["shard"], trusted, extra)

    # -- headers

    def headers_now(self, locations: Locations, generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        """See the contract."""
        out = np.zeros((len(locations), header_bytes(segments)), np.uint8)
        for part in stretches_of(locations >> SLOT_BITS) if len(locations) else []:
            extent = int(locations[part][0]) >> SLOT_BITS
            geometry = self._geometry(extent)
            if geometry is None or geometry.slot_class.segments != segments:
                continue
            table = self._state.tables.get(extent)
            if table is None:
                return None
            _copy_headers(table, locations[part] & SLOT_MASK, generations[part], out, part)
        return out

    async def headers(self, locations: Locations, generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        """See the contract."""
        if len(locations) > MAX_KEYS_PER_CALL:
            raise InvalidArgument(f"{len(locations)} headers asked, at most {MAX_KEYS_PER_CALL}")
        out = np.zeros((len(locations), header_bytes(segments)), np.uint8)
        async for rows in self.with_tables(locations, deadline):
            found = self.headers_now(locations[rows], generations[rows], segments)
            assert found is not None, "the tables are in memory"
            out[rows] = found
        return out

    # -- learning from the index

    async def resolve(self, keys: Sequence[bytes], deadline: Deadline) -> dict[bytes, tuple[int, ...]]:
        """Make all keys known. Until the caller next awaits, `versions(key, result)` is exact for each of them."""
        state = self._state
        resolution = state.watch()
        try:
            while True:
                unknown = [key for key in state.hot.unknown(keys) if key not in resolution.found]
                if not unknown:
                    return resolution.found
                resolution.changed.clear()
                part = unknown[:KEYS_AT_ONCE]
                held = await self._guard.ask(partial(state.index.look_up, part), deadline)
                await self._learn(part, held, resolution, deadline)
        finally:
            state.unwatch(resolution)

    async def _learn(self, keys: Sequence[bytes], held: Sequence[list[Held]], resolution: Resolution,
                     deadline: Deadline) -> None:
        """Compare what the index said of keys with the tables, some tables at a time, and remember what stands."""
        if not any(held):
            absent = [key for key in keys if key not in resolution.changed]
            resolution.found.update(dict.fromkeys(absent, ()))
            self._state.hot.set_absent(absent)
            return
        entries = [IndexEntry(key + version.digest, version.location, version.generation)
                   for key, versions in zip(keys, held, strict=True) for version in versions]
        kept: dict[bytes, list[int]] = {key: [] for key in keys}
        locations = np.array([min(entry.location, np.iinfo(np.int64).max) for entry in entries], np.int64)
        async for rows in self.with_tables(locations, deadline):
            mine = [entries[row] for row in rows.tolist()]
            sound = self._compare(mine, locations[rows])
            for entry, stands in zip(mine, sound.tolist(), strict=True):
                key = entry.index_key[:KEY_BYTES]
                if key in resolution.changed:
                    continue
                if stands:
                    kept[key].append(entry.location)
                else:
                    self._stale(entry)
        for key, places in kept.items():
            if key not in resolution.changed:
                resolution.found[key] = tuple(places)
                self._state.hot.set(key, tuple(places))

    def _compare(self, entries: Sequence[IndexEntry], locations: Locations) -> NDArray[np.bool_]:
        """(n,) whether the tables, which are in memory, have what the index entries say."""
        sound = np.zeros(len(entries), np.bool_)
        names = np.frombuffer(b"".join(entry.index_key for entry in entries), "<u8").reshape(len(entries), _NAME_WORDS)
        generations = np.array([entry.generation for entry in entries], np.uint64)
        for part in stretches_of(locations >> SLOT_BITS):
            extent = int(locations[part][0]) >> SLOT_BITS
            if self._geometry(extent) is not None:
                table = self._state.table(extent)
                sound[part] = _matches(table, locations[part] & SLOT_MASK, names[part], generations[part])
        # On disk an entry stands until the job has run that is to clear it.
        return sound & self._state.exists(locations)

    def _stale(self, entry: IndexEntry) -> None:
        """The index names a record that the table does not have."""
        state = self._state
        if entry.index_key in state.coming or entry.index_key in state.leaving:
            return
        state.counters.add("node_index_mismatch")
        state.owe((entry,), ())
        if entry.location >> SLOT_BITS < state.allocator.extents:
            state.free_torn(entry.location)

    async def _gather(self, locations: Locations, keys: Sequence[bytes], deadline: Deadline) -> NDArray[np.void]:
        """(n,) of LOOK, zeros where a slot no longer holds the key."""
        look = np.zeros(len(locations), LOOK)
        words = np.frombuffer(b"".join(keys), "<u8").reshape(len(keys), KEY_BYTES // 8)
        async for rows in self.with_tables(locations, deadline):
            look[rows] = self._look_checked(locations[rows], words[rows])
        return look

    def _look_checked(self, locations: Locations, keys: NDArray[np.uint64]) -> NDArray[np.void]:
        found = np.zeros(len(locations), LOOK)
        for part in stretches_of(locations >> SLOT_BITS):
            extent = int(locations[part][0]) >> SLOT_BITS
            if self._geometry(extent) is None:
                continue
            table = self._state.table(extent)
            slots = locations[part] & SLOT_MASK
            slots = np.where(slots < table.geometry.slots, slots, 0)
            same = (table.rows(slots)["key"] == keys[part]).all(axis=1) & self._state.exists(locations[part])
            found[part] = np.where(same, table.look_at(slots).view(LOOK), np.zeros(1, LOOK))
        return found

    # -- tables from disk

    async def load(self, extents: Sequence[int], deadline: Deadline) -> None:
        """Have the reader thread read tables that are not in memory. One that was written meanwhile is not taken in:
        the caller looks whether it is there and asks again. What was loaded stays until the caller next awaits."""
        wanted = [(extent, geometry, self._state.tables.version(extent)) for extent in
                  self._state.tables.missing(extents) if (geometry := self._geometry(extent)) is not None]
        if not wanted:
            return
        read = partial(_read_tables, self._state.slab, [(extent, geometry) for extent, geometry, _ in wanted])
        loaded = await self._guard.ask(read, deadline)
        tables = self._state.tables
        tables.add((Table(extent, geometry, entries) for (extent, geometry, version), entries
                    in zip(wanted, loaded, strict=True) if tables.version(extent) == version), extents)

    async def with_tables(self, locations: Locations, deadline: Deadline) -> AsyncIterator[NDArray[np.intp]]:
        """Rows in groups, each when the tables of its locations are in memory, where they stay until the caller awaits.
        Locations in extents that are free by then come without a table."""
        for rows in self._turns(locations):
            extents = np.unique(locations[rows] >> SLOT_BITS).tolist()
            while any(self._geometry(extent) is not None for extent in self._state.tables.missing(extents)):
                await self.load(extents, deadline)
            yield rows

    def _turns(self, locations: Locations) -> Iterator[NDArray[np.intp]]:
        """Rows in groups of few extents, whose tables together fit the cache if more than one is in a group."""
        if not len(locations):
            return
        largest = max((use.table_bytes for use in self._geometries()), default=1)
        extents = locations >> SLOT_BITS
        order = np.argsort(extents, kind="stable")
        starts = np.concatenate(([0], np.flatnonzero(np.diff(extents[order])) + 1)).tolist()
        first = starts[:: max(1, min(TABLES_AT_ONCE, TABLE_CACHE_BYTES // largest))]
        for start, stop in zip_longest(first, first[1:], fillvalue=len(order)):
            yield order[start:stop]

    def _geometries(self) -> list[Geometry]:
        allocator = self._state.allocator
        return [allocator.geometry_for(slot_class) for slot_class in allocator.classes()]

    def _geometry(self, extent: int) -> Geometry | None:
        allocator = self._state.allocator
        return allocator.geometry(extent) if 0 <= extent < allocator.extents else None


def _read_tables(slab: Slab, wanted: Sequence[tuple[int, Geometry]]) -> list[NDArray[np.void]]:
    return [slab.read_table(extent, geometry) for extent, geometry in wanted]


def _matches(table: Table, slots: NDArray[np.int64], names: NDArray[np.uint64],
             generations: NDArray[np.uint64]) -> NDArray[np.bool_]:
    """(n,) whether valid entries of these names and generations stand in the slots."""
    exist = slots < table.geometry.slots
    slots = np.where(exist, slots, 0)
    look = table.look_at(slots).view(LOOK)
    rows = table.rows(slots)
    same: NDArray[np.bool_] = (rows["key"] == names[:, :4]).all(axis=1) & (rows["digest"] == names[:, 4:]).all(axis=1)
    same &= exist & (generations != 0) & (look["generation"] == generations)
    return same


def _copy_headers(table: Table, slots: NDArray[np.int64], generations: NDArray[np.uint64], out: NDArray[np.uint8],
                  part: slice | NDArray[np.intp]) -> None:
    """Headers of the slots that still hold these generations, into rows of `out`; other rows stay as they are."""
    if int(slots.max()) >= table.geometry.slots:
        slots = np.where(slots < table.geometry.slots, slots, 0)
        generations = np.where(slots < table.geometry.slots, generations, 0)
    held = table.look_at(slots).view(LOOK)["generation"] == generations
    held &= generations != 0
    rows = out.view(f"V{out.shape[1]}").reshape(-1)
    if held.all():
        rows[part] = table.headers(slots)
    else:
        kept = np.arange(len(rows))[part][held]
        rows[kept] = table.headers(slots[held])
