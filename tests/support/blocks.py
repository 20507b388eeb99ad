"""Random blocks with keys in runs, and an oracle that reads them back from memory twins without the product's
reader."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.codec import Codec
from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.placement import placement_group, rotation_of
from efs.shape import BlockShape
from efs.types import PutItem
from tests.support.memorynode import MemoryNode, Stored
from tests.support.records import make_keys

TINY = BlockShape(4_000, (800, 800, 800, 1_600))
"""The proportions of a V4.1 block: segments end on shard borders."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """n blocks. data: (n, block bytes) uint8."""

    shape: BlockShape
    keys: tuple[bytes, ...]
    data: NDArray[np.uint8]
    tenant_tag: bytes = bytes(8)

    @property
    def items(self) -> list[PutItem]:
        return [PutItem(key, depth, self.tenant_tag) for depth, key in enumerate(self.keys)]

    def block(self, at: int) -> bytes:
        return bytes(self.data[at])


def make_blocks(count: int, *, seed: int = 1, shape: BlockShape = TINY, keys: Sequence[bytes] = (),
                run: int = 16, tenant_tag: bytes = bytes(8)) -> Blocks:
    """The same seed makes the same blocks; the same `keys` with another seed makes other versions of them."""
    data = np.random.default_rng(seed).integers(0, 256, (count, shape.block_bytes), np.uint8)
    return Blocks(shape, tuple(keys) or tuple(make_keys(count, seed, run)), data, tenant_tag)


def sound_versions(nodes: Sequence[MemoryNode], key: bytes) -> dict[bytes, dict[int, Stored]]:
    """By digest the records of a key, by shard, that are where they belong and agree with their own header."""
    rotation = rotation_of(placement_group(key))
    found: dict[bytes, dict[int, Stored]] = {}
    for node in nodes:
        for digest, stored in node.records.get(key, {}).items():
            header = stored.header
            assert header.key == key
            assert header.digest == digest
            in_place = node.node_index == (header.shard + rotation) % STRIPE_SHARDS
            if in_place and xxh3_64(bytes(stored.payload)) == header.payload_hash:
                found.setdefault(digest, {})[header.shard] = stored
    return found


def readable(nodes: Sequence[MemoryNode], key: bytes) -> dict[bytes, bytes]:
    """By digest the bytes of each version of which ten shards are sound, rebuilt from the last ten of them."""
    blocks: dict[bytes, bytes] = {}
    for digest, shards in sound_versions(nodes, key).items():
        if len(shards) >= DATA_SHARDS:
            chosen = sorted(shards)[-DATA_SHARDS:]
            shape = shards[chosen[0]].header.shape
            present = {shard: np.frombuffer(bytes(shards[shard].payload), np.uint8).reshape(1, -1) for shard in chosen}
            wanted = {shard: np.zeros((1, shape.shard_bytes), np.uint8) for shard in range(DATA_SHARDS)
                      if shard not in present}
            if wanted:
                Codec().rebuild(present, wanted)
            data = {**present, **wanted}
            blocks[digest] = b"".join(data[shard].tobytes() for shard in range(DATA_SHARDS))[: shape.block_bytes]
    return blocks
