"""A directory node that is full: eviction, the hard limit, the index budget, several slot sizes; and what it holds in
memory."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from efs.contract import Landing, Span, Stride
from efs.errors import InvalidArgument, NodeFull
from efs.extent import SlotClass, ranges_of
from efs.index import IndexFull
from efs.limits import KIB, MIB
from efs.node import DirectoryNode
from efs.osio import Buffer
from efs.shape import BlockShape
from efs.slotreads import Residency
from tests.support.clock import FakeClock
from tests.support.faultio import FaultIo
from tests.support.nodebox import NODE_INDEX, NodeBox, index_agrees
from tests.support.records import LARGE, SMALL, Records, make_records

TINY = BlockShape(600, (600,))
"""60-byte shards in 64-byte slots: the index is full long before the slots are."""
MEDIUM = BlockShape(11_520, (11_520,))
"""1,152-byte shards: 32 slots to a chunk, as for V4.1 blocks."""
HUGE = BlockShape(300_000, (100_000, 200_000))
"""30,000-byte shards: eight to a smallest extent."""


class WatchingIo(FaultIo):
    """Looks at the space in use after every operation that can change it."""

    def __init__(self, measure: Callable[[], int]) -> None:
        super().__init__()
        self._measure = measure
        self.highest = 0

    def allocate(self, fd: int, offset: int, length: int) -> None:
        super().allocate(fd, offset, length)
        self.highest = max(self.highest, self._measure())

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        wrote = super().pwrite(fd, data, offset)
        self.highest = max(self.highest, self._measure())
        return wrote

    def index_commit(self, path: str, commit: Callable[[], None]) -> None:
        super().index_commit(path, commit)
        self.highest = max(self.highest, self._measure())


@pytest.mark.parametrize("capacity", [4 * MIB, 6 * MIB])
async def test_the_hard_limit_holds_at_every_moment_with_ten_writers(tmp_path: Path, capacity: int) -> None:
    box = NodeBox(tmp_path, capacity_bytes=capacity)
    io = WatchingIo(box.du)
    node = await box.open(io=io)
    shapes = (SMALL, LARGE, HUGE, TINY)
    latest: dict[int, Records] = {}

    async def writer(number: int) -> None:
        source = random.Random(number)
        for turn in range(12):
            shape = shapes[source.randrange(len(shapes))]
            count = min(1_000, 2_000_000 // shape.block_bytes + 1)
            records = make_records(count, NODE_INDEX, seed=1_000 * number + turn, shape=shape)
            outcome = await node.put(records.batch(stamp=turn), box.soon())
            if outcome.stored.all():
                latest[number] = records

    await asyncio.gather(*(writer(number) for number in range(10)))
    assert io.highest <= capacity
    assert io.highest > capacity * 0.7
    assert box.counters.get("node_evicted") > 1_000
    await node.settled()
    assert index_agrees(node)
    for records in latest.values():
        await box.holds(node, records)
    await node.close()
    assert box.du() <= capacity
    node = await box.open(io=WatchingIo(box.du))
    for records in latest.values():
        await box.holds(node, records)
    await box.store(node, make_records(100, NODE_INDEX, seed=99))
    await node.settled()
    assert index_agrees(node)
    await node.close()
    assert box.du() <= capacity


async def test_the_coldest_records_go_first(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    batches = []
    for seed in range(7):
        batches.append(make_records(64, NODE_INDEX, seed=seed, shape=LARGE))
        await box.store(node, batches[-1], stamp=10 + seed)
    assert box.counters.get("node_evicted") == 0
    table = await node.look_up(batches[0].keys, box.soon())
    node.touch(batches[0].keys, table.location, 100)
    for seed in range(8, 12):
        await box.store(node, make_records(64, NODE_INDEX, seed=seed, shape=LARGE), stamp=50)
    await node.settled()
    evicted = [int((~await box.holds(node, batch)).sum()) for batch in batches]
    assert sum(evicted) == box.counters.get("node_evicted") > 0
    assert evicted[0] == 0, "a record that was touched went before colder ones"
    assert evicted[1:] == sorted(evicted[1:], reverse=True)
    await node.close()


async def test_deeper_blocks_of_one_minute_go_first(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    chain = make_records(500, NODE_INDEX, shape=LARGE, run=500)
    await box.store(node, chain, stamp=10)
    await box.store(node, make_records(200, NODE_INDEX, seed=2, shape=LARGE), stamp=20)
    held = await box.holds(node, chain)
    assert not held.all()
    assert held.tolist() == sorted(held.tolist(), reverse=True), "the tail of a chain goes before its head"
    await node.close()


async def test_a_second_slot_size_gets_space_on_a_full_node(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    for seed in range(12):
        await box.store(node, make_records(60, NODE_INDEX, seed=seed, shape=LARGE), stamp=seed)
    assert (await node.info(box.soon())).extents_used == box.config.plan.extents
    for seed in range(20, 23):
        small = make_records(700, NODE_INDEX, seed=seed)
        await box.store(node, small, stamp=20)
        assert (await box.holds(node, small)).all()
    large = make_records(300, NODE_INDEX, seed=30, shape=LARGE)
    await box.store(node, large, stamp=30)
    assert (await box.holds(node, large)).all()
    await node.settled()
    assert index_agrees(node)
    await node.close()


async def test_more_records_than_a_node_holds_fill_it_and_the_rest_is_named(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    records = make_records(700, NODE_INDEX, shape=LARGE)
    outcome = await node.put(records.batch(), box.soon())
    assert outcome.why == "no free slot and nothing to evict"
    assert 500 < outcome.stored.sum() < 700
    held = await box.holds(node, records)
    assert (held == outcome.stored).all()
    await node.settled()
    assert index_agrees(node)
    await node.close()


async def test_a_record_larger_than_an_extent_is_refused(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    shape = BlockShape(3 * MIB, (3 * MIB,))
    with pytest.raises(InvalidArgument, match="does not fit"):
        await node.put(make_records(1, NODE_INDEX, shape=shape).batch(), box.soon())
    await node.close()


async def test_small_slots_fill_the_index_first_and_old_ones_make_room(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=8 * MIB)
    node = await box.open()
    most = node._state.index.most_entries
    for seed in range(8):
        await box.store(node, make_records(1_500, NODE_INDEX, seed=seed, shape=TINY, run=1), stamp=seed)
    info = await node.info(box.soon())
    assert most - 1_500 < info.records <= most
    assert info.extents_used < info.extents_total
    newest = make_records(1_500, NODE_INDEX, seed=7, shape=TINY, run=1)
    assert (await box.holds(node, newest)).all()
    await node.settled()
    assert index_agrees(node)
    assert box.du() <= 8 * MIB
    await node.close()


async def test_a_map_that_is_full_before_its_budget_evicts_and_tries_once_more(tmp_path: Path) -> None:
    box = NodeBox(tmp_path)
    node = await box.open()
    old, new = make_records(600, NODE_INDEX, seed=1), make_records(100, NODE_INDEX, seed=2)
    await box.store(node, old, stamp=1)
    full = _full_index(node, times=1)
    await box.store(node, new, stamp=2)
    assert full == [1]
    assert box.counters.get("node_evicted") >= 512
    assert (await box.holds(node, new)).all()
    await node.settled()
    assert index_agrees(node)
    full = _full_index(node, times=9)
    with pytest.raises(NodeFull, match="map is full"):
        await node.put(make_records(100, NODE_INDEX, seed=3).batch(3), box.soon())
    assert full == [1, 2]
    node._state.index.put = type(node._state.index).put.__get__(node._state.index)  # type: ignore[method-assign]
    await box.store(node, make_records(100, NODE_INDEX, seed=3), stamp=3)
    assert (await box.holds(node, make_records(100, NODE_INDEX, seed=3))).all()
    await node.settled()
    assert index_agrees(node)
    await node.close()


def _full_index(node: DirectoryNode, times: int) -> list[int]:
    """Make the index refuse puts; returns the list of refusals, as they happen."""
    index = node._state.index
    refusals: list[int] = []
    put = type(index).put

    def refuse(*arguments: object) -> None:
        if len(refusals) < times:
            refusals.append(len(refusals) + 1)
            raise IndexFull("index: the map is full")
        put(index, *arguments)  # type: ignore[arg-type]

    index.put = refuse  # type: ignore[method-assign,assignment]
    return refusals


async def test_runs_stay_together_when_the_node_has_turned_over_three_times(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=8 * MIB, extent_bytes=MIB)
    node = await box.open()
    slots = node._state.allocator.geometry_for(SlotClass.of(MEDIUM)).slots * box.config.plan.extents
    batches: list[Records] = []
    while sum(len(records) for records in batches) < 3.2 * slots:
        size = random.Random(len(batches)).choice([4, 8, 16, 32, 64, 64, 64, 64])
        batches.append(make_records(size, NODE_INDEX, seed=len(batches), shape=MEDIUM))
        await box.store(node, batches[-1], stamp=len(batches) // 10)
    assert box.counters.get("node_evicted") > 2 * slots
    ranges = 0
    for records in batches[-40:]:
        ranges += len(ranges_of((await node.look_up(records.keys, box.soon())).location))
    mean = sum(len(records) for records in batches[-40:]) / ranges
    assert mean > 20, f"{mean:.1f} slots in a contiguous range"
    await node.settled()
    assert index_agrees(node)
    await node.close()


# -- Memory ---------------------------------------------------------------------------------------------------------


async def test_keys_and_tables_that_left_memory_are_found_again(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=12 * MIB)
    node = await box.open()
    node._state.hot._generation_keys = 50
    node._state.hot._generation_absent = 10
    node._state.tables._most_bytes = 200 * KIB
    stored = [make_records(100, NODE_INDEX, seed=seed, shape=SMALL if seed % 2 else LARGE) for seed in range(12)]
    for records in stored:
        await box.store(node, records)
    two = make_records(30, NODE_INDEX, seed=50, keys=stored[1].keys[:30])
    await box.store(node, two)
    assert sum(table.bytes for table in node._state.tables._tables.values()) <= 400 * KIB
    assert len(node._state.hot) <= 100
    for records in stored:
        assert (await node.look_up(records.keys, box.soon())).location.min() >= 0
    everything = [key for records in stored for key in records.keys]
    table = await node.look_up(everything, box.soon())
    assert (table.location >= 0).all()
    assert len(table.extra) == 30
    digests = [digest for records in stored for digest in records.digests]
    assert sum(found.tobytes() == digest for found, digest in zip(table.digest, digests, strict=True)) >= 1_170
    for records in (*stored[:1], *stored[2:]):
        assert (await box.holds(node, records)).all()
    await node.settled()
    assert index_agrees(node)
    await node.close()


async def test_records_stored_again_are_known_although_memory_has_no_room_for_their_keys(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=12 * MIB)
    node = await box.open()
    node._state.hot._generation_keys = 60
    node._state.hot._generation_absent = 10
    stored = [make_records(100, NODE_INDEX, seed=seed) for seed in range(4)]
    source = random.Random(1)
    for turn in range(30):
        await box.store(node, stored[turn % 4])
        await node.look_up(source.sample(stored[source.randrange(4)].keys, 50), box.soon())
        assert (await node.info(box.soon())).records == 100 * min(turn + 1, 4)
    assert index_agrees(node)
    await node.close()


async def test_look_ups_beside_writers_always_see_whole_records(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    node._state.hot._generation_keys = 100
    node._state.tables._most_bytes = 100 * KIB
    pool = [make_records(64, NODE_INDEX, seed=seed, shape=LARGE) for seed in range(20)]
    source = random.Random(5)
    seen = 0
    stamps = itertools.count()

    async def write() -> None:
        for _ in range(15):
            with suppress(NodeFull):  # While it waited, everything else may have been used later.
                await node.put(source.choice(pool).batch(next(stamps)), box.soon())

    async def look() -> None:
        nonlocal seen
        while seen < 600 or not all(task.done() for task in writing):
            await asyncio.sleep(0)  # An answer from memory does not let the writers go on.
            records = source.choice(pool)
            table = await node.look_up(records.keys, box.soon())
            rows = np.flatnonzero(table.location >= 0)
            headers = await node.headers(table.location[rows], table.generation[rows], 2, box.soon())
            kept = headers.any(axis=1)
            assert (headers[kept] == records.headers[rows[kept]]).all()
            digests = [digest.tobytes() for digest in table.digest[rows]]
            assert digests == [records.digests[row] for row in rows]
            seen += int(kept.sum())

    async def drop() -> None:
        while not all(task.done() for task in writing) or not box.counters.get("node_dropped"):
            await asyncio.sleep(0)
            records = source.choice(pool)
            table = await node.look_up(records.keys, box.soon())
            rows = np.flatnonzero(table.location >= 0)[:20]
            items = [records.drop_items(table.generation)[row] for row in rows]
            await node.drop(items, box.soon())

    writing = [asyncio.ensure_future(write()) for _ in range(4)]
    await asyncio.gather(*writing, *(look() for _ in range(4)), drop())
    assert box.counters.get("node_evicted") > 0
    assert box.counters.get("node_dropped") > 0
    assert box.counters.get("node_index_mismatch") == 0
    await node.settled()
    assert index_agrees(node)
    await node.close()
    node = await box.open()
    await node.settled()
    assert index_agrees(node)
    await node.close()


# -- Mapped reads ---------------------------------------------------------------------------------------------------


def test_pages_that_are_not_in_memory_are_told_apart(tmp_path: Path) -> None:
    file = tmp_path / "data"
    file.write_bytes(random.Random(1).randbytes(64 * 4096))
    with open(file, "rb") as handle:
        os.fsync(handle.fileno())
        view = np.frombuffer(mmap.mmap(handle.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
        residency = Residency(view)
        assert int(view.sum()) > 0
        assert residency.resident(0, len(view))
        assert residency.resident(5_000, 100)
        assert not residency.resident(4096, len(view)), "behind the end"
        del view
        os.posix_fadvise(handle.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


async def test_a_mapped_read_of_evicted_pages_is_declined(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, mapped=True, clock=FakeClock())
    node = await box.open()
    records = make_records(60, NODE_INDEX, shape=LARGE)
    table = await box.store(node, records)
    size = LARGE.shard_bytes
    buffer = bytearray(60 * size)
    span = Span(int(table.location[0]), 60, size, LARGE.slot_bytes)
    landing = Landing(memoryview(buffer), (Stride(0, size, 0, size),))
    assert node.read_now(span, landing)
    assert buffer == records.payload.tobytes()
    reads = node._reads._now
    assert reads._residency is not None
    reads._residency.resident = lambda offset, size: False  # type: ignore[method-assign]
    assert not node.read_now(span, landing)
    await node.close()
