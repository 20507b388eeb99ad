"""Stores of real nodes that have evicted for a while: drift between them, and repair against eviction (fault 34)."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from efs.clock import Deadline, stamp_of
from efs.contract import TOO_COLD
from efs.fs import FileSystem
from efs.limits import DATA_SHARDS, KIB, MIB, STRIPE_SHARDS
from efs.types import DropItem
from tests.support.blocks import make_blocks
from tests.support.clock import FakeClock
from tests.support.nodebox import NODE_INDEX, NodeBox, index_agrees
from tests.support.records import LARGE, make_records

pytestmark = pytest.mark.usefixtures("patient")

DEADLINE_MS = 20_000


async def shards_of_versions(filesystem: FileSystem, clock: FakeClock) -> Counter[bytes]:
    """By version on how many nodes it is."""
    held: Counter[bytes] = Counter()
    for index in range(STRIPE_SHARDS):
        node, after = filesystem.upkeep.node(index), None
        assert node is not None
        while True:
            page = await node.list(after, 1_000, Deadline.after_ms(clock, DEADLINE_MS))
            held.update(record.key + record.digest for record in page.records)
            after = page.after
            if after is None:
                break
    return held


async def drop(filesystem: FileSystem, index: int, versions: set[bytes], clock: FakeClock) -> None:
    """Make one node lose these versions."""
    node = filesystem.upkeep.node(index)
    assert node is not None
    deadline = Deadline.after_ms(clock, DEADLINE_MS)
    page = await node.list(None, 65_536, deadline)
    items = [DropItem(record.key, record.digest, record.generation) for record in page.records
             if record.key + record.digest in versions]
    assert await node.drop(items, deadline) == len(versions)


@pytest.mark.slow
async def test_twelve_real_nodes_that_evict_leave_one_percent_of_dead_space_and_none_after_a_sweep(
    tmp_path: Path,
) -> None:
    root, clock, source = str(tmp_path / "store"), FakeClock(), random.Random(3)
    FileSystem.init(root, STRIPE_SHARDS * 6 * MIB, extent_bytes=256 * KIB)
    filesystem = await FileSystem.open(root, clock=clock, maintain=False)
    slots = sum(info.extents_total for info in await filesystem.nodes()) * 256 * KIB // LARGE.slot_bytes
    chains = [make_blocks(source.randrange(5, 30), seed=seed, shape=LARGE, run=32) for seed in range(400)]
    written = 0
    for number, chain in enumerate(chains):
        clock.advance(source.choice([0, 20, 90]))
        report = await filesystem.put(chain.items, LARGE, chain.data, deadline_ms=DEADLINE_MS)
        written += STRIPE_SHARDS * report.acked
        again = chains[max(0, number - source.randrange(20))]
        out = bytearray(again.data.nbytes)
        await filesystem.get_into(again.keys, LARGE, out, deadline_ms=DEADLINE_MS)
        if written > 3 * slots:
            break
    assert written > 3 * slots, "the store was not turned over"
    for index in range(STRIPE_SHARDS):
        await filesystem.upkeep.node(index).settled()  # type: ignore[union-attr]
    assert len(await filesystem.collect(deadline_ms=DEADLINE_MS)) == STRIPE_SHARDS, "each ends a cycle of its own"
    held = await shards_of_versions(filesystem, clock)
    dead = sum(nodes for nodes in held.values() if nodes < DATA_SHARDS)
    print(f"{held.total()} records, {dead} of them in stripes with fewer than ten shards")
    assert held.total() > slots // 2
    assert dead <= 0.01 * held.total()
    whole = [version for version, nodes in held.items() if nodes == STRIPE_SHARDS]
    for index in range(3):
        await drop(filesystem, index, set(whole[:10]), clock)
    clock.advance(3_600)
    swept = await filesystem.upkeep.sweep()
    assert swept.dropped == dead + 10 * (STRIPE_SHARDS - 3)
    assert min((await shards_of_versions(filesystem, clock)).values()) >= DATA_SHARDS
    await filesystem.close()


async def test_repair_of_what_is_cold_never_evicts_what_is_hotter(tmp_path: Path) -> None:
    """Also when no horizon says so yet: the node has evicted nothing since it was opened."""
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB)
    node = await box.open()
    now = stamp_of(box.clock.wall())
    batches = [make_records(100, NODE_INDEX, seed=seed, shape=LARGE) for seed in range(6)]
    for records in batches:
        await node.put(records.batch(now), box.soon())
    await node.settled()
    await node.close()
    node = await box.open()
    before = (await node.info(box.soon())).records
    assert before > 400
    cold = make_records(300, NODE_INDEX, seed=50, shape=LARGE)
    outcome = await node.put(replace(cold.batch(now - 100), repair=True), box.soon())
    assert outcome.why == TOO_COLD
    await node.settled()
    held = [int((await box.holds(node, records)).sum()) for records in batches]
    assert sum(held) == before, "repair of a cold shard has evicted a hotter one"
    hot = make_records(50, NODE_INDEX, seed=51, shape=LARGE)
    assert (await node.put(replace(hot.batch(now + 5), repair=True), box.soon())).stored.all(), "hotter ones get in"
    await node.settled()
    assert index_agrees(node)
    await node.close()
