"""A client and servers that answer wrongly: the node is unavailable, the connection made anew, and no byte lands."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.clock import Deadline, SystemClock
from efs.contract import Landing, NodeTable, Span, Stride
from efs.errors import NodeUnavailable, WireError
from efs.limits import WIRE_METADATA_BYTES
from efs.link import RemotePlace
from efs.messages import decode_nothing, encode_get_table, encode_position
from efs.metrics import CounterFile
from efs.remote import RemoteNode
from efs.shard import header_bytes
from efs.spans import cuts
from efs.wire import Header, Kind, encode_frame
from tests.support.records import make_keys
from tests.support.servers import short_directory
from tests.support.waiting import came_true
from tests.support.wrongserver import CLOSE, Answer, WrongServer

NODE = 3
CLOCK = SystemClock()
SLOT = 4_096


def soon(milliseconds: int = 10_000) -> Deadline:
    return Deadline.after_ms(CLOCK, milliseconds)


@asynccontextmanager
async def answered(answer: Answer) -> AsyncIterator[tuple[RemoteNode, WrongServer, CounterFile]]:
    counters = CounterFile.in_memory()
    with short_directory() as base:
        async with WrongServer(base / "s", NODE, answer) as server:
            place = RemotePlace(server.endpoint, "c" * 32, "d" * 32, NODE)
            node = await RemoteNode.open(place, CLOCK, counters, 20_000)
            yield node, server, counters
            await node.close()


def piece(header: Header, position: int, body: bytes) -> bytes:
    return encode_frame(Kind.PIECE, header.request_id, encode_position(position), body_bytes=len(body)) + body


def end(header: Header) -> bytes:
    return encode_frame(Kind.ANSWER, header.request_id)


WRONG_READS: dict[str, Answer] = {
    "a piece in the wrong place": lambda h, m: [piece(h, 1, bytes(SLOT))],
    "more bytes than were asked for": lambda h, m: [piece(h, 0, bytes(2 * SLOT + 1)), end(h)],
    "an end before the last byte": lambda h, m: [piece(h, 0, bytes(SLOT)), end(h)],
    "an answer that says something": lambda h, m: [piece(h, 0, bytes(2 * SLOT)),
                                                   encode_frame(Kind.ANSWER, h.request_id, b"x")],
    "an answer to nothing": lambda h, m: [encode_frame(Kind.ANSWER, h.request_id + 7)],
    "an answer given twice": lambda h, m: [end(h), end(h)],
    "a request": lambda h, m: [encode_frame(Kind.CANCEL, h.request_id)],
    "a table": lambda h, m: [encode_frame(Kind.TABLE, h.request_id), piece(h, 0, bytes(2 * SLOT)), end(h)],
    "garbage": lambda h, m: [b"\0" * 100],
    "a connection that ends in a piece": lambda h, m: [piece(h, 0, bytes(SLOT))[:200], CLOSE],
    "a refusal that is none": lambda h, m: [encode_frame(Kind.ERROR, h.request_id, b"\xc1")],
}


@pytest.mark.parametrize("what", WRONG_READS)
async def test_a_read_that_is_answered_wrongly_is_an_unavailable_node(what: str) -> None:
    async with answered(WRONG_READS[what]) as (node, server, counters):
        buffer = bytearray(b"\xa5" * (3 * SLOT))
        span = Span(0, 2, SLOT, SLOT)
        seen: list[int] = []
        landing = Landing(memoryview(buffer), (Stride(0, SLOT, 0, SLOT),))
        with pytest.raises(NodeUnavailable) as refused:
            await node.read([(span, landing)], seen.append, soon())
        assert "no answer by the deadline" not in str(refused.value), "nobody waited for it"
        assert server.asked == [Kind.READ]
        assert buffer[2 * SLOT :] == b"\xa5" * SLOT
        assert await came_true(lambda: not node.suspect)
        server.answer = lambda h, m: [piece(h, 0, b"\x11" * 2 * SLOT), end(h)]
        seen.clear()
        await node.read([(span, landing)], seen.append, soon())
        assert seen == [0]
        assert buffer == b"\x11" * 2 * SLOT + b"\xa5" * SLOT
        assert counters.get("remote_connected") >= 2


class Sink:
    """Of a get for four keys, the shards of two of them and headers of one segment."""

    shard_bytes = slot_bytes = SLOT
    segments = 1
    stretches = ((1, 3),)

    def __init__(self) -> None:
        self.buffer = bytearray(b"\xa5" * 4 * SLOT)
        self.table: NodeTable | None = None
        self.headers: NDArray[np.uint8] | None = None
        self.seen: list[int] = []

    def table_came(self, table: NodeTable, headers: NDArray[np.uint8] | None) -> None:
        self.table, self.headers = table, headers

    def places(self) -> Sequence[tuple[Span, Landing]]:
        assert self.table is not None
        return [(Span(location, count, SLOT, SLOT),
                 Landing(memoryview(self.buffer), (Stride(0, SLOT, first * SLOT, SLOT),)))
                for stretch in cuts(self.table.location, self.stretches) for first, location, count in stretch]

    def landed(self, index: int) -> None:
        self.seen.append(index)


def named(header: Header, rows: int = 4, *, headers: int = 0) -> bytes:
    """A TABLE of so many keys, which lie in neighbouring slots."""
    table = NodeTable(np.zeros((rows, 2), np.uint64), np.arange(rows), np.ones(rows, np.uint64),
                      np.zeros(rows, np.uint8), np.ones(rows, np.bool_), ())
    rows_of = None if not headers else np.zeros((rows, headers), np.uint8)
    return encode_frame(Kind.TABLE, header.request_id, encode_get_table(table, rows_of))


WRONG_GETS: dict[str, Answer] = {
    "shards before their table": lambda h, m: [piece(h, 0, bytes(2 * SLOT)), named(h), end(h)],
    "a connection that ends in a shard": lambda h, m: [named(h), piece(h, 0, bytes(2 * SLOT))[:-200], CLOSE],
    "no table": lambda h, m: [end(h)],
    "a second table": lambda h, m: [named(h), named(h), piece(h, 0, bytes(2 * SLOT)), end(h)],
    "a table of other keys": lambda h, m: [named(h, 5), piece(h, 0, bytes(2 * SLOT)), end(h)],
    "a table that is none": lambda h, m: [encode_frame(Kind.TABLE, h.request_id, b"x")],
    "headers of another size": lambda h, m: [named(h, headers=header_bytes(3)), piece(h, 0, bytes(2 * SLOT)), end(h)],
    "fewer headers than keys": lambda h, m: [encode_frame(Kind.TABLE, h.request_id, b"\x70\0\0\0" + bytes(200))],
    "more shards than were asked for": lambda h, m: [named(h), piece(h, 0, bytes(3 * SLOT)), end(h)],
    "fewer shards than were asked for": lambda h, m: [named(h), piece(h, 0, bytes(SLOT)), end(h)],
    "a table for nobody": lambda h, m: [encode_frame(Kind.TABLE, h.request_id + 7, b"")],
}


@pytest.mark.parametrize("what", WRONG_GETS)
async def test_a_get_that_is_answered_wrongly_is_an_unavailable_node(what: str) -> None:
    async with answered(WRONG_GETS[what]) as (node, server, _):
        sink = Sink()
        with pytest.raises(NodeUnavailable) as refused:
            await node.get(make_keys(4, 1), sink, soon())
        assert "no answer by the deadline" not in str(refused.value), "nobody waited for it"
        assert server.asked == [Kind.GET]
        assert sink.buffer[:SLOT] == sink.buffer[3 * SLOT :] == b"\xa5" * SLOT
        assert await came_true(lambda: not node.suspect)
        server.answer = lambda h, m: [named(h, headers=header_bytes(1)), piece(h, 0, b"\x11" * 2 * SLOT), end(h)]
        sink = Sink()
        await node.get(make_keys(4, 1), sink, soon())
        assert sink.seen == [0]
        assert sink.headers is not None
        assert sink.headers.shape == (4, header_bytes(1))
        assert bytes(sink.buffer) == b"\xa5" * SLOT + b"\x11" * 2 * SLOT + b"\xa5" * SLOT


async def test_a_server_may_end_its_answer_behind_the_table() -> None:
    async with answered(lambda h, m: [named(h), end(h)]) as (node, server, _):
        sink = Sink()
        await node.get(make_keys(4, 1), sink, soon())
        assert sink.table is not None
        assert sink.seen == []
        assert bytes(sink.buffer) == b"\xa5" * 4 * SLOT
        assert server.lost == 0


@pytest.mark.parametrize("kind", [Kind.LOOK_UP, Kind.INFO])
async def test_a_table_for_a_request_that_asks_for_none_is_an_unavailable_node(kind: Kind) -> None:
    async with answered(lambda h, m: [named(h), end(h)]) as (node, server, counters):
        with pytest.raises(NodeUnavailable):
            await (node.look_up(make_keys(4, 1), soon()) if kind is Kind.LOOK_UP else node.info(soon()))
        assert server.asked == [kind]
        assert counters.get("remote_lost") == 1


async def test_a_connection_that_its_client_closes_is_not_counted_as_lost() -> None:
    async with answered(lambda h, m: [named(h), end(h)]) as (node, server, counters):
        await node.get(make_keys(4, 1), Sink(), soon())
        await node.relink(RemotePlace(server.endpoint, "c" * 32, "d" * 32, NODE))
        assert await came_true(lambda: counters.get("remote_connected") == 4)
        await node.close()
        assert await came_true(lambda: server.lost == 4)
        assert counters.get("remote_lost") == 0


async def test_shards_behind_a_table_that_are_revoked_meanwhile_land_nowhere() -> None:
    async with answered(lambda h, m: [named(h), piece(h, 0, b"\x11" * 2 * SLOT), end(h)]) as (node, server, _):
        class Revoked(Sink):
            def places(self) -> Sequence[tuple[Span, Landing]]:
                found = super().places()
                for _, landing in found:
                    landing.revoked = True
                return found

        sink = Revoked()
        await node.get(make_keys(4, 1), sink, soon())
        assert sink.seen == []
        assert bytes(sink.buffer) == b"\xa5" * 4 * SLOT
        assert server.lost == 0


async def test_an_exception_of_the_caller_comes_out_of_the_get_and_the_connection_lives_on() -> None:
    async with answered(lambda h, m: [named(h), piece(h, 0, bytes(2 * SLOT)), end(h)]) as (node, server, _):
        class Refusing(Sink):
            def table_came(self, table: NodeTable, headers: NDArray[np.uint8] | None) -> None:
                raise ValueError("not this one")

        with pytest.raises(ValueError, match="not this one"):
            await node.get(make_keys(4, 1), Refusing(), soon())
        sink = Sink()
        await node.get(make_keys(4, 1), sink, soon())
        assert sink.seen == [0]
        assert server.lost == 0


@pytest.mark.parametrize("metadata", [b"", bytes(8), b"\xff" * 8, bytes(8 + 34 * 3), b"\x03" + bytes(7 + 34 * 3 + 5)])
async def test_a_table_that_is_none_is_an_unavailable_node(metadata: bytes) -> None:
    def answer(header: Header, _: bytes) -> Sequence[bytes]:
        return [encode_frame(Kind.ANSWER, header.request_id, metadata)]

    async with answered(answer) as (node, _, counters):
        with pytest.raises(NodeUnavailable):
            await node.look_up(make_keys(3, 1), soon())
        with pytest.raises(NodeUnavailable):
            await node.info(soon())
        assert counters.get("remote_lost") >= 1


async def test_headers_of_another_number_are_an_unavailable_node() -> None:
    async with answered(lambda h, m: [encode_frame(Kind.ANSWER, h.request_id, bytes(100))]) as (node, _, _counters):
        with pytest.raises(NodeUnavailable):
            await node.headers(np.zeros(2, np.int64), np.ones(2, np.uint64), 4, soon())


async def test_an_exception_of_the_caller_comes_out_of_the_read_and_the_connection_lives_on() -> None:
    async with answered(lambda h, m: [piece(h, 0, bytes(2 * SLOT)), end(h)]) as (node, server, _):
        def refuse(place: int) -> None:
            raise ValueError(f"not {place}")

        landing = Landing(memoryview(bytearray(2 * SLOT)), (Stride(0, SLOT, 0, SLOT),))
        with pytest.raises(ValueError, match="not 0"):
            await node.read([(Span(0, 2, SLOT, SLOT), landing)], refuse, soon())
        seen: list[int] = []
        await node.read([(Span(0, 2, SLOT, SLOT), landing)], seen.append, soon())
        assert seen == [0]
        assert server.lost == 0


async def test_what_no_frame_can_hold_is_not_sent_and_not_waited_for() -> None:
    async with answered(lambda h, m: [end(h)]) as (node, server, _):
        with pytest.raises(WireError, match=f"at most {WIRE_METADATA_BYTES}"):
            await node._reading.ask(Kind.BURY, bytes(WIRE_METADATA_BYTES + 1), soon(), decode_nothing)
        assert not node._reading._pending
        await node._reading.ask(Kind.BURY, b"", soon(), decode_nothing)
        assert server.asked == [Kind.BURY]


async def test_a_server_that_never_answers_is_suspect_and_refused_at_once() -> None:
    async with answered(lambda h, m: []) as (node, server, _):
        with pytest.raises(NodeUnavailable, match="no answer by the deadline"):
            await node.look_up(make_keys(1, 1), soon(50))
        assert await came_true(lambda: node.suspect)
        asked = len(server.asked)
        with pytest.raises(NodeUnavailable, match="owes an answer"):
            await node.look_up(make_keys(1, 1), soon())
        assert len(server.asked) == asked == 2
        assert server.asked == [Kind.LOOK_UP, Kind.CANCEL]
