"""How much sooner requests had their first token because the store had a prefix of theirs: an estimate, as counts.

    saved_ms    for each load that succeeded the time in which its tokens would have been computed less the time it took
    wasted_ms   loads that took longer than computing would have, by how much; and all the time of loads that failed

What computing takes is measured: of every request that computes at least MEASURED_TOKENS tokens of its prompt, the
time from the step that begins them to its first token, with whatever else the engine did meanwhile: that is what the
request would have waited for. Late measurements weigh more than early ones: sums are halved whenever they reach
FORGET_TOKENS tokens. A token costs more the more come before it, and loads spare the first ones, so for prompts of one
length the estimate is high by the quadratic part of attention, and low for a long prefix behind which little is
computed. Loads before the first measurement are rated by it when it comes.
"""

from __future__ import annotations

from typing import Final

from kvstore.connectors.paged.counts import Counts

MEASURED_TOKENS: Final = 64
"""Below this what a step costs anyhow is more than what its tokens cost."""
FORGET_TOKENS: Final = 1 << 17
MOST_UNRATED: Final = 1024
"""An engine that only loads and computes nothing has no measurement; more loads than this are not counted then."""


class Savings:
    """See the module docstring."""

    def __init__(self, counts: Counts) -> None:
        self._counts = counts
        self._tokens = 0
        self._seconds = 0.0
        self._unrated: list[tuple[int, float]] = []

    def computed(self, tokens: int, seconds: float) -> None:
        """A request computed so many tokens of its prompt in this time."""
        if tokens < MEASURED_TOKENS:
            return
        self._tokens += tokens
        self._seconds += seconds
        if self._tokens >= FORGET_TOKENS:
            self._tokens //= 2
            self._seconds /= 2
        unrated, self._unrated = self._unrated, []
        for load in unrated:
            self.loaded(*load)

    def loaded(self, tokens: int, seconds: float) -> None:
        """A load of so many tokens succeeded in this time."""
        if self._tokens:
            saved_ms = round((tokens * self._seconds / self._tokens - seconds) * 1000)
            self._counts.add("saved_ms" if saved_ms > 0 else "wasted_ms", abs(saved_ms))
        elif len(self._unrated) < MOST_UNRATED:
            self._unrated.append((tokens, seconds))

    def failed(self, seconds: float) -> None:
        """A load failed after this time."""
        self._counts.add("wasted_ms", round(seconds * 1000))
