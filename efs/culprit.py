"""Shards that agree with their own headers, one by one, and yet make no code word: which of them is wrong.

It takes bad memory at the time of writing, or somebody with access to the disk, to get there. Ten shards determine a
block, and the headers say what hashes its segments have. So every ten of those at hand are tried, leaving out as few
as possible first; the first ten whose block is right decide: a shard that differs from what follows from them is wrong.
When no ten make the block, the version is nothing that can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.codec import Codec
from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.shard import Header

Payload = NDArray[np.uint8]


def wrong_shards(codec: Codec, header: Header, payloads: Mapping[int, Payload]) -> set[int] | None:
    """Indices of the shards that are wrong; None when no ten of these (s,) payloads make the block of the header."""
    rows = {shard: payload.reshape(1, -1) for shard, payload in payloads.items()}
    for left_out in combinations(sorted(rows), max(0, len(rows) - DATA_SHARDS)):
        chosen = {shard: rows[shard] for shard in rows if shard not in left_out}
        if len(chosen) < DATA_SHARDS:
            return None
        size = header.shape.shard_bytes
        computed = {shard: np.zeros((1, size), np.uint8) for shard in range(STRIPE_SHARDS) if shard not in chosen}
        codec.rebuild(chosen, computed)
        whole = {**chosen, **computed}
        if _makes_block(header, whole):
            return {shard for shard in left_out if (rows[shard] != computed[shard]).any()}
    return None


def _makes_block(header: Header, shards: Mapping[int, Payload]) -> bool:
    block = np.concatenate([shards[shard][0] for shard in range(DATA_SHARDS)]).data
    shape = header.shape
    return all(xxh3_64(block[at : at + size]) == expected for at, size, expected in
               zip(shape.segment_offsets, shape.segment_bytes, header.segment_hashes, strict=True))
