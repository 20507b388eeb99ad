"""Paged KV on the device: the memory of all sequences, in pages of one block each.

A page holds one block of KV: for every segment of the layout one row of that segment's tensor, (pages, stride) uint8.
The stride is the segment's payload rounded up to `align_bytes`; the pad belongs to nobody and is never stored. A
sequence's block table is a list of `Page` values: row number and generation.

*Generations.* Every allocation of a page gives it a new generation; `hold` and `drop` with another one raise
StaleLease, so a page that was freed and given to another sequence cannot be touched through an old table.

*Holds.* An allocated page starts with one hold. A swap-in or a write-back that uses pages takes a hold of its own for
as long as its copies may run, so its owner may let go of a page at any time, without waiting: the page is free when
the last hold is dropped.

*Fences.* A page that is free for the host may still be in use on the device. Each `drop` brings the events behind the
last operation of its holder on these pages; they stay with the page and come out of the next `allocate` of it. Whoever
writes first into an allocated page, on whatever stream, makes that stream wait for them. Pages are handed out oldest
first, which gives fences the most time to be done.

Invariant: free + held = pages, at every moment.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from efs.clock import Clock, SystemClock
from gdr.device import Device, Event
from gdr.errors import InvalidEngineArgument, StaleLease


@dataclass(frozen=True, slots=True)
class Page:
    """A row of the page tensors, as one allocation knows it."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True)
class Allocation:
    """Pages and the events that must be waited for on a stream before it writes into them."""

    pages: tuple[Page, ...]
    fences: tuple[Event, ...]


class PagePool:
    """`pages` pages of blocks whose segments have `segment_bytes` bytes."""

    def __init__(self, device: Device, segment_bytes: Sequence[int], pages: int, *, align_bytes: int = 1,
                 clock: Clock | None = None) -> None:
        if pages < 1 or align_bytes < 1 or not segment_bytes or min(segment_bytes) < 1:
            raise InvalidEngineArgument(
                f"{pages} pages of {len(segment_bytes)} segments, aligned to {align_bytes}: all must be at least 1"
            )
        self.segment_bytes = tuple(segment_bytes)
        self.storage: tuple[torch.Tensor, ...] = tuple(
            device.allocate((pages, -(-size // align_bytes) * align_bytes)) for size in segment_bytes
        )
        self.pages = pages
        self._clock = clock or SystemClock()
        self._changed = threading.Condition()
        self._free = deque(range(pages))
        self._holds = [0] * pages
        self._generation = [0] * pages
        self._fences: list[list[Event]] = [[] for _ in range(pages)]

    def allocate(self, count: int, *, wait_ms: float = 0.0) -> Allocation | None:
        """`count` pages with one hold each, or None when there are not as many free pages within `wait_ms`."""
        until = self._clock.monotonic() + wait_ms / 1000
        with self._changed:
            while len(self._free) < count:
                left = until - self._clock.monotonic()
                if left <= 0:
                    return None
                self._changed.wait(left)
            return self._take([self._free.popleft() for _ in range(count)])

    def hold(self, pages: Sequence[Page]) -> None:
        """One more hold on each page. StaleLease when one of them was freed; then none is held."""
        with self._changed:
            self._check(pages)
            for page in pages:
                self._holds[page.index] += 1

    def drop(self, pages: Sequence[Page], fences: Sequence[Event] = ()) -> None:
        """Give back one hold on each page; `fences` are the events behind the holder's last use of them."""
        with self._changed:
            self._check(pages)
            for page in pages:
                self._fences[page.index].extend(fence for fence in fences if not fence.done())
                self._holds[page.index] -= 1
                if self._holds[page.index] == 0:
                    self._free.append(page.index)
            self._changed.notify_all()

    def check(self, pages: Sequence[Page]) -> None:
        """StaleLease unless all pages are still of their allocation."""
        with self._changed:
            self._check(pages)

    @property
    def free(self) -> int:
        """Pages without a hold."""
        with self._changed:
            return len(self._free)

    def pending_fences(self) -> int:
        """Events that are still waited for; done ones are forgotten."""
        with self._changed:
            self._fences = [[fence for fence in fences if not fence.done()] for fences in self._fences]
            return sum(map(len, self._fences))

    def _take(self, indexes: Sequence[int]) -> Allocation:
        fences: dict[int, Event] = {}
        pages = []
        for index in indexes:
            self._generation[index] += 1
            self._holds[index] = 1
            fences.update((id(fence), fence) for fence in self._fences[index] if not fence.done())
            self._fences[index] = []
            pages.append(Page(index, self._generation[index]))
        return Allocation(tuple(pages), tuple(fences.values()))

    def _check(self, pages: Sequence[Page]) -> None:
        for page in pages:
            if self._generation[page.index] != page.generation or self._holds[page.index] == 0:
                raise StaleLease(f"page {page.index}: generation {page.generation} was given back")
