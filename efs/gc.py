"""Which records a node gives up, and how many: the policy of garbage collection. Pure: arrays in, rows out.

*When.* Watermarks count the bytes of live slots against those that the smallest node of the EC group could hold, so
that the twelve nodes of a group, which hold one shard of each block, begin and stop at the same fill. Above `high` a
node frees down to `low`; above `reject` it refuses puts until it has. Between `low` and `high` it does nothing: a
collection frees enough at once that it need not run for every put. The hard limit does not rest on any of this: a put
that finds no free slot evicts or fails.

*What.* Least recently used first. The *order* of records is

    stamp      lower first: the minute of the last use
    depth      of equal stamps the deeper in its chain first; an unknown depth is the deepest
    key        of equal depths the smaller first, as bytes
    digest     of two versions of one key the smaller first, as bytes

A use stamps all blocks of a prefix with one minute, so in a chain no block ever has a higher stamp than one before it,
and of equal stamps the tail goes before the head: what is left of a chain is a prefix (up to the window below), which
is all that can be hit. (Stamps that are rewritten only after a minute has passed since the last one would break this: a
head used at second 0 and again, with its tail, at second 59 would look older than the tail.) The order has no pins and
no exceptions: a look-up moves a record up as far as any other use of that minute and no further.

The order uses nothing that differs between the nodes of a group except stamps that were lost, so they give up the same
blocks without talking, and few stripes are left with fewer than ten shards.

*Chunks.* A node writes whole chunks (page-aligned groups of slots), so it wants to free whole ones. Of the records that
plain order would evict, all but the last W go in any case, and none beyond the next W is touched; W is `window_share`
of the node's live records. Inside this *window* chunks that become free as a whole go first, the one whose last record
comes earliest in the order first, as long as they fit; the rest is filled up in plain order. Two nodes with the same
records in different slots can therefore differ in 2 · W records at most: with the default share, in 1 % of them. What
one node kept in its window is first in the next collection.

*Horizon.* The order key (stamp, depth, key) of the hottest record that was evicted lately. A record that repair wants
to restore at or below it is *too cold*: the node would give it up next, or, being full, a hotter one for it. The stripe
is left to die. Lately means for one to two periods of HORIZON_MINUTES; it is not kept over a restart, after which the
first collection sets it again. A node that must evict to take a repair also compares with the victims: it refuses
unless the record is above the `highest` of the selection that would make room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.limits import (
    DEPTH_UNKNOWN,
    EVICTION_WINDOW_SHARE,
    HORIZON_MINUTES,
    KEY_BYTES,
    WATERMARK_HIGH,
    WATERMARK_LOW,
    WATERMARK_REJECT,
)

NOTHING: Final = b""
"""Below every order key: the horizon of a node that evicted nothing lately."""


@dataclass(frozen=True, slots=True)
class Watermarks:
    """Shares of the smallest node's slot bytes, 0 < low < high < reject ≤ 1; InvalidArgument otherwise."""

    low: float = WATERMARK_LOW
    high: float = WATERMARK_HIGH
    reject: float = WATERMARK_REJECT

    def __post_init__(self) -> None:
        if not 0 < self.low < self.high < self.reject <= 1:
            raise InvalidArgument(
                f"watermarks low {self.low}, high {self.high}, reject {self.reject} must rise and lie in (0, 1]"
            )

    def bytes_to_free(self, live_bytes: int, smallest_bytes: int) -> int:
        """How many bytes of live slots to evict now; 0 up to the high mark. `smallest_bytes`: what the slots of the
        smallest node of the group hold. Where all slots are of one size, both may be numbers of slots."""
        if live_bytes <= math.floor(self.high * smallest_bytes):
            return 0
        return live_bytes - math.floor(self.low * smallest_bytes)

    def refuses_puts(self, live_bytes: int, smallest_bytes: int) -> bool:
        return live_bytes > math.floor(self.reject * smallest_bytes)


@dataclass(frozen=True, slots=True)
class Records:
    """All n live records of a node, in any order; row i of each array speaks of one record.

    stamp, depth: (n,) uint32. key: (n, 4) and digest: (n, 2) uint64, the bytes as little-endian words as in table
    entries. chunk: (n,) int64, any number that is the same for slots of one chunk only. slot_bytes: (n,) int64.
    """

    stamp: NDArray[np.uint32]
    depth: NDArray[np.uint32]
    key: NDArray[np.uint64]
    digest: NDArray[np.uint64]
    chunk: NDArray[np.int64]
    slot_bytes: NDArray[np.int64]

    def __post_init__(self) -> None:
        n = len(self.stamp)
        shapes = (self.depth.shape, self.key.shape, self.digest.shape, self.chunk.shape, self.slot_bytes.shape)
        if shapes != ((n,), (n, 4), (n, 2), (n,), (n,)):
            raise InvalidArgument(f"arrays of {n} records have the shapes {shapes}")


@dataclass(frozen=True, slots=True)
class Selection:
    """rows: (r,) int64, what to evict, coldest first. highest: order key of the last in the order, NOTHING of none."""

    rows: NDArray[np.int64]
    highest: bytes


def order_key(stamp: int, depth: int, key: bytes) -> bytes:
    """40 bytes that compare as the order does (digest aside)."""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"a key has {len(key)} bytes, must have {KEY_BYTES}")
    return stamp.to_bytes(4, "big") + (DEPTH_UNKNOWN - depth).to_bytes(4, "big") + key


def select(records: Records, free_bytes: int, window_share: float = EVICTION_WINDOW_SHARE) -> Selection:
    """What to evict so that at least `free_bytes` of slots become free, and less than one slot more; everything when
    that is not enough. Takes about 0.1 s for a million records; runs on any thread."""
    if not 0 <= window_share <= 1:
        raise InvalidArgument(f"window_share is {window_share}, must be 0 to 1")
    total = len(records.stamp)
    if free_bytes <= 0 or total == 0:
        return Selection(np.zeros(0, np.int64), NOTHING)
    window = math.floor(window_share * total)
    # Never more than this many are needed: each frees at least the smallest slot.
    enough = -(-free_bytes // int(records.slot_bytes.min()))
    ordered = _coldest(records, min(total, enough + window))
    freed = np.cumsum(records.slot_bytes[ordered])
    plain = min(int(np.searchsorted(freed, free_bytes)) + 1, len(ordered))
    certain, reach = max(0, plain - window), min(plain + window, len(ordered))
    chosen = np.zeros(reach, np.bool_)
    chosen[:certain] = True
    left = free_bytes - (int(freed[certain - 1]) if certain else 0)
    for places in _whole_chunks(records, ordered, certain, reach):
        size = int(records.slot_bytes[ordered[places]].sum())
        if size <= left:
            chosen[places] = True
            left -= size
    rest = np.flatnonzero(~chosen)
    filled = np.cumsum(records.slot_bytes[ordered[rest]])
    chosen[rest[: int(np.searchsorted(filled, left)) + 1 if left > 0 else 0]] = True
    rows = ordered[:reach][chosen]
    return Selection(rows, _order_key_of(records, int(rows[-1])))


def _coldest(records: Records, count: int) -> NDArray[np.int64]:
    """Rows in order: the first `count`, and perhaps more."""
    rank = records.stamp.astype(np.uint64) << np.uint64(32) | (DEPTH_UNKNOWN - records.depth).astype(np.uint64)
    last = np.partition(rank, count - 1)[count - 1]
    rows = np.flatnonzero(rank <= last)
    words = np.hstack([records.key[rows], records.digest[rows]]).byteswap()
    # The last key of lexsort is the first that counts.
    return rows[np.lexsort((*words.T[::-1], rank[rows]))]


def _whole_chunks(records: Records, ordered: NDArray[np.int64], certain: int, reach: int) -> list[NDArray[np.int64]]:
    """For each chunk without a live record beyond `reach` its places in [certain, reach), by the last of them."""
    if certain == reach:
        return []
    chunks, chunk_of = np.unique(records.chunk[ordered[certain:reach]], return_inverse=True)
    beyond = np.ones(len(records.stamp), np.bool_)
    beyond[ordered[:reach]] = False
    whole = ~np.isin(chunks, records.chunk[beyond])
    by_chunk = np.argsort(chunk_of, kind="stable")
    borders = np.cumsum(np.bincount(chunk_of, minlength=len(chunks)))[:-1]
    places = [part + certain for part, kept in zip(np.split(by_chunk, borders), whole, strict=True) if kept]
    return sorted(places, key=lambda part: int(part[-1]))


def _order_key_of(records: Records, row: int) -> bytes:
    key = records.key[row].astype("<u8").tobytes()
    return order_key(int(records.stamp[row]), int(records.depth[row]), key)


@dataclass(frozen=True, slots=True)
class Horizon:
    """The eviction horizon: the highest order key evicted in this period of HORIZON_MINUTES and in the one before."""

    period: int = 0
    current: bytes = NOTHING
    previous: bytes = NOTHING

    def note(self, highest: bytes, minute: int) -> Horizon:
        """After an eviction up to this order key, in this minute since the epoch."""
        now = self._moved(minute)
        return Horizon(now.period, max(now.current, highest), now.previous)

    def at(self, minute: int) -> bytes:
        """NOTHING when nothing was evicted lately."""
        now = self._moved(minute)
        return max(now.current, now.previous)

    def too_cold(self, candidate: bytes, minute: int) -> bool:
        """Whether a record with this order key must not be restored by repair."""
        return candidate <= self.at(minute)

    def _moved(self, minute: int) -> Horizon:
        period = minute // HORIZON_MINUTES
        if period <= self.period:
            # The same period, or the wall clock was set back: what is known stays.
            return self
        return Horizon(period, NOTHING, self.current if period == self.period + 1 else NOTHING)
