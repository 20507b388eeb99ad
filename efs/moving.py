"""Moving blocks that fetches found at an earlier owner to the group that owns them now, in the background.

When groups are added nothing is copied, and for the retention time fetches take from an earlier owner what the present
one has not (`efs/groups.py`). What is only read would stay there and be a miss once that time is over. So the keys of
blocks that a fetch delivered from an earlier owner are offered here, and worked off in batches:

1. The owners of today are asked which of the keys they have by now: another client may have been faster.
2. The others are fetched again from where they were, verified like in any fetch, into memory of this batch alone. The
   caller's buffer is the caller's again once its fetch has returned, and is never looked at.
3. They are put to their owners like any put, with depth and tenant tag of their headers, and on condition that each
   has the digest that was read (`PutItem.digest`): what changed in between is not stored. All rules of puts hold:
   eleven nodes, quotas, tombstones, versions of the map. The earlier owner's records are left to its eviction.

*Bounds.* At most MOVE_QUEUE_BLOCKS keys are known at a time; what does not fit is dropped, counted, and offered again
by the next fetch that finds it there. One batch is under way at a time, of MOVE_BATCH_BYTES or one block, and holds
twice that. MOVE_BATCHES_PER_SECOND at most are begun, each after calls that are running (`efs/pace.py`). Offering never
waits.

*Faults* are counted and cost a move, nothing else. A group of which too few nodes can be written to is not read for. A
key that was not moved is left alone for MOVE_REST_MS: a full group, or a tenant at its quota, must not have the same
blocks fetched again with every read.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import islice
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.clock import Clock, Deadline
from efs.errors import EfsError
from efs.fs import FileSystem
from efs.limits import (
    ACK_SHARDS,
    DROP_WAIT_SHARE,
    GET_DEADLINE_MS,
    MATCH_DEADLINE_MS,
    MOVE_BATCH_BLOCKS,
    MOVE_BATCH_BYTES,
    MOVE_BATCHES_PER_SECOND,
    MOVE_QUEUE_BLOCKS,
    MOVE_REST_MS,
    PUT_DEADLINE_MS,
)
from efs.metrics import CounterFile
from efs.ownership import Owners
from efs.pace import Pace, Traffic
from efs.shape import BlockShape
from efs.types import PutItem, PutReport

_LOG: Final = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Put = Callable[[Sequence[PutItem], BlockShape, Bytes, Deadline], Awaitable[PutReport]]


class Mover:
    """Of one `efs.groups.GroupedFileSystem`. Everything belongs to its loop."""

    def __init__(self, groups: Callable[[], Sequence[FileSystem]], owners: Callable[[Sequence[bytes]], Owners],
                 put: Put, counters: CounterFile, clock: Clock, traffic: Traffic) -> None:
        """groups, owners: as they are when they are called. put: to the owners. traffic: what moves yield to."""
        self._groups = groups
        self._owners = owners
        self._put = put
        self._counters = counters
        self._clock = clock
        self._traffic = traffic
        self._waiting: dict[tuple[int, BlockShape], list[bytes]] = {}
        """By earlier owner and shape."""
        self._known: set[bytes] = set()
        """The keys that wait or are under way."""
        self._under_way: frozenset[bytes] = frozenset()
        self._resting: dict[bytes, float] = {}
        """Keys that were not moved, and until when they are left alone; the earliest first."""
        self._offered = asyncio.Event()
        self._ended = asyncio.Event()
        """Of the batch that is under way."""

    def offer(self, keys: Sequence[bytes], sources: NDArray[np.intp], shape: BlockShape) -> None:
        """Have blocks moved that a fetch has just delivered from these groups, as far as there is room."""
        queued = dropped = 0
        now = self._clock.monotonic()
        for key, source in zip(keys, sources.tolist(), strict=True):
            if key in self._known or self._resting.get(key, now) > now:
                continue
            if len(self._known) >= MOVE_QUEUE_BLOCKS:
                dropped += 1
                continue
            queued += 1
            self._known.add(key)
            self._waiting.setdefault((source, shape), []).append(key)
        self._counters.add("move_queued", queued)
        self._counters.add("move_dropped", dropped)
        if queued:
            self._offered.set()

    async def forget(self, keys: Collection[bytes], deadline: Deadline) -> None:
        """Move none of these from now on, because they are about to be dropped: what waits is forgotten, a batch that
        has one of them is waited for, for DROP_WAIT_SHARE of what is left until the deadline."""
        gone = self._known.intersection(keys) - self._under_way
        for kind, waiting in list(self._waiting.items()):
            left = [key for key in waiting if key not in gone]
            if left:
                self._waiting[kind] = left
            else:
                del self._waiting[kind]
        self._known -= gone
        self._counters.add("move_failed", len(gone))
        if not self._under_way.isdisjoint(keys):
            try:
                async with asyncio.timeout(DROP_WAIT_SHARE * deadline.left()):
                    await self._ended.wait()
            except TimeoutError:
                _LOG.warning("blocks are dropped while they are moved, and may be there again")

    async def run(self) -> None:
        """Move what is offered, for ever."""
        pace = Pace(self._traffic, MOVE_BATCHES_PER_SECOND)
        while True:
            await self._offered.wait()
            await pace.step()
            if not self._waiting:
                self._offered.clear()
                continue
            (source, shape), keys = self._take()
            moved = 0
            try:
                moved = await self._move(source, shape, keys)
            except EfsError as error:
                _LOG.warning("%d blocks of group %d were not moved: %s", len(keys), source, error)
            finally:
                self._end(keys, moved)

    def _take(self) -> tuple[tuple[int, BlockShape], list[bytes]]:
        """The next batch; others of its kind go behind all that waits."""
        kind, waiting = next(iter(self._waiting.items()))
        most = max(1, min(MOVE_BATCH_BLOCKS, MOVE_BATCH_BYTES // kind[1].block_bytes))
        keys, left = waiting[:most], waiting[most:]
        del self._waiting[kind]
        if left:
            self._waiting[kind] = left
        self._under_way = frozenset(keys)
        self._ended.clear()
        return kind, keys

    def _end(self, keys: Sequence[bytes], moved: int) -> None:
        self._known.difference_update(keys)
        self._under_way = frozenset()
        self._ended.set()
        self._counters.add("move_done", moved)
        self._counters.add("move_failed", len(keys) - moved)
        if moved < len(keys):
            self._rest(keys)

    def _rest(self, keys: Sequence[bytes]) -> None:
        """Leave keys alone for a while. Which of a batch were moved is not known; nobody offers these."""
        now = self._clock.monotonic()
        self._resting = {key: until for key, until in self._resting.items() if until > now}
        self._resting.update(dict.fromkeys(keys, now + MOVE_REST_MS / 1000))
        for key in list(islice(self._resting, max(0, len(self._resting) - MOVE_QUEUE_BLOCKS))):
            del self._resting[key]

    # -- one batch ----------------------------------------------------------------------------------------------

    async def _move(self, source: int, shape: BlockShape, keys: Sequence[bytes]) -> int:
        """Move blocks from one group; returns how many are at their owners now."""
        lacking = await self._lacking(keys)
        there = len(keys) - len(lacking)
        wanted = [key for key, writable in lacking.items() if writable]
        if not wanted:
            return there
        out = np.empty(len(wanted) * shape.block_bytes, np.uint8)
        items = await self._groups()[source].read_items(wanted, shape, out, deadline_ms=GET_DEADLINE_MS)
        if not items:
            return there
        rows = sorted(items)
        blocks = await _block_major(out, shape, len(wanted), rows)
        del out
        report = await self._put([items[row] for row in rows], shape, blocks,
                                 Deadline.after_ms(self._clock, PUT_DEADLINE_MS))
        if report.failed:
            _LOG.info("%d blocks of group %d were not moved: %s", report.failed, source, report.why)
        return there + report.acked + report.already

    async def _lacking(self, keys: Sequence[bytes]) -> dict[bytes, bool]:
        """Those that their owners do not have, and whether these can be written to."""
        lacking: dict[bytes, bool] = {}
        owners = self._owners(keys)
        for owner in np.unique(owners).tolist():
            mine = [keys[row] for row in np.flatnonzero(owners == owner).tolist()]
            group = self._groups()[owner]
            present = await group.present(mine, strict=True, deadline_ms=MATCH_DEADLINE_MS)
            writable = len(group.health.writable()) >= ACK_SHARDS
            lacking.update({key: writable for key, held in zip(mine, present.tolist(), strict=True) if not held})
        return lacking


async def _block_major(out: Bytes, shape: BlockShape, count: int, rows: Sequence[int]) -> Bytes:
    """(rows, block bytes) of some of `count` blocks in a segment-major buffer, one segment at a time."""
    blocks = np.empty((len(rows), shape.block_bytes), np.uint8)
    for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True):
        blocks[:, offset : offset + size] = out[count * offset : count * (offset + size)].reshape(count, size)[rows]
        await asyncio.sleep(0)
    return blocks
