"""Tokens: who knows one gets in, it never travels, and a listener that others can reach does not start without one."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import pytest

from efs.clock import Deadline, SystemClock
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import HandshakeFailed, InvalidArgument, OpenFailed
from efs.handshake import Proof as ProofMessage
from efs.handshake import Role, Tokens, client_proof, encode_message, read_token, server_proof
from efs.osio import SystemIo
from efs.server import NodeServer
from efs.wire import Kind, encode_frame
from tests.support.rawclient import RawClient, hello_for
from tests.support.records import make_records
from tests.support.servedmemory import NODE_INDEX, served_memory
from tests.support.servers import short_directory
from tools.chaosrig.wireproxy import WireProxy

TOKEN = b"a secret of more than sixteen bytes"
OTHER = b"another secret of more than sixteen"


@pytest.mark.parametrize("address", ["unix:s", "tcp:127.0.0.1:0"])
async def test_who_knows_the_token_gets_in(address: str) -> None:
    async with served_memory(Tokens(TOKEN), address) as served:
        node = await served.connect(tokens=Tokens(TOKEN))
        outcome = await node.put(make_records(2, NODE_INDEX).batch(), Deadline.after_ms(served.clock, 20_000))
        assert outcome.stored.all()
        await node.close()


@pytest.mark.parametrize("tokens", [Tokens(), Tokens(OTHER)])
async def test_who_does_not_know_the_token_stays_out(tokens: Tokens) -> None:
    async with served_memory(Tokens(TOKEN)) as served:
        with pytest.raises(HandshakeFailed, match="token"):
            await served.connect(tokens=tokens)
        assert served.counters.get("wire_sessions") == 0


async def test_a_client_with_a_token_does_not_talk_to_a_server_without_it() -> None:
    for server_side in (Tokens(), Tokens(OTHER)):
        async with served_memory(server_side) as served:
            with pytest.raises(HandshakeFailed, match=r"the server .* token"):
                await served.connect(tokens=Tokens(TOKEN))
            assert served.counters.get("wire_sessions") == 0


async def test_operators_may_have_a_token_of_their_own() -> None:
    async with served_memory(Tokens(TOKEN, OTHER)) as served:
        await (await served.connect(Role.DATA, Tokens(TOKEN))).close()
        with pytest.raises(HandshakeFailed, match=r"for the role operator: .* operator_token_file of the cluster"):
            await served.connect(Role.OPERATOR, Tokens(TOKEN))
        operator = await served.connect(Role.OPERATOR, Tokens(TOKEN, OTHER))
        assert await operator.collect(Deadline.after_ms(served.clock, 20_000)) == 0
        await operator.close()


async def test_neither_the_token_nor_a_proof_that_can_be_used_again_is_sent() -> None:
    async with served_memory(Tokens(TOKEN)) as served:
        with short_directory() as base:
            async with WireProxy(Endpoint(path=f"{base}/p"), served.endpoint, recorded=True) as proxy:
                place = served.place(tokens=Tokens(TOKEN))
                node = await served.connect_to(replace(place, endpoint=proxy.endpoint))
                assert not node.suspect
                await node.close()
                said = bytes(proxy.to_server + proxy.from_server)
        assert len(proxy.to_server) > 100
        assert TOKEN not in said
        replayed = await RawClient.open(served.endpoint)
        await replayed.send(bytes(proxy.to_server))
        assert await replayed.closed()
        assert served.counters.get("wire_sessions") == 2


async def test_a_servers_proof_is_no_clients_proof() -> None:
    async with served_memory(Tokens(TOKEN)) as served:
        client = await RawClient.open(served.endpoint)
        hello = hello_for(NODE_INDEX)
        await client.send(encode_frame(Kind.HELLO, 0, encode_message(hello)))
        _, metadata, _ = await client.frame()
        proof = metadata[-32:]
        await client.send(encode_frame(Kind.PROOF, 0, encode_message(ProofMessage(proof))))
        assert await client.closed()
        assert served.counters.get("wire_sessions") == 0
    assert server_proof(TOKEN, hello, bytes(32)) != client_proof(TOKEN, hello, bytes(32))


@pytest.mark.parametrize("address", ["tcp:0.0.0.0:0", "tcp:[::]:0"])
async def test_a_listener_that_others_can_reach_needs_a_token(address: str) -> None:
    server = NodeServer([], SystemIo(), SystemClock())
    with pytest.raises(InvalidArgument, match="can be reached from other machines"):
        server.listen(parse_endpoint(address))
    await server.close()


def test_a_token_file_must_be_its_owners_alone_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_bytes(TOKEN + b"\n")
    path.chmod(0o640)
    with pytest.raises(InvalidArgument, match="chmod 600"):
        read_token(SystemIo(), str(path))
    path.chmod(0o600)
    assert read_token(SystemIo(), str(path)) == TOKEN
    path.write_bytes(b"short")
    with pytest.raises(InvalidArgument, match="5 bytes, must be 16"):
        read_token(SystemIo(), str(path))
    with pytest.raises(OpenFailed, match="absent"):
        read_token(SystemIo(), str(tmp_path / "absent"))


@pytest.mark.parametrize(
    "text", ["", "unix:", "tcp:host", "tcp:host:99999", "tcp::1", "http:x", "tcp:a/b:1", "tcp:a\0b:1",
             "unix:" + "x" * 200]
)
def test_an_address_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_endpoint(text)


def test_a_port_that_there_is_not_is_named() -> None:
    with pytest.raises(InvalidArgument, match="has the port 65536, the last one is 65535"):
        parse_endpoint("tcp:host:65536")


@pytest.mark.parametrize("host", ["a..b", ".a", "x" * 64, "ü" * 60, "\udcff"])
def test_a_host_that_nobody_can_look_up_is_named(host: str) -> None:
    refused = re.escape(f"the host {host!r} is no name")
    with pytest.raises(InvalidArgument, match=refused):
        parse_endpoint(f"tcp:{host}:7400")
    with pytest.raises(InvalidArgument, match=refused):
        Endpoint(host=host, port=7400)
    for allowed in ("a.b.", "x" * 63, "bücher.example", "10.0.0.7"):
        assert parse_endpoint(f"tcp:{allowed}:7400").host == allowed


def test_a_socket_path_begins_where_its_file_is() -> None:
    assert str(parse_endpoint("unix:sockets/03", "/var/lib/kv")) == "unix:/var/lib/kv/sockets/03"
    assert parse_endpoint("unix:/run/kv", "/var/lib/kv").path == "/run/kv"
    assert str(parse_endpoint("tcp:[::1]:7400")) == "tcp:[::1]:7400"


async def test_a_socket_that_a_killed_server_left_is_replaced_and_a_live_one_is_not() -> None:
    with short_directory() as base:
        endpoint = parse_endpoint("unix:s", str(base))
        first = NodeServer([], SystemIo(), SystemClock())
        first.listen(endpoint)
        assert os.stat(base / "s").st_mode & 0o777 == 0o600
        second = NodeServer([], SystemIo(), SystemClock())
        with pytest.raises(Exception, match="is owned by"):
            second.listen(endpoint)
        for _, listener in first._listeners:
            first._loop.remove_reader(listener.fileno())
            listener.close()
        second.listen(endpoint)
        first._listeners.clear()
        await first.close()
        await second.close()
        assert not (base / "s").exists()
