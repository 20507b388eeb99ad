"""Payload of a node into the buffers of a reader. Belongs to the loop's thread, which alone touches those buffers.

`read_now` copies what needs no waiting: from the memory map where all its pages are resident (mincore), else with
preadv(RWF_NOWAIT) straight into the landing, bytes between its pieces into a buffer that nobody reads. `read` has the
reader thread fill private staging, READ_PIECE_BYTES at a time and READS_UNDER_WAY pieces ahead, and copies it while the
call is being awaited. A call that was cancelled or whose landing was revoked gets no more bytes, whenever its reads
end.

Nothing here checks what is read. Slots that do not exist (any more) read as zeros: the checks of the reader find that
they are not what it looks for, and its next look-up tells why.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.contract import Landing, Span
from efs.extent import Geometry
from efs.iothread import pass_on
from efs.limits import MIB
from efs.nodeguard import Guard
from efs.nodestate import NodeState
from efs.slab import Slab

READ_PIECE_BYTES: Final = 1 * MIB
"""Staging of one piece of work, unless a single span is larger."""
READS_UNDER_WAY: Final = 2
"""Pieces that one call has the reader thread work on: one being read, one waiting to be copied."""
_PAGE: Final = mmap.PAGESIZE

Part = list[tuple[int, Span, Landing]]


class NodeReads:
    """The reading side of one node's payload. `mapped`: `read_now` uses the slab's memory map."""

    def __init__(self, state: NodeState, guard: Guard, mapped: bool) -> None:
        self._state = state
        self._guard = guard
        self._residency = Residency(state.slab.view) if mapped and state.slab.view is not None else None
        self._between = memoryview(bytearray())

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """See the contract."""
        if self._residency is None or self._guard.closed:
            return None
        return [self._view(self._residency, span) for span in spans]

    def _view(self, residency: Residency, span: Span) -> NDArray[np.uint8] | None:
        geometry = self._state.geometry_of(span.location, span.slot_bytes, span.count)
        if geometry is None:
            return None
        if not residency.resident(geometry.slot_position(span.location), span.count * span.slot_bytes):
            return None
        return self._state.slab.mapped_slots(geometry, span.location, span.count)

    def read_now(self, span: Span, landing: Landing) -> bool:
        """See the contract."""
        if landing.revoked or self._guard.closed:
            return False
        if self._residency is not None:
            view = self._view(self._residency, span)
            if view is not None:
                land(view, landing)
            return view is not None
        geometry = self._state.geometry_of(span.location, span.slot_bytes, span.count)
        return geometry is not None and self._read_scattered_now(geometry, span, landing)

    def _read_scattered_now(self, geometry: Geometry, span: Span, landing: Landing) -> bool:
        buffer, slot_bytes, count = landing.buffer, span.slot_bytes, span.count
        if len(landing.strides) != 1:
            buffers = list(self._scattered(span, landing))
        else:
            stride = landing.strides[0]
            start, step, size = stride.start, stride.step, stride.size
            if size == slot_bytes == step:
                buffers = [buffer[start : start + count * size]]
            elif size == slot_bytes:
                buffers = [buffer[at : at + size] for at in range(start, start + count * step, step)]
            else:
                before = self._discard(stride.source)
                after = self._discard(slot_bytes - stride.source - size)
                buffers = [view for at in range(start, start + count * step, step)
                           for view in (before, buffer[at : at + size], after) if len(view)]
        try:
            return self._state.slab.read_scattered_now(geometry, span.location, buffers)
        except OSError:
            return False  # The awaiting twin meets the error again, and reports it.

    def _scattered(self, span: Span, landing: Landing) -> Iterator[memoryview]:
        """The views that take the bytes of a span, gaps included, in source order."""
        for row in range(span.count):
            position = 0
            for stride in landing.strides:
                if stride.source > position:
                    yield self._discard(stride.source - position)
                at = stride.start + row * stride.step
                yield landing.buffer[at : at + stride.size]
                position = stride.source + stride.size
            if position < span.slot_bytes:
                yield self._discard(span.slot_bytes - position)

    def _discard(self, size: int) -> memoryview:
        if len(self._between) < size:
            self._between = memoryview(bytearray(size))
        return self._between[:size]

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        """See the contract."""
        self._guard.require_serving()
        under_way: deque[tuple[Part, asyncio.Future[list[NDArray[np.uint8]]]]] = deque()
        waiting = self._parts(spans)
        while True:
            while len(under_way) < READS_UNDER_WAY and (part := next(waiting, None)) is not None:
                under_way.append((part, self._submit(part)))
            if not under_way:
                return
            part, future = under_way.popleft()
            staged = await self._guard.result(future, deadline)
            self._guard.counters.add("staged_reads", len(part))
            for (place, _, landing), slots in zip(part, staged, strict=True):
                if not landing.revoked:
                    land(slots, landing)
                    landed(place)

    def _parts(self, spans: Sequence[tuple[Span, Landing]]) -> Iterator[Part]:
        """Spans together, in order, as long as they fit one piece; what was revoked by then is left out."""
        part: Part = []
        size = 0
        for place, (span, landing) in enumerate(spans):
            span_bytes = span.count * span.slot_bytes
            if part and size + span_bytes > READ_PIECE_BYTES:
                yield part
                part, size = [], 0
            if not landing.revoked:
                part.append((place, span, landing))
                size += span_bytes
        if part:
            yield part

    def _submit(self, part: Part) -> asyncio.Future[list[NDArray[np.uint8]]]:
        wanted = [(self._state.geometry_of(span.location, span.slot_bytes, span.count), span) for _, span, _ in part]
        return self._guard.submit(self._guard.reader, partial(_read_spans, self._state.slab, wanted), pass_on)


class Residency:
    """Whether pages of a map are in memory, by mincore(2), whose answer may be old by the time it is used: a page that
    went since is then waited for. Without a working mincore nothing counts as resident."""

    def __init__(self, view: NDArray[np.uint8]) -> None:
        self._base = view.ctypes.data
        self._length = len(view)
        # PyDLL keeps the interpreter lock: the call takes a microsecond and waits for nothing.
        self._mincore = ctypes.PyDLL(None).mincore
        self._mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        self._flags = bytearray(1)
        self._address = 0

    def resident(self, offset: int, size: int) -> bool:
        first = offset - offset % _PAGE
        length = offset + size - first
        if offset + size > self._length:
            return False
        pages = -(-length // _PAGE)
        if pages > len(self._flags) or not self._address:
            self._flags = bytearray(pages)
            self._address = ctypes.addressof((ctypes.c_char * pages).from_buffer(self._flags))
        if self._mincore(self._base + first, length, self._address) != 0:
            return False
        return self._flags.find(0, 0, pages) < 0


def land(slots: NDArray[np.uint8], landing: Landing) -> None:
    """Copy (count, slot bytes) to where the strides say: one strided copy for each."""
    count = len(slots)
    for stride in landing.strides:
        target: NDArray[np.uint8] = np.ndarray((count, stride.size), np.uint8, landing.buffer, stride.start,
                                               (stride.step, 1))
        target[...] = slots[:, stride.source : stride.source + stride.size]


def _read_spans(slab: Slab, wanted: Sequence[tuple[Geometry | None, Span]]) -> list[NDArray[np.uint8]]:
    return [np.zeros((span.count, span.slot_bytes), np.uint8) if geometry is None
            else slab.read_payload(geometry, span.location, span.count) for geometry, span in wanted]
