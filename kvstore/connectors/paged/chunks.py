"""Chunks between an engine's own second tier in host memory and the store: loads and saves on threads.

Some engines keep a tier of their own between the device and whatever stands behind it: a table of *slots* in host
memory, each with room for one *chunk* (the KV of some tokens of one group, of all ranks side by side). The engine moves
chunks between its pages and slots, decides which are wanted, and holds a slot still until the job that uses it has
been answered. What a chunk's bytes mean is its business: here a slot is one row of bytes.

Each job is answered by exactly one `ChunkResult`, whatever happens; a load is good chunk by chunk. Bytes go straight
from and to the slots where those of a piece follow one another, else through a buffer. What waits to be stored holds
slots, so it is bounded in bytes: chunks that do not fit are dropped and counted, the head of a prefix last.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.paged.bounds import PieceBuffer, WaitingBytes
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.jobs import Span
from kvstore.connectors.paged.link import LazyStore, Worker
from kvstore.connectors.paged.settings import PagedSettings
from kvstore.connectors.paged.verbs import fetch, put
from kvstore.keys import Chain, Namespace

_LOG: Final = logging.getLogger(__name__)
LOADERS: Final = 2
"""Jobs loaded at once: the next one's look-ups under the copies of the one before."""
DROP_WAIT_S: Final = 30.0
"""Most that the end of a process waits for a transfer under way: longer than any deadline of a piece, so that slots are
not taken away under it."""


@dataclass(frozen=True, slots=True)
class ChunkResult:
    """How a job ended. ok: all chunks are there, or stored. good: (group, position) of the chunks of a load whose slots
    were filled and verified; of a save nothing. bytes: of what was moved. seconds: since the job was given."""

    job: int
    load: bool
    ok: bool
    good: frozenset[tuple[int, int]]
    bytes: int
    seconds: float


class ChunkTransfers:
    """See the module docstring. slots: (slots, chunk bytes) uint8, every row dense. Used by the engine's thread."""

    def __init__(self, link: LazyStore, namespaces: Mapping[int, Namespace], slots: NDArray[np.uint8],
                 settings: PagedSettings, counts: Counts) -> None:
        self._link = link
        self._namespaces = namespaces
        self._slots = slots
        self._settings = settings
        self._counts = counts
        self._loaders = [Worker(f"kvstore-load-{number}") for number in range(LOADERS)]
        self._saver = Worker("kvstore-save")
        self._buffer = PieceBuffer(settings.piece_bytes)
        self._waiting = WaitingBytes(settings.save_queue_bytes)
        self._turn = 0
        self._changed = threading.Condition()
        self._under_way = 0
        self._finished: list[ChunkResult] = []
        self._closing = False

    def load(self, job: int, spans: Sequence[Span]) -> None:
        """Fill the slots of these spans."""
        self._begin()
        self._turn = (self._turn + 1) % LOADERS
        self._loaders[self._turn].submit(partial(self._load, job, spans, time.monotonic()))

    def save(self, job: int, spans: Sequence[Span]) -> None:
        """Store what is in the slots of these spans, which do not change until the job is answered."""
        self._begin()
        kept = [span for span in (self._fitting(span) for span in spans) if span.pages]
        whole = sum(len(span.pages) for span in kept) == sum(len(span.pages) for span in spans)
        self._saver.submit(partial(self._save, job, kept, whole, time.monotonic()))

    def finished(self) -> list[ChunkResult]:
        """Jobs that have ended since the last call."""
        with self._changed:
            ended, self._finished = self._finished, []
        return ended

    @property
    def busy(self) -> bool:
        """Whether a job is under way."""
        with self._changed:
            return self._under_way > 0

    def drain(self) -> None:
        """Wait until no job is under way: each ends by the deadlines of its pieces."""
        with self._changed:
            self._changed.wait_for(lambda: self._under_way == 0)

    def give_up(self) -> None:
        """Pieces that have not begun fail from now on."""
        self._closing = True

    def close(self) -> bool:
        """Store what waits, within the drain time, and end the threads; what is left then fails. False: some slot is
        still in use."""
        if not self._saver.stop(self._settings.drain_ms / 1000):
            _LOG.warning("%d bytes were not stored before the end", self._waiting.bytes)
        self._closing = True
        for loader in self._loaders:
            loader.stop(0.0)
        with self._changed:
            return self._changed.wait_for(lambda: self._under_way == 0, DROP_WAIT_S)

    def _begin(self) -> None:
        with self._changed:
            self._under_way += 1

    def _end(self, result: ChunkResult) -> None:
        with self._changed:
            self._finished.append(result)
            self._under_way -= 1
            self._changed.notify_all()

    def _pieces(self, span: Span) -> Iterator[tuple[Chain, Sequence[int], int]]:
        """(keys, slots, position of the first) of stretches of at most a piece."""
        namespace = self._namespaces[span.group]
        chain = span.chain(namespace)
        most = max(1, self._settings.piece_bytes // namespace.layout.block_bytes)
        for first in range(0, len(chain), most):
            yield chain[first : first + most], span.pages[first : first + most], span.start + first

    def _direct(self, slots: Sequence[int]) -> NDArray[np.uint8] | None:
        """The memory of these slots as one flat buffer; None where it is none."""
        if self._slots.strides[0] != self._slots.shape[1]:
            return None
        if any(slot != slots[0] + at for at, slot in enumerate(slots)):
            return None
        return self._slots[slots[0] : slots[0] + len(slots)].reshape(-1)

    # -- loads

    def _load(self, job: int, spans: Sequence[Span], began: float) -> None:
        good: set[tuple[int, int]] = set()
        size, whole = 0, False
        try:
            for span in spans:
                for chain, slots, first in self._pieces(span):
                    if self._closing:
                        return
                    there = self._load_piece(chain, slots)
                    good.update((span.group, first + at) for at, ok in enumerate(there) if ok)
                    size += sum(there) * chain.layout.block_bytes
            whole = len(good) == sum(len(span.pages) for span in spans)
        except Exception:
            self._counts.add("load_failed_unknown")
            _LOG.exception("a load failed")
        finally:
            seconds = time.monotonic() - began
            if whole:
                self._counts.add("loads")
                self._counts.add("load_ms", round(seconds * 1000))
            self._end(ChunkResult(job, True, whole, frozenset(good), size, seconds))

    def _load_piece(self, chain: Chain, slots: Sequence[int]) -> Sequence[bool]:
        in_place = self._direct(slots)
        target = self._buffer.of(len(slots) * chain.layout.block_bytes) if in_place is None else in_place
        fetched = fetch(self._link, chain, target, self._counts)
        if in_place is None:
            rows = target.reshape(len(slots), -1)
            for at, slot in enumerate(slots):
                if fetched.ok[at]:
                    self._slots[slot] = rows[at]
        return fetched.ok

    # -- saves

    def _fitting(self, span: Span) -> Span:
        """As much of a span as may wait, counted as waiting."""
        room = self._waiting.reserve(len(span.pages), self._namespaces[span.group].layout.block_bytes)
        self._counts.add("save_dropped_blocks", len(span.pages) - room)
        self._counts.add("save_begun_blocks", room)
        return span.leading(room)

    def _save(self, job: int, spans: Sequence[Span], whole: bool, began: float) -> None:
        stored, size = 0, 0
        try:
            for span in spans:
                for chain, slots, _ in self._pieces(span):
                    if self._closing:
                        self._counts.add("save_failed_blocks", len(chain))
                        continue
                    done = self._save_piece(chain, slots)
                    stored += done
                    size += done * chain.layout.block_bytes
        finally:
            for span in spans:
                self._waiting.release(len(span.pages) * self._namespaces[span.group].layout.block_bytes)
            ok = whole and stored == sum(len(span.pages) for span in spans)
            self._end(ChunkResult(job, False, ok, frozenset(), size, time.monotonic() - began))

    def _save_piece(self, chain: Chain, slots: Sequence[int]) -> int:
        blocks = self._direct(slots)
        if blocks is None:
            blocks = np.concatenate([self._slots[slot] for slot in slots])
        return put(self._link, chain, blocks, self._counts)
