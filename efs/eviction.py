"""What a full node drops first: the coldest chunks of the class in need, or the coldest extent of another one. Pure.

A chunk's stamp is the highest of its live slots. Chunks go in the order: stamp, then the deeper in its chain first (depth of
a chunk = the smallest of its live slots, unknown = deepest), then the smallest key, as a big-endian number; so nodes that
hold the same records in the same chunks choose alike. A chunk with a slot in flight is never chosen, nor any extent in
`exclude`. An extent's stamp is the highest of its chunks'; one without live slots comes first.

A class takes chunks of its own as long as they are not hotter than the coldest extent of any other class; else, or when it
has no extent at all, it takes that extent whole. So no class keeps an extent that is colder than what another one must drop.

The order of all chunks is computed for a batch of victims and kept; later calls take from it, skipping chunks that were
used since. Stamps only rise, so what is left of it stays in order.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.allocator import Allocator
from efs.extent import SlotClass
from efs.stamps import Stamps


@dataclass(frozen=True, slots=True)
class Victims:
    """Records to drop. `locations`: live slots, ascending within each chunk, coldest chunk first. `extent`: the extent
    to take from its class as a whole (its live slots are `locations`), None when chunks are freed in place.
    No locations and no extent: there is nothing to evict."""

    locations: NDArray[np.int64]
    extent: int | None


class Eviction:
    """Eviction order of one node's records."""

    def __init__(self, allocator: Allocator, stamps: Stamps) -> None:
        raise NotImplementedError

    def note(self, locations: NDArray[np.int64], depths: NDArray[np.uint32], keys: NDArray[np.uint64]) -> None:
        """Records became live here. depths: (n,). keys: (n, 4) as in `entry_dtype`."""
        raise NotImplementedError

    def victims(self, slot_class: SlotClass, slots: int, exclude: Collection[int] = ()) -> Victims:
        """What to drop so that at least `slots` slots of the class become free, as far as there is anything. Chooses
        only: the caller drops the records, then calls `release` or `unassign`."""
        raise NotImplementedError
