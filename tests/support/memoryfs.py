"""A filesystem in memory for tests of what stands above it: same calls, no nodes, no shards, no verification.

While `stall` is set calls wait for ever and set `stalled`; `cancelled` counts those that were cancelled meanwhile.
`closed` tells that close has run.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from efs.clock import SystemClock
from efs.errors import StoreNotFound
from efs.fs import FileSystem, OnSegment
from efs.quota import Quotas
from efs.shape import BlockShape
from efs.types import GetReport, NodeInfo, PutItem, PutReport


class MemoryFileSystem(FileSystem):
    """Blocks in a dict by key; `items` remembers what was put beside the bytes."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}
        self.items: list[PutItem] = []
        self.deadlines_ms: list[float] = []
        self.stall = False
        self.stalled = threading.Event()
        self.cancelled = 0
        self.closed = False
        self.quotas = Quotas((), SystemClock())

    async def _wait(self) -> None:
        if self.stall:
            self.stalled.set()
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.cancelled += 1
                raise

    async def match(self, keys: Sequence[bytes], *, strict: bool = False, deadline_ms: float) -> int:
        self.deadlines_ms.append(deadline_ms)
        await self._wait()
        return next((count for count, key in enumerate(keys) if key not in self.blocks), len(keys))

    async def get_into(self, keys: Sequence[bytes], shape: BlockShape, out: Any, *, on_segment: OnSegment | None = None,
                       deadline_ms: float) -> GetReport:
        self.deadlines_ms.append(deadline_ms)
        await self._wait()
        target = np.frombuffer(out, dtype=np.uint8)
        ok = [key in self.blocks for key in keys]
        leading = ok.index(False) if False in ok else len(ok)
        for segment, (offset, size) in enumerate(zip(shape.segment_offsets, shape.segment_bytes, strict=True)):
            for row, key in enumerate(keys):
                if ok[row]:
                    start = len(keys) * offset + row * size
                    part = self.blocks[key][offset : offset + size]
                    target[start : start + size] = np.frombuffer(part, dtype=np.uint8)
            if on_segment is not None:
                on_segment(segment, leading)
        return GetReport(leading, tuple(ok), 0, 0, 0, 0, 0, sum(ok) * shape.block_bytes, 0.0)

    async def put(self, items: Sequence[PutItem], shape: BlockShape, blocks: Any, *, deadline_ms: float) -> PutReport:
        self.deadlines_ms.append(deadline_ms)
        await self._wait()
        already = 0
        for row, item in enumerate(items):
            already += item.key in self.blocks
            stored = bytes(blocks[row * shape.block_bytes : (row + 1) * shape.block_bytes])
            self.blocks.setdefault(item.key, stored)
        self.items += items
        return PutReport(len(items) - already, already, 0, 0)

    async def nodes(self) -> list[NodeInfo]:
        return []

    async def close(self) -> None:
        self.closed = True


class MemoryRoots:
    """In place of `FileSystem.open`: filesystems by root, which must have been added before."""

    def __init__(self) -> None:
        self.by_root: dict[str, MemoryFileSystem] = {}

    def add(self, root: str) -> MemoryFileSystem:
        return self.by_root.setdefault(root, MemoryFileSystem())

    async def open(self, root: str, **_: object) -> MemoryFileSystem:
        if root not in self.by_root:
            raise StoreNotFound(root)
        return self.by_root[root]
