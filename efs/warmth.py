"""How cold a node's coldest records are, and whether eviction explains that a node lacks a record. For fsck.

A node evicts its coldest chunks first, and a chunk is as warm as its warmest record. So a node that has evicted
anything keeps nothing colder than what it dropped: a version that is at most as warm as the coldest chunk of its
class there (with a minute of slack, because stamps reach the disk late) may have been evicted, a warmer one can not.
A record is at least as warm as the minute of its arrival, whatever its stamp file says.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.extent import Geometry, SlotClass, extent_of, slot_of
from efs.nodeview import NodeView

SLACK_MINUTES: Final = 1
STAMP_FILES_KEPT: Final = 256
MINUTE_MS: Final = 60_000


class Warmth:
    """Of all nodes. `evicted`: records that each node has evicted since it was made."""

    def __init__(self, evicted: Mapping[int, int]) -> None:
        self._evicted = dict(evicted)
        self._coldest: dict[tuple[int, SlotClass], int] = {}
        self._stamps: OrderedDict[tuple[int, int], NDArray[np.uint32]] = OrderedDict()

    def note(self, view: NodeView, extent: int, geometry: Geometry, arrived: NDArray[np.int64]) -> None:
        """An extent's live slots were seen. arrived: (slots,) minute of arrival, 0 where nothing is live."""
        warm = np.where(arrived > 0, np.maximum(arrived, self._row(view, extent, geometry)), 0)
        chunks = warm.reshape(geometry.chunks, geometry.chunk_slots).max(axis=1)
        chunks = chunks[chunks > 0]
        if len(chunks):
            place = (view.node_index, geometry.slot_class)
            self._coldest[place] = min(int(chunks.min()), self._coldest.get(place, int(chunks.min())))

    def of(self, view: NodeView, location: int, arrival_ms: int) -> int:
        """Minute of last use of a record."""
        arrived = arrival_ms // MINUTE_MS
        geometry = view.geometry(extent_of(location))
        if geometry is None or slot_of(location) >= geometry.slots:
            return arrived
        return max(arrived, int(self._row(view, extent_of(location), geometry)[slot_of(location)]))

    def may_be_evicted(self, node: int, slot_class: SlotClass, minute: int) -> bool:
        """Whether eviction explains that the node lacks a record of this class, last used in this minute."""
        if not self._evicted.get(node):
            return False
        coldest = self._coldest.get((node, slot_class))
        return coldest is None or minute <= coldest + SLACK_MINUTES

    def _row(self, view: NodeView, extent: int, geometry: Geometry) -> NDArray[np.uint32]:
        place = (view.node_index, extent)
        found = self._stamps.get(place)
        if found is None or len(found) != geometry.slots:
            found = self._stamps[place] = view.stamps(extent, geometry)
            if len(self._stamps) > STAMP_FILES_KEPT:
                self._stamps.popitem(last=False)
        self._stamps.move_to_end(place)
        return found
