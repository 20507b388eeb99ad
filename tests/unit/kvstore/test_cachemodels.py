"""Cache models: against brute force on tiny traces, and on the two real traces against figures found elsewhere."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efs.errors import InvalidArgument
from kvstore.cachemodels import belady, infinite, lru
from kvstore.traces import Request, read_trace
from tests.support.traces import AGENT, SYNTHETIC, TraceFile

PERCENT = (1, 5, 10, 20, 50)


def chains(source: random.Random, requests: int, blocks: int) -> list[tuple[int, ...]]:
    """Requests for prefixes of a random tree of blocks 0 … blocks - 1."""
    parent = [source.randrange(-1, number) if number else -1 for number in range(blocks)]

    def path(block: int) -> tuple[int, ...]:
        return (*path(parent[block]), block) if block >= 0 else ()

    return [path(source.randrange(blocks)) for _ in range(requests)]


tiny = st.builds(chains, st.integers(0, 1 << 32).map(random.Random), st.integers(1, 9), st.integers(1, 7))


def leading(blocks: Sequence[int], held: frozenset[int]) -> int:
    return next((depth for depth, block in enumerate(blocks) if block not in held), len(blocks))


# -- Brute force -----------------------------------------------------------------------------------------------------


def most_hits(requests: Sequence[Sequence[int]], capacity: int) -> int:
    """The best over every cache content that any policy can have after every request."""
    best = {frozenset[int](): 0}
    for blocks in requests:
        after: dict[frozenset[int], int] = {}
        for held, hits in best.items():
            reached = hits + leading(blocks, held)
            may_hold = held | frozenset(blocks)
            for size in range(min(capacity, len(may_hold)) + 1):
                for kept in map(frozenset, combinations(sorted(may_hold), size)):
                    after[kept] = max(after.get(kept, 0), reached)
        best = after
    return max(best.values())


def slow_lru(requests: Sequence[Sequence[int]], capacity: int) -> list[int]:
    """By the definition: keep the blocks with the highest (request, -depth) of their last use."""
    used: dict[int, tuple[int, int]] = {}
    hits = []
    for number, blocks in enumerate(requests):
        hits.append(leading(blocks, frozenset(used)))
        used.update({block: (number, -depth) for depth, block in enumerate(blocks)})
        used = dict(sorted(used.items(), key=lambda item: item[1])[-capacity:])
    return hits


@settings(max_examples=60, deadline=None)
@given(tiny, st.integers(1, 4))
def test_no_policy_has_more_hits_than_belady(requests: list[tuple[int, ...]], capacity: int) -> None:
    assert sum(belady(requests, capacity)) == most_hits(requests, capacity)


@settings(max_examples=200, deadline=None)
@given(tiny, st.integers(1, 7))
def test_lru_keeps_what_was_used_last_and_of_one_request_the_head(
    requests: list[tuple[int, ...]], capacity: int
) -> None:
    assert lru(requests, capacity) == slow_lru(requests, capacity)


@settings(max_examples=100, deadline=None)
@given(tiny)
def test_a_cache_that_is_never_full_is_an_infinite_one(requests: list[tuple[int, ...]]) -> None:
    whole = len({block for blocks in requests for block in blocks}) or 1
    assert lru(requests, whole) == belady(requests, whole) == infinite(requests)


def test_a_chain_that_does_not_fit_leaves_its_head() -> None:
    assert lru([(0, 1, 2, 3), (0, 1, 2, 3)], 2) == [0, 2]
    assert belady([(0, 1, 2, 3), (0, 1, 2, 3)], 2) == [0, 2]


def test_belady_keeps_what_comes_soonest_where_lru_keeps_what_came_last() -> None:
    requests = [(0,), (1,), (0,), (2,), (0,), (1,)]
    assert lru(requests, 1) == [0, 0, 0, 0, 0, 0]
    assert belady(requests, 1) == [0, 0, 1, 0, 1, 0]
    assert belady(requests, 2) == [0, 0, 1, 0, 1, 1]


def test_a_capacity_below_one_block_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="capacity is 0 blocks"):
        lru([], 0)
    with pytest.raises(InvalidArgument, match="capacity is -1 blocks"):
        belady([], -1)


# -- The real traces, in the blocks that they come in ------------------------------------------------------------------


def token_ratio(requests: Sequence[Request], hits: Sequence[int]) -> float:
    """Share of the prompts' tokens that were hit, in the trace's own blocks, of which the last may be partial."""
    tokens = sum(min(hit * request.id_tokens, request.input_tokens)
                 for request, hit in zip(requests, hits, strict=True))
    return tokens / sum(request.input_tokens for request in requests)


@pytest.mark.parametrize(
    ("trace", "unlimited", "limited"),
    [
        (SYNTHETIC, 0.651, (0.039, 0.160, 0.267, 0.400, 0.600)),
        (AGENT, 0.926, (0.238, 0.647, 0.779, 0.909, 0.925)),
    ],
    ids=["synthetic", "agent"],
)
def test_infinite_and_lru_ratios_of_the_real_traces(
    trace: TraceFile, unlimited: float, limited: tuple[float, ...]
) -> None:
    requests = list(read_trace(trace.path))
    asked = [request.ids for request in requests]
    unique = len({number for ids in asked for number in ids})
    assert token_ratio(requests, infinite(asked)) == pytest.approx(unlimited, abs=0.001)
    found = [token_ratio(requests, lru(asked, unique * percent // 100)) for percent in PERCENT]
    assert found == pytest.approx(limited, abs=0.001)


def test_belady_lies_between_lru_and_the_infinite_cache() -> None:
    asked = [request.blocks for request in read_trace(SYNTHETIC.path)]
    unique = len({block for blocks in asked for block in blocks})
    assert sum(lru(asked, unique // 10)) * 1.5 < sum(belady(asked, unique // 10)) < sum(infinite(asked))


def test_lru_is_all_but_optimal_for_an_agent_whose_sessions_follow_each_other() -> None:
    asked = [request.blocks for request in read_trace(AGENT.path)]
    unique = len({block for blocks in asked for block in blocks})
    for percent in PERCENT:
        best = sum(belady(asked, unique * percent // 100))
        assert 0.99 * best <= sum(lru(asked, unique * percent // 100)) <= best
