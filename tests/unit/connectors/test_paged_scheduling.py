"""The scheduling side of a connector with a store in memory: promises, loads, failures, and what is saved when."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.hits import Group
from kvstore.connectors.paged.jobs import NO_PAGE, LoadResult, SaveJob, StepJobs
from kvstore.connectors.paged.link import LazyStore
from kvstore.connectors.paged.scheduling import BYPASS, Scheduling, SpaceTable
from kvstore.connectors.paged.settings import read_settings
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from tests.support.blockstore import MemoryBlockStore
from tests.support.waiting import DEADLINE_S, eventually

TOKENS = 16
LAYOUT = BlockLayout.opaque(64, TOKENS)
FULL, WINDOW = Group(TOKENS), Group(TOKENS, window_tokens=40)
RANKS = tuple(
    tuple(Namespace("m", "w", LAYOUT, parallel=(rank, 2), group=group) for group in range(2)) for rank in range(2)
)


@dataclass
class Request:
    """As much of an engine's request as is read."""

    request_id: str
    num_tokens: int
    num_computed_tokens: int = 0
    lora_request: Any = None
    mm_features: Sequence[Any] = ()
    kv_transfer_params: Mapping[str, Any] | None = None
    block_hashes: Sequence[bytes] = field(default_factory=list)
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0

    def __post_init__(self) -> None:
        self.block_hashes = hashes(self.num_tokens // TOKENS)
        self.num_prompt_tokens = self.num_tokens


def hashes(count: int) -> list[bytes]:
    return [bytes([at]) * 32 for at in range(count)]


class Rig:
    """A scheduler of two ranks with a group of full attention and one with a window."""

    def __init__(self, **more: object) -> None:
        self.store = MemoryBlockStore()
        self.counts = Counts()
        table = SpaceTable((FULL, WINDOW), RANKS, TOKENS, TOKENS)
        link = LazyStore(lambda: self.store, self.counts)
        link.open()
        self.now: float | None = None
        self.scheduling = Scheduling(link, table, read_settings({"store": "cluster.toml", **more}, environ={}),
                                     self.counts, lambda: time.monotonic() if self.now is None else self.now)
        self.pages: dict[str, Sequence[Sequence[int]]] = {}

    def put(self, blocks: int, *, rank: int | None = None, group: int | None = None) -> None:
        for at, namespaces in enumerate(RANKS):
            for index, namespace in enumerate(namespaces):
                if rank in (None, at) and group in (None, index):
                    chain = namespace.bind(hashes(blocks))
                    self.store.put(chain, np.zeros(blocks * LAYOUT.block_bytes, np.uint8))

    def matched(self, request: Request, local: int = 0) -> int:
        found: list[int | None] = []

        def asked() -> bool:
            found.append(self.scheduling.matched(request, local))
            return found[-1] is not None

        assert eventually(asked)
        assert found[-1] is not None
        return found[-1]

    def step(self, scheduled: dict[str, int]) -> StepJobs:
        return self.scheduling.step(scheduled, self.pages.get)

    def allocated(self, request: Request, tokens: int) -> None:
        """As the engine does it: no pages for what no token to come can see."""
        blocks = (request.num_tokens + TOKENS - 1) // TOKENS
        first = WINDOW.needed(tokens).start
        full = list(range(10, 10 + blocks))
        window = [NO_PAGE] * first + list(range(110 + first, 110 + blocks))
        self.pages[request.request_id] = (full, window)
        self.scheduling.allocated(request, (full, window), tokens)


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.scheduling.close()


def saved(jobs: Sequence[SaveJob]) -> list[tuple[int, int, int]]:
    return [(span.group, span.start, span.stop) for job in jobs for span in job.spans]


def test_a_prefix_counts_only_where_every_rank_has_it(rig: Rig) -> None:
    rig.put(6)
    rig.put(9, rank=0)
    assert rig.matched(Request("r", 160)) == 96


def test_one_token_is_left_to_compute(rig: Rig) -> None:
    rig.put(10)
    assert rig.matched(Request("r", 160)) == 144
    assert rig.matched(Request("s", 161)) == 160


def test_what_the_engine_has_itself_is_not_loaded_again(rig: Rig) -> None:
    rig.put(6)
    assert rig.matched(Request("r", 160), local=64) == 32
    assert rig.matched(Request("s", 160), local=96) == 0
    assert rig.matched(Request("t", 160), local=128) == 0


def test_gains_below_the_threshold_are_computed() -> None:
    rig = Rig(min_tokens=33)
    rig.put(6)
    assert rig.matched(Request("r", 160), local=64) == 0
    assert rig.matched(Request("s", 160), local=48) == 48
    rig.scheduling.close()


def test_a_slow_answer_is_asked_for_again_and_never_waited_for(rig: Rig) -> None:
    rig.put(6)
    answered = threading.Event()

    def wait(verb: str) -> None:
        answered.wait(DEADLINE_S)

    rig.store.before = wait
    request = Request("r", 160)
    assert rig.scheduling.matched(request, 0) is None
    assert rig.scheduling.matched(request, 0) is None
    answered.set()
    assert rig.matched(request) == 96


def test_an_answer_that_does_not_come_by_the_deadline_is_a_miss() -> None:
    rig = Rig(match_deadline_ms=50)
    rig.put(6)
    held = threading.Event()

    def wait(verb: str) -> None:
        held.wait(DEADLINE_S)

    rig.store.before = wait
    request = Request("r", 160)
    assert rig.matched(request) == 0
    assert rig.counts.total["match_failed_late"] == 1
    held.set()
    assert rig.matched(request) == 0
    rig.allocated(request, 0)
    assert rig.matched(request) == 96
    rig.scheduling.close()


def test_a_load_brings_all_of_full_groups_and_the_window_of_the_others(rig: Rig) -> None:
    rig.put(6)
    request = Request("r", 160)
    tokens = rig.matched(request, local=16)
    rig.allocated(request, tokens)
    (job,) = rig.step({}).loads
    full, window = job.spans
    assert (full.start, full.stop) == (1, 6)
    assert full.pages == (11, 12, 13, 14, 15)
    assert (window.start, window.stop) == (3, 6)
    assert window.chain(RANKS[0][1]).keys == RANKS[0][1].bind(hashes(6)).keys[3:6]
    assert rig.step({}).loads == ()


def test_a_failed_load_is_followed_by_a_shorter_one_and_that_by_none(rig: Rig) -> None:
    rig.put(9)
    request = Request("r", 160)
    for good, expected in ((7, 9), (5, 7)):
        tokens = rig.matched(request)
        assert tokens == expected * TOKENS
        rig.allocated(request, tokens)
        rig.step({})
        for _ in range(2):
            # Of every rank.
            rig.scheduling.failed(LoadResult("r", ok=False, good_tokens=good * TOKENS))
    assert rig.matched(request) == 0
    assert rig.counts.total["lost_tokens"] == rig.counts.total["hit_tokens"] == 16 * TOKENS


def test_a_load_that_fails_at_once_is_computed_from_the_beginning(rig: Rig) -> None:
    rig.put(9)
    request = Request("r", 160)
    rig.allocated(request, rig.matched(request))
    rig.scheduling.failed(LoadResult("r", ok=False, good_tokens=0))
    assert rig.matched(request) == 0


def test_blocks_are_saved_once_when_they_are_full_and_computed(rig: Rig) -> None:
    rig.put(2)
    request = Request("r", 160)
    rig.allocated(request, rig.matched(request))
    request.num_computed_tokens = 32
    assert saved(rig.step({"r": 40}).saves) == [(0, 2, 4), (1, 2, 4)]
    request.num_computed_tokens = 72
    assert saved(rig.step({"r": 7}).saves) == []
    request.num_computed_tokens = 79
    assert saved(rig.step({"r": 81}).saves) == [(0, 4, 10), (1, 4, 10)]
    request.num_computed_tokens = 160
    assert rig.step({"r": 1}).saves == ()


def test_tokens_that_are_not_known_yet_make_no_full_block(rig: Rig) -> None:
    request = Request("r", 47)
    rig.allocated(request, rig.matched(request))
    assert saved(rig.step({"r": 48}).saves) == [(0, 0, 2), (1, 0, 2)]


def test_a_hole_in_front_of_what_the_engine_cached_is_mended(rig: Rig) -> None:
    rig.put(2)
    request = Request("r", 160)
    assert rig.matched(request, local=128) == 0
    rig.allocated(request, 0)
    request.num_computed_tokens = 128
    assert saved(rig.step({"r": 32}).saves) == [(0, 2, 10), (1, 2, 10)]


@pytest.mark.parametrize(("changes", "reason"), [
    ({"lora_request": object()}, "lora"),
    ({"mm_features": [object()]}, "media"),
    ({"kv_transfer_params": {BYPASS: True}}, "asked"),
])
def test_requests_that_are_left_alone_neither_load_nor_save(rig: Rig, changes: dict[str, Any], reason: str) -> None:
    rig.put(6)
    request = Request("r", 160, **changes)
    assert rig.scheduling.matched(request, 0) == 0
    rig.allocated(request, 0)
    assert rig.step({"r": 160}).saves == ()
    assert rig.counts.total == {f"bypassed_{reason}": 1}


@pytest.mark.parametrize("error", [OSError("gone"), RuntimeError("a bug")])
def test_a_store_that_fails_is_a_miss(rig: Rig, error: Exception) -> None:
    rig.put(6)

    def fail(verb: str) -> None:
        raise error

    rig.store.before = fail
    assert rig.matched(Request("r", 160)) == 0
    assert rig.counts.total["match_failed_unknown"] == 1


def test_what_a_load_saves_is_told_when_computing_has_been_measured(rig: Rig) -> None:
    rig.put(6)
    computed, loads = Request("c", 128), Request("r", 160)
    tokens = rig.matched(loads)
    rig.matched(computed)
    rig.now = 100.0
    rig.step({"c": 64})
    rig.allocated(loads, tokens)
    rig.now = 100.5
    rig.scheduling.loaded("r")
    assert "saved_ms" not in rig.counts.total
    rig.step({"c": 64})
    rig.now = 101.28
    computed.num_output_tokens = 1
    rig.scheduling.ended("c")
    # 128 tokens took 1,280 ms, so 96 tokens 960 ms, and the load of them 500.
    assert rig.counts.total["saved_ms"] == 460


def test_time_of_a_load_that_failed_is_wasted_once(rig: Rig) -> None:
    rig.put(6)
    request = Request("r", 160)
    tokens = rig.matched(request)
    rig.now = 7.0
    rig.allocated(request, tokens)
    rig.now = 7.25
    for _ in range(2):
        rig.scheduling.failed(LoadResult("r", ok=False, good_tokens=0))
    rig.scheduling.loaded("r")
    assert rig.counts.total["wasted_ms"] == 250
    assert "saved_ms" not in rig.counts.total


@pytest.mark.parametrize("outcome", ["aborted", "preempted"])
def test_a_prompt_that_is_not_computed_to_its_end_measures_nothing(rig: Rig, outcome: str) -> None:
    request = Request("r", 160)
    rig.matched(request)
    request.num_computed_tokens = 16
    rig.step({"r": 100})
    if outcome == "preempted":
        request.num_computed_tokens = 0
        rig.step({})
        request.num_output_tokens = 1
    rig.scheduling.ended("r")
    rig.scheduling._savings.loaded(96, 0.0)
    assert "saved_ms" not in rig.counts.total


def test_requests_that_ended_are_forgotten(rig: Rig) -> None:
    rig.put(6)
    request = Request("r", 160)
    rig.allocated(request, rig.matched(request))
    rig.scheduling.ended("r")
    assert rig.step({"r": 160}).saves == ()
    rig.scheduling.failed(LoadResult("r", ok=False))
    rig.scheduling.ended("r")
