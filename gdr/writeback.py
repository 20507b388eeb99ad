"""Write-back: a thread that copies new full blocks out of device pages and puts them into the store.

- *After the compute.* A job carries the event behind the compute that wrote its blocks; the thread's stream waits
  for it before the first gather reads a page.
- *Pages are held.* A job holds its pages from `submit` until its last copy is done on the device. A sequence may be
  preempted, aborted or finished in between: its pages are then free when the copy is, and what is stored is what was
  computed.
- *Bounded.* At most `queue_jobs` jobs wait; one more is dropped and counted, because the store can do without it.
  Blocks go in pieces of `piece_blocks`, gathered segment-major into a host region of this thread's own pool, turned
  block-major there, and put. The region is used again only after the put returned and the copies were done.

A refused copy or put costs the blocks of that piece and those behind it (a hole would end the prefix anyway) and is
counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass

import torch

from efs.clock import Clock, SystemClock
from efs.errors import EfsError
from gdr.counters import Counters
from gdr.device import Device, Event, Rows
from gdr.errors import DeviceError, EngineError
from gdr.limits import CLOSE_WAIT_MS, WRITE_BACK_BLOCKS, WRITE_BACK_QUEUE
from gdr.pages import Page, PagePool
from gdr.pinned import Lease, PinnedPool
from gdr.prefix import BlockStore
from gdr.timeline import Timeline
from kvstore.keys import Chain

_LOG = logging.getLogger("gdr.writeback")


@dataclass(frozen=True, slots=True)
class _Job:
    chain: Chain
    pages: tuple[Page, ...]
    written: Event


class WriteBack:
    """The thread with its stream, staging and host region."""

    def __init__(self, device: Device, pages: PagePool, store: BlockStore, *, counters: Counters,
                 timeline: Timeline | None = None, piece_blocks: int = WRITE_BACK_BLOCKS,
                 queue_jobs: int = WRITE_BACK_QUEUE, clock: Clock | None = None) -> None:
        self.timeline = timeline
        self._device = device
        self._pages = pages
        self._store = store
        self._counters = counters
        self._clock = clock or SystemClock()
        self._piece = piece_blocks
        self._block_bytes = sum(pages.segment_bytes)
        # Segment-major in the first half, block-major in the second.
        self._pool = PinnedPool(device, 2 * piece_blocks * self._block_bytes, 1, clock=self._clock)
        self._stream = device.new_stream("write-back")
        self._staging = device.allocate((piece_blocks * max(pages.segment_bytes),)) if device.staged else None
        self._jobs: queue.Queue[_Job | None] = queue.Queue(queue_jobs)
        self._idle = threading.Condition()
        self._open_jobs = 0
        self._thread = threading.Thread(target=self._run, name="gdr-write-back", daemon=True)
        self._thread.start()

    def submit(self, chain: Chain, pages: tuple[Page, ...], written: Event) -> bool:
        """Store the blocks of `chain`, which are in `pages` once `written` is done. False when the queue is full."""
        self._hold(pages)
        with self._idle:
            self._open_jobs += 1
        try:
            self._jobs.put_nowait(_Job(chain, pages, written))
        except queue.Full:
            self._counters.add("write_back_dropped", len(chain))
            self._let_go(pages)
            self._job_ended()
            return False
        return True

    def flush(self, wait_ms: float) -> bool:
        """Whether everything submitted so far was handled within `wait_ms`."""
        until = self._clock.monotonic() + wait_ms / 1000
        with self._idle:
            while self._open_jobs:
                left = until - self._clock.monotonic()
                if left <= 0:
                    return False
                self._idle.wait(left)
        return True

    def close(self) -> bool:
        """End the thread after what is submitted; False when it did not end in CLOSE_WAIT_MS and was abandoned."""
        until = self._clock.monotonic() + CLOSE_WAIT_MS / 1000
        try:
            self._jobs.put(None, timeout=CLOSE_WAIT_MS / 1000)
        except queue.Full:
            return False
        self._thread.join(max(0.0, until - self._clock.monotonic()))
        if self._thread.is_alive():
            _LOG.warning("write-back thread did not end and was abandoned")
            return False
        return self._pool.close()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._store_blocks(job)
            except Exception as error:  # The next job needs this thread; blocks that are not stored are recomputed.
                self._counters.add("write_back_errors")
                if isinstance(error, EfsError):
                    _LOG.warning("blocks not written back: %s", error)
                else:
                    _LOG.exception("blocks not written back")
            finally:
                self._job_ended()

    def _job_ended(self) -> None:
        with self._idle:
            self._open_jobs -= 1
            self._idle.notify_all()

    def _store_blocks(self, job: _Job) -> None:
        """Copy and put piece by piece; pages are dropped as their copies end, at the latest when this returns."""
        kept = 0
        try:
            self._wait_for_compute(job.written)
            for start in range(0, len(job.chain), self._piece):
                stop = min(start + self._piece, len(job.chain))
                lease = self._pool.lease(CLOSE_WAIT_MS)
                if lease is None:
                    raise DeviceError("copies of an earlier write-back did not end")
                try:
                    self._copy_out(lease, job.pages[start:stop])
                    kept = stop
                    self._let_go(job.pages[start:stop])
                    self._put(lease, job.chain[start:stop])
                finally:
                    lease.release()
        finally:
            self._let_go(job.pages[kept:])

    def _hold(self, pages: tuple[Page, ...]) -> None:
        self._pages.hold(pages)

    def _let_go(self, pages: tuple[Page, ...]) -> None:
        """No copy of these pages is under way any more."""
        self._pages.drop(pages)

    def _wait_for_compute(self, written: Event) -> None:
        self._stream.wait(written)

    def _copy_out(self, lease: Lease, pages: tuple[Page, ...]) -> None:
        """The blocks of `pages`, segment-major, at the start of the region; at the return the device is done."""
        count = len(pages)
        region = lease.bytes(count * self._block_bytes)
        begun = self.timeline.now() if self.timeline is not None else 0.0
        rows = self._device.rows([page.index for page in pages], self._stream)
        offset = 0
        try:
            for segment, size in enumerate(self._pages.segment_bytes):
                target = region[offset : offset + count * size].view(count, size)
                self._copy_segment(target, segment, rows)
                offset += count * size
        finally:
            self._stream.record().synchronize()
        if self.timeline is not None:
            self.timeline.host("write-back", f"{count} blocks", begun, self.timeline.now(), blocks=count)

    def _copy_segment(self, target: torch.Tensor, segment: int, rows: Rows) -> None:
        if self._staging is None:
            self._device.gather(target, self._pages.storage[segment], rows, self._stream)
            return
        # One stream orders all users of the staging buffer.
        staged = self._staging[: target.numel()].view(target.shape)
        self._device.gather(staged, self._pages.storage[segment], rows, self._stream)
        self._device.copy_out(target, staged, self._stream)

    def _put(self, lease: Lease, chain: Chain) -> None:
        size = len(chain) * self._block_bytes
        region = lease.bytes(2 * size)
        blocks = chain.layout.from_segments(region[:size], region[size:])
        report = self._store.put(chain, blocks)
        self._counters.add("write_back_blocks", len(chain))
        self._counters.add("write_back_acked", report.acked)
        self._counters.add("write_back_already", report.already)
        self._counters.add("write_back_failed", report.failed)
        if report.failed:
            raise EngineError(f"{report.failed} of {len(chain)} blocks were not acknowledged")
