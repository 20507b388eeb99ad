"""Which records a node gives up, how many, and which it does not take in: the policy of garbage collection. Pure.

Arrays and numbers in, rows out. `efs/eviction.py` keeps what this needs in memory, `efs/collector.py` carries it out,
by itself in the background and for puts that find no space. There is one order for all of them.

*When.* Watermarks count the space of live slots against what the smallest node of the EC group could hold, so that
the twelve nodes of a group, which hold one shard of each block, begin and stop at the same fill. Above `high` a node
frees down to `low`, while puts go on. Above `reject` it is too late for that: a put first evicts as much as it
brings. Between `low` and `high` nothing happens: a collection frees enough at once that it need not run for every
put. The hard limit does not rest on any of this: a put that finds no free slot evicts or fails.

*What.* Least recently used first. The *order* of records is

    stamp      lower first: the moment of the last use, in units of STAMP_SECONDS
    depth      of equal stamps the deeper in its chain first; an unknown depth is the deepest
    tie        of equal depths the smaller first: the first three bytes of the key, then the first byte of the digest

A use stamps all blocks of a prefix with one stamp, so in a chain no block ever has a higher stamp than one before it,
and of equal stamps the tail goes before the head: what is left of a chain is a prefix (up to the window below), which
is all that can be hit. (Stamps that are rewritten only after some time has passed since the last one would break this:
a head used at second 0 and again, with its tail, at second 59 would look older than the tail.) The order has no pins
and no exceptions: a look-up moves a record up as far as any other use of that moment and no further.

The order uses nothing that differs between the nodes of a group except stamps that were lost, so they give up the same
blocks without talking, and few stripes are left with fewer than ten shards. An *order key* is stamp, depth and tie as
one number: stamp · 2^64 + (2^32 − 1 − depth) · 2^32 + tie. Of equal order keys (one pair in 2^32 of a stamp and depth)
the lower slot goes first, and nodes may differ.

*Chunks.* A node writes whole chunks (page-aligned groups of slots), so it wants to free whole ones. Of the records
that plain order would evict, all but the last W go in any case, and none beyond the next W is touched; W is a share
of the node's live records, EVICTION_WINDOW_SHARE. Inside this *window* chunks that become free as a whole go first,
the one whose last record comes earliest in the order first, as long as they fit; the rest is filled up in plain
order. Two nodes with the same records in different slots can therefore differ in 2 · W records at most: with the
default share, in 1 % of them. What one node kept in its window is first in the next collection.

*Admission.* A put that has to evict must not drop a hotter record for a colder one: of the records that are there and
those that come, the coldest stay out (`admit`). Within one stamp the order knows depth but not which came last, so a
newcomer counts as the hottest of its stamp, and a burst of puts that fills the cache in less than a stamp replaces what
came before it. Not so a block so deep in its chain that the blocks before it would fill the cache alone: it counts by
its depth. Without this a prompt that is longer than the cache pushes its own head out with its tail (simulated on a
trace of coding agents: 0.11 of hit ratio at 5 % and at 10 % capacity). What repair brings counts by its depth too.

*Horizon.* The order key of the hottest record that was evicted lately. A record that repair wants to restore at or
below it is *too cold*: the node would give it up next, or, being full, a hotter one for it. The stripe is left to
die. Lately means for one to two periods of HORIZON_MINUTES; it is not kept over a restart, after which the first
collection sets it again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.limits import (
    DEPTH_UNKNOWN,
    HORIZON_MINUTES,
    WATERMARK_HIGH,
    WATERMARK_LOW,
    WATERMARK_REJECT,
)

NOTHING: Final = -1
"""Below every order key: the horizon of a node that evicted nothing lately."""
TIE_BITS: Final = 32


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

    def bytes_to_free(self, live_bytes: int, smallest_bytes: int, down_to_low: bool = False) -> int:
        """How many bytes of live slots to evict now; 0 up to the high mark, with `down_to_low` up to the low one.
        `smallest_bytes`: what the slots of the smallest node of the group hold. Both may be numbers of anything else
        that has a limit."""
        begin = self.low if down_to_low else self.high
        if live_bytes <= math.floor(begin * smallest_bytes):
            return 0
        return live_bytes - self.kept(smallest_bytes)

    def kept(self, smallest_bytes: int) -> int:
        """What a collection leaves."""
        return math.floor(self.low * smallest_bytes)

    def bytes_above_reject(self, live_bytes: int, smallest_bytes: int) -> int:
        """How many bytes of live slots are too many for a put to leave them there."""
        return max(0, live_bytes - math.floor(self.reject * smallest_bytes))


# -- The order -------------------------------------------------------------------------------------------------------


def order_key(stamp: int, depth: int, tie: int) -> int:
    """See the module docstring; all of it fits 96 bits."""
    return (stamp << TIE_BITS | (DEPTH_UNKNOWN - depth)) << TIE_BITS | tie


def ranks_of(stamps: NDArray[np.uint32], depths: NDArray[np.uint32]) -> NDArray[np.uint64]:
    """(n,) stamp and depth of order keys, without the tie."""
    return stamps.astype(np.uint64) << np.uint64(TIE_BITS) | (DEPTH_UNKNOWN - depths).astype(np.uint64)


def order_keys(ranks: NDArray[np.uint64], ties: NDArray[np.uint32]) -> list[int]:
    """n order keys."""
    return [rank << TIE_BITS | tie for rank, tie in zip(ranks.tolist(), ties.tolist(), strict=True)]


def ties_of(keys: NDArray[np.uint64], digests: NDArray[np.uint64]) -> NDArray[np.uint32]:
    """(n,) ties from keys (n, 4) and digests (n, 2), the bytes as little-endian words as in table entries."""
    first_three = keys[:, 0].byteswap() >> np.uint64(40)
    return (first_three << np.uint64(8) | digests[:, 0] & np.uint64(0xFF)).astype(np.uint32)


@dataclass(frozen=True, slots=True)
class Records:
    """n live records of a node, in order of their slots; row i of each array speaks of one record. Those that are left
    out must be hotter than all of these.

    rank: (n,) uint64 and tie: (n,) uint32, as `ranks_of` and `ties_of` make them. chunk: (n,) int64, any number that is
    the same for slots of one chunk only. chunk_live: (n,) int64, how many live records that chunk has, those left out
    included. size: (n,) int64, what evicting the record frees, above 0.
    """

    rank: NDArray[np.uint64]
    tie: NDArray[np.uint32]
    chunk: NDArray[np.int64]
    chunk_live: NDArray[np.int64]
    size: NDArray[np.int64]

    def __post_init__(self) -> None:
        n = len(self.rank)
        shapes = (self.tie.shape, self.chunk.shape, self.chunk_live.shape, self.size.shape)
        if shapes != ((n,), (n,), (n,), (n,)):
            raise InvalidArgument(f"arrays of {n} records have the shapes {shapes}")


def enough(to_free: int, window: int, smallest_size: int) -> int:
    """How many of a node's coldest records `select` has to see."""
    return -(-to_free // smallest_size) + window


def select(records: Records, to_free: int, window: int = 0) -> NDArray[np.int64]:
    """(r,) rows to evict, coldest first, so that at least `to_free` is freed, and less than one record more; all rows
    when that is not enough. window: W of the module docstring, a number of records. Runs on any thread."""
    if window < 0:
        raise InvalidArgument(f"window is {window}, must not be below 0")
    total = len(records.rank)
    if to_free <= 0 or total == 0:
        return np.zeros(0, np.int64)
    ordered = _coldest(records, min(total, enough(to_free, window, int(records.size.min()))))
    freed = np.cumsum(records.size[ordered])
    plain = min(int(np.searchsorted(freed, to_free)) + 1, len(ordered))
    certain, reach = max(0, plain - window), min(plain + window, len(ordered))
    chosen = np.zeros(reach, np.bool_)
    chosen[:certain] = True
    left = to_free - (int(freed[certain - 1]) if certain else 0)
    for places in _whole_chunks(records, ordered[:reach], certain):
        size = int(records.size[ordered[places]].sum())
        if size <= left:
            chosen[places] = True
            left -= size
    rest = np.flatnonzero(~chosen)
    filled = np.cumsum(records.size[ordered[rest]])
    chosen[rest[: int(np.searchsorted(filled, left)) + 1 if left > 0 else 0]] = True
    return ordered[:reach][chosen]


def _coldest(records: Records, count: int) -> NDArray[np.int64]:
    """Rows in order: the first `count`, and perhaps more."""
    last = np.partition(records.rank, count - 1)[count - 1]
    rows = np.flatnonzero(records.rank <= last)
    # The last key of lexsort is the first that counts; it is stable, so rows decide between equals.
    return rows[np.lexsort((records.tie[rows], records.rank[rows]))]


def _whole_chunks(records: Records, ordered: NDArray[np.int64], certain: int) -> list[NDArray[np.int64]]:
    """For each chunk all of whose live records are in `ordered` its places from `certain` on, by the last of them."""
    _, chunk_of = np.unique(records.chunk[ordered], return_inverse=True)
    seen = np.bincount(chunk_of)
    places = np.flatnonzero(seen[chunk_of] == records.chunk_live[ordered])
    places = places[places >= certain]
    if not len(places):
        return []
    by_chunk = places[np.argsort(chunk_of[places], kind="stable")]
    borders = np.flatnonzero(np.diff(chunk_of[by_chunk])) + 1
    return sorted(np.split(by_chunk, borders), key=lambda part: int(part[-1]))


# -- What comes in ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Admission:
    """What a put with too little space does. rows: indices of the newcomers that get in, ascending. evicted: how many
    of the records that are there go, the coldest first."""

    rows: tuple[int, ...]
    evicted: int


def bar(newcomer: int, most_records: int) -> int:
    """What a newcomer with this order key counts as against records that are held, on a node that holds so many."""
    depth = DEPTH_UNKNOWN - (newcomer >> TIE_BITS & DEPTH_UNKNOWN)
    if most_records <= depth < DEPTH_UNKNOWN:
        return newcomer
    return (newcomer >> 2 * TIE_BITS) + 1 << 2 * TIE_BITS


def admit(newcomers: Sequence[int], held: Sequence[int], short: int, *, bars: Sequence[int] | None = None,
          newcomer_size: int = 1, held_sizes: Sequence[int] | None = None, at_once: int = 0) -> Admission:
    """Of newcomers and of records that are held together, the coldest go or stay out until `short` is freed.

    newcomers: order keys of what comes, in any order; each is of `newcomer_size`, in the unit of `short`, and counts as
    its `bars` says (by default as its own key). held: order keys of what can be evicted, ascending, and how much each
    frees (1 by default); when these are too few, more newcomers stay out. at_once: evict up to so many records in one
    go as long as they are colder than everything that comes, to spare the next put the trouble.
    """
    counts_as = newcomers if bars is None else bars
    by_key = sorted(range(len(newcomers)), key=lambda row: (counts_as[row], newcomers[row]))
    evicted = refused = freed = 0
    while freed < short and refused < len(by_key):
        if evicted < len(held) and held[evicted] < counts_as[by_key[refused]]:
            freed += 1 if held_sizes is None else held_sizes[evicted]
            evicted += 1
        else:
            freed += newcomer_size
            refused += 1
    if refused < len(by_key):
        coldest = min(newcomers[row] for row in by_key[refused:])
        while evicted < min(at_once, len(held)) and held[evicted] < coldest:
            evicted += 1
    return Admission(tuple(sorted(by_key[refused:])), evicted)


@dataclass(frozen=True, slots=True)
class Horizon:
    """The eviction horizon: the highest order key evicted in this period of HORIZON_MINUTES and in the one before."""

    period: int = 0
    current: int = NOTHING
    previous: int = NOTHING

    def note(self, highest: int, minute: int) -> Horizon:
        """After an eviction up to this order key, in this minute since the epoch."""
        now = self._moved(minute)
        return Horizon(now.period, max(now.current, highest), now.previous)

    def at(self, minute: int) -> int:
        """NOTHING when nothing was evicted lately."""
        now = self._moved(minute)
        return max(now.current, now.previous)

    def too_cold(self, candidate: int, minute: int) -> bool:
        """Whether a record with this order key must not be restored by repair."""
        return candidate <= self.at(minute)

    def _moved(self, minute: int) -> Horizon:
        period = minute // HORIZON_MINUTES
        if period <= self.period:
            # The same period, or the wall clock was set back: what is known stays.
            return self
        return Horizon(period, NOTHING, self.current if period == self.period + 1 else NOTHING)
