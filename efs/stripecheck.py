"""The second pass of fsck: what stands behind the index entries of a batch of keys, and what that makes of their
blocks.

All reads of a batch are grouped: by node, then by neighbouring slots. Deep, payloads are read for as many blocks at a
time as DEEP_BYTES holds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.codec import Codec
from efs.errors import CorruptRecord
from efs.extent import SlotClass
from efs.findings import OF_BLOCKS, Finding, Kind
from efs.index import IndexEntry
from efs.limits import DATA_SHARDS, KEY_BYTES, MIB, STRIPE_SHARDS
from efs.nodeview import NodeView, Slot, locations_of
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.shard import Header
from efs.verdict import Sight, Surroundings, Verdict, judge
from efs.warmth import Warmth

DEEP_BYTES: Final = 16 * MIB
"""Payload held at a time; one block at least."""

TOLD_KEPT: Final = 100_000
"""Findings of the first pass that are remembered; a block gets a finding of its own for what is beyond."""

Payload = NDArray[np.uint8]
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

    def __init__(self, views: Sequence[NodeView], warmth: Warmth, codec: Codec | None) -> None:
        self._live = views
        self._warmth = warmth
        self._codec = codec
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

    def _last_used(self, sight: Sight) -> int:
        return self._warmth.of(self._views[sight.node], sight.location, sight.arrival_ms)

    def judge(self, batch: Batch, young_after_ms: int | None, again: bool = False) -> Judged:
        """again: read geometries anew. young_after_ms: see `efs.verdict.Surroundings`."""
        judged = Judged()
        stripes: dict[bytes, list[Sight]] = {}
        for index, entries in batch.items():
            sights = self._sights(self._views[index], entries, again)
            judged.agreeing[index] = sum(sight.agrees for sight in sights)
            for sight in sights:
                stripes.setdefault(sight.key, []).append(sight)
        away = frozenset(range(STRIPE_SHARDS)) - self._views.keys()
        around = Surroundings(away, self._was_told, self._last_used, self._warmth.may_be_evicted, young_after_ms)
        for keys in _portions(stripes):
            if self._codec is not None:
                self._check_payloads([sight for key in keys for sight in stripes[key]], self._codec, judged)
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

    # -- payloads

    def _check_payloads(self, sights: Sequence[Sight], codec: Codec, judged: Judged) -> None:
        """Read the payloads of sound sights; set the problems of those that differ from their headers, then hold
        the shards of each version against each other."""
        payloads: dict[int, Payload] = {}
        for index, view in self._views.items():
            mine = [sight for sight in sights if sight.node == index and sight.sound]
            payloads |= self._read_payloads(view, mine, judged)
        versions: dict[bytes, list[Sight]] = {}
        for sight in sights:
            if id(sight) in payloads and sight.sound:
                versions.setdefault(sight.key + sight.digest, []).append(sight)
        for held in versions.values():
            if len({sight.shard for sight in held}) >= DATA_SHARDS:
                why = self._inconsistency(codec, held, {sight.shard: payloads[id(sight)] for sight in held})
                if why is not None:
                    judged.findings.append(
                        Finding(Kind.INCONSISTENT_STRIPE, None, held[0].key, held[0].digest, None, why)
                    )

    def _read_payloads(self, view: NodeView, sights: Sequence[Sight], judged: Judged) -> dict[int, Payload]:
        """Payloads by id of their sight, of those that agree with their header."""
        if not sights:
            return {}
        found: dict[int, Payload] = {}
        try:
            records = view.records(np.array([sight.location for sight in sights], np.int64))
            payloads = view.payloads(records)
        except OSError:
            return self._read_singly(view, sights, judged)
        for row, payload in payloads.items():
            sight = sights[row]
            if records["generation"][row] != sight.generation:
                continue
            judged.verified_bytes += len(payload)
            if xxh3_64(payload.tobytes()) == int(records["payload_hash"][row]):
                found[id(sight)] = payload
            else:
                sight.problem = _finding(
                    Kind.BAD_CHECKSUM, sight, f"payload of shard {sight.shard} differs from its header"
                )
        return found

    def _read_singly(self, view: NodeView, sights: Sequence[Sight], judged: Judged) -> dict[int, Payload]:
        """After a read of several failed: which of them it was."""
        if len(sights) == 1:
            try:
                view.payloads(view.records(np.array([sights[0].location], np.int64)))
            except OSError as error:
                sights[0].problem = _finding(Kind.READ_ERROR, sights[0], error.strerror or str(error))
            return {}
        found: dict[int, Payload] = {}
        for sight in sights:
            found |= self._read_payloads(view, [sight], judged)
        return found

    def _inconsistency(self, codec: Codec, held: Sequence[Sight], shards: Mapping[int, Payload]) -> str | None:
        """Why shards that are sound one by one are not one block; None when they are."""
        header = self._header(held)
        if header is None:
            return None
        base = sorted(shards)[:DATA_SHARDS]
        wanted = {
            shard: np.zeros((1, header.shape.shard_bytes), np.uint8)
            for shard in range(STRIPE_SHARDS)
            if shard not in base
        }
        codec.rebuild({shard: np.ascontiguousarray(shards[shard]).reshape(1, -1) for shard in base}, wanted)
        for shard in sorted(shards)[DATA_SHARDS:]:
            if not np.array_equal(wanted[shard][0], shards[shard]):
                return f"shard {shard} does not follow from shards {', '.join(map(str, base))}"
        data = [shards[shard] if shard in base else wanted[shard][0] for shard in range(DATA_SHARDS)]
        block = np.concatenate(data)[: header.shape.block_bytes]
        spans = zip(header.shape.segment_offsets, header.shape.segment_bytes, header.segment_hashes, strict=True)
        for segment, (offset, size, expected) in enumerate(spans):
            if xxh3_64(block[offset : offset + size].tobytes()) != expected:
                return f"segment {segment} differs from its header"
        return None

    def _header(self, held: Sequence[Sight]) -> Header | None:
        """The header of a version, from the first node that still has it."""
        for sight in held:
            try:
                entry = self._views[sight.node].entry(sight.location)
            except (CorruptRecord, OSError):
                continue
            if entry is not None and (entry.header.key, entry.header.digest) == (sight.key, sight.digest):
                return entry.header
        return None


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
