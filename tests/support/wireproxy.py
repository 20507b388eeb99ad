"""A proxy between clients and a server, in this process, that passes bytes on as badly as a test wants."""

from __future__ import annotations

import asyncio
from pathlib import Path

from efs.endpoint import Endpoint


class WireProxy:
    """Listens at a Unix socket and connects each client to a server's.

    bytes_per_tick: of what the server sends, every TICK_S; None: all of it. deaf: nothing that the server sends is
    passed on. recorded: what went to the server and what came from it. dripped: bytes passed on while that was slowed.
    """

    TICK_S = 0.005

    def __init__(self, path: Path, server: Endpoint) -> None:
        self.endpoint = Endpoint(path=str(path))
        self._server = server
        self._listener: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self.bytes_per_tick: int | None = None
        self.deaf = False
        self.dripped = 0
        self.to_server = bytearray()
        self.from_server = bytearray()

    async def __aenter__(self) -> WireProxy:
        self._listener = await asyncio.start_unix_server(self._connected, self.endpoint.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        self.cut()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """End all connections."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _connected(self, client_in: asyncio.StreamReader, client_out: asyncio.StreamWriter) -> None:
        try:
            server_in, server_out = await asyncio.open_unix_connection(self._server.path)
        except OSError:
            client_out.transport.abort()
            return
        self._writers += [client_out, server_out]
        for work in (self._pass_to_server(client_in, server_out), self._pass_to_client(server_in, client_out)):
            task = asyncio.create_task(work)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_to_server(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65_536):
                self.to_server += data
                target.write(data)
                await target.drain()
        except ConnectionError:
            return
        finally:
            target.transport.abort()

    async def _pass_to_client(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(self.bytes_per_tick or 65_536):
                self.from_server += data
                while self.deaf:
                    await asyncio.sleep(self.TICK_S)
                if self.bytes_per_tick is not None:
                    self.dripped += len(data)
                    await asyncio.sleep(self.TICK_S)
                target.write(data)
                await target.drain()
        except ConnectionError:
            return
        finally:
            target.transport.abort()
