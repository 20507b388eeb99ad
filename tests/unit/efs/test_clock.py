"""Deadlines, access stamps and ages on a clock that is moved by hand."""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.clock import Arrivals, Deadline, SystemClock, stamp_of
from efs.errors import InvalidArgument
from efs.limits import HOLLOW_GRACE_MS, MAX_DEADLINE_MS
from tests.support.clock import FakeClock


def test_a_stamp_is_the_number_of_the_second() -> None:
    assert [stamp_of(seconds) for seconds in (0, 0.999, 1, 59.999, 60)] == [0, 0, 1, 59, 60]
    assert stamp_of(1_900_000_000.5) == 1_900_000_000


def test_a_deadline_runs_out_with_the_monotonic_clock_only() -> None:
    clock = FakeClock()
    deadline = Deadline.after_ms(clock, 250)
    assert deadline.left() == pytest.approx(0.25)
    clock.set_wall(clock.wall() + 3600)
    assert not deadline.passed()
    clock.advance(0.2)
    assert deadline.left() == pytest.approx(0.05)
    clock.advance(0.1)
    assert deadline.passed()
    assert deadline.left() == 0.0


@pytest.mark.parametrize("deadline_ms", [0, -1, MAX_DEADLINE_MS + 1, math.nan, math.inf])
def test_a_deadline_that_is_not_one_is_refused(deadline_ms: float) -> None:
    with pytest.raises(InvalidArgument, match="deadline_ms is"):
        Deadline.after_ms(FakeClock(), deadline_ms)


def test_the_longest_deadline_is_accepted() -> None:
    assert Deadline.after_ms(FakeClock(), MAX_DEADLINE_MS).left() == pytest.approx(MAX_DEADLINE_MS / 1000)


def test_the_systems_clock_reads_the_systems_time() -> None:
    clock = SystemClock()
    before, after = time.monotonic(), clock.monotonic()
    assert before <= after <= time.monotonic()
    assert abs(clock.wall() - time.time()) < 5


GRACE_S = HOLLOW_GRACE_MS / 1000


def test_an_arrival_ages_with_the_clock() -> None:
    clock = FakeClock()
    arrivals = Arrivals(clock)
    arrived = arrivals.now_ms()
    assert arrived == int(clock.wall() * 1000)
    assert arrivals.at_least(arrived, 0)
    assert not arrivals.at_least(arrived, 1_000)
    clock.advance(1)
    assert arrivals.at_least(arrived, 1_000)
    assert not arrivals.at_least(arrived, 1_100)


@given(st.lists(st.tuples(st.floats(0, GRACE_S), st.floats(-1e6, 1e6), st.booleans()), max_size=12), st.data())
def test_whatever_happens_to_the_wall_clock_nothing_is_older_than_it_can_be(
    steps: list[tuple[float, float, bool]], data: st.DataObject
) -> None:
    clock = FakeClock(wall=1e9)
    arrivals = Arrivals(clock)
    arrived: list[tuple[float, int]] = []
    for seconds, jump, arrives in steps:
        clock.advance(seconds)
        clock.set_wall(clock.wall() + jump)
        if arrives:
            arrived.append((clock.monotonic(), arrivals.now_ms()))
    age_ms = data.draw(st.integers(1, HOLLOW_GRACE_MS))
    for at, arrival_ms in arrived:
        if clock.monotonic() - at < age_ms / 1000 - 0.001:
            assert not arrivals.at_least(arrival_ms, age_ms)


def test_a_wall_clock_set_forward_counts_once_everything_that_arrived_before_is_old_enough() -> None:
    clock = FakeClock()
    arrivals = Arrivals(clock)
    arrived = arrivals.now_ms()
    clock.set_wall(clock.wall() + 3600)
    later = arrivals.now_ms()
    assert not arrivals.at_least(arrived, HOLLOW_GRACE_MS)
    for _ in range(4):
        clock.advance(GRACE_S)
        arrivals.now_ms()
    assert arrivals.at_least(later, HOLLOW_GRACE_MS)


def test_a_wall_clock_set_back_makes_arrivals_younger_until_it_has_caught_up() -> None:
    clock = FakeClock()
    arrivals = Arrivals(clock)
    arrived = arrivals.now_ms()
    clock.set_wall(clock.wall() - 3600)
    clock.advance(1800)
    assert not arrivals.at_least(arrived, 1)
    clock.advance(1800 + GRACE_S)
    assert arrivals.at_least(arrived, HOLLOW_GRACE_MS)


@pytest.mark.parametrize("age_ms", [-1, HOLLOW_GRACE_MS + 1])
def test_an_age_that_the_clocks_were_not_watched_for_is_refused(age_ms: int) -> None:
    with pytest.raises(InvalidArgument, match="age_ms is"):
        Arrivals(FakeClock()).at_least(0, age_ms)
