"""Rebuilding missing shards of many blocks at once: the working part of `efs/repair.py`.

A batch is blocks of one size, one number of segments and one rotation, so that shard i of all of them is on one node.

1. Ten source nodes are read for each block: headers, then payload as spans of neighbouring slots, into private arrays.
   A shard is *sound* when its header parses, names this key, digest and shard, and the payload has the header's hash.
   Where that leaves a block with fewer than ten, the shards that were not read yet are read too.
2. A node whose record was not sound checks it itself (`verify`): it keeps a sound one, and drops a damaged one, which
   is then missing and rebuilt like the others.
3. Blocks with the same ten sources are rebuilt together. Every segment of every whole block must have the hash that
   its header gives; a block for which that does not hold is *inconsistent* and nothing of it is written.
4. The new records carry the header of a source with shard index and hashes of their own: exactly the bytes that the
   missing record had. Their stamp is the latest of the sources', so that nothing looks used that was not. They are put
   as repairs: a node that has evicted what is as cold does not take them, and the stripe is left to die. Nor does a
   node take what belongs to a purged tenant; then nothing is missing.

Nothing is ever written from fewer than ten sound shards of one digest.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efs.ask import all_of
from efs.checksum import xxh3_64
from efs.clock import Clock, Deadline
from efs.codec import Codec
from efs.contract import PURGED, TOO_COLD, Landing, Node, PutBatch, PutOutcome, Span, Stride
from efs.errors import CorruptRecord, EfsError
from efs.extent import ranges_of
from efs.limits import DATA_SHARDS, REPAIR_CALL_MS, SLOT_ALIGN_BYTES, STRIPE_SHARDS
from efs.placement import node_of_shard, shard_of_node
from efs.shard import check_headers, finish_headers, header_bytes, header_dtype, parse_header

Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Stripe:
    """A version to be made whole. held: by node, (location, generation) of its record; lacking: nodes without one that
    are to get one. depth, stamp: as its records are listed."""

    key: bytes
    digest: bytes
    held: Mapping[int, tuple[int, int]]
    lacking: frozenset[int]
    block_bytes: int
    segments: int
    depth: int
    stamp: int


@dataclass(slots=True)
class Rebuilt:
    """What became of a batch, in shards. stored: put back. cold: refused as too cold. failed: not stored for another
    reason. corrupt: found damaged and dropped by their node. hopeless: (key, digest) with fewer than ten sound shards,
    inconsistent: of which ten sound shards do not make the block that their headers describe."""

    stored: int = 0
    cold: int = 0
    failed: int = 0
    corrupt: int = 0
    hopeless: list[tuple[bytes, bytes]] = field(default_factory=list)
    inconsistent: list[tuple[bytes, bytes]] = field(default_factory=list)


class Batch:
    """One batch being rebuilt. `stripes` agree in rotation, block_bytes and segments."""

    def __init__(self, nodes: Sequence[Node | None], codec: Codec, clock: Clock, rotation: int,
                 stripes: Sequence[Stripe]) -> None:
        self._nodes = nodes
        self._codec = codec
        self._clock = clock
        self._rotation = rotation
        self._stripes = tuple(stripes)
        count, first = len(stripes), stripes[0]
        self._segments = first.segments
        self._size = -(-first.block_bytes // DATA_SHARDS)
        self._block = np.zeros((count, DATA_SHARDS * self._size), np.uint8)
        self._parity = np.zeros((STRIPE_SHARDS - DATA_SHARDS, count, self._size), np.uint8)
        self._templates = np.zeros((count, header_bytes(first.segments)), np.uint8)
        self._sound = np.zeros((STRIPE_SHARDS, count), np.bool_)
        self._read = np.zeros((STRIPE_SHARDS, count), np.bool_)
        self._wanted = np.zeros((STRIPE_SHARDS, count), np.bool_)
        """By shard and row: to be put on the shard's node."""
        self.result = Rebuilt()

    async def run(self) -> Rebuilt:
        """Read, verify, rebuild, put. Never raises for a node's sake."""
        held = np.zeros((STRIPE_SHARDS, len(self._stripes)), np.bool_)
        for row, stripe in enumerate(self._stripes):
            for index in stripe.held:
                held[shard_of_node(index, self._rotation), row] = True
            for index in stripe.lacking:
                self._wanted[shard_of_node(index, self._rotation), row] = True
        await self._read_shards(held & (held.cumsum(axis=0) <= DATA_SHARDS))
        short = self._sound.sum(axis=0) < DATA_SHARDS
        await self._read_shards(held & ~self._read & short)
        await self._verify(self._read & ~self._sound)
        good = self._rebuild()
        await asyncio.sleep(0)
        await self._put(good)
        return self.result

    def _shard(self, shard: int) -> Bytes:
        """(rows, shard bytes), writable."""
        if shard >= DATA_SHARDS:
            parity: Bytes = self._parity[shard - DATA_SHARDS]
            return parity
        return self._block[:, shard * self._size : (shard + 1) * self._size]

    # -- sources

    async def _read_shards(self, wanted: NDArray[np.bool_]) -> None:
        deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
        calls: dict[int, Coroutine[Any, Any, None]] = {}
        for shard in np.flatnonzero(wanted.any(axis=1)).tolist():
            index = node_of_shard(shard, self._rotation)
            node = self._nodes[index]
            if node is not None:
                calls[index] = self._read_shard(node, shard, np.flatnonzero(wanted[shard]), deadline)
        await all_of(calls, deadline, len(calls))

    async def _read_shard(self, node: Node, shard: int, rows: NDArray[np.intp], deadline: Deadline) -> None:
        places = [self._stripes[row].held[node.node_index] for row in rows.tolist()]
        locations = np.array([location for location, _ in places], np.int64)
        generations = np.array([generation for _, generation in places], np.uint64)
        headers = await node.headers(locations, generations, self._segments, deadline)
        staged = np.zeros((len(rows), self._size), np.uint8)
        view, size = staged.reshape(-1).data, self._size
        spans = [(Span(location, count, size, -(-size // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES),
                  Landing(view, (Stride(0, size, first * size, size),)))
                 for first, location, count in ranges_of(locations)]
        await node.read(spans, lambda _: None, deadline)
        self._read[shard, rows] = True
        sound = self._check(headers, staged, shard, rows)
        self._shard(shard)[rows[sound]] = staged[sound]
        self._sound[shard, rows[sound]] = True
        self._templates[rows[sound]] = headers[sound]

    def _check(self, headers: Bytes, payload: Bytes, shard: int, rows: NDArray[np.intp]) -> NDArray[np.bool_]:
        """Which of these records are what was looked for."""
        sound = check_headers(headers)
        fields = np.ascontiguousarray(headers).reshape(-1).view(header_dtype(self._segments))
        sound &= fields["shard"] == shard
        for at, row in enumerate(rows.tolist()):
            if sound[at]:
                stripe, header = self._stripes[row], fields[at]
                sound[at] = ((header["key"].tobytes(), header["digest"].tobytes(), int(header["block_bytes"]))
                             == (stripe.key, stripe.digest, stripe.block_bytes)
                             and xxh3_64(payload[at].data) == int(header["payload_hash"]))
        return sound

    async def _verify(self, doubtful: NDArray[np.bool_]) -> None:
        """Have nodes check records that were not sound; what they do not hold (any more) is wanted."""
        deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
        for shard, row in np.argwhere(doubtful).tolist():
            node = self._nodes[node_of_shard(shard, self._rotation)]
            stripe = self._stripes[row]
            try:
                if node is not None and not await node.verify(stripe.key, stripe.digest, deadline):
                    self._wanted[shard, row] = True
                    self.result.corrupt += 1
            except EfsError:
                continue

    # -- rebuilding

    def _rebuild(self) -> NDArray[np.bool_]:
        """Compute what is missing; (rows,) bool, which blocks are whole and right."""
        good = np.zeros(len(self._stripes), np.bool_)
        patterns: dict[bytes, list[int]] = {}
        for row, stripe in enumerate(self._stripes):
            if self._sound[:, row].sum() < DATA_SHARDS:
                self.result.hopeless.append((stripe.key, stripe.digest))
            else:
                patterns.setdefault(self._sound[:, row].tobytes(), []).append(row)
        for rows in patterns.values():
            self._rebuild_rows(np.array(rows), np.flatnonzero(self._sound[:, rows[0]])[:DATA_SHARDS].tolist())
            for row in rows:
                good[row] = self._right(row)
                if not good[row]:
                    self.result.inconsistent.append((self._stripes[row].key, self._stripes[row].digest))
        return good

    def _rebuild_rows(self, rows: NDArray[np.intp], sources: Sequence[int]) -> None:
        """All shards of some rows from ten: the data shards, and parity shards that are wanted."""
        wanted = [shard for shard in range(STRIPE_SHARDS) if shard not in sources
                  and (shard < DATA_SHARDS or self._wanted[shard, rows].any())]
        if not wanted:
            return
        computed = {shard: np.zeros((len(rows), self._size), np.uint8) for shard in wanted}
        whole = len(rows) == len(self._stripes)
        present = {shard: self._shard(shard) if whole else self._shard(shard)[rows] for shard in sources}
        self._codec.rebuild(present, computed)
        for shard, values in computed.items():
            self._shard(shard)[rows] = values

    def _right(self, row: int) -> bool:
        """Whether the segments of a whole block have the hashes that its header gives."""
        try:
            header = parse_header(self._templates[row].tobytes())
        except CorruptRecord:
            return False
        block = self._block[row].data
        shape = header.shape
        return all(xxh3_64(block[at : at + size]) == expected for at, size, expected in
                   zip(shape.segment_offsets, shape.segment_bytes, header.segment_hashes, strict=True))

    # -- putting back

    async def _put(self, good: NDArray[np.bool_]) -> None:
        deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
        calls: dict[int, Coroutine[Any, Any, None]] = {}
        for shard in range(STRIPE_SHARDS):
            rows = np.flatnonzero(self._wanted[shard] & good)
            index = node_of_shard(shard, self._rotation)
            node = self._nodes[index]
            if len(rows) and node is not None:
                calls[index] = self._put_shard(node, shard, rows, deadline)
        await all_of(calls, deadline, len(calls))

    async def _put_shard(self, node: Node, shard: int, rows: NDArray[np.intp], deadline: Deadline) -> None:
        stamps = np.array([self._stripes[row].stamp for row in rows.tolist()])
        for stamp in np.unique(stamps).tolist():
            mine = rows[stamps == stamp]
            batch = self._batch(shard, mine, stamp)
            try:
                self._note(await node.put(batch, deadline))
            except EfsError:
                self.result.failed += len(mine)

    def _note(self, outcome: PutOutcome) -> None:
        stored = int(outcome.stored.sum())
        left = len(outcome.stored) - stored
        self.result.stored += stored
        if outcome.why == TOO_COLD:
            self.result.cold += left
        elif outcome.why != PURGED:
            self.result.failed += left

    def _batch(self, shard: int, rows: NDArray[np.intp], stamp: int) -> PutBatch:
        payload = self._shard(shard)[rows]
        hashes = np.array([xxh3_64(row.data) for row in payload], np.uint64)
        slots = np.zeros((len(rows), -(-self._size // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES), np.uint8)
        slots[:, : self._size] = payload
        headers = finish_headers(self._templates[rows], shard, hashes)
        keys = [self._stripes[row].key for row in rows.tolist()]
        return PutBatch(keys, headers, slots, self._size, stamp, repair=True)
