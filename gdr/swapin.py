"""Swap-in: a thread that moves blocks from host regions into device pages, segment by segment, under the forward pass.

*Transfer.* One request's blocks: a leased host region in segment-major order, the pages that they go to, and one gate a
segment. The source *settles* segments in order, each with the number of leading blocks whose bytes are verified in the
region; the thread then copies them and opens the gate. Counts never grow from segment to segment: a segment that
arrives with fewer blocks, or whose copy is refused at some block, shortens the transfer, and later segments carry the
shorter prefix only. A forward pass that assumed more finds that out at the gate, before it reads a page.

*Copies.* A segment of n blocks is one contiguous range of the region. On a staged device it goes in large pieces
through two staging buffers of bounded size: copied on one stream, scattered into pages on another, so that the copy
engine works on piece i + 1 while piece i is scattered. On an unstaged device the scatter reads the region itself.

*Orders.* The device runs each stream in order and nothing else, so these are kept by events:

1. A gate opens with an event that *was recorded*: until then the waiting thread blocks on the host. A stream that
   waits for an event which was not recorded yet does not wait at all.
2. Gates and events are made anew for each transfer and segment; nothing is left over from an earlier request.
3. Before the first scatter the scatter stream waits for the fences of the pages: the last compute, swap-in and
   write-back that used them.
4. A staging buffer is written only after the scatter that read it: the copy stream waits for that scatter's event.
5. A piece is scattered only after its copy: the scatter stream waits for the copy's event.
6. The host region is given back with the events behind the last copy and scatter; it is reused only after them.
7. The transfer holds its pages until its last segment is handled and drops them with the event behind its last
   scatter, so that whoever gets them next, or computes into them after a shortened load, waits for it (`last_event`).

*Failures.* A refused copy or scatter at a block means: no block at or behind it counts as loaded. An abort opens all
gates with 0 at once; what the device still runs is covered by 6 and 7. Whatever else goes wrong in the thread ends
that transfer with 0 blocks and is logged; the thread lives on.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gdr.counters import Counters
from gdr.device import Device, Event, Rows, Stream
from gdr.errors import DeviceError, EngineClosed, InvalidEngineArgument, SwapInStalled
from gdr.limits import CLOSE_WAIT_MS, STAGING_BYTES
from gdr.pages import Allocation, Page, PagePool
from gdr.pinned import Lease
from gdr.timeline import Timeline

_LOG = logging.getLogger("gdr.swapin")


class Gate:
    """Says of one segment of one transfer how many leading blocks are, or will be, in the pages. Opened once."""

    __slots__ = ("_blocks", "_event", "_lock", "_open")

    def __init__(self) -> None:
        self._open = threading.Event()
        self._lock = threading.Lock()
        self._blocks = 0
        self._event: Event | None = None

    def open(self, blocks: int, event: Event | None) -> None:
        """The first `blocks` blocks are in their pages once `event` is done. A gate that is open stays as it is."""
        with self._lock:
            if not self._open.is_set():
                self._blocks, self._event = blocks, event
                self._open.set()

    @property
    def is_open(self) -> bool:
        return self._open.is_set()

    def wait(self, stream: Stream, wait_ms: float) -> int:
        """Make `stream` wait for the blocks; blocks the calling thread until it is known for what to wait.

        Returns how many leading blocks may be read behind this call. SwapInStalled when the gate did not open.
        """
        if not self._open.wait(wait_ms / 1000):
            raise SwapInStalled(f"a segment was not settled within {wait_ms:.0f} ms")
        if self._event is not None:
            stream.wait(self._event)
        return self._blocks


class Transfer:
    """One request's way from a host region to its pages; made by `SwapIn.begin`."""

    def __init__(self, owner: SwapIn, lease: Lease, blocks: int, target: Allocation, segments: int) -> None:
        self.requested = blocks
        self.lease = lease
        self.pages: tuple[Page, ...] = target.pages[:blocks]
        self.fences = target.fences
        self.gates: tuple[Gate, ...] = tuple(owner.new_gate(segment) for segment in range(segments))
        self.failure: DeviceError | None = None
        self.last_event: Event | None = None
        self.rows: Rows | None = None
        self._owner = owner
        self._lock = threading.Lock()
        self._blocks = blocks
        self._settled = 0
        self._aborted = threading.Event()
        self._finished = threading.Event()

    @property
    def blocks(self) -> int:
        """Leading blocks that are not known to be missing; final once `finished`."""
        return 0 if self._aborted.is_set() else self._blocks

    @property
    def finished(self) -> bool:
        return self._finished.is_set()

    @property
    def aborted(self) -> bool:
        return self._aborted.is_set()

    def settle(self, segment: int, blocks: int) -> None:
        """The source says: the first `blocks` blocks of this segment are verified in the region. In segment order."""
        if segment != self._settled or segment >= len(self.gates):
            raise InvalidEngineArgument(f"segment {segment} settled out of order, expected {self._settled}")
        if not 0 <= blocks <= self.requested:
            raise InvalidEngineArgument(f"{blocks} blocks settled of {self.requested}")
        self._settled += 1
        self._owner.enqueue(self, segment, blocks)

    def settle_rest(self, blocks: int) -> None:
        """Settle every segment that is not settled yet, with the same count. Nobody writes the region any more."""
        for segment in range(self._settled, len(self.gates)):
            self.settle(segment, blocks)

    def abort(self) -> None:
        """Nobody wants the blocks any more: open all gates with 0. The source must still settle the rest."""
        self._aborted.set()
        for gate in self.gates:
            gate.open(0, None)

    def wait_finished(self, wait_ms: float) -> bool:
        """Whether all segments were handled within `wait_ms`; then `blocks` and `last_event` are final."""
        return self._finished.wait(wait_ms / 1000)

    def shorten(self, blocks: int) -> int:
        """No more than `blocks` leading blocks count, says the source or the thread; returns how many do."""
        with self._lock:
            self._blocks = min(self._blocks, blocks)
        return self.blocks

    def finish(self) -> None:
        """Called by the thread, after the region and the pages were given back."""
        self._finished.set()


@dataclass(frozen=True, slots=True)
class _Settled:
    transfer: Transfer
    segment: int
    blocks: int


class SwapIn:
    """The thread with its streams and staging buffers, for transfers into one page pool."""

    def __init__(self, device: Device, pages: PagePool, *, staging_bytes: int = STAGING_BYTES,
                 counters: Counters | None = None, timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self.counters = counters or Counters()
        self._device = device
        self._pages = pages
        self._copy = device.new_stream("copy")
        self._scatter = device.new_stream("scatter") if device.staged else self._copy
        size = max(staging_bytes, max(pages.segment_bytes))
        self._staging = tuple(device.allocate((size,)) for _ in range(2)) if device.staged else ()
        self._scattered: list[Event | None] = [None, None]
        self._turn = 0
        self._jobs: queue.SimpleQueue[_Settled | None] = queue.SimpleQueue()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="gdr-swap-in", daemon=True)
        self._thread.start()

    # -- called by the engine ----------------------------------------------------------------------------------------

    def begin(self, lease: Lease, blocks: int, target: Allocation) -> Transfer:
        """Take over `lease`, whose region will hold `blocks` blocks, and hold the first `blocks` pages of `target`.

        The caller must settle all segments, whatever happens: only then region and pages are given back.
        """
        if self._closed:
            raise EngineClosed("the swap-in is closed")
        if not 0 < blocks <= len(target.pages):
            raise InvalidEngineArgument(f"{blocks} blocks into {len(target.pages)} pages")
        transfer = Transfer(self, lease, blocks, target, len(self._pages.segment_bytes))
        self._pages.hold(transfer.pages)
        self.counters.add("swap_ins")
        return transfer

    def new_gate(self, segment: int) -> Gate:
        """A gate for one segment of one transfer."""
        return Gate()

    def enqueue(self, transfer: Transfer, segment: int, blocks: int) -> None:
        self._jobs.put(_Settled(transfer, segment, blocks))

    def close(self) -> bool:
        """End the thread after what is enqueued; False when it did not end in CLOSE_WAIT_MS and was abandoned."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join(CLOSE_WAIT_MS / 1000)
        if self._thread.is_alive():
            _LOG.warning("swap-in thread did not end and was abandoned")
            return False
        self._copy.synchronize()
        self._scatter.synchronize()
        return True

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                self._handle(job)
            except Exception:  # Whatever happened to one transfer, the next one needs this thread.
                _LOG.exception("swap-in of segment %d failed", job.segment)
                job.transfer.shorten(0)
                job.transfer.gates[job.segment].open(0, None)
            if job.segment == len(job.transfer.gates) - 1:
                try:
                    self._finish(job.transfer)
                except Exception:  # As above; without its fences neither region nor pages may be used again.
                    _LOG.exception("swap-in could not be ended; its region and pages stay out of use")

    def _handle(self, job: _Settled) -> None:
        transfer, gate = job.transfer, job.transfer.gates[job.segment]
        blocks = transfer.shorten(job.blocks)
        if blocks == 0:
            gate.open(0, None)
            return
        if transfer.rows is None:
            self._wait_for_page_users(transfer)
            transfer.rows = self._device.rows([page.index for page in transfer.pages], self._scatter)
        loaded = self._load(transfer, transfer.rows, job.segment, blocks)
        gate.open(transfer.shorten(loaded), self._scatter.record())

    def _load(self, transfer: Transfer, rows: Rows, segment: int, blocks: int) -> int:
        """Enqueue the copies of one segment; how many leading blocks were accepted by the device."""
        size = self._pages.segment_bytes[segment]
        offset = sum(self._pages.segment_bytes[:segment]) * transfer.requested
        region = transfer.lease.bytes(sum(self._pages.segment_bytes) * transfer.requested)
        source = region[offset : offset + transfer.requested * size].view(transfer.requested, size)
        step = self._staging[0].numel() // size if self._staging else blocks
        for start in range(0, blocks, step):
            stop = min(start + step, blocks)
            try:
                self._load_piece(source[start:stop], rows.slice(start, stop), segment)
            except DeviceError as error:
                _LOG.warning("segment %d, blocks from %d on are recomputed: %s", segment, start, error)
                transfer.failure = error
                self.counters.add("copy_failures")
                return start
            self.counters.add("copies")
            self.counters.add("copied_bytes", (stop - start) * size)
        return blocks

    def _load_piece(self, source: torch.Tensor, rows: Rows, segment: int) -> None:
        pages = self._pages.storage[segment]
        if not self._staging:
            begun = self._mark(self._copy)
            self._device.scatter(pages, rows, source, self._copy)
            self._trace("copy", segment, source, begun, self._mark(self._copy))
            return
        slot, self._turn = self._turn, 1 - self._turn
        self._wait_for_staging(slot)
        target = self._staging[slot][: source.numel()].view(source.shape)
        timed = self.timeline is not None
        begun = self._mark(self._copy)
        self._device.copy_in(target, source, self._copy)
        copied = self._copy.record(timed=timed)
        self._wait_for_copy(copied)
        begun_scatter = self._mark(self._scatter)
        self._device.scatter(pages, rows, target, self._scatter)
        self._scattered[slot] = scattered = self._scatter.record(timed=timed)
        self._trace("copy", segment, source, begun, copied)
        self._trace("scatter", segment, source, begun_scatter, scattered)

    def _wait_for_page_users(self, transfer: Transfer) -> None:
        """Order 3."""
        for fence in transfer.fences:
            self._scatter.wait(fence)

    def _wait_for_staging(self, slot: int) -> None:
        """Order 4."""
        scattered = self._scattered[slot]
        if scattered is not None:
            self._copy.wait(scattered)

    def _wait_for_copy(self, copied: Event) -> None:
        """Order 5."""
        self._scatter.wait(copied)

    def _region_fences(self) -> Sequence[Event]:
        """Order 6."""
        return (self._copy.record(), self._scatter.record()) if self._staging else (self._copy.record(),)

    def _page_fences(self, transfer: Transfer) -> Sequence[Event]:
        """Order 7."""
        return (transfer.last_event,) if transfer.last_event is not None else ()

    def _finish(self, transfer: Transfer) -> None:
        """All segments are handled: give back region and pages (orders 6 and 7) and let waiters go on."""
        transfer.last_event = self._scatter.record()
        transfer.lease.release(self._region_fences())
        self._pages.drop(transfer.pages, self._page_fences(transfer))
        if transfer.aborted:
            self.counters.add("swap_ins_aborted")
        elif transfer.blocks < transfer.requested:
            self.counters.add("swap_ins_shortened")
        transfer.finish()

    def _mark(self, stream: Stream) -> Event | None:
        """A timed event, when somebody looks at times."""
        return stream.record(timed=True) if self.timeline is not None else None

    def _trace(self, lane: str, segment: int, source: torch.Tensor, start: Event | None, stop: Event | None) -> None:
        if self.timeline is not None and start is not None and stop is not None:
            self.timeline.device(lane, f"segment {segment}", start, stop, blocks=source.shape[0], bytes=source.numel())

