"""Spares beside a cluster of real server processes, and what a node directory holds, to compare."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from efs.clock import Deadline, SystemClock
from efs.contract import Landing, Span, Stride
from efs.limits import STRIPE_SHARDS
from efs.node import DirectoryNode
from efs.nodedir import read_config
from efs.osio import SystemIo
from efs.shape import BlockShape
from tests.support.cli import Outcome, run_process
from tests.support.servers import EXTENT_BYTES, NODE_CAPACITY_BYTES, ServedCluster, ServerProcess

CALL_MS = 20_000
SIZES = ("--capacity", str(STRIPE_SHARDS * NODE_CAPACITY_BYTES), "--extent-bytes", str(EXTENT_BYTES))


class AddedSpare:
    """A spare that a command has listed, and its server."""

    def __init__(self, where: str, base: Path, name: str, *more: str, sizes: Sequence[str] = SIZES) -> None:
        """Make and list it; its server does not run yet."""
        self.path, self.address = str(base / "spares" / name), f"unix:{base}/{name}.s"
        self.where = where
        self.sizes = sizes
        self.node_id: str = self.list().document()["node_id"]
        self.server = ServerProcess([self.path], self.address, *more)

    def list(self) -> Outcome:
        return run_process("--json", "cluster", "add-spare", self.where, "--directory", self.path, "--address",
                           self.address, *self.sizes)


@contextmanager
def spares(cluster: ServedCluster, where: str, *names: str, more: tuple[str, ...] = ()) -> Iterator[list[AddedSpare]]:
    """Spares of a cluster with their servers running."""
    made: list[AddedSpare] = []
    try:
        for name in names:
            made.append(AddedSpare(where, cluster.root.parent, name, *more))
            made[-1].server.start()
        yield made
    finally:
        for spare in made:
            if spare.server.running:
                spare.server.kill()


def replace(where: str, number: int, *words: str) -> Outcome:
    """`replace-node` with a spare."""
    return run_process("--json", "--store", where, "cluster", "replace-node", str(number), "--yes", *words)


async def shards_in(path: str, shape: BlockShape) -> dict[tuple[bytes, bytes], tuple[bytes, bytes]]:
    """Header and payload of every record of a node directory that nobody owns, by key and digest."""
    clock = SystemClock()
    node = await DirectoryNode.open(path, read_config(SystemIo(), path).place, SystemIo(), clock)
    try:
        soon = Deadline.after_ms(clock, CALL_MS)
        records = (await node.list(None, 16_384, soon)).records
        held: dict[tuple[bytes, bytes], tuple[bytes, bytes]] = {}
        for record in records:
            headers = await node.headers(np.array([record.location]), np.array([record.generation], np.uint64),
                                         record.segments, soon)
            payload = bytearray(shape.shard_bytes)
            landing = Landing(memoryview(payload), (Stride(0, shape.shard_bytes, 0, shape.shard_bytes),))
            await node.read([(Span(record.location, 1, shape.shard_bytes, shape.slot_bytes), landing)], lambda _: None,
                            soon)
            held[record.key, record.digest] = headers.tobytes(), bytes(payload)
        return held
    finally:
        await node.close()
