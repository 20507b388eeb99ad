"""Waiting for something that another thread does: by looking, with a deadline, never by sleeping a fixed time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 20.0
LATE_S = 5.0
"""How much later than its deadline a call may return on a loaded machine; one without a deadline takes far longer."""


def eventually(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """Whether `holds` returned True before the deadline."""
    until = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.0005)
    return True


async def came_true(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """The same on an event loop, which goes on meanwhile."""
    until = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > until:
            return False
        await asyncio.sleep(0.001)
    return True
