"""What every node answers to look-ups and reads, whatever it is made of."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.clock import stamp_of
from efs.contract import ABSENT, Landing, Node, NodeTable, Span, Stride
from efs.errors import InvalidArgument
from efs.extent import ranges_of
from efs.limits import STAMP_SECONDS
from efs.shape import BlockShape
from efs.spans import cuts
from tests.contract.calls import ODD, listing, payload_of, soon, store
from tests.contract.factories import NODE_INDEX
from tests.support.clock import FakeClock
from tests.support.records import LARGE, SMALL, make_keys, make_records

# -- Looking up -----------------------------------------------------------------------------------------------------


async def test_keys_that_were_never_stored_are_absent(node: Node, clock: FakeClock) -> None:
    keys = make_keys(100, seed=3)
    for _ in range(2):
        table = await node.look_up(keys, soon(clock))
        assert (table.location == ABSENT).all()
        assert not table.digest.any()
        assert not table.generation.any()
        assert not table.trusted.any()
        assert table.extra == ()


async def test_no_keys_make_an_empty_table(node: Node, clock: FakeClock) -> None:
    table = await node.look_up([], soon(clock))
    assert table.digest.shape == (0, 2)
    assert len(table.location) == len(table.generation) == len(table.shard) == len(table.trusted) == 0


async def test_a_stored_record_is_found_with_digest_shard_and_generation(node: Node, clock: FakeClock) -> None:
    records = make_records(200, NODE_INDEX)
    table = await store(node, records, clock)
    types = [table.digest.dtype, table.location.dtype, table.generation.dtype, table.shard.dtype, table.trusted.dtype]
    assert [str(dtype) for dtype in types] == ["uint64", "int64", "uint64", "uint8", "bool"]
    assert [row.tobytes() for row in table.digest] == list(records.digests)
    assert (table.shard == records.headers[:, 6]).all()
    assert (table.location >= 0).all()
    assert table.generation.all()
    assert len(set(table.generation.tolist())) == len(records)
    assert table.trusted.all()
    assert table.extra == ()


async def test_an_answer_from_memory_equals_the_awaited_one(node: Node, clock: FakeClock) -> None:
    records = make_records(150, NODE_INDEX)
    keys = [*records.keys[:100], *make_keys(50, seed=99), *records.keys[100:]]
    await store(node, records, clock)
    awaited = await node.look_up(keys, soon(clock))
    now = node.look_up_now(keys)
    if now is not None:
        for name in ("digest", "location", "generation", "shard", "trusted"):
            assert (getattr(now, name) == getattr(awaited, name)).all(), name
    assert (awaited.location[100:150] == ABSENT).all()
    assert (awaited.location[:100] >= 0).all()


async def test_neighbours_of_a_batch_lie_in_neighbouring_slots(node: Node, clock: FakeClock) -> None:
    table = await store(node, make_records(128, NODE_INDEX), clock)
    assert len(ranges_of(table.location)) == 1


async def test_a_key_asked_twice_is_answered_twice(node: Node, clock: FakeClock) -> None:
    records = make_records(3, NODE_INDEX)
    await store(node, records, clock)
    table = await node.look_up([records.keys[1], records.keys[0], records.keys[1]], soon(clock))
    assert table.location[0] == table.location[2] != table.location[1]


@pytest.mark.parametrize("wrong", [b"", bytes(31), bytes(33)])
async def test_a_key_of_another_length_is_refused(node: Node, clock: FakeClock, wrong: bytes) -> None:
    with pytest.raises(InvalidArgument, match="must have 32"):
        await node.look_up([make_keys(1, 1)[0], wrong], soon(clock))


# -- Headers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, LARGE, ODD])
async def test_headers_come_back_as_they_were_put(node: Node, clock: FakeClock, shape: BlockShape) -> None:
    records = make_records(40, NODE_INDEX, shape=shape)
    table = await store(node, records, clock)
    segments = len(shape.segment_bytes)
    headers = await node.headers(table.location, table.generation, segments, soon(clock))
    assert (headers == records.headers).all()
    now = node.headers_now(table.location, table.generation, segments)
    assert now is None or (now == records.headers).all()


async def test_headers_of_another_generation_or_shape_are_zeros(node: Node, clock: FakeClock) -> None:
    records = make_records(10, NODE_INDEX)
    table = await store(node, records, clock)
    generations = table.generation.copy()
    generations[3] += np.uint64(1)
    headers = await node.headers(table.location, generations, 1, soon(clock))
    assert not headers[3].any()
    assert (np.delete(headers, 3, axis=0) == np.delete(records.headers, 3, axis=0)).all()
    assert not (await node.headers(table.location, table.generation, 2, soon(clock))).any()


async def test_headers_of_places_that_do_not_exist_are_zeros(node: Node, clock: FakeClock) -> None:
    table = await store(node, make_records(2, NODE_INDEX), clock)
    nowhere = np.array([ABSENT, 1 << 60, int(table.location[0]) + 900_000], np.int64)
    headers = await node.headers(nowhere, np.array([0, 7, 7], np.uint64), 1, soon(clock))
    assert not headers.any()


# -- Tables, and what comes behind them -----------------------------------------------------------------------------


class Sink:
    """Keeps what a get brings. Every record lands in its place of `buffer`, by its row."""

    def __init__(self, shape: BlockShape, rows: int, stretches: Sequence[tuple[int, int]], segments: int) -> None:
        self.stretches = stretches
        self.shard_bytes, self.slot_bytes, self.segments = shape.shard_bytes, shape.slot_bytes, segments
        self.buffer = bytearray(b"\xee" * rows * shape.shard_bytes)
        self.tables: list[tuple[NodeTable, NDArray[np.uint8] | None]] = []
        self.rows: list[range] = []
        self.seen: list[int] = []

    def table_came(self, table: NodeTable, headers: NDArray[np.uint8] | None) -> None:
        self.tables.append((table, headers))

    def places(self) -> Sequence[tuple[Span, Landing]]:
        assert len(self.tables) == 1
        size, spans = self.shard_bytes, []
        for stretch in cuts(self.tables[0][0].location, self.stretches):
            for first, location, count in stretch:
                landing = Landing(memoryview(self.buffer), (Stride(0, size, first * size, size),))
                spans.append((Span(location, count, size, self.slot_bytes), landing))
                self.rows.append(range(first, first + count))
        return spans

    def landed(self, index: int) -> None:
        self.seen.append(index)


@pytest.mark.parametrize("shape", [SMALL, LARGE, ODD])
async def test_a_get_brings_the_table_and_maybe_headers_and_shards(
    node: Node, clock: FakeClock, shape: BlockShape
) -> None:
    records = make_records(96, NODE_INDEX, shape=shape)
    keys = [*records.keys[:50], *make_keys(6, seed=99), *records.keys[50:]]
    held = np.array([row for row in range(len(keys)) if not 50 <= row < 56])
    expected = await store(node, records, clock)
    segments = len(shape.segment_bytes)
    sink = Sink(shape, len(keys), [(60, 102), (0, 53)], segments)
    await node.get(keys, sink, soon(clock))
    ((table, headers),) = sink.tables
    assert (table.location[held] == expected.location).all()
    assert (table.generation[held] == expected.generation).all()
    assert (table.location[50:56] == ABSENT).all()
    if headers is not None:
        assert (headers[held] == records.headers).all()
        assert not headers[50:56].any()
    assert sink.seen in ([], list(range(len(sink.rows))))
    size, rows = shape.shard_bytes, {row for index in sink.seen for row in sink.rows[index]}
    assert rows in (set(), {*range(60, 102), *range(50)})
    for row in range(len(keys)):
        payload = records.payload[row if row < 50 else row - 6, :size].tobytes() if row in rows else b"\xee" * size
        assert bytes(sink.buffer[row * size : (row + 1) * size]) == payload


async def test_a_get_of_no_shards_brings_the_table_only(node: Node, clock: FakeClock) -> None:
    records = make_records(8, NODE_INDEX)
    expected = await store(node, records, clock)
    sink = Sink(SMALL, 8, [], 0)
    await node.get(records.keys, sink, soon(clock))
    ((table, headers),) = sink.tables
    assert (table.location == expected.location).all()
    assert headers is None
    assert sink.seen == []


async def test_a_get_of_headers_of_another_shape_has_none(node: Node, clock: FakeClock) -> None:
    records = make_records(8, NODE_INDEX)
    await store(node, records, clock)
    sink = Sink(SMALL, 8, [], 3)
    await node.get(records.keys, sink, soon(clock))
    ((_, headers),) = sink.tables
    assert headers is None or not headers.any()


# -- Payload --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [SMALL, LARGE, ODD])
async def test_payload_comes_back_as_it_was_put(node: Node, clock: FakeClock, shape: BlockShape) -> None:
    records = make_records(96, NODE_INDEX, shape=shape)
    table = await store(node, records, clock)
    assert await payload_of(node, table.location, shape, clock) == records.payload.tobytes()


@pytest.mark.parametrize(
    "strides",
    [
        (Stride(0, 100, 0, 100),),
        (Stride(0, 100, 7, 250),),
        (Stride(10, 50, 3, 60),),
        (Stride(0, 30, 0, 30), Stride(30, 70, 64 * 30, 70)),
        (Stride(5, 20, 4_000, 31), Stride(60, 11, 0, 11), Stride(90, 10, 9_000, 40)),
    ],
)
@pytest.mark.parametrize("count", [1, 5, 64])
async def test_pieces_land_where_their_strides_say_and_nowhere_else(
    node: Node, clock: FakeClock, strides: tuple[Stride, ...], count: int
) -> None:
    records = make_records(64, NODE_INDEX)
    table = await store(node, records, clock)
    first = int(table.location[0])
    assert len(ranges_of(table.location)) == 1
    expected = bytearray(b"\xa5" * 20_000)
    for stride in strides:
        for row in range(count):
            at = stride.start + row * stride.step
            expected[at : at + stride.size] = records.payload[row, stride.source : stride.source +
            stride.size].tobytes()
    span = Span(first, count, SMALL.shard_bytes, SMALL.slot_bytes)
    awaited, now = bytearray(b"\xa5" * 20_000), bytearray(b"\xa5" * 20_000)
    await node.read([(span, Landing(memoryview(awaited), strides))], lambda _: None, soon(clock))
    assert awaited == expected
    if node.read_now(span, Landing(memoryview(now), strides)):
        assert now == expected


async def test_a_revoked_landing_gets_no_bytes_and_no_call(node: Node, clock: FakeClock) -> None:
    records = make_records(30, NODE_INDEX)
    table = await store(node, records, clock)
    size = SMALL.shard_bytes
    buffers = [bytearray(10 * size) for _ in range(3)]
    landings = [Landing(memoryview(buffer), (Stride(0, size, 0, size),)) for buffer in buffers]
    spans = [(Span(int(table.location[10 * place]), 10, size, SMALL.slot_bytes), landing)
             for place, landing in enumerate(landings)]
    landings[1].revoked = True
    seen: list[int] = []

    def landed(place: int) -> None:
        seen.append(place)
        landings[2].revoked = True

    assert not node.read_now(*spans[1])
    await node.read(spans, landed, soon(clock))
    assert seen == [0]
    assert buffers[0] == records.payload[:10].tobytes()
    assert not any(buffers[1])
    assert not any(buffers[2])


async def test_spans_land_in_the_order_in_which_they_were_asked(node: Node, clock: FakeClock) -> None:
    records = make_records(64, NODE_INDEX, shape=LARGE)
    table = await store(node, records, clock)
    order = random.Random(4).sample(range(64), 64)
    size = LARGE.shard_bytes
    buffer = bytearray(64 * size)
    spans = [(Span(int(table.location[row]), 1, size, LARGE.slot_bytes),
              Landing(memoryview(buffer), (Stride(0, size, row * size, size),))) for row in order]
    seen: list[int] = []
    await node.read(spans, seen.append, soon(clock))
    assert seen == list(range(64))
    assert buffer == records.payload.tobytes()


async def test_slots_that_were_never_used_read_as_zeros(node: Node, clock: FakeClock) -> None:
    table = await store(node, make_records(1, NODE_INDEX), clock)
    buffer = bytearray(b"\xff" * 100)
    span = Span(int(table.location[0]) + 700_000, 1, 100, 128)
    await node.read([(span, Landing(memoryview(buffer), (Stride(0, 100, 0, 100),)))], lambda _: None, soon(clock))
    assert not any(buffer)


# -- Listing and stamps ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 7, 100, 1_000])
async def test_a_listing_is_sorted_and_complete_in_pages_of_any_size(node: Node, clock: FakeClock, limit: int) -> None:
    one = make_records(60, NODE_INDEX, seed=1, first_depth=5, tenant_tag=b"tenant-1", shape=ODD)
    two = make_records(40, NODE_INDEX, seed=2, keys=one.keys[:40], shape=ODD)
    await store(node, one, clock)
    await store(node, two, clock)
    found = await listing(node, clock, limit)
    names = [record.key + record.digest for record in found]
    expected = {key + digest: (version, row) for version in (one, two)
                for row, (key, digest) in enumerate(zip(version.keys, version.digests, strict=True))}
    assert names == sorted(expected)
    for record in found:
        version, row = expected[record.key + record.digest]
        assert record.shard == version.headers[row, 6]
        assert (record.block_bytes, record.segments) == (ODD.block_bytes, 3)
        assert record.depth == (row + 5 if version is one else row)
        assert record.tenant_tag == (b"tenant-1" if version is one else bytes(8))
        assert record.arrival_ms == int(clock.wall() * 1000)
        assert record.generation > 0


async def test_a_listing_begins_behind_any_bytes(node: Node, clock: FakeClock) -> None:
    records = make_records(20, NODE_INDEX)
    await store(node, records, clock)
    ordered = sorted(records.keys)
    page = await node.list(ordered[9], 100, soon(clock))
    assert [record.key for record in page.records] == ordered[9:]
    page = await node.list(b"\xff" * 48, 100, soon(clock))
    assert page.records == ()
    assert page.after is None


async def test_a_listing_of_no_records_is_refused(node: Node, clock: FakeClock) -> None:
    with pytest.raises(InvalidArgument):
        await node.list(None, 0, soon(clock))


async def test_a_touch_raises_stamps_and_never_lowers_them(node: Node, clock: FakeClock) -> None:
    records = make_records(30, NODE_INDEX)
    now = stamp_of(clock.wall())
    table = await store(node, records, clock, stamp=now - 10)

    async def stamps() -> set[int]:
        return {record.stamp for record in await listing(node, clock)}

    assert await stamps() == {now - 10}
    node.touch(records.keys, table.location, now - 3)
    assert await stamps() == {now - 3}
    node.touch(records.keys, None, now - 7)
    assert await stamps() == {now - 3}
    node.touch(records.keys, None, now)
    assert await stamps() == {now}


async def test_stamps_from_the_future_are_clamped_to_the_nodes_clock(node: Node, clock: FakeClock) -> None:
    records = make_records(2, NODE_INDEX)
    now = stamp_of(clock.wall())
    table = await store(node, records.rows(0, 1), clock, stamp=now + 500)
    node.touch(records.keys[:1], table.location, now + 999)
    assert [record.stamp for record in await listing(node, clock)] == [now]
    clock.advance(STAMP_SECONDS)
    node.touch(records.keys[:1], table.location, now + 999)
    assert [record.stamp for record in await listing(node, clock)] == [now + 1]


async def test_touching_what_is_not_there_does_nothing(node: Node, clock: FakeClock) -> None:
    keys = make_keys(3, 1)
    node.touch(keys, None, 5)
    node.touch(keys, np.array([ABSENT, 1 << 50, 3], np.int64), 5)
    assert await listing(node, clock) == []
