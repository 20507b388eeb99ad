"""How late the machine wakes a coroutine and a thread: what a deadline may be missed by for no fault of the store.

On a machine with more work than cores a thread that has much to do waits for its turns, and a thread that only ticks
does not. So the loop's ticks are also counted without what the loop's thread waited for a core, as the kernel tells.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import deque
from typing import Final

TICK_S: Final = 0.01
KEPT: Final = 12_000
"""Two minutes of ticks: longer than any call."""


class LagProbes:
    """`run` on the loop whose lag is wanted; the thread is a daemon that lives as long as the process."""

    def __init__(self) -> None:
        self._loop: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._held: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._waits: deque[tuple[float, float]] = deque(maxlen=KEPT)
        self._thread: deque[tuple[float, float]] = deque(maxlen=KEPT)
        threading.Thread(target=self._tick_on_thread, name="chaos-probe", daemon=True).start()

    async def run(self) -> None:
        """Tick on the running loop, for ever."""
        waited = _waited_for_a_core_s()
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            ended, before, waited = time.monotonic(), waited, _waited_for_a_core_s()
            self._loop.append((ended, max(ended - began - TICK_S, waited - before)))
            self._held.append((ended, ended - began - TICK_S - (waited - before)))
            self._waits.append((ended, waited - before))

    def lost_ms(self, since: float) -> float:
        """By how much, all ticks since a monotonic moment together, the loop was late or waited for a core: time in
        which it could do nothing for a call. The tick that is still waiting counts too."""
        return sum(lag for lag in _lags(self._loop, since) if lag > 0) * 1000

    def held_ms(self, since: float) -> float:
        """The worst lag of the loop, without its waits for a core, of ticks that have ended."""
        return max([0.0, *_lags(self._held, since)[1:]]) * 1000

    def thread_ms(self, since: float) -> float:
        """The worst lag of the thread."""
        return max([0.0, *_lags(self._thread, since)]) * 1000

    def lag_ms(self, since: float) -> float:
        """The longest that the thread was late, or the loop waited for a core: what the machine cost one turn."""
        return max(self.thread_ms(since), max([0.0, *_lags(self._waits, since)[1:]]) * 1000)

    def _tick_on_thread(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(TICK_S)
            ended = time.monotonic()
            self._thread.append((ended, ended - began - TICK_S))


def _waited_for_a_core_s() -> float:
    """For how long this thread was ready to run and did not, since it began; 0 where the kernel does not tell."""
    try:
        with open("/proc/thread-self/schedstat", encoding="ascii") as file:
            return int(file.read().split()[1]) / 1e9
    except OSError:
        return 0.0


def _lags(ticks: deque[tuple[float, float]], since: float) -> list[float]:
    """Lags in seconds of the ticks that ended after a moment, and of the one that is still waiting; at least one."""
    seen = ticks.copy()
    lags = [time.monotonic() - seen[-1][0] - TICK_S if seen else 0.0]
    for ended, lag in reversed(seen):
        if ended < since:
            break
        lags.append(lag)
    return lags
