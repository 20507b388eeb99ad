"""Putting blocks: what is acknowledged, what is not, and what a put leaves behind."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import weakref
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from efs import pieces
from efs import writer as writer_module
from efs.clock import Deadline
from efs.codec import Codec, Shards
from efs.contract import PutBatch
from efs.errors import InvalidArgument, NodeFull, NodeReadOnly, NodeUnavailable
from efs.health import NodeState
from efs.limits import ABANDONED_BYTES_PER_NODE, MAX_KEYS_PER_CALL, PUT_PIECE_BYTES, STRIPE_SHARDS
from efs.shape import BlockShape
from efs.shard import parse_header
from efs.types import PutItem, PutReport
from efs.writer import check_items
from tests.support.bench import Bench, make_bench
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


class SpyCodec(Codec):
    """Counts encoded rows and may do something before each call."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.rows = 0
        self.before = before

    def encode(self, data: Sequence[Shards], parity: Sequence[Shards]) -> None:
        self.before()
        self.rows += len(data[0])
        super().encode(data, parity)


def small_pieces(monkeypatch: pytest.MonkeyPatch, blocks: int, shape: BlockShape = TINY) -> None:
    """Pieces of this many blocks, a turn for others after each block."""
    monkeypatch.setattr(pieces, "PUT_PIECE_BYTES", blocks * shape.block_bytes)
    monkeypatch.setattr(pieces, "PUT_CHUNK_BYTES", 2 * shape.block_bytes)
    monkeypatch.setattr(pieces, "PUT_SLICE_BYTES", shape.block_bytes)


def assert_readable(bench: Bench, blocks: Blocks, at: Sequence[int] | None = None) -> None:
    for place in at if at is not None else range(len(blocks.keys)):
        assert blocks.block(place) in readable(bench.twins, blocks.keys[place]).values()


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


async def test_blocks_larger_than_a_piece_go_one_by_one() -> None:
    bench = make_bench()
    blocks = make_blocks(2, shape=BlockShape(20 << 20, (20 << 20,)))
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
    bench = make_bench()
    old = await make_versions(bench, [9, 4, 3, 10])
    fifth = make_blocks(1, seed=200, keys=old[0].keys)
    assert await bench.put(fifth) == PutReport(1, 0, 0, 0)
    counts = sorted(map(len, sound_versions(bench.twins, fifth.keys[0]).values()))
    assert counts == [4, 9, 10, 12]
    assert_readable(bench, fifth)
    assert_readable(bench, old[3])


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


# -- nodes that are down ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("gone", range(12))
async def test_with_any_one_node_absent_a_put_succeeds_at_risk(gone: int) -> None:
    bench = make_bench(absent=[gone])
    blocks = make_blocks(13, run=1)
    assert await bench.put(blocks) == PutReport(13, 0, 0, 13)
    assert not bench.nodes[gone].batches
    assert_readable(bench, blocks)


@pytest.mark.parametrize("gone", list(itertools.combinations(range(12), 2)), ids=str)
async def test_with_any_two_nodes_absent_a_put_fails_before_encoding(gone: tuple[int, int]) -> None:
    codec = SpyCodec()
    bench = make_bench(absent=gone, codec=codec)
    blocks = make_blocks(3)
    assert await bench.put(blocks) == PutReport(0, 0, 3, 0)
    assert codec.rows == 0
    assert all(bench.records(key) == 0 for key in blocks.keys)
    assert bench.counts("put_refused", "put_failed") == (3, 3)
    bench.assert_nothing_held()


async def test_nodes_that_refuse_the_look_up_are_known_down_from_then_on() -> None:
    codec = SpyCodec()
    bench = make_bench(codec=codec)
    for index in (2, 9):
        bench.twins[index].down = "its disk fails"
    assert await bench.put(make_blocks(2)) == PutReport(0, 0, 2, 0)
    assert codec.rows == 0
    assert bench.health.state(2) is NodeState.SUSPECT
    asked = bench.nodes[2].look_ups
    await bench.put(make_blocks(2))
    assert bench.nodes[2].look_ups == asked, "a suspect node is left alone for its back-off"


async def test_a_node_that_heals_is_used_again_after_its_back_off() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    bench.twins[2].down = "its disk fails"
    assert await bench.put(make_blocks(2, seed=1)) == PutReport(2, 0, 0, 2)
    bench.twins[2].down = None
    assert await bench.put(make_blocks(2, seed=2)) == PutReport(2, 0, 0, 2)
    clock.advance(0.3)
    assert await bench.put(make_blocks(2, seed=3)) == PutReport(2, 0, 0, 0)


async def test_hung_nodes_are_known_down() -> None:
    bench = make_bench()
    bench.twins[0].hanging = bench.twins[5].hanging = True
    assert await bench.put(make_blocks(2)) == PutReport(0, 0, 2, 0)
    bench.twins[5].hanging = False
    assert await bench.put(make_blocks(2)) == PutReport(2, 0, 0, 2)


async def test_a_read_only_node_gets_no_more_writes_but_still_says_what_it_holds() -> None:
    bench = make_bench()
    first = make_blocks(2, seed=1)
    await bench.put(first)
    for index in (1, 2):
        bench.nodes[index].refusals = [NodeReadOnly(index, "fsync failed")]
    assert await bench.put(make_blocks(2, seed=2)) == PutReport(0, 0, 2, 0)
    assert bench.health.state(1) is NodeState.READ_ONLY
    assert await bench.put(first) == PutReport(0, 2, 0, 0)
    assert await bench.put(make_blocks(2, seed=3)) == PutReport(0, 0, 2, 0)
    assert len(bench.nodes[1].batches) == 1
    assert bench.counts("put_refused") == (2,)


async def test_two_nodes_that_fail_between_pieces_end_the_put_early(monkeypatch: pytest.MonkeyPatch) -> None:
    codec = SpyCodec()
    bench = make_bench(codec=codec)
    blocks = make_blocks(40, run=4)
    small_pieces(monkeypatch, 4)
    for index in (0, 6):
        bench.nodes[index].refusals = [NodeUnavailable(index, "its disk fails")]
    report = await bench.put(blocks)
    assert report == PutReport(0, 0, 40, 0)
    assert codec.rows < 40
    assert all(bench.records(key) in (0, 10) for key in blocks.keys)
    assert {bench.records(key) for key in blocks.keys} == {0, 10}
    bench.assert_nothing_held()


async def test_a_node_that_is_full_for_some_rows_leaves_them_at_risk() -> None:
    bench = make_bench()
    bench.twins[7]._capacity = 3
    blocks = make_blocks(5)
    assert await bench.put(blocks) == PutReport(5, 0, 0, 2)


# -- slow nodes, deadlines, the caller's memory -------------------------------------------------------------------


async def test_one_hung_node_costs_the_grace_and_never_sees_the_reused_buffer() -> None:
    bench = make_bench()
    blocks = make_blocks(9)
    expected = [blocks.block(place) for place in range(9)]
    gate = bench.nodes[8].put_gate = Gate()
    assert await bench.put(blocks) == PutReport(9, 0, 0, 9)
    assert gate.held == 1
    assert bench.writer.staging.abandoned_bytes(8) > 0
    bench.assert_nothing_held()
    blocks.data[:] = 0
    gate.release()
    await bench.nodes[8].all_done()
    for place, key in enumerate(blocks.keys):
        (shards,) = sound_versions(bench.twins, key).values()
        assert len(shards) == 12
        assert list(readable(bench.twins, key).values()) == [expected[place]]
    bench.nodes[8].batches.clear()
    await asyncio.sleep(0)
    gc.collect()
    assert bench.writer.staging.abandoned_bytes(8) == 0


async def test_two_hung_nodes_and_the_put_is_not_acknowledged_even_when_it_completes_later() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    blocks = make_blocks(4)
    gates = [Gate(), Gate()]
    bench.nodes[1].put_gate, bench.nodes[2].put_gate = gates
    running = asyncio.create_task(bench.put(blocks, deadline_ms=1_000))
    while not all(gate.held for gate in gates):
        await asyncio.sleep(0)
    clock.advance(1.1)
    for gate in gates:
        gate.release()
    assert await running == PutReport(0, 0, 4, 0)
    assert all(bench.records(key) == 12 for key in blocks.keys)
    assert bench.counts("put_deadline", "put_failed") == (1, 4)
    bench.assert_nothing_held()
    assert await bench.put(blocks) == PutReport(0, 4, 0, 0)


async def test_a_put_returns_by_its_deadline_while_two_nodes_hang() -> None:
    bench = make_bench()
    bench.nodes[1].put_gate = bench.nodes[2].put_gate = gate = Gate()
    blocks = make_blocks(4)
    deadline = Deadline.after_ms(bench.clock, 150)
    report = await bench.writer.put(blocks.items, blocks.shape, blocks.data, deadline)
    assert bench.clock.monotonic() - deadline.at < 0.1
    assert report == PutReport(0, 0, 4, 0)
    assert gate.held == 2
    bench.assert_nothing_held()
    gate.release()
    for node in bench.nodes[1:3]:
        await node.all_done()


async def test_a_hung_look_up_costs_the_grace() -> None:
    bench = make_bench()
    gate = bench.nodes[6].look_up_gate = Gate()
    assert await bench.put(make_blocks(3)) == PutReport(3, 0, 0, 0)
    assert gate.held == 1


async def test_a_deadline_that_passes_while_encoding_acknowledges_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    codec = SpyCodec(before=lambda: clock.advance(0.6))
    bench = make_bench(clock, codec=codec)
    small_pieces(monkeypatch, 4)
    blocks = make_blocks(40, run=4)
    assert await bench.put(blocks, deadline_ms=1_000) == PutReport(0, 0, 40, 0)
    assert 0 < codec.rows <= 4
    assert bench.counts("put_deadline") == (1,)
    bench.assert_nothing_held()


async def test_one_slow_node_is_left_out_of_a_long_put(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench()
    small_pieces(monkeypatch, 4)
    gate = bench.nodes[3].put_gate = Gate()
    blocks = make_blocks(40, run=4)
    assert await bench.put(blocks) == PutReport(40, 0, 0, 40)
    assert len(bench.nodes[3].batches) == 2
    assert len(bench.nodes[4].batches) > 2
    bench.assert_nothing_held()
    gate.release()
    await bench.nodes[3].all_done()


async def test_a_node_that_holds_too_much_abandoned_memory_gets_no_writes() -> None:
    bench = make_bench()
    buffer = np.zeros(ABANDONED_BYTES_PER_NODE, np.uint8)
    bench.writer.staging.abandon(4, buffer)
    bench.writer.staging.budget.free_bytes -= len(buffer)
    assert await bench.put(make_blocks(3, seed=1)) == PutReport(3, 0, 0, 3)
    assert not bench.nodes[4].batches
    del buffer
    assert await bench.put(make_blocks(3, seed=2)) == PutReport(3, 0, 0, 0)


async def test_the_callers_memory_is_free_after_the_return() -> None:
    bench = make_bench()
    gate = bench.nodes[0].put_gate = Gate()
    blocks = make_blocks(3)
    memory = blocks.data.copy()
    watched = weakref.ref(memory)
    deadline = Deadline.after_ms(bench.clock, 1_000)
    assert await bench.writer.put(blocks.items, TINY, memory, deadline) == PutReport(3, 0, 0, 3)
    del memory
    assert watched() is None
    gate.release()
    await bench.nodes[0].all_done()


async def test_puts_beyond_the_budget_wait_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "PUT_BUDGET_BYTES", 10 * TINY.block_bytes)
    bench = make_bench()
    gate = bench.nodes[0].put_gate = bench.nodes[1].put_gate = Gate()
    first = asyncio.create_task(bench.put(make_blocks(8, seed=1)))
    while gate.held < 2:
        await asyncio.sleep(0)
    late = asyncio.create_task(bench.put(make_blocks(3, seed=2), deadline_ms=30))
    second = asyncio.create_task(bench.put(make_blocks(3, seed=3)))
    assert await late == PutReport(0, 0, 3, 0)
    assert bench.nodes[5].look_ups == 1, "neither of them was admitted"
    gate.release()
    assert await first == PutReport(8, 0, 0, 0)
    assert await second == PutReport(3, 0, 0, 0)
    assert bench.writer.admission.free_bytes == 10 * TINY.block_bytes


# -- cancelling -------------------------------------------------------------------------------------------------


async def test_a_put_cancelled_at_any_await_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    small_pieces(monkeypatch, 4)
    blocks = make_blocks(12, run=4)
    finished = 0
    for turns in range(200):
        bench = make_bench()
        for twin in bench.twins:
            twin.warm = False
        task = asyncio.create_task(bench.put(blocks))
        for _ in range(turns):
            await asyncio.sleep(0)
        task.cancel()
        try:
            assert await task == PutReport(12, 0, 0, 0)
            finished += 1
        except asyncio.CancelledError:
            pass
        await asyncio.sleep(0)
        bench.assert_nothing_held()
        assert await bench.put(blocks) in [PutReport(12 - done, done, 0, 0) for done in range(13)]
        assert_readable(bench, blocks)
        if finished:
            break
    assert finished, "the last turns never reached the end of a put"
    assert turns > 12, "hardly any await was met"


async def test_a_thousand_random_cancellations(monkeypatch: pytest.MonkeyPatch) -> None:
    seed = 7
    source = random.Random(seed)
    small_pieces(monkeypatch, 2)
    bench = make_bench()
    for twin in bench.twins:
        twin.warm = False
    gates = [Gate() for _ in range(12)]
    cancelled = 0
    for number in itertools.count():
        if cancelled == 1_000:
            break
        for node, gate in zip(bench.nodes, gates, strict=True):
            node.put_gate = gate if source.random() < 0.1 else None
        task = asyncio.create_task(bench.put(make_blocks(3, seed=number), deadline_ms=2_000))
        for _ in range(source.randint(0, 7)):
            await asyncio.sleep(0)
        cancelled += task.cancel()
        await asyncio.wait((task,))
        if source.random() < 0.2:
            for gate in gates:
                gate.release()
            gates = [Gate() for _ in range(12)]
    for gate in gates:
        gate.release()
    for node in bench.nodes:
        await node.all_done()
        node.put_gate = None
        node.batches.clear()
    await asyncio.sleep(0)
    gc.collect()
    bench.assert_nothing_held()
    assert all(bench.writer.staging.abandoned_bytes(index) == 0 for index in range(12)), f"seed {seed}"
    assert number < 2_000
    for number in range(0, 1_000, 25):
        blocks = make_blocks(3, seed=number)
        report = await bench.put(blocks)
        assert report.acked + report.already == 3
        assert_readable(bench, blocks)


async def test_closing_gives_up_writes_that_hang() -> None:
    bench = make_bench()
    gate = bench.nodes[3].put_gate = Gate()
    await bench.put(make_blocks(2))
    await bench.writer.close()
    assert gate.held == 1
    gate.release()
    await bench.nodes[3].all_done()


# -- arguments --------------------------------------------------------------------------------------------------


async def test_no_blocks_are_nothing() -> None:
    bench = make_bench()
    assert await bench.put(make_blocks(0)) == PutReport(0, 0, 0, 0)


@pytest.mark.parametrize(("item", "named"), [
    (PutItem(b"short", 0, bytes(8)), "5 bytes"),
    (PutItem(bytes(32), 0, b"tag"), "3 bytes"),
    (PutItem(bytes(32), -1, bytes(8)), "-1"),
    (PutItem(bytes(32), 1 << 32, bytes(8)), "4294967296"),
])
def test_what_no_record_can_hold_is_refused(item: PutItem, named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        check_items([item])


def test_too_many_blocks_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=str(MAX_KEYS_PER_CALL + 1)):
        check_items([PutItem(bytes(32), 0, bytes(8))] * (MAX_KEYS_PER_CALL + 1))
