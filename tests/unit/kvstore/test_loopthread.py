"""A caller that is interrupted at an unlucky moment: nothing of its call goes on."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest

from kvstore.loopthread import LoopThread


class Interrupted:
    """The loop of a thread, where the first request to it is followed by an interrupt, or is not made for one."""

    def __init__(self, loop: asyncio.AbstractEventLoop, made: bool) -> None:
        self._loop = loop
        self._made = made
        self._first = True

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loop, name)

    def call_soon_threadsafe(self, callback: Callable[..., object], *arguments: object) -> None:
        first, self._first = self._first, False
        if self._made or not first:
            self._loop.call_soon_threadsafe(callback, *arguments)
        if first:
            raise KeyboardInterrupt


@pytest.mark.parametrize("made", [True, False])
def test_an_interrupt_while_a_call_is_handed_over_ends_the_call(made: bool) -> None:
    thread = LoopThread("test")
    written: list[str] = []
    ended = threading.Event()

    async def work() -> None:
        try:
            while True:
                written.append("more")
                await asyncio.sleep(0.001)
        finally:
            ended.set()

    loop = thread._loop
    thread._loop = Interrupted(loop, made)  # type: ignore[assignment]
    call = work()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.call(call)
        assert inspect.getcoroutinestate(call) == inspect.CORO_CLOSED
        assert ended.is_set() or not written
        assert thread._waiting == set()

        async def answer() -> int:
            return 3

        assert thread.call(answer()) == 3
    finally:
        thread.stop(5.0)
