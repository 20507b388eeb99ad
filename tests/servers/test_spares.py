"""Spares of a cluster of real server processes: one takes the place of a node that was killed and becomes it, byte for
byte; never by itself, never two places, and whatever is interrupted on the way goes on."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from efs.clock import Clock
from efs.cluster import init_store, read_store_config
from efs.clusterfile import ClusterConfig, add_group, place_spare, read_cluster
from efs.clusterfs import open_cluster
from efs.clustermap import ServerNote
from efs.errors import InvalidArgument
from efs.etcd import EtcdStore
from efs.groups import GroupedFileSystem
from efs.handshake import Tokens
from efs.limits import ETCD_BEAT_MS, STRIPE_SHARDS
from efs.osio import SystemIo
from efs.sparedir import is_spare
from efs.spares import tell_spare
from kvstore.cli import spareplace
from tests.servers.test_cluster import BLOCKS, DEADLINE_MS, SHAPE, all_hit, back_to, back_to_health, stored
from tests.servers.test_etcd import leases
from tests.support.blocks import Blocks
from tests.support.cli import Outcome, run, run_process
from tests.support.etcdprocess import etcd_process, map_of
from tests.support.servers import EXTENT_BYTES, NODE_CAPACITY_BYTES, ServedCluster, ServerProcess, served_cluster
from tests.support.spares import SIZES, AddedSpare, replace, shards_in, spares
from tests.support.waiting import came_true
from tools.etcdprocess import EtcdProcess

pytestmark = pytest.mark.timeout(300)
"""Commands are processes of their own, and leases run out: seconds on a machine to itself, minutes beside others."""

IO = SystemIo()
GROUPS = [range(10), [10], [11]]


@pytest.fixture
def cluster() -> Iterator[ServedCluster]:
    with served_cluster(GROUPS) as made:
        made.write_file(upkeep_host=socket.gethostname())
        yield made


@asynccontextmanager
async def opened(where: str, nodes: int = 12) -> AsyncIterator[GroupedFileSystem]:
    filesystem = await open_cluster(where, care="none")
    try:
        await back_to(filesystem, nodes)
        yield filesystem
    finally:
        await filesystem.close()


async def filled(where: str, seed: int) -> Blocks:
    async with opened(where) as filesystem:
        return await stored(filesystem, seed)


async def command(*words: str) -> Outcome:
    return await asyncio.to_thread(run_process, "--json", *words)


async def replaced(where: str, number: int) -> Outcome:
    return await asyncio.to_thread(replace, where, number)


async def repaired_and_whole(cluster: ServedCluster, where: str, spare: AddedSpare, blocks: Blocks) -> None:
    """The spare is node 11 by now: filled, read from with two others gone, and the same as the old one."""
    done = await command("repair", "--store", where)
    assert (done.code, done.document()["rebuilt"]) == (0, BLOCKS), done.err
    async with opened(where) as filesystem:
        assert [node.records for node in await filesystem.nodes()] == [BLOCKS] * 12
        cluster.of(10).kill()
        assert (await all_hit(filesystem, blocks)).corrupt == 0
    spare.server.kill()
    spare.server.start()
    assert [line["node"] for line in spare.server.lines] == [11], "it is that node after a restart"
    cluster.of(10).start()
    assert spare.server.terminate()[0] == 0
    cluster.stop()
    old = await shards_in(cluster.config.node_paths[11], SHAPE)
    assert len(old) == BLOCKS
    assert await shards_in(spare.path, SHAPE) == old
    noted = read_store_config(IO, str(cluster.root))
    assert (noted.node_ids[11], noted.node_paths[11]) == (spare.node_id, spare.path)
    checked = await command("fsck", "--deep", "--store", str(cluster.root))
    assert checked.code == 0, checked.out + checked.err
    assert checked.document()["sums"]["readable"] == BLOCKS


# -- A cluster.toml --------------------------------------------------------------------------------------------------


async def test_a_spare_takes_the_place_of_a_killed_node_and_becomes_it(cluster: ServedCluster) -> None:
    blocks = await filled(cluster.file, 1)
    with spares(cluster, cluster.file, "a") as (spare,):
        assert [line["node"] for line in spare.server.lines] == [None]
        status = (await command("cluster", "status", cluster.file)).document()
        assert (status["nodes_serving"], status["spares"][0]["state"]) == (12, "ready")
        refused = await replaced(cluster.file, 11)
        assert (refused.code, "stop its server first" in refused.error_line) == (2, True)
        cluster.of(11).kill()
        before = read_cluster(IO, cluster.file)
        async with opened(cluster.file, 11) as filesystem:
            done = (await replaced(cluster.file, 11)).document()
            assert (done["node_id"], done["address"], done["incarnation"]) == (spare.node_id, spare.address, 2)
            assert (done["changed"], done["told"], done["skipped"], done["version"]) == (True, True, [], 2)
            await all_hit(filesystem, blocks)
        found = read_cluster(IO, cluster.file)
        assert (found.spares, found.node_ids[:11]) == ((), before.node_ids[:11])
        status = await command("cluster", "status", cluster.file)
        assert (status.code, status.document()["spares"]) == (0, [])
        assert [node["incarnation"] for node in status.document()["nodes"]] == [1] * 11 + [2]
        again = await replaced(cluster.file, 11)
        assert (again.code, "stop its server first" in again.error_line) == (2, True)
        await repaired_and_whole(cluster, cluster.file, spare, blocks)


async def test_a_spare_that_does_not_answer_is_skipped_and_named(cluster: ServedCluster) -> None:
    none = await replaced(cluster.file, 3)
    assert (none.code, "is being served" in none.error_line) == (2, True)
    cluster.of(11).kill()
    none = await replaced(cluster.file, 11)
    assert (none.code, "the cluster has no spare" in none.error_line) == (2, True)
    with spares(cluster, cluster.file, "a", "b") as (first, second):
        for spare in (first, second):
            spare.server.kill()
        gone = await replaced(cluster.file, 11)
        assert gone.code == 8
        why = f"none of the spares can take the place: {first.node_id} at {first.address}: "
        assert gone.error_line.startswith(why)
        assert second.node_id in gone.error_line
        before = read_cluster(IO, cluster.file)
        assert len(before.spares) == 2
        second.server.start()
        status = await command("cluster", "status", cluster.file)
        rows = {row["node_id"]: (row["state"], row["why"]) for row in status.document()["spares"]}
        assert (status.code, rows[second.node_id]) == (1, ("ready", None))
        assert rows[first.node_id] == ("unreachable", "Connection refused")
        text = await asyncio.to_thread(run_process, "cluster", "status", cluster.file)
        assert "unreachable: Connection refused" in text.out
        done = (await replaced(cluster.file, 11)).document()
        assert (done["node_id"], done["told"]) == (second.node_id, True)
        assert done["skipped"] == [{"node_id": first.node_id, "address": first.address, "why": "Connection refused"}]
        left = read_cluster(IO, cluster.file)
        assert [spare.node_id for spare in left.spares] == [first.node_id]
        async with opened(cluster.file):
            pass


async def test_a_spare_to_which_the_group_would_shrink_is_skipped_and_named(cluster: ServedCluster) -> None:
    half = (SIZES[0], str(int(SIZES[1]) // 2), *SIZES[2:])
    small = AddedSpare(cluster.file, cluster.root.parent, "small", sizes=half)
    small.server.start()
    try:
        cluster.of(11).kill()
        refused = await replaced(cluster.file, 11)
        assert refused.code == 8
        smallest = f"{small.address}: it has {int(half[1]) // 12} bytes, the other nodes {int(SIZES[1]) // 12} at least"
        assert refused.error_line.endswith(smallest)
        with spares(cluster, cluster.file, "whole") as (whole,):
            done = (await replaced(cluster.file, 11)).document()
            assert (done["node_id"], done["told"]) == (whole.node_id, True)
            assert [row["node_id"] for row in done["skipped"]] == [small.node_id]
    finally:
        small.server.kill()


async def test_a_replacement_that_was_interrupted_leaves_a_map_to_read_by_and_goes_on(cluster: ServedCluster) -> None:
    blocks = await filled(cluster.file, 2)
    cluster.of(11).kill()
    with spares(cluster, cluster.file, "a") as (spare,):
        # As the command leaves it that is killed after its write and before it tells the server.
        place_spare(IO, cluster.file, read_cluster(IO, cluster.file), 11, spare.node_id)
        async with opened(cluster.file, 11) as filesystem:
            assert (await all_hit(filesystem, blocks)).corrupt == 0
            more = await stored(filesystem, 3)
            assert is_spare(spare.path)
            status = await command("cluster", "status", cluster.file)
            assert (status.code, status.document()["nodes_serving"]) == (1, 11)
            listed = await asyncio.to_thread(spare.list)
            assert (listed.code, "was given the place 11" in listed.error_line) == (2, True)
            done = (await replaced(cluster.file, 11)).document()
            assert (done["node_id"], done["changed"], done["told"]) == (spare.node_id, False, True)
            assert (done["version"], done["incarnation"]) == (2, 2)
            await back_to_health(filesystem)
            await all_hit(filesystem, blocks)
            await all_hit(filesystem, more)
        noted = read_store_config(IO, str(cluster.root))
        assert (noted.node_ids[11], noted.node_paths[11]) == (spare.node_id, spare.path)


async def test_the_root_of_a_later_group_names_the_spare_that_took_a_place_in_it(cluster: ServedCluster,
                                                                                   tmp_path: Path) -> None:
    root, held = str(tmp_path / "more"), read_cluster(IO, cluster.file)
    init_store(IO, root, STRIPE_SHARDS * NODE_CAPACITY_BYTES, node_paths=None, durability="process",
               extent_bytes=EXTENT_BYTES, group_of=(held.cluster_id, 1))
    made = read_store_config(IO, root)
    add_group(IO, cluster.file, held, made.node_ids, [f"unix:/x/{index}" for index in range(STRIPE_SHARDS)], 0.0)
    with spares(cluster, cluster.file, "a") as (spare,):
        wrong = await asyncio.to_thread(replace, cluster.file, 19, "--root", str(cluster.root))
        assert (wrong.code, "the node is of group 1" in wrong.error_line) == (2, True)
        assert (await asyncio.to_thread(replace, cluster.file, 19, "--root", root)).document()["told"]
        noted = read_store_config(IO, root)
        assert (noted.node_ids[7], noted.node_paths[7]) == (spare.node_id, spare.path)
    assert spare.node_id not in read_store_config(IO, str(cluster.root)).node_ids


async def test_a_spare_that_dies_with_its_place_is_replaced_like_any_node(cluster: ServedCluster) -> None:
    blocks = await filled(cluster.file, 4)
    cluster.of(11).kill()
    with spares(cluster, cluster.file, "a", "b") as (first, second):
        place_spare(IO, cluster.file, read_cluster(IO, cluster.file), 11, first.node_id)
        first.server.kill()
        done = (await replaced(cluster.file, 11)).document()
        assert (done["node_id"], done["incarnation"], done["version"]) == (second.node_id, 3, 3)
        first.server.start()
        assert [line["node"] for line in first.server.lines] == [None], "it was never told, and is nobody's node"
        cluster.of(11).start()
        async with opened(cluster.file) as filesystem:
            assert [str(info.node_id) for info in await filesystem.nodes()][11] == second.node_id
            await all_hit(filesystem, blocks)
        refused = await asyncio.to_thread(first.list)
        assert (refused.code, refused.document()["changed"]) == (0, True), "it can be a spare again"


async def test_a_server_that_is_stopped_before_it_is_told_is_told_by_the_next_command(cluster: ServedCluster) -> None:
    cluster.of(11).kill()
    with spares(cluster, cluster.file, "a") as (spare,):
        place_spare(IO, cluster.file, read_cluster(IO, cluster.file), 11, spare.node_id)
        spare.server.signal(signal.SIGSTOP)
        none = await replaced(cluster.file, 11)
        assert (none.code, "the cluster has no spare" in none.error_line) == (2, True)
        spare.server.signal(signal.SIGCONT)
        assert (await replaced(cluster.file, 11)).document()["told"]
        async with opened(cluster.file):
            pass


def test_a_server_that_dies_before_it_is_told_is_said_and_told_by_the_next_command(
    cluster: ServedCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.of(11).kill()
    with spares(cluster, cluster.file, "a") as (spare,):
        killed: list[int] = []

        async def tell(config: ClusterConfig, number: int, tokens: Tokens, clock: Clock) -> None:
            spare.server.kill()
            killed.append(number)
            await tell_spare(config, number, tokens, clock)

        monkeypatch.setattr(spareplace, "tell_spare", tell)
        done = run("--json", "--store", cluster.file, "cluster", "replace-node", "11", "--yes")
        document = done.document()
        assert (done.code, killed, document["changed"], document["told"]) == (1, [11], True, False)
        assert read_cluster(IO, cluster.file).node_ids[11] == spare.node_id
        spare.server.start()
        again = replace(cluster.file, 11)
        document = again.document()
        assert (again.code, document["changed"], document["told"], document["version"]) == (0, False, True, 2)
        assert not is_spare(spare.path)


async def test_spares_are_added_and_removed_by_their_names(cluster: ServedCluster, tmp_path: Path) -> None:
    words = ("cluster", "add-spare", cluster.file, "--directory", str(tmp_path / "a"), "--address")
    done = (await command(*words, "unix:/x/a", *SIZES)).document()
    assert (done["changed"], done["spares"], done["version"]) == (True, 1, 1)
    again = (await command(*words, "unix:/x/a")).document()
    assert (again["node_id"], again["changed"]) == (done["node_id"], False)
    moved = await command(*words, "unix:/x/b")
    assert (moved.code, "is listed at unix:/x/a: remove that spare first" in moved.error_line) == (2, True)
    other = ("cluster", "add-spare", cluster.file, "--directory", str(tmp_path / "b"), "--address", "unix:/x/a", *SIZES)
    assert (await command(*other)).document()["spares"] == 2
    both = await command("cluster", "remove-spare", cluster.file, "unix:/x/a")
    assert (both.code, "2 spares are at unix:/x/a" in both.error_line) == (2, True)
    gone = (await command("cluster", "remove-spare", cluster.file, done["node_id"])).document()
    assert (gone["node_id"], gone["spares"]) == (done["node_id"], 1)
    assert (await command("cluster", "remove-spare", cluster.file, "unix:/x/a")).document()["spares"] == 0
    unknown = await command("cluster", "remove-spare", cluster.file, done["node_id"])
    assert (unknown.code, f"no spare {done['node_id']}" in unknown.error_line) == (2, True)
    back = (await command(*words, "unix:/x/b")).document()
    assert (back["node_id"], back["changed"]) == (done["node_id"], True)


async def test_a_spare_is_listed_with_a_warning_where_another_node_is_served(cluster: ServedCluster,
                                                                             tmp_path: Path) -> None:
    words = ("cluster", "add-spare", cluster.file, "--directory", str(tmp_path / "a"), *SIZES, "--address")
    taken = (await command(*words, cluster.addresses[0])).document()
    assert taken["spares"] == 1
    (warning,) = taken["warnings"]
    assert f"another server is at {cluster.addresses[0]}" in warning
    other = ("cluster", "add-spare", cluster.file, "--directory", str(tmp_path / "b"), *SIZES, "--address", "unix:/x/b")
    assert (await command(*other)).document()["warnings"] == []


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("add-spare", "FILE", "--directory", "NEW", "--address", "tcp:h:0", *SIZES), "clients need the port"),
        (("add-spare", "FILE", "--directory", "NEW", "--address", "ftp:x", *SIZES), "must be unix:PATH"),
        (("add-spare", "FILE", "--directory", "NEW", "--address", "unix:/x"), "no capacity given"),
        (("add-spare", "FILE", "--directory", "NEW", "--address", "unix:/x", "--capacity", "1MiB"), "too few"),
        (("add-spare", "FILE", "--directory", "FULL", "--address", "unix:/x", *SIZES), "is not an empty directory"),
        (("add-spare", "/nowhere/c.toml", "--directory", "NEW", "--address", "unix:/x", *SIZES), "/nowhere/c.toml"),
        (("add-spare", "etcd://nowhere", "--directory", "NEW", "--address", "unix:/x"), "must be etcd://HOST"),
        (("remove-spare", "FILE", "tcp:h:1"), "no spare tcp:h:1"),
        (("replace-node", "12", "--yes", "--store", "FILE"), "no node has index 12"),
        (("replace-node", "11", "--store", "FILE"), "say --yes"),
        (("replace-node", "11", "--yes", "--store", "FILE", "--address", "unix:/x"), "belong together"),
        (("replace-node", "11", "--yes", "--store", "FILE", "--directory", "NEW"), "belong together"),
    ],
)
def test_a_request_that_cannot_be_meant_is_refused_in_one_line(tmp_path: Path, words: tuple[str, ...],
                                                               why: str) -> None:
    made = run("cluster", "init", str(tmp_path / "c"), *SIZES, "--listen", "unix")
    assert made.code == 0, made.err
    file, new, full = (str(tmp_path / "c" / name) for name in ("cluster.toml", "new", "nodes/00"))
    before = Path(file).read_bytes()
    done = run("cluster", *({"FILE": file, "NEW": new, "FULL": full}.get(word, word) for word in words))
    assert (done.code, done.out) == (2, "")
    assert why in done.error_line
    assert Path(file).read_bytes() == before
    assert not Path(new).exists()


# -- A map in etcd ---------------------------------------------------------------------------------------------------


@pytest.fixture
def in_etcd() -> Iterator[tuple[EtcdProcess, ServedCluster]]:
    with etcd_process() as etcd, served_cluster(GROUPS, "--register", str(etcd.url)) as cluster:
        yield etcd, cluster


@asynccontextmanager
async def lease_of(store: EtcdStore, note: ServerNote) -> AsyncIterator[None]:
    """A server that only etcd hears."""
    lease = await store.grant()
    await store.note(note, lease)

    async def renew() -> None:
        own = EtcdStore(store.url)
        try:
            while await own.renew(lease):
                await asyncio.sleep(1.0)
        finally:
            await own.close()

    renewing = asyncio.create_task(renew())
    try:
        yield
        assert note.node_id in await store.servers()
    finally:
        renewing.cancel()
        await asyncio.wait((renewing,))
        await store.revoke(lease)


async def test_clients_of_a_map_in_etcd_follow_to_the_spare_and_nothing_moves_it_there_by_itself(
    in_etcd: tuple[EtcdProcess, ServedCluster]
) -> None:
    etcd, cluster = in_etcd
    where, more = str(etcd.url), ("--register", str(etcd.url))
    store = EtcdStore(etcd.url)
    await store.create(map_of(cluster, upkeep_host=socket.gethostname()))
    blocks = await filled(where, 5)
    with spares(cluster, where, "a", more=more) as (spare,):
        await leases(store, 13)
        note = (await store.servers())[spare.node_id]
        assert (note.node_index, note.state) == (-1, "spare")
        filesystem = await open_cluster(where, care="none")
        await back_to_health(filesystem)
        before = (await store.read()).map
        assert [listed.node_id for listed in before.spares] == [spare.node_id]
        cluster.of(11).kill()
        await leases(store, 12)
        until = time.monotonic() + 2 * ETCD_BEAT_MS / 1000
        while time.monotonic() < until:
            assert (await all_hit(filesystem, blocks)).corrupt == 0
        assert (await store.read()).map == before, "a lease that ended moves nothing"
        assert is_spare(spare.path)
        async with lease_of(store, ServerNote(before.places[11].node_id, 11, (), "serving")):
            refused = await replaced(where, 11)
        assert (refused.code, "wait for its lease to end" in refused.error_line) == (2, True)
        assert (await store.read()).map == before
        done = (await replaced(where, 11)).document()
        assert (done["node_id"], done["incarnation"], done["told"]) == (spare.node_id, 2, True)
        found = (await store.read()).map
        assert (found.version, found.spares, found.places[11].node_id) == (before.version + 1, (), spare.node_id)
        await back_to_health(filesystem)
        await all_hit(filesystem, blocks)
        assert await came_true(lambda: filesystem.counters.get("places_changed") == 1)
        await filesystem.close()
        cluster.of(11).start()
        status = await command("cluster", "status", where)
        assert (status.code, status.document()["nodes"][11]["node_id"]) == (0, spare.node_id)
        cluster.of(11).kill()
        await repaired_and_whole(cluster, where, spare, blocks)
    await store.close()


async def test_of_two_operators_on_one_spare_exactly_one_wins(in_etcd: tuple[EtcdProcess, ServedCluster]) -> None:
    etcd, cluster = in_etcd
    where, more = str(etcd.url), ("--register", str(etcd.url))
    store = EtcdStore(etcd.url)
    await store.create(map_of(cluster))
    blocks = await filled(where, 6)
    with spares(cluster, where, "a", "b", more=more) as (first, second):
        for number in (10, 11):
            cluster.of(number).kill()
        await leases(store, 12)
        # One after the other, but both by the map as it was before.
        held = await store.read()
        await store.change(held, held.map.with_spare_placed(10, first.node_id))
        for changed in (held.map.with_spare_placed(11, first.node_id), held.map.without_spare(first.node_id)):
            with pytest.raises(InvalidArgument, match="somebody else has changed the map"):
                await store.change(held, changed)
        assert (await replaced(where, 10)).document()["changed"] is False
        # At the same time, as processes, on the spare that is left; node 10 is given up once more for that.
        first.server.kill()
        await leases(store, 11)
        outcomes = await asyncio.gather(*(replaced(where, number) for number in (10, 11)))
        assert sorted(outcome.code for outcome in outcomes) == [0, 2]
        won = 10 + [outcome.code for outcome in outcomes].index(0)
        lost = outcomes[21 - won - 10]
        assert "somebody else has changed" in lost.error_line or "has no spare" in lost.error_line
        found = (await store.read()).map
        assert found.spares == ()
        assert [number for number, place in enumerate(found.places) if place.node_id == second.node_id] == [won]
        async with opened(where, 11) as filesystem:
            assert (await all_hit(filesystem, blocks)).corrupt == 0
    await store.close()


async def test_two_operators_on_one_spare_of_a_file(cluster: ServedCluster) -> None:
    blocks = await filled(cluster.file, 7)
    with spares(cluster, cluster.file, "a") as (spare,):
        for number in (10, 11):
            cluster.of(number).kill()
        outcomes = await asyncio.gather(*(replaced(cluster.file, number) for number in (10, 11)))
        assert sorted(outcome.code for outcome in outcomes) == [0, 2]
        won = 10 + [outcome.code for outcome in outcomes].index(0)
        found = read_cluster(IO, cluster.file)
        assert [number for number, node_id in enumerate(found.node_ids) if node_id == spare.node_id] == [won]
        async with opened(cluster.file, 11) as filesystem:
            assert (await all_hit(filesystem, blocks)).corrupt == 0
            served = await filesystem.nodes()
            assert served[won].node_id == spare.node_id
            report = await filesystem.put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
            assert report.acked + report.already + report.failed == BLOCKS


async def test_a_server_of_nodes_and_spares_is_both(cluster: ServedCluster) -> None:
    """A spare in the process of other nodes becomes a node beside them."""
    spare = AddedSpare(cluster.file, cluster.root.parent, "a")
    cluster.of(11).kill()
    cluster.of(10).kill()
    both = ServerProcess([cluster.config.node_paths[10], spare.path], cluster.of(10).address, "--listen",
                         spare.address)
    both.start()
    try:
        assert [line["node"] for line in both.lines] == [10, None]
        assert (await replaced(cluster.file, 11)).document()["told"]
        await filled(cluster.file, 8)
        assert both.terminate() == (0, both_warns(spare))
    finally:
        if both.running:
            both.kill()


def both_warns(spare: AddedSpare) -> str:
    return f"kvstore: warning: the spare {spare.node_id} is node 11 of group 0 from now on\n"
