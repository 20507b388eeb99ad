"""What each tenant tag takes of a store, counted from the tables as they lie on disk: beside an owner, or without one.

An owner knows it exactly at any moment (`Node.tenant_bytes`); this is for who cannot ask it. Reads the tables, 1 to 2 %
of the store, for a given time at most, and then scales up from what was read: extents in a random order, so that old
and new ones are among them. Beside an owner it is as of no single moment.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from efs.nodeview import NodeView, Slot


@dataclass(slots=True)
class TagCount:
    """Bytes of live slots by tenant tag of 8 bytes. covered: share of the extents that was read."""

    live_bytes: Counter[bytes] = field(default_factory=Counter)
    covered: float = 0.0


def count_tags(views: Sequence[NodeView], seconds: float, monotonic: Callable[[], float]) -> TagCount:
    """Count, for about so many seconds at most, at least one extent."""
    ends_at = monotonic() + seconds
    places = [(view, extent) for view in views for extent in range(view.slab.extents)]
    random.Random(0).shuffle(places)
    counted = TagCount(covered=1.0)
    for done, (view, extent) in enumerate(places, 1):
        _count_extent(counted.live_bytes, view, extent)
        if monotonic() >= ends_at and done < len(places):
            counted.covered = done / len(places)
            for tag, size in counted.live_bytes.items():
                counted.live_bytes[tag] = round(size / counted.covered)
            break
    return counted


def _count_extent(live_bytes: Counter[bytes], view: NodeView, extent: int) -> None:
    geometry = view.geometry(extent, again=True)
    if geometry is None:
        return
    rows = view.table_rows(extent, geometry, 0, geometry.slots)
    tags, counts = np.unique(rows["tenant_tag"][rows["status"] == Slot.LIVE], return_counts=True)
    for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
        live_bytes[tag.to_bytes(8, "little")] += count * geometry.slot_class.slot_bytes
