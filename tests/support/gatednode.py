"""A node whose puts and look-ups can be held back, failed and recorded, around a memory twin.

A held put behaves as one whose thread hangs in a system call: its caller can be cancelled or pass its deadline and is
then answered, while the put itself waits for the gate on the memory that it was given and is done later all the same.
With `gives_up` the caller is answered at once that the node is unavailable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.contract import GetSink, Landing, NodeTable, PutBatch, PutOutcome, Span
from efs.errors import EfsError, NodeUnavailable
from efs.types import DropItem, ListPage, NodeInfo
from tests.support.memorynode import MemoryNode


class Gate:
    """Closed until `release`. `held` counts the calls that came while it was closed."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.held = 0

    async def pass_through(self) -> None:
        if not self._event.is_set():
            self.held += 1
            await self._event.wait()

    def release(self) -> None:
        self._event.set()


class GatedNode:
    """`efs.contract.Node`. `batches` are the puts that reached it; `refusals` are raised by the next puts, one each."""

    def __init__(self, inner: MemoryNode) -> None:
        self.inner = inner
        self.put_gate: Gate | None = None
        self.look_up_gate: Gate | None = None
        self.gives_up = False
        self.refusals: list[EfsError] = []
        self.batches: list[PutBatch] = []
        self.look_ups = 0
        self.touched: list[bytes] = []
        self._running: set[asyncio.Task[PutOutcome]] = set()

    @property
    def node_index(self) -> int:
        return self.inner.node_index

    @property
    def suspect(self) -> bool:
        return self.inner.suspect

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        if self.refusals:
            raise self.refusals.pop(0)
        self.batches.append(batch)
        if self.put_gate is None:
            return await self.inner.put(batch, deadline)
        task = asyncio.create_task(self._late_put(self.put_gate, batch, deadline))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        await asyncio.wait((task,), timeout=0 if self.gives_up else deadline.left())
        if not task.done():
            raise NodeUnavailable(self.node_index, "no answer")
        return task.result()

    async def _late_put(self, gate: Gate, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        await gate.pass_through()
        # The disk knows no deadline: what was begun is done.
        return await self.inner.put(batch, Deadline.after_ms(deadline.clock, 60_000))

    async def all_done(self) -> None:
        """Until no held put is left."""
        while self._running:
            await asyncio.wait(self._running)

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        self.look_ups += 1
        return None if self.look_up_gate is not None else self.inner.look_up_now(keys)

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        if self.look_up_gate is not None:
            await self.look_up_gate.pass_through()
        return await self.inner.look_up(keys, deadline)

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        if self.look_up_gate is not None:
            await self.look_up_gate.pass_through()
        await self.inner.get(keys, sink, deadline)

    def touch(self, keys: Sequence[bytes], locations: NDArray[np.int64] | None, stamp: int) -> None:
        self.touched += keys
        self.inner.touch(keys, locations, stamp)

    # -- passed on

    def headers_now(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        return self.inner.headers_now(locations, generations, segments)

    async def headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        return await self.inner.headers(locations, generations, segments, deadline)

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        return self.inner.views_now(spans)

    def read_now(self, span: Span, landing: Landing) -> bool:
        return self.inner.read_now(span, landing)

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        await self.inner.read(spans, landed, deadline)

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        return await self.inner.drop(items, deadline)

    async def verify(self, key: bytes, digest: bytes, deadline: Deadline) -> bool:
        return await self.inner.verify(key, digest, deadline)

    async def list(self, after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        return await self.inner.list(after, limit, deadline)

    async def collect(self, deadline: Deadline) -> int:
        return await self.inner.collect(deadline)

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        return await self.inner.bury(tags, deadline)

    async def tenant_bytes(self, deadline: Deadline) -> Mapping[bytes, int]:
        return await self.inner.tenant_bytes(deadline)

    async def info(self, deadline: Deadline) -> NodeInfo:
        return await self.inner.info(deadline)

    async def close(self) -> None:
        await self.inner.close()
