"""A node server: listeners, the sessions of its clients, and how it ends.

One process serves one node or several on every address that it was given. It runs on one event loop; what the nodes
have to wait for, their own threads wait for.

*Limits.* WIRE_CONNECTIONS in all and WIRE_CONNECTIONS_PER_PEER from one user or address; one more is closed at once.
Every WIRE_WATCH_MS all sessions are looked at for handshakes, frames and answers that take too long
(`efs/session.py`). When descriptors run out, accepting pauses until then.

*Ending.* `close` takes no more connections and refuses new requests, gives those under way until CLOSE_MS to be
answered, then ends all connections. The nodes belong to whoever opened them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from efs.clock import Clock
from efs.endpoint import Endpoint, bound, is_local, listen, peer_of, tune
from efs.errors import InvalidArgument
from efs.handshake import Tokens
from efs.limits import (
    CLOSE_MS,
    WIRE_AHEAD_BYTES,
    WIRE_CONNECTIONS,
    WIRE_CONNECTIONS_PER_PEER,
    WIRE_KEPT_BYTES,
    WIRE_RECEIVE_BYTES,
    WIRE_WATCH_MS,
)
from efs.osio import Io
from efs.scratch import Scratch
from efs.session import Intake, Served, ServedNode, Session

_LOG: Final = logging.getLogger(__name__)


def require_token(endpoint: Endpoint, tokens: Tokens) -> None:
    """InvalidArgument for an address that other machines reach while there is no token."""
    if tokens.data is None and not is_local(endpoint):
        raise InvalidArgument(f"{endpoint} can be reached from other machines: that needs a token file")


@dataclass(frozen=True, slots=True)
class Load:
    """Connections to a node, and requests over them that are not answered yet."""

    connections: int
    in_flight: int


class NodeServer:
    """A `SessionHost`. Belongs to the running loop."""

    def __init__(self, nodes: Sequence[Served], io: Io, clock: Clock, tokens: Tokens | None = None) -> None:
        self.nodes = {served.node_id: served for served in nodes}
        self.tokens = tokens or Tokens()
        self.intake = Intake(WIRE_RECEIVE_BYTES)
        self.bodies = Scratch(WIRE_KEPT_BYTES)
        self.clock = clock
        self.draining = False
        self.ahead = memoryview(bytearray(WIRE_AHEAD_BYTES))
        self._io = io
        self._loop = asyncio.get_running_loop()
        self._listeners: list[tuple[Endpoint, socket.socket]] = []
        self._sessions: set[Session] = set()
        self._peers: Counter[str] = Counter()
        self._quiet = asyncio.Event()
        self._timer = self._loop.call_later(WIRE_WATCH_MS / 1000, self._watch)

    @property
    def connections(self) -> int:
        return len(self._sessions)

    def go_on_with(self, node: ServedNode) -> None:
        """From now on who asks for this node's id gets this one."""
        self.nodes[node.node_id] = node

    def load(self, node_id: str) -> Load:
        """What clients ask of a node just now."""
        sessions = [session for session in self._sessions if session.node_id == node_id]
        return Load(len(sessions), sum(session.in_flight for session in sessions))

    def listen(self, endpoint: Endpoint) -> Endpoint:
        """Listen at an address too; returns it with the port that was chosen. InvalidArgument for one that other
        machines reach while there is no token."""
        require_token(endpoint, self.tokens)
        listener = listen(self._io, endpoint)
        endpoint = bound(endpoint, listener)
        self._listeners.append((endpoint, listener))
        self._loop.add_reader(listener.fileno(), self._accept, listener)
        return endpoint

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                _LOG.warning("no connection can be accepted for now: %s", error.strerror or error)
                self._loop.remove_reader(listener.fileno())
                return
            peer = peer_of(connection)
            if self.connections >= WIRE_CONNECTIONS or self._peers[peer] >= WIRE_CONNECTIONS_PER_PEER:
                connection.close()
                continue
            tune(connection)
            self._peers[peer] += 1
            self._sessions.add(Session(self, connection, peer))

    def ended(self, session: Session, why: str) -> None:
        """A session's connection is closed."""
        _LOG.debug("a connection of %s ended: %s", session.peer, why)
        self._sessions.discard(session)
        self._peers[session.peer] -= 1
        if not self._peers[session.peer]:
            del self._peers[session.peer]
        self._quiet.set()

    def _watch(self) -> None:
        self._timer = self._loop.call_later(WIRE_WATCH_MS / 1000, self._watch)
        for session in list(self._sessions):
            session.watch()
        for _, listener in self._listeners:
            self._loop.add_reader(listener.fileno(), self._accept, listener)

    async def close(self) -> None:
        """See the module docstring. A second call does nothing."""
        self.draining = True
        self._timer.cancel()
        listeners, self._listeners = self._listeners, []
        for endpoint, listener in listeners:
            self._loop.remove_reader(listener.fileno())
            listener.close()
            if endpoint.path is not None:
                with contextlib.suppress(OSError):
                    self._io.unlink(endpoint.path)
        give_up = self._loop.time() + CLOSE_MS / 1000
        while any(session.busy for session in self._sessions) and self._loop.time() < give_up:
            self._quiet.clear()
            try:
                async with asyncio.timeout(0.01):
                    await self._quiet.wait()
            except TimeoutError:
                continue
        for session in list(self._sessions):
            session.close("the server is ending")
