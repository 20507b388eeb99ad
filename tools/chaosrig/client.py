"""A process that uses a cluster in a chaos run: `python -m tools.chaosrig.client OPTIONS` as a JSON document.

It opens the store by its URL, follows the journal that all clients write, and works and obeys as an owner does. One of
them is the keeper: it opens the store first, so that it looks after it, and does the maintenance.

`die` makes it kill itself (SIGKILL) in the middle of its next put or fetch.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from efs.errors import EfsError
from kvstore import KVStore
from tools.chaosrig.calls import Calls, cancelled
from tools.chaosrig.model import CHURN_CHAINS, CHURN_DEPTHS, CHURN_FIRST, Ledger, Model, Universe
from tools.chaosrig.obey import REFUSED, Obedient, say
from tools.chaosrig.probes import LagProbes
from tools.chaosrig.workers import Workers

WRITERS: Final = 2
READERS: Final = 1
DYING_MS: Final = 5_000
DIE_AFTER_S: Final = (0.0, 0.02)


@dataclass(frozen=True, slots=True)
class Options:
    """url: of the cluster. journal: its file. who, of: which of how many clients this is. damaged: how many nodes are
    damaged when it begins. keeper: whether it looks after the store."""

    url: str
    journal: str
    seed: int
    who: int
    of: int
    incarnation: int
    unevictable_blocks: int
    damaged: int
    keeper: bool


class Client(Obedient):
    """With `die`."""

    def __init__(self, calls: Calls, workers: Workers, source: random.Random) -> None:
        super().__init__(calls, workers, Counter())
        self._source = source

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        if command["do"] == "die":
            while True:
                await self._die_in(command["call"])
        return await super().do(command)

    async def _die_in(self, call: str) -> None:
        """Returns when the call was too fast."""
        number = CHURN_FIRST + self._source.randrange(CHURN_CHAINS)
        depths = (number, CHURN_DEPTHS.start, len(CHURN_DEPTHS))
        work = asyncio.create_task(self._calls.put(*depths, version=self._source.randrange(3), deadline_ms=DYING_MS)
                                   if call == "put" else self._calls.read(*depths, deadline_ms=DYING_MS))
        await asyncio.wait((work,), timeout=self._source.uniform(*DIE_AFTER_S))
        if not work.done():
            os.kill(os.getpid(), signal.SIGKILL)
        await work


async def use(options: Options) -> int:
    """Open, run, close; the exit code of the process."""
    try:
        store = await KVStore.open(options.url)
    except EfsError as error:
        say({"refused": f"{type(error).__name__}: {error}"})
        return REFUSED
    ledger = Ledger(options.journal, Model(Universe(options.seed), options.unevictable_blocks), options.who)
    ledger.write(t="open", n=options.incarnation, at=time.time(), owns=False)
    probes = LagProbes()
    ticking = asyncio.create_task(probes.run())
    calls = Calls(store, ledger, probes, at_once=False)
    calls.watch.now(options.damaged)
    stream = f"chaos/servers/{options.seed}/{options.who}/{options.incarnation}"
    workers = Workers(calls, stream, who=options.who, of=options.of)
    client = Client(calls, workers, random.Random(f"{stream}/end"))
    await client.run(partial(workers.start, writers=WRITERS, readers=READERS, tending=options.keeper))
    await cancelled([ticking])
    ledger.write(t="closed")
    ledger.close()
    return 0


if __name__ == "__main__":
    sys.exit(asyncio.run(use(Options(**json.loads(sys.argv[1])))))
