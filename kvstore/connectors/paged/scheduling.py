"""The scheduling side of a connector: what of a request is stored, what to load into which pages, what to save.

For each request the engine asks how many tokens behind its own cached prefix the store has (`matched`), allocates
pages (`allocated`), and for every step takes the jobs of that step (`step`). Questions to the store are asked on a
thread of its own; the first call for a request waits FIRST_WAIT_S for the answer, later ones not at all, and None
means "ask again". A question that is not answered by the deadline of a match counts as a miss. The answer is kept
until pages are allocated, together with how much of the prefix the engine had then.

*A promise that is not kept.* A load that fails is told with the number of tokens up to which the prefix was still good.
The request is then computed from its beginning or, once, from a shorter load: the second answer is bounded by that
number, and after a second failure there is no third question.

*What is saved.* Full blocks whose tokens are all known and will have been computed when the step has ended, from the
first block that the store did not have when it was asked, in order and once. What the engine had cached itself is saved
too, if the store lacked it: that mends holes.

*Who is left alone.* Requests with an adapter (the engine's hashes hold its name, not its weights), with media (they
hold an identifier that the caller may choose), and those that ask for it with the parameter BYPASS.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.hits import Group, find_hit
from kvstore.connectors.paged.jobs import LoadJob, LoadResult, SaveJob, Span, StepJobs, span_of
from kvstore.connectors.paged.link import BlockStore, LazyStore, Worker, reason_of
from kvstore.connectors.paged.prefills import ComputedRequest, Prefills
from kvstore.connectors.paged.savings import Savings
from kvstore.connectors.paged.settings import PagedSettings
from kvstore.keys import Namespace

_LOG: Final = logging.getLogger(__name__)
FIRST_WAIT_S: Final = 0.005
IDLE_WAIT_S: Final = 0.005
"""An engine with nothing to compute asks again at once; waiting a little leaves the processor to the answer."""
MATCHERS: Final = 2
BYPASS: Final = "kvstore_bypass"
MOST_FAILURES: Final = 2


class EngineRequest(ComputedRequest, Protocol):
    """What is read of a request of the engine."""

    request_id: str
    block_hashes: Sequence[bytes]
    lora_request: Any
    mm_features: Sequence[Any]
    kv_transfer_params: Mapping[str, Any] | None

    @property
    def num_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class SpaceTable:
    """Groups of the engine, and for each rank the namespace of every group. hash_tokens: tokens of an engine hash."""

    groups: tuple[Group, ...]
    ranks: tuple[tuple[Namespace, ...], ...]
    hash_tokens: int
    align: int


@dataclass(slots=True)
class _Answer:
    """What the store has of a request's prefix; None until it has said. It counts until `give_up_at`."""

    give_up_at: float
    tokens: int | None = None


@dataclass(slots=True)
class _Followed:
    """A request from its first question to its end."""

    request: EngineRequest
    answer: _Answer | None = None
    local_tokens: int = 0
    saved_tokens: int = 0
    failures: int = 0
    limit_tokens: int | None = None
    loading_tokens: int = 0
    loading_since: float = 0.0


class Scheduling:
    """See the module docstring. Used by the engine's thread."""

    def __init__(self, store: LazyStore, table: SpaceTable, settings: PagedSettings, counts: Counts,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._savings = Savings(counts)
        self._prefills = Prefills(self._savings.computed, clock)
        self._store = store
        self._table = table
        self._settings = settings
        self._counts = counts
        self._matchers = [Worker(f"kvstore-match-{number}") for number in range(MATCHERS)]
        self._turn = 0
        self._answered = threading.Condition()
        self._asking = 0
        self._followed: dict[str, _Followed] = {}
        self._loads: list[LoadJob] = []

    # -- what is stored

    def matched(self, request: EngineRequest, local_tokens: int) -> int | None:
        """Tokens behind the first `local_tokens` that can be loaded; None: ask again."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            reason = left_alone(request)
            if reason is not None:
                self._counts.add(f"bypassed_{reason}")
                return 0
            followed = self._followed[request.request_id] = _Followed(request)
        followed.local_tokens = local_tokens
        limit = self._limit(followed)
        if limit == 0 or followed.failures >= MOST_FAILURES:
            return 0
        answer = followed.answer
        if answer is None:
            asked = answer = followed.answer = self._ask(request, limit)
            with self._answered:
                self._answered.wait_for(lambda: asked.tokens is not None, FIRST_WAIT_S)
        tokens = answer.tokens
        if tokens is None:
            if self._clock() < answer.give_up_at:
                return None
            self._counts.add("match_failed_late")
            tokens = 0
            followed.answer = _Answer(answer.give_up_at, tokens)
        followed.saved_tokens = max(followed.saved_tokens, tokens)
        gain = tokens - local_tokens
        return gain if gain > 0 and gain >= self._settings.min_tokens else 0

    def _limit(self, followed: _Followed) -> int:
        """Longest prefix worth asking for: full blocks, and one token at least is left to compute."""
        request = followed.request
        known = min(len(request.block_hashes) * self._table.hash_tokens, request.num_tokens - 1)
        if followed.limit_tokens is not None:
            known = min(known, followed.limit_tokens)
        return max(0, known - known % self._table.align)

    def _ask(self, request: EngineRequest, limit: int) -> _Answer:
        answer = _Answer(self._clock() + self._settings.config.match_deadline_ms / 1000)
        hashes = tuple(request.block_hashes[: limit // self._table.hash_tokens])
        self._turn = (self._turn + 1) % MATCHERS
        with self._answered:
            self._asking += 1
        self._matchers[self._turn].submit(partial(self._answer, answer, hashes, limit))
        return answer

    def _answer(self, answer: _Answer, hashes: tuple[bytes, ...], limit: int) -> None:
        tokens = 0
        try:
            store = self._store.get()
            if store is None:
                self._counts.add("match_failed_unreachable")
            else:
                tokens = find_hit(self._table.groups, limit, self._table.align, partial(self._leading, store, hashes))
        except Exception as error:
            self._counts.add(f"match_failed_{reason_of(error)}")
            _LOG.warning("the KV store did not answer: %r", error)
        finally:
            with self._answered:
                answer.tokens = tokens
                self._asking -= 1
                self._answered.notify_all()

    def _leading(self, store: BlockStore, hashes: tuple[bytes, ...], group: int, start: int, stop: int) -> int:
        """Leading blocks of [start, stop) that every rank has of a group."""
        ratio = self._table.groups[group].block_tokens // self._table.hash_tokens
        span = span_of(group, hashes[ratio - 1 :: ratio], start, (1,) * (stop - start))
        present = stop - start
        for namespaces in self._table.ranks:
            if present:
                present = store.match(span.chain(namespaces[group])[:present])
        return present

    # -- what is loaded

    def allocated(self, request: EngineRequest, pages: Sequence[Sequence[int]], tokens: int) -> None:
        """The engine gave the request pages, and will go on behind `tokens` more tokens than it had when they have been
        loaded; 0: it loads nothing. pages: for each group, those of blocks 0, 1, ..."""
        followed = self._followed.get(request.request_id)
        if followed is None:
            return
        followed.answer = None
        if tokens <= 0:
            return
        local = followed.local_tokens
        spans = []
        for index, group in enumerate(self._table.groups):
            needed = group.needed(local + tokens)
            start = max(needed.start, local // group.block_tokens)
            spans.append(self._span(request, index, start, pages[index][start : needed.stop]))
        self._loads.append(LoadJob(request.request_id, tuple(spans)))
        followed.loading_tokens = tokens
        followed.loading_since = self._clock()
        self._counts.add("hit_tokens", tokens)

    def _span(self, request: EngineRequest, index: int, start: int, pages: Sequence[int]) -> Span:
        ratio = self._table.groups[index].block_tokens // self._table.hash_tokens
        hashes = request.block_hashes[ratio - 1 : (start + len(pages)) * ratio : ratio]
        return span_of(index, hashes, start, pages)

    def failed(self, result: LoadResult) -> None:
        """A load of a request did not end well, on one rank; called before the engine asks again for that request."""
        followed = self._followed.get(result.request_id)
        if followed is None:
            return
        if followed.loading_tokens:
            followed.failures += 1
            self._counts.add("lost_tokens", followed.loading_tokens)
            self._savings.failed(self._clock() - followed.loading_since)
            followed.loading_tokens = 0
            followed.limit_tokens = result.good_tokens
        followed.limit_tokens = min(result.good_tokens, followed.limit_tokens or 0)
        followed.saved_tokens = min(followed.saved_tokens, result.good_tokens)

    def loaded(self, request_id: str) -> None:
        """A load of a request has ended on every rank; those that did not end well were told before."""
        followed = self._followed.get(request_id)
        if followed is not None and followed.loading_tokens:
            self._savings.loaded(followed.loading_tokens, self._clock() - followed.loading_since)
            followed.loading_tokens = 0

    # -- what is saved

    def step(self, scheduled: Mapping[str, int], pages_of: Callable[[str], Sequence[Sequence[int]] | None]) -> StepJobs:
        """The jobs of a step that computes so many tokens of each request."""
        followed = {request_id: self._followed[request_id] for request_id in scheduled if request_id in self._followed}
        self._prefills.step({request_id: each.request for request_id, each in followed.items()})
        saves = []
        for request_id, each in followed.items():
            job = self._to_save(each, scheduled[request_id], pages_of)
            if job is not None:
                saves.append(job)
        loads, self._loads = tuple(self._loads), []
        if not scheduled and not loads and self._asking:
            with self._answered:
                self._answered.wait(IDLE_WAIT_S)
        return StepJobs(loads, tuple(saves), idle=not scheduled)

    def _to_save(self, followed: _Followed, count: int,
                 pages_of: Callable[[str], Sequence[Sequence[int]] | None]) -> SaveJob | None:
        request, align = followed.request, self._table.align
        known = min(request.num_computed_tokens + count, request.num_tokens,
                    len(request.block_hashes) * self._table.hash_tokens)
        tokens = known - known % align
        if tokens <= followed.saved_tokens:
            return None
        pages = pages_of(request.request_id)
        if pages is None:
            return None
        spans = []
        for index, group in enumerate(self._table.groups):
            start, stop = followed.saved_tokens // group.block_tokens, tokens // group.block_tokens
            if len(pages[index]) < stop:
                return None
            spans.append(self._span(request, index, start, pages[index][start:stop]))
        followed.saved_tokens = tokens
        return SaveJob(request.request_id, tuple(spans))

    # -- end

    def ended(self, request_id: str) -> None:
        """The request has finished or was aborted."""
        self._prefills.ended(request_id)
        self._followed.pop(request_id, None)

    def close(self) -> None:
        for matcher in self._matchers:
            matcher.stop(0.0)


def left_alone(request: EngineRequest) -> str | None:
    """Why the store has no part in a request; None when it has."""
    if request.lora_request is not None:
        return "lora"
    if request.mm_features:
        return "media"
    if (request.kv_transfer_params or {}).get(BYPASS):
        return "asked"
    return None
