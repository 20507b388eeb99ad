"""The collector of a node: keeps space free ahead of puts, by the policy of `efs/gc.py`. Belongs to the loop's thread.

A put that leaves the node above its high mark wakes the collector. It chooses everything that has to go at once (on
the writer thread, from copies), then works it off in *steps* of STEP_SHARE of the node's records, coldest step first,
and each step in *batches* of DELETE_BATCH records in the order of their slots, so that few tables and pages are
touched. A batch is one job of the writer thread; the next one is submitted when it has ended, so a put waits for one
batch at most. Between batches the collector waits while other work is queued, up to YIELD_BATCH_MS; above the reject
mark it does not, because puts would have to evict for themselves. A record that was used or went away since it was
chosen is passed over.

A collection that is interrupted, by a failing disk or by closing, leaves the coldest steps done and no job half done.
It is tried again after RETRY_MS, then after twice as long, up to MAX_RETRY_MS. A node that is read-only or lost its
index does not collect.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.errors import EfsError, NodeFull
from efs.eviction import Queue
from efs.fill import Fill, Need
from efs.index import IndexFull
from efs.limits import DELETE_BATCH, EVICTION_WINDOW_SHARE, MAX_DEADLINE_MS, YIELD_MS
from efs.nodeguard import Guard
from efs.nodestate import NodeState
from efs.nodewriter import NodeWriter
from efs.placer import Placer

STEP_SHARE: Final = EVICTION_WINDOW_SHARE
"""Of the records: inside a step the order is that of slots, as inside the window that may be swapped for chunks."""
YIELD_BATCH_MS: Final = 50.0
RETRY_MS: Final = 1_000.0
MAX_RETRY_MS: Final = 60_000.0

_LOG = logging.getLogger(__name__)


class Collector:
    """Collects one node. `run` is its background task."""

    def __init__(self, state: NodeState, guard: Guard, placer: Placer, writer: NodeWriter, fill: Fill) -> None:
        self._state = state
        self._guard = guard
        self._placer = placer
        self._writer = writer
        self._fill = fill
        self._wake = asyncio.Event()
        self._running = asyncio.Lock()

    def look(self) -> None:
        """Wake up if there is something to collect."""
        if not self._guard.closed and self._fill.to_collect() is not None:
            self._wake.set()

    async def run(self) -> None:
        """Collect whenever there is something to collect."""
        self.look()
        retry_ms = RETRY_MS
        while True:
            await self._wake.wait()
            self._wake.clear()
            if self._guard.read_only is not None or self._guard.index_lost:
                continue
            try:
                await self.collect()
            except (EfsError, OSError) as error:
                _LOG.warning("node %d: a collection was interrupted: %s", self._guard.node_index, error)
                await asyncio.sleep(retry_ms / 1000)
                retry_ms = min(2 * retry_ms, MAX_RETRY_MS)
                self.look()
            else:
                retry_ms = RETRY_MS

    async def settled(self) -> None:
        """Wait until nothing is being collected, nor about to be."""
        while self._wake.is_set() or self._running.locked():
            async with self._running:
                pass
            await asyncio.sleep(0)

    async def collect(self, *, down_to_low: bool = False, deadline: Deadline | None = None) -> int:
        """Evict until nothing is to be collected; returns how many records went. down_to_low: also below the high mark.
        deadline: of the whole; NodeUnavailable when it came first. Without one each step has its own."""
        evicted = 0
        async with self._running:
            while (need := self._fill.to_collect(down_to_low=down_to_low)) is not None:
                went = await self._collect_once(need, deadline)
                evicted += went
                if not went:
                    break  # All of it is in flight, or was used meanwhile.
        if evicted:
            self._state.counters.add("node_collections")
        return evicted

    async def _collect_once(self, need: Need, deadline: Deadline | None) -> int:
        queue = await self._placer.choose(None, need.amount, need.by_count, self._soon(deadline))
        step = max(DELETE_BATCH, int(STEP_SHARE * self._fill.records))
        evicted = 0
        for start in range(0, len(queue.locations), step):
            rows = np.arange(start, min(start + step, len(queue.locations)))
            rows = rows[np.argsort(queue.locations[rows])]
            for first in range(0, len(rows), DELETE_BATCH):
                await self._let_others_go_first()
                evicted += await self._evict(queue, rows[first : first + DELETE_BATCH], self._soon(deadline))
        return evicted

    async def _evict(self, queue: Queue, rows: NDArray[np.intp], deadline: Deadline) -> int:
        try:
            return await self._writer.evict(queue.locations[rows], queue.ranks[rows], deadline)
        except IndexFull as error:
            # Not even one entry could be deleted; the records are gone from memory, and their entries are owed.
            raise NodeFull(self._guard.node_index, str(error)) from error

    async def _let_others_go_first(self) -> None:
        await asyncio.sleep(0)
        looks = int(YIELD_BATCH_MS / YIELD_MS)
        while looks and (self._guard.reader.queued or self._guard.writer.queued) and not self._fill.above_reject:
            looks -= 1
            await asyncio.sleep(YIELD_MS / 1000)

    def _soon(self, deadline: Deadline | None) -> Deadline:
        return Deadline.after_ms(self._guard.clock, MAX_DEADLINE_MS) if deadline is None else deadline
