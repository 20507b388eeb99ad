"""What goes on in a store of a chaos run, all at once on one loop: writers and readers of churn, a writer of fresh
blocks, a reader of what is guarded, and, in the process that looks after the store, maintenance (collect, sweep, scrub,
repair). What each of them does next follows from its stream of random numbers, which its process names.
"""

from __future__ import annotations

import asyncio
import random
import traceback
from collections.abc import Awaitable, Callable
from typing import Final

from tools.chaosrig.calls import SURE_MS, Calls
from tools.chaosrig.model import (
    CHURN_CHAINS,
    CHURN_DEPTHS,
    CHURN_FIRST,
    CHURN_VERSIONS,
    FRESH_FIRST,
    HOT_BLOCKS,
    HOT_CHAINS,
    Block,
)

MOST_PUT_BLOCKS: Final = 12
PUT_PAUSE_S: Final = (0.02, 0.15)
READ_PAUSE_S: Final = (0.02, 0.2)
FRESH_PAUSE_S: Final = 0.4
GUARD_PAUSE_S: Final = 0.4
CANCELLED_SHARE: Final = 0.1
CANCEL_AFTER_S: Final = (0.0, 0.03)
TEND_PAUSE_S: Final = (0.5, 2.0)
TEND_SECONDS: Final = 1.0
PUT_DEADLINES_MS: Final = (400, 1_000, 3_000)
READ_DEADLINES_MS: Final = (200, 500, 2_000)
MATCH_DEADLINE_MS: Final = 500
COLLECT_DEADLINE_MS: Final = 2_000


class Workers:
    """Everything that goes on in one process; `pause` and `resume` it. who, of: which of how many processes it is."""

    def __init__(self, calls: Calls, stream: str, *, who: int = 0, of: int = 1) -> None:
        self._calls = calls
        self._stream = stream
        self._who = who
        self._of = of
        self._go = asyncio.Event()
        self._go.set()

    def start(self, *, writers: int, readers: int, tending: bool) -> list[asyncio.Task[None]]:
        """One task for each worker."""
        names = [*(f"writer-{at}" for at in range(writers)), *(f"reader-{at}" for at in range(readers))]
        tasks = [self._task(name, self._write if name.startswith("writer") else self._read) for name in names]
        tasks += [self._task("fresh", self._freshen), self._task("guard", self._guard)]
        return [*tasks, self._task("tend", self._tend)] if tending else tasks

    def pause(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def _task(self, name: str, step: Callable[[random.Random], Awaitable[None]]) -> asyncio.Task[None]:
        source = random.Random(f"{self._stream}/{name}")
        return asyncio.create_task(self._for_ever(name, step, source), name=name)

    async def _for_ever(self, name: str, step: Callable[[random.Random], Awaitable[None]],
                        source: random.Random) -> None:
        while True:
            try:
                await step(source)
            except Exception:
                last = traceback.format_exc().strip().splitlines()
                self._calls.violation(f"{name} died of {last[-1]} ({' '.join(last[-3].split())})")
                await asyncio.sleep(1.0)

    # -- churn

    async def _write(self, source: random.Random) -> None:
        """Extend a chain as an engine does: match, then put what is missing."""
        await asyncio.sleep(source.uniform(*PUT_PAUSE_S))
        await self._go.wait()
        number = _popular(source)
        deepest, count = CHURN_DEPTHS.stop, source.randint(1, MOST_PUT_BLOCKS)
        version = source.choice((0, 0, 0, *range(1, CHURN_VERSIONS)))
        deadline_ms = source.choice(PUT_DEADLINES_MS)
        found = await self._calls.match(number, CHURN_DEPTHS.start, len(CHURN_DEPTHS), MATCH_DEADLINE_MS)
        first = CHURN_DEPTHS.start + found
        if first == deepest:
            first = source.randrange(CHURN_DEPTHS.start, deepest)
        await self._calls.put(number, first, min(count, deepest - first), version, deadline_ms)

    async def _read(self, source: random.Random) -> None:
        await asyncio.sleep(source.uniform(*READ_PAUSE_S))
        await self._go.wait()
        count, deadline_ms = source.randint(1, len(CHURN_DEPTHS)), source.choice(READ_DEADLINES_MS)
        number, cancel_after_s = _popular(source), source.uniform(*CANCEL_AFTER_S)
        read = asyncio.create_task(self._calls.read(number, CHURN_DEPTHS.start, count, deadline_ms))
        try:
            if source.random() < CANCELLED_SHARE:
                await asyncio.wait((read,), timeout=cancel_after_s)
                self._calls.sums["cancelled_reads"] += read.cancel()
            await asyncio.wait((read,))
        finally:
            read.cancel()
        if not read.cancelled():
            read.result()

    # -- what is guarded

    async def _freshen(self, source: random.Random) -> None:
        """Put a block that nobody has put before, and read it at once."""
        await asyncio.sleep(FRESH_PAUSE_S)
        await self._go.wait()
        after = self._calls.model.fresh
        number = FRESH_FIRST + after + (self._who - after) % self._of
        if await self._calls.put(number, 0, 1, 0, source.choice(PUT_DEADLINES_MS)):
            await self._calls.read(number, 0, 1, SURE_MS)

    async def _guard(self, source: random.Random) -> None:
        await asyncio.sleep(GUARD_PAUSE_S)
        await self._go.wait()
        await self.read_guarded()

    async def read_guarded(self) -> None:
        """Read everything that is guarded; put again what is not there."""
        for number, count in self._guarded_chains():
            missed = set(await self._calls.read(number, 0, count, SURE_MS))
            self._calls.sums["guarded_hits"] += count - len(missed)
            self._calls.missed(number, missed)
            for depth in sorted(missed) if number < CHURN_FIRST else ():
                await self._calls.put(number, depth, 1, 0, max(PUT_DEADLINES_MS))

    def guarded(self) -> list[Block]:
        """Hot blocks, and fresh ones that were acknowledged."""
        return [(number, depth) for number, count in self._guarded_chains() for depth in range(count)]

    def _guarded_chains(self) -> list[tuple[int, int]]:
        fresh = sorted(number for number, _ in self._calls.model.claims if number >= FRESH_FIRST)
        return [(number, HOT_BLOCKS) for number in range(HOT_CHAINS)] + [(number, 1) for number in fresh]

    # -- maintenance

    async def _tend(self, source: random.Random) -> None:
        await asyncio.sleep(source.uniform(*TEND_PAUSE_S))
        await self._go.wait()
        filesystem = self._calls.store.filesystem
        what = source.choice(("collect", "sweep", "scrub", "repair"))
        self._calls.sums[what] += 1
        if what == "collect":
            evicted = await self._calls.timed(what, COLLECT_DEADLINE_MS,
                                              filesystem.collect(deadline_ms=COLLECT_DEADLINE_MS))
            self._calls.sums["evicted_on_demand"] += sum((evicted or {}).values())
        elif what == "sweep":
            await filesystem.sweep(max_seconds=TEND_SECONDS)
        elif what == "scrub":
            await filesystem.upkeep.scrub(max_seconds=TEND_SECONDS)
        else:
            await filesystem.upkeep.repair(max_seconds=TEND_SECONDS)


def _popular(source: random.Random) -> int:
    """A churn chain: some are wanted far more often than others."""
    return CHURN_FIRST + int(CHURN_CHAINS * source.random() ** 2)
