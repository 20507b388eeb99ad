"""How many leading blocks a match promises, and whom it asks."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable

import pytest

from efs.clock import Deadline
from efs.match import Matcher
from efs.placement import placement_group, rotation_of
from tests.support.bench import Bench, make_bench
from tests.support.blocks import Blocks, make_blocks, readable
from tests.support.clock import FakeClock
from tests.support.gatednode import Gate


def forget(bench: Bench, nodes: Iterable[int], keys: Iterable[bytes]) -> None:
    for index, key in itertools.product(nodes, list(keys)):
        for stored in bench.twins[index].records.pop(key, {}).values():
            bench.twins[index].slots.pop(stored.location)


async def match(bench: Bench, blocks: Blocks, *, strict: bool = False, deadline_ms: float = 2_000) -> int:
    for node in bench.nodes:
        node.look_ups = 0
    matcher = Matcher(bench.writer.nodes, bench.health)
    return await matcher.match(blocks.keys, strict, Deadline.after_ms(bench.clock, deadline_ms))


async def stored(count: int = 60, *, run: int = 8, bench: Bench | None = None) -> tuple[Bench, Blocks]:
    bench = bench or make_bench()
    blocks = make_blocks(count, run=run)
    report = await bench.put(blocks)
    assert report.acked == count
    return bench, blocks


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("warm", [False, True])
async def test_all_blocks_are_found(strict: bool, warm: bool) -> None:
    bench, blocks = await stored()
    for twin in bench.twins:
        twin.warm = warm
    assert await match(bench, blocks, strict=strict) == 60


async def test_nothing_is_found_of_nothing() -> None:
    bench = make_bench()
    assert await match(bench, make_blocks(0)) == 0
    assert await match(bench, make_blocks(20)) == 0


async def test_three_nodes_of_each_run_are_asked_when_they_agree() -> None:
    bench, blocks = await stored(8)
    assert await match(bench, blocks) == 8
    asked = [node.node_index for node in bench.nodes if node.look_ups]
    rotation = rotation_of(placement_group(blocks.keys[0]))
    assert asked == sorted((shard + rotation) % 12 for shard in (0, 4, 8))


@pytest.mark.parametrize("strict", [False, True])
async def test_what_three_nodes_deny_is_not_asked_of_others(strict: bool) -> None:
    bench = make_bench()
    assert await match(bench, make_blocks(8), strict=strict) == 0
    assert sum(node.look_ups for node in bench.nodes) == 3


async def test_the_load_of_many_runs_falls_on_all_nodes() -> None:
    bench, blocks = await stored(60, run=1)
    assert await match(bench, blocks) == 60
    assert all(node.look_ups == 1 for node in bench.nodes), "one batch a node"


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("hole", [0, 1, 17, 59])
async def test_a_hole_ends_the_prefix(hole: int, strict: bool) -> None:
    bench, blocks = await stored()
    forget(bench, range(12), [blocks.keys[hole]])
    assert await match(bench, blocks, strict=strict) == hole


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("lost", [1, 2])
async def test_shards_that_one_or_two_nodes_lost_do_not_matter(lost: int, strict: bool) -> None:
    for nodes in itertools.combinations(range(12), lost):
        bench, blocks = await stored(10, run=2)
        forget(bench, nodes, blocks.keys)
        assert await match(bench, blocks, strict=strict) == 10, nodes


async def test_strict_finds_what_three_agreeing_nodes_cannot_know() -> None:
    bench, blocks = await stored(8)
    rotation = rotation_of(placement_group(blocks.keys[0]))
    others = [(shard + rotation) % 12 for shard in (1, 2, 3)]
    forget(bench, others, [blocks.keys[5]])
    assert not readable(bench.twins, blocks.keys[5])
    assert await match(bench, blocks) == 8, "a promise that the fetch corrects"
    assert await match(bench, blocks, strict=True) == 5


async def test_three_that_hold_different_versions_make_the_others_be_asked() -> None:
    bench, blocks = await stored(8)
    other = make_blocks(8, seed=2, keys=blocks.keys)
    second = make_bench()
    await second.put(other)
    for index in (0, 1, 2, 3, 4, 5):
        bench.twins[index].records = second.twins[index].records
        bench.twins[index].slots = second.twins[index].slots
    assert all(not readable(bench.twins, key) for key in blocks.keys)
    assert await match(bench, blocks) == 0
    assert sum(node.look_ups for node in bench.nodes) == 12


@pytest.mark.parametrize("strict", [False, True])
async def test_two_complete_versions_are_a_hit(strict: bool) -> None:
    bench = make_bench()
    first = make_blocks(8, seed=1)
    second = make_blocks(8, seed=2, keys=first.keys)
    await asyncio.gather(bench.put(first), bench.put(second))
    assert all(len(readable(bench.twins, key)) == 2 for key in first.keys)
    assert await match(bench, first, strict=strict) == 8


async def test_an_incomplete_version_beside_a_complete_one_does_not_hide_it() -> None:
    bench, blocks = await stored(8)
    forget(bench, range(7), blocks.keys)
    await bench.put(make_blocks(8, seed=2, keys=blocks.keys))
    assert await match(bench, blocks) == 8
    forget(bench, range(4), blocks.keys)
    assert await match(bench, blocks, strict=True) == 0


async def test_records_in_the_wrong_place_do_not_count() -> None:
    bench, blocks = await stored(8)
    records = [(twin.records, twin.slots) for twin in bench.twins]
    for twin, (held, slots) in zip(bench.twins, records[1:] + records[:1], strict=True):
        twin.records, twin.slots = held, slots
    assert await match(bench, blocks) == 0


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("down", [(3,), (3, 9)])
async def test_up_to_two_nodes_down_do_not_matter(down: tuple[int, ...], strict: bool) -> None:
    bench, blocks = await stored(run=2)
    for index in down:
        bench.twins[index].down = "its disk fails"
    assert await match(bench, blocks, strict=strict) == 60
    bench.nodes[down[0]].look_ups = 0
    assert await match(bench, blocks, strict=strict) == 60
    assert bench.nodes[down[0]].look_ups == 0, "known down by now"


async def test_two_nodes_down_and_one_that_lost_the_block_is_a_miss_in_strict_mode() -> None:
    bench, blocks = await stored(8)
    for index in (3, 9):
        bench.twins[index].hanging = True
    forget(bench, [5], [blocks.keys[4]])
    assert await match(bench, blocks, strict=True) == 4


@pytest.mark.parametrize("strict", [False, True])
async def test_three_nodes_known_down_are_a_miss_at_once(strict: bool) -> None:
    bench, blocks = await stored()
    for index in (0, 5, 6):
        bench.twins[index].hanging = True
    assert await match(bench, blocks, strict=strict) == 0
    assert not any(node.look_ups for node in bench.nodes)


async def test_three_nodes_that_turn_out_to_be_down_are_a_miss() -> None:
    bench, blocks = await stored(60, run=1)
    for index in (0, 5, 6):
        bench.twins[index].down = "its disk fails"
    assert await match(bench, blocks) == 0


async def test_nodes_that_turn_out_to_be_down_count_for_runs_that_did_not_ask_them() -> None:
    keys = make_blocks(400, run=1).keys
    rotation = [rotation_of(placement_group(key)) for key in keys]
    # The first block asks nodes 0, 4 and 8, which are well; the second one nodes 1, 5 and 9, which are down.
    chosen = [keys[rotation.index(0)], keys[rotation.index(1)]]
    bench = make_bench()
    blocks = make_blocks(2, keys=chosen)
    await bench.put(blocks)
    for index in (1, 5, 9):
        bench.twins[index].down = "its disk fails"
    assert await match(bench, blocks) == 0


async def test_three_absent_directories_are_a_miss() -> None:
    bench = make_bench(absent=(1, 2, 3))
    assert await match(bench, make_blocks(5)) == 0


@pytest.mark.parametrize("strict", [False, True])
async def test_a_hung_node_costs_the_grace(strict: bool) -> None:
    bench, blocks = await stored(24, run=2)
    gate = bench.nodes[4].look_up_gate = Gate()
    assert await match(bench, blocks, strict=strict) == 24
    assert gate.held >= 1


async def test_what_is_not_certain_by_the_deadline_is_not_promised() -> None:
    clock = FakeClock()
    bench, blocks = await stored(24, run=2, bench=make_bench(clock))
    gates = [Gate() for _ in range(12)]
    for node, gate in zip(bench.nodes, gates, strict=True):
        node.look_up_gate = gate
    running = asyncio.create_task(match(bench, blocks, deadline_ms=500))
    while not all(gate.held for gate in gates):
        await asyncio.sleep(0)
    clock.advance(0.6)
    for gate in gates[1:]:
        gate.release()
    assert await running == 0


async def test_untrusted_records_count() -> None:
    bench, blocks = await stored(8)
    for twin in bench.twins:
        for record in twin.slots.values():
            record.trusted = False
    assert await match(bench, blocks, strict=True) == 8
