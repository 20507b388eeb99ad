"""The processes of a chaos run: those that obey commands over their pipes, and runs of the command line beside them."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

CHECKOUT: Final = Path(__file__).resolve().parents[2]
READY_S: Final = 120.0
COMMAND_S: Final = 300.0
"""Patience with a process on an overloaded machine; the store's own bounds are checked by its owner."""
LINE_BYTES: Final = 1 << 20


class ProcessLost(Exception):
    """A process ended, or does not answer."""


class ObedientProcess:
    """One incarnation of a process of `tools/chaosrig/obey.py`."""

    def __init__(self, process: asyncio.subprocess.Process, refused: str | None) -> None:
        self.refused = refused
        self._process = process
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, module: str, options: Mapping[str, Any], log: str) -> ObedientProcess:
        """Start a module and wait until it has opened the store, or was refused. ProcessLost when it does neither."""
        with open(log, "ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", module, json.dumps(options), cwd=CHECKOUT, env=environment(),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=LINE_BYTES)
        assert process.stdout is not None
        try:
            line = json.loads(await asyncio.wait_for(process.stdout.readline(), READY_S))
        except (TimeoutError, json.JSONDecodeError) as error:
            await end(process)
            raise ProcessLost(f"{module} did not come up; see {log}") from error
        except asyncio.CancelledError:
            await end(process)
            raise
        started = cls(process, line.get("refused"))
        if started.refused is not None:
            await process.wait()
        return started

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def command(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. ProcessLost when there is none."""
        assert self._process.stdin is not None
        self._last += 1
        number = self._last
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
            await self._process.stdin.drain()
            return await asyncio.wait_for(reply, COMMAND_S)
        except (TimeoutError, ConnectionError) as error:
            raise ProcessLost(f"no answer to {do}") from error
        finally:
            del self._replies[number]

    async def kill(self) -> None:
        """SIGKILL."""
        await end(self._process)
        await self._listening

    async def ended(self) -> int:
        """Wait for its end; the exit code."""
        code = await asyncio.wait_for(self._process.wait(), COMMAND_S)
        await self._listening
        return code

    async def stop(self, patience_s: float, more_s: Callable[[], float]) -> bool:
        """Close the store and end; False when it had to be killed. more_s: asked once the patience is at its end."""
        try:
            await self.command("stop")
            try:
                await asyncio.wait_for(self._process.wait(), patience_s)
            except TimeoutError:
                await asyncio.wait_for(self._process.wait(), more_s())
        except (TimeoutError, ProcessLost):
            await self.kill()
            return False
        await self._listening
        return True

    @property
    def exit_code(self) -> int | None:
        return self._process.returncode

    async def _listen(self) -> None:
        assert self._process.stdout is not None
        while line := await self._process.stdout.readline():
            answer = json.loads(line)
            waiting = self._replies.get(answer.pop("id"))
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)
        for waiting in self._replies.values():
            if not waiting.done():
                waiting.set_exception(ProcessLost("the process ended"))


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of the command line, by the monotonic clock. code: None when it was killed."""

    began: float
    ended: float
    code: int | None
    document: dict[str, Any]
    error: str


async def kvstore(store: str | None, *arguments: str, kill_after_s: float | None = None) -> CommandRun:
    """`kvstore --json --store STORE ARGUMENTS` in a process of its own."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from kvstore.cli import main; main()", "--json",
        *(() if store is None else ("--store", store)), *arguments, cwd=CHECKOUT, env=environment(),
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    talk = asyncio.create_task(process.communicate())
    try:
        done, _ = await asyncio.wait((talk,), timeout=kill_after_s if kill_after_s is not None else COMMAND_S)
        if not done:
            process.kill()
        out, errors = await talk
    except asyncio.CancelledError:
        await end(process)
        raise
    try:
        document = json.loads(out)
    except json.JSONDecodeError:
        document = {}
    return CommandRun(began, time.monotonic(), process.returncode if done else None, document, errors.decode().strip())


async def end(process: asyncio.subprocess.Process) -> None:
    """SIGKILL, and wait until it is gone."""
    if process.returncode is None:
        process.kill()
    await process.wait()


def environment() -> dict[str, str]:
    """Without settings of a store that is not ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**kept, "PYTHONPATH": str(CHECKOUT)}
