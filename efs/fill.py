"""How full a node is, and what follows from it: the watermarks of `efs/gc.py` over a node's space and its index.

*Space* is counted in bytes of extents: a live or reserved slot stands for its share of its extent, table and rounding
included (`efs.eviction.slot_share`), so that classes of any size add up and a node whose slots are all live is full.
The total is what the extents of the smallest node of the group hold: a larger node keeps no more than that one, because
a block of which some nodes have dropped their shard is of no use to the others.

The *index* has a budget of entries, which is used up before the slots where these are small. The marks hold for both,
and whichever is fuller decides.
"""

from __future__ import annotations

from dataclasses import dataclass

from efs.eviction import slot_share
from efs.extent import SlotClass
from efs.gc import Watermarks
from efs.nodestate import NodeState


@dataclass(frozen=True, slots=True)
class Need:
    """What to free: bytes of extents, or with `by_count` a number of records."""

    amount: int
    by_count: bool


class Fill:
    """The fill of one node. Belongs to the loop's thread."""

    def __init__(self, state: NodeState, marks: Watermarks) -> None:
        self._state = state
        self._marks = marks
        self._share = 1.0

    def know_smallest(self, capacity_bytes: int) -> None:
        """The capacity of the smallest node of the group, which may be this one."""
        self._share = min(1.0, capacity_bytes / self._state.config.plan.capacity_bytes)

    @property
    def used_bytes(self) -> int:
        """Of extents, by live and reserved slots."""
        allocator = self._state.allocator
        return sum((use.live_slots + use.reserved_slots) * self.share_of(use.slot_class) for use in allocator.use())

    @property
    def total_bytes(self) -> int:
        plan = self._state.config.plan
        return int(plan.extents * plan.extent_bytes * self._share)

    @property
    def records(self) -> int:
        """Live and reserved."""
        return sum(use.live_slots + use.reserved_slots for use in self._state.allocator.use())

    @property
    def most_records(self) -> int:
        """What the index is good for."""
        return int(self._state.index.most_entries * self._share)

    def to_collect(self, *, down_to_low: bool = False) -> Need | None:
        """What a collection has to free now: nothing up to the high mark, or with `down_to_low` up to the low one."""
        space = self._marks.bytes_to_free(self.used_bytes, self.total_bytes, down_to_low)
        records = self._marks.bytes_to_free(self.records, self.most_records, down_to_low)
        if records * self.total_bytes > space * self.most_records:
            return Need(records, by_count=True)
        return Need(space, by_count=False) if space else None

    @property
    def above_reject(self) -> bool:
        """Whether puts have to evict for themselves."""
        return self._marks.bytes_above_reject(self.used_bytes, self.total_bytes) > 0

    def short_of(self, slot_class: SlotClass, coming: int) -> Need | None:
        """What must go before so many of a class may come, wherever it lies: enough that space does not go above the
        reject mark, nor the index above its budget. What comes may stay out instead."""
        share = self.share_of(slot_class)
        space = self._marks.bytes_above_reject(self.used_bytes + coming * share, self.total_bytes)
        if space:
            return Need(space, by_count=False)
        records = self.records + coming - self.most_records
        return Need(records, by_count=True) if records > 0 else None

    def kept(self, slot_class: SlotClass) -> int:
        """How many records are kept if all are of this class: what is left by a collection."""
        return min(self._marks.kept(self.total_bytes) // self.share_of(slot_class), self._marks.kept(self.most_records))

    def share_of(self, slot_class: SlotClass) -> int:
        """Bytes of an extent that a slot of a class stands for."""
        return slot_share(self._state.allocator.geometry_for(slot_class))
