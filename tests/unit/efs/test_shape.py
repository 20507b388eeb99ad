"""The geometry of blocks: the reference model's numbers, odd sizes, and pieces that tile the block exactly once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.errors import InvalidArgument
from efs.limits import MAX_BLOCK_BYTES, MAX_SEGMENTS
from efs.shape import BlockShape, Piece

GOLDEN_FILE = Path(__file__).parents[2] / "data" / "golden.json"


@pytest.fixture(scope="module")
def golden() -> dict[str, Any]:
    numbers: dict[str, Any] = json.loads(GOLDEN_FILE.read_text())
    return numbers


@pytest.fixture(scope="module")
def v41(golden: dict[str, Any]) -> BlockShape:
    block = golden["block"]
    return BlockShape(block["bytes"], tuple(segment["bytes"] for segment in block["segments"]))


def test_the_reference_block_has_the_specified_sizes(v41: BlockShape, golden: dict[str, Any]) -> None:
    segments = golden["block"]["segments"]
    assert v41.block_bytes == 113_920
    assert v41.shard_bytes == golden["ec"]["shard_bytes"] == v41.slot_bytes
    assert list(v41.segment_offsets) == [segment["offset"] for segment in segments]
    assert [list(shards) for shards in v41.segment_shards] == [segment["shards"] for segment in segments]


def test_each_shard_of_the_reference_block_is_one_piece(v41: BlockShape, golden: dict[str, Any]) -> None:
    for segment, expected in enumerate(golden["block"]["segments"]):
        for order, shard in enumerate(expected["shards"]):
            assert v41.pieces[shard] == (Piece(shard, 0, segment, order * 11_392, 11_392),)


@pytest.mark.parametrize(
    ("block_bytes", "shard_bytes", "slot_bytes", "last_piece"),
    [
        (1, 1, 64, 0),
        (9, 1, 64, 8),
        (10, 1, 64, 9),
        (11, 2, 64, 5),
        (79, 8, 64, 9),
        (81, 9, 64, 8),
        (101, 11, 64, 9),
        (641, 65, 128, 9),
        (1_000_003, 100_001, 100_032, 9),
        (MAX_BLOCK_BYTES, 6_710_887, 6_710_912, 9),
    ],
)
def test_opaque_odd_sizes(block_bytes: int, shard_bytes: int, slot_bytes: int, last_piece: int) -> None:
    shape = BlockShape(block_bytes, (block_bytes,))
    assert (shape.shard_bytes, shape.slot_bytes) == (shard_bytes, slot_bytes)
    assert [bool(pieces) for pieces in shape.pieces] == [shard <= last_piece for shard in range(10)]
    assert sum(piece.size for pieces in shape.pieces for piece in pieces) == block_bytes
    assert shape.segment_shards == (tuple(range(last_piece + 1)),)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=MAX_SEGMENTS))
def test_pieces_cover_every_byte_of_the_block_exactly_once(segments: list[int]) -> None:
    shape = BlockShape(sum(segments), tuple(segments))
    padded = bytearray(10 * shape.shard_bytes)
    for shard, pieces in enumerate(shape.pieces):
        position = 0
        for piece in pieces:
            assert piece.shard == shard
            assert piece.shard_offset == position, "pieces of a shard follow each other without a gap"
            position += piece.size
            in_block = shape.segment_offsets[piece.segment] + piece.segment_offset
            assert in_block == shard * shape.shard_bytes + piece.shard_offset
            assert 0 < piece.size <= segments[piece.segment] - piece.segment_offset
            for byte in range(in_block, in_block + piece.size):
                padded[byte] += 1
    assert padded == b"\1" * shape.block_bytes + bytes(len(padded) - shape.block_bytes)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=40))
def test_segment_shards_are_those_with_a_piece_in_the_segment(segments: list[int]) -> None:
    shape = BlockShape(sum(segments), tuple(segments))
    for segment, (offset, size) in enumerate(zip(shape.segment_offsets, segments, strict=True)):
        touched = {byte // shape.shard_bytes for byte in range(offset, offset + size)}
        assert shape.segment_shards[segment] == tuple(sorted(touched))


@given(st.integers(1, MAX_BLOCK_BYTES))
def test_slots_are_whole_cache_lines_and_waste_less_than_one(block_bytes: int) -> None:
    shape = BlockShape(block_bytes, (block_bytes,))
    assert shape.slot_bytes % 64 == 0
    assert 0 <= shape.slot_bytes - shape.shard_bytes < 64
    assert 0 <= 10 * shape.shard_bytes - block_bytes < 10


def test_equal_shapes_are_interchangeable() -> None:
    one, other = BlockShape(30, (10, 20)), BlockShape(30, (10, 20))
    assert one.pieces == other.pieces
    assert one == other
    assert len({one, other, BlockShape(30, (20, 10))}) == 2


@pytest.mark.parametrize(
    ("block_bytes", "segments", "message"),
    [
        (0, (0,), "block_bytes is 0, must be 1"),
        (-1, (-1,), "block_bytes is -1, must be 1"),
        (MAX_BLOCK_BYTES + 1, (MAX_BLOCK_BYTES + 1,), f"block_bytes is {MAX_BLOCK_BYTES + 1}, must be 1"),
        (10, (), "0 segments, must have 1"),
        (257, (1,) * 257, "257 segments, must have 1 to 256"),
        (10, (10, 0), "a segment must have at least one byte"),
        (10, (12, -2), "a segment must have at least one byte"),
        (10, (5, 4), "segments add up to 9 bytes, the block has 10"),
        (10, (5, 6), "segments add up to 11 bytes, the block has 10"),
    ],
)
def test_impossible_shapes_are_refused(block_bytes: int, segments: tuple[int, ...], message: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        BlockShape(block_bytes, segments)
    assert message in str(refused.value)
