"""Block layouts: the spec's numbers, the digest, and the two orders of a buffer."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.errors import InvalidArgument
from kvstore.layout import V41_FLASH, BlockLayout, Segment

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())
V41_DIGEST = "7c8d43df32203e09fbdc3110e498c8b4c0f89a9cf7e51c1b8f841dbdfdfc922b"
THREE = BlockLayout("f", "d", 2, (Segment("a", 1), Segment("b", 3), Segment("c", 2)))


def test_v41_block_has_the_golden_geometry() -> None:
    block = GOLDEN["block"]
    assert (V41_FLASH.block_tokens, V41_FLASH.block_bytes) == (block["tokens"], block["bytes"])
    assert V41_FLASH.block_bytes == block["tokens"] * block["bytes_per_token"]
    assert V41_FLASH.shape.shard_bytes == GOLDEN["ec"]["shard_bytes"]
    entry = GOLDEN["entry_bytes"]
    for position, expected in enumerate(block["segments"]):
        segment = V41_FLASH.segments[position]
        assert segment.name == f"layer-{expected['owner_layer']}"
        assert segment.bytes == expected["bytes"] == expected["index_bytes"] + expected["main_bytes"]
        assert expected["main_bytes"] == expected["entries"] * entry["main"]
        assert expected["index_bytes"] == expected["entries"] * entry["index"]
        assert V41_FLASH.shape.segment_offsets[position] == expected["offset"]
        assert list(V41_FLASH.shape.segment_shards[position]) == expected["shards"]
    assert len(V41_FLASH.segments) == len(block["segments"])


def test_v41_digest_is_pinned() -> None:
    assert V41_FLASH.digest.hex() == V41_DIGEST


def test_digest_is_that_of_the_documented_fields() -> None:
    def field(tag: int, value: bytes) -> bytes:
        return bytes([tag]) + len(value).to_bytes(4, "little") + value

    message = field(1, b"f") + field(2, b"d") + field(3, (2).to_bytes(8, "little"))
    message += field(4, (6).to_bytes(8, "little"))
    message += field(5, (1).to_bytes(4, "little"))
    for name, size in ((b"a", 1), (b"b", 3), (b"c", 2)):
        message += field(6, size.to_bytes(8, "little") + name)
    assert THREE.digest == blake2b(message, digest_size=32, person=b"kvstore/layout/1").digest()


@pytest.mark.parametrize(
    "other",
    [
        replace(THREE, format="g"),
        replace(THREE, dtype="e"),
        replace(THREE, format="fd", dtype="x"),
        replace(THREE, block_tokens=3),
        replace(THREE, version=2),
        replace(THREE, segments=(Segment("a", 1), Segment("b", 2), Segment("c", 3))),
        replace(THREE, segments=(Segment("b", 1), Segment("a", 3), Segment("c", 2))),
        replace(THREE, segments=(Segment("a", 6),)),
    ],
)
def test_whatever_changes_the_bytes_changes_the_digest(other: BlockLayout) -> None:
    assert other.digest != THREE.digest
    assert other != THREE


def test_neighbouring_texts_do_not_run_together() -> None:
    assert BlockLayout("ab", "c", 1, (Segment("s", 1),)).digest != BlockLayout("a", "bc", 1, (Segment("s", 1),)).digest


def test_name_is_a_label_only() -> None:
    assert replace(THREE, name="other") == THREE
    assert replace(THREE, name="other").digest == THREE.digest


def test_layout_is_immutable() -> None:
    with pytest.raises(FrozenInstanceError):
        THREE.version = 3  # type: ignore[misc]


def test_opaque_layout_has_one_segment() -> None:
    layout = BlockLayout.opaque(1_000)
    assert (layout.block_bytes, layout.block_tokens, len(layout.segments)) == (1_000, 128, 1)
    assert BlockLayout.opaque(1_000, 16).block_tokens == 16


def test_a_segment_per_layer() -> None:
    layout = BlockLayout.per_layer([98_304] * 30, format="llama", dtype="bfloat16")
    assert layout.block_bytes == 2_949_120
    assert [segment.name for segment in layout.segments[:2]] == ["layer-0", "layer-1"]
    assert len(layout.segments) == 30


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: BlockLayout("", "d", 1, (Segment("a", 1),)), "format is ''"),
        (lambda: BlockLayout("f", "", 1, (Segment("a", 1),)), "dtype is ''"),
        (lambda: BlockLayout("f", "d", 0, (Segment("a", 1),)), "block_tokens is 0"),
        (lambda: BlockLayout("f", "d", 1, (Segment("a", 1),), 0), "version is 0"),
        (lambda: BlockLayout("f", "d", 1, (Segment("a", 1), Segment("a", 1))), "segment 1 is named 'a'"),
        (lambda: BlockLayout("f", "d", 1, (Segment("a", 1), Segment("b", 0))), "at least one byte"),
        (lambda: BlockLayout("f", "d", 1, ()), "block_bytes is 0"),
        (lambda: BlockLayout.opaque(0), "block_bytes is 0"),
        (lambda: BlockLayout.per_layer([1] * 257, format="f", dtype="d"), "257 segments"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(build: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        build()
    assert "\n" not in str(caught.value)


def test_segment_major_order_of_two_blocks() -> None:
    assert THREE.to_segments(b"ABBBCCabbbcc").tobytes() == b"AaBBBbbbCCcc"
    assert THREE.from_segments(b"AaBBBbbbCCcc").tobytes() == b"ABBBCCabbbcc"
    assert THREE.segment_range(1, 2) == (2, 8)
    assert THREE.segment_view(b"AaBBBbbbCCcc", 1).tobytes() == b"BBBbbb"
    assert THREE.segment_view(b"AaBBBbbbCCcc", 1).shape == (2, 3)


def test_conversion_into_a_given_buffer_writes_there() -> None:
    out = bytearray(12)
    THREE.to_segments(b"ABBBCCabbbcc", out)
    assert out == b"AaBBBbbbCCcc"
    view = THREE.segment_view(out, 0)
    view[:] = ord("z")
    assert out == b"zzBBBbbbCCcc"


def test_buffers_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="7 bytes, no multiple of the block's 6"):
        THREE.to_segments(bytes(7))
    with pytest.raises(InvalidArgument, match="out has 6 bytes, must have 12"):
        THREE.from_segments(bytes(12), bytearray(6))
    with pytest.raises(InvalidArgument, match="out is read-only"):
        THREE.from_segments(bytes(12), bytes(12))
    same = bytearray(12)
    with pytest.raises(InvalidArgument, match="overlaps"):
        THREE.to_segments(same, same)
    with pytest.raises(InvalidArgument, match="segment is 3"):
        THREE.segment_view(bytes(12), 3)


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=6), blocks=st.integers(0, 5), seed=st.integers(0, 99))
def test_both_orders_hold_the_same_blocks(sizes: list[int], blocks: int, seed: int) -> None:
    layout = BlockLayout.per_layer(sizes, format="f", dtype="d")
    source = np.random.default_rng(seed).integers(0, 256, blocks * sum(sizes), dtype=np.uint8)
    segments = layout.to_segments(source)
    assert (layout.from_segments(segments) == source).all()
    rows = source.reshape(blocks, sum(sizes))
    for index, offset in enumerate(layout.shape.segment_offsets):
        assert (layout.segment_view(segments, index) == rows[:, offset : offset + sizes[index]]).all()
