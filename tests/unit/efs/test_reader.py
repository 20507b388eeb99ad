"""Fetches over twelve memory twins: healthy, degraded, corrupt, slow, of several versions."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.clock import Deadline, SystemClock
from efs.codec import Codec
from efs.contract import Landing, Node, Span
from efs.health import Health
from efs.metrics import CounterFile
from efs.placement import placement_group, rotation_of, spare_shard_of
from efs.reader import Reader
from efs.shape import BlockShape
from efs.types import GetReport
from efs.unitread import CorruptShard
from efs.writer import Writer
from tests.support.blocks import TINY, Blocks, make_blocks
from tests.support.gatednode import Gate, GatedNode
from tests.support.memorynode import MemoryNode
from tests.support.slowreads import SlowReadNode
from tests.support.waiting import LATE_S

ODD = BlockShape(1_003, (400, 3, 600))
"""Segments and shards share no border, and the last shard is padded."""
OPAQUE = BlockShape(777, (777,))
CLOCK = SystemClock()


@pytest.fixture(params=[False, True], ids=["asked", "streamed"], autouse=True)
def streams(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Every scenario twice: shards are asked for once all tables are there, or come right behind each table."""
    streams: bool = request.param
    monkeypatch.setattr(MemoryNode, "streams", streams)
    return streams


class Group:
    """Twelve nodes, a writer and a reader over them."""

    def __init__(self, nodes: Sequence[MemoryNode | None]) -> None:
        self.nodes: list[MemoryNode | None] = list(nodes)
        self.counters = CounterFile.in_memory()
        self.reported: list[CorruptShard] = []
        self.codec = Codec()

    async def store(self, blocks: Blocks) -> None:
        writer = Writer(self.nodes, Health(self.nodes, CLOCK), self.codec, self.counters, CLOCK)
        report = await writer.put(blocks.items, blocks.shape, blocks.data, Deadline.after_ms(CLOCK, 5_000))
        assert report.acked == len(blocks.keys)

    def reader(self) -> Reader:
        live: list[Node | None] = list(self.nodes)
        return Reader(live, self.codec, self.counters, CLOCK, self.reported.append)

    async def fetch(self, blocks: Blocks, *, deadline_ms: float = 5_000, reader: Reader | None = None,
                    fired: list[tuple[int, int]] | None = None) -> tuple[GetReport, bytearray]:
        out = bytearray(b"\xee" * len(blocks.keys) * blocks.shape.block_bytes)
        on_segment = None if fired is None else lambda segment, leading: fired.append((segment, leading))
        report = await (reader or self.reader()).get_into(
            blocks.keys, blocks.shape, memoryview(out), on_segment, Deadline.after_ms(CLOCK, deadline_ms)
        )
        return report, out

    def held(self, blocks: Blocks, at: int, shard: int) -> MemoryNode:
        node = self.nodes[(shard + rotation_of(placement_group(blocks.keys[at]))) % 12]
        assert node is not None
        return node

    def flip(self, blocks: Blocks, at: int, shard: int, byte: int | None = None) -> None:
        (stored,) = self.held(blocks, at, shard).records[blocks.keys[at]].values()
        stored.payload[len(stored.payload) // 2 if byte is None else byte] ^= 1

    def drop(self, blocks: Blocks, at: int, shard: int) -> None:
        node = self.held(blocks, at, shard)
        (stored,) = node.records[blocks.keys[at]].values()
        node._forget(stored)


def memory_group() -> Group:
    return Group([MemoryNode(index, CLOCK) for index in range(12)])


def expected(blocks: Blocks, at: int) -> list[bytes]:
    """Block `at` cut into segments."""
    bounds = [*blocks.shape.segment_offsets, blocks.shape.block_bytes]
    return [blocks.block(at)[low:high] for low, high in itertools.pairwise(bounds)]


def check(blocks: Blocks, report: GetReport, out: bytearray) -> None:
    """Every ok block has exactly its bytes; the report adds up."""
    count = len(blocks.keys)
    for at in range(count):
        if report.ok[at]:
            for segment, data in enumerate(expected(blocks, at)):
                start = count * blocks.shape.segment_offsets[segment] + at * len(data)
                assert out[start : start + len(data)] == data, f"block {at}, segment {segment}"
    assert report.blocks == (list(report.ok).index(False) if False in report.ok else count)
    assert report.bytes == sum(report.ok) * blocks.shape.block_bytes


@pytest.mark.parametrize("shape", [TINY, ODD, OPAQUE], ids=["aligned", "odd", "opaque"])
@pytest.mark.parametrize("warm", [True, False], ids=["warm", "cold"])
async def test_healthy_fetch_returns_every_byte(shape: BlockShape, warm: bool) -> None:
    group = memory_group()
    blocks = make_blocks(150, shape=shape, run=64)
    await group.store(blocks)
    for node in group.nodes:
        assert node is not None
        node.warm = warm
    fired: list[tuple[int, int]] = []
    report, out = await group.fetch(blocks, fired=fired)
    check(blocks, report, out)
    assert report.blocks == 150
    assert (report.rebuilt, report.hedged, report.corrupt, report.missing, report.raced) == (0, 0, 0, 0, 0)
    assert fired == [(segment, 150) for segment in range(len(shape.segment_bytes))]


@pytest.mark.parametrize("shape", [TINY, ODD], ids=["aligned", "odd"])
async def test_every_pair_of_nodes_may_be_gone(shape: BlockShape) -> None:
    group = memory_group()
    blocks = make_blocks(20, shape=shape, run=4)
    await group.store(blocks)
    whole = list(group.nodes)
    for gone in itertools.combinations(range(12), 2):
        group.nodes = [None if index in gone else node for index, node in enumerate(whole)]
        report, out = await group.fetch(blocks)
        check(blocks, report, out)
        assert report.blocks == 20, gone
        assert report.rebuilt > 0, gone


async def test_three_nodes_gone_are_a_clean_miss() -> None:
    group = memory_group()
    blocks = make_blocks(20)
    await group.store(blocks)
    group.nodes = [None if index in (1, 5, 9) else node for index, node in enumerate(group.nodes)]
    fired: list[tuple[int, int]] = []
    report, _ = await group.fetch(blocks, fired=fired)
    assert report.ok == (False,) * 20
    assert report.bytes == 0
    assert fired == [(segment, 0) for segment in range(4)]


@pytest.mark.parametrize("shard", range(12))
@pytest.mark.parametrize("shape", [TINY, ODD], ids=["aligned", "odd"])
async def test_flipped_bit_in_any_shard_is_found_and_rebuilt(shard: int, shape: BlockShape) -> None:
    group = memory_group()
    blocks = make_blocks(9, shape=shape)
    await group.store(blocks)
    group.flip(blocks, 4, shard)
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 9
    if shard < 10:
        assert (report.corrupt, report.rebuilt) == (1, 1)
        assert [(item.key, item.shard) for item in group.reported] == [(blocks.keys[4], shard)]
    else:
        assert report.corrupt == 0


async def test_corrupt_parity_used_for_a_rebuild_is_blamed_not_the_data() -> None:
    group = memory_group()
    blocks = make_blocks(5, run=8)
    await group.store(blocks)
    parity = next(s for s in (10, 11) if s != spare_shard_of(placement_group(blocks.keys[0])))
    group.drop(blocks, 2, 3)
    group.flip(blocks, 2, parity)
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 5
    assert report.corrupt == 1
    assert report.missing == 1
    assert [item.shard for item in group.reported] == [parity]


async def test_two_corrupt_shards_and_one_absent_are_a_miss_of_that_block_only() -> None:
    group = memory_group()
    blocks = make_blocks(12, run=12)
    await group.store(blocks)
    group.flip(blocks, 7, 0)
    group.flip(blocks, 7, 9)
    group.drop(blocks, 7, 5)
    fired: list[tuple[int, int]] = []
    report, out = await group.fetch(blocks, fired=fired)
    check(blocks, report, out)
    assert [at for at, ok in enumerate(report.ok) if not ok] == [7]
    assert report.blocks == 7
    assert report.corrupt == 2
    leading = [count for _, count in fired]
    assert leading == sorted(leading, reverse=True)
    assert leading[-1] == 7


async def test_swapped_payloads_of_two_blocks_are_both_rejected_and_rebuilt() -> None:
    group = memory_group()
    blocks = make_blocks(6, run=6)
    await group.store(blocks)
    node = group.held(blocks, 1, 2)
    (one,), (other,) = node.records[blocks.keys[1]].values(), node.records[blocks.keys[4]].values()
    one.payload, other.payload = other.payload, one.payload
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 6
    assert report.corrupt == 2
    assert report.rebuilt == 2


async def test_swapped_nodes_are_misplaced_records_and_two_of_them_are_survived() -> None:
    group = memory_group()
    blocks = make_blocks(6)
    await group.store(blocks)
    one, other = group.nodes[3], group.nodes[8]
    assert one is not None
    assert other is not None
    one.records, other.records = other.records, one.records
    one.slots, other.slots = other.slots, one.slots
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 6
    assert report.corrupt == 12


async def test_hole_in_a_run_ends_the_leading_run_but_not_the_fetch() -> None:
    group = memory_group()
    blocks = make_blocks(30, run=30)
    await group.store(blocks)
    for shard in range(3):
        group.drop(blocks, 11, shard)
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 11
    assert sum(report.ok) == 29


async def test_other_version_with_fewer_shards_is_never_mixed_in() -> None:
    group = memory_group()
    old = make_blocks(8, seed=1)
    new = make_blocks(8, seed=2, keys=old.keys)
    other = memory_group()
    await group.store(old)
    await other.store(new)
    for index in range(6):
        node, donor = group.nodes[index], other.nodes[index]
        assert node is not None
        assert donor is not None
        for key, versions in donor.records.items():
            for digest, stored in versions.items():
                stored.location += 50 << 20
                node.records[key] = {digest: stored, **node.records[key]}
                node.slots[stored.location] = stored
    report, out = await group.fetch(old)
    check(old, report, out)
    assert report.blocks == 8
    assert report.rebuilt == 0


async def test_six_shards_of_each_of_two_versions_are_a_miss() -> None:
    group = memory_group()
    old = make_blocks(8, seed=1)
    other = memory_group()
    await group.store(old)
    await other.store(make_blocks(8, seed=2, keys=old.keys))
    group.nodes[:6] = other.nodes[:6]
    report, _ = await group.fetch(old)
    assert not any(report.ok)


def slow_group() -> tuple[Group, list[SlowReadNode]]:
    nodes = [SlowReadNode(index, CLOCK) for index in range(12)]
    return Group(nodes), nodes


async def test_cold_fetch_lands_through_the_nodes_threads() -> None:
    group, nodes = slow_group()
    blocks = make_blocks(40)
    await group.store(blocks)
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 40
    assert sum(node.reads for node in nodes) >= 11


@pytest.mark.parametrize("hung", [(4,), (4, 9), (0, 11)])
async def test_fetch_completes_when_nodes_hang(hung: tuple[int, ...]) -> None:
    group, nodes = slow_group()
    blocks = make_blocks(40)
    await group.store(blocks)
    for index in hung:
        nodes[index].gate.clear()
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 40
    assert report.rebuilt > 0
    assert sum(nodes[index].reads for index in hung) > 0
    before = bytes(out)
    for index in hung:
        await nodes[index].released()
    assert sum(nodes[index].revoked for index in hung) > 0
    assert bytes(out) == before


def gated_reader(group: Group, index: int) -> tuple[Reader, Gate]:
    """A reader to which one node's table comes when the gate opens."""
    node = group.nodes[index]
    assert node is not None
    gated = GatedNode(node)
    gated.look_up_gate = Gate()
    nodes: list[Node | None] = [*group.nodes[:index], gated, *group.nodes[index + 1 :]]
    return Reader(nodes, group.codec, group.counters, CLOCK, group.reported.append), gated.look_up_gate


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("index", range(12))
async def test_the_last_table_is_waited_for_rather_than_its_nodes_shards_rebuilt(index: int) -> None:
    group = memory_group()
    blocks = make_blocks(40)
    await group.store(blocks)
    reader, gate = gated_reader(group, index)
    fetch = asyncio.create_task(group.fetch(blocks, reader=reader))
    while not gate.held:
        await asyncio.sleep(0)
    gate.release()
    report, out = await fetch
    check(blocks, report, out)
    assert (report.blocks, report.rebuilt, report.missing) == (40, 0, 0)


async def test_a_table_that_does_not_come_is_waited_for_a_grace_once_and_then_known_to_be_slow() -> None:
    group = memory_group()
    blocks = make_blocks(40)
    await group.store(blocks)
    reader, gate = gated_reader(group, 4)
    assert not any(reader.context.lags.slow(CLOCK.monotonic()))
    report, out = await group.fetch(blocks, reader=reader)
    check(blocks, report, out)
    assert report.blocks == 40
    assert report.rebuilt > 0
    assert gate.held == 1
    assert list(np.flatnonzero(reader.context.lags.slow(CLOCK.monotonic()))) == [4]


async def test_nodes_that_hang_when_they_are_asked_for_headers_cost_no_hit() -> None:
    nodes = [SlowReadNode(index, CLOCK) for index in range(12)]
    group = Group(nodes)
    blocks = make_blocks(100, run=64)
    await group.store(blocks)
    first = placement_group(blocks.keys[0])
    hung = [nodes[(first + turn) % 12] for turn in range(2)]
    for node in hung:
        node.header_gate.clear()
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 100
    assert report.seconds < 4
    assert [node.headers_asked for node in hung] == [1, 1]
    assert sum(node.headers_asked for node in nodes) == 3


async def test_three_hung_nodes_return_by_the_deadline_with_a_miss_and_land_nothing_later() -> None:
    group, nodes = slow_group()
    blocks = make_blocks(10)
    await group.store(blocks)
    for index in (2, 6, 10):
        nodes[index].gate.clear()
    started = CLOCK.monotonic()
    report, out = await group.fetch(blocks, deadline_ms=200)
    assert CLOCK.monotonic() - started < 0.2 + LATE_S
    assert not all(report.ok)
    assert group.counters.get("get_deadline") == 1
    before = bytes(out)
    for index in (2, 6, 10):
        await nodes[index].released()
    assert bytes(out) == before


async def test_second_fetch_does_not_wait_for_a_node_that_hung_in_the_first() -> None:
    group, nodes = slow_group()
    blocks = make_blocks(40)
    await group.store(blocks)
    nodes[4].gate.clear()
    reader = group.reader()
    lags = reader.context.lags
    assert not any(lags.slow(CLOCK.monotonic()))
    await group.fetch(blocks, reader=reader)
    assert lags.slow(CLOCK.monotonic())[4]
    second, out = await group.fetch(blocks, reader=reader)
    check(blocks, second, out)
    assert second.blocks == 40
    assert second.rebuilt > 0
    await nodes[4].released()


async def test_failing_disks_of_two_nodes_are_rebuilt_and_counted_missing() -> None:
    group, nodes = slow_group()
    blocks = make_blocks(40)
    await group.store(blocks)
    nodes[1].failing = nodes[2].failing = True
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert report.blocks == 40
    assert report.rebuilt > 0
    assert report.missing > 0


async def test_exception_of_the_segment_callback_cancels_the_call() -> None:
    group = memory_group()
    blocks = make_blocks(4)
    await group.store(blocks)

    def refuse(segment: int, leading: int) -> None:
        raise RuntimeError(f"segment {segment}")

    with pytest.raises(RuntimeError, match="segment 0"):
        await group.reader().get_into(blocks.keys, blocks.shape, memoryview(bytearray(4 * TINY.block_bytes)), refuse,
                                      Deadline.after_ms(CLOCK, 1_000))


async def test_cancelled_fetch_leaves_the_buffer_alone() -> None:
    group, nodes = slow_group()
    blocks = make_blocks(20)
    await group.store(blocks)
    for node in nodes:
        node.gate.clear()
    out = bytearray(20 * TINY.block_bytes)
    task = asyncio.create_task(group.reader().get_into(blocks.keys, blocks.shape, memoryview(out), None,
                                                       Deadline.after_ms(CLOCK, 5_000)))
    async with asyncio.timeout(5):
        while sum(bool(node.reads) for node in nodes) < 10:
            await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    before = bytes(out)
    for node in nodes:
        await node.released()
    assert bytes(out) == before


class ReusingNode(MemoryNode):
    """Reuses the slot of one record for another block at the moment when it is read."""

    victim: bytes | None = None
    again: bool = False
    reused = 0

    def views_now(self, spans: object) -> None:
        return None

    def _land(self, span: Span, landing: Landing) -> None:
        if self.victim is not None and self.victim in self.records:
            (stored,) = self.records[self.victim].values()
            if span.location <= stored.location < span.location + span.count:
                self.victim = None
                self.reused += 1
                self._reuse(stored)
        super()._land(span, landing)

    def _reuse(self, stored: object) -> None:
        payload, location, generation = stored.payload, stored.location, stored.generation  # type: ignore[attr-defined]
        self._forget(stored)  # type: ignore[arg-type]
        if self.again:
            stored.location, stored.generation = location + (9 << 20), generation + 1000  # type: ignore[attr-defined]
            header = stored.header  # type: ignore[attr-defined]
            self.records.setdefault(header.key, {})[header.digest] = stored  # type: ignore[assignment]
            self.slots[stored.location] = stored  # type: ignore[attr-defined, assignment]
        del payload


@pytest.mark.parametrize("again", [False, True], ids=["evicted", "moved"])
async def test_slot_reused_during_a_read_is_raced_and_never_blamed(again: bool) -> None:
    group = Group([ReusingNode(index, CLOCK) for index in range(12)])
    blocks = make_blocks(6, run=6)
    await group.store(blocks)
    node = group.held(blocks, 3, 6)
    assert isinstance(node, ReusingNode)
    node.victim, node.again = blocks.keys[3], again
    report, out = await group.fetch(blocks)
    check(blocks, report, out)
    assert node.reused == 1
    assert report.blocks == 6
    assert (report.raced, report.corrupt) == (1, 0)
    assert report.rebuilt == (0 if again else 1)
    assert group.reported == []


async def test_fetch_touches_all_twelve_nodes_of_delivered_blocks() -> None:
    group = memory_group()
    blocks = make_blocks(6)
    await group.store(blocks)
    for node in group.nodes:
        assert node is not None
        for stored in node.slots.values():
            stored.stamp = 0
    await group.fetch(blocks)
    for node in group.nodes:
        assert node is not None
        assert all(stored.stamp > 0 for stored in node.slots.values())


async def test_look_up_of_an_unreadable_block_does_not_keep_it_warm() -> None:
    group = memory_group()
    blocks = make_blocks(6, run=6)
    await group.store(blocks)
    for shard in (0, 1, 2):
        group.drop(blocks, 3, shard)
    for node in group.nodes:
        assert node is not None
        for stored in node.slots.values():
            stored.stamp = 0
    await group.fetch(blocks)
    stamps = [stored.stamp for node in group.nodes if node for stored in node.slots.values()
              if stored.header.key == blocks.keys[3]]
    assert stamps
    assert not any(stamps)


async def test_shape_of_another_layout_under_the_same_key_is_a_miss() -> None:
    group = memory_group()
    blocks = make_blocks(3)
    await group.store(blocks)
    other = BlockShape(4_000, (1_000, 1_000, 1_000, 1_000))
    report, _ = await group.fetch(Blocks(other, blocks.keys, blocks.data))
    assert not any(report.ok)


class ColdBytesNode(MemoryNode):
    """Tables are in memory, payloads are not."""

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        return None

    def read_now(self, span: Span, landing: Landing) -> bool:
        return False


async def test_first_segment_that_lands_before_the_last_one_is_asked_ends_the_fetch_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The loop gets its turn after every step of the first pass, so what was cold is there before what is warm."""
    monkeypatch.setattr("efs.fetch.YIELD_SECONDS", -1.0)
    blocks = make_blocks(4, run=4)
    rotation = rotation_of(placement_group(blocks.keys[0]))
    cold = {(shard + rotation) % 12 for shard in (0, 1)}
    group = Group([(ColdBytesNode if index in cold else MemoryNode)(index, CLOCK) for index in range(12)])
    await group.store(blocks)
    fired: list[tuple[int, int]] = []
    report, out = await group.fetch(blocks, fired=fired)
    assert (report.blocks, report.rebuilt, report.missing) == (4, 0, 0)
    assert group.counters.get("get_deadline") == 0
    assert fired == [(segment, 4) for segment in range(4)]
    assert bytes(out[: 4 * 800]) == b"".join(expected(blocks, at)[0] for at in range(4))
