"""How warm records are, and whether eviction explains that a node lacks one. For fsck.

A node counts the latest stamp of anything that it has evicted, or refused because it would have had to evict something
hotter (`node_evicted_stamp`, which only goes up). A version that was last used then or earlier may have been evicted
there, a warmer one can not. A put's records carry the stamp of its beginning and arrive up to MAX_DEADLINE_MS later,
so that much is allowed for.

A version is as warm as the latest stamp of its records, and at least as warm as the first of them to arrive, whatever
the stamp files say, which reach the disk late. Not as the last: repair brings shards back long after their time.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.extent import Geometry, extent_of, slot_of
from efs.limits import MAX_DEADLINE_MS, STAMP_SECONDS
from efs.nodeview import NodeView

SLACK: Final = math.ceil(MAX_DEADLINE_MS / 1000 / STAMP_SECONDS) + 1
"""In units of stamps."""
STAMP_FILES_KEPT: Final = 256
STAMP_MS: Final = STAMP_SECONDS * 1000


class Warmth:
    """Of all nodes that can be read."""

    def __init__(self) -> None:
        self._until: dict[int, int] = {}
        self._stamps: OrderedDict[tuple[int, int], NDArray[np.uint32]] = OrderedDict()

    def look(self, views: Iterable[NodeView]) -> None:
        """Read the counters. A node counts before its index changes: whoever looks after having read an index knows of
        everything that this one lacks."""
        for view in views:
            counters = view.counters()
            if counters["node_evicted"] or counters["node_too_cold"]:
                self._until[view.node_index] = counters["node_evicted_stamp"]

    def stamp(self, view: NodeView, location: int) -> int:
        """Stamp of a record, as far as it has reached the disk."""
        geometry = view.geometry(extent_of(location))
        if geometry is None or slot_of(location) >= geometry.slots:
            return 0
        return int(self._row(view, extent_of(location), geometry)[slot_of(location)])

    def may_be_evicted(self, node: int, stamp: int) -> bool:
        """Whether eviction explains that the node lacks a version that was last used at this stamp."""
        until = self._until.get(node)
        return until is not None and stamp <= until + SLACK

    def _row(self, view: NodeView, extent: int, geometry: Geometry) -> NDArray[np.uint32]:
        place = (view.node_index, extent)
        found = self._stamps.get(place)
        if found is None or len(found) != geometry.slots:
            found = self._stamps[place] = view.stamps(extent, geometry)
            if len(self._stamps) > STAMP_FILES_KEPT:
                self._stamps.popitem(last=False)
        self._stamps.move_to_end(place)
        return found
