"""Deadlines and access stamps on a clock that is moved by hand."""

from __future__ import annotations

import math
import time

import pytest

from efs.clock import Deadline, SystemClock, stamp_of
from efs.errors import InvalidArgument
from efs.limits import MAX_DEADLINE_MS
from tests.support.clock import FakeClock


def test_a_stamp_is_the_number_of_the_minute() -> None:
    assert [stamp_of(seconds) for seconds in (0, 59.999, 60, 119, 120)] == [0, 0, 1, 1, 2]
    assert stamp_of(1_900_000_000.5) == 31_666_666


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
