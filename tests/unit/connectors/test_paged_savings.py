"""What loads spared, from what computing took: an estimate that must not flatter."""

from __future__ import annotations

from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.savings import FORGET_TOKENS, MEASURED_TOKENS, MOST_UNRATED, Savings


def test_a_load_saves_what_computing_would_have_taken_less_what_it_took() -> None:
    counts = Counts()
    savings = Savings(counts)
    savings.computed(1000, 2.0)
    savings.loaded(500, 0.25)
    assert counts.total == {"saved_ms": 750}


def test_a_load_that_is_slower_than_computing_is_a_waste() -> None:
    counts = Counts()
    savings = Savings(counts)
    savings.computed(1000, 2.0)
    savings.loaded(100, 0.5)
    savings.failed(0.125)
    assert counts.total == {"wasted_ms": 300 + 125}


def test_a_few_tokens_measure_nothing() -> None:
    counts = Counts()
    savings = Savings(counts)
    savings.computed(MEASURED_TOKENS - 1, 100.0)
    savings.loaded(500, 0.25)
    assert counts.total == {}


def test_loads_before_the_first_measurement_are_rated_by_it_and_are_bounded() -> None:
    counts = Counts()
    savings = Savings(counts)
    for _ in range(MOST_UNRATED + 5):
        savings.loaded(100, 0.1)
    assert counts.total == {}
    savings.computed(100, 1.1)
    assert counts.total == {"saved_ms": MOST_UNRATED * 1000}


def test_an_engine_that_became_slower_is_believed() -> None:
    counts = Counts()
    savings = Savings(counts)
    for _ in range(10):
        savings.computed(FORGET_TOKENS // 2, 1.0)
    for _ in range(10):
        savings.computed(FORGET_TOKENS // 2, 100.0)
    savings.loaded(FORGET_TOKENS // 2, 0.0)
    assert 90_000 < counts.total["saved_ms"] <= 100_000
