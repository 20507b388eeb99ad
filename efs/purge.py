"""Purging tenant tags from a store: tombstones first, then every node, and what could not be reached until it has been.

*Order.* The tombstones are durable, with all twelve nodes pending, before the first record goes. Then each node buries
the tags (`efs/burial.py`), and those that have are pending no more, which is noted too. A purge that is killed anywhere
is finished by the next opening: every node that opens buries every tombstone of the store before it serves, whatever
is noted of it, and one that cannot is left out. So a node that was away, or a directory that comes back from a copy,
brings nothing back; nor do repair, scrub, sync and late puts, since every node that serves refuses the tags.

*Nodes that are away* or hang stay pending. `finish` tries again; the owner does so before each sweep.

The notes are small and written on the caller's thread, as those of `efs/upkeep.py` that must be waited for.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from efs.ask import all_of
from efs.clock import Clock, Deadline
from efs.contract import Node
from efs.limits import PURGE_CALL_MS, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.osio import Io
from efs.tombstones import Tombstones, write_tombstones

ALL_NODES: Final = frozenset(range(STRIPE_SHARDS))

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class PurgeReport:
    """What one purge did. dropped: records that went now. missing: nodes that have not dropped everything yet."""

    dropped: int
    missing: tuple[int, ...]


class Purger:
    """Purges the nodes of a group. `nodes[i]` is None where node i could not be opened; gates are passed."""

    def __init__(self, nodes: Sequence[Node | None], counters: CounterFile, clock: Clock, tombstones: Tombstones,
                 io: Io | None, root: str | None) -> None:
        """tombstones: as they are noted; every node has buried them already. Without io and root nothing is noted."""
        self._nodes = tuple(nodes)
        self._counters = counters
        self._clock = clock
        self._io = io
        self._root = root
        self._tombstones = dict(tombstones)

    @property
    def tags(self) -> frozenset[bytes]:
        """Everything that was ever purged."""
        return frozenset(self._tombstones)

    @property
    def pending(self) -> dict[bytes, frozenset[int]]:
        """Tags that some node has not dropped yet, and these nodes."""
        return {tag: nodes for tag, nodes in self._tombstones.items() if nodes}

    def note_replaced(self, node_index: int) -> None:
        """A node has come into a place that may know of no purge: it is told before the next sweep. Written down only
        with what comes of it, because every opening tells all nodes."""
        self._tombstones = {tag: pending | {node_index} for tag, pending in self._tombstones.items()}

    async def purge(self, tags: Collection[bytes]) -> PurgeReport:
        """Purge these tags and finish what earlier purges have left. OpenFailed when the tombstones cannot be written,
        InvalidArgument when there are too many; then nothing was dropped."""
        self._counters.add("purge_runs")
        fresh = dict.fromkeys(set(tags) - self.tags, ALL_NODES)
        if fresh:
            self._note({**self._tombstones, **fresh})
        dropped = await self.finish()
        left = frozenset[int]().union(*self.pending.values())
        return PurgeReport(dropped, tuple(sorted(left)))

    async def finish(self) -> int:
        """Have nodes drop what is pending; how many records went."""
        asked: dict[int, list[bytes]] = {index: [] for index in ALL_NODES}
        for tag, pending in self.pending.items():
            for index in pending:
                asked[index].append(tag)
        nodes = [node if asked[index] else None for index, node in enumerate(self._nodes)]
        results = await buried(nodes, asked, self._clock)
        done = {index: set(asked[index]) for index, (_, complete) in results.items() if complete}
        noted = {tag: frozenset(node for node in nodes if tag not in done.get(node, ()))
                 for tag, nodes in self._tombstones.items()}
        dropped = sum(count for count, _ in results.values())
        self._counters.add("purge_dropped", dropped)
        if noted != self._tombstones:
            self._note(noted)
        return dropped

    def _note(self, tombstones: Tombstones) -> None:
        if self._io is not None and self._root is not None:
            write_tombstones(self._io, self._root, tombstones)
        self._tombstones = dict(tombstones)


async def buried(nodes: Sequence[Node | None], tags: Mapping[int, Collection[bytes]],
                 clock: Clock) -> dict[int, tuple[int, bool]]:
    """Have nodes bury tags, side by side; by node how many records went and whether none is left."""
    results: dict[int, tuple[int, bool]] = {}
    pending = {index: node for index, node in enumerate(nodes) if node is not None}
    while pending:
        deadline = Deadline.after_ms(clock, PURGE_CALL_MS)
        calls = {index: node.bury(tags[index], deadline) for index, node in pending.items()}
        went, errors = await all_of(calls, deadline, len(calls))
        for index in list(pending):
            count = went.get(index, 0)
            results[index] = (results.get(index, (0, False))[0] + count, index in went and not count)
            if not count:
                del pending[index]
        for index, error in errors.items():
            _LOG.warning("node %d has not dropped everything that was purged: %s", index, error)
    return results
