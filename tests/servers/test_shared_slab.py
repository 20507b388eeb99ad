"""A client of the same machine reads the slab of a server by itself, and only the very same slab."""

from __future__ import annotations

import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from efs.clock import Deadline, SystemClock
from efs.contract import Landing, NodeTable, Span, Stride
from efs.endpoint import parse_endpoint
from efs.handshake import Role
from efs.limits import MIB
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import NodePlace
from efs.osio import SystemIo
from efs.remote import RemoteNode
from efs.server import NodeServer
from efs.session import ServedNode
from efs.sharedslab import SharedSlab, SlabPlace, place_of
from efs.slab import Slab
from tests.support.records import Records, make_records
from tests.support.waiting import came_true

NODE_INDEX = 5
PLACE = NodePlace("c" * 32, 0, NODE_INDEX)
NODE_ID = "d" * 32
CLOCK = SystemClock()


@dataclass(slots=True)
class Shared:
    """A directory behind a server, a client of it, what is stored and where."""

    inner: DirectoryNode
    server: NodeServer
    node: RemoteNode
    counters: CounterFile
    records: Records
    table: NodeTable

    @property
    def span(self) -> Span:
        payload = self.records.payload
        return Span(int(self.table.location[0]), len(payload), payload.shape[1], self.records.shape.slot_bytes)

    def landing(self, buffer: bytearray) -> Landing:
        size = self.records.shape.shard_bytes
        return Landing(memoryview(buffer), (Stride(0, size, 0, size),))

    @property
    def bytes(self) -> bytes:
        return self.records.payload[:, : self.records.shape.shard_bytes].tobytes()


def in_ms(milliseconds: float = 20_000) -> Deadline:
    return Deadline.after_ms(CLOCK, milliseconds)


@asynccontextmanager
async def shared(path: Path, address: str = "unix:s", mapped: bool = False) -> AsyncIterator[Shared]:
    io = SystemIo()
    path.mkdir(exist_ok=True)
    directory = str(path / "node")
    DirectoryNode.create(io, directory, PLACE, NODE_ID, 8 * MIB)
    counters = CounterFile.in_memory()
    inner = await DirectoryNode.open(directory, PLACE, io, CLOCK, counters=counters)
    server = NodeServer([ServedNode(inner, PLACE.cluster_id, NODE_ID, "process", counters,
                                    slab=inner.slab_place)], io, CLOCK)
    endpoint = server.listen(parse_endpoint(address, str(path)))
    place = RemotePlace(endpoint, PLACE.cluster_id, NODE_ID, NODE_INDEX, Role.OPERATOR, mapped=mapped)
    node = await RemoteNode.open(place, CLOCK, CounterFile.in_memory(), 20_000)
    records = make_records(12, NODE_INDEX)
    assert (await node.put(records.batch(), in_ms())).stored.all()
    table = await node.look_up(records.keys, in_ms())
    yield Shared(inner, server, node, counters, records, table)
    await node.close()
    await server.close()
    await inner.close()


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A directory of a file system on which preadv can say that it would have to wait."""
    fd = os.open(tmp_path, os.O_TMPFILE | os.O_RDWR)
    try:
        os.write(fd, b"x")
        os.preadv(fd, [bytearray(1)], 0, os.RWF_NOWAIT)
    except OSError:
        pytest.skip("the file system of the tests has no preadv without waiting")
    finally:
        os.close(fd)
    return tmp_path


@pytest.mark.parametrize("mapped", [False, True])
async def test_a_client_on_a_unix_socket_reads_the_slab_and_asks_the_server_for_no_slot(
    base: Path, mapped: bool
) -> None:
    async with shared(base, mapped=mapped) as case:
        buffer = bytearray(len(case.bytes))
        assert case.node.read_now(case.span, case.landing(buffer))
        assert buffer == case.bytes
        assert case.counters.get("wire_reads") == 0


async def test_a_client_that_wants_maps_is_shown_the_slots_and_another_is_not(base: Path) -> None:
    async with shared(base, mapped=True) as case:
        wrong = Span(case.span.location | (1 << 20) - 2, 12, case.span.shard_bytes, case.span.slot_bytes)
        views = case.node.views_now([case.span, wrong])
        assert views is not None
        right, nothing = views
        assert right is not None
        assert nothing is None
        assert right[:, : case.records.shape.shard_bytes].tobytes() == case.bytes
        for session in list(case.server._sessions):
            session.close("the test wants it")
        assert await came_true(lambda: case.node.suspect)
        assert case.node.views_now([case.span]) is None
        assert right[:, : case.records.shape.shard_bytes].tobytes() == case.bytes, "the map lives as long as a view"
    async with shared(base / "other") as case:
        assert case.node.views_now([case.span]) is None


async def test_a_revoked_landing_gets_nothing(base: Path) -> None:
    async with shared(base) as case:
        buffer = bytearray(len(case.bytes))
        landing = case.landing(buffer)
        landing.revoked = True
        assert not case.node.read_now(case.span, landing)
        assert not any(buffer)


async def test_a_client_on_tcp_is_told_of_no_slab(base: Path) -> None:
    async with shared(base, "tcp:127.0.0.1:0") as case:
        buffer = bytearray(len(case.bytes))
        assert not case.node.read_now(case.span, case.landing(buffer))
        await case.node.read([(case.span, case.landing(buffer))], lambda _: None, in_ms())
        assert buffer == case.bytes
        assert case.counters.get("wire_reads") == 1


async def test_slots_that_the_extent_does_not_have_are_not_read(base: Path) -> None:
    async with shared(base) as case:
        buffer = bytearray(len(case.bytes))
        right = case.span
        for wrong in (Span(right.location, right.count, right.shard_bytes, right.slot_bytes + 64),
                      Span(1 << 40, right.count, right.shard_bytes, right.slot_bytes),
                      Span(right.location + (1 << 20), right.count, right.shard_bytes, right.slot_bytes),
                      Span(right.location | (1 << 20) - 2, right.count, right.shard_bytes, right.slot_bytes)):
            assert not case.node.read_now(wrong, case.landing(buffer))
        assert not any(buffer)


async def test_after_the_connection_is_lost_nothing_is_read_until_there_is_another(base: Path) -> None:
    async with shared(base) as case:
        buffer = bytearray(len(case.bytes))
        before = len(os.listdir("/proc/self/fd"))
        for session in list(case.server._sessions):
            session.close("the test wants it")
        assert await came_true(lambda: case.node.suspect)
        assert not case.node.read_now(case.span, case.landing(buffer))
        assert await came_true(lambda: not case.node.suspect)
        assert case.node.read_now(case.span, case.landing(buffer))
        assert buffer == case.bytes
        assert await came_true(lambda: len(os.listdir("/proc/self/fd")) <= before)


def opened(path: Path) -> tuple[str, SlabPlace]:
    """The path of a node's slab, and what its server says of it."""
    io, directory = SystemIo(), str(path / "node")
    config = DirectoryNode.create(io, directory, PLACE, NODE_ID, 8 * MIB)
    file = f"{directory}/slabs/slab"
    slab = Slab.open(io, file, bytes.fromhex(NODE_ID), config.plan.extent_bytes, config.plan.extents)
    place = place_of(slab)
    slab.close()
    return file, place


def test_a_copy_of_the_slab_at_the_same_path_is_another_file(tmp_path: Path) -> None:
    file, place = opened(tmp_path)
    mine = SharedSlab.open(SystemIo(), place, NODE_ID)
    assert mine is not None
    mine.close()
    shutil.copy(file, f"{file}.copy")
    os.replace(f"{file}.copy", file)
    assert SharedSlab.open(SystemIo(), place, NODE_ID) is None


def test_a_slab_that_this_process_may_not_open_is_left_to_the_server(tmp_path: Path) -> None:
    file, place = opened(tmp_path)
    os.rename(file, f"{file}.elsewhere")
    assert SharedSlab.open(SystemIo(), place, NODE_ID) is None
    os.symlink(f"{file}.elsewhere", file)
    assert SharedSlab.open(SystemIo(), place, NODE_ID) is None
