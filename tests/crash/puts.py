"""A process that puts and is killed on the way, and what is said of its blocks afterwards.

The process writes what it saw to a file, line by line, so that nothing of it is lost when it dies.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Sequence
from pathlib import Path

from efs.fs import FileSystem
from efs.types import GetReport
from tests.support.blocks import Blocks, make_blocks
from tests.support.faultio import FaultIo

DEADLINE_MS = 20_000
BLOCKS_PER_PUT = 2


def blocks_of(number: int) -> Blocks:
    """The blocks of the put with this number."""
    return make_blocks(BLOCKS_PER_PUT, seed=1_000 + number, run=1)


def say(log: str, **values: object) -> None:
    """Append one line to a log; a kill right after the call does not lose it."""
    fd = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(fd, json.dumps(values).encode() + b"\n")
    os.close(fd)


def heard(log: str) -> list[dict[str, object]]:
    if not os.path.exists(log):
        return []
    return [json.loads(line) for line in Path(log).read_text().splitlines()]


def put_and_die(root: str, log: str, number: int, kill_after: int, torn_bytes: int) -> None:
    """Open, put the blocks of `number`, and be killed at operation `kill_after` of the put (0: not at all); if that is
    a write, after `torn_bytes` of it."""

    async def run() -> None:
        io = FaultIo()
        filesystem = await FileSystem.open(root, io=io)
        blocks = blocks_of(number)
        before = io.operations
        if kill_after:
            io.kill_at(before + kill_after, torn_bytes)
        report = await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=DEADLINE_MS)
        after = io.operations
        say(log, acked=report.acked, already=report.already, failed=report.failed)
        say(log, names=[entry.name for entry in io.log[before:after]])
        await filesystem.close()

    asyncio.run(run())


async def read(filesystem: FileSystem, numbers: Sequence[int]) -> tuple[list[bool], GetReport]:
    """Fetch the blocks of some puts in one call: whether each block's bytes are right, and the report."""
    every = [blocks_of(number) for number in numbers]
    keys = [key for blocks in every for key in blocks.keys]
    shape = every[0].shape
    out = bytearray(len(keys) * shape.block_bytes)
    report = await filesystem.get_into(keys, shape, out, deadline_ms=DEADLINE_MS)
    right = []
    wanted = [blocks.block(at) for blocks in every for at in range(len(blocks.keys))]
    for at, block in enumerate(wanted):
        got = b"".join(out[len(keys) * offset + at * size : len(keys) * offset + (at + 1) * size]
                       for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True))
        right.append(got == block)
    return right, report
