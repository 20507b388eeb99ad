"""How the locations of a table become spans: alike on both sides of a wire, so that nothing has to be sent about it."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from efs.contract import ABSENT


def cuts(locations: NDArray[np.int64], stretches: Sequence[tuple[int, int]]) -> list[list[tuple[int, int, int]]]:
    """For each [start, stop) of rows its neighbouring slots: (first row, first location, count) in row order. Rows that
    are ABSENT are left out."""
    absent = locations == ABSENT
    broken = (np.flatnonzero((np.diff(locations) != 1) | absent[:-1] | absent[1:]) + 1).tolist()
    found: list[list[tuple[int, int, int]]] = []
    for start, stop in stretches:
        edges = (start, *broken[bisect_right(broken, start) : bisect_left(broken, stop)], stop)
        places = locations[list(edges[:-1])].tolist()
        found.append([(first, location, last - first) for (first, last), location
                      in zip(pairwise(edges), places, strict=True) if location != ABSENT])
    return found
