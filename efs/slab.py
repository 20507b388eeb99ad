"""The slab file of a node: all its extents in one sparse file (`efs/extent.py` has the format). I/O shell only.

The file is made at its full apparent size at once; blocks of an extent are allocated when it is first assigned, so
that `du` counts extents in use, a full disk shows at assignment and never in the middle of a slot, and one memory map
covers everything. It holds nothing about which slots are live: tables say that, `efs/allocator.py` keeps it.

No method here decides, locks or remembers anything that changes, so a node's reader and writer threads may call all of
them at once. Every position is computed from the location and the geometry that the caller passes; a location
outside its extent is refused with InvalidArgument. Errors of the system come through as OSError; the end of the file
where there should be data is EIO.

Order of a put, which the caller keeps: `clear_entries`, `write_payload`, `write_entries`, [power: `sync`], index
commit. A process killed anywhere in it leaves the slot free (zeros or a torn entry) or whole. Power lost before the
sync may keep the entry without its payload: such records are unverified at the next boot.
"""

from __future__ import annotations

import errno
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import CorruptRecord, EfsError, FormatUnsupported, IdentityMismatch, InvalidArgument, OpenFailed
from efs.extent import (
    Geometry,
    SlotClass,
    build_extent_header,
    extent_of,
    location_of,
    parse_extent_header,
    require_extent_bytes,
    slot_of,
)
from efs.limits import IOV_MAX, MAX_EXTENTS, MIB, PAGE_BYTES
from efs.osio import Io, read_exactly, read_scattered, write_fully
from efs.shard import view_entries

_ZEROS: Final = bytes(1 * MIB)


@dataclass(frozen=True, slots=True)
class ExtentState:
    """What `Slab.scan` found of one extent: a geometry when assigned, a problem when damaged, neither when free."""

    extent: int
    geometry: Geometry | None
    problem: EfsError | None


class Slab:
    """An open slab file. `view` is the read-only map of the whole file as bytes when it was opened with `mapped`.

    `size_bytes` is the file's size at opening; `extents` the number that it should have.
    """

    def __init__(
        self, io: Io, path: str, fd: int, node_id: bytes, extent_bytes: int, extents: int, size_bytes: int
    ) -> None:
        self._io = io
        self._fd: int | None = fd
        self._map: mmap.mmap | None = None
        self.path = path
        self.node_id = node_id
        self.extent_bytes = extent_bytes
        self.extents = extents
        self.size_bytes = size_bytes
        self.view: NDArray[np.uint8] | None = None

    # -- Life of the file

    @staticmethod
    def create(io: Io, path: str, extent_bytes: int, extents: int) -> None:
        """Make the sparse file (0600) and sync it; the caller syncs the directory. OSError EEXIST when it is there."""
        _require_sizes(extent_bytes, extents)
        fd = io.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            io.truncate(fd, extent_bytes * extents)
            io.fsync(fd)
        finally:
            io.close(fd)

    @classmethod
    def open(
        cls,
        io: Io,
        path: str,
        node_id: bytes,
        extent_bytes: int,
        extents: int,
        *,
        writable: bool = True,
        mapped: bool = False,
    ) -> Slab:
        """Open an existing slab; OpenFailed names the path.

        A file that was cut short is opened all the same: `scan` and `read_class` report the extents that lost bytes.
        Opened writable it is made full size again (the lost bytes read as zeros and fail their checks), opened
        read-only it is left alone. A file that is too long is left alone and its tail never used.
        """
        _require_sizes(extent_bytes, extents)
        try:
            fd = io.open(path, os.O_RDWR if writable else os.O_RDONLY)
        except OSError as error:
            raise OpenFailed(path, error) from error
        try:
            size = io.size(fd)
            slab = cls(io, path, fd, node_id, extent_bytes, extents, size)
            if writable and size < extent_bytes * extents:
                io.truncate(fd, extent_bytes * extents)
                size = extent_bytes * extents
            if mapped and size:
                slab._map = io.map(fd, min(size, extent_bytes * extents), writable=False)
                slab.view = np.frombuffer(slab._map, np.uint8)
        except OSError as error:
            io.close(fd)
            raise OpenFailed(path, error) from error
        return slab

    def close(self) -> None:
        """Close the file and drop the map, which lives on while somebody holds a view of it. A second call does
        nothing."""
        fd, self._fd, self.view, self._map = self._fd, None, None, None
        if fd is not None:
            self._io.close(fd)

    @property
    def fd(self) -> int:
        """The open descriptor; OSError EBADF after `close`."""
        if self._fd is None:
            raise OSError(errno.EBADF, f"{self.path} is closed")
        return self._fd

    def sync(self) -> None:
        """fdatasync."""
        self._io.fdatasync(self.fd)

    # -- Extents

    def read_class(self, extent: int) -> Geometry | None:
        """Geometry of an extent, None when free; raises what `parse_extent_header` raises, and CorruptRecord for an
        extent that the file at opening did not cover."""
        self._require_extent(extent)
        end = (extent + 1) * self.extent_bytes
        if end > self.size_bytes:
            raise CorruptRecord(f"{self.path} extent {extent}: ends at byte {end}, the file had {self.size_bytes}")
        page = bytearray(PAGE_BYTES)
        read_exactly(self._io, self.fd, memoryview(page), extent * self.extent_bytes)
        return parse_extent_header(memoryview(page), self.node_id, extent, self.extent_bytes, self.path)

    def scan(self) -> list[ExtentState]:
        """`read_class` of every extent, with errors as values. OSError ends it."""
        states = []
        for extent in range(self.extents):
            try:
                states.append(ExtentState(extent, self.read_class(extent), None))
            except (CorruptRecord, FormatUnsupported, IdentityMismatch) as problem:
                states.append(ExtentState(extent, None, problem))
        return states

    def assign(self, extent: int, slot_class: SlotClass, sync: bool) -> Geometry:
        """Give an extent to a class, whatever it held: allocate, zero the header page and the table, write the new
        header page. With `sync` (power mode) the file is synced before and after the last step."""
        self._require_extent(extent)
        geometry = Geometry(self.extent_bytes, slot_class)
        page = build_extent_header(self.node_id, extent, geometry)
        start = extent * self.extent_bytes
        self._io.allocate(self.fd, start, self.extent_bytes)
        self._zero(start, PAGE_BYTES)
        self._zero(start + geometry.table_offset, geometry.data_offset - geometry.table_offset)
        if sync:
            self.sync()
        write_fully(self._io, self.fd, memoryview(page), start)
        if sync:
            self.sync()
        return geometry

    # -- Table entries

    def read_table(self, extent: int, geometry: Geometry) -> NDArray[np.void]:
        """(slots,) entries of `entry_dtype`, writable private memory. Nothing in them is checked yet."""
        return self.read_entries(geometry, location_of(extent, 0), geometry.slots)

    def read_entries(self, geometry: Geometry, location: int, count: int) -> NDArray[np.void]:
        """(count,) neighbouring entries, writable private memory, unchecked."""
        self._require_range(geometry, location, count)
        raw = np.empty(count * geometry.slot_class.entry_bytes, np.uint8)
        read_exactly(self._io, self.fd, raw.data, geometry.entry_position(location))
        return view_entries(raw, geometry.slot_class.segments)

    def write_entries(self, geometry: Geometry, location: int, entries: NDArray[np.uint8]) -> None:
        """Write (count, entry bytes) neighbouring entries in one piece."""
        self._require_rows(geometry, location, entries, geometry.slot_class.entry_bytes)
        write_fully(self._io, self.fd, entries.reshape(-1).data, geometry.entry_position(location))

    def clear_entries(self, geometry: Geometry, location: int, count: int) -> None:
        """Zero neighbouring entries: their slots are free from here on."""
        self._require_range(geometry, location, count)
        self._zero(geometry.entry_position(location), count * geometry.slot_class.entry_bytes)

    # -- Payload

    def write_payload(self, geometry: Geometry, location: int, payload: NDArray[np.uint8]) -> None:
        """Write (count, slot bytes) C-contiguous neighbouring slots in one piece."""
        self._require_rows(geometry, location, payload, geometry.slot_class.slot_bytes)
        write_fully(self._io, self.fd, payload.reshape(-1).data, geometry.slot_position(location))

    def read_payload(
        self, geometry: Geometry, location: int, count: int, into: NDArray[np.uint8] | None = None
    ) -> NDArray[np.uint8]:
        """(count, slot bytes) neighbouring slots, into a C-contiguous array of that shape or a new one."""
        self._require_range(geometry, location, count)
        slots = np.empty((count, geometry.slot_class.slot_bytes), np.uint8) if into is None else into
        self._require_rows(geometry, location, slots, geometry.slot_class.slot_bytes)
        if len(slots) != count:
            raise InvalidArgument(f"{len(slots)} rows for {count} slots")
        read_exactly(self._io, self.fd, slots.reshape(-1).data, geometry.slot_position(location))
        return slots

    def read_scattered(self, geometry: Geometry, location: int, buffers: Sequence[memoryview]) -> None:
        """Fill flat byte views, one after the other, with the bytes from the start of a slot on. May block."""
        self._require_bytes(geometry, location, sum(map(len, buffers)))
        read_scattered(self._io, self.fd, buffers, geometry.slot_position(location))

    def read_scattered_now(self, geometry: Geometry, location: int, buffers: Sequence[memoryview]) -> bool:
        """The same from the page cache; False, with undefined bytes in the buffers, where anything had to be waited
        for or the kernel cannot tell. Never blocks."""
        self._require_bytes(geometry, location, sum(map(len, buffers)))
        position = geometry.slot_position(location)
        try:
            for start in range(0, len(buffers), IOV_MAX):
                batch = buffers[start : start + IOV_MAX]
                wanted = sum(map(len, batch))
                if self._io.preadv(self.fd, batch, position, nowait=True) != wanted:
                    return False
                position += wanted
        except BlockingIOError:
            return False
        except OSError as error:
            if error.errno != errno.ENOTSUP:
                raise
            return False
        return True

    def mapped_slots(self, geometry: Geometry, location: int, count: int) -> NDArray[np.uint8]:
        """(count, slot bytes) neighbouring slots, which the extent must have, as a view of the map. InvalidArgument
        without a map, CorruptRecord where the file is too short for them."""
        if self.view is None:
            raise InvalidArgument(f"{self.path} is not mapped")
        start = geometry.slot_position(location)
        stop = start + count * geometry.slot_class.slot_bytes
        if stop > len(self.view):
            raise CorruptRecord(f"{self.path}: slots end at byte {stop}, the file at {len(self.view)}")
        return self.view[start:stop].reshape(count, geometry.slot_class.slot_bytes)

    # -- Checks

    def _zero(self, position: int, size: int) -> None:
        zeros = memoryview(_ZEROS)
        for start in range(0, size, len(zeros)):
            write_fully(self._io, self.fd, zeros[: min(len(zeros), size - start)], position + start)

    def _require_extent(self, extent: int) -> None:
        if not 0 <= extent < self.extents:
            raise InvalidArgument(f"extent is {extent}, the slab has {self.extents}")

    def _require_range(self, geometry: Geometry, location: int, count: int) -> None:
        self._require_extent(extent_of(location))
        if geometry.extent_bytes != self.extent_bytes:
            raise InvalidArgument(f"a geometry of {geometry.extent_bytes} bytes in a slab of {self.extent_bytes}")
        first = slot_of(location)
        if count < 1 or first + count > geometry.slots:
            raise InvalidArgument(f"slots {first} to {first + count} of an extent that has {geometry.slots}")

    def _require_rows(self, geometry: Geometry, location: int, rows: NDArray[np.uint8], size: int) -> None:
        if rows.ndim != 2 or rows.shape[1] != size or rows.dtype != np.uint8 or not rows.flags.c_contiguous:
            raise InvalidArgument(f"rows are {rows.dtype}{rows.shape}, must be C-contiguous uint8 (n, {size})")
        self._require_range(geometry, location, len(rows))

    def _require_bytes(self, geometry: Geometry, location: int, size: int) -> None:
        self._require_range(geometry, location, -(-size // geometry.slot_class.slot_bytes))


def _require_sizes(extent_bytes: int, extents: int) -> None:
    require_extent_bytes(extent_bytes)
    if not 0 < extents <= MAX_EXTENTS:
        raise InvalidArgument(f"extents is {extents}, must be 1 to {MAX_EXTENTS}")
