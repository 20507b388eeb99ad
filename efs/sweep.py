"""Sweep: removing what can never be read. One sweeper at a time for an EC group; the owner process when embedded.

*What goes.*

- A **hollow** version: fewer than ten nodes hold a shard of it. Failed puts leave them, and eviction on nodes that do
  not drop quite the same blocks.
- A **losing** version: another version of its key has won. The winner is the version with most shards, of several the
  one with the smallest digest, and it has won only when at least eleven nodes hold a trusted shard of it. Without a
  winner no version of ten shards or more goes.
- A **purged** record: its tenant tag is in the set of tags that the caller names.

*How.* The sorted listings of the nodes are merged page by page; keys with fewer than ten shards of a version or with
several versions are *suspected*. Listings take minutes, so they decide nothing: suspected keys are looked up on every
node once more, together, and `condemned` decides on that one view. Each node then drops by comparing: key, digest and
generation, and only what has been there for the hollow grace by its own clock (`DropItem.older_than_ms`).

*A live writer loses nothing.* A put returns at most MAX_DEADLINE_MS after it began, the grace is twice that. What a put
has stored, or found stored and renewed, is younger than the grace until long after the put has been answered, on
each node by the same clock that took its arrival: clocks of different machines are never compared, and a clock that is
set does not age what arrived before (`efs.clock.Arrivals`). A shard that an earlier put left behind may be dropped up
to the moment in which a new put of the same digest reaches its node; from then on the node refuses the drop. So it does
not matter how old the sweeper's view is. Ten trusted shards that a put counts without renewing them are not hollow.

*Nodes that are missing.* A node that is offline or suspect, or does not answer, may hold a shard of anything. With u
such nodes a version is hollow only when its shards and u together are fewer than ten: no answer of theirs could make it
readable. A losing version goes only when all twelve nodes have answered the look-up, because a missing node could turn
most shards into fewest. Purged records go from whichever node lists them. What a missing node holds of a version that
was removed is hollow when the node is back.

*Not six and six.* All drops of losing versions follow from one rule on twelve complete answers, so two sweeps can only
condemn different versions of a key if its shards changed in between. A drop never makes the winner weaker, and takes
from all others; so a sweep that is interrupted anywhere, and the next one, agree on the winner. It changes only when
eviction took the winner's shards, which ends the key's life anyhow.

Records in a place that is not theirs (a shard index that does not belong to the node) count for nothing and are left to
fsck. Sweeping needs memory for one page of each listing. It yields to calls (`efs.pace`), and goes on behind any key.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, fields

import numpy as np

from efs.ask import all_of, tables_of
from efs.clock import Clock, Deadline
from efs.contract import Node
from efs.errors import InvalidArgument
from efs.health import Health
from efs.limits import (
    ACK_SHARDS,
    DATA_SHARDS,
    HOLLOW_GRACE_MS,
    KEY_BYTES,
    STRIPE_SHARDS,
    SWEEP_CALL_MS,
    SWEEP_KEYS_AT_ONCE,
    SWEEP_PAGE_RECORDS,
)
from efs.listing import Merge, Stretch, fill
from efs.metrics import CounterFile
from efs.pace import Pace
from efs.placement import placement_group, rotation_of
from efs.survey import Survey, Version
from efs.types import DropItem

HOLLOW = "hollow"
LOSING = "losing"


# -- The decision: pure ----------------------------------------------------------------------------------------------


def winner_of(versions: Mapping[bytes, Version]) -> bytes | None:
    """The digest that has won: most shards, of equals the smallest digest, and at least eleven that are trusted."""
    best = min(versions, key=lambda digest: (-len(versions[digest].generations), digest), default=None)
    return best if best is not None and len(versions[best].trusted) >= ACK_SHARDS else None


def condemned(versions: Mapping[bytes, Version], unknown: int) -> dict[bytes, str]:
    """Which versions of one key must go and why, when so many of the twelve nodes gave no answer."""
    doomed = {digest: HOLLOW for digest, version in versions.items()
              if len(version.generations) + unknown < DATA_SHARDS}
    winner = winner_of(versions) if unknown == 0 else None
    if winner is not None:
        doomed.update({digest: LOSING for digest in versions if digest != winner and digest not in doomed})
    return doomed


# -- The sweep -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep did.

    records: listed. hollow, losing: versions that were condemned. purged: records of purged tenants that were removed.
    dropped: records that were removed, altogether. spared: condemned records that were too young, or gone or changed by
    the time of the drop, or on a node that did not answer. missing: nodes that were not, or not to the end, listed.
    resume: the key (hex digits) behind which the next sweep should begin, None when this one came to the end.
    """

    records: int
    hollow: int
    losing: int
    purged: int
    dropped: int
    spared: int
    missing: tuple[int, ...]
    resume: str | None
    seconds: float


@dataclass(slots=True)
class _Tally:
    """Running sums; the names are those of the report and, behind `sweep_`, of the counters."""

    records: int = 0
    hollow: int = 0
    losing: int = 0
    purged: int = 0
    dropped: int = 0
    spared: int = 0


class Sweep:
    """One sweep of the nodes of a group. `nodes[i]` is None where node i could not be opened."""

    def __init__(self, nodes: Sequence[Node | None], health: Health, counters: CounterFile, clock: Clock, pace: Pace, *,
                 purged: Collection[bytes] = (), grace_ms: int = HOLLOW_GRACE_MS) -> None:
        """purged: tenant tags of 8 bytes whose records go at once. grace_ms: at most HOLLOW_GRACE_MS."""
        self._nodes = tuple(nodes)
        self._health = health
        self._counters = counters
        self._clock = clock
        self._pace = pace
        self._purged = frozenset(purged)
        self._grace_ms = grace_ms
        self._tally = _Tally()

    async def run(self, *, after: bytes | None = None, max_seconds: float | None = None) -> SweepReport:
        """Sweep the keys behind `after`, for about `max_seconds`. Never raises for a node's sake."""
        if after is not None and len(after) != KEY_BYTES:
            raise InvalidArgument(f"a key has {len(after)} bytes, expected {KEY_BYTES}")
        started = self._clock.monotonic()
        self._tally = _Tally()
        merge = Merge([index for index in self._health.readable() if self._nodes[index] is not None], after)
        while not merge.ended:
            await self._pace.step()
            await fill(merge, self._nodes, self._clock, self._pace, SWEEP_PAGE_RECORDS)
            stretch = merge.take()
            await self._work_off(stretch, STRIPE_SHARDS - len(merge.listed))
            if max_seconds is not None and self._clock.monotonic() - started >= max_seconds:
                break
        self._count(merge.ended)
        missing = tuple(index for index in range(STRIPE_SHARDS) if index not in merge.listed)
        resume = None if merge.ended or merge.done is None else merge.done.hex()
        tally = self._tally
        return SweepReport(tally.records, tally.hollow, tally.losing, tally.purged, tally.dropped, tally.spared,
                           missing, resume, self._clock.monotonic() - started)

    async def _work_off(self, stretch: Stretch, unlisted: int) -> None:
        self._tally.records += stretch.count
        if self._purged:
            removed = await self._drop(stretch.tagged(self._purged))
            self._tally.purged += sum(removed.values())
        suspected = stretch.suspected(unlisted)
        for start in range(0, len(suspected), SWEEP_KEYS_AT_ONCE):
            await self._judge(suspected[start : start + SWEEP_KEYS_AT_ONCE])

    async def _judge(self, keys: Sequence[bytes]) -> None:
        """Look suspected keys up on all nodes and remove what is condemned."""
        deadline = Deadline.after_ms(self._clock, SWEEP_CALL_MS)
        asks = {index: (node, keys) for index in self._health.readable() if (node := self._nodes[index]) is not None}
        tables, _ = await tables_of(asks, self._health, deadline, len(asks))
        survey = Survey(np.array([rotation_of(placement_group(key)) for key in keys], np.uint8), tables)
        drops: dict[int, list[DropItem]] = {}
        reasons: list[str] = []
        for column in np.flatnonzero(survey.held).tolist():
            versions = survey.versions(column)
            for digest, why in condemned(versions, STRIPE_SHARDS - len(tables)).items():
                reasons.append(why)
                for index, generation in versions[digest].generations.items():
                    item = DropItem(keys[column], digest, generation, self._grace_ms)
                    drops.setdefault(index, []).append(item)
        self._tally.hollow += reasons.count(HOLLOW)
        self._tally.losing += reasons.count(LOSING)
        await self._drop(drops)

    async def _drop(self, drops: Mapping[int, Sequence[DropItem]]) -> dict[int, int]:
        """Have nodes drop records; how many each has dropped."""
        deadline = Deadline.after_ms(self._clock, SWEEP_CALL_MS)
        calls = {index: node.drop(items, deadline) for index, items in drops.items()
                 if (node := self._nodes[index]) is not None}
        dropped, _ = await all_of(calls, deadline, len(calls))
        asked = sum(len(items) for items in drops.values())
        self._tally.dropped += sum(dropped.values())
        self._tally.spared += asked - sum(dropped.values())
        return dropped

    def _count(self, finished: bool) -> None:
        self._counters.add("sweep_runs", finished)
        for part in fields(_Tally):
            self._counters.add(f"sweep_{part.name}", getattr(self._tally, part.name))

