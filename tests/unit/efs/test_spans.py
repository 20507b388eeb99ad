"""Cutting a table's locations into spans: both sides of a wire must come to the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.contract import ABSENT
from efs.spans import cuts


def test_neighbouring_slots_are_one_span_and_stretches_are_kept_apart() -> None:
    locations = np.array([7, 8, 9, 20, 21, 5], np.int64)
    assert cuts(locations, [(0, 6)]) == [[(0, 7, 3), (3, 20, 2), (5, 5, 1)]]
    assert cuts(locations, [(4, 6), (0, 2), (2, 4)]) == [[(4, 21, 1), (5, 5, 1)], [(0, 7, 2)], [(2, 9, 1), (3, 20, 1)]]
    assert cuts(locations, []) == []


@pytest.mark.parametrize(("locations", "expected"), [
    ([ABSENT, 0, 1], [(1, 0, 2)]),
    ([ABSENT, ABSENT], []),
    ([4, ABSENT, 5], [(0, 4, 1), (2, 5, 1)]),
    ([0, ABSENT, 0], [(0, 0, 1), (2, 0, 1)]),
    ([3], [(0, 3, 1)]),
])
def test_rows_that_are_absent_are_left_out(locations: list[int], expected: list[tuple[int, int, int]]) -> None:
    assert cuts(np.array(locations, np.int64), [(0, len(locations))]) == [expected]


@given(st.lists(st.integers(ABSENT, 6), min_size=1, max_size=40), st.data())
def test_every_row_that_is_there_is_in_one_span_of_slots_that_are_its_own(locations: list[int],
                                                                        data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(locations) - 1))
    stop = data.draw(st.integers(start + 1, len(locations)))
    (found,) = cuts(np.array(locations, np.int64), [(start, stop)])
    rows = {row: location + row - first for first, location, count in found for row in range(first, first + count)}
    assert rows == {row: locations[row] for row in range(start, stop) if locations[row] != ABSENT}
    for (first, location, count), (following, other, _) in pairwise(found):
        assert (first + count, location + count) != (following, other), "two spans that are one"
