"""Dropping what belongs to purged tenants from one node, and keeping it out. Belongs to the loop's thread.

A tenant tag that is *buried* stays so until the node closes; whoever opens it buries again (`efs/purge.py`), before the
node serves. `bury` goes in this order:

1. The tags are noted. From here on no put and no repair stores a record of them (`efs/nodewriter.py`), and what a job
   brings that was under way goes as soon as the job has ended.
2. Records that are held go batch by batch: from memory first, so that nobody finds them, then from the disk.
3. Puts that were under way are waited for, and the disk is told what it is still owed.

So when `bury` has returned 0, no record of the tags is in memory, in an intact table or in the index, nor will one be.
The bytes of the payload stay in their slots until something else is written there.

Killed anywhere, the next opening finds what is left by its tag: it is in the table of each record.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Final

import numpy as np

from efs.clock import Deadline
from efs.debts import Debts
from efs.errors import InvalidArgument
from efs.limits import BURY_RECORDS, DELETE_BATCH
from efs.lookups import Lookups
from efs.nodeguard import Guard
from efs.nodestate import Locations, NodeState
from efs.nodewriter import NodeWriter

TAG_BYTES: Final = 8


class Burial:
    """Of one node."""

    def __init__(self, state: NodeState, guard: Guard, lookups: Lookups, writer: NodeWriter, debts: Debts) -> None:
        self._state = state
        self._guard = guard
        self._lookups = lookups
        self._writer = writer
        self._debts = debts

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        """See the contract and the module docstring."""
        words = words_of(tags)
        self._state.buried.update(words)
        held = self._state.allocator.locations_of(words, BURY_RECORDS)[:BURY_RECORDS]
        dropped = 0
        for start in range(0, len(held), DELETE_BATCH):
            dropped += await self._drop(held[start : start + DELETE_BATCH], words, deadline)
        if not len(held):
            await self._finish(deadline)
        return dropped

    async def _drop(self, locations: Locations, words: Collection[int], deadline: Deadline) -> int:
        dropped = 0
        async for rows in self._lookups.with_tables(locations, deadline):
            mine = np.sort(locations[rows])
            # Others may have removed some meanwhile, and used their slots for other records.
            mine = mine[np.isin(self._state.allocator.tags(mine), np.array(words, np.uint64))]
            self._writer.forget_at(mine)
            dropped += len(mine)
        await self._debts.pay(deadline)
        return dropped

    async def _finish(self, deadline: Deadline) -> None:
        """Wait for the puts that are under way, and until the disk is owed nothing."""
        coming = set(self._state.coming.values())
        if coming:
            await asyncio.wait(coming, timeout=deadline.left())
            if any(not done.done() for done in coming):
                raise self._guard.unavailable("puts are under way that do not end")
        await self._debts.pay(deadline)


def words_of(tags: Collection[bytes]) -> list[int]:
    """Tenant tags as little-endian words; InvalidArgument for one that has not 8 bytes, or is that of no tenant."""
    for tag in tags:
        if len(tag) != TAG_BYTES or not any(tag):
            raise InvalidArgument(f"{tag.hex() or 'nothing'} is no tenant tag of {TAG_BYTES} bytes")
    return [int.from_bytes(tag, "little") for tag in tags]
