"""Shards that come behind a table: what is taken, what is revoked, and what is asked for again."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.clock import Deadline, SystemClock
from efs.codec import Codec
from efs.contract import GetSink, Landing, Node, Span
from efs.errors import NodeUnavailable
from efs.health import Health
from efs.limits import DATA_SHARDS
from efs.metrics import CounterFile
from efs.placement import placement_group, rotation_of, spare_shard_of
from efs.reader import Reader
from efs.types import GetReport
from efs.unitread import CorruptShard
from efs.writer import Writer
from tests.support.blocks import Blocks, make_blocks
from tests.support.memorynode import MemoryNode
from tests.support.slowreads import SlowReadNode

CLOCK = SystemClock()


class StreamingNode(SlowReadNode):
    """Its gets go on behind their tables. ends_early: they end after so many spans; fails: with an error. early, asked:
    spans that landed in a get, and that were read."""

    streams = True

    def __init__(self, node_index: int) -> None:
        super().__init__(node_index, CLOCK)
        self.ends_early: int | None = None
        self.fails = False
        self.table_gate = asyncio.Event()
        self.table_gate.set()
        self.early = 0
        self.asked = 0
        self.places: Sequence[tuple[Span, Landing]] = ()

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        await self.table_gate.wait()
        table = await self.look_up(keys, deadline)
        headers = self._headers(table.location, table.generation, sink.segments) if sink.segments else None
        sink.table_came(table, headers)
        self.places = sink.places()

        def landed(index: int) -> None:
            self.early += 1
            sink.landed(index)

        await super().read(self.places[: self.ends_early], landed, deadline)
        if self.fails:
            raise NodeUnavailable(self.node_index, "the connection was lost")

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        self.asked += len(spans)
        await super().read(spans, landed, deadline)


class Group:
    """Twelve streaming nodes with some blocks, and a reader over them."""

    def __init__(self) -> None:
        self.nodes = [StreamingNode(index) for index in range(12)]
        self.counters = CounterFile.in_memory()
        self.reported: list[CorruptShard] = []
        self.reader = Reader(self.nodes, Codec(), self.counters, CLOCK, self.reported.append)

    async def store(self, blocks: Blocks, nodes: Sequence[Node] | None = None) -> None:
        twelve = self.nodes if nodes is None else nodes
        writer = Writer(twelve, Health(twelve, CLOCK), Codec(), self.counters, CLOCK)
        report = await writer.put(blocks.items, blocks.shape, blocks.data, Deadline.after_ms(CLOCK, 5_000))
        assert report.acked == len(blocks.keys)

    async def name_another_version_first(self, blocks: Blocks, nodes: Sequence[StreamingNode]) -> None:
        """These nodes hold another version of each block too, and their tables have it in front."""
        donors = [MemoryNode(index, CLOCK) for index in range(12)]
        await self.store(make_blocks(len(blocks.keys), seed=2, keys=blocks.keys), donors)
        for node in nodes:
            for key, versions in donors[node.node_index].records.items():
                for digest, stored in versions.items():
                    stored.location += 50 << 20
                    node.records[key] = {digest: stored, **node.records[key]}
                    node.slots[stored.location] = stored

    async def fetch(self, blocks: Blocks, out: bytearray, deadline_ms: float = 5_000) -> GetReport:
        return await self.reader.get_into(blocks.keys, blocks.shape, memoryview(out), None,
                                          Deadline.after_ms(CLOCK, deadline_ms))

    @property
    def early(self) -> int:
        return sum(node.early for node in self.nodes)

    @property
    def asked(self) -> int:
        return sum(node.asked for node in self.nodes)

    def node_of(self, blocks: Blocks, at: int, shard: int) -> StreamingNode:
        return self.nodes[(shard + rotation_of(placement_group(blocks.keys[at]))) % 12]


def space(blocks: Blocks) -> bytearray:
    return bytearray(b"\xee" * len(blocks.keys) * blocks.shape.block_bytes)


def right(blocks: Blocks) -> bytes:
    """What a buffer with all blocks holds, segment after segment."""
    shape = blocks.shape
    parts: list[NDArray[np.uint8]] = [blocks.data[:, at : at + size].reshape(-1) for at, size in
                                      zip(shape.segment_offsets, shape.segment_bytes, strict=True)]
    return np.concatenate(parts).tobytes()


async def settled(node: StreamingNode) -> None:
    """Until what a fetch left behind at a node has met its landings."""
    await node.released()


async def test_a_healthy_fetch_asks_each_node_once() -> None:
    group, blocks = Group(), make_blocks(300, run=64)
    await group.store(blocks)
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert bytes(out) == right(blocks)
    assert (report.blocks, report.rebuilt, report.hedged, report.missing) == (300, 0, 0, 0)
    assert group.asked == 0
    assert sum(node.headers_asked for node in group.nodes) == 0
    # Eleven shards of each of five units, whose slots are neighbours; parity is revoked where it comes last.
    assert sum(len(node.places) for node in group.nodes) == 11 * 5
    assert group.early >= 10 * 5


async def test_what_a_table_first_names_is_revoked_where_another_version_is_pinned() -> None:
    """Six nodes hold two versions and name the one first that is not pinned. Its bytes come late, when the pinned one
    has been verified: none lands."""
    group, blocks = Group(), make_blocks(40, run=40)
    await group.store(blocks)
    await group.name_another_version_first(blocks, group.nodes[:6])
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert bytes(out) == right(blocks)
    assert (report.blocks, report.rebuilt, report.corrupt) == (40, 0, 0)
    holders = [node for node in group.nodes[:6] if node.places]
    assert len(holders) >= 5, "one of twelve is the spare"
    for node in holders:
        assert all(landing.revoked for _, landing in node.places)
        assert node.asked > 0


async def test_bytes_of_a_version_that_is_not_pinned_never_land_on_good_ones() -> None:
    """As above, with gates: what two nodes go on with comes when the fetch is over."""
    group, blocks = Group(), make_blocks(40, run=40)
    await group.store(blocks)
    late = group.nodes[:2]
    await group.name_another_version_first(blocks, late)
    for node in late:
        node.gate.clear()
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert report.blocks == 40
    assert bytes(out) == right(blocks)
    revoked = sum(node.revoked for node in late)
    for node in late:
        await settled(node)
    assert sum(node.revoked for node in late) > revoked, "nothing came late"
    assert bytes(out) == right(blocks)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("spans", [0, 1, 3])
async def test_what_did_not_land_in_a_get_is_read(spans: int, fails: bool) -> None:
    group, blocks = Group(), make_blocks(300, run=64)
    await group.store(blocks)
    for node in group.nodes[3:9]:
        node.ends_early, node.fails = spans, fails
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert bytes(out) == right(blocks)
    assert (report.blocks, report.rebuilt, report.missing) == (300, 0, 0)
    assert group.asked > 0
    assert 10 * 5 <= group.early + group.asked <= 11 * 5


async def test_a_node_that_is_gone_after_its_table_is_rebuilt() -> None:
    group, blocks = Group(), make_blocks(300, run=64)
    await group.store(blocks)
    node = group.nodes[4]
    node.ends_early, node.fails, node.failing = 0, True, True
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert bytes(out) == right(blocks)
    assert report.blocks == 300
    assert report.rebuilt > 0
    assert report.missing > 0


async def test_a_block_that_is_missing_cuts_the_units_and_the_rest_is_whole() -> None:
    group, blocks = Group(), make_blocks(64, run=64)
    await group.store(blocks)
    for node in group.nodes:
        for stored in list(node.records[blocks.keys[20]].values()):
            node._forget(stored)
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert report.ok == tuple(at != 20 for at in range(64))
    expected, block = right(blocks), blocks.shape
    for offset, size in zip(block.segment_offsets, block.segment_bytes, strict=True):
        start, hole = 64 * offset, 64 * offset + 20 * size
        assert out[start:hole] == expected[start:hole]
        assert out[hole + size : 64 * (offset + size)] == expected[hole + size : 64 * (offset + size)]
    # Data shards land before and behind the hole; parity has the size of a unit, and is read anew for each.
    parity = next(shard for shard in (DATA_SHARDS, DATA_SHARDS + 1)
                  if shard != spare_shard_of(placement_group(blocks.keys[0])))
    assert [node for node in group.nodes if node.asked] == [group.node_of(blocks, 0, parity)]


async def test_a_table_that_comes_too_late_brings_nothing() -> None:
    group, blocks = Group(), make_blocks(40, run=40)
    await group.store(blocks)
    node = group.node_of(blocks, 0, 2)
    node.table_gate.clear()
    out = space(blocks)
    report = await group.fetch(blocks, out)
    assert bytes(out) == right(blocks)
    assert (report.blocks, report.rebuilt) == (40, 40)
    assert node.places == ()
    node.table_gate.set()
    await asyncio.sleep(0)
    assert node.early == 0
    assert bytes(out) == right(blocks)


@pytest.mark.parametrize("tables", [False, True], ids=["before all tables", "afterwards"])
async def test_nothing_lands_after_a_call_was_cancelled(tables: bool) -> None:
    group, blocks = Group(), make_blocks(40, run=40)
    await group.store(blocks)
    for node in group.nodes[:4]:
        node.gate.clear()
    if not tables:
        group.nodes[5].table_gate.clear()
        group.nodes[6].table_gate.clear()
        group.nodes[7].table_gate.clear()
    out = space(blocks)
    fetch = asyncio.create_task(group.fetch(blocks, out))
    while sum(node.reads for node in group.nodes[:4]) < 3:
        await asyncio.sleep(0)
    fetch.cancel()
    with pytest.raises(asyncio.CancelledError):
        await fetch
    left = bytes(out)
    revoked = sum(node.revoked for node in group.nodes)
    for node in group.nodes[:4]:
        await settled(node)
    assert sum(node.revoked for node in group.nodes) > revoked, "nothing came late"
    assert bytes(out) == left


async def test_a_deadline_leaves_nothing_that_could_land() -> None:
    group, blocks = Group(), make_blocks(40, run=40)
    await group.store(blocks)
    for node in group.nodes[:3]:
        node.gate.clear()
    out = space(blocks)
    report = await group.fetch(blocks, out, deadline_ms=100)
    assert report.blocks == 0
    left = bytes(out)
    for node in group.nodes[:3]:
        await settled(node)
    assert bytes(out) == left


async def test_shards_that_come_before_the_last_table_are_prompt() -> None:
    group, blocks = Group(), make_blocks(40, run=40)
    await group.store(blocks)
    lags, healed, last = group.reader.context.lags, group.node_of(blocks, 0, 1), group.node_of(blocks, 0, 2)
    lags.observe(healed.node_index, 0.2, CLOCK.monotonic())
    assert lags.slow(CLOCK.monotonic())[healed.node_index]
    out = space(blocks)
    for _ in range(20):
        healed.early = 0
        last.table_gate.clear()
        fetch = asyncio.create_task(group.fetch(blocks, out))
        while not healed.early:
            await asyncio.sleep(0)
        last.table_gate.set()
        assert (await fetch).blocks == 40
    assert not lags.slow(CLOCK.monotonic())[healed.node_index]


@pytest.mark.parametrize("streams", [False, True])
async def test_nothing_holds_the_callers_buffer_after_the_call(monkeypatch: pytest.MonkeyPatch, streams: bool) -> None:
    group, blocks = Group(), make_blocks(64, run=64)
    await group.store(blocks)
    if not streams:
        monkeypatch.setattr(StreamingNode, "get", MemoryNode.get)
        monkeypatch.setattr(StreamingNode, "streams", False)
    gc.collect()
    gc.disable()
    try:
        out = space(blocks)
        with memoryview(out) as view:
            report = await group.reader.get_into(blocks.keys, blocks.shape, view, None, Deadline.after_ms(CLOCK, 5_000))
            assert report.blocks == 64
            for _ in range(20):
                await asyncio.sleep(0)
        for node in group.nodes:
            node.places = ()
        out.extend(b"x")  # BufferError while anything exports it.
    finally:
        gc.enable()


async def test_memory_of_parity_is_used_again() -> None:
    group, blocks = Group(), make_blocks(64, run=64)
    await group.store(blocks)
    taken: list[int] = []
    scratch = group.reader.context.scratch
    take = scratch.take

    def counted(size: int) -> bytearray:
        buffer = take(size)
        taken.append(id(buffer))
        return buffer

    scratch.take = counted  # type: ignore[method-assign]
    for _ in range(5):
        out = space(blocks)
        assert (await group.fetch(blocks, out)).blocks == 64
    assert len(taken) == 5
    assert len(set(taken)) == 1
