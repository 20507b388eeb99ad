"""What the store has of the chunks of a request: asked once for a step, on threads, and never waited for.

An engine with a second tier of its own (`kvstore.connectors.paged.chunks`) asks for one chunk after the other. That
is too small a question for a store of twelve nodes, and the answer to it is not what matters: a chunk is of use where
a prefix can be loaded that needs it. So the chunks that a request asks for in a step are one question: which is the
longest prefix that is stored (`find_hit`)? The chunks that it needs are there, all others are not. What a request did
not ask for it has elsewhere, and is taken as there.

Answers belong to the request. A question that is not answered by the deadline of a match counts as a miss, and a
chunk whose load failed is a miss for every request from then on, so none can go in circles.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping
from functools import partial
from typing import Final

from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.hits import Group, find_hit
from kvstore.connectors.paged.jobs import Span, span_of
from kvstore.connectors.paged.link import BlockStore, LazyStore, Worker, reason_of
from kvstore.connectors.paged.settings import PagedSettings
from kvstore.keys import Namespace

_LOG: Final = logging.getLogger(__name__)
MATCHERS: Final = 2
Place = tuple[int, int]
"""(group, position in the sequence) of a chunk."""


class RequestChunks:
    """Which chunk of a request stands where, as far as that is known, and what was answered about it."""

    def __init__(self) -> None:
        self._hashes: dict[int, list[bytes]] = {}
        self.verdicts: dict[Place, bool] = {}
        self.asked: set[Place] = set()
        self.wanted: list[Place] = []
        self.give_up_at = 0.0
        self.seen = 0

    def follow(self, group: int, position: int, chunk_hash: bytes) -> None:
        """Chunks of a group come in the order of the sequence, without gaps; those that are known may come again."""
        hashes = self._hashes.setdefault(group, [])
        if position == len(hashes):
            hashes.append(chunk_hash)

    def known(self, group: int) -> int:
        """Chunks of a group whose place is known."""
        return len(self._hashes.get(group, ()))

    def hash_at(self, place: Place) -> bytes:
        return self._hashes[place[0]][place[1]]

    def span(self, group: int, start: int, slots: tuple[int, ...]) -> Span:
        """Chunks from `start` on with the slots that they have."""
        return span_of(group, self._hashes[group], start, slots)


class ChunkLookups:
    """See the module docstring. Used by the engine's thread. groups and namespaces: by the engine's number of a
    group; a group's block is a chunk."""

    def __init__(self, link: LazyStore, groups: Mapping[int, Group], namespaces: Mapping[int, Namespace],
                 settings: PagedSettings, counts: Counts) -> None:
        self._link = link
        self._numbers = tuple(groups)
        self._groups = tuple(groups.values())
        self._align = max(group.block_tokens for group in self._groups)
        self._namespaces = namespaces
        self._settings = settings
        self._counts = counts
        self._matchers = [Worker(f"kvstore-match-{number}") for number in range(MATCHERS)]
        self._turn = 0
        self._lock = threading.Lock()
        self._asking: dict[int, RequestChunks] = {}

    def lookup(self, request: RequestChunks, place: Place) -> bool | None:
        """Whether this chunk is there and of use; None: ask again in a later step."""
        with self._lock:
            verdict = request.verdicts.get(place)
        if verdict is not None:
            return verdict
        if place not in request.asked:
            request.asked.add(place)
            request.wanted.append(place)
            self._asking[id(request)] = request
        elif not request.wanted and time.monotonic() > request.give_up_at:
            self._counts.add("match_failed_late")
            self._answered(request, dict.fromkeys(request.asked - set(request.verdicts), False))
            return False
        return None

    def flush(self) -> None:
        """The step has asked for all that it wants."""
        for request in self._asking.values():
            places, request.wanted = request.wanted, []
            request.give_up_at = time.monotonic() + self._settings.config.match_deadline_ms / 1000
            self._turn = (self._turn + 1) % MATCHERS
            self._matchers[self._turn].submit(partial(self._answer, request, places))
        self._asking.clear()

    def failed(self, requests: Mapping[str, RequestChunks], places: Mapping[Place, bytes]) -> None:
        """Loads of these chunks failed: nobody is promised them again. places: with the hash of each."""
        for request in requests.values():
            same = [(group, position) for (group, position), chunk_hash in places.items()
                    if position < request.known(group) and request.hash_at((group, position)) == chunk_hash]
            request.asked.update(same)
            self._answered(request, dict.fromkeys(same, False))

    def _answered(self, request: RequestChunks, verdicts: dict[Place, bool]) -> None:
        with self._lock:
            request.verdicts.update(verdicts)

    def _answer(self, request: RequestChunks, places: list[Place]) -> None:
        useful: set[Place] = set()
        try:
            store = self._link.get()
            if store is None:
                self._counts.add("match_failed_unreachable")
            else:
                useful = self._useful(store, request, places)
        except Exception as error:
            self._counts.add(f"match_failed_{reason_of(error)}")
            _LOG.warning("the KV store did not answer: %r", error)
        finally:
            # What came too late was answered by a miss already, and stays one.
            self._answered(request, {place: place in useful for place in places if place not in request.verdicts})

    def _useful(self, store: BlockStore, request: RequestChunks, places: list[Place]) -> set[Place]:
        """Those of the places that the longest stored prefix needs."""
        asked: dict[int, list[int]] = {}
        for group, position in sorted(places):
            asked.setdefault(group, []).append(position)

        def leading(index: int, start: int, stop: int) -> int:
            number = self._numbers[index]
            wanted = [position for position in asked.get(number, ()) if start <= position < stop]
            if not wanted:
                return stop - start
            first, end = wanted[0], wanted[-1] + 1
            span = request.span(number, first, (1,) * (end - first))
            present = store.match(span.chain(self._namespaces[number]))
            return stop - start if present == end - first else first + present - start

        limit = min(request.known(number) * group.block_tokens
                    for number, group in zip(self._numbers, self._groups, strict=True))
        tokens = find_hit(self._groups, limit, self._align, leading)
        first_asked = min(position * group.block_tokens
                          for number, group in zip(self._numbers, self._groups, strict=True)
                          for position in asked.get(number, ())[:1])
        if tokens - first_asked < max(1, self._settings.min_tokens):
            return set()
        return {(number, position) for number, group in zip(self._numbers, self._groups, strict=True)
                for position in asked.get(number, ()) if position in group.needed(tokens)}

    def close(self) -> None:
        """End the threads; a question under way ends by its own deadline."""
        for matcher in self._matchers:
            matcher.stop(0.0)
