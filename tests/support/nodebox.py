"""A directory node in a temporary place, with everything around it that a test wants to turn: disk, clock, boot id."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from efs.clock import Clock, Deadline
from efs.contract import Landing, NodeTable, Span, Stride
from efs.extent import Geometry, ranges_of
from efs.gc import Watermarks
from efs.limits import MIB
from efs.metrics import CounterFile
from efs.node import DirectoryNode, Durability
from efs.nodedir import NodePlace, slab_path
from efs.osio import SystemIo
from efs.shape import BlockShape
from tests.support.clock import FakeClock
from tests.support.faultio import FaultIo
from tests.support.records import Records

NODE_INDEX = 5
PLACE = NodePlace("c" * 32, 0, NODE_INDEX)
NODE_ID = "d" * 32


class NodeBox:
    """Makes a node at `path / "node"` and opens it as often as asked. `io` and `counters` are those of the last
    opening."""

    def __init__(self, path: Path, *, capacity_bytes: int = 8 * MIB, extent_bytes: int | None = None,
                 index_bytes: int | None = None, durability: Durability = "process", mapped: bool = False,
                 clock: Clock | None = None, node_id: str = NODE_ID) -> None:
        self.path = str(path / "node")
        self.clock = clock or FakeClock()
        self.durability = durability
        self.mapped = mapped
        self.boot_id = "boot-1"
        self.marks: Watermarks | None = None
        self.io = FaultIo()
        self.counters = CounterFile.in_memory()
        self.config = DirectoryNode.create(SystemIo(), self.path, PLACE, node_id, capacity_bytes,
                                           extent_bytes=extent_bytes, index_bytes=index_bytes, boot_id=self.boot_id)

    @classmethod
    def at(cls, path: Path, durability: Durability = "process", boot_id: str = "boot-1") -> NodeBox:
        """A box around the node that is at `path / "node"` already."""
        box = cls.__new__(cls)
        box.path, box.clock, box.boot_id = str(path / "node"), FakeClock(), boot_id
        box.durability, box.mapped, box.marks = durability, False, None
        return box

    async def open(self, place: NodePlace = PLACE, io: FaultIo | None = None) -> DirectoryNode:
        self.io = FaultIo() if io is None else io
        self.counters = CounterFile.in_memory()
        return await DirectoryNode.open(self.path, place, self.io, self.clock, counters=self.counters,
                                        mapped=self.mapped, durability=self.durability, marks=self.marks,
                                        boot_id=self.boot_id)

    def soon(self) -> Deadline:
        return Deadline.after_ms(self.clock, 20_000)

    @property
    def slab(self) -> str:
        return slab_path(self.path)

    def du(self) -> int:
        """Bytes of the directory and everything in it, as du counts them."""
        total = os.lstat(self.path).st_blocks * 512
        for directory, names, files in os.walk(self.path):
            for name in (*names, *files):
                try:
                    total += os.lstat(os.path.join(directory, name)).st_blocks * 512
                except FileNotFoundError:
                    continue  # A temporary file that was renamed meanwhile.
        return total

    # -- shorthands

    async def store(self, node: DirectoryNode, records: Records, stamp: int = 0) -> NodeTable:
        """Put everything and insist that it was stored; returns where it lies."""
        outcome = await node.put(records.batch(stamp), self.soon())
        assert outcome.stored.all(), outcome.why
        return await node.look_up(records.keys, self.soon())

    async def payload(self, node: DirectoryNode, locations: NDArray[np.int64], shape: BlockShape) -> bytes:
        """Payload at these locations, through `read`."""
        buffer = bytearray(len(locations) * shape.shard_bytes)
        await node.read(self.spans(locations, shape, buffer), lambda _: None, self.soon())
        return bytes(buffer)

    def spans(self, locations: NDArray[np.int64], shape: BlockShape, buffer: bytearray) -> list[tuple[Span, Landing]]:
        """Spans of these locations that land one shard after the other."""
        size = shape.shard_bytes
        return [(Span(location, count, size, shape.slot_bytes),
                 Landing(memoryview(buffer), (Stride(0, size, row * size, size),)))
                for row, location, count in ranges_of(locations)]

    async def holds(self, node: DirectoryNode, records: Records) -> NDArray[np.bool_]:
        """(n,) whether each record is there, with the right digest, header and payload. Wrong bytes fail the test."""
        table = await node.look_up(records.keys, self.soon())
        held = table.location >= 0
        rows = np.flatnonzero(held)
        headers = await node.headers(table.location[rows], table.generation[rows], len(records.shape.segment_bytes),
                                     self.soon())
        assert [digest.tobytes() for digest in table.digest[rows]] == [records.digests[row] for row in rows]
        assert (headers == records.headers[rows]).all()
        content = await self.payload(node, table.location[rows], records.shape)
        assert content == records.payload[rows].tobytes()
        return held


async def crash(node: DirectoryNode) -> None:
    """What a killed process leaves behind, in this process: files are closed, nothing is written or marked any more."""
    await node._background.close()
    for thread in (node._guard.reader, node._guard.writer):
        assert await thread.close(10), "a node that hangs can not be reopened in one process"
    node._guard.closed = True
    if node._stamp_timer is not None:
        node._stamp_timer.cancel()
    node._state.index.close()
    node._state.slab.close()
    node._lock.release()


def index_agrees(node: DirectoryNode) -> bool:
    """Whether index, allocator and tables name exactly the same records."""
    state = node._state
    entries = list(state.index.scan())
    for entry in entries:
        geometry = state.allocator.geometry(entry.location >> 20)
        assert geometry is not None
        row = state.slab.read_entries(geometry, entry.location, 1)[0]
        name = row["key"].tobytes() + row["digest"].tobytes()
        if name != entry.index_key or int(row["generation"]) != entry.generation:
            return False
    locations = np.array([entry.location for entry in entries], np.int64)
    live = bool(state.exists(locations).all()) and len(np.unique(locations)) == len(entries)
    state.allocator.audit()
    return live and state.allocator.live_slots == len(entries) and not state.owed_entries


def geometry_of(node: DirectoryNode, location: int) -> Geometry:
    """Geometry of the extent of a location that is in use."""
    geometry = node._state.allocator.geometry(location >> 20)
    assert geometry is not None
    return geometry


def change(path: str, position: int, data: bytes) -> None:
    """Overwrite bytes of a file behind the back of whoever has it open."""
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def flip(path: str, position: int) -> None:
    """Flip one bit of a file."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x08]))
