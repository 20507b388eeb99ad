"""Each fault of the proxy does to the bytes what it is called, counts that it did, and ends when it is told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from efs.endpoint import Endpoint
from tests.support.servers import short_directory
from tests.support.waiting import came_true
from tools.chaosrig.wireproxy import SPARED, WIRE_KINDS, WireProxy

QUESTION = b"?" * 100
ANSWER = bytes(range(256)) * 16


class Echo:
    """A server that answers every question with ANSWER, a client of it through a proxy, and what both have got."""

    def __init__(self, base: Path, tcp: bool) -> None:
        self._own = Endpoint(path=f"{base}/s")
        self._tcp = tcp
        self._base = base
        self.got = bytearray()
        self.asked = bytearray()
        self.ended = asyncio.Event()
        self._target: asyncio.StreamWriter | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_unix_server(self._serve, self._own.path)
        address = Endpoint(host="127.0.0.1", port=0) if self._tcp else Endpoint(path=f"{self._base}/p")
        self.proxy = WireProxy(address, self._own, seed=1)
        await self.proxy.start()
        await self.connect()

    async def connect(self) -> None:
        self.got.clear()
        self.ended.clear()
        if self._target is not None:
            self._target.transport.abort()
        if self._tcp:
            assert self.proxy._listener is not None
            port = self.proxy._listener.sockets[0].getsockname()[1]
            source, self._target = await asyncio.open_connection("127.0.0.1", port)
        else:
            source, self._target = await asyncio.open_unix_connection(self.proxy.endpoint.path)
        self._reading = asyncio.create_task(self._read(source))

    async def stop(self) -> None:
        await self.proxy.stop()
        self._server.close()
        self._reading.cancel()
        assert self._target is not None
        self._target.transport.abort()

    def ask(self) -> None:
        assert self._target is not None
        self._target.write(QUESTION)

    async def _read(self, source: asyncio.StreamReader) -> None:
        try:
            while data := await source.read(65_536):
                self.got += data
        except ConnectionError:
            pass
        finally:
            self.ended.set()

    async def _serve(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        while data := await source.read(65_536):
            self.asked += data
            target.write(ANSWER)
        target.close()


@pytest.fixture(params=["unix", "tcp"])
async def echo(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Echo]:
    for kind in SPARED:
        monkeypatch.setitem(SPARED, kind, 0.0)
    with short_directory() as base:
        made = Echo(base, request.param == "tcp")
        await made.start()
        made.ask()
        assert await came_true(lambda: made.got == ANSWER)
        made.got.clear()
        made.asked.clear()
        yield made
        await made.stop()


@pytest.mark.parametrize("kind", ["drip", "delay", "late"])
async def test_what_is_slow_comes_whole(echo: Echo, kind: str) -> None:
    echo.proxy.hurt(kind)
    echo.ask()
    assert await came_true(lambda: echo.proxy.struck[kind] > 0)
    assert len(echo.got) < len(ANSWER)
    assert await came_true(lambda: echo.got == ANSWER)


@pytest.mark.parametrize(("kind", "seen_by_the_server"), [("deaf", True), ("mute", False)])
async def test_what_one_direction_holds_back_comes_when_it_heals(echo: Echo, kind: str,
                                                                 seen_by_the_server: bool) -> None:
    echo.proxy.hurt(kind)
    echo.ask()
    assert await came_true(lambda: echo.proxy.struck[kind] == 1)
    assert bool(echo.asked) is seen_by_the_server
    assert not echo.got
    echo.proxy.heal()
    assert await came_true(lambda: echo.got == ANSWER)


async def test_garbled_bytes_are_as_many_and_others(echo: Echo) -> None:
    echo.proxy.hurt("garble")
    echo.ask()
    assert await came_true(lambda: len(echo.got) == len(ANSWER))
    assert echo.got != ANSWER
    assert len(echo.asked) == len(QUESTION)
    assert echo.asked != QUESTION


async def test_repeated_bytes_come_twice(echo: Echo) -> None:
    echo.proxy.hurt("repeat")
    echo.ask()
    assert await came_true(lambda: len(echo.got) == 2 * len(ANSWER))


async def test_a_cut_is_in_the_middle_of_a_piece_and_a_new_connection_works(echo: Echo) -> None:
    echo.proxy.hurt("cut")
    echo.ask()
    assert await came_true(echo.ended.is_set)
    assert len(echo.got) < len(ANSWER)
    assert echo.proxy.struck["cut"] == 1
    echo.proxy.heal()
    await echo.connect()
    echo.ask()
    assert await came_true(lambda: echo.got == ANSWER)


def test_every_kind_has_a_test_here() -> None:
    assert set(WIRE_KINDS) == {"drip", "delay", "late", "deaf", "mute", "garble", "repeat", "cut"}
