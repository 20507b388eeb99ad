"""The processes of a chaos run: the owner, with commands over its pipes, and runs of the command line beside it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from tools.chaosrig.owner import Options

CHECKOUT: Final = Path(__file__).resolve().parents[2]
READY_S: Final = 60.0
COMMAND_S: Final = 120.0
"""Patience with a process on an overloaded machine; the store's own bounds are checked by its owner."""
LINE_BYTES: Final = 1 << 20


class OwnerLost(Exception):
    """The owner ended, or does not answer."""


class OwnerProcess:
    """One incarnation of the owner."""

    def __init__(self, process: asyncio.subprocess.Process, refused: str | None) -> None:
        self.refused = refused
        self._process = process
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._last = 0
        self._listening = asyncio.create_task(self._listen())

    @classmethod
    async def start(cls, options: Options, log: str) -> OwnerProcess:
        """Start one and wait until it owns the store, or was refused. OwnerLost when it does neither."""
        with open(log, "ab") as errors:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tools.chaosrig.owner", json.dumps(asdict(options)), cwd=CHECKOUT,
                env=_environment(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                limit=LINE_BYTES)
        assert process.stdout is not None
        try:
            line = json.loads(await asyncio.wait_for(process.stdout.readline(), READY_S))
        except (TimeoutError, json.JSONDecodeError) as error:
            await _end(process)
            raise OwnerLost(f"the owner did not come up; see {log}") from error
        owner = cls(process, line.get("refused"))
        if owner.refused is not None:
            await process.wait()
        return owner

    @property
    def running(self) -> bool:
        return self._process.returncode is None

    async def command(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Send a command and wait for its answer. OwnerLost when there is none."""
        assert self._process.stdin is not None
        self._last += 1
        number = self._last
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        try:
            self._process.stdin.write(json.dumps({"id": number, "do": do, **arguments}).encode() + b"\n")
            await self._process.stdin.drain()
            return await asyncio.wait_for(reply, COMMAND_S)
        except (TimeoutError, ConnectionError) as error:
            raise OwnerLost(f"no answer to {do}") from error
        finally:
            del self._replies[number]

    async def kill(self) -> None:
        """SIGKILL."""
        await _end(self._process)
        await self._listening

    async def stop(self, patience_s: float) -> float | None:
        """Close the store and end; the seconds it took, None when it had to be killed."""
        began = time.monotonic()
        try:
            await self.command("stop")
            await asyncio.wait_for(self._process.wait(), patience_s)
        except (TimeoutError, OwnerLost):
            await self.kill()
            return None
        await self._listening
        return time.monotonic() - began

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
                waiting.set_exception(OwnerLost("the owner ended"))


@dataclass(frozen=True, slots=True)
class CommandRun:
    """One run of the command line, by the monotonic clock. code: None when it was killed."""

    began: float
    ended: float
    code: int | None
    document: dict[str, Any]
    error: str


async def kvstore(root: str, *arguments: str, kill_after_s: float | None = None) -> CommandRun:
    """`kvstore ARGUMENTS --json --store ROOT` in a process of its own."""
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", "from kvstore.cli import main; main()", *arguments, "--json", "--store", root,
        cwd=CHECKOUT, env=_environment(), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE)
    talk = asyncio.create_task(process.communicate())
    try:
        done, _ = await asyncio.wait((talk,), timeout=kill_after_s if kill_after_s is not None else COMMAND_S)
        if not done:
            process.kill()
        out, errors = await talk
    except asyncio.CancelledError:
        await _end(process)
        raise
    try:
        document = json.loads(out)
    except json.JSONDecodeError:
        document = {}
    return CommandRun(began, time.monotonic(), process.returncode if done else None, document, errors.decode().strip())


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
    await process.wait()


def _environment() -> dict[str, str]:
    """Without settings of a store that is not ours."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
    return {**kept, "PYTHONPATH": str(CHECKOUT)}
