"""Trace replay: the size of the store, the trace's clock, and shortened traces through real stores."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efs.clock import stamp_of
from efs.errors import InvalidArgument
from efs.extent import Geometry, SlotClass
from efs.index import ENTRY_BYTES
from efs.limits import MIN_EXTENTS_PER_NODE, STRIPE_SHARDS
from efs.nodedir import plan_node
from efs.shape import BlockShape
from efs.storeview import StoreView
from kvstore import replay as replay_module
from kvstore.config import SettingError
from kvstore.replay import START, ReplayFailed, TraceClock, Workload, payload, replay
from kvstore.replayplan import CHUNK_SHARE, StorePlan, kept_blocks, plan_for_blocks, plan_store
from kvstore.traces import TraceError
from tests.support.traces import AGENT


def geometry_of(plan: StorePlan) -> Geometry:
    return Geometry(plan.extent_bytes, SlotClass.of(BlockShape(plan.block_bytes, (plan.block_bytes,))))


# -- Sizes -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("blocks", [13, 65, 131, 262, 657, 1_650, 8_251, 16_503, 33_007, 82_517, 165_035])
def test_a_store_for_some_blocks_has_just_the_slots_that_these_need(blocks: int) -> None:
    plan = plan_for_blocks(blocks)
    node = plan_node(plan.capacity_bytes // STRIPE_SHARDS, plan.extent_bytes, plan.index_bytes)
    geometry = geometry_of(plan)
    assert node.extents * geometry.slots == plan.slots
    assert node.extents >= MIN_EXTENTS_PER_NODE
    assert abs(kept_blocks(plan.slots) - blocks) <= max(1, 0.005 * blocks)
    assert plan.index_bytes >= plan.slots * ENTRY_BYTES
    assert geometry.chunk_slots <= max(1, plan.slots // CHUNK_SHARE)
    assert plan.blocks == blocks


def test_a_store_of_many_blocks_has_chunks_like_those_of_a_large_model() -> None:
    large = Geometry(64 << 20, SlotClass.of(BlockShape(113_920, (113_920,))))
    assert geometry_of(plan_for_blocks(50_000)).chunk_slots == large.chunk_slots


def test_a_percentage_is_of_the_unique_blocks() -> None:
    assert plan_store("10%", 1_314) == plan_for_blocks(131)
    assert plan_store(" 2.5 % ", 1_000) == plan_for_blocks(25)
    assert plan_store("100%", 700) == plan_for_blocks(700)


@pytest.mark.parametrize(("text", "block_bytes"), [("64MiB", None), ("300 MB", 5_120), ("1GiB", 113_920)])
def test_a_size_is_the_raw_capacity_and_its_index_has_room_for_every_slot(text: str, block_bytes: int | None) -> None:
    plan = plan_store(text, 1, block_bytes)
    node = plan_node(plan.capacity_bytes // STRIPE_SHARDS, plan.extent_bytes, plan.index_bytes)
    assert plan.capacity_bytes in (64 << 20, 300_000_000, 1 << 30)
    assert node.extents * geometry_of(plan).slots == plan.slots
    assert plan.blocks == kept_blocks(plan.slots) > 0
    assert plan.index_bytes // ENTRY_BYTES >= plan.slots
    assert plan.index_bytes <= max(1 << 20, 1.1 * plan.slots * ENTRY_BYTES + (1 << 20))


@pytest.mark.parametrize(
    ("text", "error", "named"),
    [
        ("0%", InvalidArgument, "capacity is 0%, must be above 0 % and at most 100 %"),
        ("101%", InvalidArgument, "capacity is 101%"),
        ("0.1%", InvalidArgument, "capacity 0.1% of 700 unique blocks is less than one block"),
        ("-5%", SettingError, "capacity is '-5%'"),
        ("1e1%", SettingError, "capacity is '1e1%'"),
        ("ten", SettingError, "capacity is 'ten'"),
        ("10G", SettingError, "unknown unit 'G'"),
        ("1MiB", InvalidArgument, "the smallest capacity is"),
    ],
)
def test_a_capacity_that_means_nothing_is_named(text: str, error: type[Exception], named: str) -> None:
    with pytest.raises(error) as caught:
        plan_store(text, 700)
    assert named in str(caught.value)


def test_block_bytes_do_not_go_with_a_percentage() -> None:
    with pytest.raises(InvalidArgument, match="give them with a size only"):
        plan_store("10%", 700, 1_280)


# -- Trace and time --------------------------------------------------------------------------------------------------


def test_a_workload_is_the_first_requests_of_a_trace() -> None:
    whole, part = Workload.load(AGENT.path), Workload.load(AGENT.path, 50)
    assert (whole.unique_blocks, whole.asked_blocks, whole.input_tokens) == (1_314, 20_337, 2_629_813)
    assert part.requests == whole.requests[:50]
    assert part.name == "lmcache_agent_miniswe_blk128"
    assert part.seconds == (part.requests[49].timestamp_ms - part.requests[0].timestamp_ms) / 1000 > 60


def test_a_trace_without_a_full_block_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "short.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 100, "hash_ids": [1]}\n')
    with pytest.raises(TraceError, match=r"short\.jsonl: no request has a full block"):
        Workload.load(path)
    path.write_text("")
    with pytest.raises(TraceError, match="no request has a full block"):
        Workload.load(path)


def test_the_clock_follows_the_trace_and_never_goes_back() -> None:
    clock = TraceClock(stretch=2.0)
    assert clock.wall() == START
    clock.follow(30.0)
    assert stamp_of(clock.wall()) == stamp_of(START + 60.0)
    clock.follow(10.0)
    assert clock.wall() == START + 60.0
    assert clock.monotonic() != clock.wall()


def test_payloads_tell_blocks_apart() -> None:
    rows = payload(range(1_000), 640)
    assert rows.shape == (1_000, 640)
    assert len(np.unique(rows, axis=0)) == 1_000
    assert np.array_equal(payload([7], 640)[0], rows[7])
    assert payload([], 640).shape == (0, 640)


# -- Replays ---------------------------------------------------------------------------------------------------------


def write_trace(path: Path, chains: Sequence[Sequence[int]], seconds_apart: float = 60.0) -> Workload:
    """A trace of full 128-token blocks."""
    rows = [{"timestamp": number * seconds_apart * 1000, "input_length": 128 * len(ids) + 5, "hash_ids": list(ids)}
            for number, ids in enumerate([(999_990, 999_991), *chains])]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Workload.load(path)


def hottest_stamps(root: Path) -> list[int]:
    """The highest stamp on each node of a closed store."""
    with StoreView.open(str(root)) as store:
        return [max(int(view.stamps(extent, geometry).max()) for extent in range(view.config.plan.extents)
                    if (geometry := view.geometry(extent)) is not None) for view in store.views]


async def test_a_store_that_is_never_full_hits_like_an_infinite_cache(tmp_path: Path) -> None:
    workload = Workload.load(AGENT.path, 40)
    done: list[int] = []
    report = await replay(workload, plan_for_blocks(200), tmp_path / "store", capacity="200 blocks",
                          progress=done.append)
    assert report.token_hit_ratio == report.infinite_token_hit_ratio == report.lru_token_hit_ratio > 0.8
    assert report.block_hit_ratio == report.infinite_block_hit_ratio
    assert (report.evicted, report.failed, report.undelivered) == (0, 0, 0)
    assert report.acked == workload.unique_blocks
    assert done == list(range(1, 41))


@pytest.mark.parametrize("capacity", ["5%", "10%", "20%", "50%"])
async def test_the_agent_trace_hits_within_two_points_of_exact_lru(tmp_path: Path, capacity: str) -> None:
    workload = Workload.load(AGENT.path)
    report = await replay(workload, plan_store(capacity, workload.unique_blocks), tmp_path / "store", capacity=capacity)
    assert report.evicted > 0
    assert 0.5 < report.token_hit_ratio < report.infinite_token_hit_ratio
    assert abs(report.points_below_lru) <= 2


async def test_stamps_follow_the_time_of_the_trace(tmp_path: Path) -> None:
    workload = write_trace(tmp_path / "t.jsonl", [(1, 2), (3,), (1, 2)], seconds_apart=90.0)
    root = tmp_path / "store"
    report = await replay(workload, plan_for_blocks(50), root, capacity="50 blocks", stretch=10.0)
    assert report.stretch == 10.0
    assert report.block_hit_ratio == 2 / 7
    assert hottest_stamps(root) == [stamp_of(START + 3 * 90.0 * 10)] * STRIPE_SHARDS


async def test_a_wrong_byte_ends_the_replay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workload = write_trace(tmp_path / "t.jsonl", [(1, 2, 3), (4,), (1, 2, 3)])
    puts = 0

    def changing(blocks: Sequence[int], block_bytes: int) -> Any:
        nonlocal puts
        rows = payload(blocks, block_bytes)
        puts += 1
        if puts == 2:
            rows[1, 17] ^= 1
        return rows

    monkeypatch.setattr(replay_module, "payload", changing)
    with pytest.raises(ReplayFailed, match="wrong bytes were delivered as verified"):
        await replay(workload, plan_for_blocks(50), tmp_path / "store", capacity="50 blocks")
    assert puts == 4


@pytest.mark.parametrize("stretch", [0.0, -1.0, float("inf"), float("nan")])
async def test_a_stretch_that_means_nothing_is_refused(tmp_path: Path, stretch: float) -> None:
    workload = write_trace(tmp_path / "t.jsonl", [(1,)])
    with pytest.raises(InvalidArgument, match="stretch is"):
        await replay(workload, plan_for_blocks(50), tmp_path / "store", capacity="50 blocks", stretch=stretch)
    assert not (tmp_path / "store").exists()
