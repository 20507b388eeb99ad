"""The only door to time: everything that waits, measures or stamps asks a `Clock` that was passed in.

`monotonic` is for deadlines and lag, in seconds from an arbitrary start; `wall` is seconds since the epoch, for
arrival times and access stamps. Tests pass a clock that they move by hand.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from efs.errors import InvalidArgument
from efs.limits import MAX_DEADLINE_MS, STAMP_SECONDS


class Clock(Protocol):
    """Two readings, both in seconds."""

    def monotonic(self) -> float: ...

    def wall(self) -> float: ...


class SystemClock:
    """The operating system's clocks."""

    def monotonic(self) -> float:
        return time.monotonic()

    def wall(self) -> float:
        return time.time()


def stamp_of(wall_seconds: float) -> int:
    """The access stamp of a moment: whole minutes since the epoch (design, "Access times")."""
    return int(wall_seconds) // STAMP_SECONDS


@dataclass(frozen=True, slots=True)
class Deadline:
    """A moment on a clock's monotonic scale by which a call must have returned."""

    clock: Clock
    at: float

    @classmethod
    def after_ms(cls, clock: Clock, deadline_ms: float) -> Deadline:
        """The moment `deadline_ms` from now; refuses what is not in (0, MAX_DEADLINE_MS]."""
        if not 0 < deadline_ms <= MAX_DEADLINE_MS:
            raise InvalidArgument(f"deadline_ms is {deadline_ms}, must be above 0 and at most {MAX_DEADLINE_MS}")
        return cls(clock, clock.monotonic() + deadline_ms / 1000)

    def left(self) -> float:
        """Seconds left, never below zero."""
        return max(0.0, self.at - self.clock.monotonic())

    def passed(self) -> bool:
        return self.clock.monotonic() >= self.at
