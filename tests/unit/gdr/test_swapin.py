"""Swap-in: what arrives, what a refusal, a short segment and an abort leave behind."""

from __future__ import annotations

import random

import pytest

from gdr.errors import InvalidEngineArgument, SwapInStalled
from gdr.pinned import RegionState
from gdr.swapin import Gate
from tests.support.swaprig import SEGMENTS, WAIT_MS, SwapRig, same

BLOCKS = 4


def all_free(rig: SwapRig) -> bool:
    rig.device.run_all()
    free = rig.pool.counts()[RegionState.FREE] == len(rig.pool._regions)
    return free and rig.pages.free == rig.pages.pages and rig.device.pending() == 0


@pytest.mark.parametrize("staged", [True, False])
@pytest.mark.parametrize("piece_blocks", [1, 3, 100])
def test_all_bytes_arrive_whatever_the_order_of_the_streams(staged: bool, piece_blocks: int) -> None:
    for seed in range(20):
        rig = SwapRig(order=random.Random(seed), staged=staged, piece_blocks=piece_blocks)
        transfer, expected, target = rig.begin(BLOCKS, seed)
        transfer.settle_rest(BLOCKS)
        assert transfer.wait_finished(WAIT_MS)
        rig.device.run_all()
        assert transfer.blocks == BLOCKS
        assert same(rig.now(target, BLOCKS), expected)
        rig.pages.drop(target.pages)
        assert all_free(rig)
        assert rig.swap_in.counters.get("copied_bytes") == BLOCKS * sum(SEGMENTS)
        rig.close()


@pytest.mark.parametrize("kind", ["copy_in", "scatter"])
@pytest.mark.parametrize("segment", range(len(SEGMENTS)))
@pytest.mark.parametrize("block", range(BLOCKS))
def test_a_refused_copy_leaves_no_block_at_or_behind_it_loaded(kind: str, segment: int, block: int) -> None:
    rig = SwapRig(order=random.Random(block))
    rig.device.refuse(kind, {segment * BLOCKS + block})
    transfer, expected, target = rig.begin(BLOCKS, seed=1)
    transfer.settle_rest(BLOCKS)
    assert transfer.wait_finished(WAIT_MS)
    assert rig.device.refused[kind] == 1
    assert transfer.blocks == block
    assert transfer.failure is not None
    for position, gate in enumerate(transfer.gates):
        promised = gate.wait(rig.compute, 0)
        assert promised == (BLOCKS if position < segment else block)
    rig.device.run_all()
    assert same(rig.now(target, block), [part[:block] for part in expected])
    rig.pages.drop(target.pages)
    assert all_free(rig)
    rig.close()


@pytest.mark.parametrize("segment", range(len(SEGMENTS)))
@pytest.mark.parametrize("blocks", range(BLOCKS))
def test_a_segment_that_arrives_short_shortens_everything_behind_it(segment: int, blocks: int) -> None:
    rig = SwapRig()
    transfer, expected, target = rig.begin(BLOCKS, seed=1)
    for position in range(len(SEGMENTS)):
        transfer.settle(position, BLOCKS if position != segment else blocks)
    assert transfer.wait_finished(WAIT_MS)
    assert [gate.wait(rig.compute, 0) for gate in transfer.gates] == [
        BLOCKS if position < segment else blocks for position in range(len(SEGMENTS))
    ]
    assert transfer.blocks == blocks
    rig.device.run_all()
    assert same(rig.now(target, blocks), [part[:blocks] for part in expected])
    rig.pages.drop(target.pages)
    assert all_free(rig)
    rig.close()


@pytest.mark.parametrize("settled", range(len(SEGMENTS) + 1))
def test_an_abort_between_any_two_segments_opens_all_gates_and_leaves_nothing(settled: int) -> None:
    rig = SwapRig()
    transfer, _, target = rig.begin(BLOCKS, seed=1)
    for segment in range(settled):
        transfer.settle(segment, BLOCKS)
    if settled:
        transfer.gates[settled - 1].wait(rig.compute, WAIT_MS)
    transfer.abort()
    assert all(gate.is_open for gate in transfer.gates)
    assert transfer.blocks == 0
    rig.pages.drop(target.pages)
    assert settled == len(SEGMENTS) or not transfer.finished
    transfer.settle_rest(0)
    assert transfer.wait_finished(WAIT_MS)
    assert all_free(rig)
    rig.close()


def test_a_forward_pass_is_not_held_up_by_segments_that_it_does_not_need_yet() -> None:
    rig = SwapRig()
    transfer, _, _ = rig.begin(BLOCKS, seed=1)
    transfer.settle(0, BLOCKS)
    assert transfer.gates[0].wait(rig.compute, WAIT_MS) == BLOCKS
    assert not transfer.gates[1].is_open
    with pytest.raises(SwapInStalled, match="not settled within 1 ms"):
        transfer.gates[1].wait(rig.compute, 1.0)
    transfer.settle_rest(BLOCKS)
    assert transfer.gates[2].wait(rig.compute, WAIT_MS) == BLOCKS
    assert transfer.wait_finished(WAIT_MS)
    rig.close()


def test_the_thread_outlives_a_defect_in_one_transfer(caplog: pytest.LogCaptureFixture) -> None:
    rig = SwapRig(regions=2, pages=8)
    broken, _, target = rig.begin(BLOCKS, seed=1)
    broken.rows = "not rows"  # type: ignore[assignment]
    broken.settle_rest(BLOCKS)
    assert broken.wait_finished(WAIT_MS)
    assert broken.blocks == 0
    assert "swap-in of segment 0 failed" in caplog.text
    whole, expected, into = rig.begin(BLOCKS, seed=2)
    whole.settle_rest(BLOCKS)
    assert whole.wait_finished(WAIT_MS)
    rig.device.run_all()
    assert same(rig.now(into, BLOCKS), expected)
    rig.pages.drop(target.pages)
    rig.pages.drop(into.pages)
    assert all_free(rig)
    rig.close()


def test_a_gate_opens_once() -> None:
    rig = SwapRig()
    gate = Gate()
    gate.open(3, None)
    gate.open(9, None)
    assert gate.wait(rig.compute, 0) == 3
    rig.close()


def test_segments_settled_out_of_order_or_beyond_the_request_are_refused() -> None:
    rig = SwapRig()
    transfer, _, _ = rig.begin(BLOCKS, seed=1)
    with pytest.raises(InvalidEngineArgument, match="segment 1 settled out of order, expected 0"):
        transfer.settle(1, BLOCKS)
    with pytest.raises(InvalidEngineArgument, match="5 blocks settled of 4"):
        transfer.settle(0, BLOCKS + 1)
    transfer.settle_rest(0)
    with pytest.raises(InvalidEngineArgument, match="segment 3 settled out of order"):
        transfer.settle(3, 0)
    assert transfer.wait_finished(WAIT_MS)
    rig.close()
