"""Calls that the scenarios of the contract are made of."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.contract import Landing, Node, NodeTable, Span, Stride
from efs.extent import ranges_of
from efs.shape import BlockShape
from efs.types import ListedRecord
from tests.support.clock import FakeClock
from tests.support.records import Records

ODD = BlockShape(7_919, (1_000, 4_001, 2_918))
"""Segments whose borders fall inside shards, and an odd number of bytes."""


def soon(clock: FakeClock) -> Deadline:
    return Deadline.after_ms(clock, 20_000)


async def store(node: Node, records: Records, clock: FakeClock, stamp: int = 0) -> NodeTable:
    """Put all records and look them up."""
    outcome = await node.put(records.batch(stamp), soon(clock))
    assert outcome.stored.all(), outcome.why
    return await node.look_up(records.keys, soon(clock))


async def payload_of(node: Node, locations: NDArray[np.int64], shape: BlockShape, clock: FakeClock) -> bytes:
    """Payload at these locations in order, read in as few spans as they are."""
    size = shape.shard_bytes
    buffer = bytearray(len(locations) * size)
    spans = [(Span(location, count, size, shape.slot_bytes),
              Landing(memoryview(buffer), (Stride(0, size, row * size, size),)))
             for row, location, count in ranges_of(locations)]
    seen: list[int] = []
    await node.read(spans, seen.append, soon(clock))
    assert seen == list(range(len(spans)))
    return bytes(buffer)


async def listing(node: Node, clock: FakeClock, limit: int = 1_000) -> list[ListedRecord]:
    found: list[ListedRecord] = []
    after: bytes | None = None
    while True:
        page = await node.list(after, limit, soon(clock))
        found += page.records
        after = page.after
        if after is None:
            return found


async def records_held(node: Node, clock: FakeClock) -> int:
    return (await node.info(soon(clock))).records
