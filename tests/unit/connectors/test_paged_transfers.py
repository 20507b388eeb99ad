"""The computing side of a connector with a store in memory: loads, their failures, saves and their bound."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from efs.errors import NodeUnavailable, OpenFailed
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.jobs import LoadJob, LoadResult, SaveJob, page_runs, span_of
from kvstore.connectors.paged.link import REOPEN_AFTER_S, BlockStore, LazyStore
from kvstore.connectors.paged.pages import group_pages
from kvstore.connectors.paged.settings import PagedSettings, read_settings
from kvstore.connectors.paged.transfers import PageSpace, PageTransfers
from kvstore.keys import Namespace
from tests.support.blockstore import MemoryBlockStore
from tests.support.waiting import eventually

pytestmark = pytest.mark.engines

PAGES, TOKENS = 40, 16
HASHES = [bytes([at]) * 32 for at in range(100)]


def settings_of(**more: object) -> PagedSettings:
    return read_settings({"store": "cluster.toml", **more}, environ={})


class Rig:
    """A worker with one group of two layers."""

    def __init__(self, *, refuse: bool = False, **more: object) -> None:
        self.store = MemoryBlockStore()
        self.counts = Counts()
        self.caches = {
            name: torch.randn((PAGES, 2, TOKENS, 4), generator=torch.Generator().manual_seed(seed))
            for seed, name in enumerate("ab")
        }
        pages = group_pages(self.caches, ["a", "b"], pages=PAGES, block_tokens=TOKENS, kind="test")
        self.space = PageSpace(Namespace("m", "w", pages.layout), pages)
        self.opened = 0
        self.link = LazyStore(self.open, self.counts)
        self.refuse = refuse
        self.link.open()
        self.transfers = PageTransfers(self.link, [self.space], settings_of(**more), self.counts)

    def open(self) -> BlockStore:
        self.opened += 1
        if self.refuse:
            raise OpenFailed("cluster.toml", OSError("no"))
        return self.store

    def save(self, start: int, pages: list[int]) -> None:
        self.transfers.save(SaveJob("r", (span_of(0, HASHES, start, pages),)))

    def load(self, start: int, pages: list[int]) -> LoadResult:
        self.transfers.load(LoadJob("r", (span_of(0, HASHES, start, pages),)))
        (result,) = self.transfers.finished(20.0)
        return result

    def stored(self, blocks: int) -> bool:
        return eventually(lambda: len(self.store.blocks) == blocks)

    def page(self, page: int) -> list[torch.Tensor]:
        return [cache[page].clone() for cache in self.caches.values()]


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.transfers.close()


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_saved_pages_come_back_into_other_pages(rig: Rig) -> None:
    before = [rig.page(page) for page in (3, 4, 9)]
    rig.save(0, [3, 4, 9])
    assert rig.stored(3)

    assert rig.load(0, [20, 21, 30]).ok

    assert all(equal(rig.page(page), old) for page, old in zip((20, 21, 30), before, strict=True))
    assert rig.counts.total["load_bytes"] == 3 * rig.space.namespace.layout.block_bytes
    assert rig.counts.total["save_blocks"] == 3


def test_pages_may_change_as_soon_as_save_has_returned(rig: Rig) -> None:
    held = threading.Event()

    def hold(verb: str) -> None:
        if verb == "put":
            held.wait(20)

    rig.store.before = hold
    before = rig.page(3)
    rig.save(0, [3])
    rig.caches["a"][3] = 0
    held.set()
    assert rig.stored(1)
    assert rig.load(0, [5]).ok
    assert equal(rig.page(5), before)


def test_blocks_of_one_prefix_have_the_same_keys_however_they_are_cut(rig: Rig) -> None:
    rig.save(0, list(range(1, 31)))
    assert rig.stored(30)
    for start in (0, 1, 5, 17, 29):
        assert rig.load(start, [35]).ok
        assert equal(rig.page(35), rig.page(start + 1))


def test_blocks_without_a_page_are_left_out() -> None:
    assert page_runs([0, 0, 5, 6, 0, 7], 64) == [(2, 4), (5, 6)]
    assert page_runs([1, 2, 3, 4, 5], 2) == [(0, 2), (2, 4), (4, 5)]
    rig = Rig()
    rig.save(0, [0, 0, 5, 6])
    assert rig.stored(2)
    assert rig.load(0, [0, 0, 8, 9]).ok
    assert equal(rig.page(8), rig.page(5))
    rig.transfers.close()


def test_a_load_that_misses_a_block_says_up_to_where_the_prefix_was_good(rig: Rig) -> None:
    rig.save(0, list(range(1, 11)))
    assert rig.stored(10)
    rig.store.lost = {rig.space.namespace.bind(HASHES[:10])[7]}

    result = rig.load(2, list(range(20, 28)))

    assert rig.store.faults
    assert result == LoadResult("r", ok=False, good_tokens=7 * TOKENS)
    assert rig.counts.total["load_failed_missing"] == 1


def test_a_piece_that_fails_behind_good_ones_is_found_too() -> None:
    rig = Rig(piece_bytes=3 * 2 * 2 * TOKENS * 4 * 4)
    rig.save(0, list(range(1, 11)))
    assert rig.stored(10)
    rig.store.lost = {rig.space.namespace.bind(HASHES[:10])[7]}
    assert rig.load(0, list(range(20, 30))) == LoadResult("r", ok=False, good_tokens=7 * TOKENS)
    assert len(rig.store.gets) == 3
    rig.transfers.close()


@pytest.mark.parametrize("error", [NodeUnavailable(3, "gone"), RuntimeError("a bug")])
def test_whatever_a_store_raises_a_load_ends(rig: Rig, error: Exception) -> None:
    def fail(verb: str) -> None:
        if verb == "get":
            raise error

    rig.store.before = fail
    result = rig.load(0, [5])
    assert not result.ok
    assert result.good_tokens == 0
    assert sum(amount for name, amount in rig.counts.total.items() if name.startswith("load_failed")) == 1


def test_a_store_that_cannot_be_opened_is_tried_again_after_a_while_by_a_thread_of_its_own() -> None:
    rig = Rig()
    now = [0.0]
    link = LazyStore(rig.open, rig.counts, clock=lambda: now[0])
    rig.refuse, rig.opened = True, 0
    link.open()
    assert link.get() is None
    assert rig.opened == 1
    assert rig.counts.total["store_not_opened"] == 1
    rig.refuse = False
    now[0] = REOPEN_AFTER_S
    assert eventually(lambda: link.get() is rig.store)
    assert rig.opened == 2
    link.close()
    assert link.get() is None
    rig.transfers.close()


def test_a_store_that_takes_long_to_open_is_not_waited_for() -> None:
    rig = Rig()
    held = threading.Event()

    def slow() -> BlockStore:
        held.wait(20)
        return rig.store

    link = LazyStore(slow, rig.counts)
    assert link.get() is None
    assert link.get() is None
    held.set()
    assert eventually(lambda: link.get() is rig.store)
    rig.transfers.close()


def test_a_store_that_is_not_there_fails_loads_and_saves_but_nothing_else() -> None:
    rig = Rig(refuse=True)
    assert not rig.load(0, [5]).ok
    rig.save(0, [5])
    assert eventually(lambda: rig.counts.total.get("save_failed_blocks") == 1)
    assert rig.counts.total["load_failed_unreachable"] == 1
    rig.transfers.close()


def test_what_does_not_fit_the_queue_is_dropped_head_first_kept() -> None:
    block_bytes = 2 * 2 * TOKENS * 4 * 4
    rig = Rig(save_queue_bytes=4 * block_bytes, piece_bytes=2 * block_bytes)
    held, under_way = threading.Event(), threading.Event()

    def hold(verb: str) -> None:
        if verb == "put":
            under_way.set()
            held.wait(20)

    rig.store.before = hold
    rig.save(0, list(range(1, 8)))
    assert under_way.wait(20)
    assert rig.counts.total["save_dropped_blocks"] == 3
    held.set()
    assert rig.stored(4)
    assert set(rig.store.blocks) == set(rig.space.namespace.bind(HASHES[:4]).keys)
    assert eventually(lambda: rig.counts.total.get("save_blocks") == 4)
    rig.save(4, [5])
    assert rig.stored(5)
    rig.transfers.close()


def test_closing_stores_what_is_waiting(rig: Rig) -> None:
    rig.save(0, list(range(1, 31)))
    rig.transfers.close()
    assert len(rig.store.blocks) == 30


def test_given_up_transfers_fail_every_load_also_one_that_has_ended_and_store_nothing(rig: Rig) -> None:
    rig.save(0, [3])
    assert rig.stored(1)
    rig.transfers.load(LoadJob("under way", (span_of(0, HASHES, 0, [9]),)))
    assert eventually(lambda: rig.counts.total.get("loads") == 1)
    rig.transfers.give_up()
    assert rig.transfers.finished(20.0) == [LoadResult("under way", ok=False)]
    assert rig.load(0, [10]) == LoadResult("r", ok=False)
    rig.save(1, [4])
    assert eventually(lambda: rig.counts.total.get("save_failed_blocks") == 1)
    assert len(rig.store.blocks) == 1


def test_a_group_in_one_piece_of_memory_is_filled_without_a_buffer() -> None:
    rig = Rig()
    cache = torch.randn((PAGES, 2, TOKENS, 4))
    pages = group_pages({"a": cache}, ["a"], pages=PAGES, block_tokens=TOKENS, kind="test")
    space = PageSpace(Namespace("m", "w", pages.layout), pages)
    transfers = PageTransfers(rig.link, [space], settings_of(), rig.counts)
    transfers.save(SaveJob("r", (span_of(0, HASHES, 0, [3, 4]),)))
    assert rig.stored(2)
    seen: list[int] = []
    into = rig.store.get_into

    def watched(chain: object, out: np.ndarray[tuple[int], np.dtype[np.uint8]], **more: object) -> object:
        seen.append(out.ctypes.data)
        return into(chain, out)  # type: ignore[arg-type]

    rig.store.get_into = watched  # type: ignore[method-assign, assignment]
    transfers.load(LoadJob("r", (span_of(0, HASHES, 0, [7, 8]),)))
    assert transfers.finished(20.0)[0].ok
    assert seen == [cache[7].data_ptr()]
    assert torch.equal(cache[7:9], cache[3:5])
    transfers.close()
    rig.transfers.close()
