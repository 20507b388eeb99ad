"""`/metrics` and `/healthz` of node servers: right while all is well, while a disk hangs or fails, while draining; and
bounded, whoever asks."""

from __future__ import annotations

import asyncio
import errno
import json
import signal
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from efs.clock import Deadline, SystemClock
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import NodeUnavailable
from efs.exposition import GAUGES, ServerSample
from efs.handshake import Role, Tokens
from efs.limits import STATUS_CONNECTIONS, STATUS_HEADER_BYTES
from efs.link import RemotePlace
from efs.metrics import NODE_COUNTERS, CounterFile
from efs.node import DirectoryNode
from efs.osio import SystemIo
from efs.remote import RemoteNode
from efs.serving import serve_nodes
from efs.statuspage import StatusPage
from tests.support.cli import run, run_process
from tests.support.faultio import FaultIo
from tests.support.nodebox import NODE_ID, NODE_INDEX, PLACE, NodeBox
from tests.support.records import LARGE, make_records
from tests.support.servers import ServerProcess, short_directory
from tests.support.statuspages import exchange, fetch
from tests.support.waiting import came_true

RECORDS = 16
SOON_MS = 20_000
LOOPBACK = "tcp:127.0.0.1:0"


@dataclass(slots=True)
class Serving:
    """`serve_nodes` in this process, over a disk that a test turns."""

    io: FaultIo
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    page: str = ""
    node: RemoteNode | None = None
    task: asyncio.Task[None] | None = None

    async def put(self, seed: int, deadline_ms: int = SOON_MS) -> None:
        assert self.node is not None
        records = make_records(RECORDS, NODE_INDEX, seed=seed, shape=LARGE)
        await self.node.put(records.batch(), Deadline.after_ms(SystemClock(), deadline_ms))


@asynccontextmanager
async def serving(durability: str = "process") -> AsyncIterator[Serving]:
    with short_directory() as base:
        box = NodeBox(base, capacity_bytes=48 << 20, clock=SystemClock())
        made, ready = Serving(FaultIo()), asyncio.Event()

        def note(nodes: object, addresses: object, page: Endpoint | None) -> None:
            made.page = str(page)
            ready.set()

        listen = parse_endpoint("unix:s", str(base))
        made.task = asyncio.create_task(serve_nodes(
            [box.path], [listen], io=made.io, clock=SystemClock(), tokens=Tokens(),
            durability="power" if durability == "power" else "process", mapped=False, ready=note, stop=made.stop,
            metrics=parse_endpoint(LOOPBACK)))
        await asyncio.wait((made.task, asyncio.create_task(ready.wait())), return_when=asyncio.FIRST_COMPLETED)
        place = RemotePlace(listen, PLACE.cluster_id, NODE_ID, NODE_INDEX, Role.OPERATOR, durability=durability)
        made.node = await RemoteNode.open(place, SystemClock(), CounterFile.in_memory(), SOON_MS)
        try:
            yield made
        finally:
            made.stop.set()
            await made.node.close()
            await made.task


async def test_metrics_show_the_counters_and_gauges_of_each_node() -> None:
    async with serving() as server:
        await server.put(seed=1)
        page = await fetch(server.page, "/metrics")
        assert page.status == 200
        assert "text/plain; version=0.0.4" in page.head
        assert page.values("kvstore_node_put_records_total") == {str(NODE_INDEX): RECORDS}
        assert page.values("kvstore_node_records") == {str(NODE_INDEX): RECORDS}
        assert page.values("kvstore_node_serving") == {str(NODE_INDEX): 1}
        assert page.values("kvstore_node_connections") == {str(NODE_INDEX): 2}
        live = page.values("kvstore_node_live_bytes")[str(NODE_INDEX)]
        capacity = page.values("kvstore_node_capacity_bytes")[str(NODE_INDEX)]
        assert live > 0
        assert page.values("kvstore_node_fill_ratio") == {str(NODE_INDEX): pytest.approx(live / capacity)}
        for name in NODE_COUNTERS:
            assert str(NODE_INDEX) in page.values(f"kvstore_{name}_total"), name
        for name, _ in GAUGES:
            assert f'kvstore_{name}{{node="{NODE_INDEX}",node_id="{NODE_ID}"}}' in page.text


async def test_info_over_the_wire_has_the_counters_of_the_node() -> None:
    async with serving() as server:
        await server.put(seed=1)
        assert server.node is not None
        info = await server.node.info(Deadline.after_ms(SystemClock(), SOON_MS))
        assert info.counters["node_put_records"] == RECORDS
        assert set(info.counters) <= set(NODE_COUNTERS)
        assert all(info.counters.values())


async def test_a_hung_disk_is_told_while_it_hangs_and_forgotten_when_it_goes_on() -> None:
    async with serving() as server:
        assert (await fetch(server.page, "/healthz")).text == "ok\n"
        gate = server.io.hang(("pwrite", "pwritev"), path="slab")
        put = asyncio.create_task(server.put(seed=2))
        assert await came_true(gate.entered.is_set)

        async def status() -> int:
            return (await fetch(server.page, "/healthz")).status

        while await status() == 200:
            assert not put.done()
        page = await fetch(server.page, "/healthz")
        assert (page.status, page.text) == (503, f"node {NODE_INDEX} is hung: an operation of its disk does not end\n")
        metrics = await fetch(server.page, "/metrics")
        assert metrics.values("kvstore_node_serving") == {str(NODE_INDEX): 0}
        assert metrics.values("kvstore_node_suspect_total") == {str(NODE_INDEX): 1}
        assert metrics.values("kvstore_node_queued")[str(NODE_INDEX)] >= 1
        assert metrics.values("kvstore_node_in_flight") == {str(NODE_INDEX): 1}
        gate.release()
        await put
        assert await status() == 200


async def test_a_node_that_turned_read_only_is_told() -> None:
    async with serving("power") as server:
        fault = server.io.fail(("fdatasync", "fsync"), errno.EIO, path="slab", times=None)
        with pytest.raises(NodeUnavailable):
            await server.put(seed=3)
        assert fault.count > 0
        page = await fetch(server.page, "/healthz")
        assert (page.status, page.text) == (503, f"node {NODE_INDEX} is read-only: its disk lost writes\n")
        fault.disarm()


async def test_a_server_that_ends_says_that_it_is_draining() -> None:
    async with serving() as server:
        gate = server.io.hang(("pwrite", "pwritev"), path="slab")
        put = asyncio.create_task(server.put(seed=4))
        assert await came_true(gate.entered.is_set)
        server.stop.set()
        while (page := await fetch(server.page, "/healthz")).status == 200:
            assert not put.done()
        assert (page.status, page.text) == (503, "draining\n")
        assert "kvstore_server_draining 1.0" in (await fetch(server.page, "/metrics")).text
        gate.release()
        await put
        assert server.task is not None
        await server.task


# -- Bounds ----------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def bare_page(look: Callable[[], ServerSample] | None = None) -> AsyncIterator[str]:
    async def sample() -> ServerSample:
        return look() if look is not None else ServerSample((), False)

    page = StatusPage(sample)
    endpoint = await page.listen(SystemIo(), parse_endpoint(LOOPBACK))
    try:
        yield str(endpoint)
    finally:
        await page.close()


@pytest.mark.parametrize(("method", "path", "status"), [
    ("GET", "/healthz", 200), ("GET", "/healthz?verbose=1", 200), ("HEAD", "/healthz", 200), ("GET", "/", 404),
    ("GET", "/../etc/passwd", 404), ("POST", "/metrics", 405), ("DELETE", "/healthz", 405)])
async def test_there_are_two_pages_and_two_methods(method: str, path: str, status: int) -> None:
    async with bare_page() as address:
        page = await fetch(address, path, method)
        assert page.status == status
        assert "connection: close" in page.head.lower()
        assert bool(page.text) == (method != "HEAD")


@pytest.mark.parametrize("data", [
    b"GET /healthz HTTP/1.1\r\nX: " + b"x" * STATUS_HEADER_BYTES + b"\r\n\r\n", b"\0" * 100 + b"\r\n\r\n",
    b"GET /healthz HTTP/1.1\r\n\r\n", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"])
async def test_what_is_no_request_is_refused_and_the_page_goes_on(data: bytes) -> None:
    async with bare_page() as address:
        assert (await exchange(address, data)).status in (400, 431)
        assert (await fetch(address, "/healthz")).status == 200


async def test_one_connection_too_many_is_closed_and_silent_ones_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.statuspage.STATUS_MS", 1_000.0)
    async with bare_page() as address:
        _, host, port = address.split(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(STATUS_CONNECTIONS)]
        assert (await fetch(address, "/healthz")).status == 0
        for reader, writer in silent:
            with pytest.raises((ConnectionError, asyncio.IncompleteReadError)):
                await reader.readexactly(1)
            writer.close()
        assert (await fetch(address, "/healthz")).status == 200


async def test_a_defect_of_the_page_is_an_answer_and_a_log_record(caplog: pytest.LogCaptureFixture) -> None:
    def look() -> ServerSample:
        raise ZeroDivisionError("nobody thought of this")

    async with bare_page(look) as address:
        assert (await fetch(address, "/metrics")).status == 500
    assert "in a way that it must not" in caplog.text


@pytest.mark.parametrize(("words", "code", "why"), [
    (["--metrics", "unix:x"], 2, "must be tcp:HOST:PORT"), (["--metrics", "9400"], 2, "must be unix:PATH or tcp"),
    (["--log-format", "xml"], 2, "must be text or json"), (["--log-level", "loud"], 2, "debug, info, warning, error")])
def test_what_cannot_be_meant_is_one_line(words: list[str], code: int, why: str, tmp_path: Path) -> None:
    DirectoryNode.create(SystemIo(), str(tmp_path / "node"), PLACE, NODE_ID, 48 << 20)
    outcome = run("node", "serve", str(tmp_path / "node"), "--listen", "unix:s", *words)
    assert outcome.code == code
    assert why in outcome.error_line


def test_an_address_in_use_is_one_line_and_leaves_the_node_clean(tmp_path: Path) -> None:
    with short_directory() as base, socket.create_server(("127.0.0.1", 0)) as taken:
        DirectoryNode.create(SystemIo(), str(base / "node"), PLACE, NODE_ID, 48 << 20)
        address = f"tcp:127.0.0.1:{taken.getsockname()[1]}"
        outcome = run_process("node", "serve", str(base / "node"), "--listen", f"unix:{base}/s", "--metrics", address)
        assert outcome.code == 8
        assert address in outcome.error_line
        assert not (base / "s").exists()


# -- Processes -------------------------------------------------------------------------------------------------------


def test_a_process_serves_its_page_and_logs_json_lines(tmp_path: Path) -> None:
    with short_directory() as base:
        path = str(base / "node")
        DirectoryNode.create(SystemIo(), path, PLACE, NODE_ID, 48 << 20)
        process = ServerProcess([path], f"unix:{base}/s", "--metrics", LOOPBACK, "--log-format", "json", "--log-level",
                                "info")
        process.start()
        try:
            (line,) = process.lines
            page = asyncio.run(fetch(str(line["metrics"]), "/healthz"))
            assert (page.status, page.text) == (200, "ok\n")
        finally:
            process.signal(signal.SIGTERM)
        code, err = process.abandon(30)
    assert code == 0
    records = [json.loads(text) for text in err.splitlines()]
    assert [record["message"] for record in records] == [
        f"{path} is open", "told to end: requests under way are answered, nodes are closed", "ended"]
    for record in records:
        assert set(record) == {"time", "level", "logger", "node", "message"}
        assert record["node"] == NODE_INDEX
        assert record["level"] == "info"
        assert record["logger"] == "efs.serving"
        assert record["time"].endswith("Z")
