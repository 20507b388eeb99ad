"""Who is to blame when a segment of a block disagrees with its header. Rare, so it goes shard by shard.

Each shard in hand is hashed against the payload hash in its own record's header. Where they disagree the node is asked
again where the record is: at another generation the slot was reused while it was read (raced: read once more at the new
place, then lost); at the same generation the record is corrupt: lost for this call, counted, reported for mending.
When no shard is to blame although something was rebuilt, the block is rebuilt once more from another ten; else, and
after that, it is given up. Segments that are good stay so, and shards that are only in these are not looked at: their
bytes are the block's, whatever their own headers say.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from efs.checksum import xxh3_64
from efs.clock import stamp_of
from efs.errors import EfsError
from efs.hedge import Shard, Unit
from efs.limits import MAX_READ_ATTEMPTS, STRIPE_SHARDS
from efs.unitread import CorruptShard, UnitReads


async def examine(reads: UnitReads, keys: Sequence[bytes], unit: Unit, row: int) -> None:
    """Find and drop the culprits among the shards of one block; afterwards `advance` decides what to do."""
    unsound = [
        shard
        for shard in range(STRIPE_SHARDS)
        if unit.state[shard, row] == Shard.HAVE
        and not unit.computed[shard, row]
        and not reads.settled(unit, shard, row)
        and not await _sound(reads, unit, shard, row)
    ]
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


async def _sound(reads: UnitReads, unit: Unit, shard: int, row: int) -> bool:
    """Whether the bytes in hand are what the record's header says; True also when the header cannot be had."""
    node_index = unit.node_of(shard)
    node = reads.context.nodes[node_index]
    column = slice(unit.start + row, unit.start + row + 1)
    location, generation = reads.pins.location[node_index, column], reads.pins.generation[node_index, column]
    if node is None:
        return False
    try:
        header = node.headers_now(location, generation, len(reads.good))
        if header is None:
            header = await node.headers(location, generation, len(reads.good), reads.deadline)
    except EfsError:
        return True
    payload_hash = int.from_bytes(header[0, 24:32].tobytes(), "little")
    return header[0].any() and payload_hash == xxh3_64(reads.payload_rows(unit, shard, row)[0].tobytes())


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
