"""Putting blocks: what is acknowledged, what is not, and what a put leaves behind."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from efs import pieces
from efs.clock import Deadline, stamp_of
from efs.contract import PutBatch
from efs.errors import InvalidArgument, NodeFull
from efs.limits import HOLLOW_GRACE_MS, MAX_KEYS_PER_CALL, PUT_PIECE_BYTES, STRIPE_SHARDS
from efs.shape import BlockShape
from efs.shard import parse_header
from efs.types import PutItem, PutReport
from efs.writer import OTHER_BYTES, check_items
from tests.support.bench import Bench, SpyCodec, assert_readable, make_bench, small_pieces
from tests.support.blocks import TINY, Blocks, make_blocks, readable, sound_versions
from tests.support.clock import FakeClock
from tests.support.gatednode import Gate
from tests.support.memorynode import MemoryNode

SHAPES = [
    BlockShape(size, segments)
    for size, segments in [
        (1, (1,)), (9, (4, 5)), (10, (10,)), (11, (1, 10)), (79, (79,)), (81, (40, 41)), (997, (500, 497)),
        (4_000, (800, 800, 800, 1_600)), (6_400, (6_400,)), (12_345, tuple([12_345 // 5] * 5)),
    ]
]


# -- storing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.block_bytes))
async def test_every_node_gets_its_shard_and_any_ten_make_the_block(shape: BlockShape) -> None:
    bench = make_bench()
    blocks = make_blocks(21, shape=shape, run=4)
    assert await bench.put(blocks) == PutReport(21, 0, 0, 0)
    for place, key in enumerate(blocks.keys):
        (shards,) = sound_versions(bench.twins, key).values()
        assert sorted(shards) == list(range(STRIPE_SHARDS))
        assert {stored.header.depth for stored in shards.values()} == {place}
        assert len({stored.raw_header[:6] + stored.raw_header[32:-8] for stored in shards.values()}) == 1
    assert_readable(bench, blocks)
    bench.assert_nothing_held()
    assert bench.counts("put_calls", "put_acked", "put_failed") == (1, 21, 0)


async def test_padding_is_zeros_also_in_memory_that_was_used_before() -> None:
    bench = make_bench()
    await bench.put(make_blocks(30, seed=1, shape=BlockShape(6_400, (6_400,))))
    shape = BlockShape(997, (500, 497))
    blocks = make_blocks(30, seed=2, shape=shape)
    await bench.put(blocks)
    padded_shards = 0
    for node in bench.nodes:
        batch = node.batches[-1]
        assert not batch.payload[:, shape.shard_bytes :].any()
        for header, payload in zip(batch.headers, batch.payload, strict=True):
            if parse_header(header.tobytes()).shard == 9:
                assert not payload[997 - 9 * shape.shard_bytes :].any()
                padded_shards += 1
    assert padded_shards == 30


async def test_pieces_change_nothing_about_what_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks(50, run=7)
    whole, cut = make_bench(), make_bench()
    await whole.put(blocks)
    small_pieces(monkeypatch, 3)
    await cut.put(blocks)
    assert len(cut.nodes[0].batches) > len(whole.nodes[0].batches) == 1
    for key in blocks.keys:
        for one, other in zip(whole.twins, cut.twins, strict=True):
            (first,), (second,) = one.records[key].values(), other.records[key].values()
            assert (first.raw_header, first.payload) == (second.raw_header, second.payload)


def order_of(batch: PutBatch, blocks: Blocks) -> list[tuple[int, int]]:
    return [(parse_header(header.tobytes()).shard, blocks.keys.index(key))
            for key, header in zip(batch.keys, batch.headers, strict=True)]


async def test_a_node_writes_in_segment_order_then_chain_order() -> None:
    bench = make_bench()
    blocks = make_blocks(96, run=8)
    await bench.put(blocks)
    for node in bench.nodes:
        (batch,) = node.batches
        assert order_of(batch, blocks) == sorted(order_of(batch, blocks))


def test_pieces_are_cut_where_runs_end() -> None:
    size = 16 * 1024
    most = PUT_PIECE_BYTES // size
    lengths = [4, 4, 8, most - 20, 10, 2 * most + 5]
    run = np.repeat(np.arange(len(lengths)), lengths)
    rotation = (run * 5 % 12).astype(np.uint8)
    parts = pieces.cut(np.arange(len(run)), rotation, run, size)
    assert [part.rows for part in parts] == [most - 4, 10, most, most, 5]
    assert sorted(np.concatenate([part.blocks for part in parts]).tolist()) == list(range(len(run)))


async def test_blocks_larger_than_a_piece_go_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "PUT_PIECE_BYTES", 1 << 20)
    bench = make_bench()
    blocks = make_blocks(2, shape=BlockShape(2 << 20, (2 << 20,)))
    assert await bench.put(blocks) == PutReport(2, 0, 0, 0)
    assert [len(batch.keys) for batch in bench.nodes[5].batches] == [1, 1]
    assert_readable(bench, blocks)


async def test_others_get_their_turn_while_a_put_encodes(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = SpyCodec()
    bench = make_bench(codec=codec)
    blocks = make_blocks(64)
    small_pieces(monkeypatch, 1_000)
    rows_seen: set[int] = set()

    async def watch() -> None:
        while True:
            rows_seen.add(codec.rows)
            await asyncio.sleep(0)

    watcher = asyncio.create_task(watch())
    await bench.put(blocks)
    watcher.cancel()
    assert len(rows_seen) > 20


# -- what was there before --------------------------------------------------------------------------------------


async def test_the_same_block_again_is_already_there() -> None:
    codec = SpyCodec()
    bench = make_bench(codec=codec)
    blocks = make_blocks(10)
    await bench.put(blocks)
    assert codec.rows == 10
    assert await bench.put(blocks) == PutReport(0, 10, 0, 0)
    assert codec.rows == 10
    assert [len(node.batches) for node in bench.nodes] == [1] * 12
    assert all(set(node.touched) == set(blocks.keys) for node in bench.nodes), "a block that is put again is in use"


async def test_first_complete_version_wins_over_other_bytes() -> None:
    bench = make_bench()
    first = make_blocks(6, seed=1)
    other = make_blocks(6, seed=2, keys=first.keys)
    await bench.put(first)
    assert await bench.put(other) == PutReport(0, 6, 0, 0)
    for place, key in enumerate(first.keys):
        assert list(readable(bench.twins, key).values()) == [first.block(place)]


async def test_an_incomplete_version_stands_beside_the_new_one_and_is_never_mixed_with_it() -> None:
    bench = make_bench()
    old = make_blocks(3, seed=1)
    new = make_blocks(3, seed=2, keys=old.keys)
    await bench.put(old)
    for twin in bench.twins[:6]:
        forget(twin, old.keys)
    assert await bench.put(new) == PutReport(3, 0, 0, 0)
    for place, key in enumerate(new.keys):
        assert sorted(map(len, sound_versions(bench.twins, key).values())) == [6, 12]
        assert list(readable(bench.twins, key).values()) == [new.block(place)]


def forget(twin: MemoryNode, keys: Sequence[bytes]) -> None:
    """A node loses its records of these keys."""
    for key in keys:
        for stored in twin.records.pop(key, {}).values():
            twin.slots.pop(stored.location)


@pytest.mark.parametrize("lost", [(0, 1), (3, 11)])
async def test_a_block_on_ten_nodes_gets_its_missing_shards_and_is_already_there(lost: tuple[int, int]) -> None:
    bench = make_bench()
    blocks = make_blocks(5)
    await bench.put(blocks)
    for index in lost:
        forget(bench.twins[index], blocks.keys)
    assert await bench.put(blocks) == PutReport(0, 5, 0, 0)
    assert [len(node.batches) for node in bench.nodes] == [2 if index in lost else 1 for index in range(12)]
    assert all(bench.records(key) == 12 for key in blocks.keys)


async def test_a_put_of_a_block_on_ten_nodes_is_a_use_of_all_its_shards() -> None:
    """Else the ten would be as cold as they were, be evicted next, and the acknowledged block with them."""
    clock = FakeClock()
    bench = make_bench(clock)
    blocks = make_blocks(5)
    await bench.put(blocks)
    for index in (3, 11):
        forget(bench.twins[index], blocks.keys)
    clock.advance(1_000)
    assert await bench.put(blocks) == PutReport(0, 5, 0, 0)
    stamps = {stored.stamp for twin in bench.twins for key in blocks.keys for stored in twin.records[key].values()}
    assert stamps == {stamp_of(clock.wall())}


async def test_a_block_on_ten_nodes_with_one_of_the_others_down_ends_at_risk() -> None:
    bench = make_bench()
    blocks = make_blocks(5)
    await bench.put(blocks)
    for index in (0, 1):
        forget(bench.twins[index], blocks.keys)
    bench.twins[0].down = "gone"
    assert await bench.put(blocks) == PutReport(0, 5, 0, 5)
    assert all(bench.records(key) == 11 for key in blocks.keys)


async def test_a_block_on_ten_nodes_is_not_acknowledged_when_its_shards_cannot_be_stored() -> None:
    bench = make_bench()
    blocks = make_blocks(5)
    await bench.put(blocks)
    for index in (0, 1):
        forget(bench.twins[index], blocks.keys)
        bench.nodes[index].refusals = [NodeFull(index, "no space")]
    assert await bench.put(blocks) == PutReport(0, 0, 5, 0)
    assert not bench.nodes[0].refusals


async def test_a_block_on_eleven_nodes_is_already_there_and_at_risk() -> None:
    bench = make_bench()
    blocks = make_blocks(5)
    await bench.put(blocks)
    forget(bench.twins[4], blocks.keys)
    assert await bench.put(blocks) == PutReport(0, 5, 0, 5)
    assert bench.counts("put_at_risk") == (5,)
    assert len(bench.nodes[4].batches) == 1


async def test_records_that_are_not_trusted_do_not_make_a_block_already_there() -> None:
    bench = make_bench()
    blocks = make_blocks(4)
    await bench.put(blocks)
    for twin in bench.twins:
        for stored in twin.slots.values():
            stored.trusted = False
            if twin.node_index in (2, 7):
                stored.payload[:] = bytes(len(stored.payload))
    assert all(len(readable(bench.twins, key)) == 1 for key in blocks.keys)
    assert await bench.put(blocks) == PutReport(4, 0, 0, 0)
    for key in blocks.keys:
        (shards,) = sound_versions(bench.twins, key).values()
        assert len(shards) == 12
        assert all(stored.trusted for stored in shards.values())


async def test_a_record_in_the_wrong_place_is_not_counted_and_replaced() -> None:
    bench = make_bench()
    blocks = make_blocks(1)
    await bench.put(blocks)
    (key,) = blocks.keys
    # Three nodes' directories mixed up: twelve records, nine in their place.
    for one, other in itertools.pairwise(bench.twins[:3]):
        one.records, other.records = other.records, one.records
        one.slots, other.slots = other.slots, one.slots
    assert not readable(bench.twins, key)
    assert await bench.put(blocks) == PutReport(1, 0, 0, 0)
    (shards,) = sound_versions(bench.twins, key).values()
    assert len(shards) == 12


# -- versions ---------------------------------------------------------------------------------------------------


async def make_versions(bench: Bench, keep: Sequence[int]) -> list[Blocks]:
    """Version v of one key on the first keep[v] nodes."""
    versions = []
    first = make_blocks(1, seed=100)
    for number, shards in enumerate(keep):
        version = make_blocks(1, seed=100 + number, keys=first.keys)
        other = make_bench()
        await other.put(version)
        for twin, source in zip(bench.twins[:shards], other.twins, strict=False):
            (stored,) = source.slots.values()
            batch = PutBatch(version.keys, np.frombuffer(stored.raw_header, np.uint8).reshape(1, -1).copy(),
                             padded(bytes(stored.payload), stored.slot_bytes), len(stored.payload), 0)
            await twin.put(batch, Deadline.after_ms(bench.clock, 1_000))
        versions.append(version)
    return versions


def padded(payload: bytes, slot_bytes: int) -> NDArray[np.uint8]:
    return np.frombuffer(payload.ljust(slot_bytes, b"\0"), np.uint8).reshape(1, -1).copy()


async def test_a_fifth_version_displaces_the_one_with_the_fewest_shards() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    old = await make_versions(bench, [9, 4, 3, 10])
    clock.advance(HOLLOW_GRACE_MS / 1000)
    fifth = make_blocks(1, seed=200, keys=old[0].keys)
    assert await bench.put(fifth) == PutReport(1, 0, 0, 0)
    counts = sorted(map(len, sound_versions(bench.twins, fifth.keys[0]).values()))
    assert counts == [4, 9, 10, 12]
    assert_readable(bench, fifth)
    assert_readable(bench, old[3])


async def test_a_version_that_another_process_may_be_writing_is_not_displaced() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    old = await make_versions(bench, [9, 10, 10, 10])
    clock.advance(HOLLOW_GRACE_MS / 1000 - 1)
    fifth = make_blocks(1, seed=200, keys=old[0].keys)
    assert await bench.put(fifth) == PutReport(0, 0, 1, 0)
    assert sorted(map(len, sound_versions(bench.twins, fifth.keys[0]).values())) == [9, 10, 10, 10]
    clock.advance(1)
    assert await bench.put(fifth) == PutReport(1, 0, 0, 0)


async def test_a_fifth_version_fails_where_all_four_can_be_read() -> None:
    bench = make_bench()
    old = await make_versions(bench, [10, 10, 10, 10])
    fifth = make_blocks(1, seed=200, keys=old[0].keys)
    assert await bench.put(fifth) == PutReport(0, 0, 1, 0)
    assert sorted(map(len, sound_versions(bench.twins, fifth.keys[0]).values())) == [10, 10, 10, 10]
    bench.assert_nothing_held()


async def test_a_fifth_version_fails_alone_and_its_neighbours_are_stored() -> None:
    bench = make_bench()
    old = await make_versions(bench, [10, 10, 10, 10])
    keys = (*make_blocks(3, seed=9).keys, old[0].keys[0], *make_blocks(3, seed=10).keys)
    blocks = make_blocks(7, seed=300, keys=keys)
    assert await bench.put(blocks) == PutReport(6, 0, 1, 0)
    assert_readable(bench, blocks, [0, 1, 2, 4, 5, 6])


async def test_a_version_that_is_being_written_is_not_displaced() -> None:
    bench = make_bench()
    old = await make_versions(bench, [10, 10, 10])
    fourth = make_blocks(1, seed=150, keys=old[0].keys)
    gate = Gate()
    for node in bench.nodes[5:]:
        node.put_gate = gate
    running = asyncio.create_task(bench.put(fourth))
    while gate.held < 7:
        await asyncio.sleep(0)
    fifth = make_blocks(1, seed=200, keys=old[0].keys)
    assert sorted(map(len, sound_versions(bench.twins, fifth.keys[0]).values())) == [5, 10, 10, 10]
    assert await bench.put(fifth) == PutReport(0, 0, 1, 0)
    gate.release()
    assert await running == PutReport(1, 0, 0, 0)
    assert_readable(bench, fourth)
    bench.assert_nothing_held()


@pytest.mark.parametrize("held", [False, True])
async def test_bytes_of_another_digest_than_was_demanded_are_not_stored(held: bool) -> None:
    bench = make_bench()
    meant, found = make_blocks(20, seed=1), make_blocks(20, seed=2, keys=make_blocks(20, seed=1).keys)
    await bench.put(meant)
    digests = [next(iter(sound_versions(bench.twins, key))) for key in meant.keys]
    bench = make_bench()
    if held:
        # Ten nodes have the other version already: it is neither made whole nor taken for stored.
        await bench.put(found)
        for twin in bench.twins[:2]:
            for stored in list(twin.slots.values()):
                twin._forget(stored)
    items = [replace(item, digest=digest) for item, digest in zip(meant.items, digests, strict=True)]
    data = meant.data.copy()
    data[5:] = found.data[5:]
    report = await bench.writer.put(items, TINY, data, Deadline.after_ms(bench.clock, 5_000))
    assert (report.acked, report.already, report.failed, report.why) == (5, 0, 15, OTHER_BYTES)
    assert not {key for node in bench.nodes for key in node.touched}
    for place, key in enumerate(meant.keys):
        versions = sound_versions(bench.twins, key)
        assert len(versions.get(digests[place], {})) == (STRIPE_SHARDS if place < 5 else 0)
        assert sum(len(shards) for digest, shards in versions.items() if digest != digests[place]) == 10 * held
    assert (await bench.writer.put(items, TINY, meant.data, Deadline.after_ms(bench.clock, 5_000))).failed == 0
    bench.assert_nothing_held()


# -- the same key at the same time ------------------------------------------------------------------------------


async def test_equal_keys_in_one_call_are_stored_once() -> None:
    bench = make_bench()
    one = make_blocks(3)
    data = np.concatenate([one.data, one.data[:2], np.zeros((1, TINY.block_bytes), np.uint8)])
    blocks = Blocks(TINY, (*one.keys, *one.keys[:2], one.keys[2]), data)
    assert await bench.put(blocks) == PutReport(3, 3, 0, 0)
    assert all(bench.records(key) == 12 for key in one.keys)
    assert_readable(bench, one)


async def test_equal_keys_fail_together() -> None:
    bench = make_bench(absent=(1, 2))
    one = make_blocks(2)
    blocks = Blocks(TINY, one.keys + one.keys, np.concatenate([one.data, one.data]))
    assert await bench.put(blocks) == PutReport(0, 0, 4, 0)


async def test_64_writers_of_one_block_and_one_of_them_dies() -> None:
    bench = make_bench()
    blocks = make_blocks(1)
    gate = Gate()
    bench.nodes[3].put_gate = gate
    tasks = [asyncio.create_task(bench.put(blocks)) for _ in range(64)]
    while gate.held < 64:
        await asyncio.sleep(0)
    tasks[17].cancel()
    await asyncio.sleep(0)
    gate.release()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    await bench.nodes[3].all_done()
    assert isinstance(results.pop(17), asyncio.CancelledError)
    assert results == [PutReport(1, 0, 0, 0)] * 63
    assert bench.records(blocks.keys[0]) == 12
    assert_readable(bench, blocks)
    bench.assert_nothing_held()
    assert bench.counts("put_calls", "put_acked", "put_failed") == (64, 63, 0)


async def test_writers_of_different_bytes_never_make_a_mixture() -> None:
    bench = make_bench()
    first = make_blocks(1, seed=0)
    versions = [make_blocks(1, seed=seed, keys=first.keys) for seed in range(4)]
    reports = await asyncio.gather(*(bench.put(version) for version in versions))
    assert all(report.acked + report.already == 1 for report in reports)
    assert set(readable(bench.twins, first.keys[0]).values()) == {version.block(0) for version in versions}


# -- arguments --------------------------------------------------------------------------------------------------


async def test_no_blocks_are_nothing() -> None:
    bench = make_bench()
    assert await bench.put(make_blocks(0)) == PutReport(0, 0, 0, 0)


@pytest.mark.parametrize(("item", "named"), [
    (PutItem(b"short", 0, bytes(8)), "5 bytes"),
    (PutItem(bytes(32), 0, b"tag"), "3 bytes"),
    (PutItem(bytes(32), -1, bytes(8)), "-1"),
    (PutItem(bytes(32), 1 << 32, bytes(8)), "4294967296"),
    (PutItem(bytes(32), 0, bytes(8), bytes(15)), "a digest has 15 bytes"),
])
def test_what_no_record_can_hold_is_refused(item: PutItem, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        check_items([item])


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=str(MAX_KEYS_PER_CALL + 1)):
        check_items([PutItem(bytes(32), 0, bytes(8))] * (MAX_KEYS_PER_CALL + 1))
