"""An in-memory twin of a node: the same contract without files, threads or waiting.

Slow and plain on purpose: what a directory node answers must be what this one answers. It has knobs. `warm` false makes
every `…_now` method decline, so that callers take the awaiting path. `streams` makes a get go on behind its table, and
a new node not warm. `down` set to a reason makes every call raise
NodeUnavailable. `hanging` is what `suspect` says. `capacity_records` bounds it: what does not fit is refused; nothing
is evicted except by `collect`, in the order of `efs/gc.py`. `horizon` is its eviction horizon.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.batch import check_batch, require_keys
from efs.burial import words_of
from efs.checksum import xxh3_64
from efs.clock import Arrivals, Clock, Deadline, stamp_of
from efs.contract import (
    ABSENT,
    PURGED,
    TOO_COLD,
    GetSink,
    Landing,
    NodeTable,
    PutBatch,
    PutOutcome,
    Span,
    Stride,
    VersionRow,
)
from efs.errors import InvalidArgument, NodeFull, NodeUnavailable
from efs.gc import NOTHING, Watermarks, order_key
from efs.limits import MAX_VERSIONS_PER_KEY
from efs.shard import Header, parse_header
from efs.types import DropItem, ListedRecord, ListPage, NodeInfo

EXTENT_SLOTS = 1 << 20
NO_SLOT = "no free slot"


@dataclass(slots=True)
class Stored:
    """One record. Its payload may be changed by a test that wants a corrupt one."""

    header: Header
    raw_header: bytes
    payload: bytearray
    slot_bytes: int
    location: int
    generation: int
    arrival_ms: int
    stamp: int
    trusted: bool = True


class MemoryNode:
    """`efs.contract.Node` in memory."""

    streams = False

    def __init__(self, node_index: int, clock: Clock, *, capacity_records: int | None = None) -> None:
        self._node_index = node_index
        self._clock = clock
        self._arrivals = Arrivals(clock)
        self._capacity = capacity_records
        self._next: dict[tuple[int, int], int] = {}
        self._generation = 0
        self._closed = False
        self.warm = not self.streams
        self.down: str | None = None
        self.hanging = False
        self.horizon = NOTHING
        self.buried: set[bytes] = set()
        self.records: dict[bytes, dict[bytes, Stored]] = {}
        self.slots: dict[int, Stored] = {}

    @property
    def node_index(self) -> int:
        return self._node_index

    @property
    def suspect(self) -> bool:
        return self.hanging

    # -- look-ups

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        self._serve()
        return self._table(keys) if self.warm else None

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        await self._pass(deadline)
        require_keys(keys)
        return self._table(keys)

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        table = await self.look_up(keys, deadline)
        sink.table_came(table, self._headers_with(table, sink.segments) if self.streams and sink.segments else None)
        if self.streams:
            await self.read(sink.places(), sink.landed, deadline)

    def _headers_with(self, table: NodeTable, segments: int) -> NDArray[np.uint8] | None:
        return self._headers(table.location, table.generation, segments)

    def _table(self, keys: Sequence[bytes]) -> NodeTable:
        count = len(keys)
        table = NodeTable(np.zeros((count, 2), np.uint64), np.full(count, ABSENT, np.int64), np.zeros(count, np.uint64),
                          np.zeros(count, np.uint8), np.zeros(count, np.bool_), ())
        extra = []
        for row, key in enumerate(keys):
            for place, stored in enumerate(self.records.get(key, {}).values()):
                if place:
                    extra.append(VersionRow(row, stored.header.digest, stored.location, stored.generation,
                                            stored.header.shard, stored.trusted))
                    continue
                table.digest[row] = np.frombuffer(stored.header.digest, np.uint64)
                table.location[row] = stored.location
                table.generation[row] = stored.generation
                table.shard[row] = stored.header.shard
                table.trusted[row] = stored.trusted
        table.extra = tuple(extra)
        return table

    def headers_now(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        self._serve()
        return self._headers(locations, generations, segments) if self.warm else None

    async def headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        await self._pass(deadline)
        return self._headers(locations, generations, segments)

    def _headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                 segments: int) -> NDArray[np.uint8]:
        rows = []
        for location, generation in zip(locations.tolist(), generations.tolist(), strict=True):
            stored = self.slots.get(location)
            same = stored is not None and stored.generation == generation
            rows.append(stored.raw_header if stored is not None and same else b"")
        size = 96 + -(-12 * segments // 8) * 8
        found = np.zeros((len(rows), size), np.uint8)
        for row, raw in enumerate(rows):
            if len(raw) == size:
                found[row] = np.frombuffer(raw, np.uint8)
        return found

    # -- bytes

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """Spans of an even count are shown and others are not, so that callers meet both."""
        self._serve()
        return [None if span.count % 2 else self._view(span) for span in spans] if self.warm else None

    def _view(self, span: Span) -> NDArray[np.uint8]:
        rows = np.zeros((span.count, span.slot_bytes), np.uint8)
        self._land(span, Landing(rows.reshape(-1).data, (Stride(0, span.slot_bytes, 0, span.slot_bytes),)))
        return rows

    def read_now(self, span: Span, landing: Landing) -> bool:
        self._serve()
        if not self.warm or landing.revoked:
            return False
        self._land(span, landing)
        return True

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        self._serve()
        for place, (span, landing) in enumerate(spans):
            await self._pass(deadline)
            if not landing.revoked:
                self._land(span, landing)
                landed(place)

    def _land(self, span: Span, landing: Landing) -> None:
        """A slot that holds nothing reads as zeros."""
        for row in range(span.count):
            stored = self.slots.get(span.location + row)
            payload = stored.payload if stored is not None else bytearray()
            shard = bytes(payload).ljust(span.slot_bytes, b"\0")
            for stride in landing.strides:
                start = stride.start + row * stride.step
                landing.buffer[start : start + stride.size] = shard[stride.source : stride.source + stride.size]

    # -- changes

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        await self._pass(deadline)
        checked = check_batch(batch, self._node_index)
        stored = np.zeros(len(batch.keys), np.bool_)
        why = None
        for row, key in enumerate(batch.keys):
            refusal = self._store(batch, row, key, checked.index_keys[row][len(key) :])
            stored[row] = refusal is None
            why = why or refusal
        if why == NO_SLOT and not stored.any():
            raise NodeFull(self._node_index, why)
        return PutOutcome(stored, why)

    def _store(self, batch: PutBatch, row: int, key: bytes, digest: bytes) -> str | None:
        if parse_header(batch.headers[row].tobytes()).tenant_tag in self.buried:
            return PURGED
        known = self.records.get(key, {}).get(digest)
        if known is not None and known.header.shard != batch.headers[row, 6]:
            self._forget(known)
            known = None
        now_ms = self._arrivals.now_ms()
        if known is not None and (known.trusted or self._check(known)):
            known.trusted = True
            known.arrival_ms = now_ms
            known.stamp = max(known.stamp, self._clamp(batch.stamp))
            return None
        versions = self.records.get(key, {})
        if len(versions) >= MAX_VERSIONS_PER_KEY:
            return f"a key has {MAX_VERSIONS_PER_KEY} versions already"
        if self._capacity is not None and len(self.slots) >= self._capacity:
            return NO_SLOT
        raw = batch.headers[row].tobytes()
        if batch.repair and self.horizon >= _order_key(parse_header(raw), self._clamp(batch.stamp)):
            return TOO_COLD
        slot_class = (batch.payload.shape[1], len(raw))
        location = self._next.setdefault(slot_class, (len(self._next) + 1) * EXTENT_SLOTS)
        self._next[slot_class] = location + 1
        self._generation += 1
        record = Stored(parse_header(raw), raw, bytearray(batch.payload[row].tobytes()[: batch.shard_bytes]),
                        batch.payload.shape[1], location, self._generation, now_ms, self._clamp(batch.stamp))
        self.records.setdefault(key, {})[digest] = record
        self.slots[location] = record
        return None

    def touch(self, keys: Sequence[bytes], locations: NDArray[np.int64] | None, stamp: int) -> None:
        if locations is not None:
            touched = [self.slots[location] for location in locations.tolist() if location in self.slots]
        else:
            touched = [stored for key in keys for stored in self.records.get(key, {}).values()]
        for stored in touched:
            stored.stamp = max(stored.stamp, self._clamp(stamp))

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        await self._pass(deadline)
        dropped = 0
        for item in items:
            stored = self.records.get(item.key, {}).get(item.digest)
            if (stored is not None and stored.generation == item.generation
                    and self._arrivals.at_least(stored.arrival_ms, item.older_than_ms)):
                self._forget(stored)
                dropped += 1
        return dropped

    async def verify(self, key: bytes, digest: bytes, deadline: Deadline) -> bool:
        await self._pass(deadline)
        stored = self.records.get(key, {}).get(digest)
        if stored is None:
            return False
        stored.trusted = self._check(stored)
        return stored.trusted

    def _check(self, stored: Stored) -> bool:
        """Whether the payload agrees with the header; a record that does not is dropped."""
        if xxh3_64(bytes(stored.payload)) == stored.header.payload_hash:
            return True
        self._forget(stored)
        return False

    def _forget(self, stored: Stored) -> None:
        versions = self.records[stored.header.key]
        del versions[stored.header.digest]
        if not versions:
            del self.records[stored.header.key]
        del self.slots[stored.location]

    # -- the rest

    async def list(self, after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        await self._pass(deadline)
        if limit < 1:
            raise InvalidArgument(f"limit is {limit}, must be at least 1")
        every = sorted((stored.header.key + stored.header.digest, stored) for stored in self.slots.values())
        rest = [pair for pair in every if after is None or pair[0] > after]
        page = tuple(_listed(stored) for _, stored in rest[:limit])
        return ListPage(page, rest[limit - 1][0] if len(rest) > limit else None)

    async def collect(self, deadline: Deadline) -> int:
        await self._pass(deadline)
        if self._capacity is None:
            return 0
        too_many = max(0, len(self.slots) - int(Watermarks().low * self._capacity))
        coldest = sorted(self.slots.values(), key=lambda stored: _order_key(stored.header, stored.stamp))[:too_many]
        for stored in coldest:
            self.horizon = max(self.horizon, _order_key(stored.header, stored.stamp))
            self._forget(stored)
        return too_many

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        await self._pass(deadline)
        words_of(tags)
        self.buried.update(tags)
        gone = [stored for stored in self.slots.values() if stored.header.tenant_tag in self.buried]
        for stored in gone:
            self._forget(stored)
        return len(gone)

    async def tenant_bytes(self, deadline: Deadline) -> Mapping[bytes, int]:
        await self._pass(deadline)
        held: Counter[bytes] = Counter()
        for stored in self.slots.values():
            held[stored.header.tenant_tag] += stored.slot_bytes
        return held

    async def info(self, deadline: Deadline) -> NodeInfo:
        await self._pass(deadline)
        live = sum(stored.slot_bytes for stored in self.slots.values())
        unverified = sum(not stored.trusted for stored in self.slots.values())
        name = f"{self._node_index:032x}"
        return NodeInfo(self._node_index, name, "serving", 0, live, 0, 0, len(self.slots), unverified)

    async def close(self) -> None:
        self._closed = True

    def _clamp(self, stamp: int) -> int:
        return min(stamp, stamp_of(self._clock.wall()))

    def _serve(self) -> None:
        if self._closed:
            raise NodeUnavailable(self._node_index, "it was closed")
        if self.down is not None:
            raise NodeUnavailable(self._node_index, self.down)

    async def _pass(self, deadline: Deadline) -> None:
        """One turn of the loop, as any awaiting call takes at least; refusals come after it."""
        self._serve()
        await asyncio.sleep(0)
        self._serve()
        if deadline.passed():
            raise NodeUnavailable(self._node_index, "no answer by the deadline")


def _order_key(header: Header, stamp: int) -> int:
    return order_key(stamp, header.depth, int.from_bytes(header.key[:3] + header.digest[:1], "big"))


def _listed(stored: Stored) -> ListedRecord:
    header = stored.header
    return ListedRecord(header.key, header.digest, stored.location, stored.generation, header.shard,
                        header.shape.block_bytes, header.depth, header.tenant_tag, stored.arrival_ms, stored.stamp,
                        len(header.shape.segment_bytes))
