"""Which EC group of a cluster holds a key, and which ones held it before groups were added. Pure.

Groups have numbers from 0, in the order in which they were added, and are never removed. The owner of a key is that of
its placement group (`efs/placement.py`), by rendezvous among the numbers, written in decimal, as ids. So an added group
takes over its share of the placement groups from all others, and nothing moves between these.

What was stored before stays where it was. For the retention time after a group was added a look-up goes to the owner,
and for what is not there to who owned the key before that group came; where several came within that time, to one
after the other, the latest first. Writes go to the owner only: what is put again is from then on found there, and what
is read is put again in the background (`efs/moving.py`). When the
retention time is over the earlier owner is not asked any more, and what it still holds is evicted like anything unused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.limits import GROUP_RETENTION_SECONDS, KEY_BYTES, MAX_CLUSTER_GROUPS, MAX_GROUP_RETENTION_SECONDS
from efs.placement import ec_group_table

Owners = NDArray[np.uint16]


@dataclass(frozen=True, slots=True)
class Ownership:
    """added_at: by group, when it was added, in seconds since 1970; never before the one in front of it."""

    added_at: tuple[int, ...] = (0,)
    retention_seconds: int = GROUP_RETENTION_SECONDS

    def __post_init__(self) -> None:
        if not 1 <= len(self.added_at) <= MAX_CLUSTER_GROUPS:
            raise InvalidArgument(f"{len(self.added_at)} groups, must be 1 to {MAX_CLUSTER_GROUPS}")
        if self.added_at[0] < 0 or list(self.added_at) != sorted(self.added_at):
            raise InvalidArgument("a group was added before the one in front of it")
        if not 0 <= self.retention_seconds <= MAX_GROUP_RETENTION_SECONDS:
            raise InvalidArgument(f"retention_seconds is {self.retention_seconds}, must be 0 to "
                                  f"{MAX_GROUP_RETENTION_SECONDS}")

    @property
    def groups(self) -> int:
        return len(self.added_at)

    def settled(self, now: float) -> int:
        """How many groups there were when the retention time began that is running now; at least one."""
        kept = sum(at + self.retention_seconds <= now for at in self.added_at[1:])
        return 1 + kept

    def owners(self, keys: Sequence[bytes], now: float) -> list[Owners]:
        """The (n,) owners of n keys of KEY_BYTES: those of today, then those before, the latest first. Groups whose
        retention time is over have no one before them."""
        placed = np.frombuffer(b"".join(keys), ">u2").reshape(len(keys), KEY_BYTES // 2)[:, 0]
        return [owner_table(groups)[placed] for groups in range(self.groups, self.settled(now) - 1, -1)]


@lru_cache(maxsize=16)
def owner_table(groups: int) -> Owners:
    """(65,536,) the number of the owner of each placement group, of so many groups."""
    return ec_group_table([str(number) for number in range(groups)])
