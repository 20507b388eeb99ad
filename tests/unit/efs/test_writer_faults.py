"""Putting blocks while nodes are down, slow or hung, and while the caller gives up."""

from __future__ import annotations

import asyncio
import gc
import itertools
import random
import weakref

import numpy as np
import pytest

from efs import writer as writer_module
from efs.clock import Deadline
from efs.errors import NodeReadOnly, NodeUnavailable
from efs.health import NodeState
from efs.limits import ABANDONED_BYTES_PER_NODE
from efs.types import PutReport
from efs.writer import TOO_LATE
from tests.support.bench import SpyCodec, assert_readable, make_bench, small_pieces
from tests.support.blocks import TINY, make_blocks, readable, sound_versions
from tests.support.clock import FakeClock
from tests.support.gatednode import Gate
from tests.support.waiting import LATE_S

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


async def test_memory_of_a_write_whose_end_is_not_known_is_not_used_again() -> None:
    bench = make_bench()
    node = bench.nodes[8]
    gate = node.put_gate = Gate()
    node.gives_up = True
    first = make_blocks(9, seed=1)
    assert await bench.put(first) == PutReport(9, 0, 0, 9)
    assert gate.held == 1
    node.put_gate = None
    bench.health.note_answer(8)
    for seed in (2, 3):
        assert await bench.put(make_blocks(9, seed=seed)) == PutReport(9, 0, 0, 0)
    gate.release()
    await node.all_done()
    for key in first.keys:
        (shards,) = sound_versions(bench.twins, key).values()
        assert len(shards) == 12
    assert_readable(bench, first)


async def test_two_hung_nodes_and_the_put_is_not_acknowledged_even_when_it_completes_later() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    blocks = make_blocks(4)
    gates = [Gate(), Gate()]
    bench.nodes[1].put_gate, bench.nodes[2].put_gate = gates
    running = asyncio.create_task(bench.put(blocks, deadline_ms=1_000))
    while not all(gate.held for gate in gates) or any(bench.records(key) < 10 for key in blocks.keys):
        await asyncio.sleep(0)
    for _ in range(10):
        await asyncio.sleep(0)
    # Ten nodes have answered; the other two do so at the same moment, after the deadline.
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
    assert bench.clock.monotonic() - deadline.at < LATE_S
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


async def test_with_two_hung_look_ups_nothing_is_written_on_half_a_survey() -> None:
    codec = SpyCodec()
    bench = make_bench(codec=codec)
    gate = bench.nodes[6].look_up_gate = bench.nodes[7].look_up_gate = Gate()
    report = await bench.put(make_blocks(3), deadline_ms=150)
    assert report == PutReport(0, 0, 3, 0)
    assert report.why == TOO_LATE
    assert gate.held == 2
    assert codec.rows == 0
    bench.assert_nothing_held()


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
