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
    """Bytes of a table entry whose header has this many segments."""
    return LOCAL_BYTES + header_bytes(segments)


def segments_of_entry(size: int) -> int:
    """The number of segments for which a table entry has `size` bytes; InvalidArgument when there is none."""
    raise NotImplementedError


@lru_cache(maxsize=64)
def entry_dtype(segments: int) -> np.dtype[np.void]:
    """Structured view of a table entry, itemsize `entry_bytes(segments)`, unaligned and packed by offset.

    Fields: generation u8, arrival_ms u8, boot_epoch u4, local_zero u4, local_hash u8; magic u4, version u2, shard u1,
    k u1, m u1, zero u1, segments u2, depth u4, tenant_tag u8, payload_hash u8, key (4,) u8, digest (2,) u8,
    block_bytes u8, segment_hashes (S,) u8, segment_bytes (S,) u4, header_hash u8; header (H,) u1 is all of the header
    once more. Digest and key are arrays of little-endian uint64 so that they compare at once.
    """
    raise NotImplementedError


def view_entries(raw: NDArray[np.uint8], segments: int) -> NDArray[np.void]:
    """(m, E) or (m · E,) C-contiguous bytes as (m,) entries of `entry_dtype(segments)`, without a copy."""
    raise NotImplementedError


def block_templates(keys: Sequence[bytes], depths: NDArray[np.uint32], tenant_tags: Sequence[bytes] | bytes,
                    shape: BlockShape, segment_hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """What the twelve headers of each of n blocks share: (n, H) uint8, block digest included.

    depths: (n,). tenant_tags: one 8-byte tag for all, or n of them. segment_hashes: (n, S), xxh3_64 of each segment.
    Shard index, payload hash and header hash are still zero; `finish_headers` fills them. InvalidArgument for a
    wrong count, length or type.
    """
    raise NotImplementedError


def template_digests(templates: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(n, 2) uint64 block digests of templates (or headers), as a copy."""
    raise NotImplementedError


def finish_headers(templates: NDArray[np.uint8], shards: int | NDArray[np.uint8],
                   payload_hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """Complete (n, H) headers of one shard of each block; the templates are left as they are.

    shards: one index for all rows or (n,). payload_hashes: (n,), xxh3_64 of s bytes of payload.
    """
    raise NotImplementedError


def build_headers(keys: Sequence[bytes], shards: int | NDArray[np.uint8], depths: NDArray[np.uint32],
                  tenant_tags: Sequence[bytes] | bytes, shape: BlockShape, segment_hashes: NDArray[np.uint64],
                  payload_hashes: NDArray[np.uint64]) -> NDArray[np.uint8]:
    """`block_templates` and `finish_headers` in one. A put of all twelve shards makes the templates once instead."""
    raise NotImplementedError


def parse_header(data: bytes | memoryview) -> Header:
    """Parse and check one header; CorruptRecord names the first check that fails."""
    raise NotImplementedError


def shape_of(header: NDArray[np.uint8] | bytes | memoryview) -> BlockShape:
    """Sizes written in a header that was checked before; CorruptRecord when they make no shape."""
    raise NotImplementedError


def check_headers(headers: NDArray[np.uint8]) -> NDArray[np.bool_]:
    """(n,) whether each row of (n, H) is a valid header: every check of `parse_header`, vectorised."""
    raise NotImplementedError


def wrap_entries(headers: NDArray[np.uint8], generations: NDArray[np.uint64], arrivals_ms: int | NDArray[np.uint64],
                 boot_epoch: int) -> NDArray[np.uint8]:
    """(n, E) table entries around (n, H) valid headers. Also how an entry is rewritten with a new arrival or epoch."""
    raise NotImplementedError


def parse_entry(data: bytes | memoryview) -> Entry | None:
    """Parse and check one table entry; None for a free one (all zeros), CorruptRecord for a torn one."""
    raise NotImplementedError


def check_entries(entries: NDArray[np.void], slot_bytes: int | None = None) -> NDArray[np.bool_]:
    """(m,) whether each entry is live and valid: local checksum, generation above 0, and a valid header.

    With `slot_bytes` the header's block must also belong into slots of that size, so that entries which an extent
    kept from another class are refused.
    """
    raise NotImplementedError


def free_entries(entries: NDArray[np.void]) -> NDArray[np.bool_]:
    """(m,) whether each entry is all zeros. An entry neither free nor valid is torn."""
    raise NotImplementedError
