"""Whole stores after a crash of their owner: all twelve nodes as they were at one operation, or one of them as it was
then beside eleven others that went on (faults 1, 2, 3, 5, 60).

A put of the whole store is recorded over all nodes; their threads interleave, so every run has another log. The oracle:
acknowledged blocks read, others are whole or a miss, no byte is wrong, fsck finds at most stripes that were being
written, and the next put of the same blocks mends those.
"""

from __future__ import annotations

import asyncio
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from efs.findings import Kind as Finding
from efs.fs import FileSystem
from efs.limits import STRIPE_SHARDS
from efs.nodedir import read_boot, write_boot
from efs.osio import SystemIo
from tests.crash import puts, repairs
from tests.crash.test_crash_images import SEED, THOROUGH
from tests.support.crashio.crashes import Choice, Crash, drawn, kills, power_losses
from tests.support.crashio.disk import Disk, History
from tests.support.crashio.life import EXTENT_BYTES, NODE_BYTES
from tests.support.crashio.log import Op, Recorder

pytestmark = [pytest.mark.crash, pytest.mark.timeout(3_600 if THOROUGH else 300)]

BEFORE, FIRST, SECOND = 0, 1, 2
"""Numbers of the puts: one before the log begins, two in it."""
STATES = 200 if THOROUGH else 6
WRITTEN = {Finding.HOLLOW_STRIPE.value, Finding.AT_RISK_BLOCK.value}
"""What fsck may say of a stripe whose put died."""
LEFT_BY_KILLS = {*WRITTEN, Finding.DATA_WITHOUT_INDEX.value}
"""The same before nodes were opened: data comes before the index. After power loss anything may be found."""


@dataclass(frozen=True, slots=True)
class StoreLife:
    """A recorded life of a store. acked: by position in the log the number of the put that was acknowledged there."""

    before: Disk
    ops: list[Op]
    acked: dict[int, int]

    def acked_at(self, position: int) -> list[int]:
        return [number for at, number in self.acked.items() if at <= position]


async def put(filesystem: FileSystem, number: int) -> None:
    blocks = puts.blocks_of(number)
    report = await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=puts.DEADLINE_MS)
    assert report.acked + report.already == puts.BLOCKS_PER_PUT


async def live(root: Path, durability: str) -> StoreLife:
    FileSystem.init(str(root), STRIPE_SHARDS * NODE_BYTES, durability=durability, extent_bytes=EXTENT_BYTES)
    filesystem = await FileSystem.open(str(root), maintain=False)
    await put(filesystem, BEFORE)
    await filesystem.close()
    before = Disk.of(str(root))
    recorder = Recorder(str(root), dict(before.names))
    acked = {0: BEFORE}
    filesystem = await FileSystem.open(str(root), io=recorder, maintain=False)
    for number in (FIRST, SECOND):
        await put(filesystem, number)
        # Eleven nodes are enough for an acknowledgement: the twelfth may still be writing.
        acked[recorder.position] = number
    await filesystem.close()
    return StoreLife(before, recorder.ops, acked)


def marked_as_of_another_boot(root: Path) -> None:
    """What the machine's next boot finds."""
    for node in (root / "nodes").iterdir():
        boot = read_boot(SystemIo(), str(node))
        if boot is not None:
            write_boot(SystemIo(), str(node), replace(boot, boot_id="before-power-loss"))


async def judge(image: Path, must: list[int], *, power: bool) -> None:
    """Look at one store, in which the blocks of some puts must be there."""
    found = set(repairs.findings_of(str(image)))
    assert power or found <= LEFT_BY_KILLS, f"fsck finds {found}"
    filesystem = await FileSystem.open(str(image), maintain=False)
    assert not filesystem.problems, filesystem.problems
    every = [BEFORE, FIRST, SECOND]
    right, report = await puts.read(filesystem, every)
    assert all(fine for found, fine in zip(report.ok, right, strict=True) if found), "a wrong byte"
    for at, number in enumerate(every):
        ok = report.ok[at * puts.BLOCKS_PER_PUT : (at + 1) * puts.BLOCKS_PER_PUT]
        assert number not in must or all(ok), f"an acknowledged block of put {number} is lost: {report}"
    for number in every:
        await put(filesystem, number)
    right, report = await puts.read(filesystem, every)
    assert all(right), "a put after the crash does not read"
    await filesystem.close()
    assert set(repairs.findings_of(str(image))) <= WRITTEN


async def judge_all(life: StoreLife, place: Path, crashes: Callable[[], Iterator[Crash]], *, keeps: bool) -> None:
    """keeps: whether what was acknowledged must be there."""
    looked = unfinished = 0
    for one in drawn(crashes, STATES, SEED):
        image = place / f"image-{looked}"
        one.disk.put_down(str(image))
        if one.power:
            marked_as_of_another_boot(image)
        try:
            await judge(image, life.acked_at(one.position) if keeps else [], power=one.power)
        except AssertionError as error:
            raise AssertionError(f"seed {SEED}, {one.what}: {error}") from error
        shutil.rmtree(image)
        looked += 1
        unfinished += len(life.acked_at(one.position)) < len(life.acked)
    assert looked == STATES
    assert unfinished, "no crash came in the middle of a put"


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_store_whose_owner_was_killed_at_any_operation(place: Path, durability: str) -> None:
    async def run() -> None:
        life = await live(place / "store", durability)
        await judge_all(life, place, lambda: kills(life.before, life.ops, Choice(seed=SEED)), keeps=True)

    asyncio.run(run())


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_store_that_lost_power_at_any_operation(place: Path, durability: str) -> None:
    async def run() -> None:
        life = await live(place / "store", durability)
        choice = Choice(seed=SEED, every=5 if THOROUGH else 29)
        await judge_all(life, place, lambda: power_losses(life.before, life.ops, choice), keeps=durability == "power")

    asyncio.run(run())


def test_one_node_that_was_killed_on_the_way_beside_eleven_that_went_on(place: Path) -> None:
    async def run() -> None:
        life = await live(place / "store", "process")
        end = History.begin(life.before, life.ops)
        while end.position < len(life.ops):
            end.step()
        source = random.Random(SEED)
        looked = 0
        for one in drawn(lambda: kills(life.before, life.ops, Choice(seed=SEED)), STATES, SEED):
            image = place / f"image-{looked}"
            with_node(end.live, one.disk, f"nodes/{source.randrange(STRIPE_SHARDS):02d}").put_down(str(image))
            await judge(image, [BEFORE, FIRST, SECOND], power=False)
            shutil.rmtree(image)
            looked += 1
        assert looked == STATES

    asyncio.run(run())


def with_node(disk: Disk, other: Disk, node: str) -> Disk:
    """A store with the files of one node as they are on another disk."""
    mixed = disk.fork()
    for name in [name for name in mixed.names if name.startswith(f"{node}/")]:
        del mixed.names[name]
    for name, inode in other.names.items():
        if name.startswith(f"{node}/"):
            mixed.names[name] = -inode
            mixed.files[-inode] = other.files[inode]
    return mixed
