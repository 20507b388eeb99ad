"""Lives of small nodes, each short enough that every crash of it can be looked at.

Nodes have four extents of a quarter of a MiB.
"""

from __future__ import annotations

from pathlib import Path

from efs.limits import HOLLOW_GRACE_MS
from efs.node import Durability
from efs.shape import BlockShape
from tests.support.crashio.life import Life
from tests.support.nodebox import NODE_INDEX
from tests.support.records import Records, make_records

BIG = BlockShape(240_000, (80_000, 160_000))
"""Slots of 24,000 bytes, entries of 152: pages and sectors cut both."""
SMALL = BlockShape(40_000, (40_000,))
HUGE = BlockShape(480_000, (180_000, 300_000))
"""Five slots to an extent: few records fill a node, though never to the last byte (`oracle.ALMOST_FULL`)."""
FULL_RECORDS = 18
"""Of HUGE: the next one makes the collector work."""


def some(count: int, seed: int, shape: BlockShape = BIG) -> Records:
    return make_records(count, NODE_INDEX, seed=seed, shape=shape)


async def changes(path: Path, durability: Durability) -> Life:
    """Made, opened, and every kind of change on a node that has room; closed, opened and used again."""
    life = Life.create(path, durability)
    first, second, third = some(3, 1), some(2, 2), some(2, 3)
    await life.open()
    await life.put(first, 5, name="the first put")
    await life.put(second, 6, name="a later put")
    await life.put_together(third, some(3, 4, SMALL), stamp=6)
    await life.put(first, 7, name="a put of what is held")
    await life.put(make_records(2, NODE_INDEX, seed=5, shape=BIG, keys=first.keys[:2]), 7, name="another version")
    await life.drop(second.rows(0, 1), dropped=1)
    life.clock.advance(HOLLOW_GRACE_MS / 1000)
    await life.drop(third, HOLLOW_GRACE_MS, dropped=2)
    await life.put(second.rows(0, 1), 6, repair=True, name="a repair")
    await life.close()
    await life.open()
    await life.put(some(1, 6), 8, name="a put in the next life")
    await life.close()
    return life


async def pressure(path: Path, durability: Durability) -> Life:
    """A node that is full: the collector, a put that evicts, a class that takes another one's extent, and back."""
    life = Life.create(path, durability)
    await life.open()
    await life.put(some(FULL_RECORDS, 1, HUGE), 5)
    await life.close()
    life.begin_here()
    await life.open()
    await life.put(some(1, 2, HUGE), 6, name="a put that wakes the collector")
    await life.put(some(2, 3, HUGE), 7, name="a put that is collected behind")
    await life.put(some(2, 4, SMALL), 8, name="a put of a class without an extent")
    await life.put(some(2, 5, HUGE), 9, name="a put into what is left")
    await life.put(some(3, 6, HUGE), 10, name="a put that evicts for itself")
    await life.close()
    assert any(step.acked is not None and step.ended != step.acked for step in life.steps), "nothing was collected"
    return life


async def deaths(path: Path, durability: Durability) -> Life:
    """A process that dies and is followed by the next, twice, while nothing was synced in between."""
    life = Life.create(path, durability)
    first = some(2, 1)
    await life.open()
    await life.put(first, 5)
    await life.die()
    await life.open()
    await life.put(some(1, 2, SMALL), 6)
    await life.drop(first.rows(0, 1), dropped=1)
    await life.die()
    await life.open()
    await life.put(first, 7)
    await life.close()
    return life


async def recovery(crashed: Life) -> Life:
    """The opening of what a crash left, and the verification of what was not trusted."""
    await crashed.open()
    await crashed.verify()
    await crashed.die()
    return crashed
