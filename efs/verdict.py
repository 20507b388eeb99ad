"""Judging the records of one key: is each version whole, at risk, unreadable, hollow, or on its way out. Pure.

Input are *sights*: what each node's index lists under the key, and what is wrong with it. Output are findings about
blocks; findings about records were made where the records were looked at.

Fewer than twelve sound shards have an explanation when each missing one is on a node that is away, has a finding of
its own, or was evicted (`efs/warmth.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass

from efs.extent import SlotClass
from efs.findings import Finding, Kind
from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.warmth import STAMP_MS


@dataclass(slots=True)
class Sight:
    """One index entry and what stands behind it. `problem` is None for a sound record.

    agrees: the table entry is valid and of this version and generation. The fields after it are of the record, zeros
    when it does not agree.
    """

    node: int
    key: bytes
    digest: bytes
    location: int
    generation: int
    problem: Finding | None
    agrees: bool = False
    shard: int = 0
    block_bytes: int = 0
    slot_class: SlotClass | None = None
    arrival_ms: int = 0

    @property
    def sound(self) -> bool:
        return self.problem is None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one version. `state` is readable, unreadable, hollow or young."""

    digest: bytes
    state: str
    sound: int
    fading: bool
    finding: Finding | None


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What the judge must know beside the sights.

    away: nodes that could not be read. told: whether there is a finding already about a node's lack of a version.
    stamp: of a record. evicted: whether eviction explains that a node lacks a version with this stamp.
    young_after_ms: a version with a record that arrived later is not judged (None: judge all).
    """

    away: Collection[int]
    told: Callable[[int, bytes, bytes], bool]
    stamp: Callable[[Sight], int]
    evicted: Callable[[int, int], bool]
    young_after_ms: int | None


def judge(key: bytes, sights: Iterable[Sight], around: Surroundings) -> list[Verdict]:
    """Verdicts on all versions of one key, by digest."""
    versions: dict[bytes, list[Sight]] = {}
    for sight in sights:
        versions.setdefault(sight.digest, []).append(sight)
    readable = any(sum(sight.sound for sight in held) >= DATA_SHARDS for held in versions.values())
    return [_judge_version(key, digest, held, around, readable) for digest, held in sorted(versions.items())]


def _judge_version(key: bytes, digest: bytes, held: list[Sight], around: Surroundings, readable: bool) -> Verdict:
    sound = sum(sight.sound for sight in held)
    if around.young_after_ms is not None and any(sight.arrival_ms > around.young_after_ms for sight in held):
        return Verdict(digest, "young", sound, False, None)
    listed = {sight.node for sight in held}
    lacking = [
        node
        for node in range(STRIPE_SHARDS)
        if node not in listed and node not in around.away and not around.told(node, key, digest)
    ]
    evicted = [node for node in lacking if _evicted(node, held, around)]
    fading = bool(evicted)
    if sound >= DATA_SHARDS:
        finding = None
        if len(evicted) < len(lacking):
            where = ", ".join(str(node) for node in lacking if node not in evicted)
            finding = Finding(
                Kind.AT_RISK_BLOCK,
                None,
                key,
                digest,
                None,
                f"{sound} of {STRIPE_SHARDS} shards are sound; none on node {where}",
            )
        return Verdict(digest, "readable", sound, fading, finding)
    away = len(around.away)
    if not readable and len(listed) + away >= DATA_SHARDS:
        detail = f"{sound} of {STRIPE_SHARDS} shards are sound, {DATA_SHARDS} are needed"
        if away:
            detail += f"; {away} nodes are away"
        return Verdict(
            digest, "unreadable", sound, fading, Finding(Kind.UNREADABLE_BLOCK, None, key, digest, None, detail)
        )
    if len(listed) + away >= DATA_SHARDS:
        # Another version serves the key; the records of this one have findings of their own, or are away.
        return Verdict(digest, "hollow", sound, fading, None)
    finding = Finding(Kind.HOLLOW_STRIPE, None, key, digest, None, f"on {len(listed)} nodes, {DATA_SHARDS} are needed")
    return Verdict(digest, "hollow", sound, fading, None if len(evicted) == len(lacking) else finding)


def _evicted(node: int, held: list[Sight], around: Surroundings) -> bool:
    known = [sight for sight in held if sight.agrees]
    if not known:
        return False
    stamp = max(max(map(around.stamp, known)), min(sight.arrival_ms for sight in known) // STAMP_MS)
    return around.evicted(node, stamp)
