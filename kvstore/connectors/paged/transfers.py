"""The computing side of a connector: bytes between an engine's pages and the store. Threads of its own, bounded memory.

*Loads.* A job is put to one of LOADERS threads and always ends in exactly one `LoadResult`, whatever happens: the
engine holds the pages until then, and computes on only when it is ok. Only what the store verified counts. Where
pages can be filled in place they are, else blocks come through one buffer of a piece for each thread. A job that
fails may have written to its own pages, which nobody has read yet and the engine computes anew.

*Saves.* `save` copies pages before it returns, so the engine may change or reuse them at once and never waits for the
store. What waits to be stored is bounded in bytes: blocks that do not fit are dropped and counted, leading blocks first
in, because a prefix without its head is worth nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore.connectors.paged.bounds import PieceBuffer, WaitingBytes
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.jobs import LoadJob, LoadResult, SaveJob, Span, page_runs
from kvstore.connectors.paged.link import LazyStore, Worker
from kvstore.connectors.paged.pages import GroupPages
from kvstore.connectors.paged.settings import PagedSettings
from kvstore.connectors.paged.verbs import fetch, put
from kvstore.keys import Chain, Namespace

_LOG: Final = logging.getLogger(__name__)
LOADERS: Final = 2
"""Sequences loaded at once: the next one's look-ups under the copies of the one before."""


@dataclass(frozen=True, slots=True)
class PageSpace:
    """A KV group of this worker: where its pages are, and under which names its blocks are stored."""

    namespace: Namespace
    pages: GroupPages


class _LoadFailed(Exception):
    """Block `block` of a span could not be loaded."""

    def __init__(self, block: int, reason: str) -> None:
        self.block = block
        self.reason = reason
        super().__init__(reason)


class PageTransfers:
    """See the module docstring. Made and used by the engine's thread; `groups` as the engine numbers them."""

    def __init__(self, store: LazyStore, groups: Sequence[PageSpace], settings: PagedSettings, counts: Counts) -> None:
        self._store = store
        self._groups = tuple(groups)
        self._settings = settings
        self._counts = counts
        self._loaders = [Worker(f"kvstore-load-{number}") for number in range(LOADERS)]
        self._saver = Worker("kvstore-save")
        self._buffer = PieceBuffer(settings.piece_bytes)
        self._waiting = WaitingBytes(settings.save_queue_bytes)
        self._changed = threading.Condition()
        self._loading = 0
        self._turn = 0
        self._finished: list[LoadResult] = []
        self._given_up = False

    def give_up(self) -> None:
        """From now on every load fails, those under way too, and nothing more is stored."""
        self._given_up = True

    # -- loads

    def load(self, job: LoadJob) -> None:
        with self._changed:
            self._loading += 1
        self._turn = (self._turn + 1) % LOADERS
        self._loaders[self._turn].submit(partial(self._load, job, time.monotonic()))

    def finished(self, wait_s: float = 0.0) -> list[LoadResult]:
        """Loads that have ended since the last call. Waits up to `wait_s` for one, if one is under way."""
        with self._changed:
            if wait_s and self._loading:
                self._changed.wait_for(lambda: bool(self._finished), wait_s)
            ended, self._finished = self._finished, []
            self._loading -= len(ended)
        return [LoadResult(result.request_id, ok=False) for result in ended] if self._given_up else ended

    def _load(self, job: LoadJob, began: float) -> None:
        result = LoadResult(job.request_id, ok=False)
        try:
            result = self._loaded(job)
        except Exception:
            self._counts.add("load_failed_unknown")
            _LOG.exception("a load for %s failed", job.request_id)
        finally:
            if result.ok:
                self._counts.add("loads")
                self._counts.add("load_ms", round((time.monotonic() - began) * 1000))
            with self._changed:
                self._finished.append(result)
                self._changed.notify_all()

    def _loaded(self, job: LoadJob) -> LoadResult:
        for span in job.spans:
            try:
                self._load_span(span)
            except _LoadFailed as failure:
                _LOG.info("a load for %s failed at block %d of group %d: %s", job.request_id, failure.block, span.group,
                          failure.reason)
                block_tokens = self._groups[span.group].namespace.layout.block_tokens
                return LoadResult(job.request_id, False, failure.block * block_tokens)
        return LoadResult(job.request_id, ok=True)

    def _load_span(self, span: Span) -> None:
        group = self._groups[span.group]
        layout = group.namespace.layout
        chain = span.chain(group.namespace)
        for first, stop in page_runs(span.pages, max(1, self._settings.piece_bytes // layout.block_bytes)):
            pages = span.pages[first:stop]
            in_place = group.pages.direct(pages)
            target = self._buffer.of(len(pages) * layout.block_bytes) if in_place is None else in_place
            fetched = fetch(self._store, chain[first:stop], target, self._counts)
            if fetched.reason is not None:
                raise _LoadFailed(span.start + first + fetched.leading, fetched.reason)
            if in_place is None:
                group.pages.scatter(pages, target)

    # -- saves

    def save(self, job: SaveJob) -> None:
        """Copy the job's pages and have them stored. Returns when the pages may change."""
        for span in job.spans:
            group = self._groups[span.group]
            block_bytes = group.namespace.layout.block_bytes
            chain = span.chain(group.namespace)
            for first, stop in page_runs(span.pages, max(1, self._settings.piece_bytes // block_bytes)):
                room = self._waiting.reserve(stop - first, block_bytes)
                self._counts.add("save_dropped_blocks", stop - first - room)
                self._counts.add("save_begun_blocks", room)
                if room:
                    blocks = group.pages.gather(span.pages[first : first + room])
                    self._saver.submit(partial(self._save, chain[first : first + room], blocks))

    def _save(self, chain: Chain, blocks: NDArray[np.uint8]) -> None:
        try:
            if self._given_up:
                self._counts.add("save_failed_blocks", len(chain))
                return
            put(self._store, chain, blocks, self._counts)
        finally:
            self._waiting.release(blocks.size)

    # -- end

    def close(self) -> None:
        """Store what is waiting, within the drain time, and end the threads. Loads under way are given up."""
        if not self._saver.stop(self._settings.drain_ms / 1000):
            _LOG.warning("%d bytes were not stored before the end", self._waiting.bytes)
        for loader in self._loaders:
            loader.stop(0.0)
