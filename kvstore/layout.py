"""A model's KV block: how many tokens and bytes it has, into which segments they fall, and a digest of all that. Pure.

A *block* is the KV of `block_tokens` consecutive tokens. Its bytes are cut into *segments*, in order, without gaps; a
segment is what an engine needs at one point of its forward pass (a layer, or a group of layers that share KV). Bytes
of several blocks stand in a buffer in one of two orders:

- *block-major*: block after block, each of block_bytes. What `KVStore.put` takes.
- *segment-major*: segment after segment; of n blocks segment s occupies bytes [n * offset_s, n * (offset_s + bytes_s)),
  and in it the parts of block 0, 1, … follow each other. What `KVStore.get_into` fills. With one segment both are equal.

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

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.shape import BlockShape
from kvstore.buffers import flat_bytes

Bytes = NDArray[np.uint8]


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

    @classmethod
    def opaque(cls, block_bytes: int, block_tokens: int = 128) -> BlockLayout:
        """One segment of bytes that only the engine understands: serves any engine."""
        raise NotImplementedError

    @classmethod
    def per_layer(cls, layer_bytes: Sequence[int], *, format: str, dtype: str, block_tokens: int = 128,
                  version: int = 1, name: str = "") -> BlockLayout:
        """One segment for each layer, "layer-0", "layer-1", …, of layer_bytes[i] bytes."""
        raise NotImplementedError

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return self.shape.block_bytes

    def segment_range(self, segment: int, blocks: int) -> tuple[int, int]:
        """(start, stop) of a segment in a segment-major buffer of `blocks` blocks."""
        raise NotImplementedError

    def segment_view(self, buffer: Any, segment: int) -> Bytes:
        """(blocks, segment bytes) uint8 view of one segment of a segment-major buffer; writable if the buffer is."""
        raise NotImplementedError

    def to_segments(self, blocks: Any, out: Any | None = None) -> Bytes:
        """Block-major bytes, a whole number of blocks, into segment-major order; flat uint8, in `out` when given."""
        raise NotImplementedError

    def from_segments(self, segments: Any, out: Any | None = None) -> Bytes:
        """The way back: segment-major bytes into block-major order; flat uint8, in `out` when given."""
        raise NotImplementedError


V41_FLASH: Final[BlockLayout] = None  # type: ignore[assignment]
"""DeepSeek-V4.1-Flash: 128 tokens, 113,920 bytes, four segments (owner layers 2, 8, 14, 20) that end on shard borders."""
