"""Extent tables in memory: the authoritative copy of each table that is in use. Pure; belongs to the loop's thread.

A `Table` holds the raw entries of one extent as they are on disk, or will be when the submitted jobs have run. Beside
them stands a row of LOOK for each entry: what a look-up answers, packed into 32 bytes, so that the answer for many keys
is one gather. An entry's checksums are verified once for each load, when it is first looked at; until then, and for
free and damaged entries, its LOOK row is zeros (a generation of 0 is no record).

`Tables` keeps tables up to a number of bytes and forgets the one that was used longest ago. Tables of extents that jobs
write to are pinned: a table read from disk while its extent is written could be torn, so an extent is loaded before it
is written, and stays.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.extent import SLOT_BITS, SLOT_MASK, Geometry
from efs.limits import TABLE_CACHE_BYTES
from efs.shard import LOCAL_BYTES, check_entries, free_entries, view_entries

LOOK: Final = np.dtype([("digest", "<u8", (2,)), ("generation", "<u8"), ("boot_epoch", "<u4"), ("shard", "u1"),
                        ("zero", "u1", (3,))])
_LOOK_BYTES: Final = 32
_WHOLE_LOOK: Final = np.dtype(f"V{_LOOK_BYTES}")
_MOST_PIECES: Final = 16
"""Stretches of one extent that are gathered one by one; more are sorted by extent first."""

assert LOOK.itemsize == _LOOK_BYTES


class Table:
    """The entries of one extent. `raw` is (slots, entry bytes); `torn` counts damaged entries that were looked at."""

    __slots__ = (
        "_headers", "_whole", "checked", "entries", "extent", "geometry", "look", "pins", "raw", "torn", "used",
    )

    def __init__(self, extent: int, geometry: Geometry, entries: NDArray[np.void]) -> None:
        size = geometry.slot_class.entry_bytes
        self.extent = extent
        self.geometry = geometry
        self.entries = entries
        self.raw: NDArray[np.uint8] = entries.view(np.uint8).reshape(geometry.slots, size)
        self.look: NDArray[np.void] = np.zeros(geometry.slots, LOOK)
        self.checked = np.zeros(geometry.slots, np.bool_)
        self.pins = 0
        self.used = 0
        self.torn = 0
        self._whole: NDArray[np.void] = self.look.view(_WHOLE_LOOK)
        header = np.dtype(f"V{size - LOCAL_BYTES}")
        self._headers: NDArray[np.void] = np.ndarray(geometry.slots, header, self.raw.data, LOCAL_BYTES, (size,))

    @property
    def bytes(self) -> int:
        return self.raw.nbytes + self.look.nbytes

    def check(self, slots: NDArray[np.int64]) -> None:
        """Verify the entries of these slots that were not verified before."""
        slots = slots[~self.checked[slots]]
        if not len(slots):
            return
        slots = np.unique(slots)
        entries = self.rows(slots)
        valid = check_entries(entries, self.geometry.slot_class.slot_bytes)
        self.torn += int(np.count_nonzero(~valid & ~free_entries(entries)))
        self._learn(slots[valid], entries[valid] if not valid.all() else entries)
        self.checked[slots] = True

    def rows(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """(n,) copies of entries."""
        raw = self.raw.take(slots, axis=0)
        return view_entries(raw, self.geometry.slot_class.segments)

    def look_at(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """(n,) of LOOK as untyped 32-byte rows; entries not looked at before are verified now."""
        found = self._whole.take(slots)
        if not found.view(LOOK)["generation"].all():
            self.check(slots)
            found = self._whole.take(slots)
        return found

    def headers(self, slots: NDArray[np.int64]) -> NDArray[np.void]:
        """(n,) header bytes as untyped rows, unverified."""
        return self._headers[slots]

    def fill(self, first: int, raw: NDArray[np.uint8]) -> None:
        """Neighbouring slots got valid entries: (count, entry bytes)."""
        stop = first + len(raw)
        self.raw[first:stop] = raw
        self._learn(np.arange(first, stop), self.entries[first:stop])
        self.checked[first:stop] = True

    def clear(self, slots: NDArray[np.int64]) -> None:
        """The slots hold no record any more."""
        self.raw[slots] = 0
        self.look.view(np.uint8).reshape(-1, _LOOK_BYTES)[slots] = 0
        self.checked[slots] = True

    def _learn(self, slots: NDArray[np.int64], entries: NDArray[np.void]) -> None:
        rows = np.zeros(len(slots), LOOK)
        for name in ("digest", "generation", "boot_epoch", "shard"):
            rows[name] = entries[name]
        self._whole[slots] = rows.view(_WHOLE_LOOK)


class Tables:
    """Tables by extent. `version(e)` changes with every change of extent e: so a load can tell that it came late."""

    def __init__(self, extents: int, most_bytes: int = TABLE_CACHE_BYTES) -> None:
        self._most_bytes = most_bytes
        self._tables: dict[int, Table] = {}
        self._versions = [0] * extents
        self._bytes = 0
        self._tick = 0

    def get(self, extent: int) -> Table | None:
        table = self._tables.get(extent)
        if table is not None:
            self._tick += 1
            table.used = self._tick
        return table

    def version(self, extent: int) -> int:
        return self._versions[extent]

    def missing(self, extents: Iterable[int]) -> list[int]:
        """Those of the extents that are not in memory, each once, ascending."""
        return sorted({extent for extent in extents if extent not in self._tables})

    def add(self, tables: Iterable[Table], keep: Iterable[int]) -> None:
        """Take tables in, except for extents whose table is there already. The tables of `keep` stay in memory at least
        until the next call of this."""
        for table in tables:
            if self.get(table.extent) is None:
                self._tables[table.extent] = table
                self._bytes += table.bytes
                self.get(table.extent)
        self._shrink({*keep})

    def add_empty(self, extent: int, geometry: Geometry) -> Table:
        """The table of an extent that was just given to a class, in place of whatever it had."""
        self.remove(extent)
        raw = np.zeros(geometry.slots * geometry.slot_class.entry_bytes, np.uint8)
        table = Table(extent, geometry, view_entries(raw, geometry.slot_class.segments))
        table.checked[:] = True
        self.add((table,), (extent,))
        return table

    def remove(self, extent: int) -> None:
        """Forget a table, pinned or not, because its extent is no longer what it was."""
        self.changed(extent)
        table = self._tables.pop(extent, None)
        if table is not None:
            self._bytes -= table.bytes

    def changed(self, extent: int) -> None:
        """Note that the extent is being written or was: a load that began before this is void."""
        self._versions[extent] += 1

    def look(self, locations: NDArray[np.int64]) -> NDArray[np.void] | None:
        """(n,) of LOOK for locations that exist; None when a table is not in memory."""
        if not len(locations):
            return np.zeros(0, LOOK)
        extents = locations >> SLOT_BITS
        first = int(extents[0])
        if (extents == first).all():
            table = self.get(first)
            return None if table is None else table.look_at(locations & SLOT_MASK).view(LOOK)
        pieces = []
        for part in stretches_of(extents):
            table = self.get(int(extents[part][0]))
            if table is None:
                return None
            pieces.append((part, table.look_at(locations[part] & SLOT_MASK)))
        if isinstance(pieces[0][0], slice):
            return np.concatenate([rows for _, rows in pieces]).view(LOOK)
        found = np.zeros(len(locations), _WHOLE_LOOK)
        for part, rows in pieces:
            found[part] = rows
        return found.view(LOOK)

    def _shrink(self, keep: set[int]) -> None:
        while self._bytes > self._most_bytes:
            idle = [table for table in self._tables.values() if not table.pins and table.extent not in keep]
            if not idle:
                return
            coldest = min(idle, key=lambda table: table.used)
            self._bytes -= coldest.bytes
            del self._tables[coldest.extent]


def stretches_of(extents: NDArray[np.int64]) -> list[slice] | list[NDArray[np.intp]]:
    """Cut rows into parts of one extent each: slices that cover the rows in order where these are few, else the rows of
    each extent."""
    borders = np.flatnonzero(np.diff(extents)) + 1
    if len(borders) < _MOST_PIECES:
        cuts = [0, *borders.tolist(), len(extents)]
        return [slice(start, stop) for start, stop in pairwise(cuts)]
    order = np.argsort(extents, kind="stable")
    ends = np.flatnonzero(np.diff(extents[order])) + 1
    return list(np.split(order, ends))
