"""A model's KV block: how many tokens and bytes it has, into which segments they fall, and a digest of all that. Pure.

A *block* is the KV of `block_tokens` consecutive tokens. Its bytes are cut into *segments*, in order, without gaps; a
segment is what an engine needs at one point of its forward pass (a layer, or a group of layers that share KV). Bytes
of several blocks stand in a buffer in one of two orders:

- *block-major*: block after block, each of block_bytes. What `KVStore.put` takes.
- *segment-major*: segment after segment; of n blocks segment s occupies bytes [n * offset_s, n * (offset_s + bytes_s)),
  and in it the parts of block 0, 1, … follow each other. What `KVStore.get_into` fills. With one segment both are
  equal.

The *digest* goes into every key, so that bytes of one layout are never read as another. It is BLAKE2b-256, unkeyed,
person b"kvstore/layout/1", over tagged fields, each: tag (1 byte), length of the value (uint32, little-endian), value:

    tag   value
    1     format, UTF-8
    2     dtype, UTF-8
    3     block_tokens, uint64 little-endian
    4     block_bytes, uint64 little-endian
    5     version, uint32 little-endian
    6     a segment: its bytes as uint64 little-endian, then its name in UTF-8; one field a segment, in order

`name` is a label for people and stays out of the digest and of equality.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.shape import BlockShape
from kvstore.buffers import flat_bytes

Bytes = NDArray[np.uint8]

MAX_NUMBER: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class Segment:
    """A named part of a block; `bytes` of each block."""

    name: str
    bytes: int


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """Geometry and meaning of a block's bytes; an immutable value.

    format: what the bytes are, such as "deepseek-v4.1" or "opaque". dtype: element type, such as "bfloat16".
    segments: in order; their bytes add up to block_bytes. version: of the format, counted by whoever defines it.
    InvalidArgument for empty names, sizes below 1, doubled segment names, and what `efs.shape.BlockShape` refuses.
    """

    format: str
    dtype: str
    block_tokens: int
    segments: tuple[Segment, ...]
    version: int = 1
    name: str = field(default="", compare=False)
    shape: BlockShape = field(init=False, repr=False, compare=False)
    digest: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        for what, text in (("format", self.format), ("dtype", self.dtype)):
            if not isinstance(text, str) or not text:
                raise InvalidArgument(f"layout {what} is {text!r}, must be a non-empty string")
        for what, number in (("block_tokens", self.block_tokens), ("version", self.version)):
            if not isinstance(number, int) or not 1 <= number <= MAX_NUMBER:
                raise InvalidArgument(f"layout {what} is {number!r}, must be 1 to {MAX_NUMBER}")
        object.__setattr__(self, "segments", tuple(self.segments))
        names = [segment.name for segment in self.segments]
        for position, name in enumerate(names):
            if not name or name in names[:position]:
                raise InvalidArgument(f"layout segment {position} is named {name!r}, names must be set and differ")
        sizes = tuple(segment.bytes for segment in self.segments)
        object.__setattr__(self, "shape", BlockShape(sum(sizes), sizes))
        object.__setattr__(self, "digest", self._digest())

    def _digest(self) -> bytes:
        fields = [
            (1, self.format.encode()),
            (2, self.dtype.encode()),
            (3, self.block_tokens.to_bytes(8, "little")),
            (4, self.block_bytes.to_bytes(8, "little")),
            (5, self.version.to_bytes(4, "little")),
            *((6, segment.bytes.to_bytes(8, "little") + segment.name.encode()) for segment in self.segments),
        ]
        message = b"".join(bytes([tag]) + len(value).to_bytes(4, "little") + value for tag, value in fields)
        return blake2b(message, digest_size=32, person=b"kvstore/layout/1").digest()

    @classmethod
    def opaque(cls, block_bytes: int, block_tokens: int = 128) -> BlockLayout:
        """One segment of bytes that only the engine understands: serves any engine."""
        return cls("opaque", "bytes", block_tokens, (Segment("block", block_bytes),), name="opaque")

    @classmethod
    def per_layer(cls, layer_bytes: Sequence[int], *, format: str, dtype: str, block_tokens: int = 128,
                  version: int = 1, name: str = "") -> BlockLayout:
        """One segment for each layer, "layer-0", "layer-1", …, of layer_bytes[i] bytes."""
        segments = tuple(Segment(f"layer-{layer}", size) for layer, size in enumerate(layer_bytes))
        return cls(format, dtype, block_tokens, segments, version, name)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shape.block_bytes

    def segment_range(self, segment: int, blocks: int) -> tuple[int, int]:
        """(start, stop) of a segment in a segment-major buffer of `blocks` blocks."""
        if not 0 <= segment < len(self.segments):
            raise InvalidArgument(f"segment is {segment}, the layout has {len(self.segments)}")
        start = blocks * self.shape.segment_offsets[segment]
        return start, start + blocks * self.segments[segment].bytes

    def segment_view(self, buffer: Any, segment: int) -> Bytes:
        """(blocks, segment bytes) uint8 view of one segment of a segment-major buffer; writable if the buffer is."""
        flat = flat_bytes(buffer, "buffer")
        start, stop = self.segment_range(segment, self._blocks_in(flat, "buffer"))
        return flat[start:stop].reshape(-1, self.segments[segment].bytes)

    def to_segments(self, blocks: Any, out: Any | None = None) -> Bytes:
        """Block-major bytes, a whole number of blocks, into segment-major order; flat uint8, in `out` when given.

        `out` must not overlap the source.
        """
        source = flat_bytes(blocks, "blocks")
        count = self._blocks_in(source, "blocks")
        target = self._target(out, source)
        rows = source.reshape(count, self.block_bytes)
        for view, offset, size in self._parts(target, count):
            view[:] = rows[:, offset : offset + size]
        return target

    def from_segments(self, segments: Any, out: Any | None = None) -> Bytes:
        """The way back: segment-major bytes into block-major order; flat uint8, in `out` when given."""
        source = flat_bytes(segments, "segments")
        count = self._blocks_in(source, "segments")
        target = self._target(out, source)
        rows = target.reshape(count, self.block_bytes)
        for view, offset, size in self._parts(source, count):
            rows[:, offset : offset + size] = view
        return target

    def _parts(self, flat: Bytes, count: int) -> Iterator[tuple[Bytes, int, int]]:
        """Each segment of a segment-major buffer as (count, size) rows, with its offset and size in a block."""
        for offset, size in zip(self.shape.segment_offsets, self.shape.segment_bytes, strict=True):
            yield flat[count * offset : count * (offset + size)].reshape(count, size), offset, size

    def _blocks_in(self, flat: Bytes, what: str) -> int:
        if flat.size % self.block_bytes:
            raise InvalidArgument(f"{what} has {flat.size} bytes, no multiple of the block's {self.block_bytes}")
        return flat.size // self.block_bytes

    def _target(self, out: Any | None, source: Bytes) -> Bytes:
        if out is None:
            return np.empty(source.size, dtype=np.uint8)
        target = flat_bytes(out, "out", writable=True, size=source.size)
        if np.may_share_memory(target, source):
            raise InvalidArgument("out overlaps the source")
        return target


V41_FLASH: Final = BlockLayout(
    format="deepseek-v4.1",
    dtype="fp4-e2m1",
    block_tokens=128,
    segments=(
        Segment("layer-2", 64 * (68 + 288)),
        Segment("layer-8", 64 * (68 + 288)),
        Segment("layer-14", 64 * (68 + 288)),
        Segment("layer-20", 128 * (68 + 288)),
    ),
    name="v41-flash",
)
"""DeepSeek-V4.1-Flash: 128 tokens, 113,920 bytes; a segment for each layer that owns global KV, 64 or 128 entries of
indexer K (68 bytes each), then main KV (288 bytes each). All segments end on shard borders (specification, section
2)."""
