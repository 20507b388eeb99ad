"""A spare at a server: nobody's node until an operator gives it a place, then the node of that place and no other."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace

import pytest

from efs.clock import Deadline, SystemClock
from efs.clusterfile import ClusterConfig, Spare
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import HandshakeFailed, InvalidArgument, Locked, NodeUnavailable
from efs.handshake import Role, Tokens
from efs.limits import MIB
from efs.link import RemotePlace
from efs.messages import decode_error, encode_keys, encode_place_given
from efs.metrics import CounterFile
from efs.nodedir import NodePlace, plan_node, read_config
from efs.osio import SystemIo
from efs.ownership import Ownership
from efs.remote import RemoteNode
from efs.serving import serve_nodes
from efs.sparedir import create_spare, is_spare
from efs.spares import NoSpare, Standing, ask_spare, first_spare, standing, tell_spare
from efs.types import NO_PLACE
from efs.wire import Kind, encode_frame
from tests.support.faultio import FaultIo
from tests.support.rawclient import RawClient, hello_for
from tests.support.records import make_keys, make_records
from tests.support.servers import short_directory
from tests.support.statuspages import fetch

CLUSTER, NODE = "c" * 32, "d" * 32
NUMBER = 19
"""Index 7 of group 1."""
CLOCK = SystemClock()
SOON_MS = 20_000


def soon() -> Deadline:
    return Deadline.after_ms(CLOCK, SOON_MS)


@dataclass(slots=True)
class ServedSpares:
    """`serve_nodes` in this process over one spare."""

    path: str
    endpoint: Endpoint
    tokens: Tokens
    io: FaultIo = field(default_factory=FaultIo)
    page: str = ""

    def config(self, number: int | None = NUMBER) -> ClusterConfig:
        """Of a cluster of two groups that has the spare in a place, or in none."""
        ids = tuple(NODE if other == number else f"{other:032x}" for other in range(24))
        nowhere = Endpoint(path=f"{self.path}-nowhere")
        endpoints = tuple(self.endpoint if other == number else nowhere for other in range(24))
        return ClusterConfig(CLUSTER, "process", ids, endpoints, ownership=Ownership((0, 1)))

    async def tell(self, number: int = NUMBER, tokens: Tokens | None = None) -> None:
        await tell_spare(self.config(number), number, tokens or self.tokens, CLOCK)

    async def connect(self, node_index: int, role: Role = Role.DATA) -> RemoteNode:
        place = RemotePlace(self.endpoint, CLUSTER, NODE, node_index, role, self.tokens, "process")
        return await RemoteNode.open(place, CLOCK, CounterFile.in_memory(), SOON_MS)

    async def client(self, role: Role = Role.DATA, node_index: int = NO_PLACE) -> RawClient:
        return await RawClient.admitted(self.endpoint, hello_for(node_index, node_id=NODE, role=role),
                                        self.tokens.of(role))


@asynccontextmanager
async def serving(path: str | None = None, tokens: Tokens | None = None) -> AsyncIterator[ServedSpares]:
    with short_directory() as base:
        if path is None:
            path = str(base / "spare")
            create_spare(SystemIo(), path, CLUSTER, NODE, plan_node(8 * MIB, 1 * MIB), "boot-1")
        made = ServedSpares(path, parse_endpoint("unix:s", str(base)), tokens or Tokens())
        ready, stop = asyncio.Event(), asyncio.Event()

        def note(nodes: object, addresses: object, page: Endpoint | None) -> None:
            made.page = str(page)
            ready.set()

        task = asyncio.create_task(serve_nodes([path], [made.endpoint], io=made.io, clock=CLOCK, tokens=made.tokens,
                                               durability="process", mapped=False, ready=note, stop=stop,
                                               metrics=parse_endpoint("tcp:127.0.0.1:0")))
        waiting = asyncio.create_task(ready.wait())
        await asyncio.wait((task, waiting), return_when=asyncio.FIRST_COMPLETED)
        try:
            if task.done():
                waiting.cancel()
                await task
            yield made
        finally:
            stop.set()
            if not task.done():
                await task


async def answer(client: RawClient, frame: bytes) -> str:
    """What the server says to a request: the error, or nothing."""
    await client.send(frame)
    header, metadata, _ = await client.frame()
    return "" if header.kind is Kind.ANSWER else str(decode_error(metadata, NO_PLACE))


async def test_a_spare_says_what_it_is_and_holds_nothing() -> None:
    async with serving() as served:
        config = served.config()
        spare = Spare(NODE, served.endpoint)
        info = await ask_spare(config, spare, served.tokens, CLOCK)
        assert (info.node_id, info.directory, info.capacity_bytes) == (NODE, served.path, 8 * MIB)
        client = await served.client(Role.OPERATOR)
        for kind, metadata in ((Kind.LOOK_UP, encode_keys(make_keys(3, 1))), (Kind.LIST, b""), (Kind.COLLECT, b"")):
            said = await answer(client, encode_frame(kind, 1, metadata, deadline_ms=5_000))
            assert said == "the spare is unavailable: it is in no place and holds nothing"
        client.close()
        assert (await fetch(served.page, "/healthz")).status == 200
        assert (await fetch(served.page, "/metrics")).values("kvstore_node_serving") == {}
        assert is_spare(served.path)


async def test_it_answers_nobody_as_a_node_before_it_was_given_the_place() -> None:
    async with serving() as served:
        node = await served.connect(7)
        with pytest.raises(NodeUnavailable, match="is a spare that has not been given the place 7"):
            await node.info(soon())
        assert node.suspect
        assert await standing(served.config(), NUMBER, served.tokens, CLOCK) == (
            Standing.UNTOLD, await ask_spare(served.config(), Spare(NODE, served.endpoint), served.tokens, CLOCK))
        await served.tell()
        assert not is_spare(served.path)
        assert read_config(SystemIo(), served.path).place == NodePlace(CLUSTER, 1, 7)
        # The client that was refused comes back by itself.
        async with asyncio.timeout(20):
            while node.suspect:
                await asyncio.sleep(0.01)
        records = make_records(5, 7)
        assert (await node.put(records.batch(), soon())).stored.all()
        assert (await node.info(soon())).records == 5
        await node.close()
        assert await standing(served.config(), NUMBER, served.tokens, CLOCK) == (Standing.SERVED, None)
        page = await fetch(served.page, "/metrics")
        assert page.values("kvstore_node_records") == {"7": 5}
        with pytest.raises(HandshakeFailed, match="index is 7, expected that of a spare"):
            await ask_spare(served.config(), Spare(NODE, served.endpoint), served.tokens, CLOCK)
        with pytest.raises(HandshakeFailed, match="index is 7, expected 8"):
            await served.connect(8)
        client = await served.client(Role.OPERATOR, 7)
        again = encode_frame(Kind.TAKE_PLACE, 1, encode_place_given(1, 7), deadline_ms=5_000)
        assert await answer(client, again) == "it is a node and has its place"
        client.close()


async def test_a_node_that_was_a_spare_is_that_node_after_a_restart() -> None:
    with short_directory() as base:
        path = str(base / "spare")
        create_spare(SystemIo(), path, CLUSTER, NODE, plan_node(8 * MIB, 1 * MIB), "boot-1")
        async with serving(path) as served:
            await served.tell()
            node = await served.connect(7)
            assert (await node.put(make_records(5, 7).batch(), soon())).stored.all()
            await node.close()
        async with serving(path) as served:
            node = await served.connect(7)
            assert (await node.info(soon())).records == 5
            await node.close()


async def test_of_two_operators_that_give_it_places_one_is_refused() -> None:
    async with serving() as served:
        outcomes = await asyncio.gather(served.tell(), served.tell(3), served.tell(), return_exceptions=True)
        refused = [outcome for outcome in outcomes if outcome is not None]
        given = read_config(SystemIo(), served.path).place
        assert given in (NodePlace(CLUSTER, 1, 7), NodePlace(CLUSTER, 0, 3))
        assert len(refused) == (1 if given.node_index == 7 else 2)
        for error in refused:
            assert isinstance(error, InvalidArgument | HandshakeFailed)
        node = await served.connect(given.node_index)
        assert (await node.info(soon())).node_id == NODE
        await node.close()


async def test_a_connection_to_the_spare_stays_one_when_it_is_a_node() -> None:
    async with serving() as served:
        client, late = await served.client(Role.OPERATOR), await served.client(Role.OPERATOR)
        give = encode_frame(Kind.TAKE_PLACE, 1, encode_place_given(1, 7), deadline_ms=5_000)
        assert await answer(client, give) == ""
        assert await answer(late, give) == "", "the same once more is nothing new"
        other = encode_frame(Kind.TAKE_PLACE, 2, encode_place_given(1, 8), deadline_ms=5_000)
        assert "was given another place already" in await answer(late, other)
        listing = encode_frame(Kind.LIST, 3, b"", deadline_ms=5_000)
        assert "it is in no place" in await answer(client, listing)
        client.close()
        late.close()


async def test_only_operators_give_places() -> None:
    async with serving(tokens=Tokens(b"t" * 16, b"o" * 16)) as served:
        client = await served.client(Role.DATA)
        give = encode_frame(Kind.TAKE_PLACE, 1, encode_place_given(1, 7), deadline_ms=5_000)
        assert await answer(client, give) == "TAKE_PLACE is for operators"
        client.close()
        with pytest.raises(HandshakeFailed, match="token"):
            await served.tell(tokens=Tokens(b"t" * 16))
        assert is_spare(served.path)
        await served.tell()
        assert not is_spare(served.path)


@pytest.mark.parametrize("metadata", [b"", b"\xc1", encode_place_given(64, 0), encode_place_given(0, 12),
                                      encode_place_given(-1, 0), encode_place_given(0, -1), b"\x91\x01"])
async def test_a_place_that_cannot_be_ends_the_connection_and_nothing_else(metadata: bytes) -> None:
    async with serving() as served:
        client = await served.client(Role.OPERATOR)
        await client.send(encode_frame(Kind.TAKE_PLACE, 1, metadata, deadline_ms=5_000))
        assert await client.closed()
        await served.tell()


@pytest.mark.parametrize(("fault", "path"), [("pwrite", "node.toml"), ("unlink", "spare.toml"), ("open", "/slab")])
async def test_a_disk_that_fails_on_the_way_is_said_and_the_next_try_goes_on(fault: str, path: str) -> None:
    async with serving() as served:
        served.io.fail(fault, errno.EIO, path=path)
        with pytest.raises(NodeUnavailable, match="Input/output error"):
            await served.tell()
        served.io.verify()
        with pytest.raises(InvalidArgument, match="was given another place already"):
            await served.tell(3)
        await served.tell()
        node = await served.connect(7)
        assert (await node.put(make_records(5, 7).batch(), soon())).stored.all()
        await node.close()


async def test_a_second_server_of_the_same_spare_is_refused() -> None:
    async with serving() as served:
        with pytest.raises(Locked, match="is owned by process"):
            async with serving(served.path):
                pass
        await served.tell()
        with pytest.raises(Locked, match="is owned by process"):
            async with serving(served.path):
                pass


async def test_the_first_spare_that_answers_is_taken_and_the_others_are_named() -> None:
    async with serving() as served:
        good = Spare(NODE, served.endpoint)
        absent = Spare("a" * 32, Endpoint(path=f"{served.path}-absent"))
        another = Spare("b" * 32, served.endpoint)
        config = replace(served.config(None), spares=(absent, another, good))
        spare, info, skipped = await first_spare(config, 0, served.tokens, CLOCK)
        assert (spare, info.directory) == (good, served.path)
        assert skipped == [
            (absent, "No such file or directory"),
            (another, f"the server: what it serves is {NODE}, expected {'b' * 32}")]
        for number, wrong in enumerate((replace(config, spares=(absent, another)),
                                        replace(config, durability="power"),
                                        replace(config, cluster_id="e" * 32))):
            with pytest.raises(NoSpare, match="none of the spares can take the place: a") as caught:
                await first_spare(wrong, 0, served.tokens, CLOCK)
            assert ("durability is process, expected power" in str(caught.value)) == (number == 1)
            assert (caught.value.exit_code, "\n" in str(caught.value)) == (8, False)
