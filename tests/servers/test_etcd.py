"""A cluster by its map in a real etcd: followed while etcd is there, and nothing changes when it hangs or dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from efs.cluster import read_store_config
from efs.clusterfs import open_cluster
from efs.clustermap import ClusterMap, EtcdUrl
from efs.errors import CorruptRecord, EtcdUnavailable, InvalidArgument, StoreNotFound
from efs.etcd import EtcdStore, HeldMap
from efs.groups import GroupedFileSystem
from efs.limits import CLOSE_MS, ETCD_CALL_MS, ETCD_LEASE_SECONDS
from efs.osio import SystemIo
from kvstore.store import BlockingKVStore, KVStore
from tests.servers.test_cluster import BLOCKS, DEADLINE_MS, SHAPE, all_hit, back_to, back_to_health, stored
from tests.support.blocks import make_blocks
from tests.support.cli import run_process
from tests.support.etcdprocess import etcd_process, map_of
from tests.support.servers import ServedCluster, ServerProcess, served_cluster
from tests.support.waiting import LATE_S, came_true
from tools.etcdprocess import EtcdProcess

pytestmark = pytest.mark.timeout(300)
"""Leases run out and commands are processes of their own: seconds on a machine to itself, minutes beside others."""

GROUPS = [range(10), [10], [11]]
OUTAGE_S = 1.3 * ETCD_LEASE_SECONDS


@pytest.fixture(scope="module")
def shared_etcd() -> Iterator[EtcdProcess]:
    with etcd_process() as process:
        yield process


@pytest.fixture(scope="module")
def shared_cluster(shared_etcd: EtcdProcess) -> Iterator[ServedCluster]:
    with served_cluster(GROUPS, "--register", str(shared_etcd.url)) as cluster:
        yield cluster


@pytest.fixture
async def etcd(shared_etcd: EtcdProcess, shared_cluster: ServedCluster) -> AsyncIterator[EtcdProcess]:
    """With the first map of the cluster, all servers running."""
    if not shared_etcd.running:
        await asyncio.to_thread(shared_etcd.start)
    for process in shared_cluster.processes:
        if not process.running:
            process.start()
    store = EtcdStore(shared_etcd.url)
    await store._call(lambda client: client.delete(shared_etcd.url.map_key))
    await store.create(map_of(shared_cluster, upkeep_host=socket.gethostname()))
    await store.close()
    await writes_are_taken(shared_etcd)
    yield shared_etcd
    if shared_etcd.running:
        shared_etcd.signal(signal.SIGCONT)


async def writes_are_taken(etcd: EtcdProcess) -> None:
    """Until the servers have seen that the map is an earlier one than that of the test before."""
    client = await open_cluster(str(etcd.url), care="none")
    await back_to_health(client)
    until, failed = time.monotonic() + 60, 1
    while failed:
        assert time.monotonic() < until
        block = make_blocks(1, seed=time.monotonic_ns(), shape=SHAPE)
        failed = (await client.put(block.items, SHAPE, block.data, deadline_ms=DEADLINE_MS)).failed
    await client.close()


@pytest.fixture
def cluster(etcd: EtcdProcess, shared_cluster: ServedCluster) -> ServedCluster:
    return shared_cluster


@pytest.fixture
async def store(etcd: EtcdProcess) -> AsyncIterator[EtcdStore]:
    opened = EtcdStore(etcd.url)
    yield opened
    await opened.close()


@pytest.fixture
async def filesystem(etcd: EtcdProcess) -> AsyncIterator[GroupedFileSystem]:
    opened = await open_cluster(str(etcd.url))
    await back_to_health(opened)
    yield opened
    await opened.close()


@pytest.fixture
def changes(filesystem: GroupedFileSystem) -> Callable[[], int]:
    """How many changes of a place the filesystem went along with since it was opened: counters outlive a client."""
    before = filesystem.counters.get("places_changed")
    return lambda: filesystem.counters.get("places_changed") - before


async def change(store: EtcdStore, changed: ClusterMap) -> HeldMap:
    await store.change(await store.read(), changed)
    return await store.read()


async def put_and_get_for(filesystem: GroupedFileSystem, seconds: float, first_seed: int) -> int:
    """Puts and gets, every one of them whole, for at least so long. How many blocks were stored."""
    until, new, rounds = time.monotonic() + seconds, 0, 0
    while time.monotonic() < until:
        # As many as the nodes hold without evicting anything.
        blocks = make_blocks(BLOCKS, seed=first_seed + rounds % 30, shape=SHAPE, run=64)
        report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
        assert report.acked + report.already == BLOCKS
        assert (await all_hit(filesystem, blocks)).corrupt == 0
        new += report.acked
        rounds += 1
    return new


# -- Outages ---------------------------------------------------------------------------------------------------------


async def test_an_etcd_that_hangs_for_longer_than_every_lease_changes_nothing(
    etcd: EtcdProcess, filesystem: GroupedFileSystem, store: EtcdStore, changes: Callable[[], int],
    caplog: pytest.LogCaptureFixture
) -> None:
    etcd.signal(signal.SIGSTOP)
    assert await put_and_get_for(filesystem, OUTAGE_S, 100) > 3 * BLOCKS
    assert filesystem.groups[0].health.readable() == list(range(12))
    with pytest.raises(EtcdUnavailable, match="it does not answer"):
        await store.read()
    # Noticed at the next reading of the map at the latest; to go on with puts and gets until then is the point.
    until = time.monotonic() + 60
    while "going on with the last map" not in caplog.text and time.monotonic() < until:
        await put_and_get_for(filesystem, 0.1, 100)
    assert "going on with the last map" in caplog.text
    etcd.signal(signal.SIGCONT)
    assert await came_true(lambda: "answers again" in caplog.text, 60)
    held = await store.read()
    await change(store, held.map.with_address(11, held.map.places[10].address))
    assert await came_true(lambda: changes() == 1)
    assert await came_true(lambda: filesystem.groups[0].health.readable() == list(range(11)))


async def test_a_killed_etcd_changes_nothing_and_a_change_after_its_restart_is_seen(
    etcd: EtcdProcess, cluster: ServedCluster, filesystem: GroupedFileSystem, store: EtcdStore,
    changes: Callable[[], int],
    caplog: pytest.LogCaptureFixture
) -> None:
    blocks = await stored(filesystem, 200)
    etcd.kill()
    assert await put_and_get_for(filesystem, OUTAGE_S, 201) > 3 * BLOCKS
    assert "going on with the last map" in caplog.text
    cluster.of(11).kill()
    assert (await all_hit(filesystem, blocks)).blocks == BLOCKS
    elsewhere = ServerProcess(cluster.of(11).paths, f"unix:{cluster.root}/elsewhere", "--register", str(etcd.url))
    elsewhere.start()
    try:
        assert filesystem.groups[0].health.readable() == list(range(11))
        await asyncio.to_thread(etcd.start)
        held = await store.read()
        assert held.map.version == 1
        await change(store, held.map.with_address(11, elsewhere.address))
        await back_to(filesystem, 12)
        assert changes() == 1
        assert elsewhere.running
        # A second change comes by the new watch, long before the map would be read again anyhow.
        held = await store.read()
        began = time.monotonic()
        await change(store, held.map.with_address(11, f"unix:{cluster.root}/nowhere"))
        assert await came_true(lambda: changes() == 2)
        assert time.monotonic() - began < 10
        assert await came_true(lambda: filesystem.groups[0].health.readable() == list(range(11)))
        await all_hit(filesystem, blocks)
        notes = await leases(store, 12)
        assert notes == set(cluster.config.node_ids)
    finally:
        elsewhere.kill()


async def leases(store: EtcdStore, count: int) -> set[str]:
    """The nodes whose servers hold a lease, once there are so many."""
    until = time.monotonic() + 60
    while len(notes := await store.servers()) != count:
        assert time.monotonic() < until, notes
        await asyncio.sleep(0.1)
    return set(notes)


async def test_a_server_that_is_killed_loses_its_lease_and_stays_in_the_map(
    cluster: ServedCluster, store: EtcdStore, filesystem: GroupedFileSystem,
    changes: Callable[[], int]
) -> None:
    await leases(store, 12)
    before = await store.read()
    cluster.of(10).kill()
    assert await leases(store, 11) == set(cluster.config.node_ids) - {cluster.config.node_ids[10]}
    assert await store.read() == HeldMap(before.map, before.written_at, (await store.read()).read_at)
    cluster.of(10).start()
    await leases(store, 12)
    await back_to_health(filesystem)
    assert changes() == 0


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_store_is_not_opened_without_etcd_and_the_refusal_names_it(
    etcd: EtcdProcess, how: signal.Signals
) -> None:
    if how is signal.SIGKILL:
        etcd.kill()
    else:
        etcd.signal(how)
    began = time.monotonic()
    with pytest.raises(EtcdUnavailable, match=f"^etcd at 127.0.0.1:{etcd.url.port}: it ") as caught:
        await KVStore.open(str(etcd.url))
    assert time.monotonic() - began < 2 * ETCD_CALL_MS / 1000 + LATE_S
    assert (caught.value.exit_code, caught.value.retryable) == (8, True)
    for words in (("cluster", "status", str(etcd.url)), ("gc", "--store", str(etcd.url))):
        done = await asyncio.to_thread(run_process, *words)
        assert done.code == 8
        assert done.error_line.startswith(f"etcd at 127.0.0.1:{etcd.url.port}: it ")


async def test_a_store_and_a_server_end_while_etcd_hangs(etcd: EtcdProcess, cluster: ServedCluster) -> None:
    opened = await open_cluster(str(etcd.url))
    await back_to_health(opened)
    etcd.signal(signal.SIGSTOP)
    began = time.monotonic()
    await opened.close()
    assert time.monotonic() - began < CLOSE_MS / 1000 + LATE_S
    assert (await asyncio.to_thread(cluster.of(10).terminate))[0] == 0


def test_without_the_client_library_the_url_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "aetcd", None)
    with pytest.raises(InvalidArgument, match=r"in a clone, pip install '\.\[etcd\]'"):
        KVStore.blocking("etcd://127.0.0.1:1/x")


# -- The map ---------------------------------------------------------------------------------------------------------


async def test_a_store_is_opened_by_its_url_and_blocks_come_back(etcd: EtcdProcess, cluster: ServedCluster) -> None:
    async with await KVStore.open(str(etcd.url)) as opened:
        assert opened.root == str(cluster.root)
        filesystem = opened.filesystem
        assert isinstance(filesystem, GroupedFileSystem)
        await back_to_health(filesystem)
        await all_hit(filesystem, await stored(filesystem, 300))

    def on_a_thread_of_its_own() -> list[str]:
        with BlockingKVStore(str(etcd.url)) as blocking:
            return [node.state for node in blocking.nodes()]

    assert await asyncio.to_thread(on_a_thread_of_its_own) == ["serving"] * 12


async def test_top_takes_the_url_and_shows_what_is_counted_in_the_root(
        etcd: EtcdProcess, filesystem: GroupedFileSystem) -> None:
    await stored(filesystem, seed=41)
    done = await asyncio.to_thread(run_process, "--json", "top", str(etcd.url), "--once", "--interval", "0.1")
    document = done.document()
    assert (done.code, document["nodes_serving"]) == (0, 12)
    assert document["client"]["put_blocks"]["total"] == filesystem.counters.get("put_acked")


async def test_of_two_changes_at_once_one_is_refused(store: EtcdStore) -> None:
    held = await store.read()
    await store.change(held, held.map.with_address(0, "unix:/first"))
    with pytest.raises(InvalidArgument, match="somebody else has changed the map"):
        await store.change(held, held.map.with_address(1, "unix:/second"))
    found = (await store.read()).map
    assert (found.version, found.places[0].address) == (2, "unix:/first")
    assert found.places[1] == held.map.places[1]
    with pytest.raises(InvalidArgument, match="there is a cluster of this name already"):
        await store.create(held.map)


async def test_what_is_no_later_map_of_this_cluster_is_not_followed(
    etcd: EtcdProcess, store: EtcdStore, filesystem: GroupedFileSystem, changes: Callable[[], int],
    caplog: pytest.LogCaptureFixture
) -> None:
    blocks = await stored(filesystem, 400)
    held = await store.read()
    await store._call(lambda client: client.put(etcd.url.map_key, b"{}"))
    assert await came_true(lambda: "going on with the last map" in caplog.text)
    with pytest.raises(CorruptRecord, match=str(etcd.url)):
        await store.read()
    await store._call(lambda client: client.delete(etcd.url.map_key))
    with pytest.raises(StoreNotFound, match="there is no map under this name"):
        await KVStore.open(str(etcd.url))
    other = held.map.with_address(3, "unix:/nowhere")
    await store.create(ClusterMap(other.version, "e" * 32, other.durability, other.root, other.node_capacity_bytes,
                                  other.extent_bytes, other.places))
    assert await came_true(lambda: "it is of cluster" in caplog.text, 60)
    assert changes() == 0
    await all_hit(filesystem, blocks)
    assert filesystem.groups[0].health.readable() == list(range(12))


# -- Commands --------------------------------------------------------------------------------------------------------


async def test_a_replaced_node_is_filled_again_and_its_old_server_is_refused(
    etcd: EtcdProcess, cluster: ServedCluster, store: EtcdStore, filesystem: GroupedFileSystem, tmp_path: Path,
    changes: Callable[[], int]
) -> None:
    blocks = await stored(filesystem, 500)
    old, address = cluster.of(11), cluster.of(11).address
    words = ("--json", "--store", str(etcd.url), "cluster", "replace-node", "11", "--directory", str(tmp_path / "new"),
             "--address", address)
    await leases(store, 12)
    refused = await asyncio.to_thread(run_process, *words, "--yes")
    assert (refused.code, "stop its server first" in refused.error_line) == (2, True)
    assert not (tmp_path / "new").exists()
    old.kill()
    await leases(store, 11)
    assert (await asyncio.to_thread(run_process, *words)).code == 2
    done = (await asyncio.to_thread(run_process, *words, "--yes")).document()
    assert (done["incarnation"], done["version"], done["changed"]) == (2, 2, True)
    assert done["node_id"] != cluster.config.node_ids[11]
    noted = read_store_config(SystemIo(), str(cluster.root))
    assert (noted.node_ids[11], noted.node_paths[11]) == (done["node_id"], str(tmp_path / "new"))
    again = (await asyncio.to_thread(run_process, *words, "--yes")).document()
    assert (again["node_id"], again["version"], again["changed"]) == (done["node_id"], 2, False)
    assert await came_true(lambda: changes() == 1)

    old.start()
    assert await came_true(lambda: "what it serves is" in str(_refusal(filesystem)), 40)
    assert filesystem.groups[0].health.readable() == list(range(11))
    another = await open_cluster(str(etcd.url), care="none")
    assert another.counters.get("nodes_degraded") == 1
    assert (await all_hit(another, blocks)).blocks == BLOCKS
    await another.close()
    old.kill()

    new = ServerProcess([str(tmp_path / "new")], address, "--register", str(etcd.url))
    new.start()
    try:
        await back_to_health(filesystem)
        assert [node.records for node in await filesystem.nodes()][11] == 0
        await filesystem.close()
        repaired = await asyncio.to_thread(run_process, "--json", "repair", "--store", str(etcd.url))
        assert repaired.code == 0, repaired.err
        reader = await open_cluster(str(etcd.url), care="none")
        assert [node.records for node in await reader.nodes()][11] >= BLOCKS
        cluster.of(10).kill()
        assert (await all_hit(reader, blocks)).blocks == BLOCKS
        await reader.close()
    finally:
        new.kill()


def _refusal(filesystem: GroupedFileSystem) -> object:
    return filesystem.groups[0]._nodes[11]._reading.refusal  # type: ignore[union-attr]


async def test_status_shows_the_map_and_the_leases(etcd: EtcdProcess, cluster: ServedCluster, store: EtcdStore) -> None:
    await leases(store, 12)
    done = await asyncio.to_thread(run_process, "--json", "cluster", "status", str(etcd.url))
    document = done.document()
    assert (done.code, document["version"], document["nodes_serving"]) == (0, 1, 12)
    assert {(node["incarnation"], node["lease"]) for node in document["nodes"]} == {(1, "serving")}
    cluster.of(10).kill()
    await leases(store, 11)
    done = await asyncio.to_thread(run_process, "cluster", "status", str(etcd.url))
    assert done.code == 1
    assert "11 of 12 nodes serve" in done.out
    moved = await asyncio.to_thread(run_process, "--store", str(etcd.url), "cluster", "move-node", "10", "--address",
                                    f"unix:{cluster.root}/x")
    assert (moved.code, (await store.read()).map.places[10].address) == (0, f"unix:{cluster.root}/x")


def token(directory: Path, name: str) -> tuple[str, str]:
    """The option for a token, made in a file of its name."""
    path = directory / name
    path.write_text(f"{name} of more than 16 bytes")
    path.chmod(0o600)
    return f"--{name}-file", str(path)


async def test_init_writes_the_first_map_once(etcd: EtcdProcess, tmp_path: Path) -> None:
    url = str(EtcdUrl(etcd.url.host, etcd.url.port, f"init-{os.getpid()}"))
    words = ("--json", "cluster", "init", str(tmp_path / "a"), "--capacity", "2GiB", "--listen", "tcp:127.0.0.1:7400",
             "--etcd", url, *(word for name in ("token", "operator-token") for word in token(tmp_path, name)))
    done = await asyncio.to_thread(run_process, *words)
    assert (done.code, done.document()["cluster"]) == (0, url)
    assert not (tmp_path / "a" / "cluster.toml").exists()
    store = EtcdStore(EtcdUrl(etcd.url.host, etcd.url.port, f"init-{os.getpid()}"))
    found = (await store.read()).map
    await store.close()
    assert (found.version, found.root, found.places[11].address) == (1, str(tmp_path / "a"), "tcp:127.0.0.1:7411")
    assert (found.token_file, found.operator_token_file) == (str(tmp_path / "token"), str(tmp_path / "operator-token"))
    again = await asyncio.to_thread(run_process, *words[:3], str(tmp_path / "b"), *words[4:])
    assert (again.code, "already" in again.error_line) == (2, True)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("words", [
    ("cluster", "status", "etcd://nowhere"),
    ("status", "--store", "etcd://127.0.0.1:2379/prod"),
    ("node", "serve", "/nowhere", "--listen", "unix:/x", "--register", "http://h:1/x"),
    ("--store", "/a/path", "cluster", "move-node", "3", "--address", "unix:/x"),
    ("--store", "etcd://127.0.0.1:1/x", "cluster", "move-node", "3", "--address", "tcp:h:0"),
])
def test_a_request_that_cannot_be_meant_is_refused_in_one_line(words: tuple[str, ...]) -> None:
    done = run_process(*words)
    assert (done.code, done.out) == (2, "")
    assert done.error_line
