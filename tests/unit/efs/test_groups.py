"""One filesystem over several EC groups: every block at its owner, every byte at its place, and what is known of groups
that were added."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import numpy as np
import pytest

from efs.clock import Deadline
from efs.errors import InvalidArgument, NodeUnavailable, StoreClosed
from efs.groups import _together
from efs.limits import HOLLOW_GRACE_MS, MAX_KEYS_PER_CALL
from efs.shape import BlockShape
from efs.types import DropItem, GetReport, NodeInfo, PutReport
from tests.support.blocks import TINY, Blocks, make_blocks
from tests.support.groupbench import RETENTION_SECONDS, GroupBench, make_groups
from tests.support.waiting import came_true

DEADLINE_MS = 20_000
ODD = BlockShape(1_009, (13, 500, 496))
"""Segments that end inside shards, and padding."""


@pytest.fixture(params=[2, 5])
async def bench(request: pytest.FixtureRequest) -> AsyncIterator[GroupBench]:
    made = make_groups(request.param)
    yield made
    await made.filesystem.close()


@pytest.fixture
async def two() -> AsyncIterator[GroupBench]:
    made = make_groups(2)
    yield made
    await made.filesystem.close()


@pytest.fixture
async def one() -> AsyncIterator[GroupBench]:
    made = make_groups(1)
    yield made
    await made.filesystem.close()


async def healthy(bench: GroupBench) -> None:
    assert await came_true(lambda: all(len(group.health.readable()) == 12 for group in bench.filesystem.groups))


async def put(bench: GroupBench, blocks: Blocks) -> PutReport:
    return await bench.filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=DEADLINE_MS)


async def fetch(bench: GroupBench, blocks: Blocks, keys: Sequence[bytes] = ()) -> tuple[GetReport, list[int]]:
    """A fetch whose every delivered block is compared; also the leading counts of its segments, in order."""
    keys = keys or blocks.keys
    place = {key: at for at, key in enumerate(blocks.keys)}
    out = np.full(len(keys) * blocks.shape.block_bytes, 0xEE, np.uint8)
    fired: list[tuple[int, int]] = []
    report = await bench.filesystem.get_into(keys, blocks.shape, out, deadline_ms=DEADLINE_MS,
                                             on_segment=lambda segment, leading: fired.append((segment, leading)))
    start = 0
    for offset, size in zip(blocks.shape.segment_offsets, blocks.shape.segment_bytes, strict=True):
        segment = out[start : start + len(keys) * size].reshape(len(keys), size)
        start += len(keys) * size
        for row, key in enumerate(keys):
            if report.ok[row]:
                assert bytes(segment[row]) == bytes(blocks.data[place[key], offset : offset + size])
    counts = [leading for _, leading in fired]
    assert [segment for segment, _ in fired] == list(range(len(blocks.shape.segment_bytes)))
    assert counts == sorted(counts, reverse=True)
    assert counts[-1] >= report.blocks
    assert report.blocks == next((at for at, ok in enumerate(report.ok) if not ok), len(keys))
    assert report.bytes == sum(report.ok) * blocks.shape.block_bytes
    return report, counts


# -- Groups that were always there -----------------------------------------------------------------------------------


@pytest.mark.parametrize("run", [1, 3, 16])
@pytest.mark.parametrize("shape", [TINY, ODD])
async def test_blocks_are_stored_at_their_owners_and_come_back_whole(
    bench: GroupBench, shape: BlockShape, run: int
) -> None:
    blocks = make_blocks(90, seed=run, shape=shape, run=run)
    assert await put(bench, blocks) == PutReport(90, 0, 0, 0)
    assert [bench.holders(key) for key in blocks.keys] == [[bench.owner(key)] for key in blocks.keys]
    assert len({bench.owner(key) for key in blocks.keys}) > 1
    for strict in (False, True):
        assert await bench.filesystem.match(blocks.keys, strict=strict, deadline_ms=DEADLINE_MS) == 90
    report, counts = await fetch(bench, blocks)
    assert (report.blocks, report.rebuilt, report.missing) == (90, 0, 0)
    assert counts == [90] * len(shape.segment_bytes)
    assert await put(bench, blocks) == PutReport(0, 90, 0, 0)
    assert bench.counters.get("previous_owner_blocks") == 0


async def test_a_hole_ends_the_prefix_whoever_owns_it(bench: GroupBench) -> None:
    blocks = make_blocks(60, seed=3, run=2)
    for hole in (0, 1, 31, 59):
        others = Blocks(blocks.shape, tuple(np.delete(np.array(blocks.keys, object), hole)),
                        np.delete(blocks.data, hole, axis=0))
        assert (await put(bench, others)).failed == 0
        assert await bench.filesystem.drop([blocks.keys[hole]], deadline_ms=DEADLINE_MS) == (hole > 0)
        assert await bench.filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == hole
        report, counts = await fetch(bench, blocks)
        assert (report.blocks, sum(report.ok)) == (hole, 59)
        assert counts == [hole] * 4
        assert (await put(bench, blocks)).acked == 1


async def test_one_placement_group_on_both_sides_of_another_group_lands_in_its_own_places(two: GroupBench) -> None:
    """Of one group these are neighbours in the call, but not in the buffer."""
    source = make_blocks(64, seed=9, run=1)
    mine, other = two.rows(source, 0)[0], two.rows(source, 1)[0]
    ids = np.random.default_rng(1).integers(0, 256, (3, 30), np.uint8)
    keys = [source.keys[mine][:2] + bytes(ids[0]), source.keys[other][:2] + bytes(ids[1]),
            source.keys[mine][:2] + bytes(ids[2])]
    blocks = make_blocks(3, seed=10, keys=keys)
    assert (await put(two, blocks)).acked == 3
    for _ in range(2):
        assert (await fetch(two, blocks))[0].blocks == 3
        two.lose(0, [0, 1])
        two.lose(1, [3])


async def test_a_group_that_is_gone_is_misses_of_its_own_blocks_and_nothing_else(bench: GroupBench) -> None:
    blocks = make_blocks(80, seed=4, run=4)
    assert (await put(bench, blocks)).acked == 80
    bench.lose(1, [2, 5, 7])
    lost = bench.rows(blocks, 1)
    report, _ = await fetch(bench, blocks)
    assert [at for at, ok in enumerate(report.ok) if not ok] == lost
    assert await bench.filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == lost[0]
    more = make_blocks(80, seed=5, run=4)
    stored = await put(bench, more)
    assert (stored.acked, stored.failed) == (80 - len(bench.rows(more, 1)), len(bench.rows(more, 1)))
    assert stored.why is not None
    assert stored.why.startswith("group 1: ")
    assert [info.state for info in await bench.filesystem.nodes()].count("suspect") == 3


async def test_two_nodes_of_every_group_gone_cost_no_hit(bench: GroupBench) -> None:
    blocks = make_blocks(80, seed=6, run=4)
    assert (await put(bench, blocks)).acked == 80
    source = random.Random(6)
    for group in range(len(bench.twins)):
        bench.lose(group, source.sample(range(12), 2))
    report, counts = await fetch(bench, blocks)
    assert (report.blocks, counts) == (80, [80] * 4)
    assert report.rebuilt > 0


async def test_nodes_are_numbered_through_all_groups(bench: GroupBench) -> None:
    blocks = make_blocks(40, seed=7, run=1)
    await put(bench, blocks)
    infos: list[NodeInfo] = await bench.filesystem.nodes()
    assert [info.node_index for info in infos] == list(range(12 * len(bench.twins)))
    assert [info.records for info in infos] == [len(bench.rows(blocks, group))
                                                for group in range(len(bench.twins)) for _ in range(12)]
    found = await bench.filesystem.look_up_all(blocks.keys[0], deadline_ms=DEADLINE_MS)
    assert sorted(report.node_index for report in found) == [12 * bench.owner(blocks.keys[0]) + index
                                                             for index in range(12)]
    evicted = await bench.filesystem.collect(deadline_ms=DEADLINE_MS)
    assert sorted(evicted) == list(range(12 * len(bench.twins)))


async def test_upkeep_and_purge_reach_every_group(bench: GroupBench) -> None:
    blocks = make_blocks(40, seed=8, run=1, tenant_tag=b"acme1234")
    for group in range(len(bench.twins)):
        bench.lose(group, [3])
    stored = await put(bench, blocks)
    assert (stored.acked, stored.at_risk) == (40, 40)
    for twins in bench.twins:
        twins[3].down = None
    await healthy(bench)
    report = await bench.filesystem.upkeep.repair()
    assert (report.found, report.rebuilt, report.failed, report.missing) == (40, 40, 0, ())
    held, silent = await bench.filesystem.tenant_bytes()
    assert (held[b"acme1234"] > 0, silent) == (True, ())
    bench.lose(1, [4])
    assert (await bench.filesystem.upkeep.repair()).missing == (16,)
    bench.twins[1][4].down = None
    await healthy(bench)
    swept = await bench.filesystem.upkeep.sweep(grace_ms=HOLLOW_GRACE_MS)
    assert (swept.hollow, swept.dropped, swept.records) == (0, 0, 40 * 12)
    scrubbed = await bench.filesystem.upkeep.scrub()
    assert (scrubbed.records, scrubbed.unsound, scrubbed.finished) == (40 * 12, 0, True)
    purged = await bench.filesystem.purge([b"acme1234"])
    assert (purged.dropped, purged.missing) == (40 * 12, ())
    assert bench.filesystem.purged == {b"acme1234"}
    assert bench.filesystem.purging == {}
    assert not any(bench.holders(key) for key in blocks.keys)
    assert (await put(bench, blocks)).failed == 40


async def test_a_quota_counts_what_a_tenant_has_in_all_groups(two: GroupBench) -> None:
    first, second = (make_blocks(30, seed=seed, run=1, tenant_tag=b"acme1234") for seed in (11, 12))
    assert (await put(two, first)).acked == 30
    held, _ = await two.filesystem.tenant_bytes()
    two.filesystem.quotas.limit({b"acme1234": held[b"acme1234"]})
    refused = await put(two, second)
    assert (refused.acked, refused.failed) == (0, 30)
    assert "quota" in str(refused.why)


async def test_an_exception_in_on_segment_ends_the_call_and_nothing_is_written_afterwards(bench: GroupBench) -> None:
    blocks = make_blocks(60, seed=13, run=2)
    await put(bench, blocks)
    for twins in bench.twins:
        for twin in twins:
            twin.warm = False

    def refuse(segment: int, leading: int) -> None:
        raise RuntimeError(f"segment {segment}")

    out = np.zeros(60 * TINY.block_bytes, np.uint8)
    with pytest.raises(RuntimeError, match="segment 0"):
        await bench.filesystem.get_into(blocks.keys, TINY, out, on_segment=refuse, deadline_ms=DEADLINE_MS)
    out[:] = 7
    for _ in range(20):
        await asyncio.sleep(0)
    assert (out == 7).all()
    assert (await fetch(bench, blocks))[0].blocks == 60


async def test_a_cancelled_fetch_leaves_nothing_running(bench: GroupBench) -> None:
    blocks = make_blocks(60, seed=14, run=2)
    await put(bench, blocks)
    for twins in bench.twins:
        for twin in twins:
            twin.warm = False
    out = np.zeros(60 * TINY.block_bytes, np.uint8)
    before = asyncio.all_tasks()
    for turns in range(12):
        call = asyncio.ensure_future(
            bench.filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS))
        for _ in range(turns):
            await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait((call,))
        out[:] = 9
        for _ in range(5):
            await asyncio.sleep(0)
        assert (out == 9).all()
        assert asyncio.all_tasks() == before


async def test_arguments_are_checked_as_with_one_group(bench: GroupBench) -> None:
    filesystem = bench.filesystem
    with pytest.raises(InvalidArgument, match="key 0 has 5 bytes, must have 32"):
        await filesystem.match([bytes(5)], deadline_ms=DEADLINE_MS)
    with pytest.raises(InvalidArgument, match="keys in one call"):
        await filesystem.drop([bytes(32)] * (MAX_KEYS_PER_CALL + 1), deadline_ms=DEADLINE_MS)
    with pytest.raises(InvalidArgument, match="out has 3 bytes"):
        await filesystem.get_into([bytes(32)], TINY, bytearray(3), deadline_ms=DEADLINE_MS)
    with pytest.raises(InvalidArgument, match="deadline_ms"):
        await filesystem.match([bytes(32)], deadline_ms=0)
    assert await filesystem.match([], deadline_ms=DEADLINE_MS) == 0
    assert await filesystem.drop([], deadline_ms=DEADLINE_MS) == 0
    assert (await filesystem.get_into([], TINY, bytearray(), deadline_ms=DEADLINE_MS)).blocks == 0
    assert await filesystem.put([], TINY, b"", deadline_ms=DEADLINE_MS) == PutReport(0, 0, 0, 0)
    await filesystem.close()
    with pytest.raises(StoreClosed):
        await filesystem.match([bytes(32)], deadline_ms=DEADLINE_MS)


# -- Groups that are added -------------------------------------------------------------------------------------------


async def test_moved_blocks_are_hits_at_their_previous_owner_and_at_the_new_one_once_put_again(one: GroupBench) -> None:
    blocks = make_blocks(96, seed=20, run=4)
    assert (await put(one, blocks)).acked == 96
    one.add_group()
    moved = one.rows(blocks, 1)
    assert 0 < len(moved) < 96
    for strict in (False, True):
        assert await one.filesystem.match(blocks.keys, strict=strict, deadline_ms=DEADLINE_MS) == 96
    report, counts = await fetch(one, blocks)
    assert (report.blocks, counts) == (96, [96] * 4)
    assert one.counters.get("previous_owner_blocks") == len(moved)
    assert [one.holders(key) for key in blocks.keys] == [[0]] * 96

    stored = await put(one, blocks)
    assert (stored.acked, stored.already, stored.failed) == (len(moved), 96 - len(moved), 0)
    assert all(one.holders(blocks.keys[at]) == [0, 1] for at in moved)
    one.lose(1, range(12))
    assert (await fetch(one, blocks))[0].blocks == 96, "with the new group lost the previous owner still has it all"
    one.lose(0, range(12))
    for twin in one.twins[1]:
        twin.down = None
    assert await came_true(lambda: len(one.filesystem.groups[1].health.readable()) == 12)
    report, _ = await fetch(one, blocks)
    assert [at for at, ok in enumerate(report.ok) if ok] == moved, "and these now come from the new owner"


async def test_after_the_retention_time_the_previous_owner_is_not_asked(one: GroupBench) -> None:
    blocks = make_blocks(96, seed=21, run=4)
    await put(one, blocks)
    one.add_group()
    moved = one.rows(blocks, 1)
    one.clock.ahead = RETENTION_SECONDS - 60
    assert (await fetch(one, blocks))[0].blocks == 96
    one.clock.ahead = RETENTION_SECONDS + 60
    report, _ = await fetch(one, blocks)
    assert [at for at, ok in enumerate(report.ok) if not ok] == moved
    assert await one.filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == moved[0]
    assert one.counters.get("previous_owner_blocks") == len(moved)
    assert (await put(one, blocks)).acked == len(moved)
    assert (await fetch(one, blocks))[0].blocks == 96


async def test_two_groups_added_one_after_the_other_lose_no_hit(one: GroupBench) -> None:
    stored: list[Blocks] = []
    for seed in range(22, 25):
        stored.append(make_blocks(64, seed=seed, run=2))
        assert (await put(one, stored[-1])).acked == 64
        for blocks in stored:
            assert await one.filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS) == 64
            assert (await fetch(one, blocks))[0].blocks == 64
        one.add_group()
    for blocks in stored:
        assert (await fetch(one, blocks))[0].blocks == 64
        assert {one.owner(key) for key in blocks.keys} == {0, 1, 2, 3}
        await put(one, blocks)
        assert all(one.owner(key) in one.holders(key) for key in blocks.keys)


async def test_a_dropped_block_does_not_come_back_from_its_previous_owner(one: GroupBench) -> None:
    blocks = make_blocks(48, seed=26, run=4)
    await put(one, blocks)
    one.add_group()
    await put(one, blocks)
    moved = one.rows(blocks, 1)
    assert all(one.holders(blocks.keys[at]) == [0, 1] for at in moved)
    assert await one.filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS) == 48
    assert not any(one.holders(key) for key in blocks.keys)
    assert await one.filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == 0


@pytest.mark.parametrize("refusing", [False, True])
async def test_a_block_that_one_of_its_owners_still_has_does_not_count_as_dropped(
    one: GroupBench, monkeypatch: pytest.MonkeyPatch, refusing: bool
) -> None:
    async def fails(items: Sequence[DropItem], deadline: Deadline) -> int:
        raise InvalidArgument("DROP is for operators") if refusing else NodeUnavailable(0, "its disk fails")

    blocks = make_blocks(48, seed=26, run=4)
    await put(one, blocks)
    one.add_group()
    await put(one, blocks)
    for twin in one.twins[1]:
        monkeypatch.setattr(twin, "drop", fails)
    if refusing:
        with pytest.raises(InvalidArgument, match="for operators"):
            await one.filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS)
        return
    theirs = one.rows(blocks, 1)
    assert await one.filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS) == 48 - len(theirs)
    assert [at for at, key in enumerate(blocks.keys) if one.holders(key)] == theirs


async def test_another_version_at_the_new_owner_is_never_mixed_with_the_old_one(one: GroupBench) -> None:
    old = make_blocks(64, seed=27, run=4)
    await put(one, old)
    one.add_group()
    moved = one.rows(old, 1)
    new = make_blocks(64, seed=28, keys=old.keys)
    assert (await put(one, new)).acked == len(moved)
    # What did not move keeps its first version, the rest has the new one at its owner.
    mixed = Blocks(old.shape, old.keys, old.data.copy())
    mixed.data[moved] = new.data[moved]
    assert (await fetch(one, mixed))[0].blocks == 64


async def test_a_hole_behind_moved_blocks_ends_the_match(one: GroupBench) -> None:
    blocks = make_blocks(64, seed=29, run=2)
    await put(one, blocks)
    one.add_group()
    for hole in (one.rows(blocks, 1)[3], one.rows(blocks, 0)[5]):
        await one.filesystem.drop([blocks.keys[hole]], deadline_ms=DEADLINE_MS)
        for strict in (False, True):
            assert await one.filesystem.match(blocks.keys, strict=strict, deadline_ms=DEADLINE_MS) == hole
        assert (await fetch(one, blocks))[0].blocks == hole
        await put(one, blocks)


@pytest.mark.parametrize("move", [False, True])
async def test_a_course_of_puts_drops_losses_and_added_groups_against_a_dictionary(move: bool) -> None:
    one, seed = make_groups(1, move=move), 31
    print(f"seed {seed}")
    source = random.Random(seed)
    known: dict[bytes, int] = {}
    pool = make_blocks(120, seed=seed, run=3)
    hits, lost = 0, list[int]()
    for step in range(60):
        start = source.randrange(110)
        rows = list(range(start, min(120, start + source.randint(1, 40))))
        some = Blocks(pool.shape, tuple(pool.keys[row] for row in rows), pool.data[rows])
        action = source.randrange(6)
        if action < 2:
            assert (await put(one, some)).failed == 0
            known.update(dict.fromkeys(some.keys, step))
        elif action == 2 and source.random() < 0.4:
            await one.filesystem.drop(some.keys, deadline_ms=DEADLINE_MS)
            for key in some.keys:
                known.pop(key, None)
        elif action == 3 and len(one.twins) < 5 and step > 8:
            one.add_group()
        elif action == 4 and len(lost) < len(one.twins):
            one.lose(len(lost), [source.randrange(12)])
            lost.append(step)
        report, _ = await fetch(one, some)
        expected = [key in known for key in some.keys]
        assert list(report.ok) == expected
        leading = expected.index(False) if False in expected else len(expected)
        assert await one.filesystem.match(some.keys, deadline_ms=DEADLINE_MS) == leading
        hits += sum(report.ok)
    assert hits > 100
    assert len(one.twins) > 2
    assert lost
    assert one.counters.get("previous_owner_blocks") > 10
    assert (one.counters.get("move_done") > 0) == move
    await one.filesystem.close()


# -- Calls to several groups ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cancels", [1, 2])
async def test_a_cancellation_that_comes_while_other_calls_end_is_heeded_when_they_have(cancels: int) -> None:
    ending, gate, ended = asyncio.Event(), asyncio.Event(), list[bool]()

    async def fails() -> None:
        raise InvalidArgument("not this one")

    async def ends_slowly() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ending.set()
            await gate.wait()
            ended.append(True)

    task = asyncio.create_task(_together([fails(), ends_slowly()]))
    await ending.wait()
    for _ in range(cancels):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    gate.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


# -- Draining ---------------------------------------------------------------------------------------------------------


async def test_a_drained_node_answers_reads_and_gets_nothing_new(two: GroupBench) -> None:
    before, after = make_blocks(60, seed=40, run=2), make_blocks(60, seed=41, run=2)
    assert (await put(two, before)).at_risk == 0
    held = [len(twin.records) for twins in two.twins for twin in twins]
    two.filesystem.drain([3, 12 + 7])
    assert [info.state for info in await two.filesystem.nodes()].count("read-only") == 2
    report = await put(two, after)
    assert (report.acked, report.at_risk) == (60, 60)
    assert await two.filesystem.upkeep.repair() is not None
    for number, twin in enumerate(twin for twins in two.twins for twin in twins):
        assert (len(twin.records) == held[number]) == (number in (3, 19))
    two.lose(0, [0, 1])
    assert (await fetch(two, before))[0].blocks == 60, "the drained node is one of the ten of group 0"
    for index in (0, 1):
        two.twins[0][index].down = None
    await healthy(two)
    two.filesystem.drain([])
    repaired = await two.filesystem.upkeep.repair()
    assert (repaired.rebuilt, repaired.failed) == (60, 0)
    assert (await put(two, make_blocks(60, seed=42, run=2))).at_risk == 0
