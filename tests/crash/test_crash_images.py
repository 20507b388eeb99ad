"""Everything that a crash can leave of small lives of a node is opened and judged (faults 1, 3, 4, 5, 6, 60).

A life is recorded operation by operation (`tests/support/crashio`); states are built in memory, so no process has to be
killed for each. By default the kills between two operations, one cut of each write, and two power losses at an
operation are looked at, drawn with CRASH_SEED (1). `CRASH_IMAGES=all` looks at all of them: every byte of short writes,
every sector of long ones, each single unsynced operation lost and kept; that takes an hour or two.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from efs.metrics import FILE_BYTES, MAGIC
from efs.node import DirectoryNode, Durability
from efs.osio import SystemIo
from tests.crash import lives
from tests.support.crashio.crashes import Choice, Crash, distinct, drawn, kills, power_losses
from tests.support.crashio.disk import Disk, History
from tests.support.crashio.life import Life
from tests.support.crashio.log import Kind
from tests.support.crashio.oracle import ALMOST_FULL, Oracle
from tests.support.nodebox import PLACE, NodeBox, crash

THOROUGH = os.environ.get("CRASH_IMAGES") == "all"
SEED = int(os.environ.get("CRASH_SEED", "1"))
CHOICE = Choice(THOROUGH, SEED)
LESS = CHOICE if THOROUGH else replace(CHOICE, every=2)
"""For kills in `power` mode, which leave what they leave in `process` mode, and for power losses in `process` mode,
where little is promised."""
pytestmark = [pytest.mark.crash, pytest.mark.timeout(14_400 if THOROUGH else 300)]

LIVES: tuple[Callable[[Path, Durability], Awaitable[Life]], ...] = (lives.changes, lives.pressure, lives.deaths)
DURABILITIES: tuple[Durability, ...] = ("process", "power")
of_every_life = pytest.mark.parametrize("live", LIVES, ids=lambda live: live.__name__)
in_every_mode = pytest.mark.parametrize("durability", DURABILITIES)


async def judge_all(life: Life, place: Path, crashes: Iterator[Crash]) -> Oracle:
    oracle = Oracle(life, place)
    for one in distinct(crashes, life.promises()):
        await oracle.judge(one)
    print(f"seed {SEED}: {oracle.looked} states, {oracle.must} records that had to be there")
    return oracle


# -- Lives -----------------------------------------------------------------------------------------------------------


@of_every_life
@in_every_mode
def test_a_node_killed_at_any_byte_of_its_log(place: Path, live: Callable[[Path, Durability], Awaitable[Life]],
                                              durability: Durability) -> None:
    async def run() -> None:
        life = await live(place, durability)
        oracle = await judge_all(life, place, kills(life.before, life.ops, CHOICE if durability == "process" else LESS))
        assert oracle.looked > 30
        assert oracle.must > 50, "hardly anything had to be there"

    asyncio.run(run())


@of_every_life
@in_every_mode
def test_a_node_that_lost_power_with_any_part_of_what_was_not_synced(
    place: Path, live: Callable[[Path, Durability], Awaitable[Life]], durability: Durability
) -> None:
    async def run() -> None:
        life = await live(place, durability)
        choice = CHOICE if durability == "power" else LESS
        oracle = await judge_all(life, place, power_losses(life.before, life.ops, choice))
        assert oracle.looked > 30
        assert durability == "process" or oracle.must > 100, "hardly anything had to be there"

    asyncio.run(run())


# -- Recovery --------------------------------------------------------------------------------------------------------


def interesting(life: Life, *, power: bool) -> Iterator[Crash]:
    """Crashes whose mending changes something: in the middle of puts, drops, rewrites and formats."""
    choice = Choice(seed=SEED, cuts=2)

    def busy() -> Iterator[Crash]:
        every = (power_losses if power else kills)(life.before, life.ops, choice)
        return (one for one in distinct(every, life.promises())
                if life.promise(one.position).step.startswith(("a put", "puts", "drop", "another")))

    return drawn(busy, 12 if THOROUGH else 1, SEED)


async def judge_recovery(earlier: Life, place: Path, found: Disk, boot_id: str) -> tuple[int, int]:
    """Record the opening of what a crash left, and judge every crash of that. Number of states looked at, and of index
    files that were made anew."""
    probe = place / "probe"
    found.put_down(str(probe))
    box = NodeBox.at(probe, earlier.durability, boot_id)
    box.clock, box.marks = earlier.clock, ALMOST_FULL
    node = await box.open()
    held = frozenset(await Oracle(earlier, place).settle(box, node))
    await crash(node)
    shutil.rmtree(probe)
    life = await lives.recovery(Life.after(place / "recovered", found, earlier, held, boot_id))
    looked = 0
    images = place / "images"
    images.mkdir()
    for crashes in (kills, power_losses):
        looked += (await judge_all(life, images, crashes(life.before, life.ops, LESS))).looked
    anew = sum(op.kind is Kind.UNLINK and op.path.endswith("data.mdb") for op in life.ops)
    shutil.rmtree(images)
    shutil.rmtree(place / "recovered")
    return looked, anew


@in_every_mode
def test_a_recovery_that_crashes_at_any_operation(place: Path, durability: Durability) -> None:
    """The openings of what kills and power losses left are recorded in their turn; with the index lost, too."""
    async def run() -> None:
        (place / "life").mkdir()
        life = await lives.changes(place / "life", durability)
        looked = anew = 0
        for power in (False, True):
            for one in interesting(life, power=power):
                boot_id = "boot-2" if power else life.boot_id
                found = one.disk.copy()
                states, indexes = await judge_recovery(life, place, found, boot_id)
                looked, anew = looked + states, anew + indexes
        lost = next(interesting(life, power=False)).disk.copy()
        lost.names.pop("node/index/data.mdb", None)
        looked += (await judge_recovery(life, place, lost, life.boot_id))[0]
        assert looked > 30
        assert anew, "no recovery made an index anew"

    asyncio.run(run())


# -- What is best effort ---------------------------------------------------------------------------------------------


def spoilt(content: bytes, source: random.Random) -> Iterator[bytes | None]:
    """Contents that a file which nobody syncs may have; None for no file."""
    yield None
    yield b""
    yield content[: len(content) // 2]
    yield bytes(len(content))
    yield content[:8] + source.randbytes(max(0, len(content) - 8))
    yield source.randbytes(len(content))


@in_every_mode
def test_counters_and_stamps_may_hold_anything(place: Path, durability: Durability) -> None:
    """Both are best effort: whatever became of them, the node opens with its records."""
    async def run() -> None:
        life = await lives.changes(place, durability)
        source = random.Random(SEED)
        history = History.begin(life.before, life.ops)
        while history.position < len(life.ops):
            history.step()
        disk = history.live
        stamps = next(name for name in disk.names if name.startswith("node/stamps/"))
        looked = 0
        for name in ("node/counters", stamps):
            content = disk.content(name)
            assert name != "node/counters" or len(content) == FILE_BYTES
            for data in spoilt(content if name == stamps else content.ljust(FILE_BYTES, b"\0"), source):
                image = place / f"spoilt-{looked}"
                other = disk.copy()
                if data is None:
                    del other.names[name]
                else:
                    other.files[other.names[name]] = bytearray(data)
                other.put_down(str(image))
                box = NodeBox.at(image, durability, life.boot_id)
                box.clock = life.clock
                node = await DirectoryNode.open(box.path, PLACE, SystemIo(), life.clock, durability=durability,
                                                boot_id=life.boot_id)
                assert frozenset(await Oracle(life, place).settle(box, node)) == life.held
                await node.close()
                assert (image / "node" / "counters").read_bytes()[: len(MAGIC)] == MAGIC
                looked += 1
        assert looked == 12

    asyncio.run(run())
