"""What a server holds in memory for its clients, whatever they ask for and however little they take."""

from __future__ import annotations

import asyncio
import tracemalloc
from collections.abc import Callable, Sequence
from itertools import islice

import pytest

from efs import session
from efs.clock import Deadline
from efs.contract import ABSENT, Landing, Span
from efs.errors import NodeUnavailable
from efs.limits import (
    MAX_SLOTS_PER_EXTENT,
    MIB,
    WIRE_BODY_BYTES,
    WIRE_LARGE_ANSWERS,
    WIRE_METADATA_BYTES,
    WIRE_PIECE_BYTES,
    WIRE_READS_AT_ONCE,
    WIRE_SEND_QUEUE_BYTES,
)
from efs.messages import GetAsk, encode_get, encode_keys, encode_spans
from efs.session import _pieces
from efs.wire import MAX_FRAME_BYTES, Kind, encode_frame
from tests.support.gatednode import Gate
from tests.support.rawclient import RawClient
from tests.support.records import make_keys, make_records
from tests.support.servedmemory import HELLO, NODE_INDEX, assert_serves, served_memory, soon
from tests.support.waiting import came_true


async def test_a_put_that_does_not_fit_the_servers_memory_is_refused_and_the_connection_lives_on() -> None:
    async with served_memory() as served:
        node = await served.connect()
        served.server.intake.most_bytes = 6_000
        with pytest.raises(NodeUnavailable, match="holds as many requests as it may"):
            await node.put(make_records(40, NODE_INDEX).batch(), soon(served))
        assert served.node.batches == []
        assert (await node.put(make_records(4, NODE_INDEX).batch(), soon(served))).stored.all()
        assert not node.suspect
        await node.close()


async def test_puts_leave_room_for_look_ups_in_the_servers_memory() -> None:
    async with served_memory() as served:
        node = await served.connect()
        served.server.intake.most_bytes = 34_000
        served.node.put_gate = held = Gate()
        puts = [asyncio.create_task(node.put(make_records(40, NODE_INDEX, seed=seed).batch(), soon(served)))
                for seed in (1, 2, 3)]
        refused, _ = await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
        assert [str(put.exception()).endswith("holds as many requests as it may") for put in refused] == [True]
        assert held.held == 2
        assert (await node.look_up(make_keys(100, 1), soon(served))).location.max() == ABSENT
        held.release()
        await asyncio.wait(puts)
        assert not node.suspect
        assert served.counters.get("wire_lost") == 0
        await node.close()


async def test_a_body_of_a_put_that_was_given_up_counts_until_nothing_writes_from_it() -> None:
    async with served_memory() as served:
        node = await served.connect()
        served.node.put_gate = held = Gate()
        batch = make_records(40, NODE_INDEX).batch()
        with pytest.raises(NodeUnavailable):
            await node.put(batch, Deadline.after_ms(served.clock, 200))
        assert await came_true(lambda: served.server.intake.held_bytes == batch.payload.nbytes)
        held.release()
        await served.node.all_done()
        assert served.server.intake.held_bytes == batch.payload.nbytes
        served.node.batches.clear()
        assert served.server.intake.held_bytes == 0
        await node.close()


async def test_memory_under_garbage_stays_below_two_frames() -> None:
    async with served_memory() as served:
        big = encode_frame(Kind.LOOK_UP, 1, bytes(WIRE_METADATA_BYTES), deadline_ms=5_000)
        tracemalloc.start()
        try:
            base = tracemalloc.get_traced_memory()[0]
            for start in (0, 1, 8, 40):
                client = await RawClient.admitted(served.endpoint, HELLO)
                await client.send(big[start : start + 300_000], bytes(100_000))
                if start == 0:
                    client.close()
                else:
                    assert await client.closed()
            peak = tracemalloc.get_traced_memory()[1] - base
        finally:
            tracemalloc.stop()
        assert peak <= 2 * MAX_FRAME_BYTES
        await assert_serves(served)


@pytest.mark.parametrize(("kind", "ask", "answer_bytes"), [
    (Kind.GET, encode_get(GetAsk(make_keys(30_000, 1), [], 100, 128, 0)), 30_000 * 34),
    (Kind.LOOK_UP, encode_keys(make_keys(30_000, 1)), 30_000 * 34),
])
async def test_a_client_that_does_not_take_its_answers_has_no_further_request_begun(
    kind: Kind, ask: bytes, answer_bytes: int
) -> None:
    async with served_memory() as served:
        client = await RawClient.admitted(served.endpoint, HELLO)
        for number in range(1, 41):
            await client.send(encode_frame(kind, number, ask, deadline_ms=20_000))
        (session,) = served.server._sessions
        assert await came_true(lambda: session._stream.queued_bytes > WIRE_SEND_QUEUE_BYTES)
        await asyncio.sleep(0.5)
        assert session._stream.queued_bytes < WIRE_SEND_QUEUE_BYTES + WIRE_LARGE_ANSWERS * answer_bytes
        assert session.in_flight > 20
        answered = {(await client.frame())[0].request_id for _ in range(40 if kind is Kind.LOOK_UP else 80)}
        assert answered == set(range(1, 41))
        client.close()


async def test_a_client_that_takes_no_answers_is_not_listened_to_until_it_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session, "WIRE_UNREAD_BYTES", 65_536)
    async with served_memory() as served:
        client = await RawClient.admitted(served.endpoint, HELLO)
        (served_session,) = served.server._sessions
        stream = served_session._stream
        asked = 0

        async def ask() -> None:
            nonlocal asked
            await client.send(*(encode_frame(Kind.INFO, asked + at, deadline_ms=20_000) for at in range(1, 201)))
            asked += 200

        greeted = stream._parser.frames
        while stream.queued_bytes <= 65_536:
            await ask()
            assert await came_true(lambda: stream.queued_bytes > 65_536 or (
                stream._parser.frames == greeted + asked and not served_session.in_flight))
        assert await came_true(lambda: not served_session.in_flight)
        full = stream.queued_bytes
        await ask()
        await asyncio.sleep(0.3)
        assert (stream.queued_bytes, served_session.in_flight, stream.frame_ms) == (full, 0, 0)
        assert {(await client.frame())[0].request_id for _ in range(asked)} == set(range(1, asked + 1))
        client.close()


async def test_slots_from_the_disk_are_read_for_a_client_only_as_it_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    async with served_memory() as served:
        asked: list[int] = []

        async def read(spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None], _: Deadline) -> None:
            asked.append(sum(span.count * span.slot_bytes for span, _ in spans))
            await asyncio.sleep(0.01)
            for index in range(len(spans)):
                landed(index)

        monkeypatch.setattr(served.node, "views_now", lambda spans: None)
        monkeypatch.setattr(served.node, "read_now", lambda span, landing: False)
        monkeypatch.setattr(served.node, "read", read)
        client = await RawClient.admitted(served.endpoint, HELLO)
        spans = encode_spans([Span(0, WIRE_PIECE_BYTES // 4_096, 4_096, 4_096)])
        for number in range(1, 33):
            await client.send(encode_frame(Kind.READ, number, spans, deadline_ms=20_000))
        (served_session,) = served.server._sessions
        assert await came_true(lambda: served_session._stream.queued_bytes > WIRE_SEND_QUEUE_BYTES)
        await asyncio.sleep(0.3)
        most = WIRE_SEND_QUEUE_BYTES + WIRE_READS_AT_ONCE * WIRE_PIECE_BYTES + MIB
        assert served_session._stream.queued_bytes <= most
        assert len(asked) <= WIRE_READS_AT_ONCE + 1
        pieces = [(await client.frame())[0].kind for _ in range(64)]
        assert pieces.count(Kind.PIECE) == pieces.count(Kind.ANSWER) == 32
        client.close()


def test_pieces_of_spans_are_made_as_they_are_sent() -> None:
    spans = [Span(7, 3, 100, 128), Span(90, 1, WIRE_PIECE_BYTES, WIRE_PIECE_BYTES), Span(5, 70_000, 64, 64),
             *[Span(0, MAX_SLOTS_PER_EXTENT, 1, WIRE_BODY_BYTES)] * 10_000]
    tracemalloc.start()
    try:
        pieces = list(islice(_pieces(spans), 1_000))
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()
    slots = [(span.location + at, span.slot_bytes) for piece in pieces for span in piece for at in range(span.count)]
    wanted = [(span.location + at, span.slot_bytes) for span in spans[:3] for at in range(span.count)]
    assert slots[: len(wanted)] == wanted
    assert slots[len(wanted) :] == [(at, WIRE_BODY_BYTES) for at in range(len(slots) - len(wanted))]
    assert all(sum(span.count * span.slot_bytes for span in piece) <= max(WIRE_PIECE_BYTES, piece[0].slot_bytes)
               for piece in pieces)
