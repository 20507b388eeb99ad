"""The hit policy against every number of golden.json, and its faults 49 and 51."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.errors import InvalidArgument
from kvstore.hit import (
    HitPlan,
    plan_hit,
    replay_cost,
    snapshot_after_decode,
    snapshot_after_prefill,
    snapshot_for_regeneration,
    storable_after_decode,
    storable_after_prefill,
    tokens_to_load,
)

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[2] / "data" / "golden.json").read_text())


@pytest.mark.parametrize("case", GOLDEN["hit_cases"], ids=lambda case: f"{case['length']}-{case['blocks_present']}")
def test_plan_of_a_golden_case(case: dict[str, Any]) -> None:
    replay = None if case["replay"] is None else tuple(case["replay"])
    assert plan_hit(case["length"], case["blocks_present"], case["snapshots"]) == HitPlan(
        case["matched"], case["hit"], replay, case["suffix"]
    )


def test_golden_snapshot_positions() -> None:
    positions = GOLDEN["snapshot_positions"]
    for length, position in positions["after_prefill"]:
        assert snapshot_after_prefill(length) == position
    for length, position in positions["for_regeneration"]:
        assert snapshot_for_regeneration(length) == position
    for case in positions["after_decode"]:
        assert snapshot_after_decode(case["prompt"], case["final"]) == case["position"]


def test_golden_storable_blocks() -> None:
    for length, blocks in GOLDEN["storable_blocks"]["after_prefill"]:
        assert storable_after_prefill(length) == blocks
    for length, blocks in GOLDEN["storable_blocks"]["after_decode"]:
        assert storable_after_decode(length) == blocks


@pytest.mark.parametrize("case", GOLDEN["replay_cost_layer_tokens"], ids=lambda case: f"keep-{case['keep']}")
def test_golden_replay_cost(case: dict[str, Any]) -> None:
    cost = replay_cost(case["suffix"], case["keep"])
    assert (cost.snapshot, cost.bounded, cost.exact) == (case["snapshot"], case["bounded"], case["exact"])


def test_last_sampled_token_has_no_kv_yet() -> None:
    # Fault 49: 100 of prompt and 28 sampled are 128 tokens, of which 127 have KV; one more step completes the block.
    assert storable_after_decode(100 + 28) == 0
    assert storable_after_decode(100 + 29) == 1
    assert storable_after_decode(0) == 0


def test_nothing_is_loaded_when_the_engine_has_more_than_the_store() -> None:
    # Fault 51.
    assert tokens_to_load(256, 0) == 0
    assert tokens_to_load(256, 128) == 0
    assert tokens_to_load(128, 256) == 128
    assert tokens_to_load(0, 256) == 256


def test_snapshot_at_a_block_boundary_of_the_prompt_counts_as_crossed_in_decode() -> None:
    # A prompt of 128 tokens stores no snapshot at prefill; with one sampled token its KV has 128.
    assert snapshot_after_prefill(128) == 0
    assert snapshot_after_decode(128, 128) is None
    assert snapshot_after_decode(128, 129) == 128


def test_snapshots_at_odd_negative_or_zero_positions_are_passed_over() -> None:
    assert plan_hit(390, 3, [-128, 0, 1, 127, 200, 255]) == HitPlan(256, 128, (128, 256), 262)


@pytest.mark.parametrize("arguments", [(-1, 0), (1, -1)])
def test_negative_input_is_refused(arguments: tuple[int, int]) -> None:
    with pytest.raises(InvalidArgument, match="must not be negative"):
        plan_hit(*arguments, [])


def test_decode_that_shrinks_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="final is 9, below prompt 10"):
        snapshot_after_decode(10, 9)


@given(
    length=st.integers(0, 5_000),
    present=st.integers(0, 60),
    snapshots=st.lists(st.integers(0, 40).map(lambda block: block * 128), max_size=6),
)
def test_a_plan_keeps_its_invariants(length: int, present: int, snapshots: list[int]) -> None:
    plan = plan_hit(length, present, snapshots)
    assert plan.suffix == length - plan.hit
    assert 0 <= plan.hit <= plan.matched <= min(present * 128, max(0, length - 134))
    assert plan.matched % 128 == plan.hit % 128 == 0
    assert plan.matched - plan.hit <= 128
    if plan.matched == 0:
        assert (plan.hit, plan.replay) == (0, None)
    elif plan.replay is None:
        assert plan.hit in snapshots
        assert plan.hit > 0
    else:
        assert plan.replay == (plan.matched - 128, plan.matched)
        assert not set(snapshots) & {max(1, plan.matched - 128), plan.matched}
    # One more token could not be matched: either the store ends there, or the input does.
    assert plan.matched == present * 128 or plan.matched + 128 > length - 134
