"""Access stamps: when each slot was last used, in STAMP_SECONDS since the epoch, a uint32 for every slot of every
assigned extent.

In memory the stamps are authoritative while a process owns the node; on disk they are best effort: one file for each
extent, `stamps/` + the extent index as eight hex digits, rewritten in place some time after a change. Losing any of
it makes records look older than they are and nothing else, and not those that arrived last (`efs/recovery.py`).

File, little-endian:

    offset  bytes  field
    0       4      magic b"EFST"
    4       2      format version, 1
    6       2      zero
    8       4      extent index
    12      4      slot bytes
    16      4      entry bytes
    20      4      slot count n
    24      8      xxh3_64 of bytes [0, 24) and [32, 32 + 4 n)
    32      4 n    stamps

A file that is short, damaged, of another extent or of another class counts as zeros. A file is written only while the
sum of all stays within a budget given by the node, so that stamps never push it over its hard limit.

`Stamps` is pure; `write_stamps`, `load_stamps` and `read_stamps` do the I/O, on a node's thread with private copies.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.errors import InvalidArgument
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry
from efs.limits import FORMAT_VERSION, MAX_EXTENTS, MAX_SLOTS_PER_EXTENT, PAGE_BYTES, STAMP_BYTES_PER_SLOT
from efs.osio import Io, read_file, write_fully

STAMP_MAGIC: Final = b"EFST"
STAMP_HEADER_BYTES: Final = 32
_LAYOUT: Final = struct.Struct("<4sHHIIII")
_NAME_DIGITS: Final = 8
_LARGEST_FILE: Final = STAMP_HEADER_BYTES + STAMP_BYTES_PER_SLOT * MAX_SLOTS_PER_EXTENT

assert _LAYOUT.size + 8 == STAMP_HEADER_BYTES
assert 16**_NAME_DIGITS >= MAX_EXTENTS


@dataclass(frozen=True, slots=True)
class StampFile:
    """A private copy of one extent's stamps, ready to be written."""

    extent: int
    geometry: Geometry
    stamps: NDArray[np.uint32]


def stamp_file_bytes(slots: int) -> int:
    """Bytes that a stamp file occupies: its length rounded up to a page."""
    return -(-(STAMP_HEADER_BYTES + STAMP_BYTES_PER_SLOT * slots) // PAGE_BYTES) * PAGE_BYTES


def stamp_file_name(extent: int) -> str:
    return f"{extent:0{_NAME_DIGITS}x}"


class Stamps:
    """Stamps of all extents of a node. Rows are as long as the extent with most slots needs; memory that was never
    written is not backed."""

    def __init__(self, extents: int, budget_bytes: int) -> None:
        if not 0 < extents <= MAX_EXTENTS:
            raise InvalidArgument(f"extents is {extents}, must be 1 to {MAX_EXTENTS}")
        self.extents = extents
        self.budget_bytes = budget_bytes
        self._geometries: dict[int, Geometry] = {}
        self._slots = np.zeros(extents, np.int64)
        self._stamps = np.zeros((extents, 0), np.uint32)
        self._dirty = np.zeros(extents, np.bool_)
        self._on_disk = np.zeros(extents, np.int64)

    def attach(self, extent: int, geometry: Geometry, stamps: NDArray[np.uint32] | None = None) -> None:
        """Begin an extent of a class, with the stamps of its file or zeros. Attached again, it begins anew."""
        if stamps is not None and (stamps.shape != (geometry.slots,) or stamps.dtype != np.uint32):
            raise InvalidArgument(f"stamps are {stamps.dtype}{stamps.shape}, must be uint32({geometry.slots},)")
        self.detach(extent)
        self._widen(geometry.slots)
        self._geometries[extent] = geometry
        self._slots[extent] = geometry.slots
        self._dirty[extent] = stamps is None
        if stamps is not None:
            self._stamps[extent, : geometry.slots] = stamps
            self._on_disk[extent] = stamp_file_bytes(geometry.slots)

    def detach(self, extent: int) -> None:
        """Forget an extent's stamps. Its file stays, and counts, until the extent is attached and written again."""
        if not 0 <= extent < self.extents:
            raise InvalidArgument(f"extent is {extent}, the node has {self.extents}")
        self._geometries.pop(extent, None)
        self._stamps[extent, : self._slots[extent]] = 0
        self._slots[extent] = 0
        self._dirty[extent] = False

    def touch(self, locations: NDArray[np.int64], stamp: int) -> int:
        """Raise the stamps of these slots to `stamp` where they are below it; returns how many rows changed. Locations
        that do not exist (any more) are skipped. The caller clamps `stamp` to its clock."""
        places = self._places(locations)
        flat = self._stamps.reshape(-1)
        below = flat.take(places) < stamp
        changed = int(np.count_nonzero(below))
        if changed:
            places = places[below]
            flat[places] = stamp
            self._dirty[places // self._stamps.shape[1]] = True
        return changed

    def set(self, locations: NDArray[np.int64], stamps: int | NDArray[np.uint32]) -> None:
        """Set stamps of slots that got a new record, up or down. InvalidArgument where a location does not exist."""
        places = self._all_places(locations)
        self._stamps.reshape(-1)[places] = stamps
        if len(places):
            self._dirty[places // self._stamps.shape[1]] = True

    def get(self, locations: NDArray[np.int64]) -> NDArray[np.uint32]:
        """(n,) stamps; InvalidArgument where a location does not exist."""
        return self._stamps.reshape(-1).take(self._all_places(locations))

    def row(self, extent: int) -> NDArray[np.uint32]:
        """(slots,) read-only view of an extent's stamps; empty for one that is not attached."""
        view = self._stamps[extent, : self._slots[extent]]
        view.flags.writeable = False
        return view

    @property
    def dirty(self) -> bool:
        """Whether a stamp changed since the last `take_dirty`."""
        return bool(self._dirty.any())

    def take_dirty(self) -> list[StampFile]:
        """Copies of the extents that changed since the last call; they count as clean from here on. Those that no
        longer fit the budget are left out and stay without a file."""
        files = []
        for extent in np.flatnonzero(self._dirty).tolist():
            geometry = self._geometries[extent]
            size = stamp_file_bytes(geometry.slots)
            # The file may still be the longer one of an earlier class while this one waits to be written.
            held = max(size, int(self._on_disk[extent]))
            if int(self._on_disk.sum()) - int(self._on_disk[extent]) + held <= self.budget_bytes:
                self._on_disk[extent] = held
                files.append(StampFile(extent, geometry, self._stamps[extent, : geometry.slots].copy()))
        self._dirty[:] = False
        return files

    def put_back(self, extents: Sequence[int]) -> None:
        """Count extents as changed again, after their write failed."""
        for extent in extents:
            self._dirty[extent] = extent in self._geometries

    def _places(self, locations: NDArray[np.int64]) -> NDArray[np.int64]:
        """Index into the flat stamps of each location that exists."""
        extents, slots = locations >> SLOT_BITS, locations & SLOT_MASK
        if len(extents) and (extents.min() < 0 or extents.max() >= self.extents):
            inside = (extents >= 0) & (extents < self.extents)
            extents, slots = extents[inside], slots[inside]
        exist = slots < self._slots.take(extents)
        if not exist.all():
            extents, slots = extents[exist], slots[exist]
        return extents * self._stamps.shape[1] + slots

    def _all_places(self, locations: NDArray[np.int64]) -> NDArray[np.int64]:
        places = self._places(locations)
        if len(places) != len(locations):
            raise InvalidArgument("a location does not exist")
        return places

    def _widen(self, slots: int) -> None:
        if slots > self._stamps.shape[1]:
            wider = np.zeros((self.extents, slots), np.uint32)
            used = np.flatnonzero(self._slots)
            wider[used, : self._stamps.shape[1]] = self._stamps[used]
            self._stamps = wider


def write_stamps(io: Io, directory: str, files: Sequence[StampFile]) -> list[int]:
    """Write stamp files in place; returns the extents whose write failed. Never raises OSError."""
    failed = []
    for file in files:
        try:
            _write_one(io, os.path.join(directory, stamp_file_name(file.extent)), _pack(file))
        except OSError:
            failed.append(file.extent)
    return failed


def load_stamps(
    io: Io, directory: str, geometries: Mapping[int, Geometry], *, remove_others: bool
) -> dict[int, NDArray[np.uint32]]:
    """Stamps by extent of all files that are sound and of the class that their extent has now.

    An extent without such a file is not in the result. With `remove_others` (owners only) the stamp files that are not
    in the result are removed, so that the budget is exact. Never raises OSError: what cannot be read does not count.
    """
    loaded: dict[int, NDArray[np.uint32]] = {}
    try:
        names = io.listdir(directory)
    except OSError:
        return loaded
    for name in names:
        extent = _extent_of_name(name)
        if extent is None:
            continue
        path = os.path.join(directory, name)
        geometry = geometries.get(extent)
        try:
            stamps = None if geometry is None else _unpack(read_file(io, path, _LARGEST_FILE), extent, geometry)
            if stamps is not None:
                loaded[extent] = stamps
            elif remove_others:
                io.unlink(path)
        except OSError:
            continue
    return loaded


def read_stamps(io: Io, directory: str, extent: int, geometry: Geometry) -> NDArray[np.uint32]:
    """(slots,) stamps of one extent, zeros where its file is absent, unreadable, damaged or of another class."""
    path = os.path.join(directory, stamp_file_name(extent))
    try:
        stamps = _unpack(read_file(io, path, _LARGEST_FILE), extent, geometry)
    except OSError:
        stamps = None
    return np.zeros(geometry.slots, np.uint32) if stamps is None else stamps


def _write_one(io: Io, path: str, data: bytes) -> None:
    fd = io.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        io.truncate(fd, len(data))
        write_fully(io, fd, memoryview(data), 0)
    finally:
        io.close(fd)


def _pack(file: StampFile) -> bytes:
    head, body = _head(file.extent, file.geometry), file.stamps.astype("<u4").tobytes()
    return head + xxh3_64(head + body).to_bytes(8, "little") + body


def _unpack(data: bytes, extent: int, geometry: Geometry) -> NDArray[np.uint32] | None:
    """(slots,) stamps, None unless the file is exactly what this extent and class should have."""
    head, body = data[: _LAYOUT.size], data[STAMP_HEADER_BYTES:]
    checksum = data[_LAYOUT.size : STAMP_HEADER_BYTES]
    if head != _head(extent, geometry) or len(body) != STAMP_BYTES_PER_SLOT * geometry.slots:
        return None
    if checksum != xxh3_64(head + body).to_bytes(8, "little"):
        return None
    return np.frombuffer(body, "<u4").astype(np.uint32)


def _head(extent: int, geometry: Geometry) -> bytes:
    sizes = (geometry.slot_class.slot_bytes, geometry.slot_class.entry_bytes, geometry.slots)
    return _LAYOUT.pack(STAMP_MAGIC, FORMAT_VERSION, 0, extent, *sizes)


def _extent_of_name(name: str) -> int | None:
    if len(name) != _NAME_DIGITS or set(name) - set("0123456789abcdef"):
        return None
    return int(name, 16)
