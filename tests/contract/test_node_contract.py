"""What every node does, whatever it is made of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.clock import Deadline, stamp_of
from efs.contract import ABSENT, Landing, Node, NodeTable, PutBatch, Span, Stride
from efs.errors import EfsError, InvalidArgument, NodeUnavailable
from efs.extent import ranges_of
from efs.limits import MAX_VERSIONS_PER_KEY, STAMP_SECONDS
from efs.shape import BlockShape
from efs.types import DropItem, ListedRecord
from tests.contract.factories import FACTORIES, NODE_INDEX
from tests.support.clock import FakeClock
from tests.support.records import LARGE, SMALL, Records, make_keys, make_records

ODD = BlockShape(7_919, (1_000, 4_001, 2_918))
"""Segments whose borders fall inside shards, and an odd number of bytes."""


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=FACTORIES)
async def node(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Node]:
    async with FACTORIES[request.param](tmp_path, clock) as made:
        yield made


def soon(clock: FakeClock) -> Deadline:
    return Deadline.after_ms(clock, 20_000)


async def store(node: Node, records: Records, clock: FakeClock, stamp: int = 0) -> NodeTable:
    """Put all records and look them up."""
    outcome = await node.put(records.batch(stamp), soon(clock))
    assert outcome.stored.all(), outcome.why
    return await node.look_up(records.keys, soon(clock))


async def payload_of(node: Node, locations: NDArray[np.int64], shape: BlockShape, clock: FakeClock) -> bytes:
    """Payload at these locations in order, read in as few spans as they are."""
    size = shape.shard_bytes
    buffer = bytearray(len(locations) * size)
    spans = [(Span(location, count, size, shape.slot_bytes),
              Landing(memoryview(buffer), (Stride(0, size, row * size, size),)))
             for row, location, count in ranges_of(locations)]
    seen: list[int] = []
    await node.read(spans, seen.append, soon(clock))
    assert seen == list(range(len(spans)))
    return bytes(buffer)


async def listing(node: Node, clock: FakeClock, limit: int = 1_000) -> list[ListedRecord]:
    found: list[ListedRecord] = []
    after: bytes | None = None
    while True:
        page = await node.list(after, limit, soon(clock))
        found += page.records
        after = page.after
        if after is None:
            return found


async def records_held(node: Node, clock: FakeClock) -> int:
    return (await node.info(soon(clock))).records


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


# -- Putting --------------------------------------------------------------------------------------------------------


async def test_the_same_record_is_not_stored_twice_but_its_arrival_is_renewed(node: Node, clock: FakeClock) -> None:
    records = make_records(50, NODE_INDEX)
    before = await store(node, records, clock)
    first = await listing(node, clock)
    clock.advance(90)
    after = await store(node, records, clock)
    assert await records_held(node, clock) == 50
    assert (before.location == after.location).all()
    assert (before.generation == after.generation).all()
    again = await listing(node, clock)
    assert [new.arrival_ms - old.arrival_ms for old, new in zip(first, again, strict=True)] == [90_000] * 50
    headers = await node.headers(after.location, after.generation, 1, soon(clock))
    assert (headers == records.headers).all()


async def test_a_look_up_does_not_renew_the_arrival(node: Node, clock: FakeClock) -> None:
    records = make_records(5, NODE_INDEX)
    await store(node, records, clock)
    first = await listing(node, clock)
    clock.advance(90)
    table = await node.look_up(records.keys, soon(clock))
    node.touch(records.keys, table.location, stamp_of(clock.wall()))
    await payload_of(node, table.location, SMALL, clock)
    assert [old.arrival_ms for old in first] == [new.arrival_ms for new in await listing(node, clock)]


async def test_a_batch_of_known_and_new_records_stores_the_new_ones(node: Node, clock: FakeClock) -> None:
    records = make_records(60, NODE_INDEX)
    await store(node, records.rows(20, 40), clock)
    table = await store(node, records, clock)
    assert await records_held(node, clock) == 60
    assert await payload_of(node, table.location, SMALL, clock) == records.payload.tobytes()


async def test_a_record_given_twice_in_a_batch_is_stored_once(node: Node, clock: FakeClock) -> None:
    records = make_records(4, NODE_INDEX)
    rows = [0, 1, 0, 2, 3, 1]
    batch = records.batch()
    doubled = PutBatch([records.keys[row] for row in rows], batch.headers[rows], batch.payload[rows],
                       batch.shard_bytes, 0)
    outcome = await node.put(doubled, soon(clock))
    assert outcome.stored.all()
    assert await records_held(node, clock) == 4


async def test_two_versions_of_a_key_live_side_by_side(node: Node, clock: FakeClock) -> None:
    one = make_records(20, NODE_INDEX, seed=1)
    two = make_records(20, NODE_INDEX, seed=2, keys=one.keys)
    await store(node, one, clock)
    table = await store(node, two, clock)
    assert await records_held(node, clock) == 40
    assert len(table.extra) == 20
    locations = np.concatenate((table.location, np.array([row.location for row in table.extra])))
    generations = np.concatenate((table.generation, np.array([row.generation for row in table.extra], np.uint64)))
    headers = await node.headers(locations, generations, 1, soon(clock))
    digests = [row.tobytes() for row in table.digest] + [row.digest for row in table.extra]
    owners = [*range(20), *(row.row for row in table.extra)]
    payload = await payload_of(node, locations, SMALL, clock)
    for place, (owner, digest) in enumerate(zip(owners, digests, strict=True)):
        version = one if digest == one.digests[owner] else two
        assert digest == version.digests[owner]
        assert (headers[place] == version.headers[owner]).all()
        assert payload[place * 100 : place * 100 + 100] == version.payload[owner].tobytes()
    assert all(row.trusted and row.shard == one.headers[row.row, 6] for row in table.extra)
    now = node.look_up_now(one.keys)
    assert now is None or len(now.extra) == 20


async def test_a_fifth_version_is_not_stored(node: Node, clock: FakeClock) -> None:
    versions = [make_records(3, NODE_INDEX, seed=seed, keys=make_keys(3, 77)) for seed in range(MAX_VERSIONS_PER_KEY +
    1)]
    for version in versions[:-1]:
        await store(node, version, clock)
    outcome = await node.put(versions[-1].batch(), soon(clock))
    assert not outcome.stored.any()
    assert outcome.why is not None
    assert "versions" in outcome.why
    assert await records_held(node, clock) == 3 * MAX_VERSIONS_PER_KEY
    table = await node.look_up(versions[0].keys, soon(clock))
    assert len(table.extra) == 3 * (MAX_VERSIONS_PER_KEY - 1)


async def test_a_dropped_version_makes_room_for_another(node: Node, clock: FakeClock) -> None:
    versions = [make_records(1, NODE_INDEX, seed=seed, keys=make_keys(1, 77)) for seed in range(MAX_VERSIONS_PER_KEY +
    1)]
    for version in versions[:-1]:
        await store(node, version, clock)
    table = await node.look_up(versions[0].keys, soon(clock))
    item = DropItem(versions[0].keys[0], table.digest[0].tobytes(), int(table.generation[0]))
    assert await node.drop([item], soon(clock)) == 1
    assert (await node.put(versions[-1].batch(), soon(clock))).stored.all()


def spoiled(records: Records, row: int, byte: int) -> PutBatch:
    batch = records.batch()
    batch.headers[row, byte] ^= 0x10
    return batch


def wrong_batches() -> dict[str, PutBatch]:
    good = make_records(8, NODE_INDEX)
    batch = good.batch()
    other = make_records(8, NODE_INDEX + 1)
    return {
        "flipped bit in a header": spoiled(good, 3, 40),
        "flipped bit in a header hash": spoiled(good, 7, good.headers.shape[1] - 1),
        "header of another key": replace(batch, keys=[*good.keys[1:], good.keys[0]]),
        "shard of another node": other.batch(),
        "short key": replace(batch, keys=[*good.keys[:7], good.keys[7][:31]]),
        "keys and headers differ in number": replace(batch, keys=good.keys[:7]),
        "payload rows too narrow": replace(batch, payload=np.ascontiguousarray(batch.payload[:, :64])),
        "payload rows too few": replace(batch, payload=batch.payload[:7]),
        "payload not contiguous": replace(batch, payload=batch.payload[::-1]),
        "another shard size": replace(batch, shard_bytes=99),
        "no records": replace(batch, keys=[], headers=batch.headers[:0], payload=batch.payload[:0]),
    }


@pytest.mark.parametrize("what", wrong_batches())
async def test_a_wrong_batch_is_refused_and_nothing_of_it_stored(node: Node, clock: FakeClock, what: str) -> None:
    with pytest.raises(InvalidArgument):
        await node.put(wrong_batches()[what], soon(clock))
    assert await records_held(node, clock) == 0
    await store(node, make_records(8, NODE_INDEX), clock)


async def test_sixty_four_writers_of_one_block_leave_one_copy(node: Node, clock: FakeClock) -> None:
    records = make_records(10, NODE_INDEX)
    outcomes = await asyncio.gather(*(node.put(records.batch(), soon(clock)) for _ in range(64)))
    assert all(outcome.stored.all() for outcome in outcomes)
    assert await records_held(node, clock) == 10
    table = await node.look_up(records.keys, soon(clock))
    assert table.extra == ()
    assert await payload_of(node, table.location, SMALL, clock) == records.payload.tobytes()


async def test_several_slot_sizes_live_on_one_node(node: Node, clock: FakeClock) -> None:
    stored = [(shape, make_records(30, NODE_INDEX, seed=seed, shape=shape))
              for seed, shape in enumerate((SMALL, LARGE, ODD))]
    for _, records in stored:
        await store(node, records, clock)
    keys = [key for _, records in stored for key in records.keys]
    table = await node.look_up(keys, soon(clock))
    assert [row.tobytes() for row in table.digest] == [digest for _, records in stored for digest in records.digests]
    for place, (shape, records) in enumerate(stored):
        part = table.location[30 * place : 30 * place + 30]
        assert await payload_of(node, part, shape, clock) == records.payload.tobytes()


# -- Dropping and verifying -----------------------------------------------------------------------------------------


async def test_a_dropped_record_is_gone_and_others_stay(node: Node, clock: FakeClock) -> None:
    records = make_records(40, NODE_INDEX)
    table = await store(node, records, clock)
    items = records.drop_items(table.generation)
    assert await node.drop(items[::2], soon(clock)) == 20
    left = await node.look_up(records.keys, soon(clock))
    assert (left.location[::2] == ABSENT).all()
    assert (left.location[1::2] == table.location[1::2]).all()
    assert await records_held(node, clock) == 20
    assert not (await node.headers(table.location[::2], table.generation[::2], 1, soon(clock))).any()
    assert await node.drop(items[::2], soon(clock)) == 0


async def test_only_the_named_generation_and_digest_is_dropped(node: Node, clock: FakeClock) -> None:
    records = make_records(3, NODE_INDEX)
    table = await store(node, records, clock)
    wrong = [DropItem(records.keys[0], records.digests[0], int(table.generation[0]) + 1),
             DropItem(records.keys[1], records.digests[0], int(table.generation[1])),
             DropItem(make_keys(1, 55)[0], records.digests[2], int(table.generation[2]))]
    assert await node.drop(wrong, soon(clock)) == 0
    assert ((await node.look_up(records.keys, soon(clock))).location >= 0).all()


async def test_one_of_two_versions_is_dropped(node: Node, clock: FakeClock) -> None:
    one = make_records(1, NODE_INDEX, seed=1)
    two = make_records(1, NODE_INDEX, seed=2, keys=one.keys)
    table = await store(node, one, clock)
    await store(node, two, clock)
    assert await node.drop(one.drop_items(table.generation), soon(clock)) == 1
    left = await node.look_up(one.keys, soon(clock))
    assert left.digest[0].tobytes() == two.digests[0]
    assert left.extra == ()


async def test_a_record_stored_again_after_a_drop_has_a_greater_generation(node: Node, clock: FakeClock) -> None:
    records = make_records(5, NODE_INDEX)
    first = await store(node, records, clock)
    await node.drop(records.drop_items(first.generation), soon(clock))
    second = await store(node, records, clock)
    assert second.generation.min() > first.generation.max()
    assert await node.drop(records.drop_items(first.generation), soon(clock)) == 0


async def test_a_sound_record_passes_verification_and_an_absent_one_does_not(node: Node, clock: FakeClock) -> None:
    records = make_records(2, NODE_INDEX)
    await store(node, records, clock)
    assert await node.verify(records.keys[0], records.digests[0], soon(clock))
    assert not await node.verify(records.keys[0], records.digests[1], soon(clock))
    assert not await node.verify(make_keys(1, 8)[0], records.digests[0], soon(clock))
    assert await records_held(node, clock) == 2


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


# -- Waiting, giving up, closing ------------------------------------------------------------------------------------


async def test_a_deadline_that_has_passed_is_an_unavailable_node(node: Node, clock: FakeClock) -> None:
    late = Deadline(clock, clock.monotonic() - 1)
    with pytest.raises(NodeUnavailable):
        await node.look_up(make_keys(5, 5), late)
    with pytest.raises(NodeUnavailable):
        await node.put(make_records(5, NODE_INDEX).batch(), late)


async def test_a_cancelled_put_leaves_the_node_working(node: Node, clock: FakeClock) -> None:
    source = random.Random(11)
    records = make_records(20, NODE_INDEX)
    for _ in range(40):
        task = asyncio.ensure_future(node.put(records.batch(), soon(clock)))
        for _ in range(source.randrange(12)):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    table = await store(node, records, clock)
    assert await records_held(node, clock) == 20
    assert await payload_of(node, table.location, SMALL, clock) == records.payload.tobytes()


async def test_a_cancelled_read_lands_nothing_more(node: Node, clock: FakeClock) -> None:
    records = make_records(64, NODE_INDEX, shape=LARGE)
    table = await store(node, records, clock)
    size = LARGE.shard_bytes
    buffer = bytearray(64 * size)
    spans = [(Span(int(location), 1, size, LARGE.slot_bytes),
              Landing(memoryview(buffer), (Stride(0, size, row * size, size),)))
             for row, location in enumerate(table.location)]
    seen: list[int] = []
    task = asyncio.ensure_future(node.read(spans, seen.append, soon(clock)))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    landed = len(seen)
    content = bytes(buffer)
    await node.look_up(make_keys(1, 1), soon(clock))
    await payload_of(node, table.location, LARGE, clock)
    assert len(seen) == landed
    assert bytes(buffer) == content


async def test_a_closed_node_serves_nothing(node: Node, clock: FakeClock) -> None:
    records = make_records(2, NODE_INDEX)
    table = await store(node, records, clock)
    await node.close()
    await node.close()
    calls = [
        node.look_up(records.keys, soon(clock)),
        node.headers(table.location, table.generation, 1, soon(clock)),
        node.read([], lambda _: None, soon(clock)),
        node.put(records.batch(), soon(clock)),
        node.drop(records.drop_items(table.generation), soon(clock)),
        node.verify(records.keys[0], records.digests[0], soon(clock)),
        node.list(None, 5, soon(clock)),
        node.info(soon(clock)),
    ]
    refused: Sequence[object] = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in refused] == [NodeUnavailable] * len(calls)
    with pytest.raises(EfsError):
        node.look_up_now(records.keys)


async def test_info_counts_records_and_bytes(node: Node, clock: FakeClock) -> None:
    await store(node, make_records(10, NODE_INDEX, seed=1), clock)
    await store(node, make_records(3, NODE_INDEX, seed=2, shape=LARGE), clock)
    info = await node.info(soon(clock))
    assert (info.node_index, info.records, info.unverified, info.state) == (NODE_INDEX, 13, 0, "serving")
    assert info.live_bytes == 10 * SMALL.slot_bytes + 3 * LARGE.slot_bytes
    assert not node.suspect
