"""What looks at the store from outside while it is hurt: fsck in a loop, and the space by du."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from efs.limits import STRIPE_SHARDS
from efs.nodeview import tree_bytes
from tools.chaosrig.damage import node_path
from tools.chaosrig.judge import Window, disturbed, is_true
from tools.chaosrig.processes import CommandRun, kvstore

PAUSE_S: Final = 0.5
DU_EVERY_S: Final = 0.5
FINDINGS_TOLD: Final = 3
"""Of one run: damage that is real comes in hundreds."""
SOUND_CODES: Final = (0, 4)


class Watchers:
    """Run beside the episodes, from `start` to `stop`; `violations` is where they complain."""

    def __init__(self, root: str, capacity_bytes: int, violations: list[str]) -> None:
        self.windows: list[Window] = []
        self.runs = 0
        self.quiet_runs = 0
        self.true_findings = 0
        self.false_findings = 0
        self.highest_du_bytes = 0
        self.du_samples = 0
        self._root = root
        self._capacity_bytes = capacity_bytes
        self._violations = violations
        self._tasks: list[asyncio.Task[None]] = []

    def start(self, *, fsck: bool = True) -> None:
        """Begin, or go on, to look. Without fsck there is one only when it is asked for."""
        self._tasks = [asyncio.create_task(self._du_for_ever())]
        if fsck:
            self._tasks.append(asyncio.create_task(self._fsck_for_ever()))

    async def stop(self) -> None:
        """End. Raises what a watcher died of, which is a fault of the watcher."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        for task in self._tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                raise error
        self._tasks = []

    async def quiet_look(self, *, fsck: bool = True) -> None:
        """One whole fsck from now on; the one that runs is given up for it. fsck: whether others follow."""
        await self.stop()
        await self._fsck()
        self.start(fsck=fsck)

    async def _fsck_for_ever(self) -> None:
        while True:
            await self._fsck()
            await asyncio.sleep(PAUSE_S)

    async def _du_for_ever(self) -> None:
        while True:
            self.measure()
            await asyncio.sleep(DU_EVERY_S)

    async def _fsck(self) -> None:
        """Every other time deep; each finding is judged."""
        deep = ("--deep",) if self.runs % 2 else ()
        self.runs += 1
        self._judge(await kvstore(self._root, "fsck", *deep))

    def measure(self) -> None:
        """All node directories in their places, now."""
        total = 0
        for node in range(STRIPE_SHARDS):
            with suppress(FileNotFoundError):  # It is away.
                total += tree_bytes(node_path(self._root, node))
        self.du_samples += 1
        self.highest_du_bytes = max(self.highest_du_bytes, total)
        if total > self._capacity_bytes:
            self._violations.append(f"the store occupies {total} bytes, its capacity is {self._capacity_bytes}")

    def _judge(self, run: CommandRun) -> None:
        if run.code not in SOUND_CODES or "findings" not in run.document:
            if not disturbed(self.windows, run.began, run.ended):
                self._violations.append(f"fsck ended with {run.code}: {run.error[-300:]}")
            return
        if not any(window.meets(run.began, run.ended, 0.0) for window in self.windows):
            self.quiet_runs += 1
        found = run.document["findings"]
        false = [finding for finding in found if not is_true(finding, self.windows, run.began, run.ended)]
        self.true_findings += len(found) - len(false)
        self.false_findings += len(false)
        self._violations += [f"fsck found what nothing explains: {finding}" for finding in false[:FINDINGS_TOLD]]
        if len(false) > FINDINGS_TOLD:
            self._violations.append(f"… and {len(false) - FINDINGS_TOLD} more in that run")
