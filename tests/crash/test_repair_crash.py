"""A replacement and an fsck with repair, killed at numbered operations: the next run finishes, the one after it has
nothing to do (faults 4, 29)."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from pathlib import Path

import pytest

from efs.errors import InvalidArgument
from efs.fs import FileSystem
from efs.limits import MIB
from efs.osio import SystemIo
from efs.progress import read_progress
from efs.replace import prepare_node
from tests.crash import puts, repairs
from tests.crash.test_put_crash import in_process
from tests.unit.efs.test_upkeep import flip_payload, get, image_of

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

CAPACITY = 12 * 8 * MIB
NODE = 7
KILLS = 16
"""Of each part. All of them take minutes: the numbers are drawn, with a seed."""


def make_store(path: str) -> None:
    async def fill() -> None:
        filesystem = await FileSystem.open(path)
        for number in range(6):
            blocks = puts.blocks_of(number)
            report = await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=puts.DEADLINE_MS)
            assert report.acked == puts.BLOCKS_PER_PUT
        await filesystem.close()

    FileSystem.init(path, CAPACITY, extent_bytes=MIB // 4)
    asyncio.run(fill())


async def read_everything(root: str) -> None:
    filesystem = await FileSystem.open(root, maintain=False)
    assert not filesystem.problems
    for number in range(6):
        report = await get(filesystem, puts.blocks_of(number))
        assert (report.blocks, report.missing) == (puts.BLOCKS_PER_PUT, 0)
    await filesystem.close()


def spread(operations: int, source: random.Random) -> list[int]:
    """Every operation, or as many of them as there is time for."""
    numbers = range(1, operations + 1)
    return sorted(source.sample(numbers, KILLS)) if operations > KILLS else list(numbers)


def test_a_replacement_killed_on_the_way_is_finished_by_the_next_one(tmp_path: Path) -> None:
    whole, bare = str(tmp_path / "whole"), str(tmp_path / "bare")
    make_store(whole)
    before = image_of(whole, NODE)
    assert len(before) == 6 * puts.BLOCKS_PER_PUT
    repairs.copy_store(whole, bare)
    shutil.rmtree(os.path.join(bare, "nodes", f"{NODE:02d}"))
    log = str(tmp_path / "count")
    counted = repairs.copy_store(bare, str(tmp_path / "counted"))
    assert in_process(repairs.replace_and_die, counted, log, NODE, 0, 0) == 0
    (said,) = puts.heard(log)
    made, operations = said["made"], said["operations"]
    assert isinstance(made, int)
    assert isinstance(operations, int)
    assert said["left"] == []
    assert image_of(counted, NODE) == before
    source = random.Random(4)
    numbers = [*spread(made, source), *(made + at for at in spread(operations - made, source))]
    killed = 0
    for at in numbers:
        copy = repairs.copy_store(bare, str(tmp_path / "copy"))
        log = str(tmp_path / f"replace-{at}")
        code = in_process(repairs.replace_and_die, copy, log, NODE, at, source.choice([0, 1, 512]))
        assert code in (0, -signal.SIGKILL), f"operation {at}"
        killed += code == -signal.SIGKILL
        if code == 0:
            continue
        assert in_process(finish_or_see_it_done, copy, log) == 0, f"operation {at}"
        assert image_of(copy, NODE) == before, f"operation {at}"
        assert repairs.findings_of(copy) == [], f"operation {at}"
        if at % 10 == 0:
            asyncio.run(read_everything(copy))
    assert killed >= len(numbers) - 3, f"{killed} kills at {len(numbers)} operations"


def finish_or_see_it_done(root: str, log: str) -> None:
    """The next run of the command: it finishes what was begun, or is told that the node is in use already."""
    made = os.path.isdir(os.path.join(root, "nodes", f"{NODE:02d}"))
    if made and NODE not in read_progress(SystemIo(), root).syncing:
        with pytest.raises(InvalidArgument, match="in use"):
            prepare_node(SystemIo(), root, NODE)
        return
    prepare_node(SystemIo(), root, NODE)

    async def run() -> None:
        filesystem = await FileSystem.open(root, maintain=False)
        await filesystem.upkeep.sync()
        assert filesystem.upkeep.syncing == ()
        await filesystem.close()

    asyncio.run(run())


def test_an_fsck_with_repair_killed_on_the_way_is_finished_by_the_next_one(tmp_path: Path) -> None:
    """Damage of several kinds on three nodes; whatever the kill left, one more run mends all, and one more does
    nothing."""
    whole, hurt = str(tmp_path / "whole"), str(tmp_path / "hurt")
    make_store(whole)
    before = [image_of(whole, index) for index in range(12)]
    repairs.copy_store(whole, hurt)
    keys = [key for number in range(6) for key in puts.blocks_of(number).keys]
    flip_payload(hurt, 1, keys[0])
    flip_payload(hurt, 2, keys[5])
    shutil.rmtree(os.path.join(hurt, "nodes", "03", "index"))
    damage = repairs.findings_of(hurt)
    assert sorted(set(damage)) == ["bad_checksum", "index_lost"]
    log = str(tmp_path / "count")
    counted = repairs.copy_store(hurt, str(tmp_path / "counted"))
    assert in_process(repairs.fsck_repair_and_die, counted, log, 0, 0) == 0
    (said,) = puts.heard(log)
    operations = said["operations"]
    assert isinstance(operations, int)
    assert said["rebuilt"] == 2
    assert [image_of(counted, index) for index in range(12)] == before
    source = random.Random(5)
    killed = 0
    numbers = spread(operations, source)
    for at in numbers:
        copy = repairs.copy_store(hurt, str(tmp_path / "copy"))
        log = str(tmp_path / f"fsck-{at}")
        code = in_process(repairs.fsck_repair_and_die, copy, log, at, source.choice([0, 1, 512]))
        assert code in (0, -signal.SIGKILL), f"operation {at}"
        killed += code == -signal.SIGKILL
        assert in_process(repairs.fsck_repair_and_die, copy, log, 0, 0) == 0, f"operation {at}"
        assert repairs.findings_of(copy) == [], f"operation {at}"
        assert [image_of(copy, index) for index in range(12)] == before, f"operation {at}"
        assert in_process(repairs.fsck_repair_and_die, copy, log, 0, 0) == 0
        assert puts.heard(log)[-1] == {"found": 0, "rebuilt": 0, "operations": 0}, "a second run is a no-op"
    assert killed >= len(numbers) - 3, f"{killed} kills at {len(numbers)} operations"
