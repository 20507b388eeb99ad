"""Which slots of a node are free, in flight or live: one in-memory state, nothing on disk. Pure.

A slot is FREE, RESERVED (a put owns it, its record is not stored yet) or LIVE. The state array is the only source of
truth; the counters beside it change in the same call as the states, and `audit` recounts. After an open the tables fill
it (`assign`, then `mark_live`), never the index: a slot that the index forgot is thus never handed out while its
table entry still stands.

    allocate       FREE → RESERVED
    mark_live      RESERVED or FREE → LIVE
    release        RESERVED or LIVE → FREE

A transition from any other state is refused with InvalidArgument before anything changes.

*Placement.* `allocate` keeps a request together. A request of a chunk or more starts on a chunk border; a smaller one
goes into the smallest gap that holds it. Where no gap holds it all, the longest gaps of a chunk or more go first,
then free extents, and the remaining gaps last, longest first. Ties go to the lowest location.

Cost: a few vector operations over the extents of the node for each request, and one scan of each extent that changed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.extent import Geometry, SlotClass

FREE: Final = 0
RESERVED: Final = 1
LIVE: Final = 2
NO_STAMP_DEPTH: Final = 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class SlotRange:
    """`count` neighbouring slots of one extent from `location`."""

    location: int
    count: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Reserved slots of one request, in the order in which its records should fill them.

    fresh: extents that were free and now belong to the class in memory; on disk the caller must assign them
      (`Slab.assign`) before the first write. short: slots that could not be had; evict and ask for them again.
    """

    ranges: tuple[SlotRange, ...]
    fresh: tuple[int, ...]
    short: int


@dataclass(frozen=True, slots=True)
class ClassUse:
    """Space of one class. Sizes in bytes of slots, without tables and header pages."""

    slot_class: SlotClass
    extents: int
    live_slots: int
    reserved_slots: int
    free_slots: int
    live_bytes: int


class Allocator:
    """Slot states of all extents of a node."""

    extent_bytes: int
    extents: int

    def __init__(self, extent_bytes: int, extents: int) -> None:
        raise NotImplementedError

    # -- extents
    def geometry(self, extent: int) -> Geometry | None:
        """None for a free extent."""
        raise NotImplementedError

    def geometry_for(self, slot_class: SlotClass) -> Geometry:
        """Geometry of a class on this node; InvalidArgument when its slots do not fit an extent."""
        raise NotImplementedError

    def assign(self, extent: int, slot_class: SlotClass) -> Geometry:
        """Give a free extent to a class, all slots free. InvalidArgument when it is not free."""
        raise NotImplementedError

    def unassign(self, extent: int) -> None:
        """Make an extent free, whatever is live in it. InvalidArgument while a slot of it is reserved."""
        raise NotImplementedError

    # -- slots
    def allocate(self, slot_class: SlotClass, count: int, *, shortest: int = 1,
                 exclude: Collection[int] = ()) -> Allocation:
        """Reserve up to `count` slots. Gaps shorter than `shortest` serve only requests that fit into one; extents in
        `exclude` are left alone."""
        raise NotImplementedError

    def mark_live(self, locations: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def release(self, locations: NDArray[np.int64]) -> None:
        raise NotImplementedError

    def release_range(self, found: SlotRange) -> None:
        raise NotImplementedError

    def states(self, locations: NDArray[np.int64]) -> NDArray[np.uint8]:
        """(n,) FREE, RESERVED or LIVE; FREE also for a location that does not exist."""
        raise NotImplementedError

    def live_slots_of(self, extent: int) -> NDArray[np.int64]:
        """Live slot numbers of an extent, ascending."""
        raise NotImplementedError

    def live_locations(self, extent: int, chunk: int) -> NDArray[np.int64]:
        """Live locations of one chunk, ascending."""
        raise NotImplementedError

    def busy(self, extent: int) -> bool:
        """Whether a slot of the extent is reserved."""
        raise NotImplementedError

    # -- accounting
    @property
    def live_slots(self) -> int:
        raise NotImplementedError

    @property
    def live_bytes(self) -> int:
        """Bytes of live slots, the figure that watermarks count."""
        raise NotImplementedError

    @property
    def extents_used(self) -> int:
        raise NotImplementedError

    def free_slots(self, slot_class: SlotClass) -> int:
        """Free slots in the extents of a class; free extents are not counted."""
        raise NotImplementedError

    def use(self) -> tuple[ClassUse, ...]:
        """Space by class, in order of class."""
        raise NotImplementedError

    def audit(self) -> None:
        """Recount everything from the states; CorruptRecord where a counter disagrees."""
        raise NotImplementedError
