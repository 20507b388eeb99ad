"""Extents: how a slab is cut, and the header page of each extent. Pure; `efs/slab.py` does the I/O. Format version 1.

A slab is a sequence of equal extents. Extent i occupies bytes [i · X, (i + 1) · X) of the file, X = extent bytes, a
multiple of 4,096. An extent in use belongs to one *class* (slot bytes, entry bytes) and has three parts:

    0               4,096 bytes         header page
    4,096           E · n, padded       table: n entries of E bytes (`efs/shard.py`), zeros up to a page border
    data offset     Z · n               n slots of Z bytes, payload only, zero-padded by their writer
    …               < one chunk         unused

The header page is 80 bytes, then zeros; integers are little-endian:

    offset  bytes  field
    0       4      magic b"EFSX"
    4       2      format version, 1
    6       2      zero
    8       16     node id
    24      4      extent index
    28      4      slot bytes Z, a multiple of 64
    32      4      entry bytes E
    36      4      slot count n
    40      8      extent bytes X
    48      8      data offset
    56      16     zero
    72      8      xxh3_64 of bytes [0, 72)

Node id and extent index make an extent refuse any other place than its own. Slot count and data offset follow from
X, Z and E; they are written so that a reader of another version notices that it would cut the extent differently.

*Chunks.* Slots are used in chunks of c = 4,096 / gcd(4,096, Z) slots: the smallest group that begins and ends on a page
border (32 · 11,392 bytes = 89 pages for V4.1). n is a multiple of c. Where a chunk would be more than an eighth of the
extent, c is halved until it is not, or until it is 1: with slots so large the two partial pages of a range cost nothing.

*Locations.* location = extent · 2^20 + slot, an int64. Neighbouring slots of an extent differ by 1; neighbouring
locations in different extents do not exist, as no extent has 2^20 slots.

*Crash argument.* An extent changes its class in this order: header page zeroed, table of the new class zeroed,
[power: sync], new header page written, [power: sync]. Before the last step the extent is free, after it the table is
empty. Where a power loss keeps the last step but not the zeros before it, old entries may show through: they are
refused where their place or their size does not fit, and their payload is verified like any other before use, because an
unclean boot leaves all records unverified.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

import numpy as np
from numpy.typing import NDArray

SLOT_BITS: Final = 20
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
EXTENT_MAGIC: Final = b"EFSX"
EXTENT_HEADER_BYTES: Final = 80
NODE_ID_BYTES: Final = 16


@dataclass(frozen=True, slots=True, order=True)
class SlotClass:
    """What an extent is cut for: bytes of a slot, and bytes of a table entry (hence the number of segments)."""

    slot_bytes: int
    entry_bytes: int

    @property
    def segments(self) -> int:
        raise NotImplementedError


@dataclass(frozen=True)
class Geometry:
    """How an extent of a class is cut. InvalidArgument when not one slot fits, or a size is out of range.

    All offsets are from the start of the extent unless the name says otherwise.
    """

    extent_bytes: int
    slot_class: SlotClass

    @cached_property
    def chunk_slots(self) -> int:
        raise NotImplementedError

    @cached_property
    def slots(self) -> int:
        """Slots of the extent, a multiple of `chunk_slots`."""
        raise NotImplementedError

    @cached_property
    def chunks(self) -> int:
        raise NotImplementedError

    @property
    def table_offset(self) -> int:
        raise NotImplementedError

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of the entries alone, without the padding."""
        raise NotImplementedError

    @cached_property
    def data_offset(self) -> int:
        raise NotImplementedError

    def entry_position(self, location: int) -> int:
        """Byte offset of an entry in the slab file."""
        raise NotImplementedError

    def slot_position(self, location: int) -> int:
        """Byte offset of a slot in the slab file."""
        raise NotImplementedError


def location_of(extent: int, slot: int) -> int:
    raise NotImplementedError


def extent_of(location: int) -> int:
    raise NotImplementedError


def slot_of(location: int) -> int:
    raise NotImplementedError


def ranges_of(locations: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Cut rows into stretches of neighbouring locations: (first row, first location, count), in row order."""
    raise NotImplementedError


def build_extent_header(node_id: bytes, extent: int, geometry: Geometry) -> bytes:
    """The 4,096 bytes of a header page."""
    raise NotImplementedError


def parse_extent_header(page: bytes | memoryview, node_id: bytes, extent: int, extent_bytes: int,
                        path: str) -> Geometry | None:
    """The geometry of an extent from its header page; None for a free extent (80 zero bytes).

    CorruptRecord for a damaged page, FormatUnsupported for another version, IdentityMismatch for another node's page or
    one of another place. Each names the path and the extent.
    """
    raise NotImplementedError
