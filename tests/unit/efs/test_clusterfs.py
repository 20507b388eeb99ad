"""A client of a cluster, without its servers or with some in this process: what it makes, and what it leaves where that
fails."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from efs.clock import Clock, Deadline, SystemClock
from efs.clusterfile import ClusterConfig, Spare
from efs.clusterfs import _Client, open_cluster
from efs.clustermap import ClusterMap, MapPlace
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import OpenFailed
from efs.etcd import EtcdStore, HeldMap
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.osio import SystemIo
from efs.ownership import Ownership
from efs.progress import PROGRESS_FILE
from efs.remote import RemoteNode
from efs.server import NodeServer
from efs.session import ServedNode
from tests.support.faultio import FaultIo
from tests.support.memorynode import MemoryNode
from tests.support.servers import short_directory
from tests.support.waiting import came_true


def config_of(groups: int, root: Path) -> ClusterConfig:
    """Nobody listens at any of its addresses."""
    numbers = range(12 * groups)
    return ClusterConfig("c" * 32, "process", tuple(f"{number:032x}" for number in numbers),
                         tuple(parse_endpoint(f"unix:{root}/n{number}") for number in numbers),
                         upkeep_host=socket.gethostname(), version=groups,
                         ownership=Ownership(tuple(range(groups))))


@pytest.mark.parametrize("opening", [False, True])
async def test_of_several_groups_of_which_one_cannot_be_opened_nothing_is_left(tmp_path: Path, opening: bool) -> None:
    before = asyncio.all_tasks()
    first, third = config_of(1, tmp_path), config_of(3, tmp_path)
    reading = third if opening else first

    async def read() -> ClusterConfig:
        return reading

    async def opened() -> _Client:
        return await _Client.open(read, str(tmp_path), 0, SystemIo(), SystemClock(), "background", False, False)

    # Where the progress of group 2 is noted stands something else.
    other = tmp_path / "group-02" / PROGRESS_FILE
    other.mkdir(parents=True)
    if opening:
        with pytest.raises(OpenFailed, match=PROGRESS_FILE):
            await opened()
        assert asyncio.all_tasks() == before
        other.rmdir()
        client = await opened()
    else:
        client = await opened()
        running, nodes = asyncio.all_tasks(), client._quotas._nodes
        for _ in range(2):
            with pytest.raises(OpenFailed, match=PROGRESS_FILE):
                await client.follow(third)
            assert asyncio.all_tasks() == running
            assert (client._quotas._nodes, len(client.filesystem.groups)) == (nodes, 1)
        other.rmdir()
        await client.follow(third)
    assert (len(client.filesystem.groups), len(client._quotas._nodes)) == (3, 36)
    assert {task.get_name() for task in asyncio.all_tasks()} >= {"mend", "sweep", "move"}
    await client.filesystem.close()
    assert asyncio.all_tasks() == before


async def test_places_that_changed_are_followed_once_also_when_a_new_group_cannot_be_opened(tmp_path: Path) -> None:
    first, second = config_of(1, tmp_path), config_of(2, tmp_path)
    first = replace(first, spares=(Spare(f"{99:032x}", second.endpoints[23]),))
    # Nodes 0 and 1 have changed places, 2 is elsewhere, and 3 is one that was a spare.
    second = replace(second, node_ids=(f"{1:032x}", f"{0:032x}", f"{2:032x}", f"{99:032x}", *second.node_ids[4:]),
                     endpoints=(*second.endpoints[:2], parse_endpoint(f"unix:{tmp_path}/m2"), *second.endpoints[3:]))

    async def read() -> ClusterConfig:
        return first

    client = await _Client.open(read, str(tmp_path), 0, SystemIo(), SystemClock(), "background", False, False)
    # Where what concerns group 1 is noted stands something else.
    (tmp_path / "group-01").touch()
    for _ in range(2):
        with pytest.raises(OpenFailed, match="group-01"):
            await client.follow(second)
        assert [node.place.node_id for node in client._nodes] == list(second.node_ids[:12])
        assert [node.place.endpoint for node in client._nodes] == list(second.endpoints[:12])
        assert client._counters.get("places_changed") == 4
        assert (client._map_held.version, len(client.filesystem.groups)) == (1, 1)
    (tmp_path / "group-01").unlink()
    await client.follow(second)
    assert client._counters.get("places_changed") == 4
    assert (client._map_held.version, len(client.filesystem.groups)) == (2, 2)
    await client.filesystem.close()


async def test_a_directory_for_notes_that_cannot_be_made_is_named_and_ends_no_renewal(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    io, clock, reading = FaultIo(), SystemClock(), [config_of(1, tmp_path), config_of(2, tmp_path)]

    async def read() -> ClusterConfig:
        return reading.pop(0) if len(reading) > 1 else reading[0]

    client = await _Client.open(read, str(tmp_path), 0, io, clock, "background", False, False)
    io.fail("mkdir", errno.EROFS, path="group-01", times=None)
    with pytest.raises(OpenFailed, match="group-01: Read-only file system"):
        await client.follow(reading[0])
    client._map_held.refused = 1
    assert not await client.renew(1, Deadline.after_ms(clock, 10_000))
    assert "going on with version 1 of the map" in caplog.text
    assert client.filesystem._background.restarts == 0
    await client.filesystem.close()


@asynccontextmanager
async def one_of_twelve_is_deaf() -> AsyncIterator[tuple[ClusterConfig, NodeServer, Path]]:
    """A cluster of one group: eleven nodes are served at one address, at that of the last one nobody speaks."""
    with short_directory() as root, socket.socket(socket.AF_UNIX) as deaf:
        deaf.bind(str(root / "deaf"))
        deaf.listen(64)
        config = config_of(1, root)
        served = [ServedNode(MemoryNode(index, SystemClock()), config.cluster_id, config.node_ids[index], "process",
                             CounterFile.in_memory()) for index in range(11)]
        server = NodeServer(served, SystemIo(), SystemClock())
        endpoint = server.listen(parse_endpoint("unix:s", str(root)))
        yield replace(config, endpoints=(*[endpoint] * 11, Endpoint(path=str(root / "deaf")))), server, root
        await server.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[RemoteNode]:
    """The nodes that the client has opened."""
    nodes, real = list[RemoteNode](), RemoteNode.open

    async def noted(place: RemotePlace, clock: Clock, counters: CounterFile, wait_ms: float) -> RemoteNode:
        nodes.append(await real(place, clock, counters, wait_ms))
        return nodes[-1]

    monkeypatch.setattr(RemoteNode, "open", noted)
    return nodes


async def test_an_opening_that_is_given_up_leaves_no_connection(opened: list[RemoteNode]) -> None:
    async with one_of_twelve_is_deaf() as (config, server, root):
        async def read() -> ClusterConfig:
            return config

        before = asyncio.all_tasks()
        opening = asyncio.create_task(_Client.open(read, str(root), 0, SystemIo(), SystemClock(), "none", False, False))
        assert await came_true(lambda: len(opened) == 11)
        opening.cancel()
        with pytest.raises(asyncio.CancelledError):
            await opening
        assert await came_true(lambda: asyncio.all_tasks() == before and server.connections == 0)


async def test_an_opening_that_is_given_up_while_etcd_is_left_leaves_no_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, stores, closing = config_of(1, tmp_path), list[EtcdStore](), asyncio.Event()
    places = tuple(MapPlace(node_id, str(endpoint), 1)
                   for node_id, endpoint in zip(config.node_ids, config.endpoints, strict=True))
    cluster_map = ClusterMap(1, config.cluster_id, "process", str(tmp_path), 1 << 30, 1 << 20, places, None, None)

    async def read(store: EtcdStore) -> HeldMap:
        stores.append(store)
        return HeldMap(cluster_map, 1, 1)

    async def close(store: EtcdStore) -> None:
        if store is stores[0]:
            closing.set()
            await asyncio.Event().wait()

    monkeypatch.setattr(EtcdStore, "read", read)
    monkeypatch.setattr(EtcdStore, "close", close)
    before = asyncio.all_tasks()
    opening = asyncio.create_task(open_cluster("etcd://127.0.0.1:1/x"))
    await closing.wait()
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert asyncio.all_tasks() == before


async def test_a_store_that_closes_while_it_connects_to_a_new_group_leaves_no_connection(
    opened: list[RemoteNode]
) -> None:
    async with one_of_twelve_is_deaf() as (second, server, root):
        first = config_of(1, root / "nowhere")
        ids = tuple(f"{number:032x}" for number in range(100, 112))
        first = replace(first, node_ids=ids, upkeep_host=None)
        both = replace(first, version=2, node_ids=ids + second.node_ids, endpoints=first.endpoints + second.endpoints,
                       ownership=Ownership((0, 1)))

        async def read() -> ClusterConfig:
            return first

        before = asyncio.all_tasks()
        client = await _Client.open(read, str(root), 0, SystemIo(), SystemClock(), "none", False, False)
        client.filesystem.attend("map", lambda: client.follow(both))
        assert await came_true(lambda: len(opened) == 12 + 11)
        await client.filesystem.close()
        assert await came_true(lambda: asyncio.all_tasks() == before and server.connections == 0)
