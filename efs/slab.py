"""The slab file of a node: all its extents in one sparse file (`efs/extent.py` has the format). I/O shell only.

The file is made at its full apparent size at once; blocks of an extent are allocated when it is first assigned, so
that `du` counts extents in use, a full disk shows at assignment and never in the middle of a slot, and one memory map
covers everything. It holds nothing about which slots are live: tables say that, `efs/allocator.py` keeps it.

No method here decides, locks or remembers anything that changes, so a node's reader and writer threads may call all of
them at once. Every position is computed from the location and the geometry that the caller passes; a location
outside its extent is refused with InvalidArgument. Errors of the system come through as OSError.

Order of a put, which the caller keeps: `clear_entries`, `write_payload`, `write_entries`, [power: `sync`], index commit.
A crash anywhere in it leaves the slot free (zeros or a torn entry) or whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.errors import EfsError
from efs.extent import Geometry, SlotClass
from efs.osio import Io


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

    path: str
    node_id: bytes
    extent_bytes: int
    extents: int
    size_bytes: int
    view: NDArray[np.uint8] | None

    @staticmethod
    def create(io: Io, path: str, extent_bytes: int, extents: int) -> None:
        """Make the sparse file (0600) and sync it; the caller syncs the directory. OSError EEXIST when it is there."""
        raise NotImplementedError

    @classmethod
    def open(cls, io: Io, path: str, node_id: bytes, extent_bytes: int, extents: int, *, writable: bool = True,
             mapped: bool = False) -> Slab:
        """Open an existing slab; OpenFailed names the path.

        A file that was cut short is opened all the same: `scan` and `read_class` report the extents that lost bytes.
        Opened writable it is made full size again (the lost bytes read as zeros and fail their checks), opened
        read-only it is left alone.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Close the file and drop the map. A second call does nothing."""
        raise NotImplementedError

    def read_class(self, extent: int) -> Geometry | None:
        """Geometry of an extent, None when free; raises what `parse_extent_header` raises, and CorruptRecord for an
        extent that the file at opening did not cover."""
        raise NotImplementedError

    def scan(self) -> list[ExtentState]:
        """`read_class` of every extent, with errors as values. OSError ends it."""
        raise NotImplementedError

    def assign(self, extent: int, slot_class: SlotClass, sync: bool) -> Geometry:
        """Give an extent to a class, whatever it held: allocate, zero the header page and the table, write the new
        header page. With `sync` (power mode) the file is synced before and after the last step."""
        raise NotImplementedError

    def read_table(self, extent: int, geometry: Geometry) -> NDArray[np.void]:
        """(slots,) entries of `entry_dtype`, writable private memory. Nothing in them is checked yet."""
        raise NotImplementedError

    def read_entries(self, geometry: Geometry, location: int, count: int) -> NDArray[np.void]:
        """(count,) neighbouring entries, unchecked."""
        raise NotImplementedError

    def write_entries(self, geometry: Geometry, location: int, entries: NDArray[np.uint8]) -> None:
        """Write (count, entry bytes) neighbouring entries in one piece."""
        raise NotImplementedError

    def clear_entries(self, geometry: Geometry, location: int, count: int) -> None:
        """Zero neighbouring entries: their slots are free from here on."""
        raise NotImplementedError

    def write_payload(self, geometry: Geometry, location: int, payload: NDArray[np.uint8]) -> None:
        """Write (count, slot bytes) C-contiguous neighbouring slots, in pieces of at most STAGING_PIECE_BYTES."""
        raise NotImplementedError

    def read_payload(self, geometry: Geometry, location: int, count: int,
                     into: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
        """(count, slot bytes) neighbouring slots, into a C-contiguous array of that shape or a new one."""
        raise NotImplementedError

    def read_scattered(self, geometry: Geometry, location: int, buffers: Sequence[memoryview]) -> None:
        """Fill flat byte views, one after the other, with the bytes from the start of a slot on. May block."""
        raise NotImplementedError

    def read_scattered_now(self, geometry: Geometry, location: int, buffers: Sequence[memoryview]) -> bool:
        """The same from the page cache; False, with undefined bytes in the buffers, where anything had to be waited
        for or the kernel cannot tell. Never blocks."""
        raise NotImplementedError

    def mapped_slots(self, geometry: Geometry, location: int, count: int) -> NDArray[np.uint8]:
        """(count, slot bytes) neighbouring slots as a view of the map. InvalidArgument without a map."""
        raise NotImplementedError

    def sync(self) -> None:
        """fdatasync."""
        raise NotImplementedError


