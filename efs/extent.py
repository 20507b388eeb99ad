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

Later versions keep magic, version and checksum where they are, so that a whole page of another version can be told
from a damaged one. Node id and extent index make an extent refuse any other place than its own. Slot count and data
offset follow from X, Z and E; they are written so that a reader which would cut the extent differently notices.

*Chunks.* Slots are used in chunks of c = 4,096 / gcd(4,096, Z) slots: the smallest group that begins and ends on a page
border (32 · 11,392 bytes = 89 pages for V4.1). n is a multiple of c. Where a chunk would be more than an eighth of the
extent, c is halved until it is not, or until it is 1: the slots are then so large that the partial pages of a range
hardly count.

*Locations.* location = extent · 2^20 + slot, an int64. Neighbouring slots of an extent differ by 1; neighbouring
locations in different extents do not exist, as no extent has 2^20 slots.

*Crash argument.* An extent changes its class in this order: header page zeroed, table of the new class zeroed,
[power: sync], new header page written, [power: sync]. Before the last step the extent is free, after it the table is
empty. Where a power loss keeps the last step but not the zeros before it, old entries may show through: they are
refused where their place or their size does not fit, and their payload is verified like any other before use, because
an unclean boot leaves all records unverified.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property
from math import gcd
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.errors import CorruptRecord, FormatUnsupported, IdentityMismatch, InvalidArgument
from efs.limits import FORMAT_VERSION, MAX_EXTENTS, MAX_SLOTS_PER_EXTENT, MIN_EXTENT_BYTES, PAGE_BYTES, SLOT_ALIGN_BYTES
from efs.shape import BlockShape
from efs.shard import entry_bytes, segments_of_entry

SLOT_BITS: Final = 20
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
EXTENT_MAGIC: Final = b"EFSX"
EXTENT_HEADER_BYTES: Final = 80
NODE_ID_BYTES: Final = 16
_LARGEST_CHUNK_SHARE: Final = 8
"""A chunk is at most this fraction of an extent, so that the rounding to whole chunks costs little."""
_LAYOUT: Final = struct.Struct("<4sHH16sIIIIQQ16xQ")

assert _LAYOUT.size == EXTENT_HEADER_BYTES <= PAGE_BYTES
assert 1 << SLOT_BITS == MAX_SLOTS_PER_EXTENT


@dataclass(frozen=True, slots=True, order=True)
class SlotClass:
    """What an extent is cut for: bytes of a slot, and bytes of a table entry (hence the number of segments)."""

    slot_bytes: int
    entry_bytes: int

    @classmethod
    def of(cls, shape: BlockShape) -> SlotClass:
        """The class that holds the shards of a block."""
        return cls(shape.slot_bytes, entry_bytes(len(shape.segment_bytes)))

    @property
    def segments(self) -> int:
        return segments_of_entry(self.entry_bytes)


@dataclass(frozen=True)
class Geometry:
    """How an extent of a class is cut. InvalidArgument when not one slot fits, or a size is out of range.

    All offsets are from the start of the extent unless the name says otherwise.
    """

    extent_bytes: int
    slot_class: SlotClass

    def __post_init__(self) -> None:
        require_extent_bytes(self.extent_bytes)
        slot_bytes = self.slot_class.slot_bytes
        if slot_bytes <= 0 or slot_bytes % SLOT_ALIGN_BYTES:
            raise InvalidArgument(f"slot_bytes is {slot_bytes}, must be a multiple of {SLOT_ALIGN_BYTES}")
        segments_of_entry(self.slot_class.entry_bytes)
        if not self._fits(1):
            raise InvalidArgument(f"a slot of {slot_bytes} bytes does not fit an extent of {self.extent_bytes} bytes")

    def _fits(self, slots: int) -> bool:
        table = _to_page(slots * self.slot_class.entry_bytes)
        return PAGE_BYTES + table + slots * self.slot_class.slot_bytes <= self.extent_bytes

    @cached_property
    def chunk_slots(self) -> int:
        slots = PAGE_BYTES // gcd(PAGE_BYTES, self.slot_class.slot_bytes)
        while slots > 1 and slots * self.slot_class.slot_bytes * _LARGEST_CHUNK_SHARE > self.extent_bytes:
            slots //= 2
        return slots

    @cached_property
    def slots(self) -> int:
        """Slots of the extent, a multiple of `chunk_slots`."""
        each = self.slot_class.slot_bytes + self.slot_class.entry_bytes
        chunks = min((self.extent_bytes - PAGE_BYTES) // each, MAX_SLOTS_PER_EXTENT - 1) // self.chunk_slots
        while not self._fits(chunks * self.chunk_slots):
            chunks -= 1
        return chunks * self.chunk_slots

    @cached_property
    def chunks(self) -> int:
        return self.slots // self.chunk_slots

    @property
    def table_offset(self) -> int:
        return PAGE_BYTES

    @cached_property
    def table_bytes(self) -> int:
        """Bytes of the entries alone, without the padding."""
        return self.slots * self.slot_class.entry_bytes

    @cached_property
    def data_offset(self) -> int:
        return PAGE_BYTES + _to_page(self.table_bytes)

    def entry_position(self, location: int) -> int:
        """Byte offset of an entry in the slab file."""
        start = extent_of(location) * self.extent_bytes
        return start + PAGE_BYTES + slot_of(location) * self.slot_class.entry_bytes

    def slot_position(self, location: int) -> int:
        """Byte offset of a slot in the slab file."""
        start = (location >> SLOT_BITS) * self.extent_bytes
        return start + self.data_offset + (location & SLOT_MASK) * self.slot_class.slot_bytes


def require_extent_bytes(extent_bytes: int) -> None:
    """InvalidArgument for a size that extents cannot have."""
    if extent_bytes < MIN_EXTENT_BYTES or extent_bytes % PAGE_BYTES:
        raise InvalidArgument(
            f"extent_bytes is {extent_bytes}, must be at least {MIN_EXTENT_BYTES} and a multiple of {PAGE_BYTES}"
        )


def _to_page(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES


def location_of(extent: int, slot: int) -> int:
    return extent << SLOT_BITS | slot


def extent_of(location: int) -> int:
    return location >> SLOT_BITS


def slot_of(location: int) -> int:
    return location & SLOT_MASK


def ranges_of(locations: NDArray[np.int64]) -> list[tuple[int, int, int]]:
    """Cut rows into stretches of neighbouring locations: (first row, first location, count), in row order."""
    if not len(locations):
        return []
    starts = np.concatenate(([0], np.flatnonzero(np.diff(locations) != 1) + 1))
    counts = np.diff(np.append(starts, len(locations)))
    return list(zip(starts.tolist(), locations[starts].tolist(), counts.tolist(), strict=True))


def build_extent_header(node_id: bytes, extent: int, geometry: Geometry) -> bytes:
    """The 4,096 bytes of a header page."""
    if len(node_id) != NODE_ID_BYTES:
        raise InvalidArgument(f"a node id has {len(node_id)} bytes, must have {NODE_ID_BYTES}")
    if not 0 <= extent < MAX_EXTENTS:
        raise InvalidArgument(f"extent is {extent}, must be 0 to {MAX_EXTENTS - 1}")
    sizes = (geometry.slot_class.slot_bytes, geometry.slot_class.entry_bytes, geometry.slots)
    fields = (EXTENT_MAGIC, FORMAT_VERSION, 0, node_id, extent, *sizes, geometry.extent_bytes, geometry.data_offset)
    head = _LAYOUT.pack(*fields, 0)[:-8]
    return (head + xxh3_64(head).to_bytes(8, "little")).ljust(PAGE_BYTES, b"\0")


def parse_extent_header(
    page: bytes | memoryview, node_id: bytes, extent: int, extent_bytes: int, path: str
) -> Geometry | None:
    """The geometry of an extent from its header page; None for a free extent (80 zero bytes).

    CorruptRecord for a damaged page, FormatUnsupported for another version, IdentityMismatch for another node's page or
    one of another place. Each names the path and the extent.
    """
    where = f"{path} extent {extent}"
    head = bytes(page[:EXTENT_HEADER_BYTES])
    if len(head) < EXTENT_HEADER_BYTES:
        raise CorruptRecord(f"{where}: header page ends after {len(head)} bytes")
    if not any(head):
        return None
    magic, version, zero, found_node, found_extent, *sizes, checksum = _LAYOUT.unpack(head)
    slot_bytes, slot_entry_bytes, slots, found_extent_bytes, data_offset = sizes
    if magic != EXTENT_MAGIC:
        raise CorruptRecord(f"{where}: header page has no magic")
    if checksum != xxh3_64(head[:-8]):
        raise CorruptRecord(f"{where}: header page fails its checksum")
    if version != FORMAT_VERSION:
        raise FormatUnsupported(where, version, FORMAT_VERSION)
    if found_node != node_id:
        raise IdentityMismatch(where, "node id", found_node.hex(), node_id.hex())
    if found_extent != extent:
        raise IdentityMismatch(where, "extent index", found_extent, extent)
    if found_extent_bytes != extent_bytes:
        raise IdentityMismatch(where, "extent bytes", found_extent_bytes, extent_bytes)
    try:
        geometry = Geometry(extent_bytes, SlotClass(slot_bytes, slot_entry_bytes))
    except InvalidArgument as error:
        raise CorruptRecord(f"{where}: {error}") from error
    if zero or any(head[56:72]) or (slots, data_offset) != (geometry.slots, geometry.data_offset):
        raise CorruptRecord(f"{where}: header page does not agree with its own sizes")
    return geometry
