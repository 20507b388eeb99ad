"""Purging tenant tags: late puts, nodes that are away, repair, kills on the way, the file of tombstones (fault 47)."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from efs.cluster import read_store_config
from efs.contract import ABSENT, PURGED, TOO_COLD
from efs.errors import CorruptRecord, InvalidArgument, NodeFull, OpenFailed
from efs.fs import FileSystem
from efs.limits import BURY_RECORDS, MAX_TOMBSTONES, MIB, STRIPE_SHARDS
from efs.osio import SystemIo
from efs.storeview import StoreView
from efs.tenantcount import count_tags
from efs.tombstones import TOMBSTONES_FILE, read_tombstones, write_tombstones
from efs.types import PutReport
from tests.support.blocks import Blocks, make_blocks
from tests.support.faultio import FaultIo
from tests.support.nodebox import NODE_INDEX, NodeBox, crash, index_agrees
from tests.support.records import LARGE, make_records

pytestmark = pytest.mark.usefixtures("patient")

CAPACITY = STRIPE_SHARDS * 8 * MIB
DEADLINE_MS = 20_000
ACME, OTHER = b"acme-tag", b"other-tg"


@pytest.fixture
def root(tmp_path: Path) -> str:
    FileSystem.init(str(tmp_path / "store"), CAPACITY, extent_bytes=MIB // 2)
    return str(tmp_path / "store")


@asynccontextmanager
async def opened(root: str, *, io: FaultIo | None = None) -> AsyncIterator[FileSystem]:
    filesystem = await FileSystem.open(root, io=io, maintain=False)
    try:
        yield filesystem
    finally:
        await filesystem.close()


async def put(filesystem: FileSystem, blocks: Blocks) -> PutReport:
    return await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=DEADLINE_MS)


async def readable(filesystem: FileSystem, blocks: Blocks) -> int:
    """How many of the blocks a fetch delivers; their bytes are checked."""
    count, shape = len(blocks.keys), blocks.shape
    out = bytearray(count * shape.block_bytes)
    report = await filesystem.get_into(blocks.keys, shape, out, deadline_ms=DEADLINE_MS)
    for at, ok in enumerate(report.ok):
        got = b"".join(out[count * offset + at * size : count * offset + (at + 1) * size]
                       for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True))
        assert not ok or got == blocks.block(at)
    return sum(report.ok)


def node_path(root: str, index: int) -> str:
    return read_store_config(SystemIo(), root).node_paths[index]


def tags_on_disk(root: str) -> dict[bytes, int]:
    """Bytes by tag, as the tables of the closed store say."""
    with StoreView.open(root) as view:
        return dict(count_tags(view.views, 1_000, lambda: 0.0).live_bytes)


# -- One node --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dies", [False, True])
async def test_what_was_buried_is_gone_from_the_disk_too(tmp_path: Path, dies: bool) -> None:
    box = NodeBox(tmp_path)
    node = await box.open()
    mine, theirs = make_records(700, NODE_INDEX, seed=1, tenant_tag=ACME), make_records(50, NODE_INDEX, seed=2)
    await box.store(node, mine)
    await box.store(node, theirs)
    while await node.bury([ACME], box.soon()):
        pass
    await (crash(node) if dies else node.close())
    node = await box.open()
    assert not (await box.holds(node, mine)).any()
    assert (await box.holds(node, theirs)).all()
    assert index_agrees(node)
    assert set(await node.tenant_bytes(box.soon())) == {bytes(8)}
    await node.close()


async def test_one_call_buries_a_bounded_number_of_records(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.burial.BURY_RECORDS", 100)
    box = NodeBox(tmp_path)
    node = await box.open()
    await box.store(node, make_records(250, NODE_INDEX, tenant_tag=ACME))
    assert BURY_RECORDS > 100
    assert [await node.bury([ACME], box.soon()) for _ in range(4)] == [100, 100, 50, 0]
    await node.close()


async def test_a_put_that_was_under_way_when_its_tag_was_buried_does_not_survive(tmp_path: Path) -> None:
    """Fault 47, late puts: the node's thread hangs in the payload when the purge comes."""
    box = NodeBox(tmp_path)
    io = FaultIo()
    node = await box.open(io=io)
    gate = io.hang(("pwrite", "pwritev"), path="slab")
    late, queued = make_records(20, NODE_INDEX, seed=1, tenant_tag=ACME), make_records(20, NODE_INDEX, seed=2)
    running = asyncio.ensure_future(node.put(late.batch(), box.soon()))
    await asyncio.to_thread(gate.entered.wait, 20)
    others = asyncio.ensure_future(node.put(queued.batch(), box.soon()))
    burying = asyncio.ensure_future(node.bury([ACME], box.soon()))
    await asyncio.sleep(0)
    gate.release()
    outcome = await running
    assert (int(outcome.stored.sum()), outcome.why) == (0, PURGED)
    assert (await others).stored.all()
    assert await burying == 0
    io.verify()
    assert (await node.look_up(late.keys, box.soon())).location.tolist() == [ABSENT] * 20
    assert box.counters.get("node_put_purged") == 20
    await crash(node)
    node = await box.open()
    assert not (await box.holds(node, late)).any()
    assert (await box.holds(node, queued)).all()
    assert index_agrees(node)
    await node.close()


async def test_a_cancelled_put_whose_job_ends_after_the_purge_does_not_survive(tmp_path: Path) -> None:
    """Nobody waits for the put any more, so only the node itself can see to it."""
    box = NodeBox(tmp_path)
    io = FaultIo()
    node = await box.open(io=io)
    gate = io.hang(("pwrite", "pwritev"), path="slab")
    late = make_records(20, NODE_INDEX, tenant_tag=ACME)
    running = asyncio.ensure_future(node.put(late.batch(), box.soon()))
    await asyncio.to_thread(gate.entered.wait, 20)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    burying = asyncio.ensure_future(node.bury([ACME], box.soon()))
    await asyncio.sleep(0)
    gate.release()
    assert await burying == 0
    assert box.counters.get("node_put_records") == 20, "the job did end"
    assert (await node.look_up(late.keys, box.soon())).location.tolist() == [ABSENT] * 20
    await node.close()
    node = await box.open()
    assert not (await box.holds(node, late)).any()
    await node.close()


async def test_a_full_node_refuses_cold_records_as_ever_when_something_is_buried(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    assert await node.bury([ACME], box.soon()) == 0
    reasons: list[str | None] = []
    refused = 0
    for seed in range(12):
        await box.store(node, make_records(100, NODE_INDEX, seed=seed, shape=LARGE), stamp=1_000 + seed)
        try:
            cold = make_records(60, NODE_INDEX, seed=100 + seed, shape=LARGE)
            reasons.append((await node.put(cold.batch(seed), box.soon())).why)
        except NodeFull as error:
            reasons.append(str(error).rpartition("full: ")[2])
            refused += 1
    assert set(reasons) == {None, TOO_COLD}
    assert refused > 0
    await node.settled()
    assert index_agrees(node)
    await node.close()


# -- A store ---------------------------------------------------------------------------------------------------------


async def test_purge_of_one_tenant_leaves_nothing_of_it_and_all_of_the_others(root: str) -> None:
    mine, theirs = make_blocks(60, seed=1, tenant_tag=ACME), make_blocks(30, seed=2, tenant_tag=OTHER)
    async with opened(root) as filesystem:
        assert (await put(filesystem, mine)).acked == 60
        assert (await put(filesystem, theirs)).acked == 30
        assert await readable(filesystem, mine) == 60
        report = await filesystem.purge([ACME])
        assert (report.dropped, report.missing) == (60 * STRIPE_SHARDS, ())
        assert await readable(filesystem, mine) == 0
        assert await readable(filesystem, theirs) == 30
        refused = await put(filesystem, mine)
        assert (refused.failed, refused.why) == (60, PURGED)
        again = await filesystem.purge([ACME])
        assert (again.dropped, again.missing) == (0, ())
        assert filesystem.counters.get("purge_dropped") == 60 * STRIPE_SHARDS
    assert set(tags_on_disk(root)) == {OTHER}
    async with opened(root) as filesystem:
        assert filesystem.purged == {ACME}
        refused = await put(filesystem, mine)
        assert (refused.failed, refused.why) == (60, PURGED), "the tombstone outlives its process"
        assert await readable(filesystem, theirs) == 30


async def test_puts_under_way_on_the_whole_store_do_not_outlive_a_purge(root: str) -> None:
    batches = [make_blocks(20, seed=seed, tenant_tag=ACME) for seed in range(8)]
    other = make_blocks(20, seed=99, tenant_tag=OTHER)
    async with opened(root) as filesystem:
        await put(filesystem, batches[0])
        running = [asyncio.ensure_future(put(filesystem, blocks)) for blocks in (*batches[1:], other)]
        await asyncio.sleep(0)
        report = await filesystem.purge([ACME])
        reports = await asyncio.gather(*running)
        assert not report.missing
        assert reports[-1].acked == 20
        assert [put.why for put in reports[:-1]] == [PURGED] * 7
        assert [await readable(filesystem, blocks) for blocks in batches] == [0] * 8
        assert set((await filesystem.tenant_bytes())[0]) == {OTHER}
    assert set(tags_on_disk(root)) == {OTHER}


async def test_nodes_that_are_away_are_listed_and_drop_everything_before_they_serve(root: str, tmp_path: Path) -> None:
    mine, theirs = make_blocks(40, seed=1, tenant_tag=ACME), make_blocks(10, seed=2, tenant_tag=OTHER)
    async with opened(root) as filesystem:
        await put(filesystem, mine)
        await put(filesystem, theirs)
    away = [3, 8]
    for index in away:
        os.rename(node_path(root, index), tmp_path / f"away-{index}")
    async with opened(root) as filesystem:
        report = await filesystem.purge([ACME])
        assert (report.dropped, report.missing) == (40 * 10, tuple(away))
        assert filesystem.purging == {ACME: frozenset(away)}
    assert read_tombstones(SystemIo(), root) == {ACME: frozenset(away)}
    os.rename(tmp_path / "away-3", node_path(root, 3))
    assert ACME in tags_on_disk(root), "it came back with what was purged"
    async with opened(root) as filesystem:
        assert filesystem.purging == {ACME: frozenset({8})}
        await filesystem.upkeep.sync()
        await filesystem.upkeep.repair()
        assert ACME not in (await filesystem.tenant_bytes())[0]
    os.rename(tmp_path / "away-8", node_path(root, 8))
    async with opened(root) as filesystem:
        assert filesystem.purging == {}
        assert await readable(filesystem, mine) == 0
        assert await readable(filesystem, theirs) == 10
    assert read_tombstones(SystemIo(), root) == {ACME: frozenset()}
    assert set(tags_on_disk(root)) == {OTHER}


async def test_repair_and_sync_bring_nothing_purged_back_even_from_eleven_nodes(root: str, tmp_path: Path) -> None:
    """All nodes are put back as they were before the purge, as from a copy of the disk; one of them is empty."""
    mine = make_blocks(40, seed=1, tenant_tag=ACME)
    async with opened(root) as filesystem:
        await put(filesystem, mine)
    copies = tmp_path / "copies"
    copies.mkdir()
    for index in range(STRIPE_SHARDS):
        shutil.copytree(node_path(root, index), copies / str(index))
    async with opened(root) as filesystem:
        await filesystem.purge([ACME])
    for index in range(STRIPE_SHARDS):
        os.rename(node_path(root, index), tmp_path / f"purged-{index}")
        os.rename(copies / str(index), node_path(root, index))
    assert ACME in tags_on_disk(root)
    async with opened(root) as filesystem:
        assert await readable(filesystem, mine) == 0
        report = await filesystem.upkeep.repair()
        assert (report.rebuilt, report.found) == (0, 0)
    assert tags_on_disk(root) == {}


async def test_a_node_that_refuses_is_left_out_when_it_cannot_drop_what_was_purged(root: str, tmp_path: Path) -> None:
    mine = make_blocks(10, seed=1, tenant_tag=ACME)
    async with opened(root) as filesystem:
        await put(filesystem, mine)
    os.rename(node_path(root, 5), tmp_path / "away")
    async with opened(root) as filesystem:
        await filesystem.purge([ACME])
    os.rename(tmp_path / "away", node_path(root, 5))
    io = FaultIo()
    fault = io.fail(("pwrite", "pwritev"), errno.EIO, path=os.path.join(node_path(root, 5), "slab"), times=None)
    async with opened(root, io=io) as filesystem:
        assert list(filesystem.problems) == [5]
        assert filesystem.purging == {ACME: frozenset({5})}
        assert fault.count > 0
    async with opened(root) as filesystem:
        assert not filesystem.problems
        assert filesystem.purging == {}
    assert tags_on_disk(root) == {}


async def test_a_purge_that_a_failing_node_interrupts_is_finished_later_in_the_same_process(root: str) -> None:
    mine = make_blocks(10, seed=1, tenant_tag=ACME)
    io = FaultIo()
    async with opened(root, io=io) as filesystem:
        await put(filesystem, mine)
        fault = io.fail(("pwrite", "pwritev"), errno.EIO, path=os.path.join(node_path(root, 2), "slab"), times=None)
        report = await filesystem.purge([ACME])
        assert report.missing == (2,)
        assert fault.count > 0
        assert await readable(filesystem, mine) == 0
        fault.disarm()
        again = await filesystem.purge([ACME])
        assert again.missing == ()
        assert filesystem.purging == {}
    assert tags_on_disk(root) == {}


async def test_a_purge_that_cannot_be_noted_changes_nothing(root: str) -> None:
    mine = make_blocks(10, seed=1, tenant_tag=ACME)
    io = FaultIo()
    async with opened(root, io=io) as filesystem:
        await put(filesystem, mine)
        io.fail("rename", errno.EIO, path=TOMBSTONES_FILE)
        with pytest.raises(OpenFailed, match=TOMBSTONES_FILE):
            await filesystem.purge([ACME])
        io.verify()
        assert await readable(filesystem, mine) == 10
        assert (await put(filesystem, make_blocks(2, seed=5, tenant_tag=ACME))).acked == 2
    assert read_tombstones(SystemIo(), root) == {}


async def test_a_sweep_removes_what_a_purge_has_noted_and_not_reached(root: str, tmp_path: Path) -> None:
    mine = make_blocks(10, seed=1, tenant_tag=ACME)
    async with opened(root) as filesystem:
        await put(filesystem, mine)
        with pytest.raises(InvalidArgument, match="tenant tag"):
            await filesystem.purge([bytes(8)])
        report = await filesystem.sweep(purged=[ACME])
        assert report.purged == 10 * STRIPE_SHARDS
        assert await filesystem.upkeep.sweep() != report


# -- The file --------------------------------------------------------------------------------------------------------


async def test_a_node_that_comes_into_a_place_is_told_what_was_purged_before_the_next_sweep(root: str) -> None:
    async with opened(root) as filesystem:
        await filesystem.purge([ACME])
        assert filesystem.purging == {}
        filesystem.note_replaced(5, "a" * 32, "elsewhere")
        assert filesystem.purging == {ACME: frozenset({5})}
        assert (await filesystem.nodes())[5].state == "serving"
        await filesystem.purge([])
        assert filesystem.purging == {}
    assert read_tombstones(SystemIo(), root) == {ACME: frozenset()}


def test_tombstones_are_read_as_they_were_written(tmp_path: Path) -> None:
    root, tombstones = str(tmp_path), {ACME: frozenset({0, 11}), OTHER: frozenset[int]()}
    assert read_tombstones(SystemIo(), root) == {}
    write_tombstones(SystemIo(), root, tombstones)
    assert read_tombstones(SystemIo(), root) == tombstones
    assert os.stat(tmp_path / TOMBSTONES_FILE).st_mode & 0o777 == 0o600
    assert (tmp_path / TOMBSTONES_FILE).read_bytes()[:8] == b"EFSTOMB1"


def test_a_store_remembers_a_bounded_number_of_tombstones(tmp_path: Path) -> None:
    many = {number.to_bytes(8, "big"): frozenset[int]() for number in range(1, MAX_TOMBSTONES + 2)}
    with pytest.raises(InvalidArgument, match=str(MAX_TOMBSTONES)):
        write_tombstones(SystemIo(), str(tmp_path), many)
    assert not (tmp_path / TOMBSTONES_FILE).exists()
    del many[(1).to_bytes(8, "big")]
    write_tombstones(SystemIo(), str(tmp_path), many)
    assert read_tombstones(SystemIo(), str(tmp_path)) == many


async def test_a_damaged_file_of_tombstones_keeps_the_store_shut(root: str) -> None:
    """Read as empty, it would let purged blocks in again."""
    write_tombstones(SystemIo(), root, {ACME: frozenset({4}), OTHER: frozenset[int]()})
    path = Path(root) / TOMBSTONES_FILE
    sound = path.read_bytes()
    damaged = [sound[:-1], sound + b"\0", b"", sound[:16]]
    damaged += [sound[:at] + bytes([sound[at] ^ 1 << at % 8]) + sound[at + 1 :] for at in range(len(sound))]
    for data in damaged:
        path.write_bytes(data)
        with pytest.raises(CorruptRecord, match=TOMBSTONES_FILE):
            read_tombstones(SystemIo(), root)
    with pytest.raises(CorruptRecord, match=TOMBSTONES_FILE):
        await FileSystem.open(root)
    path.write_bytes(sound)
    async with opened(root) as filesystem:
        assert filesystem.purged == {ACME, OTHER}


def test_sizes_are_estimated_when_there_is_no_time_to_count_all(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    FileSystem.init(root, CAPACITY, extent_bytes=MIB // 4)

    async def fill() -> None:
        async with opened(root) as filesystem:
            for seed in range(4):
                await put(filesystem, replace(make_blocks(400, seed=seed), tenant_tag=ACME))

    asyncio.run(fill())
    with StoreView.open(root) as view:
        moments = iter(range(10_000))
        whole = count_tags(view.views, 1_000, lambda: 0.0)
        part = count_tags(view.views, 150, lambda: float(next(moments)))
    assert whole.covered == 1.0
    assert 0.1 < part.covered < 1.0
    assert part.live_bytes[ACME] == pytest.approx(whole.live_bytes[ACME], rel=0.5)
