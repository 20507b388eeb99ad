"""The process that owns the store of a chaos run: `python -m tools.chaosrig.owner OPTIONS` as a JSON document.

It opens the store below a `ChaosIo`, brings its model to where the journal ends, reads everything that is guarded, and
then works (`tools/chaosrig/workers.py`) and obeys (`tools/chaosrig/obey.py`).
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from efs.clock import SystemClock
from efs.errors import EfsError
from efs.fs import FileSystem
from kvstore import KVStore
from tools.chaosrig.calls import Calls, cancelled
from tools.chaosrig.faultio import ChaosIo
from tools.chaosrig.model import Ledger, Model, Universe
from tools.chaosrig.obey import REFUSED, Obedient, say
from tools.chaosrig.probes import LagProbes
from tools.chaosrig.workers import Workers

WRITERS: Final = 3
READERS: Final = 2


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


class Owner(Obedient):
    """With faults below the store, armed and disarmed by command."""

    def __init__(self, io: ChaosIo, calls: Calls, workers: Workers) -> None:
        super().__init__(calls, workers, io.struck)
        self._io = io

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        do = command["do"]
        if do == "arm":
            self._io.arm(command["kind"], command["directory"])
        elif do == "disarm":
            self._io.disarm()
            self._calls.note_sums(self._io.struck)
        elif do == "struck":
            return {"kinds": sorted(self._io.struck)}
        else:
            return await super().do(command)
        return {}


async def own(options: Options) -> int:
    """Open, run, close; the exit code of the process."""
    io = ChaosIo()
    try:
        filesystem = await FileSystem.open(options.root, io=io, clock=ShiftedClock(options.shift_s),
                                           maintain=options.working, scrub=options.working)
    except EfsError as error:
        say({"refused": f"{type(error).__name__}: {error}"})
        return REFUSED
    ledger = Ledger(options.journal, Model(Universe(options.seed), options.unevictable_blocks))
    ledger.write(t="open", n=options.incarnation, at=time.time())
    probes = LagProbes()
    ticking = asyncio.create_task(probes.run())
    calls = Calls(KVStore(filesystem, options.root), ledger, probes, at_once=True)
    calls.watch.now(options.damaged)
    workers = Workers(calls, f"chaos/{options.seed}/{options.incarnation}")
    owner = Owner(io, calls, workers)
    await owner.run(partial(workers.start, writers=WRITERS, readers=READERS, tending=True) if options.working else None)
    await cancelled([ticking])
    ledger.write(t="closed")
    ledger.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(own(Options(**json.loads(sys.argv[1])))))
