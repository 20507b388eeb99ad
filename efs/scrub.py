"""Scrub: every record of every node is read and checked by its node, so that damage is found before it is needed.

Nodes one after the other, each in the order of its listing. The node reads the payload and compares it with the header
(`verify`); a record that is not sound it drops, and `efs/repair.py` rebuilds it from the others. A record of before an
unclean boot becomes trusted by it. What is missing altogether does not show here: that is what a repair finds.

A step is SCRUB_STEP_BYTES of payload. Before each one the scrub waits for its rate and for calls to end
(`efs/pace.py`). It goes on at a cursor, which says behind which record of which node; whoever keeps the cursor over
restarts gets one round after the other without a record being left out, and at most what lies between two saves is
checked twice.
A node that cannot be asked is passed over until the next round.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from efs.clock import Clock, Deadline
from efs.contract import Node
from efs.errors import EfsError
from efs.health import Health
from efs.limits import (
    DATA_SHARDS,
    REPAIR_CALL_MS,
    SCRUB_PAGE_RECORDS,
    SCRUB_STEP_BYTES,
    SCRUB_STEP_RECORDS,
    STRIPE_SHARDS,
)
from efs.metrics import CounterFile
from efs.pace import Pace
from efs.progress import Cursor
from efs.repair import Repair
from efs.types import ListedRecord


@dataclass(frozen=True, slots=True)
class ScrubReport:
    """What one scrub did.

    records, bytes: checked, and their payload. unsound: records that failed and were dropped by their node, or were
    gone since they were listed; with those that turned out damaged when others were rebuilt from them. rebuilt: shards
    that were stored instead. failed: records that could not be checked.
    missing: nodes that were not, or not to the end, looked at. finished: whether this run came to the end of a round.
    cursor: where the next run goes on.
    """

    records: int
    bytes: int
    unsound: int
    rebuilt: int
    failed: int
    missing: tuple[int, ...]
    finished: bool
    cursor: Cursor
    seconds: float


class Scrub:
    """Scrubs the nodes of a group. `nodes[i]` is None where node i could not be opened. `repair` mends."""

    def __init__(self, nodes: Sequence[Node | None], health: Health, repair: Repair, counters: CounterFile,
                 clock: Clock, pace: Pace) -> None:
        self._nodes = tuple(nodes)
        self._health = health
        self._repair = repair
        self._counters = counters
        self._clock = clock
        self._pace = pace
        self._ends_at: float | None = None
        self._records = self._bytes = self._unsound = self._rebuilt = self._failed = 0

    async def run(self, cursor: Cursor | None = None, *, max_seconds: float | None = None,
                  reached: Callable[[Cursor], None] = lambda cursor: None) -> ScrubReport:
        """Go on at `cursor` to the end of the round, for about `max_seconds`. `reached` is called after every page.
        Never raises for a node's sake."""
        started = self._clock.monotonic()
        self._ends_at = None if max_seconds is None else started + max_seconds
        self._records = self._bytes = self._unsound = self._rebuilt = self._failed = 0
        cursor = cursor or Cursor()
        missing: list[int] = []
        while cursor.node < STRIPE_SHARDS:
            node = self._nodes[cursor.node]
            after: bytes | None = None
            try:
                if node is None or cursor.node not in self._health.readable():
                    missing.append(cursor.node)
                else:
                    after = await self._page(node, cursor.after)
            except EfsError as error:
                self._health.note_failure(cursor.node, error)
                missing.append(cursor.node)
            cursor = Cursor(cursor.node, after) if after is not None else Cursor(cursor.node + 1)
            if cursor.node < STRIPE_SHARDS:
                reached(cursor)
                if self._ends_at is not None and self._clock.monotonic() >= self._ends_at:
                    break
        finished = cursor.node == STRIPE_SHARDS
        if finished:
            cursor = Cursor()
            reached(cursor)
        self._counters.add("scrub_runs", finished)
        return ScrubReport(self._records, self._bytes, self._unsound, self._rebuilt, self._failed, tuple(missing),
                           finished, cursor, self._clock.monotonic() - started)

    async def _page(self, node: Node, after: bytes | None) -> bytes | None:
        """Check one page of a node; returns what continues it."""
        await self._pace.step()
        page = await node.list(after, SCRUB_PAGE_RECORDS, Deadline.after_ms(self._clock, REPAIR_CALL_MS))
        unsound: list[bytes] = []
        for step in _steps(page.records):
            await self._pace.step()
            deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
            results = await asyncio.gather(*(node.verify(record.key, record.digest, deadline) for record in step),
                                           return_exceptions=True)
            for record, result in zip(step, results, strict=True):
                self._note(record, result, unsound)
        self._counters.add("scrub_dropped", len(unsound))
        self._unsound += len(unsound)
        if unsound:
            report = await self._repair.run_keys(unsound)
            self._rebuilt += report.rebuilt
            self._unsound += report.corrupt
        return page.after

    def _note(self, record: ListedRecord, result: bool | BaseException, unsound: list[bytes]) -> None:
        if isinstance(result, EfsError):
            self._failed += 1
            self._counters.add("scrub_failed")
        elif isinstance(result, BaseException):
            raise result
        else:
            self._records += 1
            self._bytes += _shard_bytes(record)
            self._counters.add("scrub_records")
            self._counters.add("scrub_bytes", _shard_bytes(record))
            if not result:
                unsound.append(record.key)


def _steps(records: Sequence[ListedRecord]) -> list[list[ListedRecord]]:
    """Records in pieces of about SCRUB_STEP_BYTES of payload and at most SCRUB_STEP_RECORDS."""
    steps: list[list[ListedRecord]] = []
    size = SCRUB_STEP_BYTES
    for record in records:
        if size + _shard_bytes(record) > SCRUB_STEP_BYTES or len(steps[-1]) >= SCRUB_STEP_RECORDS:
            steps.append([])
            size = 0
        steps[-1].append(record)
        size += _shard_bytes(record)
    return steps


def _shard_bytes(record: ListedRecord) -> int:
    return -(-record.block_bytes // DATA_SHARDS)
