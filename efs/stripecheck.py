"""The second pass of fsck: what stands behind the index entries of a batch of keys, and what that makes of their
blocks.

All reads of a batch are grouped: by node, then by neighbouring slots. Deep, payloads are read for as many blocks at a
time as DEEP_BYTES holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from efs.codec import Codec
from efs.extent import SlotClass
from efs.findings import OF_BLOCKS, Finding, Kind
from efs.index import IndexEntry
from efs.limits import DATA_SHARDS, KEY_BYTES, MIB, STRIPE_SHARDS
from efs.nodeview import NodeView, Slot, locations_of
from efs.payloadcheck import PayloadCheck
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.verdict import Sight, Surroundings, Verdict, judge
from efs.warmth import Warmth

DEEP_BYTES: Final = 16 * MIB
"""Payload held at a time; one block at least."""

TOLD_KEPT: Final = 100_000
"""Findings of the first pass that are remembered; a block gets a finding of its own for what is beyond."""

Batch = Mapping[int, Sequence[IndexEntry]]
"""Index entries by node, each node's in order."""


@dataclass(slots=True)
class Judged:
    """What was found out about a batch. agreeing: by node, index entries that the table confirms."""

    findings: list[Finding] = field(default_factory=list)
    verdicts: list[Verdict] = field(default_factory=list)
    agreeing: dict[int, int] = field(default_factory=dict)
    verified_bytes: int = 0


class StripeCheck:
    """Judges batches of keys. `views`: the nodes that can be read; may become fewer from call to call."""

    def __init__(self, views: Sequence[NodeView], codec: Codec | None) -> None:
        self._live = views
        self._warmth = Warmth()
        self._payloads = None if codec is None else PayloadCheck(codec)
        self._told: set[tuple[int, bytes, bytes]] = set()

    @property
    def _views(self) -> dict[int, NodeView]:
        return {view.node_index: view for view in self._live}

    def note(self, finding: Finding) -> None:
        """A finding of the first pass: a node has data of a version that its index does not list."""
        node, key, digest = finding.node, finding.key, finding.digest
        if node is not None and key is not None and digest is not None and len(self._told) < TOLD_KEPT:
            self._told.add((node, key, digest))

    def _was_told(self, node: int, key: bytes, digest: bytes) -> bool:
        return (node, key, digest) in self._told

    def _stamp(self, sight: Sight) -> int:
        return self._warmth.stamp(self._views[sight.node], sight.location)

    def judge(self, batch: Batch, young_after_ms: int | None, again: bool = False) -> Judged:
        """again: read geometries anew. young_after_ms: see `efs.verdict.Surroundings`."""
        judged = Judged()
        self._warmth.look(self._live)
        stripes: dict[bytes, list[Sight]] = {}
        for index, entries in batch.items():
            sights = self._sights(self._views[index], entries, again)
            judged.agreeing[index] = sum(sight.agrees for sight in sights)
            for sight in sights:
                stripes.setdefault(sight.key, []).append(sight)
        away = frozenset(range(STRIPE_SHARDS)) - self._views.keys()
        around = Surroundings(away, self._was_told, self._stamp, self._warmth.may_be_evicted, young_after_ms)
        for keys in _portions(stripes):
            if self._payloads is not None:
                checked = self._payloads.check(self._views, [sight for key in keys for sight in stripes[key]])
                judged.findings += checked.findings
                judged.verified_bytes += checked.verified_bytes
            for key in keys:
                judged.findings += [
                    sight.problem
                    for sight in stripes[key]
                    if sight.problem is not None and sight.problem.kind is not Kind.EXTENT_DAMAGED
                ]
                judged.verdicts += judge(key, stripes[key], around)
        judged.findings += [verdict.finding for verdict in judged.verdicts if verdict.finding is not None]
        judged.findings.sort(key=lambda finding: (finding.kind in OF_BLOCKS, finding.key or b"", finding.node or 0))
        return judged

    # -- records

    def _sights(self, view: NodeView, entries: Sequence[IndexEntry], again: bool) -> list[Sight]:
        try:
            records = view.records(locations_of(entries), again)
        except OSError as error:
            return [self._unread(view, entry, error) for entry in entries]
        rows = zip(
            records["status"].tolist(),
            records["key"].tolist(),
            records["digest"].tolist(),
            records["generation"].tolist(),
            records["shard"].tolist(),
            records["block_bytes"].tolist(),
            records["slot_bytes"].tolist(),
            records["entry_bytes"].tolist(),
            records["arrival_ms"].tolist(),
            strict=True,
        )
        sights = []
        for entry, (status, key, digest, generation, shard, size, slot_bytes, entry_bytes, arrival) in zip(
            entries, rows, strict=True
        ):
            wanted, version = entry.index_key[:KEY_BYTES], entry.index_key[KEY_BYTES:]
            sight = Sight(view.node_index, wanted, version, entry.location, entry.generation, None)
            if status == Slot.LIVE and (key, digest, generation) == (wanted, version, entry.generation):
                sight.agrees, sight.shard, sight.block_bytes, sight.arrival_ms = True, shard, size, arrival
                sight.slot_class = SlotClass(slot_bytes, entry_bytes)
                right = shard_of_node(view.node_index, rotation_of(placement_group(wanted)))
                if shard != right:
                    sight.problem = _finding(Kind.WRONG_PLACE, sight, f"holds shard {shard}, must hold {right}")
            else:
                sight.problem = _disagreement(sight, Slot(status), key, generation)
            sights.append(sight)
        return sights

    def _unread(self, view: NodeView, entry: IndexEntry, error: OSError) -> Sight:
        sight = Sight(
            view.node_index,
            entry.index_key[:KEY_BYTES],
            entry.index_key[KEY_BYTES:],
            entry.location,
            entry.generation,
            None,
        )
        sight.problem = _finding(Kind.READ_ERROR, sight, error.strerror or str(error))
        return sight


def _portions(stripes: Mapping[bytes, Sequence[Sight]]) -> Iterator[list[bytes]]:
    """Keys in order, in portions whose payload fits DEEP_BYTES."""
    portion: list[bytes] = []
    size = 0
    for key in sorted(stripes):
        needed = sum(-(-sight.block_bytes // DATA_SHARDS) for sight in stripes[key])
        if portion and size + needed > DEEP_BYTES:
            yield portion
            portion, size = [], 0
        portion.append(key)
        size += needed
    if portion:
        yield portion


def _finding(kind: Kind, sight: Sight, detail: str) -> Finding:
    return Finding(kind, sight.node, sight.key, sight.digest, sight.location, detail)


def _disagreement(sight: Sight, status: Slot, key: bytes, generation: int) -> Finding:
    if status is Slot.DAMAGED:
        return _finding(Kind.EXTENT_DAMAGED, sight, "its extent cannot be read")
    if status is Slot.TORN:
        return _finding(Kind.BAD_ENTRY, sight, "its table entry fails its checks")
    if status is Slot.FREE:
        why = "its slot is free"
    elif status is Slot.OUTSIDE:
        why = "there is no such slot"
    elif key != sight.key:
        why = "its slot holds another key"
    else:
        why = f"its slot holds generation {generation}, the index says {sight.generation}"
    return _finding(Kind.INDEX_WITHOUT_DATA, sight, why)
