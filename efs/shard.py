"""The record: a self-describing header and a shard's payload. This docstring is the format, version 1.

All integers are little-endian. A header with n segments has H(n) = 96 + 8 · ceil(12 n / 8) bytes:

    offset      bytes  field
    0           4      magic b"EFSR"
    4           2      format version, 1
    6           1      shard index, 0–11 (0–9 data, 10–11 parity)
    7           1      k, 10
    8           1      m, 2
    9           1      zero
    10          2      n, number of segments, 1–256
    12          4      depth of the block in its chain (0 = first), 0xFFFFFFFF when unknown
    16          8      tenant tag, zeros without a tenant
    24          8      xxh3_64 of the payload: s = ceil(block size / 10) bytes, without slot padding
    32          32     key
    64          16     block digest
    80          8      block size
    88          8 n    xxh3_64 of each segment of the block
    88 + 8 n    4 n    length of each segment
    …           0 or 4 zeros up to a multiple of 8
    H − 8       8      xxh3_64 of all header bytes before it

Block digest = xxh3_128 of bytes [80, 88 + 12 n): size, segment hashes, segment lengths. The twelve headers of a block
differ in shard index, payload hash and header hash only. A header is valid when every field is in its range, the
lengths add up to the size, and both hashes agree. It is checked before it is written and after it was read.

On a node a header stands in a *table entry* of 32 + H bytes:

    0           8      slot generation, never 0 for a live entry; greater for each use of any slot of a node
    8           8      arrival, wall time in ms
    16          4      boot epoch: the node's count of unclean boots at the time of writing
    20          4      zero
    24          8      xxh3_64 of bytes [0, 24) and the header's own hash
    32          H      header

A free entry is all zeros. Entries that are neither zeros nor valid are torn writes: their slot is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.shape import BlockShape

MAGIC: Final = b"EFSR"
LOCAL_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and valid header."""

    key: bytes
    digest: bytes
    shard: int
    depth: int
    tenant_tag: bytes
    payload_hash: int
    shape: BlockShape
    segment_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A parsed and valid table entry."""

    header: Header
    generation: int
    arrival_ms: int
    boot_epoch: int


def header_bytes(segments: int) -> int:
    """H(n) of the module docstring."""
    return 96 + -(-12 * segments // 8) * 8


def entry_bytes(segments: int) -> int:
    return LOCAL_BYTES + header_bytes(segments)


@lru_cache(maxsize=64)
def entry_dtype(segments: int) -> np.dtype[np.void]:
    """Structured view of a table entry. Digest and key are arrays of uint64 so that they compare at once."""
    raise NotImplementedError
