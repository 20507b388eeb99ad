"""A process of a chaos run that obeys commands.

They come as lines of JSON on standard input, {"id": n, "do": name, …}, and are answered in any order with
{"id": n, …}; the end of the input stops the process as `stop` does. Its first line is {"ready": true} when the store is
open, or {"refused": why}, and then it ends with exit code REFUSED.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Final

from efs.errors import EfsError
from tools.chaosrig.calls import Calls, cancelled
from tools.chaosrig.workers import Workers

REFUSED: Final = 3
LOOK_DEADLINE_MS: Final = 5_000
SUMS_EVERY_S: Final = 0.5


class Obedient:
    """Store, workers, commands. struck: by kind, how often faults in this process struck."""

    def __init__(self, calls: Calls, workers: Workers, struck: Counter[str]) -> None:
        self._calls = calls
        self._workers = workers
        self._struck = struck
        self._stopping = asyncio.Event()

    async def run(self, begin: Callable[[], list[asyncio.Task[None]]] | None) -> None:
        """Until told to stop. begin: starts the workers, once everything that is guarded was read; None: no work."""
        store = self._calls.store
        say({"ready": True, "problems": store.filesystem.problems})
        commands = asyncio.create_task(self._listen())
        sums = asyncio.create_task(self._note_sums())
        running: list[asyncio.Task[None]] = []
        if begin is not None:
            await self._workers.read_guarded()
            running = begin()
        await self._stopping.wait()
        await cancelled([*running, sums])
        self._calls.look_at_buffers()
        await store.close()
        self._calls.note_sums(self._struck)
        await cancelled([commands])

    async def do(self, command: dict[str, Any]) -> dict[str, Any]:
        """Obey one command; the answer."""
        store, do = self._calls.store, command["do"]
        upkeep = store.filesystem.upkeep
        if do == "damaged":
            self._calls.watch.now(command["nodes"])
        elif do == "pause":
            self._workers.pause()
        elif do == "resume":
            self._workers.resume()
        elif do == "nodes":
            return {"nodes": [asdict(node) for node in await store.nodes()]}
        elif do == "counters":
            return {"counters": store.filesystem.counters.snapshot()}
        elif do == "scrub":
            report = await upkeep.scrub(from_start=True)
            return {"unsound": report.unsound, "rebuilt": report.rebuilt, "missing": report.missing}
        elif do == "repair":
            repair = await upkeep.repair()
            return {"found": repair.found, "rebuilt": repair.rebuilt, "cold": repair.cold, "failed": repair.failed,
                    "missing": repair.missing, "hopeless": len(repair.hopeless)}
        elif do == "sweep":
            swept = await store.filesystem.sweep()
            return {"hollow": swept.hollow, "dropped": swept.dropped}
        elif do == "look":
            await self._workers.read_guarded()
            return {"lacking": await self._calls.look(self._workers.guarded(), LOOK_DEADLINE_MS)}
        elif do == "stop":
            self._stopping.set()
        else:
            raise AssertionError(f"no such command: {do}")
        return {}

    async def _note_sums(self) -> None:
        while True:
            await asyncio.sleep(SUMS_EVERY_S)
            self._calls.note_sums(self._struck)

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
            answer = await self.do(command)
        except EfsError as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        say({"id": command["id"], **answer})


def say(document: dict[str, Any]) -> None:
    """A line of JSON to who started this process."""
    sys.stdout.write(json.dumps(document) + "\n")
    sys.stdout.flush()
