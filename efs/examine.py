"""Who is to blame when a segment of a block disagrees with its header. Rare, so it goes shard by shard.

Each shard in hand is hashed against the payload hash in its own record's header. Where they disagree the node is asked
again where the record is: at another generation the slot was reused while it was read (raced: read once more at the new
place, then lost); at the same generation the record is corrupt: lost for this call, counted, reported for mending.
When no shard is to blame although something was rebuilt, the block is rebuilt once more from another ten; else, and
after that, it is given up. Segments that are good stay so, and shards that are only in these are not looked at: their
bytes are the block's, whatever their own headers say.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efs.ask import all_of
from efs.checksum import xxh3_64
from efs.clock import stamp_of
from efs.errors import EfsError
from efs.hedge import Shard, Unit
from efs.limits import MAX_READ_ATTEMPTS, PARITY_SHARDS, STRIPE_SHARDS
from efs.unitread import CorruptShard, UnitReads


async def examine(reads: UnitReads, keys: Sequence[bytes], unit: Unit, row: int) -> None:
    """Find and drop the culprits among the shards of one block; afterwards `advance` decides what to do."""
    unsound = await _unsound(reads, unit, row)
    block = unit.start + row
    # More may have become good while nodes were asked.
    if not reads.disagrees(unit, row):
        return
    open_shards = [shard for shard in range(STRIPE_SHARDS) if not reads.settled(unit, shard, row)]
    culprits = [shard for shard in unsound if shard in open_shards]
    for shard in culprits:
        unit.state[shard, row] = Shard.LOST
    computed = np.zeros(STRIPE_SHARDS, np.bool_)
    computed[open_shards] = unit.computed[open_shards, row]
    if not culprits and (not computed.any() or unit.rebuilds >= MAX_READ_ATTEMPTS):
        rows = np.zeros(unit.stop - unit.start, np.bool_)
        rows[row] = True
        reads.kill(unit, rows)
        return
    unit.rebuilds += 0 if culprits else 1
    unit.state[computed, row] = Shard.LOST
    unit.computed[computed, row] = False
    unit.whole.clear()
    unit.piecemeal = unit.losses = True
    reads.stirred.add(unit)
    for shard in culprits:
        await _blame(reads, keys[block], unit, shard, row)
    for segment in range(len(reads.good)):
        reads.verify_ready(unit, segment, row)


async def _unsound(reads: UnitReads, unit: Unit, row: int) -> list[int]:
    """The shards in hand whose bytes are not what the record's header says. All headers are asked for at once; one that
    cannot be had, or that comes long after the others, speaks for no culprit."""
    segments = len(reads.good)
    column = slice(unit.start + row, unit.start + row + 1)
    headers: dict[int, NDArray[np.uint8]] = {}
    calls: dict[int, Coroutine[Any, Any, NDArray[np.uint8]]] = {}
    for shard in _doubtful(reads, unit, row):
        node_index = unit.node_of(shard)
        node = reads.context.nodes[node_index]
        if node is None:
            continue
        place = reads.pins.location[node_index, column], reads.pins.generation[node_index, column]
        try:
            header = node.headers_now(*place, segments)
        except EfsError:
            continue
        if header is None:
            calls[shard] = node.headers(*place, segments, reads.deadline)
        else:
            headers[shard] = header
    answers, _ = await all_of(calls, reads.deadline, len(calls) - PARITY_SHARDS)
    headers.update(answers)
    return [shard for shard, header in headers.items()
            if not _describes(header[0], reads.payload_rows(unit, shard, row))]


def _doubtful(reads: UnitReads, unit: Unit, row: int) -> list[int]:
    """The shards that came from nodes and are not settled."""
    return [shard for shard in range(STRIPE_SHARDS) if unit.state[shard, row] == Shard.HAVE
            and not unit.computed[shard, row] and not reads.settled(unit, shard, row)]


def _describes(header: NDArray[np.uint8], payload: NDArray[np.uint8]) -> bool:
    """Whether a payload has the hash that a header gives; no header describes any."""
    return bool(header.any()) and int.from_bytes(header[24:32].tobytes(), "little") == xxh3_64(payload[0].tobytes())


async def _blame(reads: UnitReads, key: bytes, unit: Unit, shard: int, row: int) -> None:
    """Raced or corrupt: look the record up again."""
    node_index = unit.node_of(shard)
    node = reads.context.nodes[node_index]
    block = unit.start + row
    generation = int(reads.pins.generation[node_index, block])
    digest = reads.pins.digest[block].tobytes()
    if node is None:
        return
    try:
        table = node.look_up_now([key])
        if table is None:
            table = await node.look_up([key], reads.deadline)
    except EfsError:
        return
    found = table.version(0, digest)
    if found is not None and found.generation == generation:
        reads.tally.corrupt += 1
        stamp = stamp_of(reads.context.clock.wall())
        reads.context.report(CorruptShard(key, digest, node_index, shard, generation, len(reads.good), stamp))
        return
    reads.tally.raced += 1
    if found is not None and unit.retry(shard, row):
        reads.move(unit, shard, row, found.location, found.generation)
