"""Memory that puts write from: fair admission by bytes, and private buffers that a hung write may keep.

A node writes from a buffer that belongs to the write alone, so nothing that happens later can change what reaches the
disk, and the caller's own buffer is free when its put returns. Three accounts bound the memory:

- `ByteBudget` admits. Whoever asked first is served first, however little the next one asks for, so a large put is
  never starved by small ones. A waiter that is cancelled or late leaves nothing taken.
- `Staging` leases buffers within one budget. A buffer comes back by `give_back` when its write is known to be over and
  is then used again: memory that was touched before is several times faster.
- A buffer whose write may still run (cancelled, timed out, failed) is never used again. `abandon` books it on the node
  until nothing refers to it any more; `abandoned_bytes` tells how much a node still holds, and the writer gives nothing
  more to a node beyond its bound. So hung nodes cannot take the budget of the others.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import defaultdict, deque
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.limits import KIB, WRITE_STAGING_BYTES, WRITE_STAGING_KEPT_BYTES

Bytes = NDArray[np.uint8]

SMALLEST_BUFFER_BYTES = 64 * KIB


class ByteBudget:
    """A first-come first-served semaphore of bytes."""

    def __init__(self, total_bytes: int) -> None:
        self._total = total_bytes
        self._waiting: deque[tuple[asyncio.Future[None], int]] = deque()
        self.free_bytes = total_bytes

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    async def acquire(self, amount: int, deadline: Deadline) -> int:
        """Take `amount`, or everything when it is more than there is at all; returns what to release.

        TimeoutError at the deadline.
        """
        amount = min(amount, self._total)
        if not self._waiting and self.free_bytes >= amount:
            self.free_bytes -= amount
            return amount
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        entry = (turn, amount)
        self._waiting.append(entry)
        try:
            async with asyncio.timeout(deadline.left()):
                await turn
        except BaseException:
            if turn.done() and not turn.cancelled():
                self.release(amount)
            else:
                self._waiting.remove(entry)
                self._serve()
            raise
        return amount

    def release(self, amount: int) -> None:
        self.free_bytes += amount
        self._serve()

    def _serve(self) -> None:
        while self._waiting:
            turn, amount = self._waiting[0]
            if turn.cancelled():
                # Its waiter has not run yet and will look for its own entry: leave it, it is next to go.
                break
            if amount > self.free_bytes:
                break
            self._waiting.popleft()
            self.free_bytes -= amount
            turn.set_result(None)


def buffer_bytes(size: int) -> int:
    """The size of the buffer that is leased for `size` bytes: four sizes to each doubling, so that buffers fit the next
    piece and at most a quarter is wasted."""
    step = max(SMALLEST_BUFFER_BYTES, 1 << max(0, (size - 1).bit_length() - 3))
    return -(-size // step) * step


class Staging:
    """Buffers for node writes. All methods run on the loop's thread."""

    def __init__(self, total_bytes: int = WRITE_STAGING_BYTES, kept_bytes: int = WRITE_STAGING_KEPT_BYTES) -> None:
        self.budget = ByteBudget(total_bytes)
        self._kept_limit = kept_bytes
        self.kept_bytes = 0
        self._kept: defaultdict[int, list[Bytes]] = defaultdict(list)
        self._abandoned: defaultdict[int, list[tuple[weakref.ref[Bytes], int]]] = defaultdict(list)

    async def lease(self, sizes: Sequence[int], deadline: Deadline) -> list[Bytes]:
        """Flat buffers of at least these sizes, all at once; contents undefined. TimeoutError at the deadline."""
        rounded = [buffer_bytes(size) for size in sizes]
        await self.budget.acquire(sum(rounded), deadline)
        return [self._take(size) for size in rounded]

    def _take(self, size: int) -> Bytes:
        kept = self._kept[size]
        if kept:
            self.kept_bytes -= size
            return kept.pop()
        return np.empty(size, np.uint8)

    def give_back(self, buffer: Bytes) -> None:
        """The write from this buffer is over and nobody else refers to it."""
        size = len(buffer)
        self._make_room(size)
        if self.kept_bytes + size <= self._kept_limit:
            self._kept[size].append(buffer)
            self.kept_bytes += size
        self.budget.release(size)

    def _make_room(self, size: int) -> None:
        """Let buffers of other sizes go, so that what is kept follows what is used now."""
        for other, buffers in self._kept.items():
            while other != size and buffers and self.kept_bytes + size > self._kept_limit:
                buffers.pop()
                self.kept_bytes -= other

    def abandon(self, node_index: int, buffer: Bytes) -> None:
        """A node may still be writing from this buffer: leave it to it."""
        self._abandoned[node_index].append((weakref.ref(buffer), len(buffer)))
        self.budget.release(len(buffer))

    def abandoned_bytes(self, node_index: int) -> int:
        """Bytes of abandoned buffers that something still refers to."""
        alive = [(held, size) for held, size in self._abandoned[node_index] if held() is not None]
        self._abandoned[node_index] = alive
        return sum(size for _, size in alive)
