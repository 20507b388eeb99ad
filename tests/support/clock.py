"""A clock that tests move by hand."""

from __future__ import annotations


class FakeClock:
    """`efs.clock.Clock` whose two readings move together, and only when told to."""

    def __init__(self, wall: float = 1_800_000_000.0, monotonic: float = 1_000.0) -> None:
        self._wall = wall
        self._monotonic = monotonic

    def monotonic(self) -> float:
        return self._monotonic

    def wall(self) -> float:
        return self._wall

    def advance(self, seconds: float) -> None:
        """Let time pass; never backwards."""
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self._wall += seconds
        self._monotonic += seconds

    def set_wall(self, seconds: float) -> None:
        """Step the wall clock alone, as an administrator or NTP does."""
        self._wall = seconds
