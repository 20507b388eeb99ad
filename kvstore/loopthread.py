"""An event loop on a daemon thread of its own, for callers that have none.

`call` runs a coroutine there and waits for its end. Three promises:

- A caller always comes back: with the result, with the coroutine's exception, or with StoreClosed when the loop ended
  first.
- A caller that is interrupted (KeyboardInterrupt), at whatever moment, cancels its coroutine and waits, bounded, until
  it has really ended, so that nothing writes into the caller's buffer afterwards.
- Nothing here holds up the end of the process: the thread is a daemon, and every wait of `stop` is bounded.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

from efs.errors import InvalidArgument, StoreClosed

Result = TypeVar("Result")

INTERRUPTED_WAIT_S: Final = 1.0
LEFTOVERS_WAIT_S: Final = 0.5
LOOK_UP_S: Final = 0.2
"""A signal that arrives in the instant before a thread goes to sleep does not wake it; so a waiting caller looks up."""


def new_loop() -> asyncio.AbstractEventLoop:
    """A uvloop where that is installed, else asyncio's own."""
    try:
        loop: asyncio.AbstractEventLoop = importlib.import_module("uvloop").new_event_loop()
    except ImportError:
        loop = asyncio.new_event_loop()
    return loop


class LoopThread:
    """A running loop; `call` from any other thread, `stop` once."""

    def __init__(self, name: str) -> None:
        self.pid = os.getpid()
        self._loop = new_loop()
        self._lock = threading.Lock()
        self._waiting: set[Future[Any]] = set()
        self._last: asyncio.Task[Any] | None = None
        self._open = True
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()

    def is_current(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.current_thread() is self._thread

    def call(self, work: Coroutine[Any, Any, Result], timeout_s: float | None = None) -> Result:
        """The result of a coroutine that runs on the loop. TimeoutError after `timeout_s`; the coroutine is then
        cancelled."""
        if self.is_current():
            work.close()
            raise InvalidArgument("a callback must not call the blocking store whose thread it runs on")
        outcome: Future[Result] = Future()
        tasks: list[asyncio.Task[Result]] = []
        try:
            with self._lock:
                if not self._open:
                    work.close()
                    raise StoreClosed("the store is closed")
                self._waiting.add(outcome)
                self._loop.call_soon_threadsafe(self._begin, work, outcome, tasks)
            return _result(outcome, timeout_s)
        except BaseException:
            if not outcome.done():
                # After a timeout the caller has waited long enough.
                self._cancel(work, tasks, outcome, INTERRUPTED_WAIT_S if timeout_s is None else 0.0)
            raise

    def stop(self, wait_s: float) -> None:
        """End the loop and, unless this is its own thread, wait for that no longer than `wait_s`."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self._loop.call_soon_threadsafe(self._loop.stop)
        if not self.is_current():
            self._thread.join(wait_s)

    def stop_after(self, work: Coroutine[Any, Any, object]) -> None:
        """From this thread itself: run a last coroutine, then end the loop, without waiting for it."""
        with self._lock:
            if not self._open:
                work.close()
                return
            self._open = False
        self._last = self._loop.create_task(work)
        self._last.add_done_callback(lambda task: self._loop.stop())

    def _begin(self, work: Coroutine[Any, Any, Result], outcome: Future[Result],
               tasks: list[asyncio.Task[Result]]) -> None:
        task = self._loop.create_task(work)
        tasks.append(task)
        task.add_done_callback(lambda ended: self._finish(ended, outcome))

    def _finish(self, task: asyncio.Task[Result], outcome: Future[Result]) -> None:
        with self._lock:
            self._waiting.discard(outcome)
        if task.cancelled():
            # Only an interrupted caller and the end of the loop cancel, and neither is told CancelledError.
            outcome.set_exception(StoreClosed("the store was closed during the call"))
            return
        error = task.exception()
        if error is None:
            outcome.set_result(task.result())
        else:
            outcome.set_exception(error)

    def _cancel(self, work: Coroutine[Any, Any, Result], tasks: list[asyncio.Task[Result]], outcome: Future[Result],
                wait_s: float) -> None:
        """Cancel what a caller started, and wait a while for its end."""
        with self._lock:
            if not self._open:
                return
            self._loop.call_soon_threadsafe(self._end, work, tasks, outcome)
        try:
            outcome.exception(wait_s)
        except TimeoutError:
            return

    def _end(self, work: Coroutine[Any, Any, Result], tasks: list[asyncio.Task[Result]],
             outcome: Future[Result]) -> None:
        """On the loop, behind `_begin` if that was asked for: without a task nothing was begun and nothing will be."""
        for task in tasks:
            task.cancel()
        if not tasks and not outcome.done():
            work.close()
            with self._lock:
                self._waiting.discard(outcome)
            outcome.set_exception(StoreClosed("the call was not begun"))

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
            leftovers = asyncio.all_tasks(self._loop)
            for task in leftovers:
                task.cancel()
            if leftovers:
                self._loop.run_until_complete(asyncio.wait(leftovers, timeout=LEFTOVERS_WAIT_S))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        finally:
            with self._lock:
                self._open = False
                stranded = [outcome for outcome in self._waiting if not outcome.done()]
                self._waiting.clear()
                self._loop.close()
            for outcome in stranded:
                outcome.set_exception(StoreClosed("the store was closed during the call"))


def _result(outcome: Future[Result], timeout_s: float | None) -> Result:
    """The outcome's result or exception; TimeoutError when there is neither after `timeout_s`."""
    left_s = timeout_s
    while True:
        slice_s = LOOK_UP_S if left_s is None else min(LOOK_UP_S, left_s)
        try:
            return outcome.result(slice_s)
        except TimeoutError:
            if outcome.done():
                return outcome.result()
        if left_s is not None:
            left_s -= slice_s
            if left_s <= 0:
                raise TimeoutError(f"no result within {timeout_s} s")
