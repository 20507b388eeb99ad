"""Waiting for something that another thread does: by looking, with a deadline, never by sleeping a fixed time."""

from __future__ import annotations

import time
from collections.abc import Callable

DEADLINE_S = 20.0


def eventually(holds: Callable[[], bool], deadline_s: float = DEADLINE_S) -> bool:
    """Whether `holds` returned True before the deadline."""
    until = time.monotonic() + deadline_s
    while not holds():
        if time.monotonic() > until:
            return False
        time.sleep(0.0005)
    return True
