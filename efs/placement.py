"""Where a key lives: the first two bytes of a key name its placement group, and that alone decides. Pure.

placement group → EC group by rendezvous hashing (highest score wins), and, by a hash of its own, one of twelve rotations:
shard i of a block lives on node (i + rotation) mod 12 of its group. The parity shard that a read leaves out at first is
chosen by the same hash, so that load spreads evenly. All tables are pinned by golden vectors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def placement_group(key: bytes) -> int:
    """The first two bytes of a key as a big-endian number."""
    raise NotImplementedError


def rotation_of(group: int) -> int:
    """0–11."""
    raise NotImplementedError


def spare_shard_of(group: int) -> int:
    """10 or 11: the parity shard that is asked only when another one is late, missing or corrupt."""
    raise NotImplementedError


def node_of_shard(shard: int, rotation: int) -> int:
    raise NotImplementedError


def shard_of_node(node_index: int, rotation: int) -> int:
    raise NotImplementedError


def ec_group_table(group_ids: Sequence[str]) -> NDArray[np.uint16]:
    """(65,536,) index into `group_ids` of the owner of each placement group; order of the ids does not matter to the
    owner's identity, and adding a group moves only what the new group wins."""
    raise NotImplementedError


def runs(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """[start, stop) of each maximal stretch of neighbouring keys with one placement group."""
    raise NotImplementedError
