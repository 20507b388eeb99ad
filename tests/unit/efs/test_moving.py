"""What fetches find at an earlier owner comes to the present one: all of it, bounded, and never a wrong byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

import efs.moving
import efs.pace
from efs.clock import Deadline
from efs.contract import NodeTable
from efs.fs import FileSystem
from efs.limits import MOVE_BATCH_BLOCKS, MOVE_BATCH_BYTES, MOVE_QUEUE_BLOCKS
from efs.shape import BlockShape
from efs.types import PutItem
from tests.support.blocks import TINY, Blocks, make_blocks, sound_versions
from tests.support.groupbench import RETENTION_SECONDS, GroupBench, make_groups
from tests.support.memorynode import MemoryNode
from tests.support.waiting import came_true
from tests.unit.efs.test_groups import DEADLINE_MS, ODD, fetch, put

MOVES = ("move_queued", "move_dropped", "move_done", "move_failed")


@pytest.fixture
async def bench() -> AsyncIterator[GroupBench]:
    made = make_groups(1, move=True)
    yield made
    await made.filesystem.close()


def counts(bench: GroupBench) -> tuple[int, ...]:
    return tuple(bench.counters.get(name) for name in MOVES)


async def settled(bench: GroupBench) -> tuple[int, ...]:
    """The counts of moves, once all that waited has been worked off."""

    def over() -> bool:
        queued, _, done, failed = counts(bench)
        return queued == done + failed

    assert await came_true(over)
    return counts(bench)


async def grown(bench: GroupBench, blocks: Blocks, capacity_records: int | None = None) -> list[int]:
    """Blocks that were stored before a group was added; the rows of those that it owns."""
    stored = await put(bench, blocks)
    assert stored.acked + stored.already == len(blocks.keys)
    bench.add_group(capacity_records)
    moved = bench.rows(blocks, len(bench.twins) - 1)
    assert 0 < len(moved) < len(blocks.keys)
    return moved


def spy(monkeypatch: pytest.MonkeyPatch, group: FileSystem,
        before: Callable[[], Any] | None = None) -> list[list[bytes]]:
    """The keys of each read for a move from a group; `before` is awaited in front of it."""
    read, asked = group.read_items, list[list[bytes]]()

    async def watched(keys: Sequence[bytes], shape: BlockShape, out: NDArray[np.uint8], *,
                      deadline_ms: float) -> dict[int, PutItem]:
        asked.append(list(keys))
        if before is not None:
            await before()
        return await read(keys, shape, out, deadline_ms=deadline_ms)

    monkeypatch.setattr(group, "read_items", watched)
    return asked


# -- What is read comes to its owner ----------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [TINY, ODD])
@pytest.mark.parametrize("move", [True, False])
async def test_blocks_that_are_only_read_outlive_the_retention_time_if_they_are_moved(
    shape: BlockShape, move: bool
) -> None:
    bench = make_groups(1, move=move)
    blocks = make_blocks(120, seed=1, shape=shape, run=8, tenant_tag=b"acme1234")
    moved = await grown(bench, blocks)
    assert (await fetch(bench, blocks))[0].blocks == 120
    assert bench.counters.get("previous_owner_blocks") == len(moved)
    assert await settled(bench) == ((len(moved), 0, len(moved), 0) if move else (0, 0, 0, 0))
    bench.clock.ahead = RETENTION_SECONDS + 60
    report, counted = await fetch(bench, blocks)
    assert [at for at, ok in enumerate(report.ok) if not ok] == ([] if move else moved)
    assert bench.counters.get("previous_owner_blocks") == len(moved), "the previous owner was not asked again"
    assert bench.counters.get("get_blocks") == 2 * 120 - (0 if move else len(moved)), "moves are no hits"
    if move:
        assert (report.rebuilt, counted) == (0, [120] * len(shape.segment_bytes))
        assert await bench.filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS) == 120
        for at in moved:
            # Depth and tenant tag too: the records are the same, byte for byte.
            here, there = (sound_versions(bench.twins[group], blocks.keys[at]) for group in (1, 0))
            assert {digest: {shard: (one.raw_header, bytes(one.payload)) for shard, one in shards.items()}
                    for digest, shards in here.items()} == {
                digest: {shard: (one.raw_header, bytes(one.payload)) for shard, one in shards.items()}
                for digest, shards in there.items()}
            assert [len(shards) for shards in here.values()] == [12]
    await bench.filesystem.close()


async def test_groups_that_came_one_after_the_other_get_what_is_theirs(bench: GroupBench) -> None:
    stored = []
    for seed in range(2, 5):
        stored.append(make_blocks(64, seed=seed, run=4))
        await grown(bench, stored[-1])
    for blocks in stored:
        assert (await fetch(bench, blocks))[0].blocks == 64
    queued, dropped, done, failed = await settled(bench)
    assert (queued, dropped, failed) == (done, 0, 0)
    assert queued == bench.counters.get("previous_owner_blocks")
    for blocks in stored:
        assert all(bench.owner(key) in bench.holders(key) for key in blocks.keys)
    bench.clock.ahead = RETENTION_SECONDS + 60
    for blocks in stored:
        assert (await fetch(bench, blocks))[0].blocks == 64


async def test_what_another_client_has_moved_or_put_is_not_read_again(
    bench: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(96, seed=5, run=4)
    moved = await grown(bench, blocks)
    asked = spy(monkeypatch, bench.filesystem.groups[0])
    with bench.filesystem._traffic.call():
        assert (await fetch(bench, blocks))[0].blocks == 96
        assert (await put(bench, blocks)).acked == len(moved)
    assert await settled(bench) == (len(moved), 0, len(moved), 0)
    assert asked == []


async def test_only_what_was_delivered_is_moved_and_once(bench: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks(96, seed=6, run=4)
    moved = await grown(bench, blocks)
    lost = moved[:3]
    for at in lost:
        for twin in bench.twins[0][:3]:
            twin._forget(next(iter(twin.records[blocks.keys[at]].values())))
    asked = spy(monkeypatch, bench.filesystem.groups[0])
    assert await bench.filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) >= 0
    assert counts(bench) == (0, 0, 0, 0), "a match moves nothing"
    reports = await asyncio.gather(*(fetch(bench, blocks) for _ in range(4)))
    assert [[at for at, ok in enumerate(report.ok) if not ok] for report, _ in reports] == [lost] * 4
    assert await settled(bench) == (len(moved) - 3, 0, len(moved) - 3, 0)
    assert sorted(key for keys in asked for key in keys) == sorted(blocks.keys[at] for at in moved[3:])
    assert (await fetch(bench, blocks))[0].missing == 0
    assert len([key for keys in asked for key in keys]) == len(moved) - 3


async def test_the_callers_buffer_is_not_looked_at_after_the_return(bench: GroupBench) -> None:
    blocks = make_blocks(96, seed=7, run=4)
    moved = await grown(bench, blocks)
    out = np.zeros(96 * TINY.block_bytes, np.uint8)
    report = await bench.filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS)
    out[:] = 0xEE
    assert report.blocks == 96
    assert await settled(bench) == (len(moved), 0, len(moved), 0)
    bench.lose(0, range(12))
    report, _ = await fetch(bench, blocks)
    assert [at for at, ok in enumerate(report.ok) if ok] == moved


async def test_a_dropped_block_is_not_brought_back(bench: GroupBench) -> None:
    blocks = make_blocks(24, seed=8, run=4)
    moved = await grown(bench, blocks)
    mover, stages = bench.filesystem._mover, set()
    for turns in range(0, 60, 4):
        assert (await fetch(bench, blocks))[0].blocks == 24
        for _ in range(turns):
            await asyncio.sleep(0)
        stages.add((bool(mover._under_way), bench.holders(blocks.keys[moved[0]]) == [0, 1]))
        assert await bench.filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS) == 24
        await settled(bench)
        assert not any(bench.holders(key) for key in blocks.keys)
        mover._resting.clear()
        # Where they were before the group was added.
        again = await bench.filesystem.groups[0].put(blocks.items, TINY, blocks.data, deadline_ms=DEADLINE_MS)
        assert again.acked == 24
    assert stages >= {(False, False), (True, False)}, "before it was moved, and while it was"


async def test_a_move_that_hangs_leaves_a_drop_its_time(bench: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks(24, seed=8, run=4)
    moved = await grown(bench, blocks)
    gate = asyncio.Event()
    asked = spy(monkeypatch, bench.filesystem.groups[0], gate.wait)
    assert (await fetch(bench, blocks))[0].blocks == 24
    assert await came_true(lambda: bool(asked))
    assert await bench.filesystem.drop(blocks.keys, deadline_ms=2_000) == 24
    assert not any(bench.holders(key) for key in blocks.keys)
    gate.set()
    assert await settled(bench) == (len(moved), 0, 0, len(moved))


# -- Bounds -----------------------------------------------------------------------------------------------------------


async def test_what_is_in_flight_and_what_waits_is_bounded_and_no_fetch_waits_for_it(
    bench: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(160, seed=9, run=4)
    moved = await grown(bench, blocks)
    room, batch = len(moved) // 2, 7
    monkeypatch.setattr(efs.moving, "MOVE_QUEUE_BLOCKS", room)
    monkeypatch.setattr(efs.moving, "MOVE_BATCH_BYTES", batch * TINY.block_bytes + 1)
    gate, running = asyncio.Event(), list[int]()

    async def held() -> None:
        running.append(1)
        await gate.wait()

    asked = spy(monkeypatch, bench.filesystem.groups[0], held)
    assert (await fetch(bench, blocks))[0].blocks == 160
    assert await came_true(lambda: bool(running))
    for times in range(2, 4):
        # With a move that hangs fetches go on, and what has no room is dropped each time.
        assert (await fetch(bench, blocks))[0].blocks == 160
        assert counts(bench) == (room, times * (len(moved) - room), 0, 0)
    assert len(running) == 1, "one batch at a time"
    gate.set()
    assert (await settled(bench))[2:] == (room, 0)
    assert max(map(len, asked)) == batch
    while counts(bench)[2] < len(moved):
        assert (await fetch(bench, blocks))[0].blocks == 160
        assert (await settled(bench))[3] == 0
    assert all(bench.holders(blocks.keys[at]) == [0, 1] for at in moved)


async def test_a_block_larger_than_a_batch_is_moved_alone(bench: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks(24, seed=10, run=4)
    moved = await grown(bench, blocks)
    monkeypatch.setattr(efs.moving, "MOVE_BATCH_BYTES", TINY.block_bytes - 1)
    monkeypatch.setattr(efs.moving, "MOVE_BATCHES_PER_SECOND", 1_000)
    asked = spy(monkeypatch, bench.filesystem.groups[0])
    await fetch(bench, blocks)
    assert await settled(bench) == (len(moved), 0, len(moved), 0)
    assert {len(keys) for keys in asked} == {1}


def test_the_bounds_are_those_that_the_texts_give() -> None:
    v41 = 113_920
    assert MOVE_BATCH_BLOCKS * v41 <= MOVE_BATCH_BYTES
    assert 1.8e9 < MOVE_QUEUE_BLOCKS * v41 < 1.9e9


@pytest.mark.parametrize("call", [
    lambda bench, blocks: bench.filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS),
    lambda bench, blocks: fetch(bench, blocks),
    lambda bench, blocks: put(bench, blocks),
], ids=["match", "fetch", "put"])
async def test_moves_wait_while_calls_are_running(
    bench: GroupBench, monkeypatch: pytest.MonkeyPatch, call: Callable[[GroupBench, Blocks], Any]
) -> None:
    monkeypatch.setattr(efs.pace, "YIELD_AT_MOST_MS", 3_600_000.0)
    monkeypatch.setattr(efs.pace, "YIELD_MS", 1.0)
    blocks = make_blocks(96, seed=11, run=4)
    moved = await grown(bench, blocks)
    asked, gate = spy(monkeypatch, bench.filesystem.groups[0]), asyncio.Event()
    with bench.filesystem._traffic.call():
        assert (await fetch(bench, blocks))[0].blocks == 96
        for twin in bench.twins[0]:
            hold_look_ups(monkeypatch, twin, gate)
        running = asyncio.ensure_future(call(bench, blocks))
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0.001)
    assert (running.done(), asked) == (False, [])
    gate.set()
    await running
    assert await settled(bench) == (len(moved), 0, len(moved), 0)


def hold_look_ups(monkeypatch: pytest.MonkeyPatch, twin: MemoryNode, gate: asyncio.Event) -> None:
    look_up = twin.look_up

    async def late(keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        await gate.wait()
        return await look_up(keys, deadline)

    monkeypatch.setattr(twin, "warm", False)
    monkeypatch.setattr(twin, "look_up", late)


# -- Endings ----------------------------------------------------------------------------------------------------------


async def test_closing_during_moves_leaves_nothing_running() -> None:
    before = asyncio.all_tasks()
    stages = set()
    for turns in range(0, 80, 4):
        bench = make_groups(1, move=True)
        blocks = make_blocks(12, seed=13, run=1)
        moved = await grown(bench, blocks)
        for twins in bench.twins:
            for twin in twins:
                twin.warm = False
        assert (await fetch(bench, blocks))[0].blocks == 12
        for _ in range(turns):
            await asyncio.sleep(0)
        mover = bench.filesystem._mover
        stages.add((bool(mover._under_way), bool(bench.holders(blocks.keys[moved[0]]) == [0, 1])))
        await bench.filesystem.close()
        assert asyncio.all_tasks() == before
        assert mover._under_way == frozenset()
    assert stages >= {(False, False), (True, False), (True, True)}, "before, while and after it was stored"


async def test_a_mover_that_dies_is_started_again_and_the_block_is_moved_with_the_next_fetch(
    bench: GroupBench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    blocks = make_blocks(24, seed=14, run=4)
    moved = await grown(bench, blocks)
    monkeypatch.setattr(bench.filesystem._background, "_restart_ms", 0)
    monkeypatch.setattr(efs.moving, "MOVE_REST_MS", 0)

    async def bug() -> None:
        raise RuntimeError("a bug")

    with monkeypatch.context() as broken:
        spy(broken, bench.filesystem.groups[0], bug)
        await fetch(bench, blocks)
        assert await settled(bench) == (len(moved), 0, 0, len(moved))
    assert "background task move died" in caplog.text
    assert (await fetch(bench, blocks))[0].blocks == 24
    assert await settled(bench) == (2 * len(moved), 0, len(moved), len(moved))


# -- Faults: counted, and nothing else --------------------------------------------------------------------------------


async def all_failed(bench: GroupBench, blocks: Blocks, moved: Sequence[int]) -> None:
    """A fetch finds everything, and none of it comes to its owner."""
    assert (await fetch(bench, blocks))[0].blocks == len(blocks.keys)
    assert await settled(bench) == (len(moved), 0, 0, len(moved))
    for at in moved:
        assert not sound_versions(bench.twins[1], blocks.keys[at])


async def test_of_a_group_with_two_nodes_down_nothing_is_read_and_later_it_is_moved(
    bench: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(96, seed=15, run=4)
    moved = await grown(bench, blocks)
    asked = spy(monkeypatch, bench.filesystem.groups[0])
    bench.lose(1, [4, 9])
    await bench.filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS)
    assert len(bench.filesystem.groups[1].health.writable()) == 10
    await all_failed(bench, blocks, moved)
    assert asked == []
    for twin in bench.twins[1]:
        twin.down = None
    assert await came_true(lambda: len(bench.filesystem.groups[1].health.writable()) == 12)
    assert (await fetch(bench, blocks))[0].blocks == 96
    assert counts(bench) == (len(moved), 0, 0, len(moved)), "for a while they are left alone"
    bench.filesystem._mover._resting = dict.fromkeys(bench.filesystem._mover._resting, bench.clock.monotonic())
    assert (await fetch(bench, blocks))[0].blocks == 96
    assert await settled(bench) == (2 * len(moved), 0, len(moved), len(moved))
    assert bench.filesystem._mover._known == set()


async def test_a_new_group_that_is_full_costs_no_hit(bench: GroupBench, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = make_blocks(96, seed=16, run=4)
    moved = await grown(bench, blocks, capacity_records=0)
    asked = spy(monkeypatch, bench.filesystem.groups[0])
    await all_failed(bench, blocks, moved)
    assert sorted(key for keys in asked for key in keys) == sorted(blocks.keys[at] for at in moved)
    assert bench.counters.get("put_failed") == len(moved)
    assert (await fetch(bench, blocks))[0].blocks == 96
    assert await settled(bench) == (len(moved), 0, 0, len(moved)), "they are not read again for it"


async def test_a_block_that_is_gone_by_then_is_not_moved(bench: GroupBench) -> None:
    blocks = make_blocks(96, seed=17, run=4)
    moved = await grown(bench, blocks)
    with bench.filesystem._traffic.call():
        assert (await fetch(bench, blocks))[0].blocks == 96
        assert len(await bench.filesystem.groups[0].drop_keys(blocks.keys[:40], deadline_ms=DEADLINE_MS)) == 40
    gone = [at for at in moved if at < 40]
    assert await settled(bench) == (len(moved), 0, len(moved) - len(gone), len(gone))


async def test_bytes_that_changed_on_the_way_are_not_stored(
    bench: GroupBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = make_blocks(96, seed=18, run=4)
    moved = await grown(bench, blocks)
    read = bench.filesystem.groups[0].read_items
    flipped = list[bytes]()

    async def flip(keys: Sequence[bytes], shape: BlockShape, out: NDArray[np.uint8], *,
                   deadline_ms: float) -> dict[int, PutItem]:
        items = await read(keys, shape, out, deadline_ms=deadline_ms)
        out[(len(keys) // 2) * shape.segment_bytes[0]] ^= 1
        flipped.append(keys[len(keys) // 2])
        return items

    monkeypatch.setattr(bench.filesystem.groups[0], "read_items", flip)
    assert (await fetch(bench, blocks))[0].blocks == 96
    queued, _, done, failed = await settled(bench)
    assert (queued, done, failed) == (len(moved), len(moved) - len(flipped), len(flipped))
    assert flipped
    for at in moved:
        key = blocks.keys[at]
        assert bool(sound_versions(bench.twins[1], key)) == (key not in flipped)


@pytest.mark.parametrize("at", [12, 16], ids=["depth", "tenant tag"])
async def test_what_only_the_header_says_is_believed_with_its_checksum_only(bench: GroupBench, at: int) -> None:
    blocks = make_blocks(48, seed=22, run=4)
    moved = await grown(bench, blocks)
    for twin in bench.twins[0]:
        (stored,) = twin.records[blocks.keys[moved[0]]].values()
        stored.raw_header = stored.raw_header[:at] + b"\x7f" + stored.raw_header[at + 1 :]
    assert (await fetch(bench, blocks))[0].blocks == 48
    assert await settled(bench) == (len(moved), 0, len(moved) - 1, 1)
    assert not bench.holders(blocks.keys[moved[0]])[1:]


async def test_what_a_purged_tenant_had_is_not_moved(bench: GroupBench) -> None:
    blocks = make_blocks(96, seed=19, run=4, tenant_tag=b"acme1234")
    moved = await grown(bench, blocks)
    # The purge has not come to the previous owner yet.
    await bench.filesystem.groups[1].purge([b"acme1234"])
    await all_failed(bench, blocks, moved)


async def test_a_quota_refuses_moves_as_it_refuses_puts(bench: GroupBench) -> None:
    blocks = make_blocks(96, seed=20, run=4, tenant_tag=b"acme1234")
    moved = await grown(bench, blocks)
    held, _ = await bench.filesystem.tenant_bytes()
    bench.filesystem.quotas.limit({b"acme1234": held[b"acme1234"]})
    await all_failed(bench, blocks, moved)
    assert bench.counters.get("put_over_quota") == len(moved)


async def test_a_move_by_an_outdated_map_has_the_map_read_again() -> None:
    renewed = list[int]()

    async def renew(version: int, deadline: Deadline) -> bool:
        """By the later map there is room."""
        renewed.append(version)
        for twin in made.twins[1]:
            twin._capacity = None
        return True

    made = make_groups(1, move=True, renew=renew)
    blocks = make_blocks(48, seed=21, run=4)
    moved = await grown(made, blocks, capacity_records=0)
    assert (await fetch(made, blocks))[0].blocks == 48
    assert await settled(made) == (len(moved), 0, len(moved), 0)
    assert renewed == [0], "asked once, with the version by which it was put"
    await made.filesystem.close()
