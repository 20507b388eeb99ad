"""What puts, drops and verification do on every node, and how calls end, whatever it is made of."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from efs.clock import Deadline, stamp_of
from efs.contract import ABSENT, PURGED, Landing, Node, PutBatch, Span, Stride
from efs.errors import EfsError, InvalidArgument, NodeUnavailable
from efs.limits import MAX_VERSIONS_PER_KEY
from efs.types import DropItem
from tests.contract.calls import ODD, listing, payload_of, records_held, soon, store
from tests.contract.factories import NODE_INDEX
from tests.support.clock import FakeClock
from tests.support.records import LARGE, SMALL, Records, make_keys, make_records

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
        node.bury([b"acme-tag"], soon(clock)),
        node.tenant_bytes(soon(clock)),
        node.list(None, 5, soon(clock)),
        node.info(soon(clock)),
    ]
    refused: Sequence[object] = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in refused] == [NodeUnavailable] * len(calls)
    with pytest.raises(EfsError):
        node.look_up_now(records.keys)


# -- Tenants --------------------------------------------------------------------------------------------------------


async def test_what_is_buried_goes_and_is_refused_from_then_on_and_nothing_else(node: Node, clock: FakeClock) -> None:
    """Fault 47: records of a purged tag go, and come back neither by puts nor by repair."""
    purged, other = b"acme-tag", b"other-tg"
    mine = [make_records(30, NODE_INDEX, seed=seed, shape=shape, tenant_tag=purged)
            for seed, shape in ((1, SMALL), (2, LARGE))]
    theirs = make_records(20, NODE_INDEX, seed=3, tenant_tag=other)
    free = make_records(10, NODE_INDEX, seed=4)
    for records in (*mine, theirs, free):
        await store(node, records, clock)
    held = {other: 20 * SMALL.slot_bytes, bytes(8): 10 * SMALL.slot_bytes}
    both = SMALL.slot_bytes + LARGE.slot_bytes
    assert await node.tenant_bytes(soon(clock)) == {purged: 30 * both, **held}
    assert await node.bury([purged], soon(clock)) == 60
    assert await node.bury([purged], soon(clock)) == 0
    assert await node.tenant_bytes(soon(clock)) == held
    assert {record.tenant_tag for record in await listing(node, clock)} == {other, bytes(8)}
    for records in mine:
        assert (await node.look_up(records.keys, soon(clock))).location.tolist() == [ABSENT] * 30
        for repair in (False, True):
            outcome = await node.put(replace(records.batch(), repair=repair), soon(clock))
            assert (int(outcome.stored.sum()), outcome.why) == (0, PURGED)
    assert await records_held(node, clock) == 30
    await store(node, make_records(5, NODE_INDEX, seed=5, tenant_tag=other), clock)


@pytest.mark.parametrize("tag", [b"", b"seven-b", bytes(8)])
async def test_only_a_tenants_tag_can_be_buried(node: Node, clock: FakeClock, tag: bytes) -> None:
    await store(node, make_records(3, NODE_INDEX), clock)
    with pytest.raises(InvalidArgument):
        await node.bury([tag], soon(clock))
    assert await records_held(node, clock) == 3


async def test_info_counts_records_and_bytes(node: Node, clock: FakeClock) -> None:
    await store(node, make_records(10, NODE_INDEX, seed=1), clock)
    await store(node, make_records(3, NODE_INDEX, seed=2, shape=LARGE), clock)
    info = await node.info(soon(clock))
    assert (info.node_index, info.records, info.unverified, info.state) == (NODE_INDEX, 13, 0, "serving")
    assert info.live_bytes == 10 * SMALL.slot_bytes + 3 * LARGE.slot_bytes
    assert not node.suspect
