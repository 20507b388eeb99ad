"""A node's own thread for system calls that may block or hang, and the rules by which a hung one is noticed.

One `IoThread` is one daemon thread with a bounded queue. `submit(work, settle)` is called on the event loop's thread:

- `work()` runs on the thread, one piece after the other, on data that nobody else touches meanwhile.
- `settle(result, error)` then runs on the loop's thread, always and in the order of submission, also when nobody
  waits for the answer any more: what a piece of work did to the disk is applied to the node's state even if its
  caller gave up. What `settle` returns (or raises) is the answer.
- `answer(future, deadline)` waits for that answer. Cancelling it or passing the deadline abandons the answer, not the
  work.

There is no executor and no join, because a thread stuck in a system call can not be waited for: `close` waits a bounded
time and then leaves the thread behind. Being a daemon it does not keep the process from exiting.

A thread is *hung* while its running piece of work began more than HUNG_MS ago. Its node then refuses new work at once
until that piece ends. Pieces that wait in the queue do not count: they are as old as the one that they wait for.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from efs.clock import Clock, Deadline
from efs.limits import HUNG_MS, NODE_QUEUE_OPERATIONS

T = TypeVar("T")
R = TypeVar("R")

Settle = Callable[[T | None, BaseException | None], R]


class QueueFull(Exception):
    """More operations wait than the thread's queue holds."""


class ThreadClosed(Exception):
    """The thread takes no more work."""


@dataclass(slots=True)
class _Piece(Generic[T, R]):
    work: Callable[[], T]
    settle: Settle[T, R]
    answer: asyncio.Future[R]


def pass_on(result: T | None, error: BaseException | None) -> T:
    """The `settle` of work that changes no state: its result is the answer."""
    if error is not None:
        raise error
    return result  # type: ignore[return-value]


class IoThread:
    """One daemon thread that runs submitted work in order. All methods belong to the loop's thread."""

    def __init__(self, name: str, clock: Clock, most_queued: int = NODE_QUEUE_OPERATIONS) -> None:
        self._loop = asyncio.get_running_loop()
        self._clock = clock
        self._most_queued = most_queued
        self._queue: SimpleQueue[_Piece[Any, Any] | None] = SimpleQueue()
        self._unsettled = 0
        self._began: float | None = None
        self._closed = False
        self._idle = asyncio.Event()
        self._idle.set()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Pieces submitted and not settled."""
        return self._unsettled

    @property
    def running_ms(self) -> float:
        """Age of the running piece of work, 0 when there is none."""
        began = self._began
        return 0.0 if began is None else (self._clock.monotonic() - began) * 1000

    @property
    def hung(self) -> bool:
        """Whether the running piece of work has been running for longer than HUNG_MS."""
        return self.running_ms > HUNG_MS

    @property
    def full(self) -> bool:
        """Whether `submit` would refuse now."""
        return self._closed or self._unsettled >= self._most_queued

    def submit(self, work: Callable[[], T], settle: Settle[T, R]) -> asyncio.Future[R]:
        """Queue a piece of work. QueueFull when too many wait, ThreadClosed after `close`; then nothing was queued."""
        if self._closed:
            raise ThreadClosed
        if self._unsettled >= self._most_queued:
            raise QueueFull
        answer: asyncio.Future[R] = self._loop.create_future()
        answer.add_done_callback(_retrieve)
        self._unsettled += 1
        self._idle.clear()
        self._queue.put(_Piece(work, settle, answer))
        return answer

    async def drained(self, grace_s: float) -> bool:
        """Wait until all submitted work is settled, at most `grace_s` seconds of the loop's time."""
        try:
            async with asyncio.timeout(grace_s):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True

    async def close(self, grace_s: float) -> bool:
        """Take no more work, wait for what is queued, but not longer than `grace_s`. False when work was left behind;
        the thread then ends after the piece that it is stuck in."""
        if not self._closed:
            self._closed = True
            self._queue.put(None)
        return await self.drained(grace_s)

    def _run(self) -> None:
        while True:
            piece = self._queue.get()
            if piece is None:
                return
            self._began = self._clock.monotonic()
            result, error = None, None
            try:
                result = piece.work()
            except BaseException as caught:
                error = caught
            self._began = None
            try:
                self._loop.call_soon_threadsafe(self._settle, piece, result, error)
            except RuntimeError:
                return  # The loop was closed: nobody is left to tell.
            del piece, result, error

    def _settle(self, piece: _Piece[Any, Any], result: Any, error: BaseException | None) -> None:
        self._unsettled -= 1
        if self._unsettled == 0:
            self._idle.set()
        try:
            answer = piece.settle(result, error)
        except Exception as refused:
            if not piece.answer.done():
                piece.answer.set_exception(refused)
        else:
            if not piece.answer.done():
                piece.answer.set_result(answer)


def _retrieve(answer: asyncio.Future[Any]) -> None:
    """Mark an abandoned answer's exception as seen, so that the loop does not report it."""
    if not answer.cancelled():
        answer.exception()


async def answer(future: asyncio.Future[R], deadline: Deadline) -> R:
    """The answer of submitted work; TimeoutError when it is not there by the deadline. The work goes on regardless."""
    if not future.done():
        left = deadline.left()
        if left > 0:
            await asyncio.wait((future,), timeout=left)
        if not future.done():
            raise TimeoutError
    return future.result()
