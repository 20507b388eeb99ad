"""A client that says whatever a test wants: frames or garbage on a plain socket, and the frames that come back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Sequence
from contextlib import suppress

from efs.endpoint import Endpoint, connect
from efs.errors import WireError
from efs.handshake import Hello, Role, client_proof, decode_challenge, encode_message
from efs.handshake import Proof as ProofMessage
from efs.wire import FrameParser, Header, Kind, encode_frame

ANSWER_DEADLINE_S = 20.0
NONCE = bytes(range(32))


class RawClient:
    """One connection. `frames` is what came, as (header, metadata, body)."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._parser = FrameParser(self)
        self._body = bytearray()
        self.frames: list[tuple[Header, bytes, bytes]] = []

    @classmethod
    async def open(cls, endpoint: Endpoint) -> RawClient:
        return cls(await connect(endpoint))

    @classmethod
    async def admitted(cls, endpoint: Endpoint, hello: Hello, token: bytes | None = None) -> RawClient:
        """After a handshake that succeeded."""
        client = await cls.open(endpoint)
        await client.shake(hello, token)
        header, _, _ = await client.frame()
        assert header.kind is Kind.WELCOME
        return client

    async def shake(self, hello: Hello, token: bytes | None = None) -> None:
        await self.send(encode_frame(Kind.HELLO, 0, encode_message(hello)))
        header, metadata, _ = await self.frame()
        assert header.kind is Kind.CHALLENGE
        proof = client_proof(token, hello, decode_challenge(metadata).nonce)
        await self.send(encode_frame(Kind.PROOF, 0, encode_message(ProofMessage(proof))))

    async def send(self, *parts: bytes) -> None:
        """Send; an end of the connection shows when something is read."""
        with suppress(ConnectionError):
            await asyncio.get_running_loop().sock_sendall(self._socket, b"".join(parts))

    async def frame(self) -> tuple[Header, bytes, bytes]:
        """The next frame. ConnectionError when the server has closed."""
        async with asyncio.timeout(ANSWER_DEADLINE_S):
            while not self.frames:
                data = await asyncio.get_running_loop().sock_recv(self._socket, 65_536)
                if not data:
                    raise ConnectionError("closed")
                self._parser.feed(data)
        return self.frames.pop(0)

    async def closed(self) -> bool:
        """Whether the server closes the connection; what comes before that is dropped."""
        try:
            while True:
                await self.frame()
        except ConnectionError:
            return True
        except TimeoutError:
            return False
        finally:
            self.close()

    def close(self) -> None:
        self._socket.close()

    # -- what its own parser asks

    def expect(self, header: Header) -> None:
        if header.kind < 64:
            raise WireError(f"a {header.kind.name} from a server")

    def begin_body(self, header: Header, metadata: bytes) -> None:
        self._body = bytearray(header.body_bytes)

    def body_views(self, offset: int, size: int) -> Sequence[memoryview]:
        return [memoryview(self._body)[offset : offset + size]]

    def body_came(self, offset: int) -> None:
        pass

    def complete(self, header: Header, metadata: bytes) -> None:
        self.frames.append((header, metadata, bytes(self._body)))
        self._body = bytearray()


def hello_for(node_index: int, *, cluster_id: str = "c" * 32, node_id: str = "d" * 32, role: Role = Role.DATA) -> Hello:
    return Hello(cluster_id, node_id, node_index, role.value, NONCE)
