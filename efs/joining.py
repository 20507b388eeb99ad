"""A node that is back, or new, and has not got everything yet: kept from readers and writers until it has.

While it is *syncing* every call is refused as from a node that is not there, so nothing that it holds or lacks is
counted by a fetch, a match or an acknowledgement. Whoever brings it up to date works on the node behind. `join` opens
the gate, for good; from then on every call is passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.contract import GetSink, Landing, Node, NodeTable, PutBatch, PutOutcome, Span
from efs.errors import NodeUnavailable
from efs.types import DropItem, ListPage, NodeInfo


class JoiningNode:
    """`efs.contract.Node` in front of another one."""

    def __init__(self, inner: Node) -> None:
        self._inner = inner
        self.syncing = True

    def join(self) -> None:
        self.syncing = False

    def _open(self) -> Node:
        if self.syncing:
            raise NodeUnavailable(self._inner.node_index, "it is syncing")
        return self._inner

    @property
    def node_index(self) -> int:
        return self._inner.node_index

    @property
    def suspect(self) -> bool:
        return self._inner.suspect

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        return self._open().look_up_now(keys)

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        return await self._open().look_up(keys, deadline)

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        await self._open().get(keys, sink, deadline)

    async def headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        return await self._open().headers(locations, generations, segments, deadline)

    def headers_now(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        return self._open().headers_now(locations, generations, segments)

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        return self._open().views_now(spans)

    def read_now(self, span: Span, landing: Landing) -> bool:
        return self._open().read_now(span, landing)

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        await self._open().read(spans, landed, deadline)

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        return await self._open().put(batch, deadline)

    def touch(self, keys: Sequence[bytes], locations: NDArray[np.int64] | None, stamp: int) -> None:
        if not self.syncing:
            self._inner.touch(keys, locations, stamp)

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        return await self._open().drop(items, deadline)

    async def verify(self, key: bytes, digest: bytes, deadline: Deadline) -> bool:
        return await self._open().verify(key, digest, deadline)

    async def list(self, after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        return await self._open().list(after, limit, deadline)

    async def collect(self, deadline: Deadline) -> int:
        return await self._open().collect(deadline)

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        """Also while it is syncing: what was purged goes before the node serves."""
        return await self._inner.bury(tags, deadline)

    async def tenant_bytes(self, deadline: Deadline) -> Mapping[bytes, int]:
        """Also while it is syncing: it takes space."""
        return await self._inner.tenant_bytes(deadline)

    async def info(self, deadline: Deadline) -> NodeInfo:
        """Also while it is syncing: status shows it."""
        return await self._inner.info(deadline)

    async def close(self) -> None:
        await self._inner.close()
