"""Every implementation of the node protocol, as the contract suite opens it.

A factory is an async context manager: it makes an empty node with index NODE_INDEX on a clock, in a directory of its
own, and closes it. To put another implementation under the contract, add it to FACTORIES.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from efs.contract import Node
from efs.endpoint import parse_endpoint
from efs.handshake import Role
from efs.limits import MIB
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.node import DirectoryNode, Durability
from efs.nodedir import NodePlace
from efs.osio import SystemIo
from efs.remote import RemoteNode
from efs.server import NodeServer
from efs.session import ServedNode
from tests.support.clock import FakeClock
from tests.support.memorynode import MemoryNode

NODE_INDEX = 5
PLACE = NodePlace("c" * 32, 0, NODE_INDEX)

NODE_ID = "d" * 32

Factory = Callable[[Path, FakeClock], AbstractAsyncContextManager[Node]]


@asynccontextmanager
async def memory(path: Path, clock: FakeClock) -> AsyncIterator[Node]:
    node = MemoryNode(NODE_INDEX, clock)
    yield node
    await node.close()


@asynccontextmanager
async def memory_cold(path: Path, clock: FakeClock) -> AsyncIterator[Node]:
    node = MemoryNode(NODE_INDEX, clock)
    node.warm = False
    yield node
    await node.close()


@asynccontextmanager
async def memory_streams(path: Path, clock: FakeClock) -> AsyncIterator[Node]:
    node = MemoryNode(NODE_INDEX, clock)
    node.warm, node.streams = False, True
    yield node
    await node.close()


def directory(mapped: bool, durability: Durability) -> Factory:
    @asynccontextmanager
    async def make(path: Path, clock: FakeClock) -> AsyncIterator[Node]:
        io = SystemIo()
        place = str(path / "node")
        DirectoryNode.create(io, place, PLACE, NODE_ID, 8 * MIB, boot_id="boot-1")
        node = await DirectoryNode.open(place, PLACE, io, clock, counters=CounterFile.in_memory(), mapped=mapped,
                                        durability=durability, boot_id="boot-1")
        yield node
        await node.close()

    return make


def server(address: str, shared: bool = False) -> Factory:
    """A directory behind a server, both in this process, and the node at it. shared: the node reads the slab itself."""
    @asynccontextmanager
    async def make(path: Path, clock: FakeClock) -> AsyncIterator[Node]:
        async with directory(mapped=address.startswith("unix"), durability="process")(path, clock) as inner:
            assert isinstance(inner, DirectoryNode)
            counters = CounterFile.in_memory()
            slab = inner.slab_place if shared else None
            served = ServedNode(inner, PLACE.cluster_id, NODE_ID, "process", counters, slab=slab)
            host = NodeServer([served], SystemIo(), clock)
            endpoint = host.listen(parse_endpoint(address, str(path)))
            place = RemotePlace(endpoint, PLACE.cluster_id, NODE_ID, NODE_INDEX, Role.OPERATOR)
            node = await RemoteNode.open(place, clock, CounterFile.in_memory(), 20_000)
            assert not node.suspect
            yield node
            await node.close()
            await host.close()
            assert host.intake.held_bytes == 0

    return make


FACTORIES: dict[str, Factory] = {
    "memory": memory,
    "memory-cold": memory_cold,
    "memory-streams": memory_streams,
    "directory": directory(mapped=False, durability="process"),
    "directory-mapped": directory(mapped=True, durability="process"),
    "directory-power": directory(mapped=False, durability="power"),
    "server-unix": server("unix:s"),
    "server-unix-shared": server("unix:s", shared=True),
    "server-tcp": server("tcp:127.0.0.1:0"),
}
