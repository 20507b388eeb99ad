"""Valid records for one node: keys in runs, payload, headers and the batch that carries them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.contract import PutBatch
from efs.limits import KEY_BYTES
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.shape import BlockShape
from efs.shard import build_headers, template_digests
from efs.types import DropItem

SMALL = BlockShape(1_000, (1_000,))
"""100-byte shards in 128-byte slots: padding, and 32 slots to a chunk."""
LARGE = BlockShape(40_960, (10_240, 30_720))
"""Page-sized shards, two segments."""


@dataclass(frozen=True, slots=True)
class Records:
    """n records as one node holds them. payload: (n, shard bytes). digests: 16 bytes each."""

    shape: BlockShape
    keys: tuple[bytes, ...]
    digests: tuple[bytes, ...]
    headers: NDArray[np.uint8]
    payload: NDArray[np.uint8]

    def __len__(self) -> int:
        return len(self.keys)

    def batch(self, stamp: int = 0) -> PutBatch:
        """A put of all of them, from a private copy of the payload."""
        padded = np.zeros((len(self), self.shape.slot_bytes), np.uint8)
        padded[:, : self.shape.shard_bytes] = self.payload
        return PutBatch(self.keys, self.headers.copy(), padded, self.shape.shard_bytes, stamp)

    def rows(self, start: int, stop: int) -> Records:
        return Records(self.shape, self.keys[start:stop], self.digests[start:stop], self.headers[start:stop].copy(),
                       self.payload[start:stop].copy())

    def drop_items(self, generations: NDArray[np.uint64]) -> list[DropItem]:
        return [DropItem(key, digest, int(generation))
                for key, digest, generation in zip(self.keys, self.digests, generations, strict=True)]


def make_keys(count: int, seed: int, run: int = 64) -> list[bytes]:
    """Keys in runs of `run` that share their placement group."""
    source = random.Random(seed)
    keys = []
    for position in range(count):
        if position % run == 0:
            group = source.randbytes(2)
        keys.append(group + source.randbytes(KEY_BYTES - 2))
    return keys


def make_records(count: int, node_index: int, *, seed: int = 1, shape: BlockShape = SMALL, keys: Sequence[bytes] = (),
                 run: int = 64, first_depth: int = 0, tenant_tag: bytes = bytes(8)) -> Records:
    """Records for a node with random payload. The same seed makes the same records; the same `keys` with another seed
    makes other versions of them."""
    keys = list(keys) or make_keys(count, seed, run)
    source = np.random.default_rng(seed)
    payload = source.integers(0, 256, (count, shape.shard_bytes), np.uint8)
    segment_hashes = source.integers(1, 1 << 62, (count, len(shape.segment_bytes)), np.uint64)
    shards = np.array([shard_of_node(node_index, rotation_of(placement_group(key))) for key in keys], np.uint8)
    depths = np.arange(first_depth, first_depth + count, dtype=np.uint32)
    hashes = np.array([xxh3_64(row) for row in payload], np.uint64)
    headers = build_headers(keys, shards, depths, tenant_tag, shape, segment_hashes, hashes)
    words = template_digests(headers)
    return Records(shape, tuple(keys), tuple(row.tobytes() for row in words), headers, payload)
