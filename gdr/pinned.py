"""The host pool: fixed regions of a sealed memfd into which `get_into` writes and from which swap-ins copy.

Bytes land once on the host: a region is the `out` of a fetch and the source of the copies to the device.

*Memory.* One memfd (its pages count as shared memory of the process, not as files below /dev/shm, which containers
limit to 64 MB), sealed against growing and shrinking, so that a process which was handed the descriptor can never turn
an access into SIGBUS. A background thread populates it region by region (a first touch costs ten times a copy) and,
where the device has page locks, locks each region as it gets ready. A copy never crosses a region, hence never two
registrations, which CUDA refuses. A refused lock is remembered (`lock_errors`) and the region works unlocked, at the
speed of a plain copy. Closing unlocks before it unmaps, and only what was locked.

*Leases.* A region has one lease at a time. Each has a generation, unique in the pool; a lease that was given back is
stale and every use of it raises StaleLease. `release(fences)` gives the region back: it is free when all fences
(events behind the last copy out of it) are done, not before, because until then the device still reads it. `lease`
prefers regions that are populated already, waits a bounded time and then returns None: the caller recomputes.

Invariant: free + leased + draining = regions, at every moment.
"""

from __future__ import annotations

import atexit
import fcntl
import logging
import mmap
import os
import threading
import weakref
from collections.abc import Sequence
from enum import Enum
from typing import Final

import torch

from efs.clock import Clock, SystemClock
from gdr.device import Device, Event
from gdr.errors import DeviceError, EngineClosed, InvalidEngineArgument, StaleLease
from gdr.limits import CLOSE_WAIT_MS, FENCE_POLL_MS, PRETOUCH_BYTES

_POPULATE_WRITE: Final = 23
"""MADV_POPULATE_WRITE of Linux 5.14: makes pages present and writable, leaves their bytes alone."""
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
_LOG = logging.getLogger("gdr.pinned")


class RegionState(Enum):
    FREE = "free"
    LEASED = "leased"
    DRAINING = "draining"


class _Region:
    """Bookkeeping of one region; guarded by the pool's lock."""

    __slots__ = ("fences", "generation", "index", "state", "touched")

    def __init__(self, index: int) -> None:
        self.index = index
        self.state = RegionState.FREE
        self.generation = 0
        self.fences: tuple[Event, ...] = ()
        self.touched = False


class Lease:
    """The right to use one region until it is released."""

    __slots__ = ("_pool", "_region", "generation")

    def __init__(self, pool: PinnedPool, region: int, generation: int) -> None:
        self._pool = pool
        self._region = region
        self.generation = generation

    def bytes(self, size: int) -> torch.Tensor:
        """The first `size` bytes of the region, flat uint8. StaleLease after the release."""
        return self._pool._view(self._region, self.generation, size)

    def release(self, fences: Sequence[Event] = ()) -> None:
        """Give the region back; it is used again when all fences are done. StaleLease when that was done before."""
        self._pool._release(self._region, self.generation, fences)


class PinnedPool:
    """`regions` regions of `region_bytes` each, rounded up to whole pages."""

    def __init__(self, device: Device, region_bytes: int, regions: int, *, clock: Clock | None = None) -> None:
        if region_bytes < 1:
            raise InvalidEngineArgument(f"region_bytes is {region_bytes}, must be at least 1")
        if regions < 1:
            raise InvalidEngineArgument(f"regions is {regions}, must be at least 1")
        self._device = device
        self._clock = clock or SystemClock()
        self.region_bytes = -(-region_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        self._regions = [_Region(index) for index in range(regions)]
        self._changed = threading.Condition()
        self._closing = False
        self._generations = 0
        self.lock_errors: list[str] = []
        self._map = _sealed_memory(self.region_bytes * regions)
        self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._locked: list[int] = []
        # A pool that is forgotten instead of closed must not be unmapped while it is page-locked.
        self._forgotten = weakref.finalize(self, _unlock, device, self._locked, self._map)
        self._forgotten.atexit = False
        self._toucher = threading.Thread(target=self._prepare, name="gdr-pretouch", daemon=True)
        self._toucher.start()

    # -- leases ----------------------------------------------------------------------------------------------------

    def lease(self, wait_ms: float) -> Lease | None:
        """A region, or None when none got free in `wait_ms`. EngineClosed after `close`."""
        until = self._clock.monotonic() + wait_ms / 1000
        with self._changed:
            while True:
                if self._closing:
                    raise EngineClosed("the host pool is closed")
                self._collect()
                free = [region for region in self._regions if region.state is RegionState.FREE]
                if free:
                    return self._take(min(free, key=lambda region: (not region.touched, region.index)))
                left = until - self._clock.monotonic()
                if left <= 0:
                    return None
                draining = any(region.state is RegionState.DRAINING for region in self._regions)
                self._changed.wait(min(left, FENCE_POLL_MS / 1000) if draining else left)

    def counts(self) -> dict[RegionState, int]:
        """How many regions are in each state now."""
        with self._changed:
            self._collect()
            return {state: sum(region.state is state for region in self._regions) for state in RegionState}

    def wait_prepared(self, wait_ms: float) -> bool:
        """Whether the background work on all regions ended within `wait_ms`."""
        self._toucher.join(wait_ms / 1000)
        return not self._toucher.is_alive()

    @property
    def locked_regions(self) -> int:
        with self._changed:
            return len(self._locked)

    def close(self) -> bool:
        """Stop the background work, wait bounded for copies, unlock, unmap. False when something still used the memory.

        Memory that a device or a caller still uses is left mapped: it goes when the process does.
        """
        with self._changed:
            if self._closing:
                return True
            self._closing = True
            self._changed.notify_all()
        quiet = self.wait_prepared(CLOSE_WAIT_MS) and self._wait_drained()
        if not quiet:
            _LOG.warning("host pool closed while in use; its memory stays mapped")
            # Nothing else need refer to this pool any more, and its memory must not go before the process does.
            atexit.register(_LOG.debug, "%s was left mapped", self)
            return False
        self._forgotten.detach()
        if not _unlock(self._device, self._locked, self._map):
            return False
        del self._bytes
        try:
            self._map.close()
        except BufferError:  # A view of it lives on; the last one unmaps the memory.
            return True
        return True

    def _wait_drained(self) -> bool:
        until = self._clock.monotonic() + CLOSE_WAIT_MS / 1000
        with self._changed:
            while True:
                self._collect()
                if all(region.state is RegionState.FREE for region in self._regions):
                    return True
                left = until - self._clock.monotonic()
                if left <= 0:
                    return False
                self._changed.wait(min(left, FENCE_POLL_MS / 1000))

    # -- called by leases --------------------------------------------------------------------------------------------

    def _view(self, index: int, generation: int, size: int) -> torch.Tensor:
        with self._changed:
            self._check(index, generation)
            if not 0 <= size <= self.region_bytes:
                raise InvalidEngineArgument(f"a region has {self.region_bytes} bytes, asked for {size}")
            start = index * self.region_bytes
            return self._bytes[start : start + size]

    def _release(self, index: int, generation: int, fences: Sequence[Event]) -> None:
        with self._changed:
            region = self._check(index, generation)
            region.fences = tuple(fences)
            region.state = RegionState.DRAINING
            self._collect()
            self._changed.notify_all()

    def _check(self, index: int, generation: int) -> _Region:
        region = self._regions[index]
        if region.state is not RegionState.LEASED or region.generation != generation:
            raise StaleLease(f"host region {index}: lease {generation} was given back")
        return region

    # -- under the lock ----------------------------------------------------------------------------------------------

    def _take(self, region: _Region) -> Lease:
        self._generations += 1
        region.generation = self._generations
        region.state = RegionState.LEASED
        return Lease(self, region.index, region.generation)

    def _collect(self) -> None:
        for region in self._regions:
            if region.state is RegionState.DRAINING and all(fence.done() for fence in region.fences):
                region.fences = ()
                region.state = RegionState.FREE

    # -- background --------------------------------------------------------------------------------------------------

    def _address(self, index: int) -> int:
        return self._bytes.data_ptr() + index * self.region_bytes

    def _prepare(self) -> None:
        """Populate and lock region by region, until done or closing."""
        for region in self._regions:
            start = region.index * self.region_bytes
            for offset in range(start, start + self.region_bytes, PRETOUCH_BYTES):
                if self._closing:
                    return
                _populate(self._map, offset, min(PRETOUCH_BYTES, start + self.region_bytes - offset))
            try:
                self._device.register(self._address(region.index), self.region_bytes)
            except DeviceError as error:
                _LOG.warning("host region %d works without page lock: %s", region.index, error)
                self.lock_errors.append(str(error))
            else:
                self._locked.append(self._address(region.index))
            with self._changed:
                region.touched = True
                self._changed.notify_all()


def _unlock(device: Device, locked: list[int], memory: mmap.mmap) -> bool:
    """Undo the page locks of `memory`, which this call keeps mapped; False when the device refused one."""
    while locked:
        try:
            device.unregister(locked[-1])
        except DeviceError as error:
            _LOG.warning("%s; the memory stays mapped", error)
            return False
        locked.pop()
    return not memory.closed


def _sealed_memory(size: int) -> mmap.mmap:
    """A shared mapping of a new memfd whose size cannot change any more."""
    descriptor = os.memfd_create("gdr-host-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)  # The mapping holds a descriptor of its own.


def _populate(memory: mmap.mmap, offset: int, size: int) -> None:
    """Make pages present without changing them; on an older kernel by reading one byte of each."""
    try:
        memory.madvise(_POPULATE_WRITE, offset, size)
    except OSError:
        for position in range(offset, offset + size, mmap.PAGESIZE):
            memory[position]
