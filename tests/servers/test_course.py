"""A seeded course of puts and fetches by two clients while servers are killed, stopped, started and cut off: never a
wrong byte, never a call beyond its deadline, and with at most two servers away every acknowledged block."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial

import numpy as np
import pytest

from efs.clusterfs import open_cluster
from efs.groups import GroupedFileSystem
from efs.shape import BlockShape
from tests.support.blocks import Blocks, make_blocks
from tests.support.servers import ServedCluster
from tests.support.waiting import LATE_S, came_true

SHAPE = BlockShape(20_480, (4_096, 4_096, 12_288))
BLOCKS = 32
STEPS = int(os.environ.get("COURSE_STEPS", "60"))
SEED = int(os.environ.get("COURSE_SEED", "20240705"))
DEADLINE_MS = 5_000.0
MOST_BATCHES = 40
LOOSE = (9, 10, 11)
"""Nodes with a server of their own."""


class Course:
    """What is stored by acknowledgement, and which servers are away."""

    def __init__(self, cluster: ServedCluster, clients: list[GroupedFileSystem], source: random.Random) -> None:
        self.cluster = cluster
        self.clients = clients
        self.source = source
        self.batches: list[tuple[Blocks, bool]] = []
        self.away: dict[int, str] = {}
        self.faults = self.hits = self.misses = 0

    def sees(self, node: int) -> bool:
        """Whether every client uses a node."""
        return all(node in client.groups[0].health.readable() for client in self.clients)

    async def bring_back(self, node: int) -> None:
        process = self.cluster.of(node)
        if self.away.pop(node) == "stopped":
            process.signal(signal.SIGCONT)
        else:
            process.start()
        assert await came_true(partial(self.sees, node), 40)

    async def disturb(self) -> None:
        """Bring one server away, or, more often, one that is away back."""
        back = self.away and self.source.random() < 0.7
        node = self.source.choice(sorted(self.away) if back else LOOSE)
        process = self.cluster.of(node)
        if node in self.away:
            await self.bring_back(node)
        elif self.source.random() < 0.5:
            process.signal(signal.SIGSTOP)
            self.away[node] = "stopped"
            self.faults += 1
        else:
            process.kill()
            self.away[node] = "killed"
            self.faults += 1

    async def put(self) -> None:
        blocks = make_blocks(BLOCKS, seed=1_000 + len(self.batches), shape=SHAPE, run=16)
        began = time.monotonic()
        report = await self.source.choice(self.clients).put(blocks.items, SHAPE, blocks.data, deadline_ms=DEADLINE_MS)
        assert time.monotonic() - began < DEADLINE_MS / 1000 + LATE_S
        self.batches.append((blocks, report.acked + report.already == BLOCKS and report.at_risk == 0))

    async def fetch(self, blocks: Blocks, whole: bool) -> None:
        """Compare what is delivered; `whole`: it is on twelve nodes, of which two may be away."""
        out = np.full(BLOCKS * SHAPE.block_bytes, 0xEE, np.uint8)
        began = time.monotonic()
        report = await self.source.choice(self.clients).get_into(blocks.keys, SHAPE, out, deadline_ms=DEADLINE_MS)
        assert time.monotonic() - began < DEADLINE_MS / 1000 + LATE_S
        start = 0
        for offset, size in zip(SHAPE.segment_offsets, SHAPE.segment_bytes, strict=True):
            segment = out[start : start + BLOCKS * size].reshape(BLOCKS, size)
            start += BLOCKS * size
            wrong = (segment != blocks.data[:, offset : offset + size]).any(axis=1) & np.array(report.ok)
            assert not wrong.any()
        if whole and len(self.away) <= 2:
            assert report.blocks == BLOCKS
        self.hits += sum(report.ok)
        self.misses += BLOCKS - sum(report.ok)

    async def step(self) -> None:
        what = self.source.random()
        if what < 0.25:
            await self.disturb()
        elif what < 0.55 and len(self.batches) < MOST_BATCHES:
            await self.put()
        elif self.batches:
            await self.fetch(*self.source.choice(self.batches))


@pytest.mark.chaos
async def test_a_course_of_servers_that_come_and_go_never_gives_a_wrong_byte(cluster: ServedCluster) -> None:
    print(f"seed {SEED}, {STEPS} steps")
    clients = [await open_cluster(cluster.file) for _ in range(2)]
    course = Course(cluster, clients, random.Random(SEED))
    assert await came_true(lambda: all(course.sees(node) for node in range(12)))
    await course.put()
    for _ in range(STEPS):
        await course.step()
    for node in list(course.away):
        await course.bring_back(node)
    for blocks, whole in course.batches:
        await course.fetch(blocks, whole)
    print(f"{course.faults} faults, {course.hits} hits, {course.misses} misses")
    assert course.faults >= 5
    assert course.hits > BLOCKS * 10
    for client in clients:
        await client.close()
