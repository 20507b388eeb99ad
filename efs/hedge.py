"""When to ask another node, when to wait and when to rebuild: the read decisions, without any I/O or clock.

A fetch is cut into *units*: neighbouring blocks of one run, so that shard i of all of them lies on one node. For each
unit `Unit` keeps the state of 12 by rows shards and answers what to do next:

- Asked first are the ten data shards and one parity shard; the other parity shard is the *spare*.
- With ten shards of a block in and a data shard missing the block is rebuilt: at once when the missing shard is lost
  (absent, failed, corrupt) or its node is known to be slow, else after the lag grace.
- The lag grace runs from the moment when at most two shards of a block are outstanding.
- The spare is asked when lagging + lost shards of a unit are two or more. It is free when ten cannot be reached
  without it; otherwise it is speculative and needs the budget.
- A block is dead (a miss for this call) when have + pending + not yet asked < 10.

`Lags` estimates how long after that moment a node's shard comes; `Budget` is the token bucket of speculative reads.
Times are seconds on the caller's monotonic scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.limits import (
    DATA_SHARDS,
    HEDGE_BUDGET_SHARE,
    INITIAL_LAG_GRACE_MS,
    MAX_KEYS_PER_CALL,
    MAX_LAG_GRACE_MS,
    MIN_LAG_GRACE_MS,
    STRIPE_SHARDS,
)

LAG_HALF_LIFE_SECONDS = 2.0
"""A lag that is not confirmed anew is half forgotten after this, so that a healed node is waited for again."""


class Shard:
    """States of one shard of one block, values of `Unit.state`. Plain integers: Enum look-ups show in a warm read."""

    UNASKED: Final = 0
    PENDING: Final = 1
    HAVE: Final = 2
    LOST: Final = 3


class Budget:
    """Token bucket: every shard that is asked earns a tenth of a token, a speculative one costs a whole."""

    def __init__(self, share: float = HEDGE_BUDGET_SHARE) -> None:
        self._share = share
        self._most = share * MAX_KEYS_PER_CALL
        self.tokens = 0.0

    def earn(self, shards: int) -> None:
        self.tokens = min(self._most, self.tokens + self._share * shards)

    def spend(self, shards: int) -> bool:
        """Take tokens for speculative shards, all or none."""
        if self.tokens < shards:
            return False
        self.tokens -= shards
        return True


class Lags:
    """How many seconds later than most of its unit each node's shards arrive; decaying maximum by node."""

    def __init__(self) -> None:
        self._lag = np.zeros(STRIPE_SHARDS)
        self._seen_at = np.zeros(STRIPE_SHARDS)
        self._settled = False

    def observe(self, node_index: int, lag: float, now: float) -> None:
        """A shard came `lag` seconds late (0 when it was among the first), or had not come after that long."""
        current = float(self.expected(now)[node_index])
        self._lag[node_index] = lag if lag > current else current + 0.3 * (lag - current)
        self._seen_at[node_index] = now
        self._settled = True

    def expected(self, now: float) -> NDArray[np.float64]:
        """(12,) seconds by node."""
        age = np.maximum(0.0, now - self._seen_at)
        decayed: NDArray[np.float64] = self._lag * 0.5 ** (age / LAG_HALF_LIFE_SECONDS)
        return decayed

    def grace(self, now: float) -> float:
        """Seconds to wait for a lagging shard: twice the usual lag of a node, within the limits; the initial grace
        before anything was observed. The usual lag is the median over nodes, so one slow node does not stretch it."""
        if not self._settled:
            return INITIAL_LAG_GRACE_MS / 1000
        usual = float(np.median(self.expected(now)))
        return min(max(2 * usual, MIN_LAG_GRACE_MS / 1000), MAX_LAG_GRACE_MS / 1000)

    def slow(self, now: float) -> NDArray[np.bool_]:
        """(12,) by node: waiting for it is known to be pointless."""
        return self.expected(now) > self.grace(now)


@dataclass(frozen=True, slots=True)
class Decision:
    """What a unit wants done now.

    ask: shards to request for the rows that can have them. speculative: whether asking them needs the budget.
    rebuild: (rows,) bool, blocks to rebuild now. dead: (rows,) bool, blocks that can no longer be read.
    wake_at: when to decide again if nothing arrives, None for never.
    """

    ask: tuple[int, ...]
    speculative: bool
    rebuild: NDArray[np.bool_]
    dead: NDArray[np.bool_]
    wake_at: float | None


class Unit:
    """The state machine of one unit: blocks [start, stop) of the fetch, all of one rotation.

    state: (12, rows) uint8 by shard index, values of `Shard`. computed: (12, rows) bool, in hand by rebuilding.
    open: (rows,) bool, blocks still being worked on. contiguous: by node the location of the first block where all of
    them lie in neighbouring slots, else -1. shown: by node a view of those slots, where it has them in memory.
    whole: shards that came at once for every row. rebuilds: how often a rebuilt block disagreed with
    its header.
    """

    __slots__ = (
        "computed", "contiguous", "late_from", "open", "rebuilds", "retried", "rotation", "shown",
        "spare", "start", "state", "stop", "whole",
    )

    def __init__(self, start: int, stop: int, rotation: int, spare: int) -> None:
        self.start = start
        self.stop = stop
        self.rotation = rotation
        self.spare = spare
        self.state = np.zeros((STRIPE_SHARDS, stop - start), np.uint8)
        self.computed = np.zeros((STRIPE_SHARDS, stop - start), np.bool_)
        self.open = np.ones(stop - start, np.bool_)
        self.rebuilds = 0
        self.retried: set[tuple[int, int]] = set()
        self.whole: set[int] = set()
        self.contiguous = [-1] * STRIPE_SHARDS
        self.shown: list[NDArray[np.uint8] | None] = []
        self.late_from: float | None = None

    def node_of(self, shard: int) -> int:
        return (shard + self.rotation) % STRIPE_SHARDS

    @property
    def first_asked(self) -> tuple[int, ...]:
        """The eleven shards that are asked without a reason."""
        parity = next(s for s in range(DATA_SHARDS, STRIPE_SHARDS) if s != self.spare)
        return (*range(DATA_SHARDS), parity)

    def retry(self, shard: int, row: int) -> bool:
        """Whether a shard that raced with the reuse of its slot may be read again; once a call."""
        if (shard, row) in self.retried:
            return False
        self.retried.add((shard, row))
        return True

    def note_arrival(self, now: float) -> None:
        """Remember when the first open block had at most two shards outstanding; the lag grace runs from there."""
        if self.late_from is None:
            pending = (self.state == Shard.PENDING).sum(axis=0)
            if (pending[self.open] <= STRIPE_SHARDS - DATA_SHARDS).any():
                self.late_from = now

    def decide(self, now: float, lags: Lags) -> Decision:
        """The next step for the open rows; see the module docstring."""
        have = self.state == Shard.HAVE
        pending = self.state == Shard.PENDING
        unasked = self.state == Shard.UNASKED
        in_hand = have.sum(axis=0)
        dead = self.open & (in_hand + pending.sum(axis=0) + unasked.sum(axis=0) < DATA_SHARDS)
        live = self.open & ~dead
        missing = ~have[:DATA_SHARDS]
        enough = live & (in_hand >= DATA_SHARDS) & missing.any(axis=0)
        waiting = pending & live
        grace = lags.grace(now)
        slow = np.roll(lags.slow(now), -self.rotation)
        over = self.late_from is not None and now - self.late_from >= grace
        worth_waiting = waiting[:DATA_SHARDS] & ~slow[:DATA_SHARDS, None]
        rebuild = enough & (over | ~worth_waiting.any(axis=0))
        ask, speculative = self._ask(live, unasked, waiting, slow, over)
        wake_at = None
        if self.late_from is not None and not over and waiting.any():
            wake_at = self.late_from + grace
        return Decision(ask, speculative, rebuild, dead, wake_at)

    def _ask(self, live: NDArray[np.bool_], unasked: NDArray[np.bool_], waiting: NDArray[np.bool_],
             slow: NDArray[np.bool_], over: bool) -> tuple[tuple[int, ...], bool]:
        """The spare, if it is time for it, and whether that is speculative."""
        candidates = tuple(int(shard) for shard in np.flatnonzero((unasked & live).any(axis=1)))
        if not candidates:
            return (), False
        lost = ((self.state == Shard.LOST) & live).sum(axis=0)
        if (lost >= STRIPE_SHARDS - DATA_SHARDS).any():
            return candidates, False
        lagging = (waiting & (slow[:, None] | over)).sum(axis=0)
        if (lost + lagging >= STRIPE_SHARDS - DATA_SHARDS).any():
            return candidates, True
        return (), False
