"""A directory node as files and as a process's property: identity, lock, modes, closing and opening again."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from efs.errors import (
    CorruptRecord,
    EfsError,
    FormatUnsupported,
    IdentityMismatch,
    InvalidArgument,
    Locked,
    OpenFailed,
    StoreExists,
)
from efs.limits import KIB, MIB, MIN_EXTENT_BYTES, MIN_EXTENTS_PER_NODE, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import GENERATION_BITS, NodePlace, plan_node, read_boot, read_config, written_pid
from efs.osio import SystemIo
from tests.support.faultio import FaultIo
from tests.support.nodebox import NODE_ID, NODE_INDEX, PLACE, NodeBox, index_agrees
from tests.support.records import make_records


@pytest.fixture
def box(tmp_path: Path) -> NodeBox:
    return NodeBox(tmp_path)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# -- Sizes ----------------------------------------------------------------------------------------------------------


def test_a_large_node_gets_large_extents() -> None:
    plan = plan_node(10_000 * MIB)
    assert plan.extent_bytes == 64 * MIB
    assert plan.index_bytes == 250 * MIB
    used = plan.extents * plan.extent_bytes + plan.index_bytes + plan.stamp_bytes
    assert 10_000 * MIB - 65 * MIB < used < 10_000 * MIB


def test_a_small_node_gets_extents_small_enough_for_sixteen() -> None:
    plan = plan_node(40 * MIB)
    assert plan.extent_bytes == 2 * MIB
    assert plan.extents >= 16


def test_a_node_that_is_too_small_is_refused_with_the_smallest_capacity() -> None:
    with pytest.raises(InvalidArgument) as refusal:
        plan_node(2 * MIB)
    least = int(str(refusal.value).split("smallest capacity is ")[1].split()[0])
    assert str(least * STRIPE_SHARDS) in str(refusal.value)
    plan = plan_node(least)
    assert (plan.extents, plan.extent_bytes) == (MIN_EXTENTS_PER_NODE, MIN_EXTENT_BYTES)
    with pytest.raises(InvalidArgument):
        plan_node(least - 1)


@pytest.mark.parametrize(("extent_bytes", "index_bytes"), [(100 * KIB, None), (MIB + 1, None), (None, 100 * KIB)])
def test_sizes_out_of_range_are_refused(extent_bytes: int | None, index_bytes: int | None) -> None:
    with pytest.raises(InvalidArgument):
        plan_node(100 * MIB, extent_bytes, index_bytes)


# -- Making ---------------------------------------------------------------------------------------------------------


async def test_everything_is_private(box: NodeBox) -> None:
    node = await box.open()
    await box.store(node, make_records(10, NODE_INDEX), stamp=1)
    await node.close()
    assert stat.S_IMODE(os.lstat(box.path).st_mode) == 0o700
    seen = set()
    for directory, names, files in os.walk(box.path):
        for name in names:
            assert stat.S_IMODE(os.lstat(os.path.join(directory, name)).st_mode) == 0o700, name
        for name in files:
            assert stat.S_IMODE(os.lstat(os.path.join(directory, name)).st_mode) == 0o600, name
            seen.add(os.path.relpath(os.path.join(directory, name), box.path))
    assert seen == {"node.toml", "boot", "lock", "slabs/slab", "index/data.mdb", "index/lock.mdb", "stamps/00000000"}


def test_a_node_is_not_made_in_a_directory_that_holds_something(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir()
    (tmp_path / "node" / "precious").write_text("data")
    with pytest.raises(StoreExists, match="node"):
        NodeBox(tmp_path)
    assert os.listdir(tmp_path / "node") == ["precious"]


def test_a_node_is_made_in_an_empty_directory(tmp_path: Path) -> None:
    (tmp_path / "node").mkdir(0o700)
    assert read_config(SystemIo(), NodeBox(tmp_path).path).node_id == NODE_ID


def test_a_node_is_not_made_through_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "node").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OpenFailed, match="node"):
        NodeBox(tmp_path)
    assert os.listdir(tmp_path / "elsewhere") == []


LINKED = ["node.toml", "boot", "lock", "slabs", "slabs/slab", "index", "index/data.mdb", "stamps"]


@pytest.mark.parametrize("name", LINKED)
async def test_a_symbolic_link_in_a_node_directory_is_refused_by_name(
    box: NodeBox, tmp_path: Path, name: str
) -> None:
    node = await box.open()
    await node.close()
    original = os.path.join(box.path, name)
    os.rename(original, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", original)
    before = descriptors()
    with pytest.raises(OpenFailed, match=name):
        await box.open()
    assert descriptors() == before


async def test_an_interrupted_creation_is_no_node(box: NodeBox, tmp_path: Path) -> None:
    io = FaultIo()
    DirectoryNode.create(io, str(tmp_path / "whole"), PLACE, NODE_ID, 8 * MIB, boot_id="boot-1")
    io_names = io.names()
    for number in range(len(io_names)):
        path = str(tmp_path / f"cut-{number}")
        io = FaultIo()
        io.fail(tuple(set(io_names)), errno.EIO, skip=number)
        before = descriptors()
        try:
            DirectoryNode.create(io, path, PLACE, NODE_ID, 8 * MIB, boot_id="boot-1")
        except (EfsError, OSError):
            assert descriptors() == before
            if not os.path.exists(os.path.join(path, "node.toml")):
                with pytest.raises(OpenFailed, match=f"cut-{number}"):
                    read_config(SystemIo(), path)
        else:
            pytest.fail(f"operation {number} failed without being noticed")


# -- Identity -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expected", "message"),
    [
        (NodePlace("c" * 32, 0, NODE_INDEX + 1), "node index is 5, expected 6"),
        (NodePlace("c" * 32, 3, NODE_INDEX), "group is 0, expected 3"),
        (NodePlace("b" * 32, 0, NODE_INDEX), f"cluster id is {'c' * 32}, expected {'b' * 32}"),
    ],
)
async def test_a_directory_that_belongs_elsewhere_is_refused(box: NodeBox, expected: NodePlace, message: str) -> None:
    before = descriptors()
    with pytest.raises(IdentityMismatch, match=message):
        await box.open(expected)
    assert descriptors() == before
    node = await box.open()
    await node.close()


async def test_the_slab_of_another_node_is_refused(box: NodeBox, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = NodeBox(tmp_path / "other", node_id="e" * 32)
    for each in (box, other):
        node = await each.open()
        await box.store(node, make_records(10, NODE_INDEX))
        await node.close()
    shutil.copy(other.slab, box.slab)
    with pytest.raises(IdentityMismatch, match=f"node id is {'e' * 32}, expected {'d' * 32}"):
        await box.open()


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("format_version = 1", "format_version = 2", FormatUnsupported),
        ("format_version = 1", "", FormatUnsupported),
        ("extents = ", "extents = -", CorruptRecord),
        ('node_id = "d', 'node_id = "x', CorruptRecord),
        ("group = 0", 'group = "zero"', CorruptRecord),
        ("group = 0", "group = = 0", CorruptRecord),
    ],
)
async def test_a_node_file_that_cannot_be_used_is_refused_by_name(
    box: NodeBox, old: str, new: str, error: type[EfsError]
) -> None:
    file = Path(box.path) / "node.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(error, match=r"node\.toml"):
        await box.open()


@pytest.mark.parametrize("gone", ["", "node.toml", "slabs/slab", "slabs"])
async def test_what_is_absent_is_named(box: NodeBox, gone: str) -> None:
    path = os.path.join(box.path, gone).rstrip("/")
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        os.unlink(path)
    before = descriptors()
    with pytest.raises(OpenFailed, match=gone or "node"):
        await box.open()
    assert descriptors() == before


# -- Ownership ------------------------------------------------------------------------------------------------------


async def test_a_second_owner_in_this_process_is_refused_with_the_pid(box: NodeBox) -> None:
    node = await box.open()
    with pytest.raises(Locked, match=f"process {os.getpid()}") as refusal:
        await box.open()
    assert refusal.value.pid == os.getpid()
    await node.close()
    again = await box.open()
    await again.close()


OWNER = """
import asyncio, sys
from efs.clock import SystemClock
from efs.node import DirectoryNode
from efs.nodedir import NodePlace
from efs.osio import SystemIo

async def main():
    node = await DirectoryNode.open(sys.argv[1], NodePlace("c" * 32, 0, 5), SystemIo(), SystemClock())
    print("owned", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await node.close()

asyncio.run(main())
"""


async def test_a_second_owner_is_refused_with_the_pid_of_the_first(box: NodeBox) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, box.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True)
    with owner:
        assert owner.stdout is not None
        assert owner.stdin is not None
        assert owner.stdout.readline() == "owned\n"
        with pytest.raises(Locked) as refusal:
            await box.open()
        assert refusal.value.pid == owner.pid == written_pid(SystemIo(), box.path)
        owner.stdin.close()
        assert owner.wait(timeout=30) == 0
    node = await box.open()
    assert written_pid(SystemIo(), box.path) == os.getpid()
    await node.close()


async def test_a_killed_owner_leaves_no_lock(box: NodeBox) -> None:
    owner = subprocess.Popen([sys.executable, "-c", OWNER, box.path], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                             text=True)
    with owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == "owned\n"
        owner.kill()
    node = await box.open()
    await node.close()


# -- Opening, closing, opening again --------------------------------------------------------------------------------


async def test_records_stamps_and_identity_survive_closing(box: NodeBox) -> None:
    records = make_records(300, NODE_INDEX)
    node = await box.open()
    before = await box.store(node, records, stamp=12_345)
    await node.close()
    node = await box.open()
    assert (await box.holds(node, records)).all()
    after = await node.look_up(records.keys, box.soon())
    assert (after.generation == before.generation).all()
    assert after.trusted.all()
    assert {record.stamp for record in (await node.list(None, 1_000, box.soon())).records} == {12_345}
    assert box.counters.get("node_index_rebuilt") == box.counters.get("node_index_mismatch") == 0
    assert index_agrees(node)
    await node.close()


async def test_generations_rise_over_openings(box: NodeBox) -> None:
    highest = 0
    for seed in range(3):
        node = await box.open()
        table = await box.store(node, make_records(5, NODE_INDEX, seed=seed))
        assert int(table.generation.min()) > highest
        assert int(table.generation.max()) >> GENERATION_BITS == seed + 1
        highest = int(table.generation.max())
        await node.close()


async def test_the_boot_record_is_clean_only_while_the_node_is_closed(box: NodeBox) -> None:
    node = await box.open()
    opened = read_boot(SystemIo(), box.path)
    assert opened is not None
    assert (opened.clean, opened.boots, opened.epoch, opened.boot_id) == (False, 1, 0, "boot-1")
    await node.close()
    closed = read_boot(SystemIo(), box.path)
    assert closed is not None
    assert (closed.clean, closed.boots) == (True, 1)


async def test_a_clean_node_opens_on_another_boot_without_distrust(box: NodeBox) -> None:
    records = make_records(20, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await node.close()
    box.boot_id = "boot-2"
    node = await box.open()
    assert (await node.look_up(records.keys, box.soon())).trusted.all()
    assert box.counters.get("node_index_rebuilt") == 0
    await node.close()


async def test_a_failed_opening_leaves_no_descriptor_and_no_lock(box: NodeBox) -> None:
    node = await box.open()
    await box.store(node, make_records(10, NODE_INDEX))
    await node.close()
    io = FaultIo()
    await (await box.open(io=io)).close()
    failing = ("open", "preadv", "pwrite", "fsync", "rename", "size")
    steps = io.names()[: io.names().index("index_commit") if "index_commit" in io.names() else None]
    attempts = sum(name in failing for name in steps)
    assert attempts > 20
    refused = 0
    before = descriptors()
    for skip in range(attempts):
        io = FaultIo()
        fault = io.fail(failing, errno.EMFILE, skip=skip)
        opened = (await asyncio.gather(box.open(io=io), return_exceptions=True))[0]
        if isinstance(opened, DirectoryNode):
            await opened.close()
        else:
            assert isinstance(opened, OpenFailed)
            assert box.path in str(opened)
            refused += 1
        assert fault.count == 1
        assert descriptors() == before, io.log[-1]
    assert refused > 10
    node = await box.open()
    assert (await box.holds(node, make_records(10, NODE_INDEX))).all()
    await node.close()


async def test_a_node_without_counters_given_counts_in_its_own_file(box: NodeBox) -> None:
    node = await DirectoryNode.open(box.path, PLACE, SystemIo(), box.clock, boot_id="boot-1")
    await box.store(node, make_records(7, NODE_INDEX))
    await node.close()
    counters = CounterFile.open(os.path.join(box.path, "counters"), writable=False)
    assert counters.get("node_put_records") == 7
    counters.close()


async def test_an_unknown_durability_is_refused(box: NodeBox) -> None:
    box.durability = "maybe"  # type: ignore[assignment]
    with pytest.raises(InvalidArgument, match="durability is 'maybe'"):
        await box.open()


async def test_closing_without_any_change_keeps_everything(box: NodeBox) -> None:
    records = make_records(30, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await node.close()
    for _ in range(3):
        await (await box.open()).close()
    node = await box.open()
    assert (await box.holds(node, records)).all()
    await node.close()


async def test_stamps_reach_their_files_without_closing(box: NodeBox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.node.STAMP_FLUSH_MS", 1.0)
    records = make_records(5, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    node.touch(records.keys, table.location, 777)
    file = Path(box.path) / "stamps" / "00000000"
    deadline = asyncio.get_running_loop().time() + 20
    while not file.exists() or np.frombuffer(file.read_bytes()[32:52], "<u4").tolist() != [777] * 5:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0)
    await node.close()
