"""Waiting on a machine that may be busy: until something holds, or its time *and* its turns are spent."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

PAUSE_S: Final = 0.1


class Patience:
    """So many seconds, and at least so many looks: one that takes longer because the machine is slow counts once."""

    def __init__(self, seconds: float, looks: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until = clock() + seconds
        self._looks = looks

    @property
    def ended(self) -> bool:
        return self._looks <= 0 and self._clock() > self._until

    async def pause(self) -> None:
        """Between two looks."""
        self._looks -= 1
        await asyncio.sleep(PAUSE_S)
