"""Questions for chunks with a store in memory: one for a step, answered by what a prefix needs, never waited for."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from efs.errors import NodeUnavailable
from kvstore.connectors.paged.chunklookups import ChunkLookups, RequestChunks
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.hits import Group
from kvstore.connectors.paged.link import LazyStore
from kvstore.connectors.paged.settings import read_settings
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from tests.support.blockstore import MemoryBlockStore
from tests.support.waiting import eventually

TOKENS = 16
FULL, WINDOW = 0, 1
GROUPS = {FULL: Group(TOKENS), WINDOW: Group(TOKENS, 2 * TOKENS + 1)}
SPACES = {group: Namespace("m", "w", BlockLayout.opaque(64, TOKENS), group=group) for group in GROUPS}


def hashes(count: int, seed: int = 0) -> list[bytes]:
    return [bytes([seed, at]) * 16 for at in range(count)]


def request_of(count: int, seed: int = 0) -> RequestChunks:
    request = RequestChunks()
    for group in GROUPS:
        for position, chunk in enumerate(hashes(count, seed)):
            request.follow(group, position, chunk)
    return request


class Rig:
    """Lookups, and a request's answers after one step."""

    def __init__(self, **more: object) -> None:
        self.store = MemoryBlockStore()
        self.counts = Counts()
        link = LazyStore(lambda: self.store, self.counts)
        link.open()
        settings = read_settings({"store": "cluster.toml", **more}, environ={})
        self.lookups = ChunkLookups(link, GROUPS, SPACES, settings, self.counts)
        self.questions = 0

        def asked(verb: str) -> None:
            self.questions += 1

        self.store.before = asked

    def put(self, group: int, first: int, stop: int) -> None:
        chain = SPACES[group].bind(hashes(stop))[first:]
        self.store.put(chain, np.zeros(len(chain) * 64, np.uint8))
        self.questions = 0

    def answers(self, request: RequestChunks, first: int, stop: int) -> list[list[int]]:
        """Positions that are there, of each group."""
        wanted = [(group, position) for group in GROUPS for position in range(first, stop)]
        assert all(self.lookups.lookup(request, place) is None for place in wanted)
        self.lookups.flush()
        assert eventually(lambda: all(self.lookups.lookup(request, place) is not None for place in wanted))
        there = [place for place in wanted if self.lookups.lookup(request, place)]
        return [[position for group, position in there if group == each] for each in GROUPS]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.lookups.close()


def test_a_step_asks_one_question_for_each_group(rig: Rig) -> None:
    rig.put(FULL, 0, 9)
    rig.put(WINDOW, 0, 9)
    assert rig.answers(request_of(9), 0, 9) == [list(range(9)), [7, 8]]
    assert rig.questions == 2


def test_a_prefix_ends_where_either_group_ends(rig: Rig) -> None:
    rig.put(FULL, 0, 7)
    rig.put(WINDOW, 2, 9)
    assert rig.answers(request_of(9), 0, 9) == [list(range(7)), [5, 6]]


def test_a_hole_in_a_window_shortens_the_prefix_to_a_window_before_it(rig: Rig) -> None:
    rig.put(FULL, 0, 9)
    rig.put(WINDOW, 0, 5)
    rig.put(WINDOW, 6, 8)
    rig.store.blocks.pop(SPACES[WINDOW].bind(hashes(9))[7])
    assert rig.answers(request_of(9), 0, 9) == [list(range(5)), [3, 4]]


def test_what_was_not_asked_for_the_engine_has(rig: Rig) -> None:
    rig.put(FULL, 4, 9)
    rig.put(WINDOW, 4, 9)
    assert rig.answers(request_of(9), 4, 9) == [list(range(4, 9)), [7, 8]]


def test_nothing_stored_is_nothing_found(rig: Rig) -> None:
    assert rig.answers(request_of(9), 0, 9) == [[], []]


def test_two_requests_with_one_prefix_have_answers_of_their_own(rig: Rig) -> None:
    rig.put(FULL, 0, 9)
    rig.put(WINDOW, 0, 9)
    assert rig.answers(request_of(9), 0, 9) == [list(range(9)), [7, 8]]
    assert rig.answers(request_of(6), 0, 6) == [list(range(6)), [4, 5]]


def test_gains_below_the_threshold_are_computed() -> None:
    rig = Rig(min_tokens=3 * TOKENS)
    rig.put(FULL, 0, 6)
    rig.put(WINDOW, 0, 6)
    assert rig.answers(request_of(6), 4, 6) == [[], []]
    assert rig.answers(request_of(6), 3, 6) == [[3, 4, 5], [4, 5]]
    rig.lookups.close()


def test_a_chunk_whose_load_failed_is_promised_to_nobody_again(rig: Rig) -> None:
    rig.put(FULL, 0, 9)
    rig.put(WINDOW, 0, 9)
    first, other, stranger = request_of(9), request_of(12), request_of(9, seed=1)
    rig.answers(first, 0, 9)
    failed = {(FULL, 3): hashes(9)[3]}
    rig.lookups.failed({"r": first, "s": other, "t": stranger}, failed)
    assert rig.lookups.lookup(first, (FULL, 3)) is False
    assert rig.lookups.lookup(other, (FULL, 3)) is False
    assert rig.lookups.lookup(stranger, (FULL, 3)) is None


def test_an_answer_that_does_not_come_by_the_deadline_is_a_miss_and_stays_one() -> None:
    rig = Rig(match_deadline_ms=50)
    rig.put(FULL, 0, 2)
    rig.put(WINDOW, 0, 2)
    held, asked = threading.Event(), threading.Event()

    def hold(verb: str) -> None:
        asked.set()
        held.wait(20)

    rig.store.before = hold
    request = request_of(2)
    assert rig.lookups.lookup(request, (FULL, 0)) is None
    rig.lookups.flush()
    assert asked.wait(20)
    assert eventually(lambda: rig.lookups.lookup(request, (FULL, 0)) is False)
    assert rig.counts.total["match_failed_late"] == 1
    held.set()
    rig.lookups.close()
    assert rig.lookups.lookup(request, (FULL, 0)) is False


@pytest.mark.parametrize(("error", "reason"), [(NodeUnavailable(3, "gone"), "NodeUnavailable"),
                                               (RuntimeError("a bug"), "unknown")])
def test_a_question_that_fails_is_a_miss(rig: Rig, error: Exception, reason: str) -> None:
    def fail(verb: str) -> None:
        raise error

    rig.store.before = fail
    assert rig.answers(request_of(3), 0, 3) == [[], []]
    assert rig.counts.total[f"match_failed_{reason}"] == 1
