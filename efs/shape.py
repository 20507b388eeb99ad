"""The geometry of a block: how its bytes, its segments and its ten data shards overlie each other. Pure.

A block of `block_bytes` is zero-padded to 10 · s bytes, s = ceil(block_bytes / 10), and cut into ten data shards of s
bytes. Segments partition the unpadded bytes in order. Neither side knows the other's borders, so a shard falls into
*pieces*, one for each segment that it touches. For a V4.1 block each shard is one piece (borders coincide).

A buffer of n blocks is *segment-major*: segment t occupies bytes [n · offset_t, n · (offset_t + bytes_t)), and in it
block i's part starts at n · offset_t + i · bytes_t. With one segment that is plain block order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from efs.errors import InvalidArgument
from efs.limits import DATA_SHARDS, MAX_BLOCK_BYTES, MAX_SEGMENTS, SLOT_ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one data shard that lies in one segment. All offsets and sizes in bytes."""

    shard: int
    shard_offset: int
    segment: int
    segment_offset: int
    size: int


@dataclass(frozen=True)
class BlockShape:
    """Sizes of a block and of its segments; equal shapes are interchangeable.

    Raises InvalidArgument for a size of 0 or above MAX_BLOCK_BYTES, for an empty segment, for more than MAX_SEGMENTS
    and for segments that do not add up to the block.
    """

    block_bytes: int
    segment_bytes: tuple[int, ...]

    def __post_init__(self) -> None:
        if not 0 < self.block_bytes <= MAX_BLOCK_BYTES:
            raise InvalidArgument(f"block_bytes is {self.block_bytes}, must be 1 to {MAX_BLOCK_BYTES}")
        if not 1 <= len(self.segment_bytes) <= MAX_SEGMENTS:
            raise InvalidArgument(f"a block has {len(self.segment_bytes)} segments, must have 1 to {MAX_SEGMENTS}")
        if min(self.segment_bytes) <= 0:
            raise InvalidArgument("a segment must have at least one byte")
        if sum(self.segment_bytes) != self.block_bytes:
            raise InvalidArgument(
                f"segments add up to {sum(self.segment_bytes)} bytes, the block has {self.block_bytes}"
            )

    @cached_property
    def segment_offsets(self) -> tuple[int, ...]:
        offsets, position = [], 0
        for size in self.segment_bytes:
            offsets.append(position)
            position += size
        return tuple(offsets)

    @cached_property
    def shard_bytes(self) -> int:
        """Bytes of a shard's payload, s."""
        return -(-self.block_bytes // DATA_SHARDS)

    @cached_property
    def slot_bytes(self) -> int:
        """Bytes of the slot that holds a shard: s rounded up to a cache line."""
        return -(-self.shard_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES

    @cached_property
    def pieces(self) -> tuple[tuple[Piece, ...], ...]:
        """For each of the ten data shards its pieces in order; they cover the block once. Padding is in no piece."""
        shards: list[tuple[Piece, ...]] = []
        for shard in range(DATA_SHARDS):
            start = shard * self.shard_bytes
            stop = min(start + self.shard_bytes, self.block_bytes)
            pieces = []
            for segment, (offset, size) in enumerate(zip(self.segment_offsets, self.segment_bytes, strict=True)):
                low, high = max(start, offset), min(stop, offset + size)
                if low < high:
                    pieces.append(Piece(shard, low - start, segment, low - offset, high - low))
            shards.append(tuple(pieces))
        return tuple(shards)

    @cached_property
    def segment_shards(self) -> tuple[tuple[int, ...], ...]:
        """For each segment the data shards that hold a part of it, in order."""
        return tuple(
            tuple(shard for shard, pieces in enumerate(self.pieces) if segment in {piece.segment for piece in pieces})
            for segment in range(len(self.segment_bytes))
        )
