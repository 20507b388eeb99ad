"""A memory twin whose reads of payload wait for a gate or fail: cold pages, hung disks, slow nodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from efs.clock import Clock, Deadline
from efs.contract import Landing, NodeTable, Span
from efs.errors import NodeUnavailable
from tests.support.memorynode import MemoryNode


class SlowReadNode(MemoryNode):
    """Payload is never in the page cache here; `read` waits for `gate` before each span.

    reads: spans asked. revoked: spans that found their landing revoked when the gate opened.
    """

    def __init__(self, node_index: int, clock: Clock) -> None:
        super().__init__(node_index, clock)
        self.gate = asyncio.Event()
        self.gate.set()
        self.failing = False
        self.header_gate = asyncio.Event()
        self.header_gate.set()
        self.headers_asked = 0
        self.reads = 0
        self.revoked = 0
        self._stuck: set[asyncio.Task[None]] = set()

    def headers_now(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        self._serve()
        return None

    async def headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        self.headers_asked += 1
        await self.header_gate.wait()
        return await super().headers(locations, generations, segments, deadline)

    def _headers_with(self, table: NodeTable, segments: int) -> None:
        """As little as with `headers_now`."""

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        self._serve()
        return None

    def read_now(self, span: Span, landing: Landing) -> bool:
        self._serve()
        return False

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        """As a thread would: when the caller is cancelled the work goes on and meets the landing later."""
        task = asyncio.create_task(self._work(spans, landed))
        self._stuck.add(task)
        task.add_done_callback(self._stuck.discard)
        await asyncio.wait((task,), timeout=deadline.left())
        if not task.done():
            raise NodeUnavailable(self.node_index, "no answer by the deadline")
        task.result()

    async def _work(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None]) -> None:
        for place, (span, landing) in enumerate(spans):
            self.reads += 1
            await self.gate.wait()
            if self.failing:
                raise NodeUnavailable(self.node_index, "the disk fails")
            await asyncio.sleep(0)
            if landing.revoked:
                self.revoked += 1
                continue
            self._land(span, landing)
            landed(place)

    async def released(self) -> None:
        """Open the gate and let everything that was stuck finish."""
        self.gate.set()
        while self._stuck:
            await asyncio.wait(self._stuck)
