"""Two EC groups of real server processes: one is added, blocks are found where they were and then where they belong,
and one that is killed costs its own blocks only."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from efs.cluster import read_store_config
from efs.clusterfile import ClusterConfig, add_group, read_cluster, write_cluster
from efs.clusterfs import Care, open_cluster
from efs.etcd import EtcdStore
from efs.groups import GroupedFileSystem
from efs.osio import Io, SystemIo
from efs.ownership import owner_table
from efs.placement import placement_group
from efs.tombstones import read_tombstones
from gdr.counters import Counters
from gdr.pages import PagePool
from gdr.writeback import WriteBack
from kvstore.cli import cluster_cmd
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from kvstore.store import KVStore
from tests.servers.test_cluster import BLOCKS, DEADLINE_MS, SHAPE, all_hit, fetch
from tests.support.blocks import Blocks, make_blocks
from tests.support.cli import Outcome, run, run_process
from tests.support.etcdprocess import etcd_process, map_of
from tests.support.fakedevice import FakeDevice
from tests.support.groupbench import MovedWall
from tests.support.servers import EXTENT_BYTES, NODE_CAPACITY_BYTES, ServedCluster, ServerProcess, served_cluster
from tests.support.waiting import came_true, eventually
from tools.etcdprocess import EtcdProcess

RUN = 8
CAPACITY = str(12 * NODE_CAPACITY_BYTES)


@dataclass(slots=True)
class TwoGroups:
    """A cluster, and the processes of the group that is added to it: nodes 0 to 10, and node 11."""

    cluster: ServedCluster
    root: Path
    processes: list[ServerProcess]

    def words(self, where: str) -> tuple[str, ...]:
        addresses = [process.address for process in self.processes for _ in process.paths]
        given = [word for address in addresses for word in ("--address", address)]
        return ("--json", "cluster", "add-group", where, str(self.root), "--capacity", CAPACITY, "--extent-bytes",
                str(EXTENT_BYTES), *given)

    def add(self, where: str) -> Outcome:
        return run_process(*self.words(where))

    def start(self) -> None:
        for process in self.processes:
            process.begin()
        for process in self.processes:
            process.await_ready()

    def kill(self) -> None:
        for process in self.processes:
            if process.running:
                process.signal(signal.SIGCONT)
                process.kill()


@contextmanager
def two_groups(*more: str) -> Iterator[TwoGroups]:
    with served_cluster([range(11), [11]], *more) as cluster:
        root = cluster.root.parent / "g"
        paths = [str(root / "nodes" / f"{index:02d}") for index in range(12)]
        made = TwoGroups(cluster, root, [ServerProcess(paths[:11], f"unix:{cluster.root.parent}/a", *more),
                                         ServerProcess(paths[11:], f"unix:{cluster.root.parent}/b", *more)])
        try:
            yield made
        finally:
            made.kill()


@pytest.fixture
def groups() -> Iterator[TwoGroups]:
    with two_groups() as made:
        yield made


async def added(groups: TwoGroups) -> None:
    """The group, with its servers, in the file."""
    refused = await asyncio.to_thread(groups.add, groups.cluster.file)
    assert (refused.code, refused.document()["changed"], len(refused.document()["silent"])) == (1, False, 12)
    assert read_cluster(SystemIo(), groups.cluster.file).ownership.groups == 1
    await asyncio.to_thread(groups.start)
    done = await asyncio.to_thread(groups.add, groups.cluster.file)
    assert (done.code, done.document()["group"], done.document()["version"]) == (0, 1, 2)


async def whole(filesystem: GroupedFileSystem) -> None:
    assert await came_true(lambda: all(len(group.health.readable()) == 12 for group in filesystem.groups), 40)


async def put(filesystem: GroupedFileSystem, blocks: Blocks) -> tuple[int, int, int]:
    report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
    return report.acked, report.already, report.failed


async def moves(filesystem: GroupedFileSystem) -> tuple[int, int, int]:
    """How many blocks were to be moved, are at their owner now, and are not, once nothing waits."""
    names = ("move_queued", "move_done", "move_failed")

    def counts() -> tuple[int, ...]:
        return tuple(filesystem.counters.get(name) for name in names)

    assert await came_true(lambda: counts()[0] == counts()[1] + counts()[2], 60)
    queued, done, failed = counts()
    return queued, done, failed


def of_new(blocks: Blocks) -> list[int]:
    return [at for at, key in enumerate(blocks.keys) if owner_table(2)[placement_group(key)] == 1]


def blocks_of(seed: int) -> Blocks:
    return make_blocks(BLOCKS, seed=seed, shape=SHAPE, run=RUN)


async def test_blocks_are_found_at_their_previous_owner_then_at_the_new_one(groups: TwoGroups) -> None:
    old = await open_cluster(groups.cluster.file)
    await whole(old)
    blocks = blocks_of(1)
    moved = of_new(blocks)
    assert 0 < len(moved) < BLOCKS
    assert await put(old, blocks) == (BLOCKS, 0, 0)
    await added(groups)
    filesystem = await open_cluster(groups.cluster.file, care="none")
    await whole(filesystem)
    for strict in (False, True):
        assert await filesystem.match(blocks.keys, strict=strict, deadline_ms=DEADLINE_MS) == BLOCKS
    await all_hit(filesystem, blocks)
    assert filesystem.counters.get("previous_owner_blocks") == len(moved)
    assert [node.records for node in (await filesystem.nodes())[12:]] == [0] * 12
    assert await put(filesystem, blocks) == (len(moved), BLOCKS - len(moved), 0)
    assert [node.records for node in (await filesystem.nodes())[12:]] == [len(moved)] * 12
    await all_hit(filesystem, blocks)
    assert filesystem.counters.get("previous_owner_blocks") == len(moved), "nobody asked the previous owner again"
    # A client that has not got the new file goes on with the old one.
    await all_hit(old, blocks)
    await old.close()
    await filesystem.close()


@pytest.mark.parametrize("care", ["background", "none"])
async def test_blocks_that_are_only_read_move_to_the_new_group_and_outlive_the_retention_time(
    groups: TwoGroups, care: Care
) -> None:
    clock = MovedWall()
    filesystem = await open_cluster(groups.cluster.file)
    await whole(filesystem)
    blocks = make_blocks(BLOCKS, seed=4, shape=SHAPE, run=RUN, tenant_tag=b"acme1234")
    moved = of_new(blocks)
    assert await put(filesystem, blocks) == (BLOCKS, 0, 0)
    await filesystem.close()
    await added(groups)
    filesystem = await open_cluster(groups.cluster.file, clock=clock, care=care)
    await whole(filesystem)
    await all_hit(filesystem, blocks)
    assert filesystem.counters.get("previous_owner_blocks") == len(moved)
    assert await moves(filesystem) == ((len(moved), len(moved), 0) if care == "background" else (0, 0, 0))
    clock.ahead = read_cluster(SystemIo(), groups.cluster.file).ownership.retention_seconds + 60
    report = await fetch(filesystem, blocks)
    assert [at for at, ok in enumerate(report.ok) if not ok] == ([] if care == "background" else moved)
    assert filesystem.counters.get("previous_owner_blocks") == len(moved), "the previous owner was not asked again"
    records = len(moved) if care == "background" else 0
    assert [node.records for node in (await filesystem.nodes())] == [BLOCKS] * 12 + [records] * 12
    out = np.zeros(len(moved) * SHAPE.block_bytes, np.uint8)
    keys = [blocks.keys[at] for at in moved]
    items = await filesystem.groups[1].read_items(keys, SHAPE, out, deadline_ms=DEADLINE_MS)
    kept = [(items[at].depth, items[at].tenant_tag) for at in sorted(items)]
    assert kept == ([(at, b"acme1234") for at in moved] if records else [])
    await filesystem.close()


async def test_a_fault_of_the_new_group_costs_moves_only(groups: TwoGroups) -> None:
    first = await open_cluster(groups.cluster.file)
    await whole(first)
    blocks = blocks_of(6)
    moved = of_new(blocks)
    assert await put(first, blocks) == (BLOCKS, 0, 0)
    await first.close()
    await added(groups)
    filesystem = await open_cluster(groups.cluster.file)
    await whole(filesystem)
    # Eleven of its servers stop while blocks are moved there.
    groups.processes[0].signal(signal.SIGSTOP)
    await all_hit(filesystem, blocks)
    assert await moves(filesystem) == (len(moved), 0, len(moved))
    await all_hit(filesystem, blocks)
    groups.processes[0].signal(signal.SIGCONT)
    await whole(filesystem)
    filesystem._mover._resting.clear()
    await all_hit(filesystem, blocks)
    assert await moves(filesystem) == (2 * len(moved), len(moved), len(moved))
    await filesystem.close()


@pytest.mark.parametrize("how", ["put", "write back"])
async def test_what_an_engine_puts_again_is_stored_at_its_new_owner(groups: TwoGroups, how: str) -> None:
    """The previous owner has it complete, and that does not count as stored."""
    layout = BlockLayout.per_layer([8_192, 8_192], format="test", dtype="uint8", block_tokens=4)
    tokens = np.random.default_rng(7).integers(0, 50_000, 4 * 40, np.uint32)

    def save(write_back: bool) -> tuple[int, int]:
        """(acked, already) of what an engine computed."""
        with KVStore.blocking(groups.cluster.file) as store:
            opened = store._store.filesystem
            assert isinstance(opened, GroupedFileSystem)
            assert eventually(lambda: all(len(group.health.readable()) == 12 for group in opened.groups), 40)
            chain = store.namespace(model="test", weights="w", layout=layout).chain(tokens)
            if not write_back:
                report = store.put(chain, data, deadline_ms=DEADLINE_MS)
                return report.acked, report.already
            device, counters = FakeDevice(order=("write-back", "compute")), Counters()
            pages = PagePool(device, layout.shape.segment_bytes, 40)
            target = pages.allocate(40)
            assert target is not None
            for segment, (offset, size) in enumerate(zip(layout.shape.segment_offsets, layout.shape.segment_bytes,
                                                         strict=True)):
                for page, block in zip(target.pages, data, strict=True):
                    pages.storage[segment][page.index, :size] = torch.from_numpy(block[offset : offset + size])
            writing = WriteBack(device, pages, store, counters=counters, piece_blocks=16)
            assert writing.submit(chain, target.pages, device.compute_stream().record())
            assert writing.flush(DEADLINE_MS)
            assert writing.close()
            return counters.get("write_back_acked"), counters.get("write_back_already")

    data = np.random.default_rng(8).integers(0, 256, (40, layout.block_bytes), np.uint8)
    assert await asyncio.to_thread(save, False) == (40, 0)
    await added(groups)
    chain = Namespace("test", "w", layout).chain(tokens)
    moved = [at for at, key in enumerate(chain.keys) if owner_table(2)[placement_group(key)] == 1]
    assert 0 < len(moved) < 40
    assert await asyncio.to_thread(save, how == "write back") == (len(moved), 40 - len(moved))
    filesystem = await open_cluster(groups.cluster.file, care="none")
    await whole(filesystem)
    assert [node.records for node in (await filesystem.nodes())[12:]] == [len(moved)] * 12
    out = np.zeros(40 * layout.block_bytes, np.uint8)
    report = await filesystem.get_into(chain.keys, layout.shape, out, deadline_ms=DEADLINE_MS)
    assert (report.blocks, filesystem.counters.get("previous_owner_blocks")) == (40, 0)
    for offset, size in zip(layout.shape.segment_offsets, layout.shape.segment_bytes, strict=True):
        assert (out[40 * offset : 40 * (offset + size)].reshape(40, size) == data[:, offset : offset + size]).all()
    await filesystem.close()


async def test_a_group_that_is_killed_costs_its_own_blocks_only(groups: TwoGroups) -> None:
    await added(groups)
    filesystem = await open_cluster(groups.cluster.file)
    await whole(filesystem)
    blocks = blocks_of(2)
    theirs = of_new(blocks)
    assert await put(filesystem, blocks) == (BLOCKS, 0, 0)
    groups.processes[1].kill()
    await all_hit(filesystem, blocks)
    groups.processes[0].signal(signal.SIGSTOP)
    report = await fetch(filesystem, blocks, 3_000)
    assert [at for at, ok in enumerate(report.ok) if not ok] == theirs
    assert await came_true(lambda: not filesystem.groups[1].health.readable(), 20)
    report = await fetch(filesystem, blocks)
    assert [at for at, ok in enumerate(report.ok) if not ok] == theirs
    assert await filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == theirs[0]
    more = blocks_of(3)
    stored = await put(filesystem, more)
    assert stored == (BLOCKS - len(of_new(more)), 0, len(of_new(more)))
    groups.processes[0].signal(signal.SIGCONT)
    groups.processes[1].start()
    await whole(filesystem)
    await all_hit(filesystem, blocks)
    groups.kill()
    again = await open_cluster(groups.cluster.file)
    report = await fetch(again, blocks)
    assert [at for at, ok in enumerate(report.ok) if not ok] == theirs
    await again.close()
    await filesystem.close()


async def test_a_store_and_its_commands_see_all_groups(groups: TwoGroups) -> None:
    await added(groups)
    async with await KVStore.open(groups.cluster.file) as store:
        assert [node.node_index for node in await store.nodes()] == list(range(24))

    def run(*words: str) -> Any:
        outcome = run_process(*words)
        return outcome.code, json.loads(outcome.out)

    code, status = await asyncio.to_thread(run, "--json", "cluster", "status", groups.cluster.file)
    assert (code, status["nodes_serving"], status["version"]) == (0, 24, 2)
    assert [node["group"] for node in status["nodes"]] == [0] * 12 + [1] * 12
    assert [group["group"] for group in status["groups"]] == [0, 1]
    text = await asyncio.to_thread(run_process, "cluster", "status", groups.cluster.file)
    assert "24 of 24 nodes serve, 2 groups" in text.out
    assert "group 1 is new: previous owners are asked for" in text.out
    _, top = await asyncio.to_thread(run, "--json", "top", groups.cluster.file, "--once", "--interval", "0.1")
    assert top["nodes_serving"] == 24
    groups.processes[1].kill()
    code, status = await asyncio.to_thread(run, "--json", "cluster", "status", groups.cluster.file)
    assert (code, status["nodes_serving"], status["nodes"][23]["state"]) == (1, 23, "suspect")


def test_status_of_a_cluster_to_which_a_group_is_added_meanwhile_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [f"{number:032x}" for number in range(24)]
    addresses = [f"unix:n{number}" for number in range(24)]
    path = write_cluster(SystemIo(), str(tmp_path), "c" * 32, "process", ids[:12], addresses[:12], upkeep_host=None,
                         token_file=None)

    def read_before(io: Io, where: str) -> ClusterConfig:
        found = read_cluster(io, where)
        add_group(io, where, found, ids[12:], addresses[12:], 0)
        return found

    monkeypatch.setattr(cluster_cmd, "read_cluster", read_before)
    outcome = run("cluster", "status", path)
    assert (outcome.code, outcome.error_line) == (8, f"{path}: a group was added just now; ask again")
    monkeypatch.undo()
    assert len(run("--json", "cluster", "status", path).document()["nodes"]) == 24


async def test_the_group_is_added_once_and_only_whole(groups: TwoGroups) -> None:
    cluster = groups.cluster
    words = groups.words(cluster.file)
    half = await asyncio.to_thread(run_process, *words[:-12])
    assert (half.code, "6 addresses given" in half.error_line) == (2, True)
    taken = await asyncio.to_thread(run_process, *words[:9], "--address", cluster.addresses[0])
    assert (taken.code, taken.error_line.endswith("is the address of node 10 already")) == (2, True)
    both = await asyncio.to_thread(run_process, *words, "--listen", "unix")
    assert (both.code, "either --listen" in both.error_line) == (2, True)
    assert not groups.root.exists(), "nothing was made for a request that cannot be meant"
    first = await asyncio.to_thread(run_process, *words[:4], str(cluster.root), *words[5:])
    assert (first.code, first.document()["group"], first.document()["changed"]) == (0, 0, False)
    await added(groups)
    again = await asyncio.to_thread(groups.add, cluster.file)
    assert (again.code, again.document()["changed"], again.document()["version"]) == (0, False, 2)
    store = read_store_config(SystemIo(), str(groups.root))
    assert (store.group, store.cluster_id) == (1, cluster.config.cluster_id)
    groups.kill()
    checked = await asyncio.to_thread(run_process, "fsck", "--store", str(groups.root))
    assert checked.code == 0, checked.out + checked.err


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("version = 2", "version = 0", "version is 0"),
        ("groups_added = [", "groups_added = [5, ", "24 nodes, expected 36"),
        ("groups_added = [", "groups_added = [-", "was added before the one in front"),
        ("groups_added", "groups_aded", "groups_aded"),
        ("format_version = 1", "format_version = 1\nretention_seconds = -5", "retention_seconds is -5"),
    ],
)
async def test_a_file_whose_groups_cannot_be_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    nodes = "".join(f'\n[[node]]\nid = "{number:032x}"\naddress = "unix:s{number}"\n' for number in range(24))
    text = ('format_version = 1\ncluster_id = "' + "c" * 32 + '"\ndurability = "process"\nversion = 2\n'
            "groups_added = [1800000000]\n" + nodes)
    file = tmp_path / "cluster.toml"
    file.write_text(text)
    assert read_cluster(SystemIo(), str(file)).ownership.added_at == (0, 1_800_000_000)
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(Exception, match=why):
        read_cluster(SystemIo(), str(file))
    file.write_text(text[: text.rindex("[[node]]")])
    with pytest.raises(Exception, match="23 nodes, expected 24 for 2 groups"):
        read_cluster(SystemIo(), str(file))


@pytest.fixture
def in_etcd() -> Iterator[tuple[EtcdProcess, TwoGroups]]:
    with etcd_process() as etcd, two_groups("--register", str(etcd.url)) as groups:
        yield etcd, groups


@pytest.mark.parametrize("more", [(), ("--extent-bytes", str(EXTENT_BYTES // 2))])
def test_a_group_of_a_map_in_etcd_has_the_sizes_of_the_others_or_those_that_are_given(tmp_path: Path,
                                                                                      more: tuple[str, ...]) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    with etcd_process() as etcd:
        run_process("cluster", "init", str(first), "--capacity", CAPACITY, "--extent-bytes", str(EXTENT_BYTES),
                    "--listen", "tcp:127.0.0.1:7400", "--etcd", str(etcd.url))
        added = run_process("cluster", "add-group", str(etcd.url), str(second), "--address", "unix:/x/s", *more)
    assert added.code == 1, "its servers do not answer"
    assert read_store_config(SystemIo(), str(second)).extent_bytes == (EXTENT_BYTES // 2 if more else EXTENT_BYTES)
    assert read_store_config(SystemIo(), str(second)).capacity_bytes == int(CAPACITY)


async def test_a_client_of_a_map_in_etcd_follows_when_a_group_is_added(in_etcd: tuple[EtcdProcess, TwoGroups]) -> None:
    etcd, groups = in_etcd
    store = EtcdStore(etcd.url)
    await store.create(map_of(groups.cluster))
    filesystem = await open_cluster(str(etcd.url))
    await whole(filesystem)
    blocks = blocks_of(5)
    assert await put(filesystem, blocks) == (BLOCKS, 0, 0)
    refused = await asyncio.to_thread(groups.add, str(etcd.url))
    assert (refused.code, (await store.read()).map.version) == (1, 1)
    await asyncio.to_thread(groups.start)
    done = (await asyncio.to_thread(groups.add, str(etcd.url))).document()
    assert (done["group"], done["version"], done["changed"]) == (1, 2, True)
    assert await came_true(lambda: len(filesystem.groups) == 2, 30)
    await whole(filesystem)
    await all_hit(filesystem, blocks)
    assert filesystem.counters.get("previous_owner_blocks") == len(of_new(blocks))
    assert await moves(filesystem) == (len(of_new(blocks)), len(of_new(blocks)), 0)
    assert await put(filesystem, blocks) == (0, BLOCKS, 0)
    assert [node.records for node in (await filesystem.nodes())[12:]] == [len(of_new(blocks))] * 12
    again = (await asyncio.to_thread(groups.add, str(etcd.url))).document()
    assert (again["version"], again["changed"]) == (2, False)
    assert (await store.read()).map.ownership.groups == 2
    words = ("cluster", "move-node", "23", "--address", f"unix:{groups.root}/nowhere")
    moved = await asyncio.to_thread(run_process, "--store", str(etcd.url), *words)
    assert moved.code == 0, moved.err
    assert await came_true(lambda: filesystem.groups[1].health.readable() == list(range(11)), 30)
    assert filesystem.groups[0].health.readable() == list(range(12))
    await all_hit(filesystem, blocks)
    await filesystem.close()
    await store.close()


# -- Versions of the map ----------------------------------------------------------------------------------------------


async def test_a_write_by_an_older_map_is_refused_and_the_client_reads_the_map_again(groups: TwoGroups) -> None:
    behind = await open_cluster(groups.cluster.file)
    await whole(behind)
    await added(groups)
    ahead = await open_cluster(groups.cluster.file)
    await whole(ahead)
    first = blocks_of(20)
    assert await put(behind, first) == (BLOCKS, 0, 0), "nobody has told the nodes of a later map yet"
    assert len(behind.groups) == 1
    second = blocks_of(21)
    assert await put(ahead, second) == (BLOCKS, 0, 0)
    await all_hit(behind, first)
    third = blocks_of(22)
    blocks = await asyncio.gather(*(put(behind, some) for some in (third, blocks_of(23))))
    assert [acked + failed for acked, _, failed in blocks] == [BLOCKS] * 2
    assert (len(behind.groups), behind._map_held.version, behind._map_held.outdated) == (2, 2, False)
    await whole(behind)
    assert (await put(behind, third))[2] == 0
    for client in (behind, ahead):
        for some in (first, second, third):
            await all_hit(client, some)
    assert await put(behind, blocks_of(24)) == (BLOCKS, 0, 0)
    await ahead.close()
    await behind.close()


async def test_a_client_whose_map_stays_old_is_told_both_versions_and_reads_on(groups: TwoGroups) -> None:
    other = groups.cluster.root / "old.toml"
    other.write_text(Path(groups.cluster.file).read_text())
    await added(groups)
    behind, ahead = await open_cluster(str(other)), await open_cluster(groups.cluster.file)
    await whole(behind)
    await whole(ahead)
    first, second = blocks_of(30), blocks_of(31)
    assert await put(behind, first) == (BLOCKS, 0, 0)
    assert await put(ahead, second) == (BLOCKS, 0, 0)
    report = await behind.put(second.items, SHAPE, second.data, deadline_ms=DEADLINE_MS)
    assert report.failed == len(of_new(second))
    assert "by version 1 of the map, the node knows of 2" in str(report.why)
    assert len(behind.groups[0].health.readable()) == 12, "a refusal for the map is no failure of a node"
    await all_hit(behind, first)
    other.write_text(Path(groups.cluster.file).read_text())
    assert await put(behind, second) == (0, BLOCKS, 0)
    await ahead.close()
    await behind.close()


async def test_moves_by_an_outdated_map_are_refused_until_the_later_one_was_read(groups: TwoGroups) -> None:
    blocks = blocks_of(33)
    moved = of_new(blocks)
    first = await open_cluster(groups.cluster.file)
    await whole(first)
    assert await put(first, blocks) == (BLOCKS, 0, 0)
    await first.close()
    await added(groups)
    other = groups.cluster.root / "old.toml"
    other.write_text(Path(groups.cluster.file).read_text())
    behind = await open_cluster(str(other))
    await whole(behind)
    for more in ((), ("--undo",)):
        drained = await asyncio.to_thread(run_process, "--json", "cluster", "drain", groups.cluster.file, "7", *more)
        assert drained.code == 0
    ahead = await open_cluster(groups.cluster.file, care="none")
    await whole(ahead)
    assert await put(ahead, blocks_of(34)) == (BLOCKS, 0, 0)
    await all_hit(behind, blocks)
    assert await moves(behind) == (len(moved), 0, len(moved))
    assert (behind._map_held.version, behind._map_held.outdated) == (2, True)
    other.write_text(Path(groups.cluster.file).read_text())
    behind._mover._resting.clear()
    await all_hit(behind, blocks)
    assert await moves(behind) == (2 * len(moved), len(moved), len(moved))
    assert (behind._map_held.version, behind._map_held.outdated) == (4, False)
    await ahead.close()
    await behind.close()


async def test_a_drained_node_gets_nothing_new_until_that_is_undone(in_etcd: tuple[EtcdProcess, TwoGroups]) -> None:
    etcd, groups = in_etcd
    store = EtcdStore(etcd.url)
    await store.create(map_of(groups.cluster))
    filesystem = await open_cluster(str(etcd.url))
    await whole(filesystem)
    assert await put(filesystem, blocks_of(40)) == (BLOCKS, 0, 0)

    async def drain(*words: str) -> Outcome:
        return await asyncio.to_thread(run_process, "--json", "cluster", "drain", *words)

    for where in (str(etcd.url), groups.cluster.file):
        done = (await drain(where, "7")).document()
        assert done == {"node": 7, "drain": True, "version": 2}
        assert (await drain(where, "7")).document()["version"] == 2
        refused = await drain(where, "8")
        assert (refused.code, "puts can go without 1" in refused.error_line) == (2, True)
        assert (await drain(where, "12")).code == 2
    reader = await open_cluster(groups.cluster.file, care="none")
    await whole(reader)
    assert await came_true(lambda: filesystem.groups[0].health.state(7) == "read-only", 30)
    more = blocks_of(41)
    for client in (filesystem, reader):
        assert client.groups[0].health.writable() == [*range(7), *range(8, 12)]
    report = await filesystem.put(more.items, SHAPE, more.data, deadline_ms=DEADLINE_MS)
    assert (report.acked, report.at_risk) == (BLOCKS, BLOCKS)
    assert [node.records for node in await filesystem.nodes()] == [2 * BLOCKS] * 7 + [BLOCKS] + [2 * BLOCKS] * 4
    await all_hit(reader, more)
    for where in (str(etcd.url), groups.cluster.file):
        assert (await drain(where, "7", "--undo")).document()["version"] == 3
    assert await came_true(lambda: len(filesystem.groups[0].health.writable()) == 12, 30)
    assert await put(filesystem, blocks_of(42)) == (BLOCKS, 0, 0)
    for opened in (filesystem, reader, store):
        await opened.close()


# -- Who looks after it -----------------------------------------------------------------------------------------------


async def test_a_group_that_was_added_after_a_purge_refuses_what_was_purged(groups: TwoGroups) -> None:
    groups.cluster.write_file(upkeep_host=socket.gethostname())
    blocks = make_blocks(BLOCKS, seed=50, shape=SHAPE, run=RUN, tenant_tag=b"acme1234")
    keeper = await open_cluster(groups.cluster.file, care="by hand")
    await whole(keeper)
    assert await put(keeper, blocks) == (BLOCKS, 0, 0)
    assert (await keeper.purge([b"acme1234"])).dropped == 12 * BLOCKS
    await keeper.close()
    await added(groups)
    keeper = await open_cluster(groups.cluster.file, care="by hand")
    await whole(keeper)
    assert read_tombstones(SystemIo(), str(groups.cluster.root / "group-01")) == {b"acme1234": frozenset()}
    late = await open_cluster(groups.cluster.file)
    await whole(late)
    assert await put(late, blocks) == (0, 0, BLOCKS)
    assert await put(late, blocks_of(51)) == (BLOCKS, 0, 0)
    groups.processes[1].kill()
    assert await came_true(lambda: len(late.groups[1].health.readable()) == 11, 20)
    risky = blocks_of(52)
    assert await put(late, risky) == (BLOCKS, 0, 0)
    groups.processes[1].start()
    await whole(keeper)
    repaired = await keeper.upkeep.repair()
    assert (repaired.rebuilt, repaired.failed, repaired.missing) == (len(of_new(risky)), 0, ())
    assert len((await keeper.sweep()).missing) == 0
    scrubbed = await keeper.upkeep.scrub()
    assert (scrubbed.records, scrubbed.unsound) == (2 * 12 * BLOCKS, 0)
    await late.close()
    await keeper.close()
    assert (groups.cluster.root / "group-01" / "upkeep").exists(), "how far the scrub came"
    done = await asyncio.to_thread(run_process, "--json", "gc", "--store", groups.cluster.file)
    assert (done.code, len(done.document()["nodes"])) == (0, 24)
    repair = await asyncio.to_thread(run_process, "--json", "repair", "--store", groups.cluster.file)
    assert (repair.code, repair.document()["found"]) == (0, 0)
