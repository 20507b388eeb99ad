"""The schedule of a chaos run: a function of its seed, two nodes damaged at most, every kind in the first deck."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.chaosrig.plan import ALONE, EVERY_KIND_SECONDS, HOLD_S, KINDS, THIRD_KINDS, plan


def test_a_seed_gives_the_same_schedule_every_time_and_another_seed_another_one() -> None:
    assert plan(7, 600) == plan(7, 600)
    assert plan(7, 600) != plan(8, 600)


def test_a_longer_run_begins_as_a_shorter_one_of_the_same_seed() -> None:
    short = plan(7, 600)
    assert plan(7, 3600)[: len(short)] == short


@pytest.mark.parametrize("seed", range(40))
def test_every_kind_is_in_the_first_deck_of_two_minutes(seed: int) -> None:
    episodes = plan(seed, EVERY_KIND_SECONDS)
    first = Counter(kind for episode in episodes if episode.first_deck for kind in episode.kinds)
    assert first == Counter(KINDS)


@pytest.mark.parametrize("seed", range(40))
def test_no_more_than_two_nodes_are_damaged_at_once_except_in_a_third_failure(seed: int) -> None:
    thirds = 0
    for episode in plan(seed, 1800):
        assert len({damage.node for damage in episode.damages}) == len(episode.damages)
        if "third" in episode.kinds:
            thirds += 1
            assert episode.kinds == ("third",)
            assert len(episode.nodes) == 3
            assert {damage.kind for damage in episode.damages} <= set(THIRD_KINDS)
        else:
            assert len(episode.nodes) <= 2
            assert len(episode.kinds) == 1 or not set(ALONE) & set(episode.kinds)
        assert HOLD_S[0] <= episode.hold_s <= HOLD_S[1]
        assert bool(episode.kills) == ("kill" in episode.kinds)
    assert thirds


def test_an_hour_has_more_episodes_than_a_minute_and_none_of_a_minute_must_be_done() -> None:
    assert len(plan(1, 3600)) > 20 * len(plan(1, 60)) > 0
    assert not any(episode.first_deck for episode in plan(1, 60))
