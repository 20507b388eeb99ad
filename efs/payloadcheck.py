"""The deep part of fsck's second pass: payloads against their headers, the shards of a version against each other.

Payloads of a portion of keys are held together. A payload that differs from the checksum in its own header is a bad
checksum. Of each version with ten sound payloads or more, ten of them must give the others, and their bytes the
segments that the header describes; versions of one size with the same shards in hand are computed together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.codec import Codec
from efs.findings import Finding, Kind
from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.nodeview import NodeView, Segments
from efs.verdict import Sight

Payload = NDArray[np.uint8]
Views = Mapping[int, NodeView]
Version = Mapping[int, Sight]
"""Sights of one version with a sound payload, by shard."""


@dataclass(slots=True)
class Checked:
    """Findings about versions, and payload bytes that were read and checked."""

    findings: list[Finding] = field(default_factory=list)
    verified_bytes: int = 0


class PayloadCheck:
    """Checks portions of sights."""

    def __init__(self, codec: Codec) -> None:
        self._codec = codec

    def check(self, views: Views, sights: Sequence[Sight]) -> Checked:
        """Read the payloads of sound sights; set the problems of those that differ from their headers."""
        checked = Checked()
        payloads: dict[int, Payload] = {}
        for index, view in views.items():
            mine = [sight for sight in sights if sight.node == index and sight.sound]
            payloads |= self._read(view, mine, checked)
        versions: dict[bytes, dict[int, Sight]] = {}
        for sight in sights:
            if id(sight) in payloads and sight.sound:
                versions.setdefault(sight.key + sight.digest, {})[sight.shard] = sight
        alike: dict[tuple[int, tuple[int, ...]], list[Version]] = {}
        for version in versions.values():
            if len(version) >= DATA_SHARDS:
                size = next(iter(version.values())).block_bytes
                alike.setdefault((size, tuple(sorted(version))), []).append(version)
        for (size, shards), group in alike.items():
            rows = {shard: np.stack([payloads[id(held[shard])] for held in group]) for shard in shards}
            for held, why in zip(group, self._inconsistencies(views, group, rows, size), strict=True):
                if why is not None:
                    sight = next(iter(held.values()))
                    checked.findings.append(Finding(Kind.INCONSISTENT_STRIPE, None, sight.key, sight.digest, None, why))
        return checked

    # -- one by one

    def _read(self, view: NodeView, sights: Sequence[Sight], checked: Checked) -> dict[int, Payload]:
        """Payloads by id of their sight, of those that agree with their header."""
        if not sights:
            return {}
        found: dict[int, Payload] = {}
        try:
            records = view.records(_locations(sights))
            payloads = view.payloads(records)
        except OSError as error:
            return self._read_singly(view, sights, checked, error)
        generations, hashes = records["generation"].tolist(), records["payload_hash"].tolist()
        for row, payload in payloads.items():
            sight = sights[row]
            if generations[row] != sight.generation:
                continue
            checked.verified_bytes += len(payload)
            if xxh3_64(payload.tobytes()) == hashes[row]:
                found[id(sight)] = payload
            else:
                why = f"payload of shard {sight.shard} differs from its header"
                sight.problem = Finding(Kind.BAD_CHECKSUM, sight.node, sight.key, sight.digest, sight.location, why)
        return found

    def _read_singly(
        self, view: NodeView, sights: Sequence[Sight], checked: Checked, error: OSError
    ) -> dict[int, Payload]:
        """After a read failed: which of them it was."""
        if len(sights) == 1:
            (sight,) = sights
            why = error.strerror or str(error)
            sight.problem = Finding(Kind.READ_ERROR, sight.node, sight.key, sight.digest, sight.location, why)
            return {}
        found: dict[int, Payload] = {}
        for sight in sights:
            found |= self._read(view, [sight], checked)
        return found

    # -- together

    def _inconsistencies(
        self, views: Views, group: Sequence[Version], rows: Mapping[int, Payload], size: int
    ) -> list[str | None]:
        """For each version why its shards, sound one by one, are not one block; None when they are. rows: (versions,
        shard bytes) by shard."""
        base = sorted(rows)[:DATA_SHARDS]
        wanted = {shard: np.zeros_like(rows[base[0]]) for shard in range(STRIPE_SHARDS) if shard not in base}
        self._codec.rebuild({shard: rows[shard] for shard in base}, wanted)
        whys: list[str | None] = [None] * len(group)
        for shard in sorted(rows)[DATA_SHARDS:]:
            for row in np.flatnonzero((wanted[shard] != rows[shard]).any(axis=1)).tolist():
                whys[row] = f"shard {shard} does not follow from shards {', '.join(map(str, base))}"
        data = [rows[shard] if shard in base else wanted[shard] for shard in range(DATA_SHARDS)]
        segments = _segments(views, group)
        for row in range(len(group)):
            described = segments.get(row)
            if whys[row] is None and described is not None:
                whys[row] = _differing(np.concatenate([part[row] for part in data])[:size].tobytes(), described)
        return whys


def _segments(views: Views, group: Sequence[Version]) -> dict[int, Segments]:
    """The segments of each version, by row, from the header of its first node."""
    found: dict[int, Segments] = {}
    first = [next(iter(held.values())) for held in group]
    for index, view in views.items():
        rows = [row for row, sight in enumerate(first) if sight.node == index]
        try:
            described = view.segments(_locations([first[row] for row in rows]))
        except OSError:
            continue  # Its payload was read a moment ago; a disk that fails now is met by the next portion.
        for at, segments in described.items():
            if segments.index_key == first[rows[at]].key + first[rows[at]].digest:
                found[rows[at]] = segments
    return found


def _differing(block: bytes, described: Segments) -> str | None:
    ends = list(accumulate(described.sizes))
    for segment, (stop, size, expected) in enumerate(zip(ends, described.sizes, described.hashes, strict=True)):
        if xxh3_64(memoryview(block)[stop - size : stop]) != expected:
            return f"segment {segment} differs from its header"
    return None


def _locations(sights: Sequence[Sight]) -> NDArray[np.int64]:
    return np.array([sight.location for sight in sights], np.int64)
