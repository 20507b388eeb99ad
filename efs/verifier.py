"""Checking a node's own records: payload read again and compared with the header. Belongs to the loop's thread.

This is what a node does before it obeys a report of corruption, and what makes a record of before an unclean boot
trusted again: its entry is then rewritten with the current boot epoch. A record that fails is dropped, by location and
generation, so that a record which took the slot meanwhile is left alone. A read that the disk refuses proves nothing:
it is NodeUnavailable, and the record stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from efs.checksum import xxh3_64
from efs.clock import Deadline
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry
from efs.limits import DATA_SHARDS, KEY_BYTES, MIB
from efs.nodeguard import Guard
from efs.nodestate import NodeState
from efs.nodewriter import Exact, NodeWriter, Version
from efs.slab import Slab

CHECKED_AT_ONCE: Final = 1 * MIB
"""Payload bytes that one piece of work of the reader thread checks."""


@dataclass(frozen=True, slots=True)
class Target:
    """A record to check: where it is and what its header says."""

    geometry: Geometry
    location: int
    shard_bytes: int
    payload_hash: int


class Verifier:
    """Checks records of one node. `writer` is set by the node, which puts both together."""

    writer: NodeWriter

    def __init__(self, state: NodeState, guard: Guard) -> None:
        self._state = state
        self._guard = guard

    async def check(self, index_keys: Sequence[bytes], deadline: Deadline) -> list[bool]:
        """For each key ‖ digest whether a sound record is held. Sound ones become trusted, others are dropped."""
        exact = await self.writer.exact([name[:KEY_BYTES] for name in index_keys], deadline)
        try:
            held = {name: version for name in index_keys if (version := exact.versions.get(name)) is not None}
            sound = await self._sound([self._target(exact, version) for version in held.values()], deadline)
            results = {name: good for name, good in zip(held, sound, strict=True) if self._stands(exact, held[name])}
            good = [held[name] for name, result in results.items() if result and not held[name].trusted]
            bad = [held[name] for name, result in results.items() if not result]
            dropping = self.writer.drop_at([version.location for version in bad]) if bad else None
            trusting = self.writer.rewrite([version.location for version in good], None) if good else None
        finally:
            exact.release()
        if bad and dropping is not None:
            self._state.counters.add("node_verify_failed", len(bad))
            await self._guard.result(dropping, deadline)
        if good and trusting is not None:
            self._state.counters.add("node_unverified_checked", await self._guard.result(trusting, deadline))
        return [results.get(name, False) for name in index_keys]

    def _target(self, exact: Exact, version: Version) -> Target:
        table = exact.pinned[version.location >> SLOT_BITS]
        entry = table.entries[version.location & SLOT_MASK]
        shard_bytes = -(-int(entry["block_bytes"]) // DATA_SHARDS)
        return Target(table.geometry, version.location, shard_bytes, int(entry["payload_hash"]))

    def _stands(self, exact: Exact, version: Version) -> bool:
        """Whether the record is still where it was when the check began."""
        extent = version.location >> SLOT_BITS
        table = exact.pinned[extent]
        if self._state.tables.get(extent) is not table:
            return False
        return int(table.look["generation"][version.location & SLOT_MASK]) == version.generation

    async def _sound(self, targets: Sequence[Target], deadline: Deadline) -> list[bool]:
        results: list[bool] = []
        while len(results) < len(targets):
            first = targets[len(results)]
            count = max(1, CHECKED_AT_ONCE // first.geometry.slot_class.slot_bytes)
            part = targets[len(results) : len(results) + count]
            results += await self._guard.ask(partial(_check_payloads, self._state.slab, part), deadline)
        return results


def _check_payloads(slab: Slab, targets: Sequence[Target]) -> list[bool]:
    results = []
    for target in targets:
        slot = slab.read_payload(target.geometry, target.location, 1)[0]
        results.append(xxh3_64(slot[: target.shard_bytes]) == target.payload_hash)
    return results
