"""Record headers and table entries: bytes pinned, every flipped bit found, single and vectorised forms agree."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest, xxh3_128_digest

from efs.errors import CorruptRecord, InvalidArgument
from efs.limits import DEPTH_UNKNOWN, MAX_SEGMENTS
from efs.shape import BlockShape
from efs.shard import (
    Header,
    block_templates,
    build_headers,
    check_entries,
    check_headers,
    entry_bytes,
    entry_dtype,
    entry_headers,
    finish_headers,
    free_entries,
    header_bytes,
    header_dtype,
    parse_entry,
    parse_header,
    raw_entries,
    segments_of_entry,
    shape_of,
    template_digests,
    view_entries,
    wrap_entries,
)

V41 = BlockShape(113_920, (22_784, 22_784, 22_784, 45_568))
KEY = bytes(range(32))
TAG = bytes.fromhex("a0a1a2a3a4a5a6a7")
SEGMENT_HASHES = (0x1111111111111111, 0x2222222222222222, 0x3333333333333333, 0xFFFFFFFFFFFFFFFF)
PAYLOAD_HASH = 0x0123456789ABCDEF

GOLDEN_HEADER = (
    "45465352" "0100" "0b" "0a" "02" "00" "0400" "25000000" "a0a1a2a3a4a5a6a7" "efcdab8967452301"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "57b3c2d43b4b71b008741a8ca077916e"
    "00bd010000000000"
    "1111111111111111" "2222222222222222" "3333333333333333" "ffffffffffffffff"
    "00590000" "00590000" "00590000" "00b20000"
    "4c88f27175e26847"
)  # fmt: skip
GOLDEN_LOCAL = "0700000000010000" "00eda69c93010000" "03000000" "00000000" "0d0fabc29328a00e"  # fmt: skip
GOLDEN_ONE_BYTE_BLOCK = (
    "45465352" "0100" "00" "0a" "02" "00" "0100" "ffffffff" "0000000000000000" "efcdab8967452301"
    "000102030405060708090a0b0c0d0e0f101112131415161718191a1b1c1d1e1f"
    "832c4597aabab74803e814cc7072a8c8"
    "0100000000000000"
    "1111111111111111"
    "01000000" "00000000"
    "f4b9c163210debee"
)  # fmt: skip


def one_header(shard: int = 11, shape: BlockShape = V41) -> np.ndarray:
    hashes = np.array([SEGMENT_HASHES[: len(shape.segment_bytes)]], np.uint64)
    depths, payload = np.array([37], np.uint32), np.array([PAYLOAD_HASH], np.uint64)
    return build_headers([KEY], shard, depths, TAG, shape, hashes, payload)


def one_entry() -> np.ndarray:
    return wrap_entries(one_header(), np.array([(1 << 40) + 7], np.uint64), 1_733_500_005_632, 3)


def several(count: int, shape: BlockShape = V41, seed: int = 1) -> np.ndarray:
    """(count, H) headers of different blocks, shard indices 0–11 in turn."""
    random = np.random.default_rng(seed)
    keys = [random.bytes(32) for _ in range(count)]
    hashes = random.integers(0, 2**64, (count, len(shape.segment_bytes)), np.uint64)
    depths = np.arange(count, dtype=np.uint32)
    shards = (np.arange(count) % 12).astype(np.uint8)
    payload = random.integers(0, 2**64, count, np.uint64)
    return build_headers(keys, shards, depths, [random.bytes(8) for _ in keys], shape, hashes, payload)


def entries_of(headers: np.ndarray, first_generation: int = 1) -> np.ndarray:
    generations = np.arange(first_generation, first_generation + len(headers), dtype=np.uint64)
    segments = segments_of_entry(headers.shape[1] + 32)
    return view_entries(wrap_entries(headers, generations, 1_000, 1), segments)


def by_hand(shard: int, depth: int, shape: BlockShape, **wrong: int) -> bytes:
    """A header made with `struct` alone, both hashes right whatever else is `wrong`."""
    count = wrong.get("count", len(shape.segment_bytes))
    lengths = list(shape.segment_bytes)
    lengths[-1] += wrong.get("last_length_plus", 0)
    digested = struct.pack("<Q", wrong.get("block_bytes", shape.block_bytes))
    digested += struct.pack(f"<{len(lengths)}Q", *SEGMENT_HASHES[: len(lengths)])
    digested += struct.pack(f"<{len(lengths)}I", *lengths)
    code = (wrong.get("k", 10), wrong.get("m", 2), wrong.get("zero", 0))
    head = struct.pack("<IHBBBBHI", wrong.get("magic", 0x52534645), wrong.get("version", 1), shard, *code, count, depth)
    head += TAG + struct.pack("<Q", PAYLOAD_HASH) + KEY + xxh3_128_digest(digested) + digested
    if len(head) % 8:
        head += struct.pack("<I", wrong.get("padding", 0))
    return head + struct.pack("<Q", xxh3_64_intdigest(head))


def flipped(data: bytes) -> np.ndarray:
    """(8 · len, len): the data with each of its bits flipped once."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    return np.packbits(np.tile(bits, (len(bits), 1)) ^ np.eye(len(bits), dtype=np.uint8), axis=1)


# -- Golden bytes


def test_header_bytes_are_pinned() -> None:
    assert one_header().tobytes().hex() == GOLDEN_HEADER


def test_table_entry_bytes_are_pinned() -> None:
    assert one_entry().tobytes().hex() == GOLDEN_LOCAL + GOLDEN_HEADER


def test_header_of_a_one_byte_block_with_padding_is_pinned() -> None:
    header = build_headers([KEY], 0, np.array([DEPTH_UNKNOWN], np.uint32), bytes(8), BlockShape(1, (1,)),
                           np.array([SEGMENT_HASHES[:1]], np.uint64), np.array([PAYLOAD_HASH], np.uint64))  # fmt: skip
    assert header.tobytes().hex() == GOLDEN_ONE_BYTE_BLOCK


def test_header_equals_one_packed_field_by_field() -> None:
    assert one_header().tobytes() == by_hand(11, 37, V41)


def test_v41_sizes() -> None:
    assert (V41.slot_bytes, header_bytes(4), entry_bytes(4)) == (11_392, 144, 176)


def test_sizes_grow_with_segments_and_lead_back_to_them() -> None:
    sizes = [entry_bytes(segments) for segments in range(1, MAX_SEGMENTS + 1)]
    assert sizes[-1] == 32 + 96 + 12 * 256
    assert sizes == sorted(set(sizes))
    assert all(size % 8 == 0 for size in sizes)
    assert [segments_of_entry(size) for size in sizes] == list(range(1, MAX_SEGMENTS + 1))
    for size in set(range(4_000)) - set(sizes):
        with pytest.raises(InvalidArgument):
            segments_of_entry(size)


@pytest.mark.parametrize("segments", [1, 2, 3, 4, 61, 256])
def test_views_cover_every_byte_of_an_entry_once(segments: int) -> None:
    sizes = {entry_dtype(segments): entry_bytes(segments), header_dtype(segments): header_bytes(segments)}
    for dtype, size in sizes.items():
        covered = np.zeros(size, np.uint8)
        assert dtype.fields is not None
        for name, (form, offset, *_) in dtype.fields.items():
            if name != "header":
                covered[offset : offset + form.itemsize] += 1
        assert (covered == 1).all()
        assert dtype.itemsize == size


# -- Round trip


@st.composite
def shapes(draw: st.DrawFn) -> BlockShape:
    lengths = draw(st.lists(st.integers(1, 200_000), min_size=1, max_size=12))
    return BlockShape(sum(lengths), tuple(lengths))


@settings(deadline=None, max_examples=60)
@given(shapes(), st.data())
def test_what_was_built_is_what_is_parsed(shape: BlockShape, data: st.DataObject) -> None:
    word = st.integers(0, 2**64 - 1)
    segments = len(shape.segment_bytes)
    count = data.draw(st.integers(1, 4))
    keys = data.draw(st.lists(st.binary(min_size=32, max_size=32), min_size=count, max_size=count))
    tags = data.draw(st.lists(st.binary(min_size=8, max_size=8), min_size=count, max_size=count))
    shards = data.draw(st.lists(st.integers(0, 11), min_size=count, max_size=count))
    depths = data.draw(st.lists(st.integers(0, DEPTH_UNKNOWN), min_size=count, max_size=count))
    payload = data.draw(st.lists(word, min_size=count, max_size=count))
    hashes = data.draw(st.lists(st.tuples(*[word] * segments), min_size=count, max_size=count))
    generations = data.draw(st.lists(st.integers(1, 2**64 - 1), min_size=count, max_size=count))
    headers = build_headers(keys, np.array(shards, np.uint8), np.array(depths, np.uint32), tags, shape,
                            np.array(hashes, np.uint64), np.array(payload, np.uint64))  # fmt: skip
    raw = wrap_entries(headers, np.array(generations, np.uint64), 12, 5)
    entries = view_entries(raw, segments)
    assert check_headers(headers).all()
    assert check_entries(entries, shape.slot_bytes).all()
    for row in range(count):
        parsed = parse_header(headers[row].tobytes())
        digest = template_digests(headers)[row].tobytes()
        drawn = (shards[row], depths[row], tags[row], payload[row])
        assert parsed == Header(keys[row], digest, *drawn, shape, hashes[row])
        entry = parse_entry(raw[row].tobytes())
        assert entry is not None
        assert (entry.header, entry.generation, entry.arrival_ms, entry.boot_epoch) == (parsed, generations[row], 12, 5)
        assert entries["key"][row].tobytes() == keys[row]
        assert entries["tenant_tag"][row].tobytes() == tags[row]
        assert tuple(entries["segment_bytes"][row].tolist()) == shape.segment_bytes
        assert shape_of(headers[row]) == shape


def test_twelve_headers_of_a_block_differ_in_three_fields_only() -> None:
    hashes = np.array([SEGMENT_HASHES] * 2, np.uint64)
    templates = block_templates([KEY, KEY[::-1]], np.array([0, 1], np.uint32), TAG, V41, hashes)
    before = templates.copy()
    for row in range(2):
        finished = [finish_headers(templates, shard, np.array([shard, shard + 50], np.uint64)) for shard in range(12)]
        headers = np.array([headers[row] for headers in finished])
        assert check_headers(headers).all()
        differing = np.flatnonzero((headers != headers[0]).any(axis=0)).tolist()
        assert differing == [6, 24, *range(136, 144)]
    assert (templates == before).all()


def test_digest_does_not_depend_on_key_shard_or_tenant_but_on_each_segment() -> None:
    hashes = np.array([SEGMENT_HASHES] * 3, np.uint64)
    hashes[2, 3] -= np.uint64(1)
    templates = block_templates([KEY, KEY[::-1], KEY], np.zeros(3, np.uint32), [TAG, bytes(8), TAG], V41, hashes)
    digests = [row.tobytes() for row in template_digests(templates)]
    assert digests[0] == digests[1] != digests[2]


def test_no_rows_are_no_error() -> None:
    none = block_templates([], np.zeros(0, np.uint32), TAG, V41, np.zeros((0, 4), np.uint64))
    headers = finish_headers(none, 3, np.zeros(0, np.uint64))
    entries = view_entries(wrap_entries(headers, np.zeros(0, np.uint64), 1, 1), 4)
    assert headers.shape == (0, 144)
    assert check_headers(headers).shape == check_entries(entries).shape == free_entries(entries).shape == (0,)


def test_entries_show_their_bytes_without_a_copy() -> None:
    raw = wrap_entries(several(5), np.arange(1, 6, dtype=np.uint64), 1, 1)
    entries = view_entries(raw, 4)
    assert np.shares_memory(raw_entries(entries), raw)
    assert np.shares_memory(entry_headers(entries), raw)
    assert (entry_headers(entries) == raw[:, 32:]).all()
    assert (entries["header"] == raw[:, 32:]).all()
    assert (raw_entries(entries[::2]) == raw[::2]).all()


# -- Damage


def test_any_flipped_bit_of_a_header_is_found() -> None:
    damaged = flipped(one_header().tobytes())
    assert len(damaged) == 144 * 8
    assert not check_headers(damaged).any()
    for row in damaged:
        with pytest.raises(CorruptRecord):
            parse_header(row.tobytes())


def test_any_flipped_bit_of_a_table_entry_is_found() -> None:
    damaged = flipped(one_entry().tobytes())
    assert len(damaged) == 176 * 8
    assert not check_entries(view_entries(damaged, 4)).any()
    assert not free_entries(view_entries(damaged, 4)).any()
    for row in damaged:
        with pytest.raises(CorruptRecord):
            parse_entry(row.tobytes())


def test_damage_is_found_in_its_row_and_nowhere_else() -> None:
    raw = raw_entries(entries_of(several(100)))
    for row, column in ((0, 0), (17, 40), (18, 175), (99, 12), (50, 110)):
        raw[row, column] ^= 4
    assert np.flatnonzero(~check_entries(view_entries(raw, 4))).tolist() == [0, 17, 18, 50, 99]
    assert np.flatnonzero(~check_headers(np.ascontiguousarray(raw[:, 32:]))).tolist() == [17, 18, 50]


@pytest.mark.parametrize("old", ["free", "live"])
def test_an_entry_torn_at_any_byte_is_neither_free_nor_live(old: str) -> None:
    new = raw_entries(entries_of(several(1), 1 << 41))[0]
    before = np.zeros(176, np.uint8) if old == "free" else raw_entries(entries_of(several(1, seed=2)))[0]
    torn = np.array([np.concatenate((new[:cut], before[cut:])) for cut in range(177)])
    whole = (torn == new).all(axis=1) | (torn == before).all(axis=1)
    entries = view_entries(torn, 4)
    assert np.count_nonzero(~whole) > 150
    assert not check_entries(entries)[~whole].any()
    assert not free_entries(entries)[~whole].any()
    assert check_entries(entries)[-1]


def test_a_zero_entry_is_free_and_not_valid() -> None:
    entries = view_entries(np.zeros((3, 176), np.uint8), 4)
    raw_entries(entries)[1, 175] = 1
    assert free_entries(entries).tolist() == [True, False, True]
    assert not check_entries(entries).any()
    assert parse_entry(bytes(176)) is None


WRONG_FIELDS = [
    ({"magic": 0x52534646}, "magic"),
    ({"version": 2}, "format version"),
    ({"k": 9}, "k and m"),
    ({"m": 3}, "k and m"),
    ({"zero": 1}, "zero byte"),
    ({"block_bytes": 0}, "block size"),
    ({"block_bytes": 1 << 40}, "block size"),
    ({"block_bytes": 59}, "segment lengths"),
    ({"last_length_plus": 1}, "segment lengths"),
    ({"padding": 1}, "padding"),
]


@pytest.mark.parametrize(("wrong", "named"), WRONG_FIELDS)
def test_a_field_out_of_range_is_refused_although_both_hashes_are_right(wrong: dict[str, int], named: str) -> None:
    shape = BlockShape(60, (10, 20, 30))
    right, data = by_hand(3, 0, shape), by_hand(3, 0, shape, **wrong)
    rows = np.frombuffer(right + data, np.uint8).reshape(2, -1)
    assert check_headers(rows).tolist() == [True, False]
    with pytest.raises(CorruptRecord, match=named):
        parse_header(data)


def test_shard_index_twelve_is_refused_although_both_hashes_are_right() -> None:
    with pytest.raises(CorruptRecord, match="shard index"):
        parse_header(by_hand(12, 0, V41))


def test_a_wrong_block_digest_is_refused_although_the_header_checksum_is_right() -> None:
    data = bytearray(by_hand(0, 0, V41))
    data[70] ^= 1
    data[-8:] = struct.pack("<Q", xxh3_64_intdigest(bytes(data[:-8])))
    assert not check_headers(np.frombuffer(bytes(data), np.uint8).reshape(1, -1)).any()
    with pytest.raises(CorruptRecord, match="block digest"):
        parse_header(bytes(data))


@pytest.mark.parametrize(("generation", "zero", "named"), [(0, 0, "generation"), (1, 1, "local zero field")])
def test_a_wrong_local_field_is_refused_although_its_checksum_is_right(generation: int, zero: int, named: str) -> None:
    header = by_hand(0, 0, V41)
    local = struct.pack("<QQII", generation, 5, 1, zero)
    data = local + struct.pack("<Q", xxh3_64_intdigest(local + header[-8:])) + header
    assert not check_entries(view_entries(np.frombuffer(data, np.uint8), 4)).any()
    with pytest.raises(CorruptRecord, match=named):
        parse_entry(data)


def test_an_empty_segment_is_refused_although_the_sum_is_right() -> None:
    data = by_hand(0, 0, BlockShape(60, (10, 20, 30)), block_bytes=30, last_length_plus=-30)
    with pytest.raises(CorruptRecord, match="segment lengths"):
        parse_header(data)


@pytest.mark.parametrize("size", [0, 1, 10, 11, 12, 111, 143, 145, 152, 1000])
def test_a_header_of_another_length_is_refused(size: int) -> None:
    data = one_header().tobytes().ljust(size, b"\0")[:size]
    with pytest.raises(CorruptRecord):
        parse_header(data)
    with pytest.raises(CorruptRecord):
        shape_of(data)


@pytest.mark.parametrize("count", [0, 3, 5, 257, 65_535])
def test_a_wrong_number_of_segments_is_refused(count: int) -> None:
    data = by_hand(0, 0, V41, count=count)
    assert not check_headers(np.frombuffer(data, np.uint8).reshape(1, -1)).any()
    with pytest.raises(CorruptRecord):
        parse_header(data)


def test_an_entry_that_belongs_into_slots_of_another_size_is_refused_there() -> None:
    entries = entries_of(several(3))
    assert check_entries(entries, 11_392).all()
    assert not check_entries(entries, 11_392 - 64).any()
    assert not check_entries(entries, 11_392 + 64).any()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 64 * 1024 * 1024))
def test_the_slot_size_of_an_entry_is_the_one_of_its_shape(block_bytes: int) -> None:
    shape = BlockShape(block_bytes, (block_bytes,))
    entries = entries_of(several(1, shape))
    assert check_entries(entries, shape.slot_bytes).all()
    assert not check_entries(entries, shape.slot_bytes + 64).any()


def test_swapped_local_fields_of_two_entries_are_refused() -> None:
    raw = raw_entries(entries_of(several(2)))
    raw[:, :32] = raw[::-1, :32].copy()
    assert not check_entries(view_entries(raw, 4)).any()


# -- Wrong calls


def test_wrong_arguments_are_refused_by_name() -> None:
    hashes, depths, payload = np.zeros((2, 4), np.uint64), np.zeros(2, np.uint32), np.zeros(2, np.uint64)
    keys = [KEY, KEY]
    with pytest.raises(InvalidArgument, match="a key has 31 bytes"):
        block_templates([KEY, KEY[1:]], depths, TAG, V41, hashes)
    with pytest.raises(InvalidArgument, match="a tenant tag has 7 bytes"):
        block_templates(keys, depths, TAG[1:], V41, hashes)
    with pytest.raises(InvalidArgument, match="1 tenant tags for 2 keys"):
        block_templates(keys, depths, [TAG], V41, hashes)
    with pytest.raises(InvalidArgument, match="depths"):
        block_templates(keys, depths[:1], TAG, V41, hashes)
    with pytest.raises(InvalidArgument, match="segment_hashes"):
        block_templates(keys, depths, TAG, V41, hashes[:, :3])
    templates = block_templates(keys, depths, TAG, V41, hashes)
    with pytest.raises(InvalidArgument, match="payload_hashes"):
        finish_headers(templates, 0, payload[:1])
    for shard in (-1, 12, np.array([0, 12], np.uint8)):
        with pytest.raises(InvalidArgument, match="shard index"):
            finish_headers(templates, shard, payload)
    headers = finish_headers(templates, 0, payload)
    with pytest.raises(InvalidArgument, match="generation is 0"):
        wrap_entries(headers, np.array([1, 0], np.uint64), 0, 0)
    with pytest.raises(InvalidArgument, match="generations"):
        wrap_entries(headers, np.array([1], np.uint64), 0, 0)
    with pytest.raises(InvalidArgument, match="contiguous"):
        view_entries(np.zeros((2, 175), np.uint8), 4)
    for segments in (0, 257):
        with pytest.raises(InvalidArgument, match="segments"):
            entry_dtype(segments)
