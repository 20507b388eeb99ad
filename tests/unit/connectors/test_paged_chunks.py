"""Chunks of an engine's own host tier with a store in memory: loads and saves, what fails, and what is bounded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from efs.errors import NodeUnavailable
from kvstore.connectors.paged.chunks import ChunkResult, ChunkTransfers
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.jobs import Span, span_of
from kvstore.connectors.paged.link import LazyStore
from kvstore.connectors.paged.settings import read_settings
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from tests.support.blockstore import MemoryBlockStore
from tests.support.waiting import eventually

BYTES, TOKENS, SLOTS = 512, 16, 40
HASHES = [bytes([at]) * 32 for at in range(100)]
SPACES = {group: Namespace("m", "w", BlockLayout.opaque(BYTES, TOKENS), group=group) for group in (0, 3)}


def span(start: int, slots: Sequence[int], group: int = 0) -> Span:
    return span_of(group, HASHES, start, slots)


class Rig:
    """Forty slots of random bytes, and jobs by number."""

    def __init__(self, **more: object) -> None:
        self.store = MemoryBlockStore()
        self.counts = Counts()
        self.link = LazyStore(lambda: self.store, self.counts)
        self.link.open()
        self.slots = np.random.default_rng(7).integers(0, 256, (SLOTS, BYTES), np.uint8)
        settings = read_settings({"store": "cluster.toml", **more}, environ={})
        self.transfers = ChunkTransfers(self.link, SPACES, self.slots, settings, self.counts)
        self.jobs = 0

    def ended(self) -> list[ChunkResult]:
        assert eventually(lambda: not self.transfers.busy)
        return self.transfers.finished()

    def load(self, *spans: Span) -> ChunkResult:
        self.jobs += 1
        self.transfers.load(self.jobs, spans)
        (result,) = self.ended()
        assert (result.job, result.load) == (self.jobs, True)
        return result

    def save(self, *spans: Span) -> ChunkResult:
        self.jobs += 1
        self.transfers.save(self.jobs, spans)
        (result,) = self.ended()
        assert (result.job, result.load) == (self.jobs, False)
        return result


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.transfers.close()


@pytest.mark.parametrize("into", [[20, 21, 22], [22, 30, 20]])
def test_saved_chunks_come_back_into_other_slots_of_each_group(rig: Rig, into: list[int]) -> None:
    assert rig.save(span(0, [3, 4, 9]), span(2, [5], group=3)).ok
    result = rig.load(span(0, into), span(2, [35], group=3))
    assert result.ok
    assert result.good == {(0, 0), (0, 1), (0, 2), (3, 2)}
    assert result.bytes == 4 * BYTES
    assert np.array_equal(rig.slots[into], rig.slots[[3, 4, 9]])
    assert np.array_equal(rig.slots[35], rig.slots[5])
    assert rig.counts.total["save_blocks"] == 4


def test_neighbouring_slots_are_filled_where_they_are(rig: Rig) -> None:
    rig.save(span(0, [3, 4]))
    seen: list[int] = []
    into = rig.store.get_into

    def watched(chain: object, out: np.ndarray[tuple[int], np.dtype[np.uint8]], **more: object) -> object:
        seen.append(out.ctypes.data)
        return into(chain, out)  # type: ignore[arg-type]

    rig.store.get_into = watched  # type: ignore[method-assign, assignment]
    assert rig.load(span(0, [7, 8])).ok
    assert seen == [rig.slots[7].ctypes.data]


def test_a_load_is_good_chunk_by_chunk_and_leaves_other_slots_alone(rig: Rig) -> None:
    rig.save(span(0, [1, 2, 3]), span(0, [4, 5], group=3))
    rig.store.lost = {SPACES[0].bind(HASHES[:3])[1]}
    before = rig.slots[[10, 12]].copy()
    result = rig.load(span(0, [20, 22, 24]), span(0, [30, 31], group=3))
    assert rig.store.faults
    assert not result.ok
    assert {(0, 0), (3, 0), (3, 1)} <= result.good
    assert (0, 1) not in result.good
    assert np.array_equal(rig.slots[20], rig.slots[1])
    assert np.array_equal(rig.slots[[30, 31]], rig.slots[[4, 5]])
    assert np.array_equal(rig.slots[[10, 12]], before)
    assert rig.counts.total["load_failed_missing"] == 1
    assert rig.counts.total.get("loads", 0) == 0


@pytest.mark.parametrize("error", [NodeUnavailable(3, "gone"), RuntimeError("a bug")])
def test_whatever_a_store_raises_every_job_is_answered(rig: Rig, error: Exception) -> None:
    def fail(verb: str) -> None:
        raise error

    rig.store.before = fail
    loaded, saved = rig.load(span(0, [5])), rig.save(span(0, [5]))
    assert not loaded.ok
    assert loaded.good == frozenset()
    assert not saved.ok
    assert rig.counts.total["save_failed_blocks"] == 1


def test_what_does_not_fit_the_queue_is_dropped_head_first_kept() -> None:
    rig = Rig(save_queue_bytes=4 * BYTES, piece_bytes=2 * BYTES)
    held, under_way = threading.Event(), threading.Event()

    def hold(verb: str) -> None:
        under_way.set()
        held.wait(20)

    rig.store.before = hold
    rig.transfers.save(1, [span(0, list(range(1, 8)))])
    assert under_way.wait(20)
    rig.transfers.save(2, [span(7, [9, 10])])
    assert rig.counts.total["save_dropped_blocks"] == 3 + 2
    held.set()
    assert [(result.job, result.ok) for result in rig.ended()] == [(1, False), (2, False)]
    assert set(rig.store.blocks) == set(SPACES[0].bind(HASHES[:4]).keys)
    # What was dropped is stored when it is offered again, and the queue has its room back.
    assert rig.save(span(4, [5, 6, 7, 9])).ok
    assert rig.transfers.close()


def test_closing_stores_what_waits_and_gives_up_what_hangs() -> None:
    rig = Rig(drain_ms=50, piece_bytes=BYTES)
    held = threading.Event()

    def hold(verb: str) -> None:
        held.wait(20)

    rig.store.before = hold
    rig.transfers.save(1, [span(0, [1, 2, 3])])
    closer = threading.Timer(0.2, held.set)
    closer.start()
    assert rig.transfers.close()
    assert not rig.transfers.busy
    assert rig.counts.total["save_failed_blocks"] == 2
    assert rig.counts.total["save_blocks"] == 1


def test_given_up_transfers_load_and_store_nothing_and_answer_every_job(rig: Rig) -> None:
    rig.save(span(0, [1]))
    rig.transfers.give_up()
    before = rig.slots.copy()
    assert not rig.load(span(0, [20])).ok
    assert not rig.save(span(1, [2])).ok
    assert len(rig.store.blocks) == 1
    assert np.array_equal(rig.slots, before)


def test_draining_waits_for_every_job(rig: Rig) -> None:
    held = threading.Event()

    def hold(verb: str) -> None:
        held.wait(20)

    rig.store.before = hold
    rig.transfers.save(1, [span(0, [1])])
    rig.transfers.load(2, [span(0, [2])])
    threading.Timer(0.05, held.set).start()
    rig.transfers.drain()
    assert {result.job for result in rig.transfers.finished()} == {1, 2}
