"""A node is killed (SIGKILL, a real process) at every numbered operation of the disk, with and without a torn write."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from efs.clock import stamp_of
from efs.node import DirectoryNode
from efs.nodedir import index_path
from tests.crash.nodekills import CAPACITY_BYTES, COLD, DROPPED, LARGER, LATER, SMALLER, STEPS
from tests.support.nodebox import NodeBox, index_agrees
from tests.support.records import Records

pytestmark = pytest.mark.crash


@pytest.fixture(scope="module")
def wrecks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Path]]:
    """The directories that the killed processes left, in order of the operation at which they died."""
    base = tmp_path_factory.mktemp("wrecks")
    run = subprocess.run([sys.executable, "-m", "tests.crash.nodekills", str(base)], capture_output=True, text=True,
                         timeout=110)
    assert run.returncode == 0, run.stderr
    lines = [tuple(map(int, line.split())) for line in run.stdout.splitlines()]
    signals = Counter(signal_number for _, _, signal_number in lines)
    # Two threads do not always take the same number of steps, so the last few numbers may not be reached.
    assert signals[signal.SIGKILL] >= len(lines) - 4
    assert len(lines) > 60
    yield [base / f"{number}-{torn_bytes}" for number, torn_bytes, signal_number in lines if signal_number]
    shutil.rmtree(base)


def acked(path: Path) -> set[str]:
    file = path / "acked"
    return set(file.read_text().split()) if file.exists() else set()


def step_was_begun(done: set[str], step: str) -> bool:
    """Whether everything before this step had returned, so that it may have happened in part."""
    return set(STEPS[: STEPS.index(step)]) <= done


async def check(box: NodeBox, node: DirectoryNode, done: set[str]) -> None:
    """Acknowledged records are there, others whole or absent, and all accounts agree. `holds` fails on a wrong byte."""
    held = {name: await box.holds(node, records) for name, records in
            {"cold": COLD, "larger": LARGER, "smaller": SMALLER, "later": LATER}.items()}
    for step, name in (("smaller", "smaller"), ("later", "later"), ("again", "larger")):
        if step in done:
            assert held[name].all(), step
    if "cold" in done and not step_was_begun(done, "later"):
        assert held["cold"].all()
    if "larger" in done:
        assert held["larger"][DROPPED:].all()
        if not step_was_begun(done, "drop"):
            assert held["larger"].all()
    if "drop" in done and not step_was_begun(done, "again"):
        assert not held["larger"][:DROPPED].any()
    records = (await node.info(box.soon())).records
    assert records == sum(int(np.count_nonzero(row)) for row in held.values())
    assert index_agrees(node)
    assert box.du() <= CAPACITY_BYTES


async def survives(path: Path, lose_index: bool, boot_id: str) -> set[str]:
    """Open what is left of one killed node, check it, use it, and see that a second opening has nothing left to do."""
    box, done = NodeBox.at(path, boot_id=boot_id), acked(path)
    if lose_index:
        shutil.rmtree(index_path(box.path), ignore_errors=True)
    node = await box.open()
    await check(box, node, done)
    if boot_id != "boot-1" and not await everything_verifies(box, node, (COLD, LARGER, SMALLER, LATER)):
        pytest.fail("a record of a killed process was not sound")
    for records in (LARGER, SMALLER):
        # Used now: what the killed process stored last counts as used when it arrived.
        await box.store(node, records, stamp=stamp_of(box.clock.wall()))
    await node.close()
    node = await box.open()
    counted = {name: count for name, count in box.counters.snapshot().items() if count}
    assert not counted, "the second opening had something to do"
    assert (await box.holds(node, LARGER)).all()
    assert index_agrees(node)
    await node.close()
    return done


async def everything_verifies(box: NodeBox, node: DirectoryNode, stored: tuple[Records, ...]) -> bool:
    results = []
    for records in stored:
        for row in np.flatnonzero((await node.look_up(records.keys, box.soon())).location >= 0).tolist():
            results.append(await node.verify(records.keys[row], records.digests[row], box.soon()))
    return all(results)


@pytest.mark.timeout(300)
def test_a_node_killed_at_any_operation_opens_with_what_it_acknowledged(wrecks: list[Path], tmp_path: Path) -> None:
    seen: Counter[str] = Counter()
    for wreck in wrecks:
        copy = tmp_path / wreck.name
        shutil.copytree(wreck, copy)
        seen.update(asyncio.run(survives(copy, lose_index=False, boot_id="boot-1")))
        shutil.rmtree(copy)
    assert set(seen) >= set(STEPS) - {"closed"}, "no kill came after some step"


@pytest.mark.timeout(300)
def test_a_node_killed_at_any_operation_opens_without_its_index(wrecks: list[Path], tmp_path: Path) -> None:
    for wreck in wrecks[::3]:
        copy = tmp_path / wreck.name
        shutil.copytree(wreck, copy)
        asyncio.run(survives(copy, lose_index=True, boot_id="boot-1"))
        shutil.rmtree(copy)


@pytest.mark.timeout(300)
def test_a_node_killed_at_any_operation_opens_after_an_unclean_boot(wrecks: list[Path], tmp_path: Path) -> None:
    for wreck in wrecks[1::3]:
        copy = tmp_path / wreck.name
        shutil.copytree(wreck, copy)
        asyncio.run(survives(copy, lose_index=False, boot_id="boot-2"))
        shutil.rmtree(copy)
