"""Putting right what a read found damaged: the node checks itself, then gets its shard back.

A read that meets a corrupt shard serves the block from the others and leaves a report. For each report:

1. The node re-reads its own record (`verify`). If it is sound, the reporter was wrong (its memory, a race): nothing
   happens. A client's word alone never removes anything.
2. If it is not, the node has dropped it, and the shard is rebuilt from ten sound shards of the same digest on other
   nodes, each checked against its own header. Every segment of the whole block must then have the hash that its
   headers give; else nothing is written.
3. The shard is put back with the header that it had, byte for byte, and the stamp of the read that met it, as the
   read has touched the others.

All of this is what the role `data` may do at a server: every client mends what its own reads meet.

Reports wait in a bounded queue; what does not fit is left to the scrub. Mending is limited to MENDS_PER_SECOND. A mend
that fails (too few sound shards, the node away) is logged and forgotten: the next read reports it again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import numpy as np
from asyncio_throttle.throttler import Throttler
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.clock import Clock, Deadline
from efs.codec import Codec
from efs.contract import Node, PutBatch
from efs.errors import EfsError
from efs.health import Health
from efs.limits import DATA_SHARDS, GET_DEADLINE_MS, MEND_QUEUE, MENDS_PER_SECOND
from efs.metrics import CounterFile
from efs.placement import node_of_shard, placement_group, rotation_of
from efs.shard import Header, build_headers
from efs.stripe import SoundShard, found_of, sound_shards
from efs.unitread import CorruptShard

_LOG = logging.getLogger(__name__)


class Mender:
    """Works off reports of corrupt shards. `report` may be called from anything on the loop's thread."""

    def __init__(self, nodes: Sequence[Node | None], health: Health, codec: Codec, counters: CounterFile,
                 clock: Clock) -> None:
        self._nodes = tuple(nodes)
        self._health = health
        self._codec = codec
        self._counters = counters
        self._clock = clock
        self._reports: asyncio.Queue[CorruptShard] = asyncio.Queue(MEND_QUEUE)
        self._known: set[tuple[bytes, bytes, int]] = set()

    def report(self, shard: CorruptShard) -> None:
        """Queue a shard for mending, once, unless the queue is full."""
        name = (shard.key, shard.digest, shard.node_index)
        if name not in self._known and not self._reports.full():
            self._known.add(name)
            self._reports.put_nowait(shard)

    async def settled(self) -> None:
        """Wait until every report so far was worked off."""
        await self._reports.join()

    async def run(self) -> None:
        """Mend for ever."""
        throttle = Throttler(rate_limit=MENDS_PER_SECOND, period=1.0)
        while True:
            shard = await self._reports.get()
            try:
                async with throttle:
                    await self._mend(shard, Deadline.after_ms(self._clock, GET_DEADLINE_MS))
            except EfsError as error:
                _LOG.warning("shard %d of %s on node %d was not mended: %s", shard.shard, shard.key.hex(),
                             shard.node_index, error)
            finally:
                self._known.discard((shard.key, shard.digest, shard.node_index))
                self._reports.task_done()

    async def _mend(self, damaged: CorruptShard, deadline: Deadline) -> None:
        node = self._nodes[damaged.node_index]
        rotation = rotation_of(placement_group(damaged.key))
        if node is None or node_of_shard(damaged.shard, rotation) != damaged.node_index:
            return
        if await node.verify(damaged.key, damaged.digest, deadline):
            return
        sources = await self._sources(damaged, deadline)
        if len(sources) < DATA_SHARDS:
            _LOG.warning("shard %d of %s on node %d was not mended: only %d sound shards could be read", damaged.shard,
                         damaged.key.hex(), damaged.node_index, len(sources))
            return
        payload = rebuild(self._codec, sources, damaged.shard)
        if payload is None:
            _LOG.error("%s: ten sound shards do not make a sound block", damaged.key.hex())
            return
        batch = batch_of(sources[0].header, damaged.shard, payload, damaged.stamp)
        outcome = await node.put(batch, deadline)
        if outcome.stored.all():
            self._counters.add("node_mended")

    async def _sources(self, damaged: CorruptShard, deadline: Deadline) -> list[SoundShard]:
        """Ten sound shards of the damaged version from other nodes, or all there are."""
        others = {index: node for index in self._health.readable()
                  if index != damaged.node_index and (node := self._nodes[index]) is not None}
        records = await found_of(others, damaged.key, damaged.digest, damaged.segments, self._health, deadline,
                                 DATA_SHARDS)
        sound = await sound_shards(others, records, deadline, DATA_SHARDS)
        return sorted(sound.values(), key=lambda source: source.record.shard)[:DATA_SHARDS]


def rebuild(codec: Codec, sources: Sequence[SoundShard], wanted: int) -> NDArray[np.uint8] | None:
    """(shard_bytes,) payload of one more shard from exactly ten sound ones of one digest.

    None when the segments of the whole block do not have the hashes that the headers give.
    """
    header = sources[0].header
    size = header.shape.shard_bytes
    present = {source.record.shard: source.payload.reshape(1, size) for source in sources}
    data_and_wanted = {*range(DATA_SHARDS), wanted}
    rebuilt = {shard: np.zeros((1, size), np.uint8) for shard in sorted(data_and_wanted - present.keys())}
    codec.rebuild(present, rebuilt)
    shards = {**present, **rebuilt}
    block = np.concatenate([shards[shard][0] for shard in range(DATA_SHARDS)]).data
    shape = header.shape
    for offset, length, expected in zip(shape.segment_offsets, shape.segment_bytes, header.segment_hashes, strict=True):
        if xxh3_64(block[offset : offset + length]) != expected:
            return None
    payload: NDArray[np.uint8] = shards[wanted][0]
    return payload


def batch_of(header: Header, shard: int, payload: NDArray[np.uint8], stamp: int) -> PutBatch:
    """One record of a version that is known by the header of any of its shards."""
    shape = header.shape
    slot = np.zeros((1, shape.slot_bytes), np.uint8)
    slot[0, : shape.shard_bytes] = payload
    headers = build_headers(
        [header.key], shard, np.array([header.depth], np.uint32), header.tenant_tag, shape,
        np.array([header.segment_hashes], np.uint64), np.array([xxh3_64(payload.tobytes())], np.uint64))
    return PutBatch([header.key], headers, slot, shape.shard_bytes, stamp, repair=True)
