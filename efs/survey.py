"""What a put finds under its keys before it writes: which versions, on how many nodes, and whether that is enough.
Pure.

Only records in their right place count, and only trusted ones make a version complete: after power loss an index may
list records whose payload never reached the disk. A key is *complete* when some digest is on at least eleven nodes;
whose bytes they are does not matter, the first complete version wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from efs.contract import ABSENT, NodeTable
from efs.limits import ACK_SHARDS, DATA_SHARDS, STRIPE_SHARDS


@dataclass(slots=True)
class Version:
    """One digest under one key: the generation of its record on each node that holds it, and the nodes that vouch."""

    generations: dict[int, int] = field(default_factory=dict)
    trusted: set[int] = field(default_factory=set)


class Survey:
    """The tables of a put's n keys, read together.

    complete: (n,) bool. copies: (n,) int, trusted nodes of the version with most of them. held: (n,) bool, whether any
    node holds anything. rotation: (n,), shard i of key b belongs on node (i + rotation[b]) mod 12.
    """

    def __init__(self, rotation: NDArray[np.uint8], tables: Mapping[int, NodeTable]) -> None:
        self._tables = dict(tables)
        self._extra = {index: table.extra_by_row() for index, table in tables.items()}
        self._rotation = rotation.astype(np.int64)
        blocks = len(rotation)
        self.held = np.zeros(blocks, np.bool_)
        self.copies = np.zeros(blocks, np.int64)
        if tables:
            self._count()
        self.complete = self.copies >= ACK_SHARDS

    def _count(self) -> None:
        indices = np.array(list(self._tables), np.int64)[:, None]
        expected = (indices - self._rotation) % STRIPE_SHARDS
        held = list(self._tables.values())
        present = np.stack([table.location for table in held]) != ABSENT
        present &= np.stack([table.shard for table in held]) == expected
        several = np.zeros(len(self.held), np.bool_)
        for table in held:
            for row in table.extra:
                several[row.row] = True
        self.held = present.any(axis=0) | several
        if not self.held.any():
            return
        digest = np.stack([table.digest for table in held])
        reference = digest[present.argmax(axis=0), np.arange(digest.shape[1])]
        same = present & (digest == reference).all(axis=-1)
        self.copies = (same & np.stack([table.trusted for table in held])).sum(axis=0)
        several |= (present != same).any(axis=0)
        for column in np.flatnonzero(several).tolist():
            self.copies[column] = max((len(v.trusted) for v in self.versions(column).values()), default=0)

    def versions(self, column: int) -> dict[bytes, Version]:
        """Every version of one key, by digest."""
        versions: dict[bytes, Version] = {}
        for index, table in self._tables.items():
            shard = (index - int(self._rotation[column])) % STRIPE_SHARDS
            records = [(row.digest, row.generation, row.shard, row.trusted)
                       for row in self._extra[index].get(column, ())]
            if table.location[column] != ABSENT:
                records.append((table.digest[column].tobytes(), int(table.generation[column]),
                                int(table.shard[column]), bool(table.trusted[column])))
            for digest, generation, held_shard, trusted in records:
                if held_shard != shard:
                    continue
                version = versions.setdefault(digest, Version())
                version.generations[index] = generation
                if trusted:
                    version.trusted.add(index)
        return versions

    def locations(self, node_index: int, columns: NDArray[np.intp]) -> NDArray[np.int64]:
        """Where an asked node holds these keys, for `touch`."""
        return self._tables[node_index].location[columns]

    @property
    def nodes(self) -> tuple[int, ...]:
        """The nodes whose tables this is made of."""
        return tuple(self._tables)


def weakest(versions: Mapping[bytes, Version], in_use: set[bytes]) -> bytes | None:
    """The version that a fifth one may displace: fewest shards, fewer than ten, and not being written just now. Of
    equal ones the greatest digest goes, because the smallest wins wherever versions compete."""
    candidates = [digest for digest, version in versions.items()
                  if len(version.generations) < DATA_SHARDS and digest not in in_use]
    return min(sorted(candidates, reverse=True), key=lambda digest: len(versions[digest].generations), default=None)
