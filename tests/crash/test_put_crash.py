"""A writer is killed at every numbered operation of a put, and the store is opened again: with its indexes, and
without.

The oracle (faults 1, 2, 5 and 7): what was acknowledged reads; every other block is whole or a miss; no byte is ever
wrong; the next writer of the same keys is not hindered. The nodes' threads interleave, so operation n is not the same
one in every run; every number is met once in each of two states of the store.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import shutil
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from efs.fs import FileSystem
from efs.limits import MIB
from tests.crash import puts

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

CAPACITY = 12 * 8 * MIB
PROCESS_SECONDS = 60


def in_process(work: Callable[..., None], *arguments: Any) -> int:
    """Run work in a process of its own; returns its exit code (negative: the signal that ended it)."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.crash.puts"])
    process = context.Process(target=work, args=arguments)
    process.start()
    process.join(PROCESS_SECONDS)
    if process.is_alive():
        process.kill()
        process.join()
        pytest.fail(f"{work.__name__}{arguments} did not end within {PROCESS_SECONDS} s")
    code = process.exitcode
    process.close()
    assert code is not None
    return code


def put_whole(root: str, log: Path, number: int) -> list[str]:
    """A put that nobody disturbs; returns the names of its operations."""
    assert in_process(puts.put_and_die, root, str(log), number, 0, 0) == 0
    report, operations = puts.heard(str(log))
    assert report["failed"] == 0
    names = operations["names"]
    assert isinstance(names, list)
    return names


async def check(root: str, acked: Sequence[int], tried: int) -> None:
    """Open and read everything that was acknowledged and the last try, then the same with the indexes lost."""
    first: list[bool] = []
    for lost in (False, True):
        if lost:
            for index in range(12):
                shutil.rmtree(os.path.join(root, "nodes", f"{index:02d}", "index"))
        filesystem = await FileSystem.open(root)
        assert not filesystem.problems, filesystem.problems
        right, report = await puts.read(filesystem, [*acked, tried])
        known = len(acked) * puts.BLOCKS_PER_PUT
        assert all(report.ok[:known]), f"an acknowledged block is lost: {report}"
        assert all(fine for found, fine in zip(report.ok, right, strict=True) if found), "a wrong byte"
        assert report.corrupt == 0, "a torn record was taken for a good one"
        first = first or list(report.ok)
        if lost:
            # A table may be newer than the index, never the other way round.
            assert all(now for before, now in zip(first, report.ok, strict=True) if before)
        await filesystem.close()


async def put_again(root: str, number: int) -> None:
    """A writer that died does not hinder the next writer of the same keys."""
    filesystem = await FileSystem.open(root)
    blocks = puts.blocks_of(number)
    report = await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=puts.DEADLINE_MS)
    assert report.acked + report.already == puts.BLOCKS_PER_PUT
    await filesystem.close()


def kill_everywhere(tmp_path: Path, names: Sequence[str], store_for: Callable[[int], str], acked: list[int],
                    seed: int) -> None:
    """A kill at each operation number, a little beyond them too; `acked` grows by what was acknowledged."""
    source = random.Random(seed)
    killed = 0
    for at in range(1, len(names) + 3):
        root, log = store_for(at), str(tmp_path / f"put-{at}")
        code = in_process(puts.put_and_die, root, log, at, at, source.choice([0, 1, 512, 4_096]))
        assert code in (0, -signal.SIGKILL), f"operation {at}, seed {seed}"
        killed += code == -signal.SIGKILL
        asyncio.run(check(root, acked[-3:], at))
        said = puts.heard(log)
        if said and said[0]["acked"] == puts.BLOCKS_PER_PUT:
            acked.append(at)
        if at % 8 == 0:
            asyncio.run(put_again(root, at))
            acked.append(at)
    assert killed >= len(names) - 3, f"{killed} kills at {len(names)} operations"


def test_the_first_put_of_a_store_killed_at_every_operation(tmp_path: Path) -> None:
    fresh = str(tmp_path / "fresh")
    FileSystem.init(fresh, CAPACITY, extent_bytes=MIB // 4)

    def copy(at: int) -> str:
        shutil.rmtree(tmp_path / f"copy-{at - 1}", ignore_errors=True)
        target = str(tmp_path / f"copy-{at}")
        assert os.system(f"cp -a --sparse=always {fresh} {target}") == 0
        return target

    names = put_whole(copy(0), tmp_path / "count", 0)
    assert {"allocate", "index_commit"} <= set(names)
    forgotten: list[int] = []

    def start_over(at: int) -> str:
        forgotten.clear()
        return copy(at)

    kill_everywhere(tmp_path, names, start_over, forgotten, seed=11)


def test_a_later_put_killed_at_every_operation(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    FileSystem.init(root, CAPACITY, extent_bytes=MIB // 4)
    put_whole(root, tmp_path / "first", 0)
    names = put_whole(root, tmp_path / "count", 1_000)
    assert names.count("pwrite") + names.count("pwritev") >= 24
    assert names.count("index_commit") == 12
    kill_everywhere(tmp_path, names, lambda at: root, [0, 1_000], seed=12)
