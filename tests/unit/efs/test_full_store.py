"""A store that is 95 % full and stays so: puts keep their deadlines, space keeps its limit (fault 30).

TURNOVERS in the environment says how many times the store is turned over, 10 by default: some hundred make minutes.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pytest

from efs.clock import Deadline, SystemClock, stamp_of
from efs.cluster import init_store, read_store_config
from efs.codec import Codec
from efs.contract import TOO_COLD
from efs.errors import NodeFull
from efs.fs import FileSystem
from efs.gc import Watermarks
from efs.limits import KIB, MAX_DEADLINE_MS, MIB, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import NodePlace
from efs.nodeview import tree_bytes
from efs.osio import SystemIo
from efs.shape import BlockShape
from tests.support.blocks import Blocks, make_blocks
from tests.support.nodebox import NODE_INDEX, NodeBox, crash, index_agrees
from tests.support.records import LARGE, SMALL, make_records

Outcome = TypeVar("Outcome")
TURNOVERS = int(os.environ.get("TURNOVERS", "10"))
NODE_BYTES = 4 * MIB
MARKS = Watermarks(low=0.93, high=0.95, reject=0.985)
SHAPES = (BlockShape(40_960, (10_240, 30_720)), BlockShape(12_000, (12_000,)))
WRITERS = 4
DEADLINE_MS = 3_000
MARGIN_MS = 100


@dataclass(slots=True)
class Probe:
    """Watches an open store: the loop's lag, by the moment in which it was seen, and the space of each node."""

    paths: list[str]
    lags: list[tuple[float, float]] = field(default_factory=list)
    highest: int = 0
    samples: int = 0

    async def run(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(0.005)
            now = time.monotonic()
            self.lags.append((now, now - before - 0.005))
            self.look()

    def look(self) -> None:
        self.highest = max(self.highest, *(tree_bytes(path) for path in self.paths))
        self.samples += 1

    def lag_ms(self, since: float, until: float) -> float:
        """The longest that the loop was late in a while: what a call may be late by without a fault of its own."""
        return 1000 * max((lag for seen, lag in self.lags if since <= seen <= until + 0.1), default=0.0)


@dataclass(slots=True)
class Tally:
    """What the writers have seen. newest: the last batch of each that was acknowledged as a whole."""

    acked: int = 0
    failed: int = 0
    stored_bytes: int = 0
    reasons: set[str] = field(default_factory=set)
    newest: dict[int, Blocks] = field(default_factory=dict)
    fullest: float = 0.0


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    init_store(SystemIo(), path, STRIPE_SHARDS * NODE_BYTES, node_paths=None, durability="process",
               extent_bytes=256 * KIB, index_bytes=None)
    return path


def node_paths(root: str) -> list[str]:
    return list(read_store_config(SystemIo(), root).node_paths)


@asynccontextmanager
async def opened(root: str, *, dies: bool = False) -> AsyncIterator[tuple[FileSystem, list[DirectoryNode]]]:
    """The store with watermarks that keep it at 95 %. dies: what it leaves is what a killed process leaves."""
    config, clock = read_store_config(SystemIo(), root), SystemClock()
    nodes = [await DirectoryNode.open(path, NodePlace(config.cluster_id, 0, index), SystemIo(), clock, marks=MARKS)
             for index, path in enumerate(config.node_paths)]
    filesystem = FileSystem(nodes, codec=Codec(), counters=CounterFile.in_memory(), clock=clock)
    yield filesystem, nodes
    for node in nodes if dies else ():
        await node._background.close()
        await crash(node)
    await filesystem.close()


async def write(filesystem: FileSystem, nodes: list[DirectoryNode], tally: Tally, probe: Probe, number: int,
                most_bytes: int, opening: int) -> None:
    """One writer: puts of both sizes, until all writers together have stored so many bytes."""
    source = random.Random(number)
    turn = 0
    while tally.stored_bytes < most_bytes:
        turn += 1
        shape = SHAPES[turn % 2]
        blocks = make_blocks(source.randrange(8, 40), seed=1_000_000 * number + 100_000 * opening + turn, shape=shape)
        started = time.monotonic()
        report = await filesystem.put(blocks.items, shape, blocks.data, deadline_ms=DEADLINE_MS)
        ended = time.monotonic()
        late_ms = 1000 * (ended - started) - DEADLINE_MS
        assert late_ms <= MARGIN_MS + probe.lag_ms(started, ended), "a put stood still"
        assert report.acked + report.failed == len(blocks.keys)
        assert (report.why is None) == (report.failed == 0), "a refusal without a reason"
        tally.acked += report.acked
        tally.failed += report.failed
        tally.stored_bytes += report.acked * STRIPE_SHARDS * shape.slot_bytes
        if report.why is not None:
            tally.reasons.add(report.why)
        if not report.failed:
            tally.newest[number] = blocks
        tally.fullest = max(tally.fullest, *(node._fill.used_bytes / node._fill.total_bytes for node in nodes))


async def hits(filesystem: FileSystem, blocks: Blocks) -> int:
    """How many of the blocks a fetch delivers; their bytes are checked."""
    count, shape = len(blocks.keys), blocks.shape
    out = bytearray(count * shape.block_bytes)
    report = await filesystem.get_into(blocks.keys, shape, out, deadline_ms=20_000)
    for at, ok in enumerate(report.ok):
        got = b"".join(out[count * offset + at * size : count * offset + (at + 1) * size]
                       for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True))
        assert not ok or got == blocks.block(at)
    return sum(report.ok)


async def turn_over(root: str, turnovers: float, *, opening: int = 0, dies: bool = False) -> tuple[Tally, Probe, int]:
    """Write the store full and over; how many records were evicted."""
    probe, tally = Probe(node_paths(root)), Tally()
    probe.look()
    async with opened(root, dies=dies) as (filesystem, nodes):
        probing = asyncio.create_task(probe.run())
        capacity = sum(node._fill.total_bytes for node in nodes)
        writers = (write(filesystem, nodes, tally, probe, number, int(turnovers * capacity), opening)
                   for number in range(WRITERS))
        await asyncio.gather(*writers)
        for blocks in tally.newest.values():
            assert await hits(filesystem, blocks) > 0, "nothing of the newest put is found"
        for node in nodes:
            await node.settled()
            node.audit()
        probing.cancel()
        evicted = sum(node._guard.counters.get("node_evicted") for node in nodes)
    probe.look()
    return tally, probe, evicted


@pytest.mark.slow
@pytest.mark.timeout(120 + 30 * TURNOVERS)
async def test_puts_at_95_percent_full_never_stand_still_and_space_keeps_its_limit(root: str) -> None:
    tally, probe, evicted = await turn_over(root, TURNOVERS)
    longest_lag_ms = 1000 * max(lag for _, lag in probe.lags)
    print(f"{tally.acked} blocks stored, {tally.failed} refused {sorted(tally.reasons)}, {evicted} records evicted, "
          f"{probe.samples} samples of space, longest lag of the loop {longest_lag_ms:.0f} ms")
    assert probe.highest <= NODE_BYTES
    assert probe.samples > 50
    assert 0.95 <= tally.fullest <= 1.0, "the store was not full"
    assert len(tally.newest) == WRITERS
    assert evicted > 1_000 * (TURNOVERS - 1)
    assert tally.failed <= 0.05 * tally.acked, tally.reasons


@pytest.mark.slow
@pytest.mark.parametrize("dies", [False, True])
async def test_the_hard_limit_holds_right_after_a_restart_with_several_slot_sizes(root: str, dies: bool) -> None:
    for turn in range(3):
        tally, probe, _ = await turn_over(root, 1.5 if turn == 0 else 0.3, opening=turn, dies=dies)
        assert probe.highest <= NODE_BYTES, f"opening {turn}"
        assert tally.fullest >= 0.93, "the store was not full"
    async with opened(root) as (filesystem, nodes):
        probe = Probe(node_paths(root))
        probe.look()
        assert probe.highest <= NODE_BYTES
        assert {use.slot_class.slot_bytes for node in nodes for use in node._state.allocator.use()} == {
            shape.slot_bytes for shape in SHAPES}
        found = [await hits(filesystem, blocks) for blocks in tally.newest.values()]
        assert min(found) > 0


# -- What cannot be had is not waited for ----------------------------------------------------------------------------


async def in_half_the_time(put: Awaitable[Outcome]) -> Outcome:
    """The outcome of a put with the longest deadline, which it must be far from needing."""
    started = time.monotonic()
    outcome = await put
    assert time.monotonic() - started < MAX_DEADLINE_MS / 1000 / 2, "it waited for what could not help it"
    return outcome


@pytest.mark.parametrize("at_once", [1, 3])
@pytest.mark.parametrize("held", [0, 500])
async def test_a_put_larger_than_a_node_does_not_wait_for_an_eviction_that_cannot_help(tmp_path: Path, held: int,
                                                                                       at_once: int) -> None:
    """Alone, and beside others of which each has slots in flight for a while."""
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB, clock=SystemClock())
    node = await box.open()
    if held:
        await node.put(make_records(held, NODE_INDEX, seed=99, shape=LARGE).batch(), box.soon())
        await node.put(make_records(held, NODE_INDEX, seed=98, shape=SMALL).batch(), box.soon())
    batches = [make_records(1_000, NODE_INDEX, seed=seed, shape=LARGE) for seed in range(at_once)]
    deadline = Deadline.after_ms(box.clock, MAX_DEADLINE_MS)
    now = stamp_of(box.clock.wall())
    outcomes = await in_half_the_time(asyncio.gather(*(node.put(each.batch(now), deadline) for each in batches)))
    for outcome in outcomes:
        assert 0 < outcome.stored.sum() < 1_000
        assert outcome.why is not None
    await node.settled()
    assert index_agrees(node)
    assert box.du() <= 4 * MIB
    await node.close()


async def test_a_put_of_what_is_colder_than_all_that_is_held_is_refused_at_once(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 * MIB, clock=SystemClock())
    node = await box.open()
    now = stamp_of(box.clock.wall())
    for seed in range(3):
        await node.put(make_records(250, NODE_INDEX, seed=seed, shape=LARGE).batch(now), box.soon())
    cold = make_records(600, NODE_INDEX, seed=9, shape=LARGE)
    deadline = Deadline.after_ms(box.clock, MAX_DEADLINE_MS)
    started = time.monotonic()
    try:
        outcome = await node.put(cold.batch(now - 1_000), deadline)
        why = outcome.why
        # Where the collector was faster it has left some room, which they got without evicting anything.
        assert outcome.stored.sum() < 150
    except NodeFull as error:
        why = str(error)
    assert why is not None
    assert TOO_COLD in why
    assert time.monotonic() - started < MAX_DEADLINE_MS / 1000 / 2, "it waited for what could not help it"
    await node.close()


async def test_a_put_larger_than_the_whole_store_returns_by_its_deadline_with_a_reason(root: str) -> None:
    filesystem = await FileSystem.open(root, maintain=False)
    blocks = make_blocks(1_500, shape=SHAPES[0])
    assert blocks.data.nbytes > STRIPE_SHARDS * NODE_BYTES
    report = await in_half_the_time(filesystem.put(blocks.items, SHAPES[0], blocks.data, deadline_ms=MAX_DEADLINE_MS))
    assert report.acked > 0
    assert report.failed > 0
    assert report.why is not None
    assert all(tree_bytes(path) <= NODE_BYTES for path in node_paths(root))
    later = make_blocks(20, seed=2, shape=SHAPES[1])
    assert (await filesystem.put(later.items, SHAPES[1], later.data, deadline_ms=DEADLINE_MS)).acked == 20
    await filesystem.close()
