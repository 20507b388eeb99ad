"""How fast background work goes: at most so many steps a second, and none while a call is under way.

`Traffic` counts the calls of users that are running. `Pace.step` is called before each step of a sweep or a scrub: it
waits for its turn by the rate, then as long as calls are running, but never longer than YIELD_AT_MOST_MS: a store that
never rests has to be looked after too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from asyncio_throttle.throttler import Throttler

from efs.limits import YIELD_AT_MOST_MS, YIELD_MS


class Traffic:
    """Calls that background work yields to."""

    def __init__(self) -> None:
        self._running = 0

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around one call."""
        self._running += 1
        try:
            yield
        finally:
            self._running -= 1

    @property
    def busy(self) -> bool:
        return self._running > 0


class Pace:
    """The pace of one kind of background work. `per_second`: steps, None for as many as there is time for."""

    def __init__(self, traffic: Traffic, per_second: int | None) -> None:
        self._traffic = traffic
        self._throttle = None if per_second is None else Throttler(rate_limit=per_second, period=1.0)

    async def step(self) -> None:
        """Wait until the next step may be made; at least one turn of the loop."""
        if self._throttle is not None:
            async with self._throttle:
                pass
        await asyncio.sleep(0)
        looks = int(YIELD_AT_MOST_MS / YIELD_MS)
        while self._traffic.busy and looks > 0:
            looks -= 1
            await asyncio.sleep(YIELD_MS / 1000)
