"""A node directory as it lies on disk, read-only: beside its owner, or without one. For fsck, status, ls and inspect.

Nothing is locked and nothing is written (LMDB registers its reader in `lock.mdb`, as any reader does). Beside an
owner two reads are never of one moment: what is seen here may be between two steps of a put or an eviction, so a
caller that is about to call something wrong looks again (`efs/fsck.py`). Index reads are short transactions; a
geometry is read again where an entry does not fit, because its extent may have changed its class.

An index can be opened once in a process: a process that owns the node can not view it here.
"""

from __future__ import annotations

import os
import stat as stat_bits
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import CorruptRecord, EfsError, FormatUnsupported, IdentityMismatch
from efs.extent import SLOT_BITS, Geometry, SlotClass, extent_of, location_of, ranges_of, slot_of
from efs.index import Index, IndexEntry
from efs.limits import DATA_SHARDS
from efs.metrics import CounterFile
from efs.nodedir import (
    COUNTERS_FILE,
    BootRecord,
    NodeConfig,
    NodePlace,
    check_place,
    index_path,
    open_slab,
    read_boot,
    read_config,
    stamps_path,
)
from efs.osio import Io
from efs.shard import Entry, check_entries, free_entries, parse_entry, raw_entries, view_entries
from efs.slab import Slab
from efs.stamps import read_stamps


class Slot(IntEnum):
    """What stands in a table entry."""

    LIVE = 0
    FREE = 1
    TORN = 2
    """Neither zeros nor valid."""
    OUTSIDE = 3
    """No such slot: the extent is free, or has fewer."""
    DAMAGED = 4
    """The extent itself cannot be read."""


RECORD: Final = np.dtype(
    [
        ("status", "u1"),
        ("shard", "u1"),
        ("boot_epoch", "<u4"),
        ("depth", "<u4"),
        ("slot_bytes", "<u4"),
        ("entry_bytes", "<u4"),
        ("location", "<i8"),
        ("generation", "<u8"),
        ("arrival_ms", "<u8"),
        ("tenant_tag", "<u8"),
        ("payload_hash", "<u8"),
        ("block_bytes", "<u8"),
        ("key", "V32"),
        ("digest", "V16"),
    ]
)
"""A table entry without its segments; all fields but status and location are zeros unless the status is LIVE."""
Records = NDArray[np.void]
_COPIED: Final = (
    "shard",
    "boot_epoch",
    "depth",
    "generation",
    "arrival_ms",
    "tenant_tag",
    "payload_hash",
    "block_bytes",
)


READ_GAP: Final = 32
"""Slots that are not asked for but read along, where that saves a call: a few kilobytes of table."""


@dataclass(frozen=True, slots=True)
class Segments:
    """Of one header: key ‖ digest, bytes of each segment of the block, xxh3_64 of each."""

    index_key: bytes
    sizes: Sequence[int]
    hashes: Sequence[int]


@dataclass(frozen=True, slots=True)
class SpaceUse:
    """Space of a node directory in bytes: `allocated` of the slab file, `total` of everything, as du counts."""

    allocated: int
    total: int


class NodeView:
    """One node, made by `open`. `node_index` is its place in the group."""

    def __init__(self, io: Io, path: str, config: NodeConfig, slab: Slab, index: Index) -> None:
        self.path = path
        self.config = config
        self.node_index = config.place.node_index
        self.slab = slab
        self.index = index
        self._io = io
        self._classes: dict[int, Geometry | None] = {}
        self._damaged: dict[int, EfsError] = {}

    @classmethod
    def open(cls, io: Io, path: str, place: NodePlace) -> NodeView:
        """Open the node that belongs to `place`. OpenFailed, FormatUnsupported, CorruptRecord, IdentityMismatch,
        IndexDamaged."""
        config = read_config(io, path)
        check_place(path, config.place, place)
        slab = open_slab(io, path, config, writable=False)
        try:
            return cls(io, path, config, slab, Index.open_read_only(io, index_path(path)))
        except BaseException:
            slab.close()
            raise

    def close(self) -> None:
        self.slab.close()
        self.index.close()

    def boot(self) -> BootRecord | None:
        """The boot record now; None when it is lost or damaged."""
        try:
            return read_boot(self._io, self.path)
        except EfsError:
            return None

    def counters(self) -> dict[str, int]:
        """The node's counters now; all zero when there is no file of them."""
        try:
            file = CounterFile.open(os.path.join(self.path, COUNTERS_FILE), writable=False, io=self._io)
        except EfsError:
            return CounterFile.in_memory().snapshot()
        try:
            return file.snapshot()
        finally:
            file.close()

    # -- extents

    def geometry(self, extent: int, again: bool = False) -> Geometry | None:
        """Geometry of an extent, None when it is free or damaged (`damage` tells which)."""
        if again or (extent not in self._classes and extent not in self._damaged):
            self._classes.pop(extent, None)
            self._damaged.pop(extent, None)
            try:
                self._classes[extent] = self.slab.read_class(extent) if 0 <= extent < self.slab.extents else None
            except (CorruptRecord, IdentityMismatch, FormatUnsupported) as error:
                self._damaged[extent] = error
        return self._classes.get(extent)

    def damage(self, extent: int) -> EfsError | None:
        """Why an extent cannot be read, as of the last `geometry` of it."""
        return self._damaged.get(extent)

    def stamps(self, extent: int, geometry: Geometry) -> NDArray[np.uint32]:
        """(slots,) stamps of last use as the owner last wrote them."""
        return read_stamps(self._io, stamps_path(self.path), extent, geometry)

    # -- table entries

    def records(self, locations: NDArray[np.int64], again: bool = False) -> Records:
        """(n,) of RECORD for n locations in any order. Slots that lie close together are read together; all entries
        of a class are checked at once. again: read the classes of the extents anew."""
        found = np.zeros(len(locations), RECORD)
        found["location"] = locations
        for slot_class, rows, entries in self._entries(locations, found["status"], again):
            found[rows] = _checked(slot_class, locations[rows], entries)
        return found

    def segments(self, locations: NDArray[np.int64]) -> dict[int, Segments]:
        """What the headers say of segments, by row of `locations`; only for rows whose entry is valid."""
        found: dict[int, Segments] = {}
        for slot_class, rows, entries in self._entries(locations, np.zeros(len(locations), np.uint8), False):
            live = check_entries(entries, slot_class.slot_bytes)
            names = zip(*(np.ascontiguousarray(entries[name]) for name in ("key", "digest")), strict=True)
            sizes, hashes = entries["segment_bytes"].tolist(), entries["segment_hashes"].tolist()
            for at, (key, digest) in enumerate(names):
                if live[at]:
                    found[int(rows[at])] = Segments(key.tobytes() + digest.tobytes(), sizes[at], hashes[at])
        return found

    def _entries(
        self, locations: NDArray[np.int64], status: NDArray[np.uint8], again: bool
    ) -> Iterator[tuple[SlotClass, NDArray[np.intp], NDArray[np.void]]]:
        """(class, rows, entries) of the locations that are slots, class by class; sets the status of the others."""
        # As bytes: numpy re-packs structured rows when it joins them.
        raw: dict[SlotClass, list[tuple[NDArray[np.intp], NDArray[np.uint8]]]] = {}
        seen: set[int] = set()
        for rows in _stretches(locations):
            first = int(locations[rows[0]])
            extent = extent_of(first)
            geometry = self.geometry(extent, again and extent not in seen)
            seen.add(extent)
            if geometry is None:
                status[rows] = Slot.DAMAGED if extent in self._damaged else Slot.OUTSIDE
                continue
            inside = rows[locations[rows] - location_of(extent, 0) < geometry.slots]
            status[rows] = Slot.OUTSIDE
            if len(inside):
                last = int(locations[inside[-1]])
                entries = raw_entries(self.slab.read_entries(geometry, first, last - first + 1))
                raw.setdefault(geometry.slot_class, []).append((inside, entries[locations[inside] - first]))
        for slot_class, parts in raw.items():
            entries = np.concatenate([entries for _, entries in parts])
            yield slot_class, np.concatenate([rows for rows, _ in parts]), view_entries(entries, slot_class.segments)

    def table_rows(self, extent: int, geometry: Geometry, start: int, count: int) -> Records:
        """(count,) of RECORD for neighbouring slots of an extent."""
        location = location_of(extent, start)
        entries = self.slab.read_entries(geometry, location, count)
        return _checked(geometry.slot_class, np.arange(location, location + count), entries)

    def entry(self, location: int) -> Entry | None:
        """One entry with its segments; None for a free one, CorruptRecord for a torn one or one that is outside."""
        geometry = self.geometry(extent_of(location), again=True)
        if geometry is None or slot_of(location) >= geometry.slots:
            raise CorruptRecord(f"{self.path}: there is no slot {location}")
        return parse_entry(self.slab.read_entries(geometry, location, 1).tobytes())

    # -- payload

    def payloads(self, records: Records) -> dict[int, NDArray[np.uint8]]:
        """Payload bytes (s,) by row of `records`, for its LIVE rows; neighbours are read together. OSError as the
        system has it; rows whose extent changed its class meanwhile are left out."""
        rows = np.flatnonzero(records["status"] == Slot.LIVE)
        rows = rows[np.argsort(records["location"][rows], kind="stable")]
        found: dict[int, NDArray[np.uint8]] = {}
        for at, location, count in ranges_of(records["location"][rows]):
            geometry = self.geometry(extent_of(location))
            mine = rows[at : at + count]
            wanted = SlotClass(int(records["slot_bytes"][mine[0]]), int(records["entry_bytes"][mine[0]]))
            if geometry is None or geometry.slot_class != wanted:
                continue
            slots = self.slab.read_payload(geometry, location, count)
            for row, slot in zip(mine.tolist(), slots, strict=True):
                found[row] = slot[: shard_bytes(int(records["block_bytes"][row]))]
        return found

    # -- index

    def page(self, after: bytes | None, limit: int) -> list[IndexEntry]:
        return self.index.page(after, limit)

    def versions(self, keys: Sequence[bytes]) -> list[IndexEntry]:
        """All index entries of some keys, now."""
        held = self.index.look_up(keys)
        return [
            IndexEntry(key + version.digest, version.location, version.generation)
            for key, versions in zip(keys, held, strict=True)
            for version in versions
        ]

    # -- space

    def space(self) -> SpaceUse:
        """Space in use now, by the blocks that the file system has given out."""
        return SpaceUse(allocated_bytes(self.slab.path), tree_bytes(self.path))


def locations_of(entries: Sequence[IndexEntry]) -> NDArray[np.int64]:
    """Locations of index entries; one that no slab can have, from a damaged index, becomes -1."""
    return np.array([entry.location if entry.location < 1 << 63 else -1 for entry in entries], np.int64)


def _stretches(locations: NDArray[np.int64]) -> list[NDArray[np.intp]]:
    """Rows in order of location, cut where more than READ_GAP slots or the border of an extent lie between."""
    order = np.argsort(locations, kind="stable")
    ordered = locations[order]
    cuts = np.flatnonzero((np.diff(ordered) > READ_GAP) | (np.diff(ordered >> SLOT_BITS) != 0)) + 1
    return [rows for rows in np.split(order, cuts) if len(rows)]


def _checked(slot_class: SlotClass, locations: NDArray[np.int64], entries: NDArray[np.void]) -> Records:
    """RECORD rows of entries that stand at these locations, in extents of one class."""
    found = np.zeros(len(entries), RECORD)
    found["location"] = locations
    live = check_entries(entries, slot_class.slot_bytes)
    found["status"] = np.where(live, Slot.LIVE, np.where(free_entries(entries), Slot.FREE, Slot.TORN))
    rows = np.flatnonzero(live)
    good = entries[rows]
    for name in _COPIED:
        found[name][rows] = good[name]
    found["slot_bytes"][rows] = slot_class.slot_bytes
    found["entry_bytes"][rows] = slot_class.entry_bytes
    found["key"][rows] = np.ascontiguousarray(good["key"]).view("V32").reshape(-1)
    found["digest"][rows] = np.ascontiguousarray(good["digest"]).view("V16").reshape(-1)
    return found


def shard_bytes(block_bytes: int) -> int:
    return -(-block_bytes // DATA_SHARDS)


def allocated_bytes(path: str) -> int:
    """Bytes that a file occupies, as du counts them."""
    return os.stat(path, follow_symlinks=False).st_blocks * 512


def tree_bytes(path: str) -> int:
    """Bytes that a directory and all below it occupy, as du counts them; what vanishes meanwhile counts as nothing."""
    total = allocated_bytes(path)
    with os.scandir(path) as entries:
        for entry in entries:
            try:
                found = entry.stat(follow_symlinks=False)
                total += tree_bytes(entry.path) if stat_bits.S_ISDIR(found.st_mode) else found.st_blocks * 512
            except FileNotFoundError:
                continue
    return total
