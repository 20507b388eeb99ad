"""A store over real server processes: right bytes or a miss, by the deadline, whatever becomes of servers and
connections."""

from __future__ import annotations

import asyncio
import mmap
import os
import signal
import socket
import time
from functools import partial
from typing import Any

import numpy as np
import pytest

from efs.clusterfs import open_cluster
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import CorruptRecord, IdentityMismatch, InvalidArgument, Locked, StoreNotFound
from efs.groups import GroupedFileSystem
from efs.limits import CLOSE_MS
from efs.link import Link
from efs.nodedir import SLAB_FILE, SLABS_DIRECTORY
from efs.remote import RemoteNode
from efs.shape import BlockShape
from efs.types import GetReport
from efs.wire import Kind
from tests.support.blocks import Blocks, make_blocks
from tests.support.cli import run_process
from tests.support.servers import ServedCluster, short_directory
from tests.support.waiting import LATE_S, came_true
from tools.chaosrig.wireproxy import WireProxy

SHAPE = BlockShape(40_960, (8_192, 8_192, 8_192, 16_384))
BLOCKS = 128
DEADLINE_MS = 20_000.0


async def stored(filesystem: GroupedFileSystem, seed: int) -> Blocks:
    blocks = make_blocks(BLOCKS, seed=seed, shape=SHAPE, run=64)
    report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
    assert (report.acked, report.failed) == (BLOCKS, 0)
    return blocks


async def fetch(filesystem: GroupedFileSystem, blocks: Blocks, deadline_ms: float = DEADLINE_MS) -> GetReport:
    """A fetch whose every delivered block is compared, and which returned by its deadline."""
    out = np.full(BLOCKS * SHAPE.block_bytes, 0xEE, np.uint8)
    began = time.monotonic()
    report = await filesystem.get_into(blocks.keys, SHAPE, out, deadline_ms=deadline_ms)
    assert time.monotonic() - began < deadline_ms / 1000 + LATE_S
    start = 0
    for offset, size in zip(SHAPE.segment_offsets, SHAPE.segment_bytes, strict=True):
        segment = out[start : start + BLOCKS * size].reshape(BLOCKS, size)
        start += BLOCKS * size
        wrong = (segment != blocks.data[:, offset : offset + size]).any(axis=1) & np.array(report.ok)
        assert not wrong.any()
    return report


async def all_hit(filesystem: GroupedFileSystem, blocks: Blocks) -> GetReport:
    report = await fetch(filesystem, blocks)
    assert report.blocks == BLOCKS
    return report


async def back_to_health(filesystem: GroupedFileSystem) -> None:
    await back_to(filesystem, 12)


async def back_to(filesystem: GroupedFileSystem, nodes: int) -> None:
    assert await came_true(lambda: len(filesystem.groups[0].health.readable()) == nodes, 40)


async def sent_by(filesystem: GroupedFileSystem) -> int:
    """Bytes of slots that the servers have sent."""
    return sum(node.counters.get("wire_read_bytes", 0) for node in await filesystem.nodes())


async def test_what_is_put_is_found_and_fetched(filesystem: GroupedFileSystem) -> None:
    blocks = await stored(filesystem, 1)
    assert await filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS) == BLOCKS
    before = await sent_by(filesystem)
    await all_hit(filesystem, blocks)
    asked_bytes = 11 * BLOCKS * SHAPE.slot_bytes
    assert await sent_by(filesystem) - before >= asked_bytes, "what was read did not come over the wire"
    report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
    assert report.already == BLOCKS
    nodes = await filesystem.nodes()
    assert [node.state for node in nodes] == ["serving"] * 12
    assert len({node.records for node in nodes}) == 1


@pytest.mark.usefixtures("patient")
async def test_a_healthy_fetch_is_one_round_trip_to_each_node_that_has_a_server_of_its_own(
    filesystem: GroupedFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = await stored(filesystem, 45)
    asked: list[Kind] = []
    ask = Link.ask

    def counted(link: Link, kind: Kind, *arguments: Any, **more: Any) -> Any:
        asked.append(kind)
        return ask(link, kind, *arguments, **more)

    monkeypatch.setattr(Link, "ask", counted)
    seen: list[list[Kind]] = []
    for _ in range(5):  # Upkeep asks servers too, now and then.
        asked.clear()
        await all_hit(filesystem, blocks)
        seen.append(list(asked))
    assert [Kind.GET] * 12 + [Kind.READ] * 9 in seen


@pytest.mark.usefixtures("patient")
async def test_a_block_of_another_shape_costs_no_other_block(filesystem: GroupedFileSystem) -> None:
    """Its slots cannot be read as those of its neighbours: a server ends the get there, the rest is read."""
    blocks = make_blocks(BLOCKS, seed=46, shape=SHAPE, run=64)
    other = make_blocks(1, seed=47, shape=BlockShape(20_480, (20_480,)), keys=blocks.keys[70:71])
    await filesystem.put(other.items, other.shape, other.data, deadline_ms=DEADLINE_MS)
    report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
    assert report.failed == 0
    found = await fetch(filesystem, blocks)
    assert found.ok == tuple(at != 70 for at in range(BLOCKS))
    assert (found.rebuilt, found.missing) == (0, 0)


async def test_several_clients_have_one_cluster_open_at_once(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    others = [await open_cluster(cluster.file) for _ in range(3)]
    blocks = [make_blocks(BLOCKS, seed=20 + number, shape=SHAPE, run=64) for number in range(4)]
    clients = [filesystem, *others]
    reports = await asyncio.gather(*(client.put(some.items, SHAPE, some.data, deadline_ms=DEADLINE_MS)
                                     for client, some in zip(clients, blocks, strict=True)))
    assert [report.acked for report in reports] == [BLOCKS] * 4
    same = make_blocks(BLOCKS, seed=30, shape=SHAPE, run=64)
    await asyncio.gather(*(client.put(same.items, SHAPE, same.data, deadline_ms=DEADLINE_MS) for client in clients))
    for client, some in zip(clients, [*blocks[1:], same], strict=True):
        await all_hit(client, some)
    for other in others:
        await other.close()


async def test_two_servers_killed_cost_no_hit_and_puts_fail_until_one_is_back(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 2)
    for node in (10, 11):
        cluster.of(node).kill()
    report = await all_hit(filesystem, blocks)
    assert report.rebuilt > 0
    assert await came_true(lambda: len(filesystem.groups[0].health.readable()) == 10)
    more = make_blocks(BLOCKS, seed=3, shape=SHAPE, run=64)
    assert (await filesystem.put(more.items, SHAPE, more.data, deadline_ms=DEADLINE_MS)).failed == BLOCKS
    assert filesystem.counters.get("remote_lost") >= 4
    cluster.of(10).start()
    assert await came_true(lambda: len(filesystem.groups[0].health.readable()) == 11, 40)
    report_put = await filesystem.put(more.items, SHAPE, more.data, deadline_ms=DEADLINE_MS)
    assert (report_put.acked, report_put.at_risk) == (BLOCKS, BLOCKS)
    await all_hit(filesystem, more)
    cluster.of(11).start()
    await back_to_health(filesystem)
    await all_hit(filesystem, blocks)


async def test_top_shows_every_node_of_a_cluster_and_which_one_is_stopped(
        cluster: ServedCluster, filesystem: GroupedFileSystem) -> None:
    await stored(filesystem, seed=40)

    def top() -> Any:
        outcome = run_process("--json", "top", cluster.file, "--once", "--interval", "0.1")
        assert outcome.code == 0, outcome.err
        return outcome.document()

    document = await asyncio.to_thread(top)
    assert document["nodes_serving"] == 12
    assert all(node["records"] > 0 and node["counters"]["node_put_records"] > 0 for node in document["nodes"])
    assert all(node["puts_per_s"] == 0 and node["reads_per_s"] == 0 for node in document["nodes"])
    cluster.of(9).signal(signal.SIGSTOP)
    document = await asyncio.to_thread(top)
    assert document["nodes_serving"] == 11
    assert (document["nodes"][9]["state"], document["nodes"][9]["records"]) == ("suspect", None)


async def test_a_stopped_server_costs_no_hit_and_is_used_again_when_it_goes_on(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 4)
    cluster.of(10).signal(signal.SIGSTOP)
    hedged = rebuilt = 0
    for _ in range(3):
        report = await all_hit(filesystem, blocks)
        hedged += report.hedged
        rebuilt += report.rebuilt
    assert rebuilt > 0
    assert await came_true(lambda: filesystem.groups[0].health.state(10) == "suspect", 10)
    assert filesystem.counters.get("rebuilt_blocks") >= rebuilt
    assert filesystem.counters.get("hedged_shards") == hedged
    await all_hit(filesystem, blocks)
    cluster.of(10).signal(signal.SIGCONT)
    await back_to_health(filesystem)
    await all_hit(filesystem, blocks)


async def test_a_server_stopped_in_the_middle_of_fetches_costs_no_hit(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 5)
    fetches = [asyncio.create_task(all_hit(filesystem, blocks)) for _ in range(4)]
    await asyncio.sleep(0)
    cluster.of(9).signal(signal.SIGSTOP)
    await asyncio.gather(*fetches)
    cluster.of(11).kill()
    await all_hit(filesystem, blocks)
    cluster.of(9).signal(signal.SIGCONT)
    await all_hit(filesystem, blocks)
    assert filesystem.counters.get("rebuilt_blocks") > 0


async def test_three_servers_killed_are_a_clean_miss_and_all_hit_again_when_they_are_back(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 6)
    for node in (9, 10, 11):
        cluster.of(node).kill()
    report = await fetch(filesystem, blocks, 2_000)
    assert report.blocks == 0
    assert not any(report.ok)
    for node in (9, 10, 11):
        cluster.of(node).start()
    await back_to_health(filesystem)
    await all_hit(filesystem, blocks)


async def test_two_stopped_and_one_killed_is_a_miss_by_the_deadline(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 7)
    cluster.of(9).signal(signal.SIGSTOP)
    cluster.of(10).signal(signal.SIGSTOP)
    cluster.of(11).kill()
    report = await fetch(filesystem, blocks, 1_500)
    assert report.blocks == 0
    for node in (9, 10):
        cluster.of(node).signal(signal.SIGCONT)
    assert await came_true(lambda: len(filesystem.groups[0].health.readable()) == 11, 40)
    await all_hit(filesystem, blocks)


async def test_a_dripping_server_costs_no_hit(cluster: ServedCluster, filesystem: GroupedFileSystem) -> None:
    blocks = await stored(filesystem, 8)
    with short_directory() as base:
        async with WireProxy(Endpoint(path=f"{base}/p"), parse_endpoint(cluster.addresses[1])) as proxy:
            cluster.write_file({9: str(proxy.endpoint)})
            through = await open_cluster(cluster.file)
            await all_hit(through, blocks)
            proxy.hurt("drip")
            for _ in range(3):
                await all_hit(through, blocks)
            assert proxy.struck["drip"] > 0
            assert through.counters.get("rebuilt_blocks") > 0
            assert through.counters.get("remote_late") > 0
            proxy.heal()
            await back_to_health(through)
            await all_hit(through, blocks)
            await through.close()


async def test_a_network_that_takes_everything_and_gives_nothing_back_costs_no_hit(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 9)
    with short_directory() as base:
        async with WireProxy(Endpoint(path=f"{base}/p"), parse_endpoint(cluster.addresses[2])) as proxy:
            cluster.write_file({10: str(proxy.endpoint)})
            through = await open_cluster(cluster.file)
            await all_hit(through, blocks)
            proxy.hurt("deaf")
            await all_hit(through, blocks)
            assert await came_true(lambda: through.groups[0].health.state(10) == "suspect", 10)
            proxy.heal()
            await back_to_health(through)
            await all_hit(through, blocks)
            await through.close()


def lost_more_than(client: GroupedFileSystem, connections: int) -> bool:
    return client.counters.get("remote_lost") > connections


async def test_connections_cut_again_and_again_cost_hits_at_most(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    blocks = await stored(filesystem, 10)
    with short_directory() as base:
        async with WireProxy(Endpoint(path=f"{base}/p"), parse_endpoint(cluster.addresses[0])) as proxy:
            cluster.write_file({index: str(proxy.endpoint) for index in range(9)})
            through = await open_cluster(cluster.file)
            await all_hit(through, blocks)
            cuts = 0
            for pause in range(12):
                await back_to_health(through)
                lost = through.counters.get("remote_lost")
                fetching = asyncio.create_task(fetch(through, blocks, 5_000))
                for _ in range(pause * 4):
                    await asyncio.sleep(0)
                proxy.cut()
                cuts += not fetching.done()
                await fetching
                assert await came_true(partial(lost_more_than, through, lost + 17))
            assert cuts > 6
            await back_to_health(through)
            await all_hit(through, blocks)
            await through.close()


async def test_a_client_closes_while_a_server_hangs(cluster: ServedCluster, filesystem: GroupedFileSystem) -> None:
    client = await open_cluster(cluster.file)
    assert await came_true(lambda: len(client.groups[0].health.readable()) == 12)
    hung = client.groups[0]._nodes[9]
    assert isinstance(hung, RemoteNode)
    cluster.of(9).signal(signal.SIGSTOP)
    blocks = make_blocks(BLOCKS, seed=12, shape=SHAPE, run=64)
    putting = asyncio.create_task(client.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS))
    assert await came_true(lambda: len(hung._reading._pending) > 0)
    began = time.monotonic()
    await client.close()
    assert time.monotonic() - began < CLOSE_MS / 1000
    report = await putting
    assert report.acked + report.failed == BLOCKS
    cluster.of(9).signal(signal.SIGCONT)
    await back_to_health(filesystem)


# -- Who looks after the store ---------------------------------------------------------------------------------------


async def test_one_client_looks_after_the_store_and_only_where_the_file_says_so(cluster: ServedCluster) -> None:
    cluster.write_file(upkeep_host=socket.gethostname())
    first = await open_cluster(cluster.file)
    second = await open_cluster(cluster.file)
    assert [client._lock is not None for client in (first, second)] == [True, False]
    blocks = await stored(second, 11)
    assert (await first.sweep()).hollow == 0
    assert await first.collect(deadline_ms=DEADLINE_MS) == dict.fromkeys(range(12), 0)
    assert await second.collect(deadline_ms=DEADLINE_MS) == {}
    with pytest.raises(Locked, match=f"is owned by process {os.getpid()}"):
        await open_cluster(cluster.file, care="by hand")
    await all_hit(first, blocks)
    await first.close()
    third = await open_cluster(cluster.file)
    assert third._lock is not None
    await third.close()
    await second.close()
    cluster.write_file(upkeep_host="another-machine")
    elsewhere = await open_cluster(cluster.file)
    assert elsewhere._lock is None
    await elsewhere.close()
    with pytest.raises(InvalidArgument, match="looked after on another-machine"):
        await open_cluster(cluster.file, care="by hand")


async def test_what_a_server_missed_is_repaired_through_the_servers(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    cluster.of(11).kill()
    assert await came_true(lambda: len(filesystem.groups[0].health.readable()) == 11)
    blocks = make_blocks(BLOCKS, seed=13, shape=SHAPE, run=64)
    report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
    assert (report.acked, report.at_risk) == (BLOCKS, BLOCKS)
    cluster.of(11).start()
    cluster.write_file(upkeep_host=socket.gethostname())
    keeper = await open_cluster(cluster.file, care="by hand")
    await back_to_health(keeper)
    repaired = await keeper.groups[0].upkeep.repair_keys(blocks.keys)
    assert not repaired.failed
    assert keeper.counters.get("repair_rebuilt") >= BLOCKS
    await keeper.close()
    cluster.of(9).kill()
    cluster.of(10).kill()
    await back_to(filesystem, 10)
    assert (await all_hit(filesystem, blocks)).rebuilt == BLOCKS


async def test_a_client_that_does_not_look_after_the_store_mends_what_its_reads_meet(
    cluster: ServedCluster, filesystem: GroupedFileSystem
) -> None:
    assert filesystem._lock is None
    blocks = await stored(filesystem, 14)
    shard = blocks.data[0, : SHAPE.shard_bytes].tobytes()
    rotted = [flipped for path in cluster.config.node_paths if (flipped := flip_payload(path, shard))]
    assert len(rotted) == 1
    assert (await all_hit(filesystem, blocks)).corrupt == 1
    await filesystem.groups[0].mender.settled()
    assert filesystem.counters.get("node_mended") == 1
    report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
    assert (report.already, report.at_risk) == (BLOCKS, 0)


def flip_payload(directory: str, payload: bytes) -> bool:
    """Flip a bit of a payload where a node has it on disk; whether it has it."""
    path = os.path.join(directory, SLABS_DIRECTORY, SLAB_FILE)
    with open(path, "r+b") as slab, mmap.mmap(slab.fileno(), 0) as held:
        at = held.find(payload)
        if at >= 0:
            held[at] ^= 1
        return at >= 0


# -- The file --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("format_version = 1", "format_version = 2", "format version 2"),
        ("durability", "durabilty", "durab"),
        ('durability = "process"', 'durability = "none"', "none"),
        ("[[node]]\n", "", "cluster.toml"),
        ("tcp:", "http:", "must be unix:PATH"),
    ],
)
async def test_a_file_that_says_something_else_is_refused(
    cluster: ServedCluster, old: str, new: str, why: str
) -> None:
    text = (cluster.root / "cluster.toml").read_text()
    assert old in text
    other = cluster.root / "other-cluster.toml"
    other.write_text(text.replace(old, new))
    with pytest.raises(Exception, match=why):
        await open_cluster(str(other))


async def test_a_file_that_names_other_nodes_is_refused(cluster: ServedCluster) -> None:
    text = (cluster.root / "cluster.toml").read_text()
    other = cluster.root / "other-cluster.toml"
    swapped = text.replace(cluster.config.node_ids[3], "swap").replace(cluster.config.node_ids[4],
                                                                      cluster.config.node_ids[3])
    other.write_text(swapped.replace("swap", cluster.config.node_ids[4]))
    with pytest.raises(Exception, match="index is"):
        await open_cluster(str(other))
    other.write_text(text.replace(cluster.config.node_ids[3], cluster.config.node_ids[4]))
    with pytest.raises(CorruptRecord, match="named twice"):
        await open_cluster(str(other))
    other.write_text(text.replace('durability = "process"', 'durability = "power"'))
    with pytest.raises(IdentityMismatch, match="durability is process, expected power"):
        await open_cluster(str(other))
    with pytest.raises(StoreNotFound):
        await open_cluster(str(cluster.root / "absent.toml"))


