"""A slab that its server lets clients of the same machine read by themselves.

A server tells a client that comes over a Unix socket where its slab is. A client that can open the file (it is its
owner's alone), and finds that it is the very same one, reads what is in the page cache by itself: one copy instead of
two, and no work for the server. Everything else goes over the wire as before: what is not in the cache, look-ups, and
all that changes anything. The file is opened for reading only, so the server stays its one owner.

*What may go wrong is what may go wrong in the server too.* A slot may be used again, or its extent cut anew, between
the look-up and the read: the reader verifies every byte and looks the record up again (`efs/examine.py`). How an extent
is cut is read from its own header page before each range, or once for ranges that are shown together. Ranges are read
with `preadv`, or copied from a memory map where whoever opened the store has asked for maps: a failing disk is then
SIGBUS, not an error.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from efs.contract import Landing, Span
from efs.errors import EfsError
from efs.extent import EXTENT_HEADER_BYTES, SLOT_BITS, SLOT_MASK, Geometry, parse_extent_header
from efs.osio import Io
from efs.slab import Slab
from efs.slotreads import SlotReads


class SlabPlace(msgspec.Struct, frozen=True, array_like=True):
    """Where a slab is and what it is: path, file identity, and how it is cut."""

    path: str
    device: int
    inode: int
    extent_bytes: int
    extents: int


def place_of(slab: Slab) -> SlabPlace:
    """What a server says of its open slab."""
    found = os.fstat(slab.fd)
    return SlabPlace(os.path.abspath(slab.path), found.st_dev, found.st_ino, slab.extent_bytes, slab.extents)


class SharedSlab:
    """A `SlotSource` over another process's slab. Belongs to the loop's thread."""

    def __init__(self, io: Io, slab: Slab, mapped: bool) -> None:
        self._io = io
        self.slab = slab
        self._head = memoryview(bytearray(EXTENT_HEADER_BYTES))
        self._known: dict[int, tuple[bytes, Geometry | None]] = {}
        self._now: dict[int, Geometry | None] | None = None
        """How extents are cut, as was read during the call that is being answered; None: read it each time."""
        self._reads = SlotReads(self, mapped)

    @classmethod
    def open(cls, io: Io, place: SlabPlace, node_id: str, *, mapped: bool = False) -> SharedSlab | None:
        """None where there is no such file for this process, or another one."""
        try:
            slab = Slab.open(io, place.path, bytes.fromhex(node_id), place.extent_bytes, place.extents, writable=False,
                             mapped=mapped)
        except (EfsError, ValueError):
            return None
        found = os.fstat(slab.fd)
        if (found.st_dev, found.st_ino) != (place.device, place.inode):
            slab.close()
            return None
        return cls(io, slab, mapped)

    def close(self) -> None:
        self.slab.close()

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """See the contract."""
        self._now = {}
        try:
            return self._reads.views_now(spans)
        finally:
            self._now = None

    def read_now(self, span: Span, landing: Landing) -> bool:
        """See the contract."""
        return self._reads.read_now(span, landing)

    def geometry_of(self, location: int, slot_bytes: int, count: int) -> Geometry | None:
        """By the extent's header page, if that is in the page cache."""
        extent = location >> SLOT_BITS
        if self._now is None:
            geometry = self._cut_of(extent)
        elif extent in self._now:
            geometry = self._now[extent]
        else:
            geometry = self._now[extent] = self._cut_of(extent)
        if geometry is None or geometry.slot_class.slot_bytes != slot_bytes:
            return None
        return geometry if (location & SLOT_MASK) + count <= geometry.slots else None

    def _cut_of(self, extent: int) -> Geometry | None:
        """As its header page says just now."""
        if not 0 <= extent < self.slab.extents:
            return None
        try:
            size = self._io.preadv(self.slab.fd, [self._head], extent * self.slab.extent_bytes, nowait=True)
        except OSError:
            return None
        return self._parsed(extent, bytes(self._head)) if size == EXTENT_HEADER_BYTES else None

    def _parsed(self, extent: int, head: bytes) -> Geometry | None:
        known = self._known.get(extent)
        if known is None or known[0] != head:
            try:
                geometry = parse_extent_header(head, self.slab.node_id, extent, self.slab.extent_bytes, self.slab.path)
            except EfsError:
                geometry = None
            known = self._known[extent] = head, geometry
        return known[1]
