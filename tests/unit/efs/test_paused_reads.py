"""A fetch that is paused behind its index look-up while a full store evicts what it looked up and uses the slots again
(fault 35): the right bytes or a miss, and nothing that is sound is blamed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.clock import Deadline, SystemClock, stamp_of
from efs.codec import Codec
from efs.contract import Landing, Span
from efs.fs import FileSystem
from efs.joining import JoiningNode
from efs.limits import DATA_SHARDS, MIB, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import NodePlace
from efs.osio import SystemIo
from tests.support.blocks import Blocks, make_blocks
from tests.support.records import LARGE

CAPACITY = 4 * MIB
DEADLINE_MS = 60_000


class PausingNode(JoiningNode):
    """Reads of payload wait while `gate` is shut; everything else goes on."""

    def __init__(self, inner: DirectoryNode) -> None:
        super().__init__(inner)
        self.join()
        self.gate = asyncio.Event()
        self.gate.set()
        self.paused = 0

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        return super().views_now(spans) if self.gate.is_set() else None

    def read_now(self, span: Span, landing: Landing) -> bool:
        return self.gate.is_set() and super().read_now(span, landing)

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        self.paused += not self.gate.is_set()
        await self.gate.wait()
        await super().read(spans, landed, deadline)


async def open_nodes(path: Path) -> list[DirectoryNode]:
    nodes = []
    for index in range(STRIPE_SHARDS):
        place = NodePlace("c" * 32, 0, index)
        DirectoryNode.create(SystemIo(), str(path / str(index)), place, f"{index:032x}", CAPACITY)
        nodes.append(await DirectoryNode.open(str(path / str(index)), place, SystemIo(), SystemClock()))
    return nodes


async def put(filesystem: FileSystem, blocks: Blocks) -> int:
    report = await filesystem.put(blocks.items, LARGE, blocks.data, deadline_ms=DEADLINE_MS)
    return report.acked


def check(blocks: Blocks, out: bytearray, ok: Sequence[bool]) -> None:
    """Every block that is ok has the bytes that were put."""
    count = len(blocks.keys)
    for at in np.flatnonzero(ok).tolist():
        got = b"".join(out[count * offset + at * size : count * offset + (at + 1) * size]
                       for offset, size in zip(LARGE.segment_offsets, LARGE.segment_bytes, strict=True))
        assert got == blocks.block(at)


@pytest.mark.parametrize("count", [1, 40])
async def test_a_fetch_paused_while_its_slots_are_used_again_gives_right_bytes_or_a_miss(tmp_path: Path,
                                                                                         count: int) -> None:
    inner = await open_nodes(tmp_path)
    nodes = [PausingNode(node) for node in inner]
    counters = CounterFile.in_memory()
    filesystem = FileSystem(nodes, codec=Codec(), counters=counters, clock=SystemClock(), maintain=False)
    old = make_blocks(count, seed=1, shape=LARGE)
    assert await put(filesystem, old) == count
    for node in inner:
        # As if it had been put a while ago: it is the first to go.
        table = await node.look_up(old.keys, Deadline.after_ms(SystemClock(), DEADLINE_MS))
        node._state.stamps.set(table.location, stamp_of(SystemClock().wall()) - 5_000)
    places = {node.node_index: (await node.look_up(old.keys, Deadline.after_ms(SystemClock(), DEADLINE_MS))).location
              for node in inner}
    for pausing in nodes:
        pausing.gate.clear()
    out = bytearray(old.data.nbytes)
    fetching = asyncio.create_task(filesystem.get_into(old.keys, LARGE, out, deadline_ms=DEADLINE_MS))
    while sum(node.paused > 0 for node in nodes) < DATA_SHARDS:
        await asyncio.sleep(0.001)
        assert not fetching.done(), "the fetch was not paused"
    # A use of this fetch must not keep them: the clock has not moved, so they are made old again.
    for node in inner:
        node._state.stamps.set(places[node.node_index], stamp_of(SystemClock().wall()) - 5_000)
    newest = [make_blocks(40, seed=100 + turn, shape=LARGE) for turn in range(40)]
    for blocks in newest:
        await put(filesystem, blocks)
    reused = sum(int(node._state.exists(places[node.node_index]).sum()) for node in inner)
    gone = [int((await node.look_up(old.keys, Deadline.after_ms(SystemClock(), DEADLINE_MS))).location.max())
            for node in inner]
    assert max(gone) < 0, "what is being read was not evicted"
    assert reused >= count * DATA_SHARDS // 2, "its slots were not used again"
    for pausing in nodes:
        pausing.gate.set()
    report = await fetching
    check(old, out, report.ok)
    assert report.blocks == 0, "no node has them any more"
    assert report.raced > 0
    assert report.corrupt == 0, "a slot that was used again is no damage"
    await filesystem.mender.settled()
    for name in ("node_verify_failed", "node_dropped"):
        assert sum(node._guard.counters.get(name) for node in inner) == 0, "a new record was blamed for an old one"
    last = newest[-1]
    got = bytearray(last.data.nbytes)
    after = await filesystem.get_into(last.keys, LARGE, got, deadline_ms=DEADLINE_MS)
    check(last, got, after.ok)
    assert after.blocks > 0
    assert after.corrupt == 0
    await filesystem.close()
