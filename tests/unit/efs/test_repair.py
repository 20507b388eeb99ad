"""Repair: what it gives back, what it leaves alone, and that it never fights eviction (faults 11, 12, 29, 34)."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Collection, Mapping

import numpy as np
import pytest

from efs.clock import Deadline
from efs.codec import Codec
from efs.contract import TOO_COLD, PutBatch, PutOutcome
from efs.errors import InvalidArgument, NodeReadOnly, NodeUnavailable
from efs.limits import REPAIR_GRACE_MS, STRIPE_SHARDS, YIELD_MS
from efs.pace import Pace, Traffic
from efs.placement import placement_group, rotation_of
from efs.repair import Repair, best_of
from efs.shape import BlockShape
from efs.types import DropItem
from tests.support.bench import Bench, assert_readable, make_bench
from tests.support.blocks import TINY, Blocks, make_blocks, readable, sound_versions
from tests.support.clock import FakeClock
from tests.support.gatednode import Gate
from tests.support.memorynode import MemoryNode, Stored

Image = dict[tuple[bytes, bytes], tuple[bytes, bytes, int]]
ALL = range(STRIPE_SHARDS)


def repair_of(bench: Bench, *, grace_ms: int = 0, traffic: Traffic | None = None) -> Repair:
    nodes = [bench.health._nodes[index] for index in ALL]
    return Repair(nodes, bench.health, Codec(), bench.counters, bench.clock, Pace(traffic or Traffic(), None),
                  grace_ms=grace_ms)


def image_of(twin: MemoryNode) -> Image:
    """Header, payload and slot size of every record of a node."""
    return {(key, digest): (stored.raw_header, bytes(stored.payload), stored.slot_bytes)
            for key, versions in twin.records.items() for digest, stored in versions.items()}


def record_of(bench: Bench, key: bytes, node: int) -> Stored:
    (stored,) = bench.twins[node].records[key].values()
    return stored


async def lose(bench: Bench, nodes: Collection[int], keys: Collection[bytes]) -> None:
    """Records vanish, in order."""
    for index in nodes:
        twin = bench.twins[index]
        items = [DropItem(key, digest, stored.generation) for key in keys
                 for digest, stored in twin.records.get(key, {}).items()]
        assert await twin.drop(items, Deadline.after_ms(bench.clock, 10_000)) == len(items)


async def filled(count: int = 40, *, shape: BlockShape = TINY, seed: int = 1) -> tuple[Bench, Blocks]:
    bench = make_bench()
    blocks = make_blocks(count, seed=seed, shape=shape)
    assert (await bench.put(blocks)).acked == count
    return bench, blocks


# -- What is left ----------------------------------------------------------------------------------------------------


async def test_what_a_node_lacks_that_takes_nothing_new_is_counted() -> None:
    bench, blocks = await filled()
    await lose(bench, (3,), blocks.keys)
    bench.health.note_failure(3, NodeReadOnly(3, "its disk failed"))
    report = await repair_of(bench).run()
    assert (report.found, report.rebuilt, report.unplaced, report.missing) == (0, 0, 40, ())


async def test_a_repair_that_is_stopped_says_where_to_go_on_however_short_its_pages(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efs.repair.SWEEP_PAGE_RECORDS", 1)
    bench, blocks = await filled()
    report = await repair_of(bench).run(max_seconds=0)
    assert report.resume == min(blocks.keys).hex()


# -- What comes back -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TINY, BlockShape(997, (500, 497)), BlockShape(1, (1,))],
                         ids=lambda shape: str(shape.block_bytes))
async def test_two_empty_nodes_are_filled_byte_for_byte(shape: BlockShape) -> None:
    """Fault 29. Every pair of roles meets: the runs have different rotations."""
    bench, blocks = await filled(shape=shape)
    before = {index: image_of(twin) for index, twin in enumerate(bench.twins)}
    await lose(bench, (3, 8), blocks.keys)
    assert not bench.twins[3].records
    report = await repair_of(bench).run()
    assert (report.found, report.rebuilt, report.failed, report.resume) == (40, 80, 0, None)
    assert {index: image_of(twin) for index, twin in enumerate(bench.twins)} == before
    assert bench.counts("repair_found", "repair_rebuilt") == (40, 80)
    again = await repair_of(bench).run()
    assert (again.found, again.rebuilt) == (0, 0), "a second run is a no-op"


async def test_every_pair_of_lost_shards_is_rebuilt() -> None:
    bench, blocks = await filled(66)
    before = {index: image_of(twin) for index, twin in enumerate(bench.twins)}
    for key, pair in zip(blocks.keys, itertools.combinations(ALL, 2), strict=True):
        await lose(bench, pair, [key])
    report = await repair_of(bench).run()
    assert (report.found, report.rebuilt) == (66, 132)
    assert {index: image_of(twin) for index, twin in enumerate(bench.twins)} == before


async def test_a_node_that_is_not_warm_is_read_all_the_same() -> None:
    bench, blocks = await filled()
    await lose(bench, (0,), blocks.keys)
    for twin in bench.twins:
        twin.warm = False
    assert (await repair_of(bench).run()).rebuilt == 40
    assert_readable(bench, blocks)


async def test_a_stripe_of_nine_is_left_to_the_sweep() -> None:
    bench, blocks = await filled(2)
    await lose(bench, (0, 1, 2), blocks.keys[:1])
    await lose(bench, (0, 1), blocks.keys[1:])
    report = await repair_of(bench).run()
    assert (report.found, report.rebuilt) == (1, 2)
    assert bench.records(blocks.keys[0]) == 9
    assert bench.records(blocks.keys[1]) == 12


async def test_a_repaired_record_has_the_stamp_of_its_sources() -> None:
    bench, blocks = await filled(4)
    for row, key in enumerate(blocks.keys):
        for twin in bench.twins:
            record_of(bench, key, twin.node_index).stamp = 1_000 * (row % 2 + 1) + twin.node_index
    await lose(bench, (11, 5), blocks.keys)
    assert (await repair_of(bench).run()).rebuilt == 8
    for row, key in enumerate(blocks.keys):
        assert record_of(bench, key, 5).stamp == record_of(bench, key, 11).stamp == 1_000 * (row % 2 + 1) + 10


# -- Corruption ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shard", "lost"), [(0, 1), (4, 5), (9, 3), (10, 2)])
async def test_a_corrupt_source_is_found_dropped_and_rebuilt_too(shard: int, lost: int) -> None:
    """Fault 11: a flipped payload bit in a source does not get into what is rebuilt."""
    bench, blocks = await filled(5)
    before = {index: image_of(twin) for index, twin in enumerate(bench.twins)}
    key = blocks.keys[2]
    rotation = rotation_of(placement_group(key))
    await lose(bench, ((lost + rotation) % STRIPE_SHARDS,), [key])
    record_of(bench, key, (shard + rotation) % STRIPE_SHARDS).payload[3] ^= 4
    report = await repair_of(bench).run()
    assert (report.corrupt, report.rebuilt) == (1, 2)
    assert {index: image_of(twin) for index, twin in enumerate(bench.twins)} == before


async def test_three_corrupt_sources_leave_too_few_and_nothing_is_written() -> None:
    bench, blocks = await filled(3)
    key = blocks.keys[1]
    await lose(bench, (0,), blocks.keys)
    for node in (1, 2):
        record_of(bench, key, node).payload[0] ^= 1
    report = await repair_of(bench).run()
    assert report.rebuilt == 2
    assert report.corrupt == 2
    assert [name for name, _ in report.hopeless] == [key]
    assert key not in bench.twins[0].records
    assert bench.records(key) == 9, "the nodes dropped what was damaged"


async def test_a_record_in_a_wrong_place_makes_room_for_the_right_one() -> None:
    """Fault 12: two nodes' records of a key swapped."""
    bench, blocks = await filled(3)
    before = {index: image_of(twin) for index, twin in enumerate(bench.twins)}
    key = blocks.keys[0]
    one, other = record_of(bench, key, 4), record_of(bench, key, 7)
    one.header, other.header = other.header, one.header
    one.raw_header, other.raw_header = other.raw_header, one.raw_header
    one.payload, other.payload = other.payload, one.payload
    report = await repair_of(bench).run()
    assert (report.misplaced, report.found, report.rebuilt) == (2, 1, 2)
    assert {index: image_of(twin) for index, twin in enumerate(bench.twins)} == before


async def test_sound_shards_that_make_no_sound_block_are_not_repaired() -> None:
    """Fault 19. A header that lies about a segment: nothing is built on it."""
    bench, blocks = await filled(2)
    key = blocks.keys[0]
    good = {shard: bytes(stored.payload) for shard, stored in sound_versions(bench.twins, key).popitem()[1].items()}
    await lose(bench, (2,), blocks.keys)

    class LyingCodec(Codec):
        def rebuild(self, present: Mapping[int, np.ndarray], wanted: Mapping[int, np.ndarray]) -> None:
            super().rebuild(present, wanted)
            for values in wanted.values():
                values[:, 0] ^= 1

    nodes = [bench.health._nodes[index] for index in ALL]
    lying = Repair(nodes, bench.health, LyingCodec(), bench.counters, bench.clock, Pace(Traffic(), None))
    report = await lying.run()
    data_lost = [(2 - rotation_of(placement_group(key))) % STRIPE_SHARDS < 10 for key in blocks.keys]
    assert any(data_lost), "with only parity lost the lie would not show: choose another seed"
    assert len(report.inconsistent) == sum(data_lost)
    for key, lost in zip(blocks.keys, data_lost, strict=True):
        assert (key in bench.twins[2].records) is not lost
    assert len(good) == 12


# -- Eviction --------------------------------------------------------------------------------------------------------


async def test_repair_does_not_fight_eviction() -> None:
    """Fault 34: a node that gave records up as cold is asked with their old stamp, refuses, and the stripe dies."""
    bench, blocks = await filled(6)
    await lose(bench, (4,), blocks.keys)
    asked: list[tuple[bool, int]] = []

    async def refuse(batch: PutBatch, deadline: Deadline) -> PutOutcome:
        asked.append((batch.repair, batch.stamp))
        return PutOutcome(np.zeros(len(batch.keys), np.bool_), TOO_COLD)

    for key in blocks.keys:
        for node in ALL:
            if node != 4:
                record_of(bench, key, node).stamp = 77
    bench.twins[4].put = refuse  # type: ignore[method-assign]
    report = await repair_of(bench).run()
    assert asked
    assert set(asked) == {(True, 77)}
    assert (report.found, report.rebuilt, report.cold, report.failed) == (6, 0, 6, 0)
    assert not bench.twins[4].records


# -- Versions --------------------------------------------------------------------------------------------------------


def test_the_best_version_has_most_shards_then_the_smallest_digest() -> None:
    def version(nodes: int) -> dict[int, object]:
        return dict.fromkeys(range(nodes))

    assert best_of({}) is None
    assert best_of({b"a": version(9)}) is None
    assert best_of({b"a": version(10), b"b": version(11)}) == b"b"
    assert best_of({b"b": version(10), b"a": version(10)}) == b"a"


async def test_of_two_versions_only_the_better_one_is_completed_and_none_is_mixed() -> None:
    """Fault 39."""
    bench, first = await filled(1)
    second = make_blocks(1, seed=2, keys=first.keys)
    key = first.keys[0]
    other = make_bench()
    await other.put(second)
    for index in range(2, 12):
        bench.twins[index].records[key].update(other.twins[index].records[key])
        (copy,) = other.twins[index].records[key].values()
        copy.location = 5 << 20 | 1
        bench.twins[index].slots[copy.location] = copy
    await lose(bench, (0,), first.keys)
    report = await repair_of(bench).run()
    assert (report.found, report.rebuilt) == (1, 1)
    blocks = set(readable(bench.twins, key).values())
    assert blocks == {first.block(0), second.block(0)}
    assert sorted(len(shards) for shards in sound_versions(bench.twins, key).values()) == [10, 12]


# -- Course ----------------------------------------------------------------------------------------------------------


async def test_a_young_version_is_left_to_its_put() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    blocks = make_blocks(3)
    await bench.put(blocks)
    await lose(bench, (0,), blocks.keys)
    report = await repair_of(bench, grace_ms=REPAIR_GRACE_MS).run()
    assert (report.found, report.young) == (0, 3)
    clock.advance(REPAIR_GRACE_MS / 1000 + 1)
    assert (await repair_of(bench, grace_ms=REPAIR_GRACE_MS).run()).rebuilt == 3


async def test_a_repair_goes_on_where_it_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.repair.SWEEP_PAGE_RECORDS", 8)
    bench, blocks = await filled()
    await lose(bench, (6,), blocks.keys)
    runs, rebuilt, after = 0, 0, None
    while runs < 100:
        report = await repair_of(bench).run(after=after, max_seconds=1e-9)
        runs, rebuilt = runs + 1, rebuilt + report.rebuilt
        if report.resume is None:
            break
        after = bytes.fromhex(report.resume)
    assert runs > 3
    assert rebuilt == 40
    assert_readable(bench, blocks)
    with pytest.raises(InvalidArgument, match="a key has 3 bytes"):
        await repair_of(bench).run(after=b"abc")


async def test_named_keys_only() -> None:
    bench, blocks = await filled(10)
    await lose(bench, (6,), blocks.keys)
    report = await repair_of(bench).run_keys(blocks.keys[:4])
    assert (report.found, report.rebuilt) == (4, 4)
    assert len(bench.twins[6].records) == 4


@pytest.mark.parametrize("gone", [1, 2])
async def test_with_nodes_gone_the_others_are_repaired_and_nothing_is_made_up(gone: int) -> None:
    """Fault 25."""
    bench, blocks = await filled(12)
    source = random.Random(gone)
    lost = source.sample(ALL, 2)
    away = lost[:gone]
    await lose(bench, lost, blocks.keys)
    for index in away:
        bench.twins[index].down = "its disk is gone"
    report = await repair_of(bench).run()
    assert report.missing == tuple(sorted(away))
    assert report.rebuilt == 12 * (2 - gone)
    assert report.failed == 0


async def test_a_node_that_dies_in_the_middle_of_a_put_is_counted() -> None:
    bench, blocks = await filled(5)
    await lose(bench, (9,), blocks.keys)

    async def die(batch: PutBatch, deadline: Deadline) -> PutOutcome:
        raise NodeUnavailable(9, "its disk is gone")

    bench.twins[9].put = die  # type: ignore[method-assign]
    report = await repair_of(bench).run()
    assert (report.found, report.rebuilt, report.failed) == (5, 0, 5)


async def test_a_repair_gives_way_to_calls_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, blocks = await filled(4)
    await lose(bench, (1,), blocks.keys)
    traffic = Traffic()
    with traffic.call():
        repair = asyncio.create_task(repair_of(bench, traffic=traffic).run())
        await asyncio.sleep(3 * YIELD_MS / 1000)
        assert not repair.done()
        assert not bench.twins[1].records
    assert (await repair).rebuilt == 4
    await lose(bench, (1,), blocks.keys)
    monkeypatch.setattr("efs.pace.YIELD_AT_MOST_MS", YIELD_MS)
    with traffic.call():
        assert (await repair_of(bench, traffic=traffic).run()).rebuilt == 4


async def test_puts_beside_a_repair_keep_one_version_whole() -> None:
    """Fault 38: the blocks that are being repaired are put again at the same time."""
    bench, blocks = await filled(24)
    before = {index: image_of(twin) for index, twin in enumerate(bench.twins)}
    await lose(bench, (2, 10), blocks.keys)
    gate = Gate()
    for index in (2, 10):
        bench.nodes[index].put_gate = gate
    put = asyncio.create_task(bench.put(blocks))
    while gate.held < 2:
        await asyncio.sleep(0)
    repair = Repair(bench.twins, bench.health, Codec(), bench.counters, bench.clock, Pace(Traffic(), None))
    assert (await repair.run()).rebuilt == 48, "on the nodes that the put has not reached yet"
    gate.release()
    report = await put
    assert (report.acked + report.already, report.failed) == (24, 0)
    assert {index: image_of(twin) for index, twin in enumerate(bench.twins)} == before
