"""A purge of a tenant, killed at numbered operations: the next run finishes it, the one after it has nothing to do
(fault 47)."""

from __future__ import annotations

import asyncio
import random
import signal
from pathlib import Path

import pytest

from efs.fs import FileSystem
from efs.limits import MIB, STRIPE_SHARDS
from efs.osio import SystemIo
from efs.tombstones import read_tombstones
from kvstore.tenancy import Purged, purge_tenant
from kvstore.tenants import Tenant, add_tenant, find_tenant
from tests.crash import puts, repairs
from tests.crash.test_put_crash import in_process
from tests.support.blocks import Blocks, make_blocks
from tests.support.faultio import FaultIo
from tests.unit.efs.test_purge import put, readable, tags_on_disk

pytestmark = [pytest.mark.crash, pytest.mark.timeout(600)]

CAPACITY = STRIPE_SHARDS * 8 * MIB
KILLS = 20
"""The numbers are drawn, with a seed; the first and the last operations are always among them."""


def purge_and_die(root: str, log: str, kill_at: int, torn_bytes: int) -> None:
    """Purge tenant acme; killed at operation `kill_at` behind the opening of the store (0: not at all)."""

    async def run() -> None:
        io = FaultIo()
        filesystem = await FileSystem.open(root, io=io, maintain=False)
        opened = io.operations
        if kill_at:
            io.kill_at(opened + kill_at, torn_bytes)
        done = await purge_tenant(filesystem, root, "acme", unless_empty=True, io=io)
        ended = io.operations - opened
        await filesystem.close()
        puts.say(log, dropped=done.report.dropped, generation=done.tenant.generation, operations=ended)

    asyncio.run(run())


def stored_by(tenant: Tenant, seed: int) -> Blocks:
    return make_blocks(40, seed=seed, tenant_tag=tenant.tag)


def make_store(root: str) -> tuple[Blocks, Blocks]:
    """A store of which two tenants have blocks."""

    async def fill() -> tuple[Blocks, Blocks]:
        filesystem = await FileSystem.open(root, maintain=False)
        mine, theirs = (stored_by(add_tenant(root, name), seed) for seed, name in enumerate(("acme", "other")))
        assert [(await put(filesystem, blocks)).acked for blocks in (mine, theirs)] == [40, 40]
        await filesystem.close()
        return mine, theirs

    FileSystem.init(root, CAPACITY, extent_bytes=MIB // 4)
    return asyncio.run(fill())


async def purged_again(root: str, mine: Blocks, theirs: Blocks) -> Purged:
    """The next run; whatever the killed one has left, nothing of the tenant can be read afterwards."""
    filesystem = await FileSystem.open(root, maintain=False)
    done = await purge_tenant(filesystem, root, "acme", unless_empty=True)
    assert not done.report.missing
    assert await readable(filesystem, mine) == 0
    assert await readable(filesystem, theirs) == 40
    await filesystem.close()
    return done


def test_a_purge_killed_on_the_way_is_finished_by_the_next_run(tmp_path: Path) -> None:
    whole, log = str(tmp_path / "whole"), str(tmp_path / "count")
    mine, theirs = make_store(whole)
    tag, others = mine.tenant_tag, theirs.tenant_tag
    assert in_process(purge_and_die, repairs.copy_store(whole, str(tmp_path / "counted")), log, 0, 0) == 0
    (said,) = puts.heard(log)
    operations = said["operations"]
    assert isinstance(operations, int)
    assert (said["dropped"], said["generation"]) == (40 * STRIPE_SHARDS, 1)
    source = random.Random(7)
    ends = {*range(1, 8), operations - 1, operations}
    numbers = sorted(ends | set(source.sample(range(8, operations - 1), KILLS - len(ends))))
    killed = 0
    for at in numbers:
        root = repairs.copy_store(whole, str(tmp_path / "copy"))
        code = in_process(purge_and_die, root, str(tmp_path / f"purge-{at}"), at, source.choice([0, 1, 512]))
        assert code in (0, -signal.SIGKILL), f"operation {at}"
        killed += code == -signal.SIGKILL
        asyncio.run(purged_again(root, mine, theirs))
        tenant = find_tenant(root, "acme")
        assert (tenant.generation, tenant.retired, tenant.purging) == (1, (tag,), False), f"operation {at}"
        assert read_tombstones(SystemIo(), root) == {tag: frozenset()}, f"operation {at}"
        assert set(tags_on_disk(root)) == {others}, f"operation {at}"
        again = asyncio.run(purged_again(root, mine, theirs))
        assert (again.begun, again.report.dropped, again.tenant.generation) == (False, 0, 1), f"operation {at}"
        assert repairs.findings_of(root) == [], f"operation {at}"
    assert killed >= len(numbers) - 2, f"{killed} kills at {len(numbers)} operations"
