"""Looking after an open store: repair, scrub, sweep, and bringing nodes up to date. One for the owner of the store.

*Syncing.* A node that was away while the store was changed comes back with what it had then; a new one comes with
nothing. Which nodes that are is noted in the store's root (`efs/progress.py`), before the first change that one
misses. Such a node opens behind a gate (`efs/joining.py`): nothing that it holds or lacks counts for readers and
writers. Meanwhile, with all nodes and the gated ones, a sweep drops what fewer than ten nodes hold, and repairs
rebuild the rest on it. What the others have evicted since does not come back: they refuse it as too cold, and then
fewer than ten hold it. Once a repair has come to the end and found nothing more to store on it, or SYNC_PASSES have,
the node joins. Each step is noted, so that a sync goes on where it was when its owner died.

*Scrub.* `scrub_for_ever` scrubs round after round, with a repair behind each; its cursor is noted every UPKEEP_SAVE_MS.

*Sweep.* `sweep_for_ever` sweeps every SWEEP_EVERY_MS, after another try to purge what could not be purged yet
(`efs/purge.py`). What was purged is no sweep's to spare. Only one sweep runs at a time: `efs/sweep.py` relies on it.

Notes are written by a daemon thread of their own: a disk that hangs holds up no call and no exit. Only the note that a
node begins to miss changes is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from efs.clock import Clock
from efs.codec import Codec
from efs.contract import Node
from efs.health import Health
from efs.iothread import IoThread, QueueFull, ThreadClosed, pass_on
from efs.joining import JoiningNode
from efs.limits import (
    HOLLOW_GRACE_MS,
    PLACEMENT_GROUPS,
    REPAIR_GRACE_MS,
    REPAIR_STEPS_PER_SECOND,
    SCRUB_EVERY_MS,
    SCRUB_STEPS_PER_SECOND,
    STRIPE_SHARDS,
    SWEEP_EVERY_MS,
    SWEEP_PAGES_PER_SECOND,
    SYNC_PASSES,
    SYNC_RETRY_MS,
    UPKEEP_SAVE_MS,
)
from efs.metrics import CounterFile
from efs.osio import Io
from efs.pace import Pace, Traffic
from efs.placement import placement_group
from efs.progress import Cursor, Progress, write_progress
from efs.purge import Purger
from efs.repair import Repair, RepairReport
from efs.scrub import Scrub, ScrubReport
from efs.sweep import Sweep, SweepReport

_LOG: Final = logging.getLogger(__name__)


class Upkeep:
    """See the module docstring. `nodes` are all nodes, ungated; `gates` the gates of those that are syncing."""

    def __init__(self, nodes: Sequence[Node | None], gates: Mapping[int, JoiningNode], codec: Codec,
                 counters: CounterFile, clock: Clock, traffic: Traffic, progress: Progress, purger: Purger,
                 io: Io | None, root: str | None, draining: Collection[int] = ()) -> None:
        """draining: as in `efs.health.Health`. Without io and root nothing is noted. Must run on the loop."""
        self._nodes = tuple(nodes)
        self._gates = dict(gates)
        self._health = Health(nodes, clock, draining)
        self._codec = codec
        self._counters = counters
        self._clock = clock
        self._traffic = traffic
        self._purger = purger
        self._io = io
        self._root = root
        self._running: Repair | None = None
        self._thread: IoThread | None = None
        self._saved_at = clock.monotonic()
        self._syncing_now = asyncio.Lock()
        self._sweeping_now = asyncio.Lock()
        self.progress = progress

    def node(self, node_index: int) -> Node | None:
        """A node, also one behind a gate."""
        return self._nodes[node_index]

    # -- on demand

    async def repair(self, *, after: bytes | None = None, max_seconds: float | None = None, grace_ms: int = 0,
                     per_second: int | None = None) -> RepairReport:
        """One repair (see `efs.repair.Repair.run`). per_second: steps, None for as many as there is time for."""
        return await self._begin(grace_ms, per_second).run(after=after, max_seconds=max_seconds)

    async def repair_keys(self, keys: Sequence[bytes]) -> RepairReport:
        """Repair these keys now."""
        return await self._repair(0, None).run_keys(keys)

    async def scrub(self, *, max_seconds: float | None = None, per_second: int | None = None,
                    from_start: bool = False) -> ScrubReport:
        """Scrub from the noted cursor, or `from_start`, to the end of the round."""
        scrub = Scrub(self._nodes, self._health, self._repair(0, per_second), self._counters, self._clock,
                      Pace(self._traffic, per_second))
        cursor = Cursor() if from_start else self.progress.scrub
        report = await scrub.run(cursor, max_seconds=max_seconds, reached=self._scrubbed)
        self._save(replace(self.progress, scrub=report.cursor))
        return report

    async def sweep(self, *, after: bytes | None = None, max_seconds: float | None = None,
                    grace_ms: int = HOLLOW_GRACE_MS, purged: Collection[bytes] = (),
                    per_second: int | None = None) -> SweepReport:
        """One sweep (see `efs.sweep.Sweep`), after the one that is running. per_second: pages, None for as many as
        there is time for."""
        pace = Pace(self._traffic, per_second)
        sweep = Sweep(self._nodes, self._health, self._counters, self._clock, pace,
                      purged=self._purger.tags.union(purged), grace_ms=grace_ms)
        async with self._sweeping_now:
            return await sweep.run(after=after, max_seconds=max_seconds)

    @property
    def share_done(self) -> float:
        """How far the repair, sync or scrub that runs now has come, 0 to 1."""
        if self._running is None or self._running.reached is None:
            return self.progress.scrub.node / STRIPE_SHARDS if self._running is None else 0.0
        return placement_group(self._running.reached) / PLACEMENT_GROUPS

    @property
    def syncing(self) -> tuple[int, ...]:
        """Nodes behind a gate."""
        return tuple(index for index, gate in self._gates.items() if gate.syncing)

    async def sync(self, *, per_second: int | None = None) -> RepairReport | None:
        """Bring the syncing nodes up to date and let them join; the last repair, None when there was nothing to do.
        Those that could not be filled stay behind their gates."""
        async with self._syncing_now:
            joining = self.syncing
            if not joining:
                return None
            marks = [self.progress.syncing.get(index) for index in joining]
            after = None if None in marks else min(mark for mark in marks if mark is not None)
            if after is None:
                await self.sweep(per_second=per_second)
            report = await self._sync_pass(joining, after, per_second)
            for _ in range(SYNC_PASSES - 1):
                if report.failed or (after is None and not report.found):
                    break
                after = None
                report = await self._sync_pass(joining, None, per_second)
            self._join([index for index in joining if index not in report.missing and not report.failed])
            return report

    async def _sync_pass(self, joining: Sequence[int], after: bytes | None, per_second: int | None) -> RepairReport:
        repair = self._begin(0, per_second)
        run = asyncio.create_task(repair.run(after=after))
        try:
            while not run.done():
                await asyncio.wait((run,), timeout=UPKEEP_SAVE_MS / 1000)
                if not run.done() and repair.reached is not None:
                    self._note_synced(joining, repair.reached)
        finally:
            run.cancel()
            await asyncio.wait((run,))
        return run.result()

    def _note_synced(self, joining: Sequence[int], reached: bytes) -> None:
        self._save(replace(self.progress, syncing={**self.progress.syncing, **dict.fromkeys(joining, reached)}))

    def _join(self, joined: Sequence[int]) -> None:
        for index in joined:
            self._gates[index].join()
            self._counters.add("nodes_synced")
            _LOG.info("node %d is up to date", index)
        left = {index: after for index, after in self.progress.syncing.items() if index not in joined}
        self._save(replace(self.progress, syncing=left))

    def _repair(self, grace_ms: int, per_second: int | None) -> Repair:
        return Repair(self._nodes, self._health, self._codec, self._counters, self._clock,
                      Pace(self._traffic, per_second), grace_ms=grace_ms)

    def _begin(self, grace_ms: int, per_second: int | None) -> Repair:
        self._running = self._repair(grace_ms, per_second)
        return self._running

    # -- in the background

    async def sync_until_done(self) -> None:
        """Until no node is behind a gate. Ends at once when none is."""
        while self.syncing:
            await self.sync(per_second=SWEEP_PAGES_PER_SECOND)
            if self.syncing:
                await asyncio.sleep(SYNC_RETRY_MS / 1000)

    async def sweep_for_ever(self) -> None:
        """Sweep in the background: it wants to be held by somebody."""
        while True:
            await asyncio.sleep(SWEEP_EVERY_MS / 1000)
            await self._purger.finish()
            report = await self.sweep(per_second=SWEEP_PAGES_PER_SECOND)
            if report.dropped:
                _LOG.info("a sweep removed %d records: %d hollow and %d losing versions", report.dropped,
                          report.hollow, report.losing)

    async def scrub_for_ever(self) -> None:
        """Scrub and repair, round after round."""
        while True:
            await self.scrub(per_second=SCRUB_STEPS_PER_SECOND)
            await self.repair(grace_ms=REPAIR_GRACE_MS, per_second=REPAIR_STEPS_PER_SECOND)
            await asyncio.sleep(SCRUB_EVERY_MS / 1000)

    # -- notes

    def missed_by(self, away: Collection[int]) -> None:
        """The store is about to be changed while these nodes are away: note it, once, before it happens. OpenFailed
        when the note cannot be written."""
        fresh = [index for index in away if self.progress.syncing.get(index, b"") is not None]
        if fresh and self._io is not None and self._root is not None:
            progress = replace(self.progress, syncing={**self.progress.syncing, **dict.fromkeys(fresh)})
            write_progress(self._io, self._root, progress)
            self.progress = progress

    def _scrubbed(self, cursor: Cursor) -> None:
        progress = replace(self.progress, scrub=cursor)
        if (self._clock.monotonic() - self._saved_at) * 1000 >= UPKEEP_SAVE_MS:
            self._save(progress)
        self.progress = progress

    def _save(self, progress: Progress) -> None:
        """Have it written, unless the thread is still busy with what came before."""
        self.progress = progress
        self._saved_at = self._clock.monotonic()
        if self._io is None or self._root is None:
            return
        if self._thread is None:
            self._thread = IoThread("efs-upkeep", self._clock, most_queued=2)
        try:
            self._thread.submit(partial(write_progress, self._io, self._root, progress), pass_on)
        except (QueueFull, ThreadClosed):
            _LOG.debug("progress was not noted: the thread is busy")

    async def close(self, grace_s: float) -> None:
        """Write what is to be written, for so long at most."""
        if self._thread is not None:
            await self._thread.drained(grace_s)
            self._save(self.progress)
            await self._thread.close(grace_s)
