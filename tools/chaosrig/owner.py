"""The process that owns the store of a chaos run: `python -m tools.chaosrig.owner OPTIONS` as a JSON document.

It opens the store below a `ChaosIo`, brings its model to where the journal ends, reads everything that is guarded, and
then works, all at once, on one event loop: writers and readers of churn, a writer of fresh blocks, a reader of what is
guarded, and maintenance (collect, sweep, scrub, repair). What each of them does next follows from the seed, the number
of the incarnation and its name.

Commands come as lines of JSON on standard input, {"id": n, "do": name, …}, and are answered in any order with
{"id": n, …}; the end of the input stops the process as `stop` does. Its first line is {"ready": true} when the store is
open, or {"refused": why}, and then it ends with exit code 3.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
import traceback
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from efs.clock import SystemClock
from efs.errors import EfsError
from efs.fs import FileSystem
from kvstore import KVStore
from tools.chaosrig.calls import SURE_MS, Calls, cancelled
from tools.chaosrig.faultio import ChaosIo
from tools.chaosrig.model import (
    CHURN_CHAINS,
    CHURN_DEPTHS,
    CHURN_FIRST,
    CHURN_VERSIONS,
    FRESH_FIRST,
    HOT_BLOCKS,
    HOT_CHAINS,
    Block,
    Journal,
    Model,
    Universe,
    replay,
)
from tools.chaosrig.probes import LagProbes

REFUSED: Final = 3
WRITERS: Final = 3
READERS: Final = 2
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
LOOK_DEADLINE_MS: Final = 5_000
SUMS_EVERY_S: Final = 0.5


@dataclass(frozen=True, slots=True)
class Options:
    """root: of the store. journal: its file. shift_s: how far ahead of the system's clocks the owner's are. working:
    whether it begins to work by itself. damaged: how many nodes are damaged when it begins."""

    root: str
    journal: str
    seed: int
    incarnation: int
    unevictable_blocks: int
    shift_s: float
    working: bool
    damaged: int


class ShiftedClock(SystemClock):
    """The system's clocks, both ahead by a constant: a machine on which nothing has happened for that long."""

    def __init__(self, ahead_s: float) -> None:
        self._ahead_s = ahead_s

    def monotonic(self) -> float:
        return super().monotonic() + self._ahead_s

    def wall(self) -> float:
        return super().wall() + self._ahead_s


class Workers:
    """Everything that goes on in the store; `pause` and `resume` it."""

    def __init__(self, calls: Calls, options: Options) -> None:
        self._calls = calls
        self._options = options
        self._go = asyncio.Event()
        self._go.set()

    def start(self) -> list[asyncio.Task[None]]:
        """One task for each worker."""
        names = [*(f"writer-{at}" for at in range(WRITERS)), *(f"reader-{at}" for at in range(READERS))]
        tasks = [self._task(name, self._write if name.startswith("writer") else self._read) for name in names]
        return [*tasks, self._task("fresh", self._freshen), self._task("guard", self._guard),
                self._task("tend", self._tend)]

    def pause(self) -> None:
        self._go.clear()

    def resume(self) -> None:
        self._go.set()

    def _task(self, name: str, step: Callable[[random.Random], Awaitable[None]]) -> asyncio.Task[None]:
        source = random.Random(f"chaos/{self._options.seed}/{self._options.incarnation}/{name}")
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
        number = FRESH_FIRST + self._calls.model.fresh
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


class Owner:
    """The process: store, workers, commands."""

    def __init__(self, options: Options, io: ChaosIo, store: KVStore, calls: Calls) -> None:
        self._io = io
        self._store = store
        self._calls = calls
        self._options = options
        self._workers = Workers(calls, options)
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Until told to stop."""
        _say({"ready": True, "problems": self._store.filesystem.problems})
        commands = asyncio.create_task(self._listen())
        sums = asyncio.create_task(self._note_sums())
        running: list[asyncio.Task[None]] = []
        if self._options.working:
            await self._workers.read_guarded()
            running = self._workers.start()
        await self._stopping.wait()
        await cancelled([*running, sums])
        self._calls.look_at_buffers()
        await self._store.close()
        self._calls.note_sums(self._io.struck)
        await cancelled([commands])

    async def _note_sums(self) -> None:
        while True:
            await asyncio.sleep(SUMS_EVERY_S)
            self._calls.note_sums(self._io.struck)

    async def _listen(self) -> None:
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        answering: set[asyncio.Task[None]] = set()
        while line := await reader.readline():
            task = asyncio.create_task(self._answer(json.loads(line)))
            answering.add(task)
            task.add_done_callback(answering.discard)
        self._stopping.set()

    async def _answer(self, command: dict[str, Any]) -> None:
        try:
            answer = await self._do(command)
        except EfsError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        _say({"id": command["id"], **answer})

    async def _do(self, command: dict[str, Any]) -> dict[str, Any]:
        filesystem = self._store.filesystem
        do = command["do"]
        if do == "damaged":
            self._calls.watch.now(command["nodes"])
        elif do == "arm":
            self._io.arm(command["kind"], command["directory"])
        elif do == "disarm":
            self._io.disarm()
            self._calls.note_sums(self._io.struck)
        elif do == "struck":
            return {"kinds": sorted(self._io.struck)}
        elif do == "pause":
            self._workers.pause()
        elif do == "resume":
            self._workers.resume()
        elif do == "nodes":
            return {"nodes": [asdict(node) for node in await self._store.nodes()]}
        elif do == "scrub":
            report = await filesystem.upkeep.scrub(from_start=True)
            return {"unsound": report.unsound, "rebuilt": report.rebuilt, "missing": report.missing}
        elif do == "repair":
            repair = await filesystem.upkeep.repair()
            return {"found": repair.found, "rebuilt": repair.rebuilt, "cold": repair.cold, "failed": repair.failed,
                    "missing": repair.missing, "hopeless": len(repair.hopeless)}
        elif do == "sweep":
            swept = await filesystem.sweep()
            return {"hollow": swept.hollow, "dropped": swept.dropped}
        elif do == "look":
            await self._workers.read_guarded()
            return {"lacking": await self._calls.look(self._workers.guarded(), LOOK_DEADLINE_MS)}
        elif do == "stop":
            self._stopping.set()
        else:
            raise AssertionError(f"no such command: {do}")
        return {}


async def own(options: Options) -> int:
    """Open, run, close; the exit code of the process."""
    io = ChaosIo()
    try:
        filesystem = await FileSystem.open(options.root, io=io, clock=ShiftedClock(options.shift_s),
                                           maintain=options.working, scrub=options.working)
    except EfsError as error:
        _say({"refused": f"{type(error).__name__}: {error}"})
        return REFUSED
    journal = Journal(options.journal)
    journal.write(t="open", n=options.incarnation, at=time.time())
    model = Model(Universe(options.seed), options.unevictable_blocks)
    with open(options.journal, encoding="ascii") as lines:
        replay(lines, model)
    probes = LagProbes()
    ticking = asyncio.create_task(probes.run())
    calls = Calls(KVStore(filesystem, options.root), model, journal, probes)
    calls.watch.now(options.damaged)
    await Owner(options, io, calls.store, calls).run()
    await cancelled([ticking])
    journal.write(t="closed")
    journal.close()
    return 0


def _say(document: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(asyncio.run(own(Options(**json.loads(sys.argv[1])))))
