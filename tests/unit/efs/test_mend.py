"""Mending: the node checks itself first, and gets back exactly the record that it lost."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest

from efs import mend as mend_module
from efs.background import Background
from efs.codec import Codec
from efs.errors import InvalidArgument
from efs.limits import STRIPE_SHARDS
from efs.mend import Mender
from efs.placement import placement_group, rotation_of
from efs.shape import BlockShape
from efs.types import ListPage
from efs.unitread import CorruptShard
from tests.support.bench import Bench, make_bench
from tests.support.blocks import TINY, Blocks, make_blocks, readable, sound_versions
from tests.support.memorynode import Stored

READ_AT = 3_000
"""Stamp of the reads that meet damage here."""
SHAPES = [TINY, BlockShape(997, (500, 497)), BlockShape(1, (1,))]


def stored_at(bench: Bench, key: bytes, shard: int) -> tuple[int, Stored]:
    """The node that holds a shard of a key, and the record."""
    index = (shard + rotation_of(placement_group(key))) % STRIPE_SHARDS
    (stored,) = bench.twins[index].records[key].values()
    return index, stored


def report_of(bench: Bench, key: bytes, shard: int) -> CorruptShard:
    index, stored = stored_at(bench, key, shard)
    segments = len(stored.header.shape.segment_bytes)
    return CorruptShard(key, stored.header.digest, index, shard, stored.generation, segments, READ_AT)


@asynccontextmanager
async def mending(bench: Bench) -> AsyncIterator[Mender]:
    mender = Mender(bench.writer.nodes, bench.health, Codec(), bench.counters, bench.clock)
    background = Background()
    background.start("mend", mender.run)
    yield mender
    await background.close()


async def stored(shape: BlockShape = TINY, count: int = 2) -> tuple[Bench, Blocks]:
    bench = make_bench()
    blocks = make_blocks(count, shape=shape)
    await bench.put(blocks)
    return bench, blocks


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: str(shape.block_bytes))
@pytest.mark.parametrize("shard", [0, 5, 9, 10, 11])
async def test_a_corrupt_shard_comes_back_byte_for_byte(shard: int, shape: BlockShape) -> None:
    bench, blocks = await stored(shape)
    key = blocks.keys[1]
    report = report_of(bench, key, shard)
    _, damaged = stored_at(bench, key, shard)
    before = (damaged.raw_header, bytes(damaged.payload), damaged.slot_bytes)
    damaged.payload[0] ^= 1
    async with mending(bench) as mender:
        mender.report(report)
        await mender.settled()
    _, mended = stored_at(bench, key, shard)
    assert (mended.raw_header, bytes(mended.payload), mended.slot_bytes) == before
    assert mended.generation > report.generation
    assert bench.counts("node_mended") == (1,)
    (shards,) = sound_versions(bench.twins, key).values()
    assert len(shards) == 12


async def test_what_is_mended_was_used_when_it_was_read() -> None:
    bench, blocks = await stored()
    key = blocks.keys[0]
    _, damaged = stored_at(bench, key, 3)
    damaged.payload[5] ^= 128
    async with mending(bench) as mender:
        mender.report(report_of(bench, key, 3))
        await mender.settled()
    _, mended = stored_at(bench, key, 3)
    assert bench.counts("node_mended") == (1,)
    assert mended.stamp == READ_AT


async def test_nothing_is_asked_that_only_operators_may(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> ListPage:
        raise InvalidArgument("list is for operators only")

    bench, blocks = await stored()
    for node in bench.nodes:
        monkeypatch.setattr(node, "list", refuse)
    report = report_of(bench, blocks.keys[0], 3)
    stored_at(bench, blocks.keys[0], 3)[1].payload[0] ^= 1
    async with mending(bench) as mender:
        mender.report(report)
        await mender.settled()
    assert bench.counts("node_mended") == (1,)


async def test_a_report_on_a_sound_record_changes_nothing() -> None:
    bench, blocks = await stored()
    before = {index: sorted(twin.slots) for index, twin in enumerate(bench.twins)}
    async with mending(bench) as mender:
        for shard in range(12):
            mender.report(report_of(bench, blocks.keys[0], shard))
        await mender.settled()
    assert {index: sorted(twin.slots) for index, twin in enumerate(bench.twins)} == before
    assert bench.counts("node_mended") == (0,)


async def test_with_fewer_than_ten_sound_shards_nothing_is_written(caplog: pytest.LogCaptureFixture) -> None:
    bench, blocks = await stored()
    key = blocks.keys[0]
    for shard in (0, 1, 2):
        _, damaged = stored_at(bench, key, shard)
        damaged.payload[0] ^= 1
    async with mending(bench) as mender:
        mender.report(report_of(bench, key, 0))
        await mender.settled()
    assert "9 sound shards" in caplog.text
    assert bench.counts("node_mended") == (0,)
    assert not readable(bench.twins, key)


async def test_a_second_damaged_source_is_passed_over() -> None:
    bench, blocks = await stored()
    key = blocks.keys[0]
    for shard in (4, 7):
        _, damaged = stored_at(bench, key, shard)
        damaged.payload[-1] ^= 1
    async with mending(bench) as mender:
        mender.report(report_of(bench, key, 4))
        mender.report(report_of(bench, key, 7))
        await mender.settled()
    assert bench.counts("node_mended") == (2,)
    (shards,) = sound_versions(bench.twins, key).values()
    assert len(shards) == 12


@pytest.mark.parametrize("place", [0, 1])
async def test_only_shards_of_the_damaged_version_are_used(place: int) -> None:
    bench = make_bench()
    first = make_blocks(1, seed=1)
    second = make_blocks(1, seed=2, keys=first.keys)
    await asyncio.gather(bench.put(first), bench.put(second))
    (key,) = first.keys
    digest = sorted(readable(bench.twins, key))[place]
    index = (6 + rotation_of(placement_group(key))) % STRIPE_SHARDS
    damaged = bench.twins[index].records[key][digest]
    damaged.payload[0] ^= 1
    async with mending(bench) as mender:
        segments = len(damaged.header.shape.segment_bytes)
        mender.report(CorruptShard(key, digest, index, 6, damaged.generation, segments, READ_AT))
        await mender.settled()
    assert bench.counts("node_mended") == (1,)
    assert {len(shards) for shards in sound_versions(bench.twins, key).values()} == {12}


async def test_sources_that_do_not_make_a_sound_block_are_not_trusted(caplog: pytest.LogCaptureFixture) -> None:
    """Ten shards that each agree with their own header, one of them of other bytes: bad memory on the way in."""
    bench, blocks = await stored()
    key = blocks.keys[0]
    _, forged = stored_at(bench, key, 2)
    other = bytearray(forged.payload)
    other[0] ^= 1
    batch = mend_module.batch_of(forged.header, 2, np.frombuffer(bytes(other), np.uint8), 0)
    forged.payload[:] = other
    forged.raw_header = batch.headers[0].tobytes()
    _, damaged = stored_at(bench, key, 3)
    damaged.payload[0] ^= 1
    index, lost = stored_at(bench, key, 11)
    del bench.twins[index].records[key], bench.twins[index].slots[lost.location]
    report = report_of(bench, key, 3)
    async with mending(bench) as mender:
        mender.report(report)
        await mender.settled()
    assert "do not make a sound block" in caplog.text
    assert bench.counts("node_mended") == (0,)


async def test_reports_are_bounded_and_a_shard_is_queued_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mend_module, "MEND_QUEUE", 3)
    bench, blocks = await stored(count=5)
    for key in blocks.keys:
        stored_at(bench, key, 1)[1].payload[0] ^= 1
    async with mending(bench) as mender:
        for key in blocks.keys:
            mender.report(report_of(bench, key, 1))
            mender.report(report_of(bench, key, 1))
        await mender.settled()
        assert bench.counts("node_mended") == (3,)
        for key in blocks.keys[3:]:
            mender.report(report_of(bench, key, 1))
        await mender.settled()
    assert bench.counts("node_mended") == (5,)


async def test_a_node_that_is_away_is_logged_and_the_next_report_is_mended(caplog: pytest.LogCaptureFixture) -> None:
    bench, blocks = await stored()
    index, damaged = stored_at(bench, blocks.keys[0], 8)
    damaged.payload[0] ^= 1
    other = report_of(bench, blocks.keys[1], 2)
    stored_at(bench, blocks.keys[1], 2)[1].payload[0] ^= 1
    bench.twins[index].down = "unplugged"
    async with mending(bench) as mender:
        mender.report(report_of(bench, blocks.keys[0], 8))
        mender.report(other)
        await mender.settled()
    assert "was not mended: node" in caplog.text
    assert bench.counts("node_mended") == (1 if other.node_index != index else 0,)


async def test_a_background_task_that_dies_is_logged_and_started_again(caplog: pytest.LogCaptureFixture) -> None:
    background = Background(restart_ms=1)
    lives: list[int] = []
    alive = asyncio.Event()

    async def work() -> None:
        lives.append(len(lives))
        if len(lives) < 3:
            raise RuntimeError("a bug")
        alive.set()
        await asyncio.Event().wait()

    with caplog.at_level(logging.ERROR):
        background.start("worker", work)
        await asyncio.wait_for(alive.wait(), 5)
    assert background.restarts == 2
    assert caplog.text.count("background task worker died") == 2
    await background.close()
