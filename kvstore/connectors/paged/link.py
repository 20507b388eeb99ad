"""A connector's way to the store: opened at the start, tried again in the background, never waited for.

`LazyStore.get` gives the open store or None at once, and raises nothing. While there is none, somebody who asks
REOPEN_AFTER_S after the last attempt has a thread try again. Nodes that go away are the store's own business: it reads
around them and connects again by itself. `Worker` is a daemon thread that takes jobs from a queue; what a job raises is
logged, and does not end it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Final, Protocol

from efs.errors import EfsError
from efs.types import GetReport, PutReport
from kvstore.connectors.paged.counts import Counts
from kvstore.keys import Chain

_LOG: Final = logging.getLogger(__name__)
REOPEN_AFTER_S: Final = 5.0


class BlockStore(Protocol):
    """What is needed of a store; `kvstore.BlockingKVStore` has it."""

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int: ...

    def get_into(self, chain: Chain, out: Any, *, deadline_ms: float | None = None) -> GetReport: ...

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport: ...

    def close(self) -> None: ...


class LazyStore:
    """See the module docstring. Safe to use from several threads."""

    def __init__(self, opener: Callable[[], BlockStore], counts: Counts,
                 clock: Callable[[], float] = time.monotonic) -> None:
        self._opener = opener
        self._counts = counts
        self._clock = clock
        self._lock = threading.Lock()
        self._store: BlockStore | None = None
        self._opening = False
        self._not_before = float("-inf")
        self._closed = False

    def open(self) -> None:
        """Open it and wait for that. Failing is counted and logged."""
        with self._lock:
            if self._opening or self._closed or self._store is not None:
                return
            self._opening = True
        self._open()

    def get(self) -> BlockStore | None:
        """The open store; None while there is none."""
        with self._lock:
            if self._store is not None or self._closed or self._opening or self._clock() < self._not_before:
                return self._store
            self._opening = True
        threading.Thread(target=self._open, name="kvstore-open", daemon=True).start()
        return None

    def _open(self) -> None:
        opened: BlockStore | None = None
        try:
            opened = self._opener()
        except Exception as error:
            self._counts.add("store_not_opened")
            _LOG.warning("the KV store cannot be opened, going on without it: %s", error)
        with self._lock:
            self._opening = False
            self._not_before = self._clock() + REOPEN_AFTER_S
            if not self._closed:
                self._store, opened = opened, None
        if opened is not None:
            opened.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()


class Worker:
    """A daemon thread that runs jobs in order."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], None]) -> None:
        self._jobs.put(job)

    def stop(self, wait_s: float) -> bool:
        """End after the jobs that are queued; whether that happened within `wait_s`."""
        self._jobs.put(None)
        self._thread.join(wait_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                _LOG.exception("a job of the KV store connector failed")


def reason_of(error: BaseException) -> str:
    """The name under which a failure is counted."""
    return type(error).__name__ if isinstance(error, EfsError) else "unknown"
