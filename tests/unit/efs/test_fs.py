"""A store on disk: owning it, opening it with nodes moved, lost or damaged, real threads that hang, and the end."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import pytest

from efs.cluster import read_store_config
from efs.errors import EfsError, FormatUnsupported, IdentityMismatch, Locked, OpenFailed, StoreNotFound
from efs.fs import FileSystem
from efs.limits import MIB
from efs.metrics import CounterFile
from efs.osio import SystemIo
from efs.types import GetReport, PutReport
from tests.support.blocks import TINY, Blocks, make_blocks
from tests.support.faultio import FaultIo

pytestmark = pytest.mark.usefixtures("patient")

CAPACITY = 12 * 8 * MIB
DEADLINE_MS = 10_000


@pytest.fixture
def root(tmp_path: Path) -> str:
    FileSystem.init(str(tmp_path / "store"), CAPACITY, extent_bytes=MIB // 2)
    return str(tmp_path / "store")


def node_path(root: str, index: int) -> str:
    return os.path.join(root, "nodes", f"{index:02d}")


@asynccontextmanager
async def opened(root: str, io: FaultIo | None = None, mapped: bool = False) -> AsyncIterator[FileSystem]:
    filesystem = await FileSystem.open(root, io=io, mapped=mapped)
    try:
        yield filesystem
    finally:
        await filesystem.close()


async def put(filesystem: FileSystem, blocks: Blocks, deadline_ms: float = DEADLINE_MS) -> PutReport:
    return await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=deadline_ms)


async def get(filesystem: FileSystem, blocks: Blocks) -> GetReport:
    """Fetch, and check the bytes of every block that is ok. A strict match goes before, so that no node is slower than
    the others because it has to fetch its index and tables first."""
    await filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS)
    count, shape = len(blocks.keys), blocks.shape
    out = bytearray(count * shape.block_bytes)
    report = await filesystem.get_into(blocks.keys, shape, out, deadline_ms=DEADLINE_MS)
    for at, ok in enumerate(report.ok):
        got = b"".join(out[count * offset + at * size : count * offset + (at + 1) * size]
                       for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True))
        assert not ok or got == blocks.block(at)
    return report


@contextmanager
def companion(script: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """A process that says "ready" and ends well when its input ends."""
    process = subprocess.Popen([sys.executable, "-c", script, *arguments], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[3])
    assert process.stdin is not None
    assert process.stdout is not None
    with process:
        assert process.stdout.readline() == "ready\n"
        yield process
        process.stdin.close()
        assert process.wait(30) == 0


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


# -- owning -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("mapped", [False, True])
async def test_blocks_outlive_the_process_that_put_them(tmp_path: Path, durability: str, mapped: bool) -> None:
    root = str(tmp_path / "store")
    FileSystem.init(root, CAPACITY, durability=durability, extent_bytes=MIB // 2)
    blocks = make_blocks(60)
    async with opened(root, mapped=mapped) as filesystem:
        assert await put(filesystem, blocks) == PutReport(60, 0, 0, 0)
        assert (await get(filesystem, blocks)).blocks == 60
    async with opened(root, mapped=mapped) as filesystem:
        assert await filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS) == 60
        report = await get(filesystem, blocks)
        assert (report.blocks, report.rebuilt, report.missing, report.corrupt) == (60, 0, 0, 0)
        assert await put(filesystem, blocks) == PutReport(0, 60, 0, 0)


async def test_a_second_owner_in_this_process_is_refused_with_its_pid(root: str) -> None:
    async with opened(root):
        with pytest.raises(Locked, match=f"process {os.getpid()}"):
            await FileSystem.open(root)
    async with opened(root):
        pass


async def test_a_second_owner_is_refused_with_the_pid_of_the_first_one(root: str) -> None:
    script = """
import asyncio, sys
from efs.fs import FileSystem

async def main():
    filesystem = await FileSystem.open(sys.argv[1])
    print("ready", flush=True)
    sys.stdin.read()
    await filesystem.close()

asyncio.run(main())
"""
    with companion(script, root) as owner, pytest.raises(Locked, match=f"process {owner.pid}"):
        await FileSystem.open(root)
    async with opened(root):
        pass


async def test_there_is_nothing_to_open_where_no_store_was_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound):
        await FileSystem.open(str(tmp_path))
    assert os.listdir(tmp_path) == []


async def test_counters_can_be_read_beside_the_owner(root: str) -> None:
    async with opened(root) as filesystem:
        await put(filesystem, make_blocks(5))
        beside = CounterFile.open(os.path.join(root, "counters"), writable=False)
        assert beside.snapshot()["put_acked"] == 5
        beside.close()


async def test_nodes_say_who_they_are_and_how_full(root: str) -> None:
    config = read_store_config(SystemIo(), root)
    async with opened(root) as filesystem:
        await put(filesystem, make_blocks(20))
        infos = await filesystem.nodes()
    assert [info.node_id for info in infos] == list(config.node_ids)
    assert {(info.state, info.records, info.live_bytes) for info in infos} == {("serving", 20, 20 * TINY.slot_bytes)}


async def test_opening_and_closing_leaves_no_descriptor_and_no_lock(root: str) -> None:
    async with opened(root) as filesystem:
        await put(filesystem, make_blocks(3))
    before = descriptors()
    for _ in range(5):
        async with opened(root) as filesystem:
            await get(filesystem, make_blocks(3))
    assert descriptors() == before


async def test_an_opening_that_is_cancelled_gives_everything_back(root: str) -> None:
    async with opened(root):
        pass
    before = descriptors()
    cancelled = 0
    for turns in (0, 1, 2, 3, 5, 8, 30):
        opening = asyncio.create_task(FileSystem.open(root))
        for _ in range(turns):
            await asyncio.sleep(0)
        opening.cancel()
        try:
            await (await opening).close()
        except asyncio.CancelledError:
            cancelled += 1
        assert descriptors() == before
    assert cancelled > 3
    async with opened(root) as filesystem:
        assert not filesystem.problems


# -- nodes that are not what they should be -----------------------------------------------------------------------


async def refused(root: str, error: type[EfsError], *named: str) -> None:
    """Opening is refused, names these things, and takes nothing with it."""
    before = descriptors()
    with pytest.raises(error) as caught:
        await FileSystem.open(root)
    assert all(name in str(caught.value) for name in named), str(caught.value)
    assert "\n" not in str(caught.value)
    assert descriptors() == before


async def test_swapped_nodes_are_refused_until_they_are_put_right(root: str, tmp_path: Path) -> None:
    def swap() -> None:
        os.rename(node_path(root, 3), tmp_path / "aside")
        os.rename(node_path(root, 8), node_path(root, 3))
        os.rename(tmp_path / "aside", node_path(root, 8))

    blocks = make_blocks(5)
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
    swap()
    await refused(root, IdentityMismatch, "nodes/0")
    swap()
    async with opened(root) as filesystem:
        assert (await get(filesystem, blocks)).blocks == 5


async def test_a_node_of_another_store_is_refused(root: str, tmp_path: Path) -> None:
    FileSystem.init(str(tmp_path / "other"), CAPACITY, extent_bytes=MIB // 2)
    shutil.rmtree(node_path(root, 5))
    shutil.copytree(node_path(str(tmp_path / "other"), 5), node_path(root, 5))
    await refused(root, IdentityMismatch, "nodes/05")


async def test_a_node_of_another_format_is_refused(root: str) -> None:
    file = Path(node_path(root, 2), "node.toml")
    file.write_text(file.read_text().replace("format_version = 1", "format_version = 9"))
    await refused(root, FormatUnsupported, "nodes/02", "9")


async def test_a_node_that_another_process_owns_is_refused(root: str) -> None:
    script = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.flock(file, fcntl.LOCK_EX)
print("ready", flush=True)
sys.stdin.read()
"""
    lock = os.path.join(node_path(root, 6), "lock")
    Path(lock).touch(0o600)
    with companion(script, lock):
        await refused(root, Locked, "nodes/06")
    async with opened(root):
        pass


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
async def test_a_fault_of_this_process_is_not_taken_for_a_lost_node(root: str, code: int) -> None:
    before = descriptors()
    io = FaultIo()
    io.fail("open", code, path="nodes/04/node.toml", times=None)
    with pytest.raises(OpenFailed, match="nodes/04"):
        await FileSystem.open(root, io=io)
    io.verify()
    assert descriptors() == before
    assert io.open_files == 0


@pytest.mark.parametrize("lost", [(4,), (0, 11)])
async def test_absent_nodes_degrade_the_store_and_are_never_made_anew(root: str, tmp_path: Path,
                                                                      lost: Sequence[int]) -> None:
    blocks = make_blocks(40, run=2)
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
    for index in lost:
        os.rename(node_path(root, index), tmp_path / f"away{index}")
    async with opened(root) as filesystem:
        assert sorted(filesystem.problems) == list(lost)
        assert all("is not there" in why for why in filesystem.problems.values())
        assert filesystem.counters.get("nodes_degraded") == len(lost)
        assert [info.node_index for info in await filesystem.nodes() if info.state == "offline"] == list(lost)
        report = await get(filesystem, blocks)
        assert report.blocks == 40
        assert report.rebuilt > 0
        fresh = make_blocks(4, seed=9)
        assert await put(filesystem, fresh) == (PutReport(4, 0, 0, 4) if len(lost) == 1 else PutReport(0, 0, 4, 0))
    assert not any(os.path.exists(node_path(root, index)) for index in lost)
    for index in lost:
        os.rename(tmp_path / f"away{index}", node_path(root, index))
    async with opened(root) as filesystem:
        assert not filesystem.problems
        await filesystem.upkeep.sync()
        assert (await get(filesystem, blocks)).rebuilt == 0


async def test_with_three_nodes_gone_everything_is_a_clean_miss_until_one_returns(root: str, tmp_path: Path) -> None:
    blocks = make_blocks(10)
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
    for index in (1, 5, 9):
        os.rename(node_path(root, index), tmp_path / f"away{index}")
    async with opened(root) as filesystem:
        assert await filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == 0
        report = await get(filesystem, blocks)
        assert (report.blocks, list(report.ok)) == (0, [False] * 10)
    os.rename(tmp_path / "away5", node_path(root, 5))
    async with opened(root) as filesystem:
        assert (await get(filesystem, blocks)).blocks == 10


async def test_an_empty_directory_is_an_unmounted_disk(root: str) -> None:
    shutil.rmtree(node_path(root, 7))
    os.mkdir(node_path(root, 7))
    async with opened(root) as filesystem:
        assert "node.toml" in filesystem.problems[7]
    assert os.listdir(node_path(root, 7)) == []


@pytest.mark.parametrize("what", ["slabs/slab", "node.toml"])
async def test_a_node_with_a_damaged_file_is_left_out(root: str, what: str) -> None:
    blocks = make_blocks(10)
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
    file = Path(node_path(root, 7), what)
    if what == "node.toml":
        file.write_bytes(b"\0" * 100)
    else:
        file.unlink()
    async with opened(root) as filesystem:
        assert 7 in filesystem.problems
        assert (await get(filesystem, blocks)).blocks == 10


# -- damage and failure while it runs -----------------------------------------------------------------------------


def zero(root: str, index: int, payload: bytes) -> None:
    """Zero the one place in a node's slab where these bytes are."""
    path = Path(node_path(root, index), "slabs", "slab")
    data = path.read_bytes()
    assert data.count(payload) == 1
    with open(path, "r+b") as file:
        file.seek(data.index(payload))
        file.write(bytes(len(payload)))


def flip(root: str, index: int, payload: bytes) -> None:
    """Flip a bit of the one place in a node's slab where these bytes are."""
    path = Path(node_path(root, index), "slabs", "slab")
    data = path.read_bytes()
    assert data.count(payload) == 1
    with open(path, "r+b") as file:
        file.seek(data.index(payload) + 3)
        file.write(bytes([payload[3] ^ 16]))


async def test_flipped_bits_on_two_nodes_are_served_from_others_and_mended(root: str) -> None:
    blocks = make_blocks(12)
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
        found = {at: await filesystem.look_up_all(blocks.keys[at], deadline_ms=DEADLINE_MS) for at in (2, 7)}
    for at, shard in ((2, 1), (7, 6)):
        (place,) = (report.node_index for report in found[at] if report.record.shard == shard)
        flip(root, place, blocks.block(at)[shard * 400 : (shard + 1) * 400])
    async with opened(root) as filesystem:
        report = await get(filesystem, blocks)
        assert (report.blocks, report.corrupt, report.rebuilt) == (12, 2, 2)
        await asyncio.wait_for(filesystem.mender.settled(), 10)
        assert filesystem.counters.get("node_mended") == 2
        again = await get(filesystem, blocks)
        assert (again.blocks, again.corrupt, again.rebuilt) == (12, 0, 0)
    async with opened(root) as filesystem:
        for key in blocks.keys:
            reports = await filesystem.look_up_all(key, deadline_ms=DEADLINE_MS)
            assert [report.sound for report in reports] == [True] * 12


async def test_after_power_loss_zeroed_payload_is_neither_served_nor_counted_by_a_put(
    root: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(6)
    lost = str(tmp_path / "after")
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
        nodes = {report.record.shard: report.node_index
                 for report in await filesystem.look_up_all(blocks.keys[4], deadline_ms=DEADLINE_MS)}
        # What the disk holds when the power goes: the index and two of the twelve payloads never reached it whole.
        shutil.copytree(root, lost)
    for shard in (1, 6):
        zero(lost, nodes[shard], blocks.block(4)[shard * 400 : (shard + 1) * 400])
    monkeypatch.setattr("efs.node.machine_boot_id", lambda: "another boot of this machine")
    async with opened(lost) as filesystem:
        assert {info.unverified for info in await filesystem.nodes()} == {6}
        assert await filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == 6
        assert await put(filesystem, blocks) == PutReport(6, 0, 0, 0)
        assert {(info.unverified, info.records) for info in await filesystem.nodes()} == {(0, 6)}
        for key in blocks.keys:
            reports = await filesystem.look_up_all(key, deadline_ms=DEADLINE_MS)
            assert [(report.sound, report.trusted) for report in reports] == [(True, True)] * 12
        assert await put(filesystem, blocks) == PutReport(0, 6, 0, 0)
        assert (await get(filesystem, blocks)).blocks == 6


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
async def test_a_failing_disk_costs_its_shards_and_nothing_else(root: str, code: int) -> None:
    io = FaultIo()
    async with opened(root, io=io) as filesystem:
        first, second = make_blocks(6, seed=1), make_blocks(6, seed=2)
        # The node has an extent by now, so that it does not wait before it tries to take another one.
        assert await put(filesystem, make_blocks(6, seed=3)) == PutReport(6, 0, 0, 0)
        fault = io.fail(("pwrite", "pwritev"), code, path="nodes/03/slabs", times=None)
        assert await put(filesystem, first) == PutReport(6, 0, 0, 6)
        fault.disarm()
        io.verify()
        report = await put(filesystem, second)
        for _ in range(200):
            if report == PutReport(6, 0, 0, 0):
                break
            await asyncio.sleep(0.02)
            await filesystem.drop(second.keys, deadline_ms=DEADLINE_MS)
            report = await put(filesystem, second)
        assert report == PutReport(6, 0, 0, 0), "the node is written to again"
        assert (await get(filesystem, first)).blocks == 6
        assert (await get(filesystem, second)).blocks == 6


async def test_a_write_that_hangs_in_the_kernel_costs_one_shard(root: str) -> None:
    io = FaultIo()
    async with opened(root, io=io) as filesystem:
        blocks = make_blocks(6)
        expected = [blocks.block(at) for at in range(6)]
        gate = io.hang(("pwrite", "pwritev"), path="nodes/03/slabs")
        assert await put(filesystem, blocks) == PutReport(6, 0, 0, 6)
        assert gate.entered.is_set()
        blocks.data[:] = 0
        gate.release()
        for _ in range(500):
            if len(await filesystem.look_up_all(blocks.keys[0], deadline_ms=DEADLINE_MS)) == 12:
                break
            await asyncio.sleep(0.01)
        reports = await filesystem.look_up_all(blocks.keys[0], deadline_ms=DEADLINE_MS)
        assert len(reports) == 12
        assert all(report.sound for report in reports)
        original = Blocks(TINY, blocks.keys, make_blocks(6).data)
        assert [original.block(at) for at in range(6)] == expected
        assert (await get(filesystem, original)).blocks == 6


async def test_two_writes_that_hang_end_the_put_at_its_deadline(root: str) -> None:
    io = FaultIo()
    async with opened(root, io=io) as filesystem:
        blocks = make_blocks(3)
        gates = [io.hang(("pwrite", "pwritev"), path=f"nodes/{index:02d}/slabs") for index in (3, 4)]
        loop = asyncio.get_running_loop()
        began = loop.time()
        assert await put(filesystem, blocks, deadline_ms=300) == PutReport(0, 0, 3, 0)
        assert loop.time() - began < 0.3 + 0.1
        assert all(gate.entered.is_set() for gate in gates)
        for gate in gates:
            gate.release()


async def test_a_process_with_a_hung_node_closes_and_ends(root: str) -> None:
    script = """
import asyncio, sys
from tests.support.faultio import FaultIo
from tests.support.blocks import make_blocks
from efs.fs import FileSystem

async def main():
    io = FaultIo()
    filesystem = await FileSystem.open(sys.argv[1], io=io)
    gate = io.hang(("pwrite", "pwritev"), path="nodes/03/slabs")
    blocks = make_blocks(3)
    report = await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=5000)
    assert report.acked == report.at_risk == 3, report
    assert gate.entered.is_set()
    print("hung", flush=True)

asyncio.run(main())
print("leaving", flush=True)
"""
    process = subprocess.run([sys.executable, "-c", script, root], capture_output=True, text=True, timeout=60,
                             check=False, cwd=Path(__file__).parents[3])
    assert process.returncode == 0, process.stderr
    assert process.stdout.split() == ["hung", "leaving"]


async def test_closing_does_not_wait_for_a_hung_node_for_ever(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.fs.CLOSE_MS", 2_000.0)
    io = FaultIo()
    filesystem = await FileSystem.open(root, io=io)
    gate = io.hang(("pwrite", "pwritev"), path="nodes/03/slabs")
    assert (await put(filesystem, make_blocks(3))).at_risk == 3
    assert gate.entered.is_set()
    await asyncio.wait_for(filesystem.close(), 30)
    with pytest.raises(Locked, match="nodes/03"):
        await FileSystem.open(root)
    gate.release()


async def test_64_writers_of_one_block_leave_one_copy(root: str) -> None:
    async with opened(root) as filesystem:
        blocks = make_blocks(1)
        tasks = [asyncio.create_task(put(filesystem, blocks)) for _ in range(64)]
        await asyncio.sleep(0)
        tasks[31].cancel()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(results.pop(31), asyncio.CancelledError)
        assert all(isinstance(report, PutReport) and report.acked + report.already == 1 for report in results)
        assert {info.records for info in await filesystem.nodes()} == {1}
        assert (await get(filesystem, blocks)).blocks == 1
