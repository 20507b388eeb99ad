"""What `fsck` can find, as frozen values with names that never change; and the sums of a run.

Every finding is something that is wrong now and that nothing else explains: one cause, one finding. A block that lost
shards on a node whose directory is away, or through a record or extent that has a finding of its own, is counted and
gets no finding beside it, unless it became unreadable. What a healthy store does on its way is no finding but a
count: torn entries of slots that were free anyhow, stripes that eviction has begun to drop, stripes whose put may
still be running.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import StrEnum


class Kind(StrEnum):
    """Names of findings."""

    # of a node
    NODE_ABSENT = "node_absent"
    """The directory is not there."""
    NODE_UNREADABLE = "node_unreadable"
    """The system refuses to read the directory or its files."""
    WRONG_IDENTITY = "wrong_identity"
    """A directory, slab or extent of another node, place or store."""
    INDEX_LOST = "index_lost"
    SLAB_LOST = "slab_lost"
    EXTENT_DAMAGED = "extent_damaged"
    """An extent's header page fails its checks, or the slab file ends before it."""
    ACCOUNTING_DRIFT = "accounting_drift"
    """Two counts of the same thing differ."""
    OVER_LIMIT = "over_limit"
    """The directory occupies more than the node's share of the capacity."""
    # of a record
    INDEX_WITHOUT_DATA = "index_without_data"
    """An index entry whose slot is free or holds another record."""
    BAD_ENTRY = "bad_entry"
    """An index entry whose table entry fails its checks."""
    DATA_WITHOUT_INDEX = "data_without_index"
    """A sound table entry of a version that the index does not have."""
    ORPHAN_SLOT = "orphan_slot"
    """A sound table entry of a version that the index has at another slot."""
    WRONG_PLACE = "wrong_place"
    """A record whose shard is not the one that its node must hold."""
    BAD_CHECKSUM = "bad_checksum"
    """A payload that differs from the checksum in its header (deep)."""
    READ_ERROR = "read_error"
    """The system cannot read a table or a payload."""
    # of a block
    AT_RISK_BLOCK = "at_risk_block"
    """Readable from 10 or 11 sound shards, and nothing explains where the others are."""
    UNREADABLE_BLOCK = "unreadable_block"
    """Listed by 10 nodes or more, those that are away included, but fewer than 10 shards are sound and in reach."""
    HOLLOW_STRIPE = "hollow_stripe"
    """A version that fewer than 10 nodes hold: space, no data."""
    INCONSISTENT_STRIPE = "inconsistent_stripe"
    """Shards that are sound one by one but make no code word, or not the block that their headers describe (deep)."""


OF_NODES = frozenset(list(Kind)[:8])
OF_RECORDS = frozenset(list(Kind)[8:15])
OF_BLOCKS = frozenset(list(Kind)[15:])


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong. node: index in the group, None for a block. key, digest: 32 and 16 bytes, None where
    there is none. location: of a slot, or extent · 2^20 for an extent. detail: one line for a person, not part of the
    identity."""

    kind: Kind
    node: int | None = None
    key: bytes | None = None
    digest: bytes | None = None
    location: int | None = None
    detail: str = field(default="", compare=False)

    def document(self) -> dict[str, str | int | None]:
        """For JSON: bytes as hex digits."""
        return {
            "kind": self.kind.value,
            "node": self.node,
            "key": self.key.hex() if self.key is not None else None,
            "digest": self.digest.hex() if self.digest is not None else None,
            "location": self.location,
            "detail": self.detail,
        }


@dataclass(slots=True)
class Sums:
    """What a run of fsck saw. Sizes in bytes.

    nodes: nodes that could be read. records: sound table entries. index_entries: entries read from the indexes.
    versions: distinct (key, digest). readable, at_risk, unreadable, hollow: versions by their sound shards: at_risk
    counts 10 and 11 and is a part of readable. fading: versions that miss shards which eviction explains. young: not
    judged, because a running owner may still be writing them. torn: entries of free slots that are neither zeros nor
    valid. unverified: records of before an unclean stop. live_bytes: slots that hold records. allocated_bytes: slab
    space by the file system. total_bytes: node directories as du counts. verified_bytes: payload that was read and
    checked. complete: whether everything was looked at. resume: where to continue when not.
    """

    nodes: int = 0
    records: int = 0
    index_entries: int = 0
    versions: int = 0
    readable: int = 0
    at_risk: int = 0
    unreadable: int = 0
    hollow: int = 0
    fading: int = 0
    young: int = 0
    torn: int = 0
    unverified: int = 0
    live_bytes: int = 0
    allocated_bytes: int = 0
    total_bytes: int = 0
    verified_bytes: int = 0
    seconds: float = 0.0
    complete: bool = False
    resume: str | None = None
    beside_owner: bool = False
    found: Counter[str] = field(default_factory=Counter)
