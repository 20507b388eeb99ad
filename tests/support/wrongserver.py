"""A server that lets everybody in and then answers what a test tells it to, right or wrong."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from efs.endpoint import Endpoint
from efs.errors import WireError
from efs.handshake import Challenge, Welcome, encode_message
from efs.limits import NONCE_BYTES
from efs.wire import FrameParser, Header, Kind, encode_frame

CLOSE = b""
"""In the place of a part of an answer: the connection ends here."""
Answer = Callable[[Header, bytes], Sequence[bytes]]


class WrongServer:
    """`answer` makes the bytes for a request; `asked` is what came. A connection it breaks may be made anew."""

    def __init__(self, path: Path, node_index: int, answer: Answer) -> None:
        self.endpoint = Endpoint(path=str(path))
        self.answer = answer
        self.asked: list[Kind] = []
        self.lost = 0
        self._node_index = node_index
        self._listener: asyncio.Server | None = None
        self._writers: list[asyncio.StreamWriter] = []

    async def __aenter__(self) -> WrongServer:
        self._listener = await asyncio.start_unix_server(self._serve, self.endpoint.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._listener is not None
        self._listener.close()
        for writer in self._writers:
            writer.transport.abort()

    async def _serve(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        self._writers.append(target)
        parser = FrameParser(_Requests(self, target))
        with suppress(ConnectionError, asyncio.CancelledError):
            while data := await source.read(65_536):
                parser.feed(data)
        self.lost += 1
        target.transport.abort()


class _Requests:
    """What one client sends."""

    def __init__(self, server: WrongServer, target: asyncio.StreamWriter) -> None:
        self._server = server
        self._target = target
        self._body = bytearray()

    def expect(self, header: Header) -> None:
        if header.kind >= 64:
            raise WireError("an answer from a client")

    def begin_body(self, header: Header, metadata: bytes) -> None:
        self._body = bytearray(header.body_bytes)

    def body_views(self, offset: int, size: int) -> Sequence[memoryview]:
        return [memoryview(self._body)[offset : offset + size]]

    def body_came(self, offset: int) -> None:
        pass

    def complete(self, header: Header, metadata: bytes) -> None:
        if header.kind is Kind.HELLO:
            challenge = Challenge(bytes(NONCE_BYTES), b"")
            self._target.write(encode_frame(Kind.CHALLENGE, 0, encode_message(challenge)))
        elif header.kind is Kind.PROOF:
            welcome = Welcome(self._server._node_index, "process")
            self._target.write(encode_frame(Kind.WELCOME, 0, encode_message(welcome)))
        else:
            self._server.asked.append(header.kind)
            for part in self._server.answer(header, metadata):
                if part == CLOSE:
                    self._target.close()
                    return
                self._target.write(part)
