"""Which version of each block a fetch will read. Pure: tables go in, decisions come out.

Every node may hold a shard of several versions of a key. A version is *pinned* when the tables that arrived show at
least ten of its shards; from then on the fetch reads that version only. With several such versions the one with the
most shards wins, a tie goes to the smallest digest. A block is a *miss* when for every version shards seen + tables
still outstanding < 10. A record whose shard index is not the one that its node must hold is in the wrong place and is
not counted (a swapped directory, a copied slot).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from efs.contract import ABSENT, NodeTable, VersionRow
from efs.limits import DATA_SHARDS, STRIPE_SHARDS


class Pins:
    """Decisions for n blocks. `rotation` is (n,): shard i of block b belongs on node (i + rotation[b]) mod 12.

    location, generation: (12, n) by node, of the pinned version; ABSENT where a node holds no shard of it. Only
    meaningful in columns that are pinned. misplaced: records that were found in a wrong place.
    """

    def __init__(self, rotation: NDArray[np.uint8]) -> None:
        blocks = len(rotation)
        node = np.arange(STRIPE_SHARDS, dtype=np.int16)[:, None]
        self._shard = ((node - rotation.astype(np.int16)) % STRIPE_SHARDS).astype(np.uint8)
        self._tables: list[NodeTable | None] = [None] * STRIPE_SHARDS
        self._extra: list[dict[int, list[VersionRow]]] = [{} for _ in range(STRIPE_SHARDS)]
        self._outstanding = set(range(STRIPE_SHARDS))
        self.digest = np.zeros((blocks, 2), np.uint64)
        self.pinned = np.zeros(blocks, np.bool_)
        self.missed = np.zeros(blocks, np.bool_)
        self.location = np.full((STRIPE_SHARDS, blocks), ABSENT, np.int64)
        self.generation = np.zeros((STRIPE_SHARDS, blocks), np.uint64)
        self.misplaced = 0
        self.mixed = 0

    @property
    def settled(self) -> bool:
        return bool((self.pinned | self.missed).all())

    @property
    def outstanding(self) -> int:
        return len(self._outstanding)

    @property
    def outstanding_nodes(self) -> frozenset[int]:
        return frozenset(self._outstanding)

    def add(self, node_index: int, table: NodeTable) -> None:
        """A node's table arrived."""
        self._outstanding.discard(node_index)
        wrong = (table.location != ABSENT) & (table.shard != self._shard[node_index])
        if wrong.any():
            self.misplaced += int(np.count_nonzero(wrong))
            table.location = np.where(wrong, ABSENT, table.location)
        self._tables[node_index] = table
        self._extra[node_index] = table.extra_by_row()
        if self.pinned.any():
            self._adopt(node_index, table, self.pinned)

    def fail(self, node_index: int) -> None:
        """A node's table will not come."""
        self._outstanding.discard(node_index)

    def resolve(self) -> None:
        """Decide what the tables so far allow."""
        held = [table for table in self._tables if table is not None]
        if not held:
            if not self._outstanding:
                self.missed |= ~self.pinned
            return
        if len(held) >= DATA_SHARDS and self._resolve_alike(held):
            return
        if len(held) < DATA_SHARDS <= len(held) + self.outstanding and _alike(held):
            return  # So few tables decide nothing, unless some block is absent or of several versions.
        open_columns = ~(self.pinned | self.missed)
        several = np.zeros(len(self.pinned), np.bool_)
        for table in held:
            for row in table.extra:
                several[row.row] = True
        location = np.stack([table.location for table in held])
        digest = np.stack([table.digest for table in held])
        present = location != ABSENT
        first = np.argmax(present, axis=0)
        reference = digest[first, np.arange(digest.shape[1])]
        same = present & (digest == reference).all(axis=-1)
        unlike = several | (present & ~same).any(axis=0)
        whole = open_columns & ~several & (same.sum(axis=0) >= DATA_SHARDS)
        gone = open_columns & ~several & (present.sum(axis=0) + self.outstanding < DATA_SHARDS)
        self._pin(whole, reference)
        self.missed |= gone
        rest = open_columns & ~whole & ~gone & unlike
        if rest.any():
            self._resolve_singly(np.flatnonzero(rest))

    def _resolve_alike(self, held: Sequence[NodeTable]) -> bool:
        """The common case at once: nothing decided yet, and every table holds the same one version of every block."""
        if not len(self.pinned) or self.pinned.any() or self.missed.any() or not _alike(held):
            return False
        self.pinned[:] = True
        self.digest[:] = held[0].digest
        for node_index, found in enumerate(self._tables):
            if found is not None:
                self.location[node_index] = found.location
                self.generation[node_index] = found.generation
        return True

    def _pin(self, columns: NDArray[np.bool_], digest: NDArray[np.uint64]) -> None:
        if not columns.any():
            return
        self.pinned |= columns
        self.digest[columns] = digest[columns]
        for node_index, table in enumerate(self._tables):
            if table is not None:
                self._adopt(node_index, table, columns)

    def _adopt(self, node_index: int, table: NodeTable, columns: NDArray[np.bool_]) -> None:
        """Take a node's locations of the pinned version in these columns."""
        mine = columns & (table.location != ABSENT) & (table.digest == self.digest).all(axis=-1)
        self.location[node_index] = np.where(columns, np.where(mine, table.location, ABSENT), self.location[node_index])
        self.generation[node_index] = np.where(mine, table.generation, self.generation[node_index])
        for row in table.extra:
            if columns[row.row] and row.digest == self.digest[row.row].tobytes():
                if row.shard != self._shard[node_index, row.row]:
                    self.misplaced += 1
                    continue
                self.location[node_index, row.row] = row.location
                self.generation[node_index, row.row] = row.generation

    def _versions_of(self, column: int) -> Iterator[bytes]:
        """The digest of each well-placed record of one column, node by node."""
        for node_index, table in enumerate(self._tables):
            if table is None:
                continue
            if table.location[column] != ABSENT:
                yield table.digest[column].tobytes()
            for row in self._extra[node_index].get(column, ()):
                if row.shard == self._shard[node_index, column]:
                    yield row.digest

    def _resolve_singly(self, columns: NDArray[np.intp]) -> None:
        chosen = np.zeros(len(self.pinned), np.bool_)
        digest = self.digest.copy()
        for column in columns:
            counts: defaultdict[bytes, int] = defaultdict(int)
            for version in self._versions_of(int(column)):
                counts[version] += 1
            if len(counts) > 1:
                self.mixed += 1
            best = min(counts, key=lambda version: (-counts[version], version), default=None)
            if best is not None and counts[best] >= DATA_SHARDS:
                chosen[column] = True
                digest[column] = np.frombuffer(best, np.uint64)
            elif max(counts.values(), default=0) + self.outstanding < DATA_SHARDS:
                self.missed[column] = True
        self._pin(chosen, digest)


def _alike(tables: Sequence[NodeTable]) -> bool:
    """Whether every table holds the same one version of every block."""
    first = tables[0]
    return all(len(table.location) > 0 and not table.extra and int(table.location.min()) != ABSENT
               and np.array_equal(table.digest, first.digest) for table in tables)
