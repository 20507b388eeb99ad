"""A small HTTP server for two pages, `/metrics` and `/healthz`, beside a node server and on the same event loop.

It asks nobody who they are and shows nothing but numbers (`efs/exposition.py`), so its address is listened at only when
it was named. It has no part in serving nodes: what it needs is in memory, so it answers also while disks hang and
while the server is draining, until the nodes are closed.

*Bounds.* STATUS_CONNECTIONS at a time, one more is closed at once. One request each, GET or HEAD, with a head of at
most STATUS_HEADER_BYTES; what follows the head is not read. STATUS_MS after it was accepted a connection is ended,
whatever it is doing. h11 knows HTTP; this knows when to stop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final, cast

import h11

from efs.endpoint import Endpoint, bound, listen
from efs.exposition import ServerSample, metrics_text, why_not_healthy
from efs.limits import STATUS_CONNECTIONS, STATUS_HEADER_BYTES, STATUS_MS
from efs.osio import Io

_LOG: Final = logging.getLogger(__name__)
_TEXT: Final = "text/plain; charset=utf-8"
_METRICS: Final = "text/plain; version=0.0.4; charset=utf-8"

Look = Callable[[], Awaitable[ServerSample]]


class StatusPage:
    """See the module docstring. Belongs to the running loop."""

    def __init__(self, look: Look) -> None:
        self._look = look
        self._connections: set[_Connection] = set()
        self._server: asyncio.Server | None = None

    async def listen(self, io: Io, endpoint: Endpoint) -> Endpoint:
        """Listen at an address; returns it with the port that was chosen. OpenFailed names it."""
        listener = listen(io, endpoint)
        self._server = await asyncio.get_running_loop().create_server(lambda: _Connection(self), sock=listener)
        return bound(endpoint, listener)

    def admit(self, connection: _Connection) -> bool:
        """Whether there is room for one more."""
        if len(self._connections) >= STATUS_CONNECTIONS:
            return False
        self._connections.add(connection)
        return True

    def ended(self, connection: _Connection) -> None:
        self._connections.discard(connection)

    async def answer(self, target: bytes) -> tuple[int, str, bytes]:
        """Status, type and body for a GET."""
        path = target.partition(b"?")[0]
        if path == b"/metrics":
            return 200, _METRICS, metrics_text(await self._look())
        if path == b"/healthz":
            why = why_not_healthy(await self._look())
            return (200, _TEXT, b"ok\n") if why is None else (503, _TEXT, f"{why}\n".encode())
        return 404, _TEXT, b"there are /metrics and /healthz\n"

    async def close(self) -> None:
        """End all connections. A second call does nothing."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in list(self._connections):
            connection.abort()


class _Connection(asyncio.Protocol):
    """One connection, for one request."""

    def __init__(self, page: StatusPage) -> None:
        self._page = page
        self._http = h11.Connection(h11.SERVER, max_incomplete_event_size=STATUS_HEADER_BYTES)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # That of uvloop is one without being an instance of asyncio's.
        self._transport = cast(asyncio.Transport, transport)
        if not self._page.admit(self):
            self.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(STATUS_MS / 1000, self.abort)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
        self._page.ended(self)

    def abort(self) -> None:
        assert self._transport is not None
        self._transport.abort()

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if self._task is not None or self._transport.is_closing():
            return
        try:
            self._http.receive_data(data)
            event = self._http.next_event()
        except h11.RemoteProtocolError as error:
            self._send(error.error_status_hint, _TEXT, f"{error}\n".encode())
            return
        if isinstance(event, h11.Request):
            self._transport.pause_reading()
            self._task = asyncio.create_task(self._answer(event))

    async def _answer(self, request: h11.Request) -> None:
        if request.method not in (b"GET", b"HEAD"):
            self._send(405, _TEXT, b"only GET and HEAD\n")
            return
        try:
            status, kind, body = await self._page.answer(request.target)
        except Exception:
            _LOG.exception("the status page failed in a way that it must not")
            status, kind, body = 500, _TEXT, b"a defect: see the server's log\n"
        self._send(status, kind, body, with_body=request.method == b"GET")

    def _send(self, status: int, kind: str, body: bytes, *, with_body: bool = True) -> None:
        assert self._transport is not None
        headers = [("Content-Type", kind), ("Content-Length", str(len(body))), ("Connection", "close")]
        parts = [self._http.send(h11.Response(status_code=status, headers=headers))]
        if with_body:
            parts.append(self._http.send(h11.Data(data=body)))
        self._transport.write(b"".join(part for part in parts if part is not None))
        self._transport.close()
