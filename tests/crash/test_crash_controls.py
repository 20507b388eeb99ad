"""The crash images would show it: logs in which one rule of `efs/writejob.py` or `efs/recovery.py` is broken fail.

Each control takes the log of a sound life, which passes, breaks the order of one step in it or takes a sync away, and
looks for the failure that must follow. Without these a harness that looks at nothing would pass as well (I7).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from efs.node import Durability
from tests.crash.lives import some
from tests.support.crashio.crashes import Choice, Crash, distinct, kills, power_losses
from tests.support.crashio.disk import Disk
from tests.support.crashio.life import Life
from tests.support.crashio.log import Kind, Op
from tests.support.crashio.oracle import Oracle

pytestmark = pytest.mark.crash

CHOICE = Choice(cuts=0, losses=6)
WRONG_BYTE = "a wrong byte in a record that is trusted"
Crashes = Callable[[Disk, list[Op], Choice], Iterator[Crash]]
Break = Callable[[list[Op]], list[Op]]


async def short_life(path: Path, durability: Durability) -> Life:
    """One put on a node with an extent, and what comes before and after."""
    life = Life.create(path, durability)
    await life.open()
    await life.put(some(2, 1), 5)
    await life.close()
    life.begin_here()
    await life.open()
    await life.put(some(2, 2), 6)
    await life.drop(some(2, 1), dropped=2)
    await life.put(some(2, 3), 7)
    await life.close()
    return life


async def failures(life: Life, place: Path, crashes: Crashes, wanted: str) -> list[str]:
    """What the oracle says, up to the first failure that is wanted."""
    oracle = Oracle(life, place)
    found: list[str] = []
    for one in distinct(crashes(life.before, life.ops, CHOICE), life.promises()):
        try:
            await oracle.judge(one)
        except AssertionError as error:
            found.append(str(error))
            if wanted in found[-1]:
                return found
    assert oracle.looked + len(found) > 10
    return found


def catches(wanted: str, broken: Break, steps: str, durability: Durability, crashes: Crashes, place: Path) -> bool:
    """Whether the oracle says what is wanted of a life in which the steps of this name are broken, after it found
    nothing wrong with the life as it was."""
    async def run() -> bool:
        life = await short_life(place, durability)
        assert await failures(life, place, crashes, wanted) == []
        changed = 0
        for step in life.steps:
            assert step.ended is not None
            ops = life.ops[step.began : step.ended]
            if step.name == steps and broken(ops) != ops:
                life.ops[step.began : step.ended] = broken(ops)
                changed += 1
        assert changed, "nothing was broken"
        return any(wanted in failure for failure in await failures(life, place, crashes, wanted))

    return asyncio.run(run())


def _is_index(op: Op) -> bool:
    return op.kind is Kind.WRITE and op.path.endswith("data.mdb")


def _is_slab(op: Op) -> bool:
    return op.kind is Kind.WRITE and op.path.endswith("slab")


def index_first(ops: list[Op]) -> list[Op]:
    """The index is committed before anything else is written."""
    return [*filter(_is_index, ops), *(op for op in ops if not _is_index(op))]


def entries_first(ops: list[Op]) -> list[Op]:
    """The table entries are written before the payload: the last two writes of the slab change places."""
    writes = [at for at, op in enumerate(ops) if _is_slab(op)]
    changed = list(ops)
    if len(writes) >= 2:
        changed[writes[-2]], changed[writes[-1]] = ops[writes[-1]], ops[writes[-2]]
    return changed


def without(kind: Kind, path: str) -> Break:
    """Operations of a kind on a path do not happen. Their places stay."""
    def broken(ops: list[Op]) -> list[Op]:
        return [replace(op, kind=Kind.SYNC, inode=-2, path="") if op.kind is kind and op.path.endswith(path) else op
                for op in ops]

    return broken


@pytest.mark.parametrize("durability", ["process", "power"])
def test_an_index_committed_before_its_data_is_caught(place: Path, durability: Durability) -> None:
    assert catches("the index is ahead of data", index_first, "put", durability, kills, place)


@pytest.mark.parametrize("durability", ["process", "power"])
def test_an_entry_written_before_its_payload_is_caught(place: Path, durability: Durability) -> None:
    assert catches(WRONG_BYTE, entries_first, "put", durability, kills, place)


def test_a_missing_sync_of_the_slab_is_caught(place: Path) -> None:
    assert catches("records are lost", without(Kind.SYNC, "slab"), "put", "power", power_losses, place)


def test_a_closing_that_does_not_sync_the_slab_is_caught(place: Path) -> None:
    assert catches("records are lost", without(Kind.SYNC, "slab"), "close", "process", power_losses, place)


def test_a_drop_that_does_not_reach_the_table_is_caught(place: Path) -> None:
    assert catches("records came back", without(Kind.WRITE, "slab"), "drop", "process", kills, place)


def test_an_opening_that_is_not_marked_is_caught(place: Path) -> None:
    """A node whose boot record says that it was closed is taken at its word, also after power loss."""
    assert catches(WRONG_BYTE, without(Kind.RENAME, "boot.new"), "open", "process", power_losses, place)


def test_a_boot_record_whose_directory_is_not_synced_is_caught(place: Path) -> None:
    assert catches(WRONG_BYTE, without(Kind.SYNC_DIRECTORY, "node"), "open", "process", power_losses, place)
