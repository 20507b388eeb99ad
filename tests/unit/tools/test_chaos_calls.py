"""The judge of a chaos run never takes a slow machine for a broken promise, and finds the broken promise on a slow one
too: a clock and probes that say what a test wants."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

import tools.chaosrig.calls as calls_module
from efs.types import GetReport
from kvstore import KVStore
from tools.chaosrig.calls import Calls
from tools.chaosrig.model import LAYOUT, Block, Ledger, Model, Universe
from tools.chaosrig.patience import Patience
from tools.chaosrig.probes import LagProbes

HOT: Block = (0, 0)
DEADLINE_MS = 500.0


class Machine(LagProbes):
    """Time, and what the probes say of the machine."""

    def __init__(self) -> None:
        self.now = 1_000.0
        self.lag = self.held = self.lost = 0.0

    def monotonic(self) -> float:
        return self.now

    def lost_ms(self, since: float) -> float:
        return self.lost

    def held_ms(self, since: float) -> float:
        return self.held

    def thread_ms(self, since: float) -> float:
        return self.lag

    def lag_ms(self, since: float) -> float:
        return self.lag


class Store:
    """Holds one block, or not, by what `answers` says in turn; the last answer stays."""

    def __init__(self, universe: Universe, machine: Machine, answers: list[bool]) -> None:
        self._payload = LAYOUT.to_segments(universe.payload(HOT, 0))
        self._machine = machine
        self._answers = answers
        self.took_s = 0.0

    async def get_into(self, chain: Any, out: bytearray, *, deadline_ms: float,
                       on_segment: Callable[[int, int], None] | None = None) -> GetReport:
        found = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        self._machine.now += self.took_s
        if found:
            out[:] = bytes(self._payload)
        for segment in range(len(LAYOUT.segments)) if on_segment is not None else ():
            assert on_segment is not None
            on_segment(segment, int(found))
        return GetReport(int(found), (found,), 0, 0, 0, 0, 0, 0, 0.0)


class Bench:
    def __init__(self, path: Path, answers: list[bool], *, at_once: bool) -> None:
        universe = Universe(3)
        self.machine = Machine()
        self.store = Store(universe, self.machine, answers)
        self.ledger = Ledger(str(path), Model(universe, 50))
        self.ledger.write(t="intent", b=[HOT], v=0)
        self.ledger.write(t="put", b=[HOT], acknowledged=True, at_risk=False)
        self.calls = Calls(cast(KVStore, self.store), self.ledger, self.machine, at_once=at_once)

    async def read(self) -> list[str]:
        """The violations after one read."""
        await self.calls.read(HOT[0], HOT[1], 1, DEADLINE_MS)
        return self.ledger.told.violations


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    made: list[Bench] = []

    def make(*answers: bool, at_once: bool = True) -> Bench:
        made.append(Bench(tmp_path / f"journal-{len(made)}", list(answers), at_once=at_once))
        monkeypatch.setattr(calls_module, "time", made[-1].machine)
        return made[-1]

    async def at_once(seconds: float) -> None:
        made[-1].machine.now += seconds

    monkeypatch.setattr(calls_module, "asyncio", SimpleNamespace(sleep=at_once, Task=asyncio.Task, wait=asyncio.wait))
    yield make
    for each in made:
        each.ledger.close()


async def test_a_late_call_is_accused_unless_its_process_was_kept_waiting(bench: Callable[..., Bench]) -> None:
    late = bench(True)
    late.store.took_s = 0.9
    assert ["ms too long" in what for what in await late.read()] == [True]
    excused = bench(True)
    excused.store.took_s, excused.machine.lag = 0.9, 100.0
    assert await excused.read() == []
    assert excused.calls.sums["late_with_machine"] == 1
    hung = bench(True)
    hung.store.took_s, hung.machine.lag = 9.0, 100.0
    assert ["ms too long" in what for what in await hung.read()] == [True]


async def test_a_block_that_stays_a_miss_is_lost_however_slow_the_machine_is(bench: Callable[..., Bench]) -> None:
    for at_once, lag in ((True, 0.0), (True, 9_000.0), (False, 0.0), (False, 9_000.0)):
        lost = bench(False, at_once=at_once)
        lost.machine.lag = lag
        assert ["stays one" in what for what in await lost.read()] == [True]
        assert lost.calls.sums["lost_blocks"] == 1


@pytest.mark.parametrize(("at_once", "lag", "accused"), [
    (True, 0.0, True), (True, 600.0, False), (False, 0.0, False), (False, 600.0, False),
])
async def test_a_block_that_is_there_when_asked_again_is_not_lost(bench: Callable[..., Bench], at_once: bool,
                                                                  lag: float, accused: bool) -> None:
    late = bench(False, False, True, at_once=at_once)
    late.machine.lag = lag
    assert bool(await late.read()) is accused
    assert (late.calls.sums["lost_blocks"], late.calls.sums["hits_only_when_asked_again"]) == (0, 1)


async def test_a_miss_is_not_judged_when_more_nodes_were_hurt_meanwhile(bench: Callable[..., Bench]) -> None:
    third = bench(False)
    third.calls.watch.now(3)
    assert await third.read() == []
    assert third.calls.sums["claims_tested"] == 0


async def test_patience_ends_with_its_seconds_and_its_looks() -> None:
    machine = Machine()
    slow, quick = (Patience(10.0, 2, machine.monotonic) for _ in range(2))
    machine.now += 60.0
    assert not slow.ended, "it has looked not even twice"
    await slow.pause()
    await slow.pause()
    assert slow.ended
    machine.now -= 60.0
    await quick.pause()
    await quick.pause()
    assert not quick.ended
