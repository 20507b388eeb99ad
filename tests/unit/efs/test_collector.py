"""The collector of a node: space is kept free ahead of puts, coldest first, and nothing beside it is harmed."""

from __future__ import annotations

import asyncio
import errno
import logging
from pathlib import Path

import numpy as np
import pytest

from efs.clock import Deadline
from efs.errors import NodeReadOnly, NodeUnavailable
from efs.limits import DELETE_BATCH, MIB, WATERMARK_HIGH, WATERMARK_LOW
from efs.node import DirectoryNode
from tests.support.nodebox import NODE_INDEX, NodeBox, index_agrees
from tests.support.records import Records, make_records
from tests.support.waiting import eventually

BATCH = 250
HOT = 1_000_000
"""A stamp above all others that these tests give."""


class FullNode:
    """A node that is filled by puts of BATCH small records, each with a stamp of its own, from 1 on."""

    def __init__(self, path: Path) -> None:
        self.box = NodeBox(path, capacity_bytes=20 * MIB, index_bytes=10 * MIB)
        self.box.clock.advance(2 * HOT)  # type: ignore[attr-defined]  # The box was given a fake clock.
        self.batches: list[Records] = []

    async def fill(self, node: DirectoryNode, share: float) -> None:
        """Put until so much of the node is used, which must be less than what it collects at."""
        assert share < WATERMARK_HIGH
        while share_used(node) < share:
            await self.put_one(node)

    async def put_one(self, node: DirectoryNode) -> None:
        number = len(self.batches) + 1
        self.batches.append(make_records(BATCH, NODE_INDEX, seed=number))
        await self.box.store(node, self.batches[-1], stamp=number)

    async def held(self, node: DirectoryNode) -> list[int]:
        """Of each batch how many records are there; wrong bytes fail the test."""
        return [int((await self.box.holds(node, batch)).sum()) for batch in self.batches]


@pytest.fixture
def full(tmp_path: Path) -> FullNode:
    return FullNode(tmp_path)


def share_used(node: DirectoryNode) -> float:
    return node._fill.used_bytes / node._fill.total_bytes


def assert_coldest_went(held: list[int], evicted: int) -> None:
    """All that went are the oldest batches, the last of them in part."""
    assert sum(BATCH - count for count in held) == evicted > 0
    whole = [count for count in held if 0 < count < BATCH]
    assert len(whole) <= 1
    assert held == sorted(held)


async def test_a_node_above_its_high_mark_collects_down_to_the_low_one_by_itself(full: FullNode) -> None:
    node = await full.box.open()
    await full.fill(node, WATERMARK_HIGH - 0.03)
    await node.settled()
    assert full.box.counters.get("node_evicted") == 0
    while share_used(node) > WATERMARK_LOW and not full.box.counters.get("node_collections"):
        await full.put_one(node)
        await node.settled()
    assert share_used(node) <= WATERMARK_LOW
    assert share_used(node) > WATERMARK_LOW - 0.01, "more than needed went"
    evicted = full.box.counters.get("node_evicted")
    assert full.box.counters.get("node_collections") == 1
    assert evicted > DELETE_BATCH, "one batch only: nothing of this test speaks of several"
    assert_coldest_went(await full.held(node), evicted)
    assert index_agrees(node)
    await node.close()


async def test_between_the_marks_nothing_is_collected_until_asked_and_then_once(full: FullNode) -> None:
    node = await full.box.open()
    await full.fill(node, 0.90)
    await node.settled()
    assert full.box.counters.get("node_evicted") == 0
    evicted = await node.collect(full.box.soon())
    assert evicted == full.box.counters.get("node_evicted")
    assert share_used(node) <= WATERMARK_LOW
    assert_coldest_went(await full.held(node), evicted)
    assert await node.collect(full.box.soon()) == 0
    await node.close()


async def test_what_is_used_while_a_collection_runs_is_passed_over(full: FullNode) -> None:
    node = await full.box.open()
    await full.fill(node, 0.91)
    table = await node.look_up(full.batches[0].keys, full.box.soon())
    gate = full.box.io.hang("index_commit")
    collecting = asyncio.create_task(node.collect(full.box.soon()))
    assert await asyncio.to_thread(eventually, gate.entered.is_set)
    gone = full.box.counters.get("node_evicted")
    assert 0 < gone <= 2 * DELETE_BATCH, "the collection was not under way"
    first = full.batches[-(-gone // BATCH)]
    table = await node.look_up(first.keys, full.box.soon())
    node.touch(first.keys, table.location, HOT)
    gate.release()
    assert await collecting > gone
    held = await full.held(node)
    assert held[full.batches.index(first)] == BATCH, "a record was evicted that had been used meanwhile"
    assert index_agrees(node)
    await node.close()


async def test_a_put_waits_for_one_batch_of_a_collection_and_not_for_its_end(full: FullNode) -> None:
    node = await full.box.open()
    await full.fill(node, 0.91)
    gate = full.box.io.hang("index_commit")
    collecting = asyncio.create_task(node.collect(full.box.soon()))
    assert await asyncio.to_thread(eventually, gate.entered.is_set)
    putting = asyncio.create_task(node.put(make_records(10, NODE_INDEX, seed=900).batch(HOT), full.box.soon()))
    await asyncio.sleep(0)
    gate.release()
    outcome = await putting
    assert outcome.stored.all()
    assert not collecting.done(), "the put had to wait for the whole collection"
    assert await collecting > DELETE_BATCH
    await node.close()


async def test_a_collection_that_a_failing_disk_interrupts_is_tried_again(full: FullNode,
                                                                          caplog: pytest.LogCaptureFixture,
                                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.collector.RETRY_MS", 1.0)
    node = await full.box.open()
    await full.fill(node, 0.91)
    burst = make_records(3 * DELETE_BATCH, NODE_INDEX, seed=900)
    assert (await node.put(burst.batch(HOT), full.box.soon())).stored.all()
    assert share_used(node) > WATERMARK_HIGH + 1.5 * DELETE_BATCH / node._fill.records, "one batch would be enough"
    # The collector was woken by this put, and nothing was awaited since.
    broken = full.box.io.fail(("pwrite", "pwritev"), errno.EIO, path="slab", skip=1)
    with caplog.at_level(logging.WARNING):
        await asyncio.wait_for(_collected(full), 60)
    assert broken.count > 0
    assert "a collection was interrupted" in caplog.text
    assert share_used(node) <= WATERMARK_LOW
    assert_coldest_went(await full.held(node), full.box.counters.get("node_evicted"))
    await node.settled()
    assert index_agrees(node)
    await node.close()


async def _collected(full: FullNode) -> None:
    while not full.box.counters.get("node_collections"):
        await asyncio.sleep(0.001)


async def test_a_node_that_closes_while_it_collects_is_whole_when_it_is_opened_again(full: FullNode) -> None:
    node = await full.box.open()
    await full.fill(node, 0.91)
    gate = full.box.io.hang("index_commit")
    collecting = asyncio.create_task(node.collect(full.box.soon()))
    assert await asyncio.to_thread(eventually, gate.entered.is_set)
    closing = asyncio.create_task(node.close())
    await asyncio.sleep(0)
    gate.release()
    await closing
    with pytest.raises(NodeUnavailable):
        await collecting
    evicted = full.box.counters.get("node_evicted")
    node = await full.box.open()
    held = await full.held(node)
    assert_coldest_went(held, evicted)
    assert index_agrees(node)
    await node.close()


async def test_a_collection_returns_by_its_deadline_when_the_disk_hangs(full: FullNode) -> None:
    node = await full.box.open()
    await full.fill(node, 0.91)
    gate = full.box.io.hang("index_commit")
    with pytest.raises(NodeUnavailable):
        await node.collect(Deadline.after_ms(full.box.clock, 200))
    assert gate.entered.is_set()
    gate.release()
    await node.settled()
    assert await node.collect(full.box.soon()) > 0
    assert index_agrees(node)
    await node.close()


async def test_a_read_only_node_collects_nothing(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=8 * MIB, durability="power")
    node = await box.open()
    await box.store(node, make_records(100, NODE_INDEX))
    box.io.fail("fdatasync", errno.EIO)
    for seed in (2, 3):
        with pytest.raises(NodeReadOnly):
            await node.put(make_records(1, NODE_INDEX, seed=seed).batch(), box.soon())
    with pytest.raises(NodeReadOnly):
        await node.collect(box.soon())
    assert np.count_nonzero(await box.holds(node, make_records(100, NODE_INDEX))) == 100
    await node.close()
