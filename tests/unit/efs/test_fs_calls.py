"""The client's calls over memory twins: arguments, results, background mending, the end."""

from __future__ import annotations

import array
import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import pytest

from efs.clock import Deadline
from efs.codec import Codec
from efs.errors import EfsError, InvalidArgument, NodeReadOnly, NodeUnavailable, StoreClosed
from efs.fs import FileSystem
from efs.limits import MAX_KEYS_PER_CALL, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.placement import placement_group, rotation_of
from efs.types import DropItem, PutItem, PutReport
from tests.support.bench import Bench, make_bench
from tests.support.blocks import TINY, Blocks, make_blocks, sound_versions
from tests.support.gatednode import Gate

pytestmark = pytest.mark.usefixtures("patient")

DEADLINE_MS = 5_000


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.fixture
async def filesystem(bench: Bench) -> AsyncIterator[FileSystem]:
    opened = FileSystem(bench.nodes, codec=Codec(), counters=CounterFile.in_memory(), clock=bench.clock)
    yield opened
    await opened.close()


async def put(filesystem: FileSystem, blocks: Blocks) -> PutReport:
    return await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=DEADLINE_MS)


def from_segments(out: bytearray, blocks: Blocks) -> list[bytes]:
    """The blocks of a segment-major buffer."""
    count, shape = len(blocks.keys), blocks.shape
    return [b"".join(out[count * offset + at * size : count * offset + (at + 1) * size]
                     for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True))
            for at in range(count)]


async def test_what_was_put_is_matched_and_fetched(filesystem: FileSystem) -> None:
    blocks = make_blocks(40)
    assert await put(filesystem, blocks) == PutReport(40, 0, 0, 0)
    assert await filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == 40
    out = bytearray(40 * TINY.block_bytes)
    fired: list[tuple[int, int]] = []
    report = await filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS,
                                       on_segment=lambda segment, leading: fired.append((segment, leading)))
    assert (report.blocks, report.rebuilt, report.missing) == (40, 0, 0)
    assert from_segments(out, blocks) == [blocks.block(at) for at in range(40)]
    assert fired == [(segment, 40) for segment in range(4)]
    assert filesystem.counters.get("match_calls") == 1
    assert filesystem.counters.get("match_blocks") == 40
    assert filesystem.counters.get("get_calls") == 1
    assert filesystem.counters.get("put_acked") == 40


@pytest.mark.parametrize("make", [
    bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8),
    lambda data: np.frombuffer(data, ">f4").reshape(-1, 8), lambda data: array.array("H", data),
])
async def test_blocks_may_be_any_buffer(filesystem: FileSystem, make: Any) -> None:
    blocks = make_blocks(3)
    buffer = make(blocks.data.tobytes())
    assert await filesystem.put(blocks.items, TINY, buffer, deadline_ms=DEADLINE_MS) == PutReport(3, 0, 0, 0)
    out = np.zeros(3 * TINY.block_bytes // 2, np.uint16)
    report = await filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS)
    assert report.blocks == 3
    assert from_segments(bytearray(out.tobytes()), blocks) == [blocks.block(at) for at in range(3)]


async def test_wrong_buffers_are_refused_with_what_was_expected(filesystem: FileSystem) -> None:
    blocks = make_blocks(3)
    size = 3 * TINY.block_bytes

    async def put_from(buffer: Any) -> None:
        await filesystem.put(blocks.items, TINY, buffer, deadline_ms=DEADLINE_MS)

    async def get_to(buffer: Any) -> None:
        await filesystem.get_into(blocks.keys, TINY, buffer, deadline_ms=DEADLINE_MS)

    with pytest.raises(InvalidArgument, match=f"blocks has {size - 1} bytes, expected {size}"):
        await put_from(bytes(size - 1))
    with pytest.raises(InvalidArgument, match=f"blocks is list, expected a buffer of {size} bytes"):
        await put_from([0] * size)
    with pytest.raises(InvalidArgument, match="blocks is not contiguous"):
        await put_from(np.zeros((size, 2), np.uint8)[:, 0])
    with pytest.raises(InvalidArgument, match="out is read-only"):
        await get_to(bytes(size))
    with pytest.raises(InvalidArgument, match=f"out has {size + 1} bytes, expected {size}"):
        await get_to(bytearray(size + 1))


async def test_wrong_keys_and_deadlines_are_refused(filesystem: FileSystem) -> None:
    with pytest.raises(InvalidArgument, match="key 0 has 31 bytes, must have 32"):
        await filesystem.match([bytes(31)], deadline_ms=DEADLINE_MS)
    with pytest.raises(InvalidArgument, match=f"{MAX_KEYS_PER_CALL + 1} keys"):
        await filesystem.drop([bytes(32)] * (MAX_KEYS_PER_CALL + 1), deadline_ms=DEADLINE_MS)
    for deadline in (0, -1, 60_001, float("nan")):
        with pytest.raises(InvalidArgument, match="deadline_ms"):
            await filesystem.get_into([], TINY, b"", deadline_ms=deadline)
    with pytest.raises(InvalidArgument, match="tenant tag"):
        await filesystem.put([PutItem(bytes(32), 0, b"")], TINY, bytes(TINY.block_bytes), deadline_ms=DEADLINE_MS)


async def test_no_keys_are_no_work(filesystem: FileSystem) -> None:
    assert (await filesystem.get_into([], TINY, bytearray(), deadline_ms=DEADLINE_MS)).blocks == 0
    assert await filesystem.put([], TINY, b"", deadline_ms=DEADLINE_MS) == PutReport(0, 0, 0, 0)
    assert await filesystem.match([], deadline_ms=DEADLINE_MS) == 0
    assert await filesystem.drop([], deadline_ms=DEADLINE_MS) == 0


async def test_dropped_blocks_are_gone_with_all_their_versions(filesystem: FileSystem, bench: Bench) -> None:
    first = make_blocks(5, seed=1)
    second = make_blocks(5, seed=2, keys=first.keys)
    await asyncio.gather(put(filesystem, first), put(filesystem, second))
    assert bench.records(first.keys[0]) == 24
    assert await filesystem.drop([*first.keys[:3], bytes(32)], deadline_ms=DEADLINE_MS) == 3
    assert [bench.records(key) for key in first.keys] == [0, 0, 0, 24, 24]
    assert await filesystem.match(first.keys, deadline_ms=DEADLINE_MS) == 0
    assert await filesystem.match(first.keys[3:], deadline_ms=DEADLINE_MS) == 2


@pytest.mark.parametrize(("failing", "counted"), [(2, 3), (3, 0), (12, 0)])
@pytest.mark.parametrize("silent", [False, True])
async def test_only_blocks_that_were_dropped_where_they_were_held_are_counted(
    filesystem: FileSystem, bench: Bench, monkeypatch: pytest.MonkeyPatch, failing: int, counted: int, silent: bool
) -> None:
    async def fails(items: Sequence[DropItem], deadline: Deadline) -> int:
        if silent:
            await asyncio.Event().wait()
        raise NodeUnavailable(0, "its disk fails")

    blocks = make_blocks(3)
    await put(filesystem, blocks)
    for node in bench.nodes[:failing]:
        monkeypatch.setattr(node, "drop", fails)
    assert await filesystem.drop(blocks.keys, deadline_ms=200) == counted
    assert {bench.records(key) for key in blocks.keys} == {failing}
    assert await filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == (3 if failing == 12 else 0)
    monkeypatch.undo()
    assert await filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS) == 3
    assert {bench.records(key) for key in blocks.keys} == {0}


async def test_a_node_that_hangs_at_a_look_up_leaves_a_drop_its_time(filesystem: FileSystem, bench: Bench) -> None:
    blocks = make_blocks(3)
    await put(filesystem, blocks)
    bench.nodes[4].look_up_gate = Gate()
    assert await filesystem.drop(blocks.keys, deadline_ms=2_000) == 3
    assert [bench.records(key) for key in blocks.keys] == [1] * 3


@pytest.mark.parametrize("refusal", [InvalidArgument("DROP is for operators"), NodeReadOnly(0, "its fsync failed")])
async def test_a_drop_that_every_node_refuses_is_refused(
    filesystem: FileSystem, bench: Bench, monkeypatch: pytest.MonkeyPatch, refusal: EfsError
) -> None:
    async def refuses(items: Sequence[DropItem], deadline: Deadline) -> int:
        raise refusal

    blocks = make_blocks(3)
    await put(filesystem, blocks)
    for node in bench.nodes:
        monkeypatch.setattr(node, "drop", refuses)
    with pytest.raises(type(refusal)) as raised:
        await filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS)
    assert raised.value is refusal
    assert await filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS) == 3


async def test_a_corrupt_shard_met_on_a_read_is_mended_in_the_background(filesystem: FileSystem, bench: Bench) -> None:
    blocks = make_blocks(8)
    await put(filesystem, blocks)
    for at, shard in ((2, 3), (5, 0)):
        index = (shard + rotation_of(placement_group(blocks.keys[at]))) % STRIPE_SHARDS
        (stored,) = bench.twins[index].records[blocks.keys[at]].values()
        stored.payload[7] ^= 4
    out = bytearray(8 * TINY.block_bytes)
    report = await filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS)
    assert (report.blocks, report.corrupt, report.rebuilt) == (8, 2, 2)
    assert from_segments(out, blocks) == [blocks.block(at) for at in range(8)]
    await asyncio.wait_for(filesystem.mender.settled(), 5)
    assert filesystem.counters.get("node_mended") == 2
    assert all(len(shards) == 12 for key in blocks.keys for shards in sound_versions(bench.twins, key).values())
    again = await filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS)
    assert (again.blocks, again.corrupt, again.rebuilt) == (8, 0, 0)


async def test_a_closer_look_shows_every_shard(filesystem: FileSystem, bench: Bench) -> None:
    first = make_blocks(2, seed=1)
    await put(filesystem, first)
    key = first.keys[1]
    rotation = rotation_of(placement_group(key))
    corrupt, untrusted, silent = ((shard + rotation) % STRIPE_SHARDS for shard in (1, 2, 3))
    next(iter(bench.twins[corrupt].records[key].values())).payload[0] ^= 1
    for stored in bench.twins[untrusted].records[key].values():
        stored.trusted = False
    bench.twins[silent].down = "unplugged"
    reports = await filesystem.look_up_all(key, deadline_ms=DEADLINE_MS)
    assert [report.record.shard for report in reports] == [0, 1, 2, *range(4, 12)]
    assert all(report.node_index == (report.record.shard + rotation) % STRIPE_SHARDS for report in reports)
    assert all(report.in_place for report in reports)
    assert [report.record.shard for report in reports if not report.sound] == [1]
    assert [report.record.shard for report in reports if not report.trusted] == [2]
    assert {(report.record.block_bytes, report.record.segments, report.record.depth) for report in reports} == {
        (TINY.block_bytes, 4, 1)}


async def test_a_closer_look_finds_the_first_and_the_last_key(filesystem: FileSystem) -> None:
    blocks = make_blocks(3, keys=[bytes(32), b"\xff" * 32, b"\x01" + bytes(31)])
    await put(filesystem, blocks)
    for key in blocks.keys:
        reports = await filesystem.look_up_all(key, deadline_ms=DEADLINE_MS)
        assert len(reports) == 12
        assert {report.record.key for report in reports} == {key}
    assert await filesystem.look_up_all(b"\x02" + bytes(31), deadline_ms=DEADLINE_MS) == ()


async def test_nodes_are_listed_with_their_state() -> None:
    bench = make_bench()
    nodes = [None if index == 7 else node for index, node in enumerate(bench.nodes)]
    filesystem = FileSystem(nodes, codec=Codec(), counters=CounterFile.in_memory(), clock=bench.clock,
                            problems={7: "/disk/7 is not there"})
    bench.twins[1].down = "its disk fails"
    bench.twins[2].hanging = True
    filesystem.health.note_failure(3, NodeReadOnly(3, "fsync failed"))
    infos = await filesystem.nodes()
    assert [info.node_index for info in infos] == list(range(12))
    assert {info.node_index: info.state for info in infos if info.state != "serving"} == {
        1: "suspect", 2: "suspect", 3: "read-only", 7: "offline"}
    await filesystem.close()


async def test_a_closed_store_refuses_every_call(filesystem: FileSystem) -> None:
    await filesystem.close()
    await filesystem.close()
    with pytest.raises(StoreClosed):
        await filesystem.match([bytes(32)], deadline_ms=DEADLINE_MS)
    with pytest.raises(StoreClosed):
        await put(filesystem, make_blocks(1))
    with pytest.raises(StoreClosed):
        await filesystem.get_into([], TINY, b"", deadline_ms=DEADLINE_MS)
    with pytest.raises(StoreClosed):
        await filesystem.nodes()
