"""The gate of a directory node: may it be asked now, and what does a failure of its threads mean to a caller.

Every awaiting call of a node runs its work on one of the node's two threads and waits through `result`, which turns
what can go wrong into errors of the contract: a full queue, a passed deadline, a failing disk and a lost index are all
NodeUnavailable, so that the caller turns to other nodes. A node is *suspect* while the running operation of either
thread is older than HUNG_MS; it then refuses at once. An fsync that failed makes it *read-only* until it is opened
again, because the kernel may have thrown the unsynced pages away: a second fsync would report success for data that is
lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final, TypeVar

from efs.clock import Arrivals, Clock, Deadline
from efs.errors import NodeReadOnly, NodeUnavailable
from efs.index import IndexDamaged
from efs.iothread import IoThread, QueueFull, Settle, ThreadClosed, answer, pass_on
from efs.metrics import CounterFile

_LOG: Final = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")


class Guard:
    """State and threads of one node. Belongs to the loop's thread."""

    def __init__(self, node_index: int, clock: Clock, counters: CounterFile) -> None:
        self.node_index = node_index
        self.clock = clock
        self.counters = counters
        self.reader = IoThread(f"efs-node-{node_index}-reader", clock)
        self.writer = IoThread(f"efs-node-{node_index}-writer", clock)
        self.arrivals = Arrivals(clock)
        self.closed = False
        self.read_only: str | None = None
        self.index_lost = False
        self._was_suspect = False

    @property
    def suspect(self) -> bool:
        """Whether an operation is hanging. Counts the moment in which that is first seen."""
        hung = self.reader.hung or self.writer.hung
        if hung and not self._was_suspect:
            self.counters.add("node_suspect")
            _LOG.warning("node %d hangs", self.node_index, extra={"node": self.node_index})
        self._was_suspect = hung
        return hung

    @property
    def state(self) -> str:
        """A word for status."""
        if self.closed:
            return "closed"
        if self.suspect:
            return "suspect"
        if self.index_lost:
            return "index-lost"
        return "serving" if self.read_only is None else "read-only"

    def unavailable(self, why: str) -> NodeUnavailable:
        return NodeUnavailable(self.node_index, why)

    def require_open(self) -> None:
        if self.closed:
            raise self.unavailable("it was closed")

    def require_serving(self) -> None:
        """NodeUnavailable when nothing that needs a thread should be asked now."""
        self.require_open()
        if self.suspect:
            raise self.unavailable("an operation hangs")

    def require_writable(self) -> None:
        """`require_serving`, and NodeReadOnly after a failed fsync."""
        self.require_serving()
        if self.read_only is not None:
            raise NodeReadOnly(self.node_index, self.read_only)
        if self.index_lost:
            raise self.unavailable("its index is damaged and must be rebuilt: open the node again")

    def turn_read_only(self, why: str) -> None:
        """Serve no more writes until the node is opened again."""
        if self.read_only is None:
            self.counters.add("node_read_only")
            _LOG.error("node %d is read-only from now on: %s", self.node_index, why, extra={"node": self.node_index})
            self.read_only = why

    def require_room(self, thread: IoThread) -> None:
        """NodeUnavailable when the thread's queue is full: before anything is changed for work that it would refuse."""
        if thread.full:
            self.require_open()
            self.counters.add("node_queue_refused")
            raise self.unavailable("its queue is full")

    def submit(self, thread: IoThread, work: Callable[[], T], settle: Settle[T, R]) -> asyncio.Future[R]:
        """Queue work; NodeUnavailable when the queue is full."""
        try:
            return thread.submit(work, settle)
        except QueueFull as error:
            self.counters.add("node_queue_refused")
            raise self.unavailable("its queue is full") from error
        except ThreadClosed as error:
            raise self.unavailable("it was closed") from error

    async def result(self, future: asyncio.Future[R], deadline: Deadline) -> R:
        """The answer of submitted work. What it raised is translated, other errors are passed on."""
        try:
            return await answer(future, deadline)
        except TimeoutError as error:
            raise self.unavailable("no answer by the deadline") from error
        except OSError as error:
            raise self.failed(error) from error
        except IndexDamaged as error:
            self.index_lost = True
            raise self.unavailable(str(error)) from error

    async def ask(self, work: Callable[[], T], deadline: Deadline) -> T:
        """Run work that only reads on the reader thread."""
        self.require_serving()
        return await self.result(self.submit(self.reader, work, pass_on), deadline)

    def failed(self, error: OSError) -> NodeUnavailable:
        """Count an error of the system; what to tell the caller."""
        self.counters.add("node_io_errors")
        return self.unavailable(error.strerror or str(error))
