"""A server and its clients in one process: what breaks the protocol ends one connection, and nothing else."""

from __future__ import annotations

import asyncio
import gc
import os
import tracemalloc
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from efs.clock import Deadline
from efs.contract import Landing, PutBatch, Span, Stride
from efs.errors import HandshakeFailed, IdentityMismatch, InvalidArgument, NodeReadOnly, NodeUnavailable, OutdatedMap
from efs.handshake import Role, encode_message
from efs.limits import (
    MAX_SEGMENTS,
    WIRE_BODY_BYTES,
    WIRE_CONNECTIONS_PER_PEER,
    WIRE_FRAME_MS,
    WIRE_HANDSHAKE_MS,
    WIRE_IN_FLIGHT,
)
from efs.messages import (
    GetAsk,
    decode_error,
    encode_error,
    encode_get,
    encode_keys,
    encode_position,
    encode_put,
)
from efs.session import MapSeen
from efs.types import DropItem
from efs.wire import Kind, encode_frame
from tests.support.clock import FakeClock
from tests.support.gatednode import Gate
from tests.support.rawclient import RawClient, hello_for
from tests.support.records import LARGE, Records, make_keys, make_records
from tests.support.servedmemory import HELLO, NODE_INDEX, ServedMemory, assert_serves, served_memory, soon
from tests.support.waiting import came_true

INFO = encode_frame(Kind.INFO, 1, deadline_ms=5_000)


def look_up(request_id: int) -> bytes:
    return encode_frame(Kind.LOOK_UP, request_id, encode_keys(make_keys(3, 1)), deadline_ms=20_000)


def put_frame(request_id: int, body_bytes: int) -> bytes:
    batch = make_records(4, NODE_INDEX).batch()
    return encode_frame(Kind.PUT, request_id, encode_put(batch), body_bytes=body_bytes, deadline_ms=5_000)


def get(stretches: list[tuple[int, int]], *, keys: int = 3, shard_bytes: int = 100, slot_bytes: int = 128,
        segments: int = 1, cut: int | None = None) -> bytes:
    ask = GetAsk(make_keys(keys, 1), stretches, shard_bytes, slot_bytes, segments)
    return encode_frame(Kind.GET, 1, encode_get(ask)[:cut], deadline_ms=5_000)


GARBAGE: dict[str, bytes] = {
    "no frame at all": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(48),
    "bad checksum of a header": INFO[:40] + bytes(8),
    "bad checksum of metadata": look_up(1)[:-1] + b"\xff",
    "an answer from a client": encode_frame(Kind.ANSWER, 1),
    "a piece from a client": encode_frame(Kind.PIECE, 1, encode_position(0), body_bytes=1) + b"x",
    "a second handshake": encode_frame(Kind.HELLO, 0, encode_message(HELLO)),
    "keys that are none": encode_frame(Kind.LOOK_UP, 1, bytes(31), deadline_ms=5_000),
    "spans that are none": encode_frame(Kind.READ, 1, bytes(21), deadline_ms=5_000),
    "a span of no slots": encode_frame(Kind.READ, 1, bytes(20), deadline_ms=5_000),
    "a get that is none": encode_frame(Kind.GET, 1, bytes(15), deadline_ms=5_000),
    "a get of fewer keys than it says": get([], cut=-32),
    "half a stretch": get([(0, 1)], cut=-4),
    "a stretch of nothing": get([(1, 1)]),
    "a stretch backwards": get([(2, 1)]),
    "a stretch of keys that are not there": get([(0, 4)]),
    "stretches that overlap": get([(0, 2), (1, 3)]),
    "a stretch in another": get([(0, 3), (1, 2)]),
    "a stretch twice": get([(0, 1), (0, 1)]),
    "a get of shards of nothing": get([(0, 1)], shard_bytes=0),
    "a get of shards larger than their slots": get([(0, 1)], shard_bytes=129),
    "a get of slots larger than a frame": get([(0, 1)], slot_bytes=WIRE_BODY_BYTES + 1),
    "a get of headers of too many segments": get([], segments=MAX_SEGMENTS + 1),
    "a get of more headers than a frame holds": get([], keys=10_000, segments=MAX_SEGMENTS),
    "headers without segments": encode_frame(Kind.HEADERS, 1, bytes(8), deadline_ms=5_000),
    "a put whose body is too short": put_frame(1, 4 * 128 - 1) + bytes(4 * 128 - 1),
    "a put without a body": put_frame(1, 0),
    "no MessagePack": encode_frame(Kind.VERIFY, 1, b"\xc1" * 7, deadline_ms=5_000),
    "a position in the list that is none": encode_frame(Kind.LIST, 1, b"\xff", deadline_ms=5_000),
}




@pytest.mark.parametrize("what", GARBAGE)
async def test_what_breaks_the_protocol_ends_its_connection_and_nothing_else(what: str) -> None:
    async with served_memory() as served:
        client = await RawClient.admitted(served.endpoint, hello_for(NODE_INDEX, role=Role.OPERATOR))
        await client.send(GARBAGE[what])
        assert await client.closed()
        await assert_serves(served)
        assert served.counters.get("wire_lost") >= 1


@pytest.mark.parametrize(
    "first",
    [INFO, look_up(7), bytes(48), encode_frame(Kind.PROOF, 0, b"x"), encode_frame(Kind.HELLO, 0, b"\x90"),
     encode_frame(Kind.HELLO, 0, bytes(5_000)), encode_frame(Kind.TOUCH, 0, bytes(5))],
    ids=["a request", "a look-up", "zeros", "a proof", "an empty hello", "a large hello", "a touch"],
)
async def test_nothing_is_served_before_a_handshake(first: bytes) -> None:
    async with served_memory() as served:
        client = await RawClient.open(served.endpoint)
        await client.send(first)
        assert await client.closed()
        assert served.node.look_ups == 0
        await assert_serves(served)


async def test_a_request_id_that_is_in_use_ends_the_connection() -> None:
    async with served_memory() as served:
        served.node.look_up_gate = gate = Gate()
        client = await RawClient.admitted(served.endpoint, HELLO)
        await client.send(look_up(9), look_up(9))
        assert await client.closed()
        assert await came_true(lambda: served.server.connections == 0)
        gate.release()
        await assert_serves(served)


async def test_a_client_with_too_many_requests_is_cut_off() -> None:
    async with served_memory() as served:
        served.node.look_up_gate = gate = Gate()
        client = await RawClient.admitted(served.endpoint, HELLO)
        await client.send(*(look_up(number) for number in range(1, WIRE_IN_FLIGHT + 2)))
        assert await client.closed()
        gate.release()
        await assert_serves(served)


async def test_an_id_is_free_again_once_it_is_answered() -> None:
    async with served_memory() as served:
        client = await RawClient.admitted(served.endpoint, HELLO)
        for _ in range(3):
            await client.send(INFO)
            header, _, _ = await client.frame()
            assert (header.kind, header.request_id) == (Kind.ANSWER, 1)
        client.close()


async def test_a_cancelled_request_is_answered_and_its_work_ends() -> None:
    async with served_memory() as served:
        served.node.look_up_gate = Gate()
        client = await RawClient.admitted(served.endpoint, HELLO)
        await client.send(look_up(4), encode_frame(Kind.CANCEL, 4), encode_frame(Kind.CANCEL, 5))
        header, metadata, _ = await client.frame()
        assert (header.kind, header.request_id) == (Kind.ERROR, 4)
        assert b"cancelled" in metadata
        client.close()


async def test_a_request_is_over_by_its_deadline() -> None:
    async with served_memory() as served:
        served.node.look_up_gate = Gate()
        client = await RawClient.admitted(served.endpoint, HELLO)
        await client.send(encode_frame(Kind.LOOK_UP, 4, encode_keys(make_keys(3, 1)), deadline_ms=20))
        header, metadata, _ = await client.frame()
        assert (header.kind, header.request_id) == (Kind.ERROR, 4)
        assert b"no answer by the deadline" in metadata
        client.close()


async def test_a_server_whose_socket_is_gone_ends_as_any_other() -> None:
    async with served_memory() as served:
        node = await served.connect()
        served.node.put_gate = held = Gate()
        put = asyncio.create_task(node.put(make_records(4, NODE_INDEX).batch(), soon(served)))
        assert await came_true(lambda: held.held == 1)
        assert served.endpoint.path is not None
        os.unlink(served.endpoint.path)
        ending = asyncio.create_task(served.server.close())
        await asyncio.sleep(0.05)
        held.release()
        assert (await put).stored.all()
        await ending
        await node.close()


async def test_a_server_that_ends_answers_what_is_under_way_and_refuses_more() -> None:
    async with served_memory() as served:
        served.node.look_up_gate = gate = Gate()
        client = await RawClient.admitted(served.endpoint, HELLO)
        await client.send(look_up(1))
        assert await came_true(lambda: gate.held == 1)
        ending = asyncio.create_task(served.server.close())
        await asyncio.sleep(0)
        await client.send(look_up(2))
        header, metadata, _ = await client.frame()
        assert (header.kind, header.request_id) == (Kind.ERROR, 2)
        assert b"its server is ending" in metadata
        with pytest.raises(OSError, match="No such file"):
            await RawClient.open(served.endpoint)
        gate.release()
        header, _, _ = await client.frame()
        assert (header.kind, header.request_id) == (Kind.ANSWER, 1)
        assert await client.closed()
        await ending


# -- Putting ---------------------------------------------------------------------------------------------------------


async def put_raw(served: ServedMemory, batch: PutBatch) -> tuple[Kind, bytes]:
    client = await RawClient.admitted(served.endpoint, HELLO)
    body = batch.payload.tobytes()
    await client.send(encode_frame(Kind.PUT, 3, encode_put(batch), body_bytes=len(body), deadline_ms=5_000), body)
    header, metadata, _ = await client.frame()
    client.close()
    return header.kind, metadata


def flipped_payload(batch: PutBatch) -> None:
    batch.payload[2, 50] ^= 1


def dirty_padding(batch: PutBatch) -> None:
    batch.payload[1, -1] = 1


def flipped_header(batch: PutBatch) -> None:
    batch.headers[3, 20] ^= 1


@pytest.mark.parametrize(
    ("spoil", "why"),
    [(flipped_payload, b"row 2 of the batch has a payload that its header does not describe"),
     (dirty_padding, b"something behind its end"),
     (flipped_header, b"row 3 of the batch is not a valid header")],
)
async def test_a_server_stores_nothing_that_its_header_does_not_describe(
    spoil: Callable[[PutBatch], None], why: bytes
) -> None:
    async with served_memory() as served:
        batch = make_records(4, NODE_INDEX).batch()
        spoil(batch)
        kind, metadata = await put_raw(served, batch)
        assert kind is Kind.ERROR
        assert why in metadata
        assert not served.twin.slots
        kind, _ = await put_raw(served, make_records(4, NODE_INDEX).batch())
        assert kind is Kind.ANSWER
        assert len(served.twin.slots) == 4


async def test_a_body_comes_into_the_memory_of_an_answered_put_but_not_of_one_that_was_given_up() -> None:
    async with served_memory() as served:
        node = await served.connect()
        for seed in (1, 2):
            assert (await node.put(make_records(40, NODE_INDEX, seed=seed).batch(), soon(served))).stored.all()
        held = Gate()
        served.node.put_gate = held
        with pytest.raises(NodeUnavailable):
            await node.put(make_records(40, NODE_INDEX, seed=3).batch(), Deadline.after_ms(served.clock, 200))
        served.node.put_gate = None
        assert (await node.put(make_records(40, NODE_INDEX, seed=4).batch(), soon(served))).stored.all()
        assert held.held == 1
        held.release()
        await served.node.all_done()
        first, second, given_up, last = (batch.payload.ctypes.data for batch in served.node.batches)
        assert first == second == given_up
        assert last != given_up
        for seed in (1, 2, 3, 4):
            records = make_records(40, NODE_INDEX, seed=seed)
            assert await served_bytes(served, records) == records.payload.tobytes()
        await node.close()


async def served_bytes(served: ServedMemory, records: Records) -> bytes:
    """The payload of all records, as the twin has it."""
    table = await served.twin.look_up(records.keys, soon(served))
    return b"".join(bytes(served.twin.slots[location].payload) for location in table.location.tolist())


async def test_a_put_that_is_refused_tells_a_node_nothing_of_the_map() -> None:
    async with served_memory() as served:
        client = await RawClient.admitted(served.endpoint, HELLO)
        for number, (version, sound, kind) in enumerate([(9, False, Kind.ERROR), (3, True, Kind.ANSWER),
                                                         (4, True, Kind.ANSWER), (3, True, Kind.ERROR)], 1):
            batch = make_records(4, NODE_INDEX, seed=number).batch()
            body = batch.payload.tobytes() if sound else bytes(batch.payload.nbytes)
            head = encode_frame(Kind.PUT, number, encode_put(batch, version), body_bytes=len(body), deadline_ms=5_000)
            await client.send(head, body)
            assert (await client.frame())[0].kind is kind
        client.close()


async def test_a_put_that_is_larger_than_a_frame_is_sent_in_parts() -> None:
    async with served_memory() as served:
        node = await served.connect()
        rows = WIRE_BODY_BYTES // LARGE.slot_bytes + 5
        records = make_records(rows, NODE_INDEX, shape=LARGE)
        assert (await node.put(records.batch(), soon(served))).stored.all()
        assert len(served.node.batches) == 2
        table = await node.look_up(records.keys, soon(served))
        assert [row.tobytes() for row in table.digest] == list(records.digests)
        await node.close()


async def test_errors_of_a_node_come_out_as_they_were() -> None:
    async with served_memory() as served:
        node = await served.connect()
        served.node.refusals = [NodeReadOnly(NODE_INDEX, "its disk failed")]
        with pytest.raises(NodeReadOnly, match="node 5 is unavailable: its disk failed"):
            await node.put(make_records(2, NODE_INDEX).batch(), soon(served))
        await node.close()


# -- Roles and identity ----------------------------------------------------------------------------------------------


async def test_only_an_operator_may_list_drop_and_collect() -> None:
    async with served_memory() as served:
        node = await served.connect(Role.DATA)
        records = make_records(2, NODE_INDEX)
        assert (await node.put(records.batch(), soon(served))).stored.all()
        generation = next(iter(served.twin.slots.values())).generation
        calls = (lambda: node.list(None, 5, soon(served)), lambda: node.collect(soon(served)),
                 lambda: node.drop([DropItem(records.keys[0], records.digests[0], generation)], soon(served)))
        for call in calls:
            with pytest.raises(InvalidArgument, match="is for operators"):
                await call()
        assert await node.verify(records.keys[0], records.digests[0], soon(served))
        await node.close()
        operator = await served.connect(Role.OPERATOR)
        assert len((await operator.list(None, 5, soon(served))).records) == 2
        await operator.close()


async def test_a_node_that_is_another_is_refused() -> None:
    async with served_memory() as served:
        place = served.place()
        for wrong, field in ((replace(place, cluster_id="e" * 32), "cluster id is"),
                             (replace(place, node_id="e" * 32), "what it serves is"),
                             (replace(place, node_index=6), "index is")):
            with pytest.raises(HandshakeFailed, match=field):
                await served.connect_to(wrong)


async def test_a_server_that_promises_less_than_the_cluster_is_refused() -> None:
    async with served_memory() as served:
        with pytest.raises(IdentityMismatch, match="durability is process, expected power"):
            await served.connect_to(replace(served.place(), durability="power"))


# -- Slow and many ---------------------------------------------------------------------------------------------------


async def test_a_client_that_says_nothing_is_cut_off() -> None:
    clock = FakeClock()
    async with served_memory(clock=clock) as served:
        client = await RawClient.open(served.endpoint)
        assert await came_true(lambda: served.server.connections == 1)
        clock.advance(WIRE_HANDSHAKE_MS / 1000 + 1)
        assert await client.closed()
        await assert_serves(served)


async def test_a_client_that_drips_a_frame_is_cut_off_and_one_that_pauses_between_frames_is_not() -> None:
    clock = FakeClock()
    async with served_memory(clock=clock) as served:
        good = await served.connect()
        slow = await RawClient.admitted(served.endpoint, HELLO)
        await slow.send(INFO[:20])
        assert await came_true(lambda: any(session._stream._parser.within for session in served.server._sessions))
        clock.advance(WIRE_FRAME_MS / 1000 + 1)
        assert await slow.closed()
        assert (await good.info(soon(served))).records == 0
        await good.close()


async def test_one_peer_gets_no_more_than_its_share_of_connections() -> None:
    async with served_memory() as served:
        clients = [await RawClient.open(served.endpoint) for _ in range(40)]
        assert await came_true(lambda: served.server.connections == 40)
        served.server._peers[next(iter(served.server._peers))] += WIRE_CONNECTIONS_PER_PEER - 40
        refused = await RawClient.open(served.endpoint)
        assert await refused.closed()
        served.server._peers[next(iter(served.server._peers))] -= WIRE_CONNECTIONS_PER_PEER - 40
        for client in clients:
            client.close()
        assert await came_true(lambda: served.server.connections == 0)
        await assert_serves(served)


async def test_a_thousand_connections_leave_no_descriptor_and_no_memory() -> None:
    async with served_memory() as served:
        await churn(served, 50)
        descriptors = len(os.listdir("/proc/self/fd"))
        gc.collect()
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            await churn(served, 1_000)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
        assert len(os.listdir("/proc/self/fd")) == descriptors
        assert grown < 1 << 20
        assert served.counters.get("wire_sessions") > 300
        await assert_serves(served)


async def churn(served: ServedMemory, times: int) -> None:
    """Connections of three kinds: closed at once, in the middle of a handshake, and in the middle of a request."""
    for number in range(times):
        client = await RawClient.open(served.endpoint)
        if number % 3 == 1:
            await client.send(encode_frame(Kind.HELLO, 0, encode_message(HELLO))[:60])
        elif number % 3 == 2:
            await client.shake(HELLO)
            assert (await client.frame())[0].kind is Kind.WELCOME
            await client.send(look_up(1), INFO[:30])
        client.close()
    assert await came_true(lambda: served.server.connections == 0)


# -- Late bytes ------------------------------------------------------------------------------------------------------


async def test_nothing_lands_once_a_read_was_given_up_or_revoked() -> None:
    """A thousand reads that are cancelled or revoked at any moment, one after the other on one connection."""
    async with served_memory() as served:
        node = await served.connect()
        records = make_records(64, NODE_INDEX, shape=LARGE)
        await node.put(records.batch(), soon(served))
        table = await node.look_up(records.keys, soon(served))
        size = LARGE.shard_bytes
        source = np.random.default_rng(5)
        gone: list[tuple[bytearray, bytes]] = []
        whole = cut = 0
        for round_number in range(1_000):
            buffer = bytearray(64 * size)
            landing = Landing(memoryview(buffer), (Stride(0, size, 0, size),))
            span = Span(int(table.location[0]), 64, size, LARGE.slot_bytes)
            seen: list[int] = []
            task = asyncio.ensure_future(node.read([(span, landing)], seen.append, soon(served)))
            for _ in range(int(source.integers(0, 12))):
                await asyncio.sleep(0)
            if round_number % 2:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
            landing.revoked = landing.revoked or round_number % 4 == 0
            gone.append((buffer, bytes(buffer)))
            if round_number % 4 == 2:
                await task
                gone.pop()
                assert seen == [0]
                assert bytes(buffer) == records.payload.tobytes()
                whole += 1
            elif not seen:
                cut += 1
            if round_number % 50 == 49:
                await asyncio.gather(task, return_exceptions=True)
                assert all(bytes(kept) == content for kept, content in gone)
                gone.clear()
        assert whole > 100
        assert cut > 100
        assert not node.suspect
        await node.close()


def test_a_node_goes_by_the_latest_map_that_a_write_named_or_by_that_in_etcd() -> None:
    seen = MapSeen()
    for version in (0, 3, 0, 4, 4):
        seen.require(version, 5)
        seen.wrote(version)
    with pytest.raises(OutdatedMap, match="node 5 refuses a write: it is by version 3 of the map, the node knows of 4"):
        seen.require(3, 5)
    seen.told(2)
    for version in (2, 9, 3, 0):
        seen.require(version, 5)
        seen.wrote(version)
    with pytest.raises(OutdatedMap, match="knows of 2"):
        seen.require(1, 5)
    wired = decode_error(encode_error(OutdatedMap(5, "why")), 5)
    assert (type(wired), str(wired), wired.retryable) == (OutdatedMap, "node 5 refuses a write: why", True)
