"""Payload that needs no waiting, into the buffers of a reader: by whoever has the slab open. Belongs to the loop's
thread.

Slots are shown or copied from the memory map where all their pages are resident (mincore), else read with
preadv(RWF_NOWAIT) straight into the landing, bytes between its pieces into a buffer that nobody reads. Nothing here
checks what is read: slots that were used again meanwhile are found by the checks of the reader.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from efs.contract import Landing, Span
from efs.extent import Geometry
from efs.slab import Slab

_PAGE: Final = mmap.PAGESIZE


class SlotSource(Protocol):
    """An open slab, and how its extents are cut."""

    @property
    def slab(self) -> Slab: ...

    def geometry_of(self, location: int, slot_bytes: int, count: int) -> Geometry | None:
        """Geometry of the extent of a range of slots; None when it has no such slots (any more)."""
        ...


class SlotReads:
    """Reads of one slab. `mapped`: from the slab's memory map."""

    def __init__(self, source: SlotSource, mapped: bool) -> None:
        self._source = source
        view = source.slab.view
        self._residency = Residency(view) if mapped and view is not None else None
        self._between = memoryview(bytearray())

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """See the contract."""
        if self._residency is None:
            return None
        return [self._view(self._residency, span) for span in spans]

    def _view(self, residency: Residency, span: Span) -> NDArray[np.uint8] | None:
        geometry = self._source.geometry_of(span.location, span.slot_bytes, span.count)
        if geometry is None:
            return None
        if not residency.resident(geometry.slot_position(span.location), span.count * span.slot_bytes):
            return None
        return self._source.slab.mapped_slots(geometry, span.location, span.count)

    def read_now(self, span: Span, landing: Landing) -> bool:
        """See the contract."""
        if landing.revoked:
            return False
        if self._residency is not None:
            view = self._view(self._residency, span)
            if view is not None:
                land(view, landing)
            return view is not None
        geometry = self._source.geometry_of(span.location, span.slot_bytes, span.count)
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
            return self._source.slab.read_scattered_now(geometry, span.location, buffers)
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
