"""Fetches that find rows which disagree: what is announced stays, and what it costs."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from efs import fetch
from efs.clock import Deadline, SystemClock
from efs.contract import Node
from efs.examine import examine
from efs.hedge import Unit
from efs.placement import placement_group, spare_shard_of
from efs.reader import Reader
from efs.shape import BlockShape
from efs.target import Target
from efs.unitread import CorruptShard, UnitReads
from tests.support.blocks import TINY, make_blocks
from tests.support.clock import FakeClock
from tests.support.memorynode import MemoryNode
from tests.support.slowreads import SlowReadNode
from tests.support.waiting import LATE_S
from tests.unit.efs.test_reader import check, expected, memory_group

CLOCK = SystemClock()


@pytest.fixture(params=[False, True], ids=["asked", "streamed"], autouse=True)
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every scenario twice, as in `test_reader`."""
    monkeypatch.setattr(MemoryNode, "streams", request.param)


async def test_a_segment_that_was_announced_is_not_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that lies in two segments is corrupt in the later one, and so is the parity that it is rebuilt from
    first: what the earlier segment has of it stays as it is all the while."""
    shape = BlockShape(1_000, (150, 850))
    group = memory_group()
    blocks = make_blocks(4, shape=shape, run=8)
    spare = spare_shard_of(placement_group(blocks.keys[0]))
    late = {shard: SlowReadNode(group.held(blocks, 0, shard).node_index, CLOCK) for shard in (10, 11)}
    for node in late.values():
        group.nodes[node.node_index] = node
    await group.store(blocks)
    for node in late.values():
        node.gate.clear()
    group.flip(blocks, 2, 1)
    group.flip(blocks, 2, 21 - spare, 10)
    group.flip(blocks, 2, 21 - spare, 90)
    out = bytearray(b"\xee" * 4 * shape.block_bytes)
    first = b"".join(expected(blocks, at)[0] for at in range(4))
    fired: list[tuple[int, int]] = []
    kept: list[bool] = []
    rebuild = UnitReads._rebuild_rows

    def watched(reads: UnitReads, unit: Unit, low: int, high: int, have: Sequence[int]) -> None:
        rebuild(reads, unit, low, high, have)
        kept.append(bytes(out[: len(first)]) == first)

    def report(found: CorruptShard) -> None:
        group.reported.append(found)
        late[21 - spare if found.shard == 1 else spare].gate.set()

    monkeypatch.setattr(UnitReads, "_rebuild_rows", watched)
    live: list[Node | None] = list(group.nodes)
    reader = Reader(live, group.codec, group.counters, CLOCK, report)
    done = await reader.get_into(blocks.keys, shape, memoryview(out), lambda *what: fired.append(what),
                                 Deadline.after_ms(CLOCK, 5_000))
    check(blocks, done, out)
    assert done.ok == (True,) * 4
    assert fired == [(0, 4), (1, 4)]
    assert [found.shard for found in group.reported] == [1, 21 - spare]
    assert kept == [True] * len(kept)
    assert len(kept) >= 2


async def test_a_node_whose_payloads_are_all_bad_costs_a_hash_a_block_and_not_one_for_each_pair(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    group = memory_group()
    blocks = make_blocks(120, run=64)
    await group.store(blocks)
    bad = group.nodes[3]
    assert bad is not None
    for versions in bad.records.values():
        for stored in versions.values():
            stored.payload[:] = bytes(len(stored.payload))
    hashed = 0
    hashes = Target.segment_hashes

    def counted(target: Target, segment: int, start: int, stop: int) -> list[int]:
        nonlocal hashed
        hashed += stop - start
        return hashes(target, segment, start, stop)

    monkeypatch.setattr(Target, "segment_hashes", counted)
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 120
    assert report.corrupt > 60
    assert hashed < 6 * 120 * len(TINY.segment_bytes)


@pytest.mark.parametrize("bad", [False, True])
async def test_a_deadline_that_comes_while_all_is_in_memory_ends_the_fetch(monkeypatch: pytest.MonkeyPatch,
                                                                           bad: bool) -> None:
    """Time passes with every unit that is read, or with every row that is examined."""
    group = memory_group()
    blocks = make_blocks(96, run=4)
    await group.store(blocks)
    if bad:
        for at in range(96):
            group.flip(blocks, at, 2)
    clock, looked = FakeClock(), 0
    ensure = UnitReads.ensure

    def ensured(reads: UnitReads, unit: Unit, segment: int) -> None:
        nonlocal looked
        looked += not bad
        clock.advance(0.0 if bad else 0.4)
        ensure(reads, unit, segment)

    async def examined(reads: UnitReads, keys: Sequence[bytes], unit: Unit, row: int) -> None:
        nonlocal looked
        looked += 1
        clock.advance(0.4)
        await examine(reads, keys, unit, row)

    monkeypatch.setattr(UnitReads, "ensure", ensured)
    monkeypatch.setattr(fetch, "examine", examined)
    live: list[Node | None] = list(group.nodes)
    reader = Reader(live, group.codec, group.counters, clock, group.reported.append)
    out = bytearray(96 * TINY.block_bytes)
    report = await reader.get_into(blocks.keys, TINY, memoryview(out), None, Deadline.after_ms(clock, 1_000))
    assert looked == 3
    check(blocks, report, out)
    assert sum(report.ok) < 96


async def test_a_node_that_is_silent_when_a_row_is_examined_costs_a_grace() -> None:
    group = memory_group()
    blocks = make_blocks(8, run=8)
    silent = SlowReadNode(group.held(blocks, 3, 1).node_index, CLOCK)
    group.nodes[silent.node_index] = silent
    await group.store(blocks)
    group.flip(blocks, 3, 0)
    silent.header_gate.clear()
    fetched = asyncio.create_task(group.fetch(blocks, deadline_ms=20_000))
    report, out = await asyncio.wait_for(fetched, LATE_S)
    check(blocks, report, out)
    assert all(report.ok)
    assert report.corrupt == 1
    assert silent.headers_asked > 0
