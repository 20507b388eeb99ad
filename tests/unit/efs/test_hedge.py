"""When a unit waits, asks the spare, rebuilds or gives up."""

from __future__ import annotations

import numpy as np
import pytest

from efs.hedge import Budget, Lags, Shard, Unit
from efs.limits import FANOUT, INITIAL_LAG_GRACE_MS, MAX_KEYS_PER_CALL, MIN_LAG_GRACE_MS

GRACE = INITIAL_LAG_GRACE_MS / 1000


def asked_unit(rows: int = 3, rotation: int = 4) -> Unit:
    """A unit whose eleven first shards are on their way; the spare is shard 11."""
    unit = Unit(0, rows, rotation, spare=11)
    for shard in unit.first_asked:
        unit.state[shard] = Shard.PENDING
    return unit


def arrive(unit: Unit, shards: range | list[int], now: float) -> None:
    for shard in shards:
        unit.state[shard] = Shard.HAVE
        unit.note_arrival(now)


def settled_lags(slow_nodes: dict[int, float], now: float) -> Lags:
    lags = Lags()
    for node in range(12):
        lags.observe(node, slow_nodes.get(node, 0.0), now)
    return lags


def test_eleven_shards_are_asked_first_and_not_the_spare() -> None:
    assert Unit(0, 1, 0, spare=10).first_asked == (0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 11)


def test_all_data_in_hand_asks_for_nothing() -> None:
    unit = asked_unit()
    arrive(unit, range(10), 1.0)
    decision = unit.decide(1.0, Lags())
    assert not decision.rebuild.any()
    assert not decision.dead.any()
    assert decision.ask == ()


def test_lagging_data_shard_is_waited_for_during_the_grace_then_rebuilt() -> None:
    unit = asked_unit()
    arrive(unit, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10], 1.0)
    before = unit.decide(1.0 + GRACE / 2, Lags())
    assert not before.rebuild.any()
    assert before.wake_at == pytest.approx(1.0 + GRACE)
    after = unit.decide(1.0 + GRACE, Lags())
    assert after.rebuild.all()
    assert after.ask == ()


def test_lost_data_shard_is_rebuilt_at_once_when_ten_are_in() -> None:
    unit = asked_unit()
    unit.state[3] = Shard.LOST
    arrive(unit, [0, 1, 2, 4, 5, 6, 7, 8, 9, 10], 1.0)
    assert unit.decide(1.0, Lags()).rebuild.all()


def test_shard_of_a_node_known_to_be_slow_is_not_waited_for() -> None:
    unit = asked_unit(rotation=4)
    lags = settled_lags({(9 + 4) % 12: 0.2}, now=1.0)
    arrive(unit, [0, 1, 2, 3, 4, 5, 6, 7, 8, 10], 1.0)
    assert unit.decide(1.0, lags).rebuild.all()


def test_two_lost_shards_make_the_spare_required() -> None:
    unit = asked_unit()
    unit.state[3] = unit.state[7] = Shard.LOST
    decision = unit.decide(1.0, Lags())
    assert decision.ask == (11,)
    assert not decision.speculative


def test_one_lost_and_one_lagging_ask_the_spare_speculatively() -> None:
    unit = asked_unit()
    unit.state[3] = Shard.LOST
    arrive(unit, [0, 1, 2, 4, 5, 6, 7, 8, 10], 1.0)
    assert unit.decide(1.0, Lags()).ask == ()
    decision = unit.decide(1.0 + GRACE, Lags())
    assert decision.ask == (11,)
    assert decision.speculative


def test_two_hung_nodes_ask_the_spare_after_the_grace_and_rebuild_with_it() -> None:
    unit = asked_unit()
    arrive(unit, range(2, 11), 1.0)
    assert unit.decide(1.0, Lags()).ask == ()
    decision = unit.decide(1.0 + GRACE, Lags())
    assert decision.ask == (11,)
    assert decision.speculative
    arrive(unit, [11], 1.0 + GRACE)
    assert unit.decide(1.0 + GRACE, Lags()).rebuild.all()


def test_three_lost_shards_are_dead_and_only_in_their_rows() -> None:
    unit = asked_unit(rows=3)
    unit.state[11] = Shard.HAVE
    unit.state[[1, 5, 9], 1] = Shard.LOST
    decision = unit.decide(1.0, Lags())
    assert decision.dead.tolist() == [False, True, False]


def test_closed_rows_are_left_alone() -> None:
    unit = asked_unit(rows=2)
    unit.open[:] = [False, True]
    unit.state[[1, 5, 9, 11]] = Shard.LOST
    assert unit.decide(1.0, Lags()).dead.tolist() == [False, True]


def test_budget_allows_a_tenth_of_what_was_asked() -> None:
    budget = Budget()
    budget.earn(700)
    assert not budget.spend(71)
    assert budget.spend(70)
    assert not budget.spend(1)


def test_the_largest_fetch_earns_the_spare_of_each_of_its_blocks() -> None:
    budget = Budget()
    budget.earn(FANOUT * MAX_KEYS_PER_CALL)
    assert budget.spend(MAX_KEYS_PER_CALL)
    budget.earn(100 * FANOUT * MAX_KEYS_PER_CALL)
    assert not budget.spend(2 * MAX_KEYS_PER_CALL)


def test_budget_holds_when_every_node_is_slow() -> None:
    budget = Budget()
    spent = 0
    for _ in range(1000):
        budget.earn(11)
        spent += budget.spend(1)
    assert spent <= 0.1 * 11_000


def test_first_grace_is_the_initial_one_and_then_follows_the_usual_lag() -> None:
    lags = Lags()
    assert lags.grace(0.0) == GRACE
    for node in range(12):
        lags.observe(node, 0.004, 10.0)
    assert lags.grace(10.0) == pytest.approx(0.008)


def test_one_slow_node_does_not_stretch_the_grace_of_the_others() -> None:
    lags = settled_lags({2: 5.0}, now=1.0)
    assert lags.grace(1.0) == MIN_LAG_GRACE_MS / 1000
    assert np.flatnonzero(lags.slow(1.0)).tolist() == [2]


def test_slow_node_is_waited_for_again_after_its_lag_is_forgotten_or_it_answers() -> None:
    lags = settled_lags({2: 0.1}, now=1.0)
    assert not any(lags.slow(61.0))
    for _ in range(30):
        lags.observe(2, 0.0, 1.0)
    assert not any(lags.slow(1.0))
