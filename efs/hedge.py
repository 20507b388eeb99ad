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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.limits import (
    DATA_SHARDS,
    FANOUT,
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


_WEIGHTS: Final = 4 ** np.arange(STRIPE_SHARDS, dtype=np.int32)
"""The states of a block's shards as one number, two bits each."""
_ONES: Final = sum(1 << 2 * shard for shard in range(STRIPE_SHARDS))
_DATA_ONES: Final = sum(1 << 2 * shard for shard in range(DATA_SHARDS))


class Budget:
    """Token bucket: every shard that is asked earns a tenth of a token, a speculative one costs a whole. It holds what
    the largest call earns, so that each of its blocks can have its spare asked."""

    def __init__(self, share: float = HEDGE_BUDGET_SHARE) -> None:
        self._share = share
        self._most = share * FANOUT * MAX_KEYS_PER_CALL
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
    """How many seconds later than most of its unit each node's shards arrive; decaying maximum by node. Twelve plain
    floats: asked so often that arrays of twelve would show."""

    def __init__(self) -> None:
        self._lag = [0.0] * STRIPE_SHARDS
        self._seen_at = [0.0] * STRIPE_SHARDS
        self._settled = False

    def observe(self, node_index: int, lag: float, now: float) -> None:
        """A shard came `lag` seconds late (0 when it was among the first), or had not come after that long."""
        current = self._expected(node_index, now)
        self._lag[node_index] = lag if lag > current else current + 0.3 * (lag - current)
        self._seen_at[node_index] = now
        self._settled = True

    def _expected(self, node_index: int, now: float) -> float:
        lag = self._lag[node_index]
        if not lag:
            return lag
        age = max(0.0, now - self._seen_at[node_index])
        return float(lag * 0.5 ** (age / LAG_HALF_LIFE_SECONDS))

    def expected(self, now: float) -> list[float]:
        """Seconds by node."""
        return [self._expected(node_index, now) for node_index in range(STRIPE_SHARDS)]

    def grace(self, now: float) -> float:
        """Seconds to wait for a lagging shard: twice the usual lag of a node, within the limits; the initial grace
        before anything was observed. The usual lag is the median over nodes, so one slow node does not stretch it."""
        return self._grace(self.expected(now))

    def _grace(self, expected: Sequence[float]) -> float:
        if not self._settled:
            return INITIAL_LAG_GRACE_MS / 1000
        usual = median(expected)
        return min(max(2 * usual, MIN_LAG_GRACE_MS / 1000), MAX_LAG_GRACE_MS / 1000)

    def slow(self, now: float) -> tuple[bool, ...]:
        """By node: waiting for it is known to be pointless."""
        expected = self.expected(now)
        grace = self._grace(expected)
        return tuple([lag > grace for lag in expected])


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
    whole: shards that came at once for every row. flying: requests under way. piecemeal: whether `flying` and `whole`
    do not tell all: something was asked, moved or rebuilt row by row. losses: whether a shard of some row was ever
    lost. rebuilds: how often a rebuilt block disagreed with its header.
    """

    __slots__ = (
        "computed", "contiguous", "flying", "late_from", "losses", "open", "piecemeal", "rebuilds", "retried",
        "rotation", "shown", "spare", "start", "state", "stop", "whole",
    )

    def __init__(self, start: int, stop: int, rotation: int, spare: int) -> None:
        self.start = start
        self.stop = stop
        self.rotation = rotation
        self.spare = spare
        self.state = np.zeros((STRIPE_SHARDS, stop - start), np.uint8)
        self.computed = np.zeros((STRIPE_SHARDS, stop - start), np.bool_)
        self.open = np.ones(stop - start, np.bool_)
        self.flying = 0
        self.piecemeal = self.losses = False
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

    def patterns(self) -> Iterator[tuple[_Pattern, NDArray[np.bool_]]]:
        """The open rows by the states of their shards: most of the time they are all alike."""
        codes = _WEIGHTS @ self.state
        alike = codes[self.open]
        if not len(alike):
            return
        if (alike == alike[0]).all():
            yield _Pattern.of(int(alike[0])), self.open.copy()
            return
        for code in np.unique(alike).tolist():
            yield _Pattern.of(code), self.open & (codes == code)

    def note_arrival(self, now: float) -> None:
        """Remember when the first open block had at most two shards outstanding; the lag grace runs from there."""
        if self.late_from is None and any(pattern.few_pending for pattern, _ in self.patterns()):
            self.late_from = now

    def decide(self, now: float, lags: Lags) -> Decision:
        """The next step for the open rows; see the module docstring."""
        slow = self._slow(lags.slow(now))
        grace = lags.grace(now)
        rebuild, dead = np.zeros_like(self.open), np.zeros_like(self.open)
        unasked = waiting = 0
        urgent = worth_asking = False
        over = self.late_from is not None and now - self.late_from >= grace
        for pattern, rows in self.patterns():
            if (pattern.have | pattern.pending | pattern.unasked).bit_count() < DATA_SHARDS:
                dead |= rows
                continue
            unasked |= pattern.unasked
            waiting |= pattern.pending
            worth_waiting = not over and pattern.pending & _DATA_ONES & ~slow
            if pattern.have.bit_count() >= DATA_SHARDS and _DATA_ONES & ~pattern.have and not worth_waiting:
                rebuild |= rows
            lost = pattern.lost.bit_count()
            lagging = (pattern.pending if over else pattern.pending & slow).bit_count()
            urgent |= lost >= STRIPE_SHARDS - DATA_SHARDS
            worth_asking |= lost + lagging >= STRIPE_SHARDS - DATA_SHARDS
        ask = _shards(unasked) if urgent or worth_asking else ()
        wake_at = self.late_from + grace if self.late_from is not None and not over and waiting else None
        return Decision(ask, not urgent, rebuild, dead, wake_at)

    def _slow(self, by_node: Sequence[bool]) -> int:
        """The shards of slow nodes, as in a pattern."""
        return sum(1 << 2 * shard for shard in range(STRIPE_SHARDS) if by_node[self.node_of(shard)])


@dataclass(frozen=True, slots=True)
class _Pattern:
    """Which shards of a block are in which state: bit 2·i of a mask speaks of shard i."""

    unasked: int
    pending: int
    have: int
    lost: int

    @classmethod
    def of(cls, code: int) -> _Pattern:
        """From two bits a shard, a value of `Shard` each."""
        low, high = code & _ONES, code >> 1 & _ONES
        return cls(~(low | high) & _ONES, low & ~high, high & ~low, low & high)

    @property
    def few_pending(self) -> bool:
        return self.pending.bit_count() <= STRIPE_SHARDS - DATA_SHARDS


def _shards(mask: int) -> tuple[int, ...]:
    return tuple(shard for shard in range(STRIPE_SHARDS) if mask >> 2 * shard & 1)
