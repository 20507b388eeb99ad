"""How an extent is cut, and its header page."""

from __future__ import annotations

from collections.abc import Callable
from math import gcd

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from efs.errors import CorruptRecord, EfsError, FormatUnsupported, IdentityMismatch, InvalidArgument
from efs.extent import (
    Geometry,
    SlotClass,
    build_extent_header,
    extent_of,
    location_of,
    parse_extent_header,
    ranges_of,
    slot_of,
)
from efs.limits import EXTENT_BYTES, KIB, MAX_BLOCK_BYTES, MAX_SLOTS_PER_EXTENT, MIB, MIN_EXTENT_BYTES, PAGE_BYTES
from efs.shape import BlockShape
from efs.shard import entry_bytes

V41 = SlotClass.of(BlockShape(113_920, (22_784, 22_784, 22_784, 45_568)))
NODE = bytes(range(16))
GOLDEN_HEADER = (
    "45465358" "0100" "0000" "000102030405060708090a0b0c0d0e0f" "05000000" "802c0000" "b0000000" "a0160000"
    "0000000400000000" "00a00f0000000000" "00000000000000000000000000000000" "04acc2d2a05cfde5"
)  # fmt: skip


def header(extent: int = 5, slot_class: SlotClass = V41, extent_bytes: int = EXTENT_BYTES) -> bytes:
    return build_extent_header(NODE, extent, Geometry(extent_bytes, slot_class))


def forged(change: Callable[[bytearray], None]) -> bytes:
    """A header page with a changed field and a right checksum."""
    page = bytearray(header())
    change(page)
    page[72:80] = xxh3_64_intdigest(bytes(page[:72])).to_bytes(8, "little")
    return bytes(page)


def setting(offset: int, data: bytes) -> Callable[[bytearray], None]:
    def change(page: bytearray) -> None:
        page[offset : offset + len(data)] = data

    return change


def test_v41_extent_has_181_chunks_of_89_pages() -> None:
    geometry = Geometry(EXTENT_BYTES, V41)
    assert SlotClass(11_392, 176) == V41
    assert V41.segments == 4
    assert (geometry.chunk_slots, geometry.slots, geometry.chunks) == (32, 5_792, 181)
    assert geometry.chunk_slots * 11_392 == 89 * PAGE_BYTES
    assert (geometry.table_offset, geometry.table_bytes, geometry.data_offset) == (4_096, 5_792 * 176, 1_024_000)


@settings(deadline=None)
@given(
    st.integers(MIN_EXTENT_BYTES // PAGE_BYTES, 2 * EXTENT_BYTES // PAGE_BYTES),
    st.integers(1, MAX_BLOCK_BYTES),
    st.integers(1, 256),
)
def test_parts_of_an_extent_neither_overlap_nor_stick_out(pages: int, block_bytes: int, segments: int) -> None:
    extent_bytes = pages * PAGE_BYTES
    slot_class = SlotClass(BlockShape(block_bytes, (block_bytes,)).slot_bytes, entry_bytes(segments))
    try:
        geometry = Geometry(extent_bytes, slot_class)
    except InvalidArgument:
        table = -(-slot_class.entry_bytes // PAGE_BYTES) * PAGE_BYTES
        assert PAGE_BYTES + table + slot_class.slot_bytes > extent_bytes
        return
    chunk = geometry.chunk_slots
    assert geometry.slots % chunk == 0
    assert 0 < geometry.slots < MAX_SLOTS_PER_EXTENT
    assert geometry.table_offset + geometry.table_bytes <= geometry.data_offset
    assert geometry.data_offset % PAGE_BYTES == 0
    end = geometry.data_offset + geometry.slots * slot_class.slot_bytes
    assert end <= extent_bytes
    aligned = PAGE_BYTES // gcd(PAGE_BYTES, slot_class.slot_bytes)
    if aligned * slot_class.slot_bytes * 8 <= extent_bytes:
        assert chunk == aligned
    assert chunk == 1 or chunk * slot_class.slot_bytes * 8 <= extent_bytes
    one_more = -(-(geometry.slots + chunk) * slot_class.entry_bytes // PAGE_BYTES) * PAGE_BYTES
    more_end = PAGE_BYTES + one_more + (geometry.slots + chunk) * slot_class.slot_bytes
    assert more_end > extent_bytes or geometry.slots + chunk >= MAX_SLOTS_PER_EXTENT


def test_the_largest_block_fits_a_default_extent_nine_times() -> None:
    largest = BlockShape(MAX_BLOCK_BYTES, (MAX_BLOCK_BYTES,))
    geometry = Geometry(EXTENT_BYTES, SlotClass.of(largest))
    assert (geometry.chunk_slots, geometry.slots) == (1, 9)


@pytest.mark.parametrize(
    ("extent_bytes", "slot_bytes", "size"),
    [
        (MIN_EXTENT_BYTES - PAGE_BYTES, 64, 144),
        (MIN_EXTENT_BYTES + 512, 64, 144),
        (MIN_EXTENT_BYTES, 0, 144),
        (MIN_EXTENT_BYTES, -64, 144),
        (MIN_EXTENT_BYTES, 100, 144),
        (MIN_EXTENT_BYTES, 64, 145),
        (MIN_EXTENT_BYTES, 64, 0),
        (MIN_EXTENT_BYTES, 256 * KIB, 144),
    ],
)
def test_impossible_geometry_is_refused(extent_bytes: int, slot_bytes: int, size: int) -> None:
    with pytest.raises(InvalidArgument):
        Geometry(extent_bytes, SlotClass(slot_bytes, size))


def test_locations_are_extent_and_slot() -> None:
    location = location_of(1_299, 5_791)
    assert location == 1_299 * (1 << 20) + 5_791
    assert (extent_of(location), slot_of(location)) == (1_299, 5_791)
    geometry = Geometry(EXTENT_BYTES, V41)
    assert geometry.entry_position(location) == 1_299 * EXTENT_BYTES + 4_096 + 5_791 * 176
    assert geometry.slot_position(location) == 1_299 * EXTENT_BYTES + 1_024_000 + 5_791 * 11_392


def test_rows_are_cut_where_locations_do_not_go_up_by_one() -> None:
    locations = np.array([7, 8, 9, 9, 3, location_of(1, 4), location_of(1, 5)], np.int64)
    assert ranges_of(locations) == [(0, 7, 3), (3, 9, 1), (4, 3, 1), (5, location_of(1, 4), 2)]
    assert ranges_of(locations[:0]) == []
    assert ranges_of(locations[:1]) == [(0, 7, 1)]


# -- Header page


def test_header_page_bytes_are_pinned() -> None:
    page = header()
    assert len(page) == PAGE_BYTES
    assert page[:80].hex() == GOLDEN_HEADER
    assert not any(page[80:])


def test_header_page_is_read_back() -> None:
    for slot_class in (V41, SlotClass(64, 144), SlotClass(294_912, entry_bytes(30))):
        page = header(5, slot_class, 2 * MIB)
        assert parse_extent_header(page, NODE, 5, 2 * MIB, "slab") == Geometry(2 * MIB, slot_class)


def test_a_page_of_zeros_is_a_free_extent() -> None:
    assert parse_extent_header(bytes(PAGE_BYTES), NODE, 5, EXTENT_BYTES, "slab") is None


def test_any_flipped_bit_of_an_extent_header_is_found() -> None:
    page = header()
    for bit in range(80 * 8):
        damaged = bytearray(page)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(CorruptRecord, match="slabs/slab extent 5"):
            parse_extent_header(bytes(damaged), NODE, 5, EXTENT_BYTES, "slabs/slab")


def test_an_extent_header_torn_at_any_byte_is_found() -> None:
    page = header()
    for cut in range(1, 80):
        with pytest.raises(CorruptRecord):
            parse_extent_header(page[:cut].ljust(PAGE_BYTES, b"\0"), NODE, 5, EXTENT_BYTES, "slab")
        with pytest.raises(CorruptRecord):
            parse_extent_header(page[:cut], NODE, 5, EXTENT_BYTES, "slab")


@pytest.mark.parametrize(
    ("page", "error", "message"),
    [
        (forged(setting(4, b"\2\0")), FormatUnsupported, "slab extent 5: format version 2, this program reads 1"),
        (forged(setting(8, b"\xff")), IdentityMismatch, "slab extent 5: node id is ff0102"),
        (header(6), IdentityMismatch, "slab extent 5: extent index is 6, expected 5"),
        (header(5, V41, 2 * MIB), IdentityMismatch, "extent bytes is 2097152, expected 67108864"),
        (forged(setting(28, b"\1")), CorruptRecord, "slot_bytes is 11265"),
        (forged(setting(32, b"\1")), CorruptRecord, "no table entry has 1 bytes"),
        (forged(setting(36, b"\1")), CorruptRecord, "does not agree"),
        (forged(setting(48, b"\1")), CorruptRecord, "does not agree"),
        (forged(setting(6, b"\1")), CorruptRecord, "does not agree"),
        (forged(setting(60, b"\1")), CorruptRecord, "does not agree"),
    ],
)
def test_a_foreign_or_senseless_header_page_is_refused_although_its_checksum_is_right(
    page: bytes, error: type[EfsError], message: str
) -> None:
    with pytest.raises(error, match=message):
        parse_extent_header(page, NODE, 5, EXTENT_BYTES, "slab")


def test_a_header_page_needs_a_real_node_id_and_extent() -> None:
    with pytest.raises(InvalidArgument, match="node id"):
        build_extent_header(NODE[1:], 0, Geometry(EXTENT_BYTES, V41))
    with pytest.raises(InvalidArgument, match="extent is -1"):
        build_extent_header(NODE, -1, Geometry(EXTENT_BYTES, V41))
