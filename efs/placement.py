"""Where a key lives: the first two bytes of a key name its placement group, and that alone decides. Pure.

placement group → EC group by rendezvous hashing (highest score wins), and, by a hash of its own, one of twelve
rotations: shard i of a block lives on node (i + rotation) mod 12 of its group. The parity shard that a read leaves out
at first is chosen by the same hash, so that load spreads evenly. All tables are pinned by golden vectors.

The hash is integer arithmetic modulo 2^64, the same on every platform:

    mix(x):  x ^= x >> 30;  x *= 0xBF58476D1CE4E5B9;  x ^= x >> 27;  x *= 0x94D049BB133111EB;  x ^= x >> 31

    turn(g)      = mix(g + ROTATION_SALT)
    rotation(g)  = turn(g) mod 12
    spare(g)     = 10 + (turn(g) div 12) mod 2
    seed(id)     = BLAKE2b with a digest of 8 bytes and person "efs/ec-group/1" of the id in UTF-8, little-endian
    score(id, g) = mix(seed(id) xor mix(g + OWNER_SALT))

The owner of g is the group with the highest score; of two equal scores (none is known) the one whose id sorts first by
its UTF-8 bytes. So an owner depends on the set of ids alone, and a group that is added takes only what it wins.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.limits import DATA_SHARDS, KEY_BYTES, PARITY_SHARDS, PLACEMENT_GROUPS, STRIPE_SHARDS

ROTATION_SALT: Final = 0x6B76_2D72_6F74_6174
OWNER_SALT: Final = 0x6B76_2D6F_776E_6572
MAX_EC_GROUPS: Final = 4_096
"""49,152 nodes; the table takes about 0.5 ms a group to make."""


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """`mix` of the module docstring, element by element; uint64 arrays wrap around."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return values ^ (values >> np.uint64(31))


_GROUPS: Final = np.arange(PLACEMENT_GROUPS, dtype=np.uint64)
_TURNS: Final = _mix(_GROUPS + np.uint64(ROTATION_SALT))
_ROTATION_TABLE: Final = (_TURNS % np.uint64(STRIPE_SHARDS)).astype(np.uint8)
# Indexing bytes gives a Python int in a third of the time of a numpy scalar.
_ROTATIONS: Final = _ROTATION_TABLE.tobytes()
_SPARES: Final = (
    (DATA_SHARDS + _TURNS // np.uint64(STRIPE_SHARDS) % np.uint64(PARITY_SHARDS)).astype(np.uint8).tobytes()
)


def placement_group(key: bytes) -> int:
    """The first two bytes of a key as a big-endian number."""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"a key has {len(key)} bytes, must have {KEY_BYTES}")
    return key[0] << 8 | key[1]


def rotation_of(group: int) -> int:
    """0–11."""
    return _ROTATIONS[_in_range(group)]


def rotations_of(keys: Sequence[bytes]) -> NDArray[np.uint8]:
    """(n,) rotation of each of n keys, which must have KEY_BYTES each."""
    groups = np.frombuffer(b"".join(keys), ">u2").reshape(len(keys), KEY_BYTES // 2)[:, 0]
    rotations: NDArray[np.uint8] = _ROTATION_TABLE[groups]
    return rotations


def spare_shard_of(group: int) -> int:
    """10 or 11: the parity shard that is asked only when another one is late, missing or corrupt."""
    return _SPARES[_in_range(group)]


def node_of_shard(shard: int, rotation: int) -> int:
    """The index in its group of the node that holds this shard, 0–11."""
    return (shard + rotation) % STRIPE_SHARDS


def shard_of_node(node_index: int, rotation: int) -> int:
    """The shard that a node holds of each block with this rotation, 0–11."""
    return (node_index - rotation) % STRIPE_SHARDS


def ec_group_table(group_ids: Sequence[str]) -> NDArray[np.uint16]:
    """(65,536,) index into `group_ids` of the owner of each placement group; order of the ids does not matter to the
    owner's identity, and adding a group moves only what the new group wins.

    InvalidArgument for no ids, more than MAX_EC_GROUPS, an empty id or one given twice.
    """
    if not 1 <= len(group_ids) <= MAX_EC_GROUPS:
        raise InvalidArgument(f"{len(group_ids)} EC groups given, must be 1 to {MAX_EC_GROUPS}")
    if len(set(group_ids)) != len(group_ids) or not all(group_ids):
        raise InvalidArgument("ids of EC groups must be different from each other and not empty")
    spread = _mix(_GROUPS + np.uint64(OWNER_SALT))
    best = np.zeros(PLACEMENT_GROUPS, np.uint64)
    owner = np.zeros(PLACEMENT_GROUPS, np.uint16)
    for place, (_, index) in enumerate(sorted((name.encode(), index) for index, name in enumerate(group_ids))):
        score = _mix(spread ^ np.uint64(_seed(group_ids[index])))
        wins = score > best if place else np.ones(PLACEMENT_GROUPS, np.bool_)
        best[wins] = score[wins]
        owner[wins] = index
    owner.setflags(write=False)
    return owner


def runs(keys: Sequence[bytes]) -> list[tuple[int, int]]:
    """[start, stop) of each maximal stretch of neighbouring keys with one placement group."""
    if not keys:
        return []
    joined = b"".join(keys)
    if set(map(len, keys)) != {KEY_BYTES}:
        wrong = next(position for position, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidArgument(f"key {wrong} has {len(keys[wrong])} bytes, must have {KEY_BYTES}")
    groups = np.frombuffer(joined, np.uint16)[:: KEY_BYTES // 2]
    borders = (np.flatnonzero(groups[1:] != groups[:-1]) + 1).tolist()
    return list(zip([0, *borders], [*borders, len(keys)], strict=True))


def _in_range(group: int) -> int:
    if not 0 <= group < PLACEMENT_GROUPS:
        raise InvalidArgument(f"placement group {group} is outside 0 to {PLACEMENT_GROUPS - 1}")
    return group


def _seed(group_id: str) -> int:
    digest = hashlib.blake2b(group_id.encode(), digest_size=8, person=b"efs/ec-group/1").digest()
    return int.from_bytes(digest, "little")
