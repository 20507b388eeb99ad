"""Frozen values that callers of the filesystem pass and see."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

NO_PLACE: Final = -1
"""Index of a node that is in no place of a group: a spare."""


@dataclass(frozen=True, slots=True)
class PutItem:
    """What the filesystem must know of a block beside its bytes: its key, its depth in the chain (DEPTH_UNKNOWN when
    not known) and the tenant tag of 8 bytes (zeros without a tenant). digest: of 16 bytes, where it is known what the
    block must be; bytes of another digest are then not stored."""

    key: bytes
    depth: int
    tenant_tag: bytes
    digest: bytes | None = None


@dataclass(frozen=True, slots=True)
class GetReport:
    """What one `get_into` did.

    blocks: length of the verified leading run: every key before it has its bytes in the buffer.
    ok: one bool per key; bytes of blocks that are not ok are undefined.
    rebuilt: blocks of which at least one data shard came from Reed-Solomon.
    hedged: shards asked speculatively beyond the eleventh.
    corrupt, missing, raced: shards that failed their checks; that were expected on an asked node and not to be had
      (node gone, record absent, deadline); that were overwritten while they were read.
    bytes: verified payload delivered, the sum over ok blocks. seconds: from call to return.
    """

    blocks: int
    ok: Sequence[bool]
    rebuilt: int
    hedged: int
    corrupt: int
    missing: int
    raced: int
    bytes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PutReport:
    """What one `put` did, in blocks. `acked`, `already` and `failed` are disjoint and add up to the keys.

    acked: stored by this call on at least 11 nodes. already: some version was complete before (nothing stored, or
    a missing shard of the same version added). failed: not acknowledged; the block may be readable all the same.
    at_risk: those of acked and already that are on exactly 11 nodes.
    why: the first reason why blocks failed, None when none did; not compared.
    """

    acked: int
    already: int
    failed: int
    at_risk: int
    why: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """A node's identity and fill. Sizes in bytes; `live_bytes` counts slots that hold a record. counters: those of its
    own that are not zero, by name; a node of another version may name others, one that is older names none."""

    node_index: int
    node_id: str
    state: str
    capacity_bytes: int
    live_bytes: int
    extents_used: int
    extents_total: int
    records: int
    unverified: int
    counters: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SpareInfo:
    """What a server says of a spare: a prepared, empty directory, and the size of the node that it will be."""

    node_id: str
    directory: str
    capacity_bytes: int


@dataclass(frozen=True, slots=True)
class ListedRecord:
    """One record as `list` shows it. `arrival_ms` is wall time in ms, `stamp` in STAMP_SECONDS; `segments` is how many
    the block has, which whoever asks for the record's header must say."""

    key: bytes
    digest: bytes
    location: int
    generation: int
    shard: int
    block_bytes: int
    depth: int
    tenant_tag: bytes
    arrival_ms: int
    stamp: int
    segments: int


@dataclass(frozen=True, slots=True)
class ListPage:
    """A page of a node's listing, sorted by key then digest; `after` continues it, None at the end. Any bytes do as
    `after`: a listing begins behind them in the order of key and digest put together."""

    records: tuple[ListedRecord, ...]
    after: bytes | None


@dataclass(frozen=True, slots=True)
class DropItem:
    """A record to remove, named exactly: another generation or digest under the key is left alone.

    older_than_ms: leave it alone also when it arrived less than so long ago by the node's own clock, or when a put of
    the same digest is renewing it just now. Only the node can tell, and only at the moment in which it drops: a put
    keeps the generation of a record that it finds. 0 to HOLLOW_GRACE_MS."""

    key: bytes
    digest: bytes
    generation: int
    older_than_ms: int = 0
