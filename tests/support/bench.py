"""Twelve memory twins behind gates, and the writer over them: what the tests of the write path stand on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import pytest

from efs import pieces
from efs.clock import Clock, Deadline, SystemClock
from efs.codec import Codec, Shards
from efs.contract import Node
from efs.health import Health
from efs.limits import PUT_BUDGET_BYTES, WRITE_STAGING_BYTES
from efs.metrics import CounterFile
from efs.shape import BlockShape
from efs.types import PutReport
from efs.writer import Writer
from tests.support.blocks import TINY, Blocks, readable
from tests.support.gatednode import GatedNode
from tests.support.memorynode import MemoryNode


@dataclass(slots=True)
class Bench:
    """See the module docstring. `nodes[i]` is the gate in front of `twins[i]`."""

    clock: Clock
    twins: list[MemoryNode]
    nodes: list[GatedNode]
    health: Health
    counters: CounterFile
    writer: Writer

    async def put(self, blocks: Blocks, deadline_ms: float = 5_000) -> PutReport:
        deadline = Deadline.after_ms(self.clock, deadline_ms)
        return await self.writer.put(blocks.items, blocks.shape, blocks.data, deadline)

    def counts(self, *names: str) -> tuple[int, ...]:
        return tuple(self.counters.get(name) for name in names)

    def records(self, key: bytes) -> int:
        """Records under a key on all nodes."""
        return sum(len(twin.records.get(key, {})) for twin in self.twins)

    def assert_nothing_held(self) -> None:
        """No permit, claim or staging is left behind by calls that have returned."""
        assert self.writer.admission.free_bytes == PUT_BUDGET_BYTES
        assert self.writer.admission.waiting == 0
        assert self.writer.staging.budget.free_bytes == WRITE_STAGING_BYTES
        assert self.writer.staging.budget.waiting == 0
        assert not self.writer.writing


def make_bench(clock: Clock | None = None, absent: Sequence[int] = (), codec: Codec | None = None) -> Bench:
    """`absent` nodes are not there at all."""
    clock = clock or SystemClock()
    twins = [MemoryNode(index, clock) for index in range(12)]
    nodes = [GatedNode(twin) for twin in twins]
    present: list[Node | None] = [None if index in absent else node for index, node in enumerate(nodes)]
    health, counters = Health(present, clock), CounterFile.in_memory()
    writer = Writer(present, health, codec or Codec(), counters, clock)
    return Bench(clock, twins, nodes, health, counters, writer)


class SpyCodec(Codec):
    """Counts encoded rows and may do something before each call."""

    def __init__(self, before: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.rows = 0
        self.before = before

    def encode(self, data: Sequence[Shards], parity: Sequence[Shards]) -> None:
        self.before()
        self.rows += len(data[0])
        super().encode(data, parity)


def small_pieces(monkeypatch: pytest.MonkeyPatch, blocks: int, shape: BlockShape = TINY) -> None:
    """Pieces of this many blocks, a turn for others after each block."""
    monkeypatch.setattr(pieces, "PUT_PIECE_BYTES", blocks * shape.block_bytes)
    monkeypatch.setattr(pieces, "PUT_CHUNK_BYTES", 2 * shape.block_bytes)
    monkeypatch.setattr(pieces, "PUT_SLICE_BYTES", shape.block_bytes)


def assert_readable(bench: Bench, blocks: Blocks, at: Sequence[int] | None = None) -> None:
    for place in at if at is not None else range(len(blocks.keys)):
        assert blocks.block(place) in readable(bench.twins, blocks.keys[place]).values()
