"""Payload of a node into the buffers of a reader. Belongs to the loop's thread, which alone touches those buffers.

What needs no waiting is `efs/slotreads.py`. `read` has the reader thread fill private staging, READ_PIECE_BYTES at a
time and READS_UNDER_WAY pieces ahead, and copies it while the call is being awaited. A call that was cancelled or whose
landing was revoked gets no more bytes, whenever its reads end.

Nothing here checks what is read. Slots that do not exist (any more) read as zeros: the checks of the reader find that
they are not what it looks for, and its next look-up tells why.
"""

from __future__ import annotations

import asyncio
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
from efs.slotreads import SlotReads, land

READ_PIECE_BYTES: Final = 1 * MIB
"""Staging of one piece of work, unless a single span is larger."""
READS_UNDER_WAY: Final = 2
"""Pieces that one call has the reader thread work on: one being read, one waiting to be copied."""

Part = list[tuple[int, Span, Landing]]


class NodeReads:
    """The reading side of one node's payload. `mapped`: `read_now` uses the slab's memory map."""

    def __init__(self, state: NodeState, guard: Guard, mapped: bool) -> None:
        self._state = state
        self._guard = guard
        self._now = SlotReads(state, mapped)

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """See the contract."""
        return None if self._guard.closed else self._now.views_now(spans)

    def read_now(self, span: Span, landing: Landing) -> bool:
        """See the contract."""
        return not self._guard.closed and self._now.read_now(span, landing)

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


def _read_spans(slab: Slab, wanted: Sequence[tuple[Geometry | None, Span]]) -> list[NDArray[np.uint8]]:
    return [np.zeros((span.count, span.slot_bytes), np.uint8) if geometry is None
            else slab.read_payload(geometry, span.location, span.count) for geometry, span in wanted]
