"""A process that replaces a node, or repairs a store, and is killed on the way."""

from __future__ import annotations

import asyncio
import os
import shutil

from efs.findings import Finding, Kind
from efs.fs import FileSystem
from efs.fsck import Fsck, Options
from efs.fsckrepair import mend_store
from efs.osio import SystemIo
from efs.replace import prepare_node
from efs.storeview import StoreView
from tests.crash.puts import say
from tests.support.faultio import FaultIo


def replace_and_die(root: str, log: str, node: int, kill_at: int, torn_bytes: int) -> None:
    """Replace a node and fill it; killed at operation `kill_at` (0: not at all)."""

    async def run() -> None:
        io = FaultIo()
        if kill_at:
            io.kill_at(kill_at, torn_bytes)
        prepared = prepare_node(io, root, node)
        made = io.operations
        filesystem = await FileSystem.open(root, io=io, maintain=False)
        report = await filesystem.upkeep.sync()
        left = filesystem.upkeep.syncing
        await filesystem.close()
        say(log, resumed=prepared.resumed, rebuilt=report.rebuilt if report is not None else -1, left=list(left),
            made=made, operations=io.operations)

    asyncio.run(run())


def fsck_repair_and_die(root: str, log: str, kill_at: int, torn_bytes: int) -> None:
    """fsck with repair; killed at operation `kill_at` of the mending (0: not at all)."""
    findings, torn = find(root)
    io = FaultIo()
    if kill_at:
        io.kill_at(kill_at, torn_bytes)
    report = asyncio.run(mend_store(io, root, findings, torn)) if findings or torn else None
    say(log, found=len(findings), rebuilt=0 if report is None else report.rebuilt, operations=io.operations)


def find(root: str) -> tuple[list[Finding], bool]:
    """What a deep fsck finds, and whether there are torn entries. A copied store occupies less than its extents: what
    was allocated and never written becomes a hole, so accounts are not compared."""
    with StoreView.open(root, SystemIo()) as view:
        run = Fsck(view, Options(deep=True))
        return [finding for finding in run.run() if finding.kind is not Kind.ACCOUNTING_DRIFT], run.sums.torn > 0


def findings_of(root: str) -> list[str]:
    """What a deep fsck finds, by kind."""
    return [finding.kind.value for finding in find(root)[0]]


def copy_store(source: str, target: str) -> str:
    shutil.rmtree(target, ignore_errors=True)
    assert os.system(f"cp -a --sparse=always {source} {target}") == 0
    return target
