"""A proxy between clients and a node server, in this process, that passes bytes on as badly as it is told to.

`hurt` begins one fault on all connections, `heal` ends it:

    drip     of what the server sends, `drip_bytes` every TICK_S
    delay    each piece of it comes DELAY_S later
    late     each comes LATE_S later: after whoever asked has given up or gone elsewhere
    deaf     nothing of it is passed on; what was held back comes when the fault ends
    mute     nothing that clients send is passed on, likewise
    garble   one bit of a piece, in either direction, is another
    repeat   a piece of it comes twice
    cut      of a piece of it half is passed on, then the connection ends

The last three end connections. They meet one piece in four, so that some of them meet more than handshakes.

`struck` counts the pieces that each fault met, so that who asked for one knows that it happened. `recorded`: what went
to the server and what came from it are kept.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Final

from efs.endpoint import Endpoint

WIRE_KINDS: Final = ("drip", "delay", "late", "deaf", "mute", "garble", "repeat", "cut")
TICK_S: Final = 0.005
DELAY_S: Final = 0.08
LATE_S: Final = 1.2
DRIP_BYTES: Final = 400
SPARED: Final[Mapping[str, float]] = {"garble": 0.75, "repeat": 0.75, "cut": 0.75}
"""The share of pieces that a fault spares."""
PIECE_BYTES: Final = 65_536

Stage = Callable[[bytes], AsyncIterator[bytes]]


class WireProxy:
    """Listens at `endpoint` from `start` to `stop` and connects each client to a server."""

    def __init__(self, endpoint: Endpoint, server: Endpoint, *, recorded: bool = False, seed: int = 0) -> None:
        self.endpoint = endpoint
        self.struck: Counter[str] = Counter()
        self.drip_bytes = DRIP_BYTES
        self.to_server = bytearray()
        self.from_server = bytearray()
        self._server = server
        self._recorded = recorded
        self._source = random.Random(seed)
        self._fault: str | None = None
        self._healed = asyncio.Event()
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        """Listen."""
        if self.endpoint.path is not None:
            self._listener = await asyncio.start_unix_server(self._connected, self.endpoint.path)
        else:
            self._listener = await asyncio.start_server(self._connected, self.endpoint.host, self.endpoint.port)

    async def stop(self) -> None:
        """End all connections, and listen no more."""
        if self._listener is not None:
            self._listener.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def __aenter__(self) -> WireProxy:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    def hurt(self, fault: str) -> None:
        """Until `heal`, or the next fault."""
        assert fault in WIRE_KINDS
        self.heal()
        self._fault = fault
        self._healed.clear()

    def heal(self) -> None:
        """Pass on everything, what was held back too."""
        self._fault = None
        self._healed.set()

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        try:
            server_in, server_out = await (
                asyncio.open_unix_connection(self._server.path) if self._server.path is not None
                else asyncio.open_connection(self._server.host, self._server.port))
        except OSError:
            client_out.transport.abort()
            return
        self._writers |= {client_out, server_out}
        for work in (self._pass_on(client_in, server_out, self.to_server, self._towards_server),
                     self._pass_on(server_in, client_out, self.from_server, self._towards_client)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter, record: bytearray,
                       stage: Stage) -> None:
        try:
            while data := await source.read(PIECE_BYTES):
                if self._recorded:
                    record += data
                async for piece in stage(data):
                    target.write(piece)
                    await target.drain()
        except ConnectionError:
            return
        finally:
            self._writers.discard(target)
            target.transport.abort()

    async def _towards_server(self, data: bytes) -> AsyncIterator[bytes]:
        fault = self._strikes("mute", "garble")
        if fault == "mute":
            await self._healed.wait()
        yield self._garbled(data) if fault == "garble" else data

    async def _towards_client(self, data: bytes) -> AsyncIterator[bytes]:
        fault = self._strikes("drip", "delay", "late", "deaf", "garble", "repeat", "cut")
        if fault == "drip":
            at = 0
            while at < len(data) and self._fault == "drip":
                await asyncio.sleep(TICK_S)
                yield data[at : at + self.drip_bytes]
                at += self.drip_bytes
            yield data[at:]
        elif fault == "garble":
            yield self._garbled(data)
        elif fault == "repeat":
            yield data
            yield data
        elif fault == "cut":
            yield data[: len(data) // 2]
            raise ConnectionAbortedError
        else:
            if fault == "deaf":
                await self._healed.wait()
            elif fault in ("delay", "late"):
                await asyncio.sleep(DELAY_S if fault == "delay" else LATE_S)
            yield data

    def _strikes(self, *kinds: str) -> str | None:
        """The fault, if it is one of these and meets this piece."""
        fault = self._fault
        if fault is None or fault not in kinds or self._source.random() < SPARED.get(fault, 0.0):
            return None
        self.struck[fault] += 1
        return fault

    def _garbled(self, data: bytes) -> bytes:
        wrong = bytearray(data)
        wrong[self._source.randrange(len(data))] ^= 1 << self._source.randrange(8)
        return bytes(wrong)
