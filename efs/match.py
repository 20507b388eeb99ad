"""How many leading blocks are there, by metadata alone: a promise, corrected by the fetch when storage cannot keep it.

Evidence about a key is a vote of nodes on digests. A node votes *yes* for the versions that it holds in their right
place and *no* for every other; a node that is down votes no. A node that has not answered in time votes neither way.

- At least ten yes for one digest: present. At least three no for every digest: absent (nine or fewer can be left).
- `strict=False` asks three nodes of each run first and believes a digest that all three hold. Which three rotates
  with the run's placement, so the load spreads over the nodes.
- Where the three disagree, hold nothing in part, or one fails, every other node is asked once about those keys.
- `strict=True` asks every node about every key in front of the first one that three nodes deny.
- With three or more of the twelve nodes down no block can be read: the answer is 0 and nobody is asked.

Records that are not trusted after an unclean boot count here; a fetch verifies every byte anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from efs.ask import tables_of
from efs.clock import Deadline
from efs.contract import ABSENT, Node, NodeTable
from efs.health import Health
from efs.limits import DATA_SHARDS, MATCH_SAMPLE_NODES, PARITY_SHARDS, STRIPE_SHARDS
from efs.placement import placement_group, rotation_of, runs

SAMPLE_ORDER = (0, 4, 8, 2, 6, 10, 1, 5, 9, 3, 7, 11)
"""Shards by which the sampled nodes are chosen; the first three that are up are asked."""

Flags = NDArray[np.bool_]
Columns = NDArray[np.intp]


class Evidence:
    """The votes on n keys. Columns are keys, rows are nodes."""

    def __init__(self, rotation: NDArray[np.uint8], down: int) -> None:
        blocks = len(rotation)
        node = np.arange(STRIPE_SHARDS, dtype=np.int64)[:, None]
        self._expected = ((node - rotation) % STRIPE_SHARDS).astype(np.uint8)
        self._digest = np.zeros((STRIPE_SHARDS, blocks, 2), np.uint64)
        self._present = np.zeros((STRIPE_SHARDS, blocks), np.bool_)
        self._extra: dict[int, list[bytes]] = {}
        self._denied = np.full(blocks, down, np.int64)
        self.answered = np.zeros((STRIPE_SHARDS, blocks), np.bool_)

    def add(self, node_index: int, columns: Columns, table: NodeTable) -> None:
        """A node's table of the keys in these columns."""
        self.answered[node_index, columns] = True
        self._digest[node_index, columns] = table.digest
        right = table.shard == self._expected[node_index, columns]
        self._present[node_index, columns] = (table.location != ABSENT) & right
        for row in table.extra:
            column = int(columns[row.row])
            if row.shard == self._expected[node_index, column]:
                self._extra.setdefault(column, []).append(row.digest)

    def fail(self, node_index: int) -> None:
        """A node turned out to be down: it denies whatever it has not answered."""
        self._denied[~self.answered[node_index]] += 1

    def verdict(self, sampled: bool) -> tuple[Flags, Flags]:
        """(present, absent) by key; a key in neither needs more votes. `sampled`: three that agree are believed."""
        asked = self.answered.sum(axis=0)
        yes = self._most_votes()
        no = asked - yes + self._denied
        absent = no > PARITY_SHARDS
        present = yes >= DATA_SHARDS
        if sampled:
            present |= yes >= MATCH_SAMPLE_NODES
        return present & ~absent, absent

    def _most_votes(self) -> NDArray[np.int64]:
        """The votes of the version of each key that has most."""
        first = self._present.argmax(axis=0)
        reference = self._digest[first, np.arange(self._digest.shape[1])]
        same = self._present & (self._digest == reference).all(axis=-1)
        votes: NDArray[np.int64] = same.sum(axis=0)
        several = self._present.any(axis=0) & (self._present != same).any(axis=0)
        for column in {*np.flatnonzero(several).tolist(), *self._extra}:
            held = [self._digest[node, column].tobytes() for node in np.flatnonzero(self._present[:, column])]
            held += self._extra.get(column, [])
            votes[column] = max(map(held.count, held), default=0)
        return votes


class Matcher:
    """Answers `match` over twelve nodes."""

    def __init__(self, nodes: Sequence[Node | None], health: Health) -> None:
        self._nodes = tuple(nodes)
        self._health = health

    async def match(self, keys: Sequence[bytes], strict: bool, deadline: Deadline) -> int:
        """How many leading keys are present. By the deadline it returns what was certain until then."""
        return _first(~await self._presence(keys, strict, deadline, leading=True))

    async def present(self, keys: Sequence[bytes], strict: bool, deadline: Deadline) -> Flags:
        """(n,): which of the keys are present, whatever becomes of those before them."""
        return await self._presence(keys, strict, deadline, leading=False)

    async def _presence(self, keys: Sequence[bytes], strict: bool, deadline: Deadline, leading: bool) -> Flags:
        """Which keys are present; `leading`: only those count that are in front of the first one that is absent."""
        readable = self._health.readable()
        down = STRIPE_SHARDS - len(readable)
        if not keys or down > PARITY_SHARDS:
            return np.zeros(len(keys), np.bool_)
        spans = runs(keys)
        rotations = [rotation_of(placement_group(keys[start])) for start, _ in spans]
        lengths = [stop - start for start, stop in spans]
        evidence = Evidence(np.repeat(np.array(rotations, np.uint8), lengths), down)
        sample = _sample(spans, rotations, readable)
        failed = await self._collect(evidence, keys, sample, MATCH_SAMPLE_NODES, deadline)
        present, absent = evidence.verdict(sampled=not strict)
        stop = _first(absent) if leading else len(keys)
        doubtful = np.flatnonzero(~absent[:stop] if strict else ~(present | absent)[:stop])
        if len(doubtful):
            others = [index for index in readable if index not in failed]
            rest = {index: doubtful[~evidence.answered[index, doubtful]] for index in others}
            await self._collect(evidence, keys, rest, DATA_SHARDS - MATCH_SAMPLE_NODES, deadline)
            settled, _ = evidence.verdict(sampled=False)
            # A column that nobody was asked about again keeps the sample's verdict.
            present[doubtful] = settled[doubtful]
        return present

    async def _collect(self, evidence: Evidence, keys: Sequence[bytes], columns_of: dict[int, Columns], enough: int,
                       deadline: Deadline) -> set[int]:
        """Ask nodes about keys; returns those that failed. After `enough` answers the others get the lag grace only."""
        asks: dict[int, tuple[Node, Sequence[bytes]]] = {}
        for index, columns in columns_of.items():
            node = self._nodes[index]
            if node is not None and len(columns):
                asked = keys if len(columns) == len(keys) else [keys[column] for column in columns.tolist()]
                asks[index] = (node, asked)
        tables, failed = await tables_of(asks, self._health, deadline, max(enough, len(asks) - PARITY_SHARDS))
        for index, table in tables.items():
            evidence.add(index, columns_of[index], table)
        for index in failed:
            evidence.fail(index)
        return failed


def _sample(spans: Sequence[tuple[int, int]], rotations: Sequence[int], readable: Sequence[int]) -> dict[int, Columns]:
    """For each node the keys of the runs for which it is one of the three asked first."""
    up = set(readable)
    chosen: dict[int, list[Columns]] = {index: [] for index in readable}
    for (start, stop), rotation in zip(spans, rotations, strict=True):
        order = [(shard + rotation) % STRIPE_SHARDS for shard in SAMPLE_ORDER]
        for index in [node for node in order if node in up][:MATCH_SAMPLE_NODES]:
            chosen[index].append(np.arange(start, stop))
    return {index: np.concatenate(parts) for index, parts in chosen.items() if parts}


def _first(flags: Flags) -> int:
    """The index of the first True, the length where there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)
