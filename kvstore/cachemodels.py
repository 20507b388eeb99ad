"""Hit ratios that a prefix cache could have: without a limit, by exact LRU, and by an optimal choice. Pure.

A request asks for the blocks of a chain, in order; equal numbers are equal prefixes (`kvstore/traces.py`). Its *hits*
are the leading blocks that the cache holds when it comes; afterwards the cache may hold all of its blocks, up to
`capacity` blocks in all. Each function returns the hits of every request.

`infinite`  nothing is ever given up.
`lru`       exact least recently used, tail first: of the blocks of one request the deepest counts as used first.
            A block is thus never older than one behind it in its chain, what is left of a chain is a prefix, and of a
            chain that does not fit the head stays.
`belady`    Belady's MIN, which knows the future: what is asked for latest is given up first, of what one request asks
            for the deepest; what is never asked for again is not kept at all. No cache of that capacity has more
            hits: each pair of neighbouring uses of a block is an interval that may be bridged, at most `capacity`
            intervals at any moment, and dropping the interval that ends last bridges as many as possible. (A block is
            asked for no later than those behind it, so here too a prefix is left, and every bridged use is a hit.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Iterable, Sequence
from heapq import heappop, heappush

from efs.errors import InvalidArgument


def infinite(requests: Iterable[Sequence[int]]) -> list[int]:
    """Hits when every block that was ever asked for is held."""
    held: set[int] = set()
    hits = []
    for blocks in requests:
        hits.append(_leading(blocks, held))
        held.update(blocks)
    return hits


def lru(requests: Iterable[Sequence[int]], capacity: int) -> list[int]:
    """Hits of exact tail-first LRU."""
    _require_capacity(capacity)
    held: OrderedDict[int, None] = OrderedDict()
    hits = []
    for blocks in requests:
        hits.append(_leading(blocks, held))
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > capacity:
            held.popitem(last=False)
    return hits


def belady(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """Hits of the optimal cache."""
    _require_capacity(capacity)
    again = _next_requests(requests)
    held: dict[int, int] = {}
    """The next request for each block that is held."""
    latest: list[tuple[int, int, int]] = []
    """(-next request, -depth, block); entries that `held` does not confirm are old."""
    hits = []
    for blocks, following in zip(requests, again, strict=True):
        hits.append(_leading(blocks, held))
        for depth, (block, request) in enumerate(zip(blocks, following, strict=True)):
            if request == len(requests):
                held.pop(block, None)
            else:
                held[block] = request
                heappush(latest, (-request, -depth, block))
        while len(held) > capacity:
            request, _, block = heappop(latest)
            if held.get(block) == -request:
                del held[block]
    return hits


def _next_requests(requests: Sequence[Sequence[int]]) -> list[list[int]]:
    """For each block of each request the number of the next request for it, len(requests) where there is none."""
    later: dict[int, int] = {}
    found = []
    for number in range(len(requests) - 1, -1, -1):
        found.append([later.get(block, len(requests)) for block in requests[number]])
        later.update(dict.fromkeys(requests[number], number))
    return found[::-1]


def _leading(blocks: Sequence[int], held: Container[int]) -> int:
    for depth, block in enumerate(blocks):
        if block not in held:
            return depth
    return len(blocks)


def _require_capacity(capacity: int) -> None:
    if capacity < 1:
        raise InvalidArgument(f"capacity is {capacity} blocks, must be at least 1")
