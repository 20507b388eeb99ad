"""A node server over a memory twin in this process, and what it takes to connect to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from efs.clock import Clock, Deadline, SystemClock
from efs.endpoint import Endpoint, parse_endpoint
from efs.handshake import Role, Tokens
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.osio import SystemIo
from efs.remote import RemoteNode
from efs.server import NodeServer
from efs.session import ServedNode
from tests.support.gatednode import GatedNode
from tests.support.memorynode import MemoryNode
from tests.support.rawclient import hello_for
from tests.support.records import make_records
from tests.support.servers import short_directory

NODE_INDEX = 5
CLUSTER_ID = "c" * 32
NODE_ID = "d" * 32
HELLO = hello_for(NODE_INDEX)


@dataclass(slots=True)
class ServedMemory:
    """`node` is what is served, a gate around `twin`."""

    server: NodeServer
    endpoint: Endpoint
    node: GatedNode
    twin: MemoryNode
    counters: CounterFile
    clock: Clock

    def place(self, role: Role = Role.DATA, tokens: Tokens | None = None) -> RemotePlace:
        return RemotePlace(self.endpoint, CLUSTER_ID, NODE_ID, NODE_INDEX, role, tokens or Tokens())

    async def connect(self, role: Role = Role.DATA, tokens: Tokens | None = None) -> RemoteNode:
        return await self.connect_to(self.place(role, tokens))

    async def connect_to(self, place: RemotePlace) -> RemoteNode:
        return await RemoteNode.open(place, self.clock, CounterFile.in_memory(), 20_000)


@asynccontextmanager
async def served_memory(tokens: Tokens | None = None, address: str = "unix:s",
                        clock: Clock | None = None) -> AsyncIterator[ServedMemory]:
    clock = clock or SystemClock()
    twin = MemoryNode(NODE_INDEX, clock)
    twin.warm = False
    node, counters = GatedNode(twin), CounterFile.in_memory()
    with short_directory() as base:
        server = NodeServer([ServedNode(node, CLUSTER_ID, NODE_ID, "process", counters)], SystemIo(), clock, tokens)
        endpoint = server.listen(parse_endpoint(address, str(base)))
        yield ServedMemory(server, endpoint, node, twin, counters, clock)
        await server.close()
        assert server.connections == 0
        # What is written still counts, and the gate remembers what it was given.
        await node.all_done()
        node.batches.clear()
        assert server.intake.held_bytes == 0


async def assert_serves(served: ServedMemory) -> None:
    """A good client finds the server working."""
    node = await served.connect()
    records = make_records(3, NODE_INDEX, seed=77)
    outcome = await node.put(records.batch(), soon(served))
    assert outcome.stored.all()
    assert (await node.info(soon(served))).records >= 3
    await node.close()


def soon(served: ServedMemory) -> Deadline:
    return Deadline.after_ms(served.clock, 20_000)
