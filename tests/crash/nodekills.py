"""One life of a directory node, and a program that kills it at every numbered operation of the disk.

`python -m tests.crash.nodekills BASE` counts the operations of an undisturbed life, then lives it again for each number
and each length of a torn write, in a process of its own that SIGKILLs itself there. Directory BASE/N-T holds what is
left: the node, and a file `acked` with a line for each step that had returned. Prints a line `N T signal` for each.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from efs.limits import MIB
from tests.support.nodebox import NODE_INDEX, NodeBox
from tests.support.records import LARGE, Records, make_records

CAPACITY_BYTES = 3 * MIB
TORN_BYTES = (0, 1_000)
COLD = make_records(120, NODE_INDEX, seed=1, shape=LARGE)
"""What the eviction of this life takes from."""
LARGER = make_records(40, NODE_INDEX, seed=2, shape=LARGE)
SMALLER = make_records(100, NODE_INDEX, seed=3)
LATER = make_records(120, NODE_INDEX, seed=4, shape=LARGE)
DROPPED = 10
"""The first rows of LARGER are dropped, and stored again in the end."""
STEPS = ("cold", "larger", "smaller", "drop", "later", "again", "closed")


async def live(path: Path, kill_at: int | None, torn_bytes: int) -> list[str]:
    """Live once; returns the names of the operations."""
    box = NodeBox(path, capacity_bytes=CAPACITY_BYTES)
    acked = os.open(path / "acked", os.O_WRONLY | os.O_CREAT)

    def ack(step: str) -> None:
        os.write(acked, step.encode() + b"\n")

    if kill_at is not None:
        box.io.kill_at(kill_at, torn_bytes)
    node = await box.open(io=box.io)

    async def put(records: Records, stamp: int, step: str) -> None:
        assert (await node.put(records.batch(stamp), box.soon())).stored.all()
        ack(step)

    await put(COLD, 1, "cold")
    await put(LARGER, 5, "larger")
    await put(SMALLER, 5, "smaller")
    table = await node.look_up(LARGER.keys[:DROPPED], box.soon())
    assert await node.drop(LARGER.rows(0, DROPPED).drop_items(table.generation), box.soon()) == DROPPED
    ack("drop")
    await put(LATER, 6, "later")
    assert box.counters.get("node_evicted") > 0
    await put(LARGER, 7, "again")
    await node.close()
    ack("closed")
    os.close(acked)
    return box.io.names()


def main(base: Path) -> None:
    undisturbed = base / "undisturbed"
    undisturbed.mkdir()
    operations = asyncio.run(live(undisturbed, None, 0))
    for number, name in enumerate(operations, start=1):
        for torn_bytes in TORN_BYTES if name == "pwrite" else TORN_BYTES[:1]:
            place = base / f"{number}-{torn_bytes}"
            place.mkdir()
            child = os.fork()
            if child == 0:
                try:
                    asyncio.run(live(place, number, torn_bytes))
                finally:
                    os._exit(0)
            _, status = os.waitpid(child, 0)
            print(number, torn_bytes, os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
