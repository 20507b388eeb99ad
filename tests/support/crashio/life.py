"""A node's life under the recorder, and what it promises at each of its operations.

A life is made of steps that begin and end with nothing under way. At each end the node itself says what it holds, so
that evictions need no model: what was held before a step and is held after it must be there all through it; what a step
stored must be there from the moment in which it was acknowledged; what it evicts or drops may be there until it ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from efs.clock import Deadline
from efs.limits import MIB
from efs.node import DirectoryNode, Durability
from efs.types import DropItem
from tests.support.clock import FakeClock
from tests.support.crashio.disk import Disk
from tests.support.crashio.log import Op, Recorder
from tests.support.nodebox import NODE_ID, PLACE, crash
from tests.support.records import Records

EXTENT_BYTES = MIB // 4
NODE_BYTES = 5 * MIB // 2 + 4 * 4096
"""Four extents, the smallest index budget, the reserve, and a page of stamps for each extent."""
STEP_SECONDS = 1.0
"""Time passes before each step, or what is written again would be what stands there."""
Names = frozenset[bytes]


def names_of(records: Records) -> list[bytes]:
    """key ‖ digest of each."""
    return [key + digest for key, digest in zip(records.keys, records.digests, strict=True)]


@dataclass(slots=True)
class Step:
    """Positions in the log and names of records. tried: what it was to store. acked: of the acknowledgement, None when
    there was none. ended: None while it runs."""

    name: str
    began: int
    before: Names
    tried: Names = frozenset()
    acked: int | None = None
    ended: int | None = None
    after: Names = frozenset()


@dataclass(frozen=True, slots=True)
class Promise:
    """What a crash at some operation may not take, and what it may show. under_way: records that are being stored.
    leaving: those that may be gone half."""

    must: Names
    may: Names
    under_way: Names
    leaving: Names
    step: str


@dataclass(slots=True)
class Life:
    """A recorded life: the disk before it, the log, the steps, and all records that were ever stored."""

    path: Path
    durability: Durability
    recorder: Recorder
    before: Disk
    boot_id: str = "boot-1"
    clock: FakeClock = field(default_factory=FakeClock)
    known: dict[bytes, tuple[Records, int]] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    node: DirectoryNode | None = None
    held: Names = frozenset()

    @classmethod
    def create(cls, path: Path, durability: Durability) -> Life:
        """Make a node at `path / "node"`, under the recorder."""
        life = cls(path, durability, Recorder(str(path)), Disk())
        DirectoryNode.create(life.recorder, life.node_path, PLACE, NODE_ID, NODE_BYTES, extent_bytes=EXTENT_BYTES,
                             boot_id=life.boot_id)
        return life

    @classmethod
    def after(cls, path: Path, crashed: Disk, earlier: Life, held: Names, boot_id: str) -> Life:
        """A life that begins with what a crash left: its first step will be the recovery. held: what must be there."""
        crashed.put_down(str(path))
        before = crashed.copy()
        life = cls(path, earlier.durability, Recorder(str(path), dict(before.names)), before, boot_id, held=held)
        life.known = dict(earlier.known)
        return life

    def begin_here(self) -> None:
        """Forget the log so far: what is on disk now is durable. Nothing may be open."""
        assert self.node is None, "a node is open"
        self.before = Disk.of(str(self.path))
        self.recorder = Recorder(str(self.path), dict(self.before.names))
        self.steps.clear()

    @property
    def node_path(self) -> str:
        return str(self.path / "node")

    @property
    def ops(self) -> list[Op]:
        return self.recorder.ops

    def soon(self) -> Deadline:
        return Deadline.after_ms(self.clock, 20_000)

    def running(self) -> DirectoryNode:
        assert self.node is not None, "no node is open"
        return self.node

    @asynccontextmanager
    async def step(self, name: str, *stored: Records) -> AsyncIterator[Step]:
        """Something that the node does, and what it may store."""
        for records in stored:
            self.known.update({name: (records, row) for row, name in enumerate(names_of(records))})
        tried = frozenset(name for records in stored for name in names_of(records))
        step = Step(name, self.recorder.position, self.held, tried)
        self.steps.append(step)
        self.clock.advance(STEP_SECONDS)
        yield step
        if self.node is not None:
            await self.node.settled()
            self.held = await self._look()
        step.ended, step.after = self.recorder.position, self.held

    async def open(self) -> DirectoryNode:
        async with self.step("open"):
            self.node = await DirectoryNode.open(self.node_path, PLACE, self.recorder, self.clock,
                                                 durability=self.durability, boot_id=self.boot_id)
        return self.running()

    async def put(self, records: Records, stamp: int, *, repair: bool = False, name: str = "put") -> None:
        """Store records; fails unless all were taken."""
        async with self.step(name, records) as step:
            outcome = await self.running().put(replace(records.batch(stamp), repair=repair), self.soon())
            assert outcome.stored.all(), outcome.why
            step.acked = self.recorder.position

    async def put_together(self, *several: Records, stamp: int) -> None:
        """Puts that run at the same time."""
        async with self.step("puts", *several) as step:
            node = self.running()
            outcomes = await asyncio.gather(*(node.put(records.batch(stamp), self.soon()) for records in several))
            assert all(outcome.stored.all() for outcome in outcomes)
            step.acked = self.recorder.position

    async def drop(self, records: Records, older_than_ms: int = 0, *, dropped: int) -> None:
        """Compare-and-drop; with an age as a sweep asks for it."""
        async with self.step("drop"):
            table = await self.running().look_up(records.keys, self.soon())
            items = [DropItem(item.key, item.digest, item.generation, older_than_ms)
                     for item in records.drop_items(table.generation)]
            assert await self.running().drop(items, self.soon()) == dropped

    async def verify(self) -> None:
        """Check what is not trusted. Nothing that this life began with may turn out to be damaged."""
        async with self.step("verify"):
            for name in sorted(self.held):
                sound = await self.running().verify(name[:32], name[32:], self.soon())
                assert sound or name not in self.first_held, "a verification was wrong"

    async def close(self) -> None:
        async with self.step("close"):
            node, self.node = self.running(), None
            await node.close()

    async def die(self) -> None:
        """The process ends here, in the middle of its life."""
        node, self.node = self.running(), None
        await crash(node)

    async def _look(self) -> Names:
        keys = sorted({name[:32] for name in self.known})
        if not keys:
            return frozenset()
        table = await self.running().look_up(keys, self.soon())
        first = {keys[row] + table.digest[row].tobytes() for row in np.flatnonzero(table.location >= 0).tolist()}
        return frozenset(first | {keys[more.row] + more.digest for more in table.extra})

    # -- promises

    def promise(self, position: int) -> Promise:
        """What holds for a crash after so many operations."""
        begun = [step for step in self.steps if step.began <= position]
        if not begun:
            return Promise(self.first_held, self.first_held, frozenset(), frozenset(), "create")
        step = begun[-1]
        if step.ended is not None and position >= step.ended:
            return Promise(step.after, step.after, frozenset(), frozenset(), f"after {step.name}")
        acked = step.tried if step.acked is not None and position >= step.acked else frozenset()
        kept = (step.before | acked) & step.after
        return Promise(kept, step.before | step.tried | step.after, step.tried - step.before, step.before - step.after,
                       step.name)

    @property
    def first_held(self) -> Names:
        return self.steps[0].before if self.steps else frozenset()

    def promises(self) -> list[int]:
        """For each position a number of what is promised there (`crashes.distinct`)."""
        numbers: dict[Promise, int] = {}
        return [numbers.setdefault(self.promise(at), len(numbers)) for at in range(len(self.ops) + 1)]
