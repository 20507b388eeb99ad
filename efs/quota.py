"""How much of a store each tenant tag may take: the rule for puts. Belongs to the loop's thread.

A quota counts what capacity counts: bytes of slots on all nodes, 1.2 times the payload. A put of new blocks of a tag
asks for twelve slots for each of them; if what the tag holds, what puts under way have asked for, and this together are
above the quota, the put stores *none of its new blocks of that tag*: their fate is failed, `PutReport.why` says
`OVER_QUOTA`. Nothing is evicted for it: a tenant at its quota keeps what it has and gets in again as its blocks go, by
eviction with everybody else's, or by drop and purge. Blocks that are stored already cost nothing and are no new ones.

*Exact among puts.* Decisions are made one after the other. What a put has asked for stays reserved until its last write
has ended, and one that ends while another decides counts as reserved until then, so every byte is seen at least once:
as held or as reserved. So puts alone never bring a tag above its quota. Two things can: writes that go on at a node
after their put was cancelled or has met its deadline (at most what nodes have queued of that put), and repair, which
gives blocks back the shards that they lost (a fifth at most: two of twelve).

A node that does not say what it holds counts like the fullest of the others.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Mapping, Sequence

from efs.ask import all_of
from efs.clock import Clock, Deadline
from efs.contract import Node
from efs.errors import InvalidArgument
from efs.limits import INFO_DEADLINE_MS

OVER_QUOTA = "quota: the tenant has no room for these blocks"
"""`PutReport.why` of blocks that were not stored because of their tenant's quota."""


class Quotas:
    """Of the nodes of a store, of all its groups. Tags without a limit are not counted."""

    def __init__(self, nodes: Sequence[Node | None], clock: Clock) -> None:
        self._nodes = tuple(nodes)
        self._clock = clock
        self._limits: dict[bytes, int] = {}
        self._reserved: Counter[bytes] = Counter()
        self._ended: Counter[bytes] = Counter()
        """Reservations that ended while a decision was being made."""
        self._deciding = asyncio.Lock()

    def extend(self, nodes: Sequence[Node | None]) -> None:
        """Nodes of another group, which hold a part of what is limited."""
        self._nodes = (*self._nodes, *nodes)

    @property
    def any(self) -> bool:
        """Whether some tag has a limit."""
        return bool(self._limits)

    def limit(self, limits: Mapping[bytes, int]) -> None:
        """Bytes that each of these tags may take, from now on; all others are without a limit."""
        for tag, size in limits.items():
            if size < 0:
                raise InvalidArgument(f"the quota of tag {tag.hex()} is {size}, must not be below 0")
        self._limits = dict(limits)

    async def reserve(self, wanted: Mapping[bytes, int], deadline: Deadline) -> dict[bytes, int]:
        """The tags that may take what is wanted of them, all or nothing, with what is reserved for them until
        `release`: nothing for a tag without a limit. TimeoutError when other decisions take until the deadline."""
        limited = {tag: size for tag, size in wanted.items() if tag in self._limits}
        granted = {tag: 0 for tag in wanted if tag not in self._limits}
        if not limited:
            return granted
        async with asyncio.timeout(deadline.left()):
            await self._deciding.acquire()
        try:
            held = await self._held()
            for tag, size in limited.items():
                if held[tag] + self._reserved[tag] + size <= self._limits.get(tag, held[tag] + size):
                    self._reserved[tag] += size
                    granted[tag] = size
        finally:
            self._reserved -= self._ended
            self._ended.clear()
            self._deciding.release()
        return granted

    def release(self, reserved: Mapping[bytes, int]) -> None:
        """The writes for which this was reserved have ended."""
        if self._deciding.locked():
            self._ended.update(reserved)
        else:
            self._reserved.subtract(reserved)
            self._reserved += Counter()

    async def _held(self) -> Counter[bytes]:
        """What each tag holds on all nodes."""
        deadline = Deadline.after_ms(self._clock, INFO_DEADLINE_MS)
        calls = {index: node.tenant_bytes(deadline) for index, node in enumerate(self._nodes) if node is not None}
        answers, _ = await all_of(calls, deadline, len(calls))
        silent = len(self._nodes) - len(answers)
        total: Counter[bytes] = Counter()
        for tag in self._limits:
            sizes = [held.get(tag, 0) for held in answers.values()]
            total[tag] = sum(sizes) + silent * max(sizes, default=0)
        return total
