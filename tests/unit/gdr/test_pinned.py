"""The host pool: leases, generations, fences, sealing, page locks."""

from __future__ import annotations

import fcntl
import gc
import mmap
import os
import threading

import pytest

from gdr.device import CpuDevice
from gdr.errors import EngineClosed, InvalidEngineArgument, StaleLease
from gdr.pinned import Lease, PinnedPool, RegionState
from tests.support.fakedevice import FakeDevice

REGION = 8 * mmap.PAGESIZE


def counts(pool: PinnedPool) -> tuple[int, int, int]:
    found = pool.counts()
    return found[RegionState.FREE], found[RegionState.LEASED], found[RegionState.DRAINING]


def test_a_region_is_leased_once_and_used_again_after_its_release() -> None:
    pool = PinnedPool(CpuDevice(), REGION, 2)
    first, second = pool.lease(0), pool.lease(0)
    assert first is not None
    assert second is not None
    assert first.bytes(16).data_ptr() != second.bytes(16).data_ptr()
    assert pool.lease(0) is None
    address = first.bytes(16).data_ptr()
    first.release()
    third = pool.lease(0)
    assert third is not None
    assert third.bytes(16).data_ptr() == address
    assert third.generation not in (first.generation, second.generation)
    assert counts(pool) == (0, 2, 0)
    for lease in (second, third):
        lease.release()
    assert pool.close()


def test_a_lease_that_was_given_back_is_refused_everywhere() -> None:
    pool = PinnedPool(CpuDevice(), REGION, 1)
    old = pool.lease(0)
    assert old is not None
    old.release()
    with pytest.raises(StaleLease):
        old.bytes(1)
    new = pool.lease(0)
    assert new is not None
    with pytest.raises(StaleLease):
        old.release()
    assert counts(pool) == (0, 1, 0)
    new.release()
    assert pool.close()


def test_a_region_whose_copies_still_run_is_not_handed_out() -> None:
    device = FakeDevice()
    pool = PinnedPool(device, REGION, 1)
    stream = device.new_stream("copy")
    lease = pool.lease(0)
    assert lease is not None
    device.copy_in(device.allocate((16,)), lease.bytes(16), stream)
    lease.release([stream.record()])
    assert counts(pool) == (0, 0, 1)
    assert pool.lease(1.0) is None
    device.run_all()
    assert counts(pool) == (1, 0, 0)
    again = pool.lease(0)
    assert again is not None
    again.release()
    assert pool.close()


def test_a_waiting_lease_gets_the_region_that_another_thread_gives_back() -> None:
    pool = PinnedPool(CpuDevice(), REGION, 1)
    held = pool.lease(0)
    assert held is not None
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(pool.lease(10_000)))
    waiter.start()
    held.release()
    waiter.join(10)
    assert got
    assert isinstance(got[0], Lease)
    got[0].release()
    assert pool.close()


def test_a_waiting_lease_gets_a_region_whose_copies_end_meanwhile() -> None:
    device = FakeDevice()
    pool = PinnedPool(device, REGION, 1)
    stream = device.new_stream("copy")
    held = pool.lease(0)
    assert held is not None
    device.copy_in(device.allocate((16,)), held.bytes(16), stream)
    held.release([stream.record()])
    got: list[object] = []
    waiter = threading.Thread(target=lambda: got.append(pool.lease(10_000)))
    waiter.start()
    device.run_all()
    waiter.join(10)
    assert got
    assert isinstance(got[0], Lease)
    got[0].release()
    assert pool.close()


def test_memory_cannot_be_resized_by_anybody_who_has_the_descriptor() -> None:
    made: list[int] = []
    original = os.memfd_create

    def remember(name: str, flags: int) -> int:
        made.append(original(name, flags))
        return os.dup(made[0])

    os.memfd_create = remember  # type: ignore[assignment]
    try:
        pool = PinnedPool(CpuDevice(), REGION, 1)
    finally:
        os.memfd_create = original
    try:
        seals = fcntl.fcntl(made[0], fcntl.F_GET_SEALS)
        assert seals & fcntl.F_SEAL_SHRINK
        assert seals & fcntl.F_SEAL_GROW
        with pytest.raises(OSError, match="permitted"):
            os.ftruncate(made[0], 0)
    finally:
        os.close(made[0])
    assert pool.close()


def test_populating_in_the_background_leaves_bytes_alone() -> None:
    pool = PinnedPool(CpuDevice(), 64 * REGION, 2)
    lease = pool.lease(0)
    assert lease is not None
    lease.bytes(64 * REGION).fill_(7)
    assert pool.wait_prepared(10_000)
    assert int(lease.bytes(64 * REGION).min()) == 7
    lease.release()
    assert pool.close()


def test_every_region_is_page_locked_on_its_own_and_unlocked_before_it_is_unmapped() -> None:
    device = FakeDevice()
    pool = PinnedPool(device, REGION, 3)
    assert pool.wait_prepared(10_000)
    assert sorted(device.registered.values()) == [REGION] * 3
    assert pool.locked_regions == 3
    assert pool.close()
    assert device.registered == {}
    assert device.calls["unregister"] == 3
    assert pool._map.closed


def test_a_pool_that_is_forgotten_is_unlocked_all_the_same() -> None:
    device = FakeDevice()
    pool = PinnedPool(device, REGION, 2)
    assert pool.wait_prepared(10_000)
    assert len(device.registered) == 2
    del pool
    gc.collect()
    assert device.registered == {}


def test_a_refused_page_lock_costs_speed_and_nothing_else() -> None:
    device = FakeDevice()
    device.refuse("register", {1})
    pool = PinnedPool(device, REGION, 3)
    assert pool.wait_prepared(10_000)
    assert device.refused["register"] == 1
    assert pool.locked_regions == 2
    assert len(pool.lock_errors) == 1
    leases = [pool.lease(0) for _ in range(3)]
    for lease in leases:
        assert lease is not None
        lease.bytes(REGION).fill_(1)
        lease.release()
    assert pool.close()
    assert device.calls["unregister"] == 2


def test_memory_that_the_device_still_reads_stays_mapped_when_the_pool_closes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdr.pinned.CLOSE_WAIT_MS", 5.0)
    device = FakeDevice()
    pool = PinnedPool(device, REGION, 1)
    assert pool.wait_prepared(10_000)
    stream = device.new_stream("copy")
    lease = pool.lease(0)
    assert lease is not None
    device.copy_in(device.allocate((16,)), lease.bytes(16), stream)
    lease.release([stream.record()])
    assert not pool.close()
    assert not pool._map.closed
    assert device.calls["unregister"] == 0
    with pytest.raises(EngineClosed):
        pool.lease(0)


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(InvalidEngineArgument, match="region_bytes is 0"):
        PinnedPool(CpuDevice(), 0, 1)
    with pytest.raises(InvalidEngineArgument, match="regions is 0"):
        PinnedPool(CpuDevice(), REGION, 0)
    pool = PinnedPool(CpuDevice(), REGION, 1)
    lease = pool.lease(0)
    assert lease is not None
    with pytest.raises(InvalidEngineArgument, match=f"a region has {REGION} bytes"):
        lease.bytes(REGION + 1)
    lease.release()
    assert pool.close()
