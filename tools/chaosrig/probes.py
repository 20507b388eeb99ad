"""How late the machine wakes a coroutine and a thread: what a deadline may be missed by for no fault of the store."""

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
        self._thread: deque[tuple[float, float]] = deque(maxlen=KEPT)
        threading.Thread(target=self._tick_on_thread, name="chaos-probe", daemon=True).start()

    async def run(self) -> None:
        """Tick on the running loop, for ever."""
        while True:
            began = time.monotonic()
            await asyncio.sleep(TICK_S)
            ended = time.monotonic()
            self._loop.append((ended, ended - began - TICK_S))

    def lost_ms(self, since: float) -> float:
        """By how much, all ticks since a monotonic moment together, the loop was late: time in which it could do
        nothing for a call. The tick that is still waiting counts too."""
        return sum(lag for lag in _lags(self._loop, since) if lag > 0) * 1000

    def worst_ms(self, since: float) -> tuple[float, float]:
        """The worst lag of the loop and of the thread, of the same ticks."""
        return max(0.0, *_lags(self._loop, since)) * 1000, max(0.0, *_lags(self._thread, since)) * 1000

    def _tick_on_thread(self) -> None:
        while True:
            began = time.monotonic()
            time.sleep(TICK_S)
            ended = time.monotonic()
            self._thread.append((ended, ended - began - TICK_S))


def _lags(ticks: deque[tuple[float, float]], since: float) -> list[float]:
    """Lags in seconds of the ticks that ended after a moment, and of the one that is still waiting; at least one."""
    seen = ticks.copy()
    lags = [time.monotonic() - seen[-1][0] - TICK_S if seen else 0.0]
    for ended, lag in reversed(seen):
        if ended < since:
            break
        lags.append(lag)
    return lags
