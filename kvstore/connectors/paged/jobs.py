"""Values that go between an engine's scheduler and its workers. Frozen, plain, and small enough for every step.

A *span* is a stretch of consecutive blocks of one sequence in one KV group: their engine hashes and the pages they
have. `hashes` begin at `hashes_from`, the multiple of RUN_ALIGN at or before the first block, so that every run that
a block of the span is in begins inside the span (`kvstore/keys.py`: no run is longer than RUN_ALIGN, longer runs
begin at multiples of their size). `pages[i]` is the page of block start + i; NO_PAGE where the engine keeps none,
because no token that is yet to come can see the block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvstore.keys import MAX_RUN_BLOCKS, Chain, Namespace

RUN_ALIGN: Final = MAX_RUN_BLOCKS
NO_PAGE: Final = 0
"""Engines of this kind keep page 0 for blocks that nobody reads."""


@dataclass(frozen=True, slots=True)
class Span:
    """See the module docstring. group: index into the engine's KV groups."""

    group: int
    start: int
    hashes_from: int
    hashes: tuple[bytes, ...]
    pages: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + len(self.pages)

    def leading(self, blocks: int) -> Span:
        """The first blocks of this span."""
        return Span(self.group, self.start, self.hashes_from, self.hashes[: self.start - self.hashes_from + blocks],
                    self.pages[:blocks])

    def chain(self, namespace: Namespace) -> Chain:
        """Keys of the span's blocks, in order."""
        whole = namespace.bind(self.hashes, self.hashes_from)
        return whole[self.start - self.hashes_from : self.stop - self.hashes_from]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Fill pages of one sequence. Always answered by one LoadResult of the same request."""

    request_id: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Store pages of one sequence, whose contents are final when the step that brings the job has been computed."""

    request_id: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class StepJobs:
    """What a step asks of every worker. idle: nothing is computed in it, so a worker may wait a little for a load."""

    loads: tuple[LoadJob, ...] = ()
    saves: tuple[SaveJob, ...] = ()
    idle: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """How a load ended. ok: every page of it was filled and verified. Otherwise `good_tokens` is how long a prefix may
    at most be that can still be loaded: the first block that failed begins there."""

    request_id: str
    ok: bool
    good_tokens: int = 0


def span_of(group: int, hashes: Sequence[bytes], start: int, pages: Sequence[int]) -> Span:
    """The span of blocks [start, start + len(pages)) of a sequence whose block hashes, from block 0, are `hashes`."""
    first = start - start % RUN_ALIGN
    return Span(group, start, first, tuple(hashes[first : start + len(pages)]), tuple(pages))


def page_runs(pages: Sequence[int], most: int) -> list[tuple[int, int]]:
    """[start, stop) of the stretches of a span that have pages, none longer than `most` blocks."""
    runs: list[tuple[int, int]] = []
    for at, page in enumerate(pages):
        if page == NO_PAGE:
            continue
        if runs and runs[-1][1] == at and at - runs[-1][0] < most:
            runs[-1] = (runs[-1][0], at + 1)
        else:
            runs.append((at, at + 1))
    return runs
