"""Expectations of the demonstration: numbers that follow from keys, and every way of being wrong is noticed."""

from __future__ import annotations

from dataclasses import replace
from hashlib import blake2b

import pytest

from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.placement import node_of_shard, placement_group, rotation_of
from efs.types import PutReport
from kvstore.demo.messages import TurnResult
from kvstore.demo.steps import Expected, differences, flips, lost_data_blocks, nodes_to_remove, whole_blocks
from tests.demo.records import BLOCK_BYTES, RESUMED, RIGHT, with_get

ANSWER = [5, 6, 7]
KEYS = [blake2b(bytes([number // 4]), digest_size=2).digest() + bytes(29) + bytes([number]) for number in range(40)]


def test_a_step_that_came_out_as_expected_has_no_differences() -> None:
    assert differences(RIGHT, RESUMED, ANSWER, BLOCK_BYTES) == ()


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (with_get(blocks=2), "blocks loaded: 2, must be 3"),
        (with_get(ok=[True, True, False]), "blocks verified: 2, must be 3"),
        (with_get(corrupt=1), "corrupt shards: 1, must be 0"),
        (with_get(bytes=2_999), "bytes delivered: 2999, must be 3000"),
        (replace(RESUMED, get=None), "blocks loaded: 0, must be 3"),
        (replace(RESUMED, prefilled_tokens=17), "tokens prefilled: 17, must be 16"),
        (replace(RESUMED, mended=1), "shards mended: 1, must be 0"),
        (replace(RESUMED, put=PutReport(1, 0, 0, 0)), "blocks acknowledged: 1, must be 0"),
        (replace(RESUMED, put=PutReport(0, 1, 0, 0)), "blocks already there: 1, must be 0"),
        (replace(RESUMED, put=PutReport(0, 0, 1, 0)), "blocks not stored: 1, must be 0"),
        (replace(RESUMED, answer=[5, 6, 8]), "differs from the run without a store at token 2"),
        (replace(RESUMED, answer=[5, 6]), "differs from the run without a store at token 2"),
    ],
)
def test_each_way_of_being_wrong_is_named(found: TurnResult, named: str) -> None:
    assert any(named in line for line in differences(RIGHT, found, ANSWER, BLOCK_BYTES))


@pytest.mark.parametrize("field", ["blocks", "rebuilt", "corrupt", "prefilled_tokens", "acked", "failed", "mended"])
def test_each_expectation_is_compared(field: str) -> None:
    other: Expected = replace(RIGHT, **{field: getattr(RIGHT, field) + 1})
    assert differences(other, RESUMED, ANSWER, BLOCK_BYTES)


def test_more_may_be_rebuilt_than_was_lost_but_not_less() -> None:
    assert differences(RIGHT, with_get(rebuilt=3), ANSWER, BLOCK_BYTES) == ()
    two_lost = replace(RIGHT, rebuilt=2)
    assert differences(two_lost, with_get(rebuilt=2), ANSWER, BLOCK_BYTES) == ()
    assert differences(two_lost, with_get(rebuilt=1), ANSWER, BLOCK_BYTES) == ("blocks rebuilt: 1, must be 2 or more",)


def test_the_negative_control_must_change_the_answer() -> None:
    control = replace(RIGHT, same_answer=False)
    assert differences(control, RESUMED, ANSWER, BLOCK_BYTES) == ("the answer does not depend on the fetched bytes",)
    assert differences(control, replace(RESUMED, answer=[1]), ANSWER, BLOCK_BYTES) == ()


def test_an_empty_answer_proves_nothing() -> None:
    empty = replace(RESUMED, answer=[])
    assert differences(RIGHT, empty, [], BLOCK_BYTES) != ()


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 0), (128, 0), (129, 1), (256, 1), (257, 2)])
def test_one_token_stays_to_compute(tokens: int, blocks: int) -> None:
    assert whole_blocks(tokens, 128) == blocks


@pytest.mark.parametrize("gone", [(), (0,), (0, 1), (3, 9), (2, 5, 11)])
def test_blocks_that_lose_a_data_shard_are_counted_from_their_keys(gone: tuple[int, ...]) -> None:
    by_hand = 0
    for key in KEYS:
        data_nodes = {node_of_shard(shard, rotation_of(placement_group(key))) for shard in range(DATA_SHARDS)}
        by_hand += bool(data_nodes & set(gone))
    assert lost_data_blocks(KEYS, gone) == by_hand


@pytest.mark.parametrize("count", [2, 3])
def test_removed_nodes_cost_the_first_block_data(count: int) -> None:
    nodes = nodes_to_remove(KEYS, count)
    assert len(set(nodes)) == count
    assert set(nodes) <= set(range(STRIPE_SHARDS))
    assert lost_data_blocks(KEYS[:1], nodes) == 1


@pytest.mark.parametrize("start", range(8))
def test_flips_hit_data_shards_of_two_blocks_on_two_nodes(start: int) -> None:
    keys = KEYS[start : start + 9]
    first, second = flips(keys)
    assert first.block != second.block
    assert first.node != second.node
    for flip in (first, second):
        assert flip.shard < DATA_SHARDS
        assert flip.node == node_of_shard(flip.shard, rotation_of(placement_group(keys[flip.block])))
