"""A node against a plain dict, over random puts, drops, faults of the disk, deaths and openings. Seeds are in the test
ids."""

from __future__ import annotations

import errno
import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from efs.errors import NodeFull, NodeUnavailable
from efs.limits import MIB
from efs.node import DirectoryNode
from efs.nodedir import index_path
from tests.support.nodebox import NODE_INDEX, NodeBox, crash, index_agrees
from tests.support.records import LARGE, SMALL, Records, make_records

FAULTS = (errno.ENOSPC, errno.EIO)
OPERATIONS = ("pwrite", "allocate", "index_commit", "preadv")


class Model:
    """What must be there, what must not, and what may be either, by pool batch and row."""

    def __init__(self, pool: list[Records]) -> None:
        self.pool = pool
        self.state = [np.zeros(len(records), np.int8) for records in pool]

    PRESENT, ABSENT, EITHER = 1, 0, 2

    async def check(self, box: NodeBox, node: DirectoryNode, evicts: bool) -> int:
        """Compare, and learn what was open; returns how many records are there."""
        total = 0
        for records, state in zip(self.pool, self.state, strict=True):
            held = await box.holds(node, records)
            if not evicts:
                assert held[state == self.PRESENT].all()
            assert not held[state == self.ABSENT].any()
            state[:] = held
            total += int(held.sum())
        return total


async def put(box: NodeBox, node: DirectoryNode, model: Model, source: random.Random) -> bool:
    number = source.randrange(len(model.pool))
    start = source.randrange(len(model.pool[number]))
    rows = model.pool[number].rows(start, start + source.randrange(1, 40))
    state = model.state[number][start : start + len(rows)]
    try:
        outcome = await node.put(rows.batch(source.randrange(100)), box.soon())
    except (NodeFull, NodeUnavailable):
        state[state == Model.ABSENT] = Model.EITHER
        return False
    state[outcome.stored] = Model.PRESENT
    return True


async def drop(box: NodeBox, node: DirectoryNode, model: Model, source: random.Random) -> None:
    number = source.randrange(len(model.pool))
    records = model.pool[number]
    try:
        table = await node.look_up(records.keys, box.soon())
        rows = [row for row in np.flatnonzero(table.location >= 0).tolist() if source.random() < 0.3]
        model.state[number][rows] = Model.EITHER
        items = records.drop_items(table.generation)
        assert await node.drop([items[row] for row in rows], box.soon()) == len(rows)
    except (NodeUnavailable, NodeFull):
        return
    model.state[number][rows] = Model.ABSENT


async def reopen(box: NodeBox, node: DirectoryNode, model: Model, source: random.Random) -> DirectoryNode:
    """Close or die, sometimes lose the index or power, open again. What a failed operation left on disk may come back
    after a death; after closing only what a failed change of an extent's class left. An entry that was torn while it
    was rewritten is lost if the node dies before it could write it again."""
    closes = source.random() < 0.5
    if node._state.unsettled or (not closes and box.io.injected()):
        for state in model.state:
            state[state == Model.ABSENT] = Model.EITHER
    if not closes and node._state.owed_restores:
        for state in model.state:
            state[state == Model.PRESENT] = Model.EITHER
    if closes:
        await node.close()
    else:
        await crash(node)
        if source.random() < 0.3:
            box.boot_id += "+"
    if source.random() < 0.2:
        shutil.rmtree(index_path(box.path))
    box.clock.advance(30)  # type: ignore[attr-defined]
    return await box.open()


@pytest.mark.parametrize("capacity", [3 * MIB, 12 * MIB])
@pytest.mark.parametrize("seed", range(6))
async def test_a_node_agrees_with_a_dict_whatever_happens(tmp_path: Path, capacity: int, seed: int) -> None:
    source = random.Random(seed)
    box = NodeBox(tmp_path, capacity_bytes=capacity)
    pool = [make_records(60, NODE_INDEX, seed=number, shape=SMALL if number % 2 else LARGE) for number in range(8)]
    model = Model(pool)
    node = await box.open()
    stored = injected = evicted = openings = 0
    for _ in range(120):
        fault = None
        if source.random() < 0.3:
            names = source.sample(OPERATIONS, 2)
            fault = box.io.fail_after(tuple(names), source.choice([0, 10, 3_000]), source.choice(FAULTS),
                                      skip=source.randrange(6))
        action = source.randrange(10)
        if action < 6:
            stored += await put(box, node, model, source)
        elif action < 8:
            await drop(box, node, model, source)
        if fault is not None:
            fault.disarm()
            injected += fault.count
        if action == 8:
            evicted += box.counters.get("node_evicted")
            node = await reopen(box, node, model, source)
            openings += 1
        evicts = evicted + box.counters.get("node_evicted") > 0
        await model.check(box, node, evicts)
        assert box.du() <= capacity
    await node.close()
    node = await box.open()
    total = await model.check(box, node, evicts=False)
    assert (await node.info(box.soon())).records == total
    assert index_agrees(node)
    await node.close()
    assert stored > 20, "hardly anything was stored"
    assert injected > 3, "hardly any fault happened"
    assert openings > 3
    assert total > 0
