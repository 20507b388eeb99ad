"""Pages: allocation, generations, holds, fences."""

from __future__ import annotations

import threading

import pytest
import torch

from gdr.device import CpuDevice, Rows, consecutive, scatter_by_copies
from gdr.errors import InvalidEngineArgument, StaleLease
from gdr.pages import PagePool
from tests.support.fakedevice import FakeDevice


def test_pages_are_handed_out_all_or_none() -> None:
    pool = PagePool(CpuDevice(), (64, 32), 4)
    first = pool.allocate(3)
    assert first is not None
    assert pool.allocate(2) is None
    assert pool.free == 1
    pool.drop(first.pages)
    assert pool.free == 4


def test_a_page_of_an_earlier_allocation_cannot_be_touched() -> None:
    pool = PagePool(CpuDevice(), (64,), 1)
    first = pool.allocate(1)
    assert first is not None
    pool.drop(first.pages)
    second = pool.allocate(1)
    assert second is not None
    assert second.pages[0].index == first.pages[0].index
    for call in (pool.hold, pool.drop, pool.check):
        with pytest.raises(StaleLease, match="page 0"):
            call(first.pages)
    pool.check(second.pages)


def test_a_refused_hold_holds_nothing() -> None:
    pool = PagePool(CpuDevice(), (64,), 2)
    old, kept = pool.allocate(1), pool.allocate(1)
    assert old is not None
    assert kept is not None
    pool.drop(old.pages)
    with pytest.raises(StaleLease):
        pool.hold((*kept.pages, *old.pages))
    pool.drop(kept.pages)
    assert pool.free == 2


def test_a_page_is_free_only_when_the_last_holder_lets_go() -> None:
    pool = PagePool(CpuDevice(), (64,), 1)
    owner = pool.allocate(1)
    assert owner is not None
    pool.hold(owner.pages)
    pool.drop(owner.pages)
    assert pool.free == 0
    assert pool.allocate(1) is None
    pool.drop(owner.pages)
    assert pool.free == 1
    with pytest.raises(StaleLease):
        pool.drop(owner.pages)


def test_fences_of_all_holders_go_to_the_next_owner_and_done_ones_are_forgotten() -> None:
    device = FakeDevice()
    pool = PagePool(device, (64,), 2)
    owner = pool.allocate(2)
    assert owner is not None
    one, two = device.new_stream("one"), device.new_stream("two")
    device.copy_in(device.allocate((4,)), torch.zeros(4, dtype=torch.uint8), one)
    device.copy_in(device.allocate((4,)), torch.zeros(4, dtype=torch.uint8), two)
    first, second = one.record(), two.record()
    pool.hold(owner.pages)
    pool.drop(owner.pages, [first])
    pool.drop(owner.pages, [second])
    assert pool.pending_fences() == 4
    following = pool.allocate(2)
    assert following is not None
    assert set(following.fences) == {first, second}
    assert pool.pending_fences() == 0
    pool.drop(following.pages, [first])
    device.run_all()
    last = pool.allocate(2)
    assert last is not None
    assert last.fences == ()


def test_the_page_that_was_free_longest_is_handed_out_first() -> None:
    pool = PagePool(CpuDevice(), (64,), 3)
    everything = pool.allocate(3)
    assert everything is not None
    order = [everything.pages[index] for index in (1, 2, 0)]
    for page in order:
        pool.drop((page,))
    again = pool.allocate(3)
    assert again is not None
    assert [page.index for page in again.pages] == [1, 2, 0]


def test_a_waiting_allocation_gets_pages_that_another_thread_drops() -> None:
    pool = PagePool(CpuDevice(), (64,), 1)
    owner = pool.allocate(1)
    assert owner is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(pool.allocate(1, wait_ms=10_000)))
    waiter.start()
    pool.drop(owner.pages)
    waiter.join(10)
    assert got
    assert got[0] is not None
    assert pool.allocate(1, wait_ms=1.0) is None


def test_the_stride_is_rounded_up_and_the_pad_is_not_written() -> None:
    pool = PagePool(CpuDevice(), (100, 1152), 3, align_bytes=1152)
    assert [tuple(part.shape) for part in pool.storage] == [(3, 1152), (3, 1152)]
    source = torch.arange(200, dtype=torch.uint8).view(2, 100)
    scatter_by_copies(pool.storage[0], Rows((2, 0)), source)
    assert torch.equal(pool.storage[0][2, :100], source[0])
    assert torch.equal(pool.storage[0][0, :100], source[1])
    assert int(pool.storage[0][:, 100:].sum()) == 0
    assert int(pool.storage[0][1].sum()) == 0


def test_runs_of_consecutive_pages_are_found() -> None:
    assert list(consecutive((4, 5, 6, 2, 9, 10))) == [(0, 3), (3, 4), (4, 6)]
    assert list(consecutive(())) == []
    assert list(consecutive((7,))) == [(0, 1)]


def test_impossible_pools_are_refused() -> None:
    for sizes, pages, align in (((), 1, 1), ((0,), 1, 1), ((8,), 0, 1), ((8,), 1, 0)):
        with pytest.raises(InvalidEngineArgument):
            PagePool(CpuDevice(), sizes, pages, align_bytes=align)
