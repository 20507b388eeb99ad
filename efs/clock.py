"""The only door to time: everything that waits, measures or stamps asks a `Clock` that was passed in.

`monotonic` is for deadlines and lag, in seconds from an arbitrary start; `wall` is seconds since the epoch, for
arrival times and access stamps. Tests pass a clock that they move by hand.

*Ages.* A record's arrival is wall time on disk, because it must outlive the process, but its age decides whether a
sweep may take it, and a wall clock can be set. `Arrivals` tells ages that are never too high for what arrived while it
was watching, whatever happens to the wall clock: it measures with the smallest difference between the two clocks that
was seen in the last HOLLOW_GRACE_MS at least. A clock that is set forward (or a machine that slept) thus makes records
look older only after that time; one that is set back makes them look younger until it has caught up. What arrived
before the node was opened has the age that the wall clock gives it: a put that spans a restart of its node has failed
there.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

from efs.errors import InvalidArgument
from efs.limits import HOLLOW_GRACE_MS, MAX_DEADLINE_MS, STAMP_SECONDS


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
    """The access stamp of a moment: its number of STAMP_SECONDS since the epoch."""
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


class Arrivals:
    """Arrival times that a node gives out, and how old they are. See the module docstring."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._period = 0
        self._lowest_ms = self._before_ms = self._difference_ms()
        self._look()

    def now_ms(self) -> int:
        """The arrival time of something that arrives now: wall time in ms."""
        self._look()
        return int(self._clock.wall() * 1000)

    def at_least(self, arrival_ms: int, age_ms: float) -> bool:
        """Whether that arrival is at least so long ago. InvalidArgument for an age above HOLLOW_GRACE_MS, which the
        clocks were not watched for."""
        if not 0 <= age_ms <= HOLLOW_GRACE_MS:
            raise InvalidArgument(f"age_ms is {age_ms}, must be 0 to {HOLLOW_GRACE_MS}")
        self._look()
        now_ms = self._clock.monotonic() * 1000 + min(self._lowest_ms, self._before_ms)
        return age_ms == 0 or now_ms - arrival_ms >= age_ms

    def _difference_ms(self) -> float:
        return (self._clock.wall() - self._clock.monotonic()) * 1000

    def _look(self) -> None:
        """Take note of the difference between the clocks: its lowest in this period and in the one before."""
        period = int(self._clock.monotonic() * 1000 // HOLLOW_GRACE_MS)
        now_ms = self._difference_ms()
        if period != self._period:
            # What nobody looked at meanwhile was as it is now, or as it was: both are kept for a period.
            self._before_ms = self._lowest_ms
            self._period, self._lowest_ms = period, now_ms
        self._lowest_ms = min(self._lowest_ms, now_ms)
