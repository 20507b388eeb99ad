"""A node's thread: order, abandonment, bounds, and a thread that hangs in the kernel."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from efs.clock import Deadline
from efs.iothread import IoThread, QueueFull, ThreadClosed, answer, pass_on
from efs.limits import HUNG_MS
from tests.support.clock import FakeClock
from tests.support.faultio import Gate


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
async def thread(clock: FakeClock) -> AsyncIterator[IoThread]:
    made = IoThread("test-thread", clock, most_queued=4)
    yield made
    await made.close(5)


def soon(clock: FakeClock) -> Deadline:
    return Deadline.after_ms(clock, 10_000)


async def test_work_runs_on_the_thread_and_is_applied_on_the_loop(thread: IoThread, clock: FakeClock) -> None:
    settled_on: list[threading.Thread] = []

    def settle(result: threading.Thread | None, error: BaseException | None) -> str:
        assert error is None
        assert result is not None
        settled_on.append(threading.current_thread())
        return result.name

    assert await answer(thread.submit(threading.current_thread, settle), soon(clock)) == "test-thread"
    assert settled_on == [threading.main_thread()]


async def test_results_are_applied_in_the_order_of_submission(thread: IoThread, clock: FakeClock) -> None:
    order: list[int | None] = []
    futures = [thread.submit(partial(int, place), lambda result, _: order.append(result)) for place in range(4)]
    await answer(futures[3], soon(clock))
    assert order == [0, 1, 2, 3]


async def test_a_result_is_applied_although_its_caller_was_cancelled(thread: IoThread, clock: FakeClock) -> None:
    gate = Gate()
    applied: list[str] = []
    future = thread.submit(gate.wait, lambda _, error: applied.append("late"))
    caller = asyncio.ensure_future(answer(future, soon(clock)))
    await asyncio.to_thread(gate.entered.wait, 10)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert applied == []
    gate.release()
    assert await thread.drained(10)
    assert applied == ["late"]


async def test_a_result_is_applied_although_its_deadline_passed(thread: IoThread, clock: FakeClock) -> None:
    gate = Gate()
    applied: list[str] = []
    future = thread.submit(gate.wait, lambda _, error: applied.append("late"))
    with pytest.raises(TimeoutError):
        await answer(future, Deadline.after_ms(clock, 20))
    assert gate.entered.wait(10)
    gate.release()
    assert await thread.drained(10)
    assert applied == ["late"]


async def test_an_error_is_the_answer_and_the_thread_goes_on(thread: IoThread, clock: FakeClock) -> None:
    def fail() -> int:
        raise OSError(5, "bad disk")

    with pytest.raises(OSError, match="bad disk"):
        await answer(thread.submit(fail, pass_on), soon(clock))
    assert await answer(thread.submit(lambda: 7, pass_on), soon(clock)) == 7


async def test_an_abandoned_error_is_not_reported_by_the_loop(
    thread: IoThread, clock: FakeClock, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> int:
        raise OSError(5, "nobody asks any more")

    future = thread.submit(fail, pass_on)
    assert await thread.drained(10)
    assert future.done()
    del future
    await asyncio.sleep(0)
    assert caplog.records == []


async def test_one_more_than_the_queue_holds_is_refused(thread: IoThread, clock: FakeClock) -> None:
    gate = Gate()
    ran: list[int] = []
    thread.submit(gate.wait, pass_on)
    for place in (1, 2, 3):
        thread.submit(partial(ran.append, place), pass_on)
    assert thread.full
    with pytest.raises(QueueFull):
        thread.submit(lambda: ran.append(99), pass_on)
    gate.release()
    assert await thread.drained(10)
    assert not thread.full
    assert ran == [1, 2, 3]


async def test_an_operation_older_than_the_limit_is_hung_until_it_ends(thread: IoThread, clock: FakeClock) -> None:
    gate = Gate()
    thread.submit(gate.wait, pass_on)
    thread.submit(lambda: None, pass_on)
    assert await asyncio.to_thread(gate.entered.wait, 10)
    assert not thread.hung
    clock.advance(HUNG_MS / 1000 + 0.001)
    assert thread.hung
    gate.release()
    assert await thread.drained(10)
    assert not thread.hung
    assert thread.running_ms == 0


async def test_waiting_in_the_queue_is_not_hanging(thread: IoThread, clock: FakeClock) -> None:
    first, second = Gate(), Gate()
    thread.submit(first.wait, pass_on)
    thread.submit(second.wait, pass_on)
    assert await asyncio.to_thread(first.entered.wait, 10)
    clock.advance(HUNG_MS / 1000 + 1)
    first.release()
    assert await asyncio.to_thread(second.entered.wait, 10)
    assert not thread.hung
    second.release()


async def test_closing_leaves_a_stuck_thread_behind(clock: FakeClock) -> None:
    thread = IoThread("stuck", clock)
    gate = Gate()
    applied: list[str] = []
    thread.submit(gate.wait, lambda _, error: applied.append("late"))
    assert not await thread.close(0.01)
    with pytest.raises(ThreadClosed):
        thread.submit(lambda: None, pass_on)
    gate.release()
    assert await thread.drained(10)
    assert applied == ["late"]


async def test_closing_waits_for_what_is_queued(clock: FakeClock) -> None:
    thread = IoThread("busy", clock)
    done: list[int] = []
    for place in range(20):
        thread.submit(partial(done.append, place), pass_on)
    assert await thread.close(10)
    assert done == list(range(20))


def test_a_thread_that_finishes_after_its_loop_was_closed_ends_quietly() -> None:
    gate = Gate()

    async def leave() -> threading.Thread:
        IoThread("outlives", FakeClock()).submit(gate.wait, pass_on)
        return next(thread for thread in threading.enumerate() if thread.name == "outlives")

    left_behind = asyncio.run(leave())
    gate.release()
    left_behind.join(10)
    assert not left_behind.is_alive()


EXITING = """
import asyncio, os
from efs.clock import SystemClock
from efs.iothread import IoThread, pass_on

async def main():
    read, write = os.pipe()
    thread = IoThread("stuck", SystemClock())
    thread.submit(lambda: os.read(read, 1), pass_on)
    while thread.running_ms == 0:
        await asyncio.sleep(0)
    assert not await thread.close(0.01)
    print("leaving", flush=True)

asyncio.run(main())
"""


def test_a_process_exits_while_its_thread_hangs_in_a_system_call() -> None:
    child = subprocess.Popen([sys.executable, "-c", EXITING], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == "leaving\n"
        assert child.wait(timeout=1) == 0
    finally:
        child.kill()
        child.wait()
        child.stdout.close()
