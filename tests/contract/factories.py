"""Every implementation of the node protocol, as the contract suite opens it.

A factory is an async context manager: it makes an empty node with index NODE_INDEX on a clock, in a directory of its
own, and closes it. To put another implementation under the contract, add it to FACTORIES.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

from efs.contract import Node
from efs.limits import MIB
from efs.metrics import CounterFile
from efs.node import DirectoryNode, Durability
from efs.nodedir import NodePlace
from efs.osio import SystemIo
from tests.support.clock import FakeClock
from tests.support.memorynode import MemoryNode

NODE_INDEX = 5
PLACE = NodePlace("c" * 32, 0, NODE_INDEX)

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


def directory(mapped: bool, durability: Durability) -> Factory:
    @asynccontextmanager
    async def make(path: Path, clock: FakeClock) -> AsyncIterator[Node]:
        io = SystemIo()
        place = str(path / "node")
        DirectoryNode.create(io, place, PLACE, "d" * 32, 8 * MIB, boot_id="boot-1")
        node = await DirectoryNode.open(place, PLACE, io, clock, counters=CounterFile.in_memory(), mapped=mapped,
                                        durability=durability, boot_id="boot-1")
        yield node
        await node.close()

    return make


FACTORIES: dict[str, Factory] = {
    "memory": memory,
    "memory-cold": memory_cold,
    "directory": directory(mapped=False, durability="process"),
    "directory-mapped": directory(mapped=True, durability="process"),
    "directory-power": directory(mapped=False, durability="power"),
}
