"""A node at a server, as a node: `efs.contract.Node` over two connections (`efs/link.py`).

One connection carries what readers wait for, the other puts, drops and collections, so that no look-up stands behind
the payload of a put. The node is *suspect* while either of them is missing or owes an answer: whoever asks
`efs.health` then leaves it alone.

Nothing is answered from memory: `look_up_now` and `headers_now` say None. `read_now` and `views_now` read the slab of a
server on this machine that shares it, else they say False and None (docs/decisions/0015). `get` brings table, headers
and shards in one round trip (docs/decisions/0018). Calls that are larger than a frame are sent in parts.

*Reads.* The slots of all spans come as one sequence of bytes in the order of the spans, cut into pieces. Each byte goes
from the socket to where the landing's strides say, or to memory that nobody reads: padding, gaps between strides, what
is revoked, and everything once the call has ended. `landed` is called as soon as a span is whole, before a byte of the
next one is placed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.batch import check_form, require_keys
from efs.burial import words_of
from efs.clock import Clock, Deadline
from efs.contract import GetSink, Landing, NodeTable, PutBatch, PutOutcome, Span, VersionRow
from efs.errors import InvalidArgument, NodeFull, NodeUnavailable, OutdatedMap, WireError
from efs.limits import (
    IOV_MAX,
    MAX_KEYS_PER_CALL,
    MIB,
    WIRE_AHEAD_BYTES,
    WIRE_BODY_BYTES,
    WIRE_KEYS,
    WIRE_LISTED,
    WIRE_METADATA_BYTES,
)
from efs.link import Link, RemotePlace
from efs.messages import (
    GetAsk,
    decode_count,
    decode_flag,
    decode_get_table,
    decode_headers,
    decode_info,
    decode_nothing,
    decode_outcome,
    decode_page,
    decode_table,
    decode_tenant_bytes,
    encode_drops,
    encode_get,
    encode_keys,
    encode_list,
    encode_places,
    encode_put,
    encode_spans,
    encode_tags,
    encode_touch,
    put_metadata_bytes,
)
from efs.metrics import CounterFile
from efs.osio import SystemIo
from efs.shard import header_bytes
from efs.types import DropItem, ListPage, NodeInfo
from efs.wire import Kind

_AT_ONCE_BYTES: Final = 1 * MIB
"""About what a socket holds: naming places that nothing comes for costs time."""
_SPANS_AT_ONCE: Final = MAX_KEYS_PER_CALL
_DROPS_AT_ONCE: Final = 16_384
_DISCARD: Final = memoryview(bytearray(WIRE_AHEAD_BYTES))
"""Bytes that nobody wants are written here and never read."""


class RemoteNode:
    """See the module docstring. Made with `open`; belongs to the running loop."""

    def __init__(self, place: RemotePlace, clock: Clock, counters: CounterFile) -> None:
        self._place = place
        self._clock = clock
        self._counters = counters
        self._io = SystemIo()
        self._reading = Link(place, clock, counters, self._io)
        self._changing = Link(place, clock, counters)
        self._closed = False

    @classmethod
    def begin(cls, place: RemotePlace, clock: Clock, counters: CounterFile) -> RemoteNode:
        """Begin to connect, without waiting for it. A server that refuses or is another is tried again too."""
        node = cls(place, clock, counters)
        for link in node._links:
            link.start()
        return node

    @classmethod
    async def open(cls, place: RemotePlace, clock: Clock, counters: CounterFile, wait_ms: float) -> RemoteNode:
        """Begin to connect and wait so long for it. A node that cannot be reached is one all the same, and tried again
        in the background. HandshakeFailed or IdentityMismatch when the server is there and refuses, or is another."""
        node = cls.begin(place, clock, counters)
        try:
            async with asyncio.timeout(wait_ms / 1000):
                for link in node._links:
                    await link.settled.wait()
        except TimeoutError:
            pass
        except BaseException:
            await node.close()
            raise
        refusal = next((link.refusal for link in node._links if link.refusal is not None), None)
        if refusal is not None:
            await node.close()
            raise refusal
        return node

    @property
    def _links(self) -> tuple[Link, Link]:
        return self._reading, self._changing

    async def relink(self, place: RemotePlace) -> None:
        """Go on with what is at another place: another address, or another node. What is under way is given up, and
        nothing is asked of the old server any more.

        A call that goes on after it may bring what the old node said to the new one. That is an answer about places
        whose generation is another or whose bytes do not fit the digest, as after a slot was used again."""
        if self._closed:
            return
        old, self._place = self._links, place
        self._reading = Link(place, self._clock, self._counters, self._io)
        self._changing = Link(place, self._clock, self._counters)
        for link in self._links:
            link.start()
        await asyncio.gather(*(link.close() for link in old))

    async def close(self) -> None:
        """See the contract. What is under way is given up."""
        self._closed = True
        await asyncio.gather(*(link.close() for link in self._links))

    # -- state

    @property
    def place(self) -> RemotePlace:
        return self._place

    @property
    def node_index(self) -> int:
        return self._place.node_index

    @property
    def suspect(self) -> bool:
        """See the module docstring."""
        return any(link.suspect for link in self._links)

    async def info(self, deadline: Deadline) -> NodeInfo:
        """See the contract."""
        return await self._reading.ask(Kind.INFO, b"", deadline, decode_info)

    def _require_open(self) -> None:
        if self._closed:
            raise NodeUnavailable(self.node_index, "it was closed")

    # -- look-ups

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        """None: the answer is not in this process."""
        self._require_open()
        return None

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        """See the contract."""
        require_keys(keys)
        if len(keys) <= WIRE_KEYS:
            return await self._look_up(keys, deadline)
        parts = [keys[at : at + WIRE_KEYS] for at in range(0, len(keys), WIRE_KEYS)]
        return _together([await self._look_up(part, deadline) for part in parts])

    async def _look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        decode = partial(decode_table, rows=len(keys))
        return await self._reading.ask(Kind.LOOK_UP, encode_keys(keys), deadline, decode)

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        """See the contract. Of a slab that its server shares only the table comes; so it is with more keys than fit."""
        require_keys(keys)
        if len(keys) > WIRE_KEYS:
            sink.table_came(await self.look_up(keys, deadline), None)
            return
        stretches = () if self._reading.slab is not None else sink.stretches
        ask = GetAsk(keys, stretches, sink.shard_bytes, sink.slot_bytes, sink.segments)
        if not ask.fits:
            ask = replace(ask, segments=0)
        await self._reading.ask(Kind.GET, encode_get(ask), deadline, decode_nothing, pieces=_Answer(ask, sink))

    def headers_now(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        """None: the answer is not in this process."""
        return None

    async def headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        """See the contract."""
        size = header_bytes(segments)
        step = WIRE_METADATA_BYTES // size
        parts = []
        for at in range(0, max(1, len(locations)), step):
            some = locations[at : at + step]
            places = encode_places(some, generations[at : at + step], segments)
            decode = partial(decode_headers, rows=len(some), segments=segments)
            parts.append(await self._reading.ask(Kind.HEADERS, places, deadline, decode))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    async def list(self, after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        """See the contract. A page has at most WIRE_LISTED records."""
        if not 1 <= limit <= MAX_KEYS_PER_CALL:
            raise InvalidArgument(f"limit is {limit}, must be 1 to {MAX_KEYS_PER_CALL}")
        return await self._reading.ask(Kind.LIST, encode_list(after, min(limit, WIRE_LISTED)), deadline, decode_page)

    # -- payload

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """Of the server's slab, where it shares one and maps are wanted (`efs/sharedslab.py`), else None."""
        slab = self._reading.slab
        return None if slab is None else slab.views_now(spans)

    def read_now(self, span: Span, landing: Landing) -> bool:
        """From the server's slab where it shares one (`efs/sharedslab.py`), else False."""
        slab = self._reading.slab
        return slab is not None and slab.read_now(span, landing)

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        """See the contract."""
        self._reading.require_open()
        wanted = [(at, span, landing) for at, (span, landing) in enumerate(spans) if not landing.revoked]
        for first in range(0, len(wanted), _SPANS_AT_ONCE):
            part = wanted[first : first + _SPANS_AT_ONCE]
            metadata = encode_spans([span for _, span, _ in part])
            await self._reading.ask(Kind.READ, metadata, deadline, decode_nothing, pieces=_Landings(part, landed))

    # -- changes

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        """See the contract. What the records say is checked by the node; only what cannot be said at all is refused
        here."""
        self._changing.require_open()
        check_form(batch)
        rows = min(WIRE_BODY_BYTES // batch.payload.shape[1],
                   WIRE_METADATA_BYTES // put_metadata_bytes(1, batch.headers.shape[1]))
        if len(batch.keys) <= rows:
            return await self._put(batch, deadline)
        stored = np.zeros(len(batch.keys), np.bool_)
        whys: list[str | None] = []
        full: NodeFull | None = None
        for start in range(0, len(batch.keys), rows):
            some = slice(start, start + rows)
            part = PutBatch(batch.keys[some], batch.headers[some], batch.payload[some], batch.shard_bytes, batch.stamp,
                            batch.repair)
            try:
                outcome = await self._put(part, deadline)
            except NodeFull as error:
                full = error
                continue
            stored[some] = outcome.stored
            whys.append(outcome.why)
        if full is not None and not stored.any():
            raise full
        return PutOutcome(stored, next((why for why in whys if why is not None), str(full) if full else None))

    async def _put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        body = batch.payload.reshape(-1).data
        decode = partial(decode_outcome, records=len(batch.keys))
        held = self._place.map_held
        version = held.version
        try:
            return await self._changing.ask(Kind.PUT, encode_put(batch, version), deadline, decode, body=(body,),
                                            body_bytes=len(body))
        except OutdatedMap:
            held.refused = max(held.refused, version)
            raise

    def touch(self, keys: Sequence[bytes], locations: NDArray[np.int64] | None, stamp: int) -> None:
        """See the contract."""
        require_keys(keys)
        self._reading.tell(Kind.TOUCH, encode_touch(keys, locations, stamp))

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        """See the contract. For operators."""
        dropped = 0
        for at in range(0, max(1, len(items)), _DROPS_AT_ONCE):
            part = encode_drops(items[at : at + _DROPS_AT_ONCE])
            dropped += await self._changing.ask(Kind.DROP, part, deadline, decode_count)
        return dropped

    async def verify(self, key: bytes, digest: bytes, deadline: Deadline) -> bool:
        """See the contract."""
        return await self._reading.ask(Kind.VERIFY, key + digest, deadline, decode_flag)

    async def collect(self, deadline: Deadline) -> int:
        """See the contract. For operators."""
        return await self._changing.ask(Kind.COLLECT, b"", deadline, decode_count)

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        """See the contract. For operators."""
        words_of(tags)
        return await self._changing.ask(Kind.BURY, encode_tags(tags), deadline, decode_count)

    async def tenant_bytes(self, deadline: Deadline) -> Mapping[bytes, int]:
        """See the contract."""
        return await self._reading.ask(Kind.TENANT_BYTES, b"", deadline, decode_tenant_bytes)


class _Answer:
    """`efs.link.Pieces` for a get: its table, then what it names places for. All of that or nothing: a server that does
    not go on behind its tables ends there."""

    def __init__(self, ask: GetAsk, sink: GetSink) -> None:
        self._ask = ask
        self._sink = sink
        self._landings: _Landings | None = None

    def table_came(self, metadata: bytes) -> None:
        if self._landings is not None:
            raise WireError("a second table")
        table, headers = decode_get_table(metadata, len(self._ask.keys), self._ask.segments)
        self._sink.table_came(table, headers)
        places = self._sink.places() if self._ask.stretches else ()
        self._landings = _Landings([(at, span, landing) for at, (span, landing) in enumerate(places)],
                                   self._sink.landed)

    def _shards(self) -> _Landings:
        if self._landings is None:
            raise WireError("shards before their table")
        return self._landings

    def views(self, position: int, size: int) -> Sequence[memoryview]:
        return self._shards().views(position, size)

    def came(self, position: int) -> None:
        self._shards().came(position)

    def whole(self, position: int) -> bool:
        return self._landings is not None and (position == 0 or self._landings.whole(position))


class _Landings:
    """`efs.link.Pieces` for the landings of a read: (place, span, landing) each."""

    def __init__(self, wanted: Sequence[tuple[int, Span, Landing]], landed: Callable[[int], None]) -> None:
        self._wanted = wanted
        self._landed = landed
        self._at = 0
        self._start = 0
        """Position at which the span begins that is being received."""
        self._size = sum(span.count * span.slot_bytes for _, span, _ in wanted)

    def table_came(self, metadata: bytes) -> None:
        raise WireError("a table that was not asked for")

    def views(self, position: int, size: int) -> Sequence[memoryview]:
        if self._at == len(self._wanted):
            raise WireError("more bytes than were asked for")
        _, span, landing = self._wanted[self._at]
        within = position - self._start
        size = min(size, span.count * span.slot_bytes - within, _AT_ONCE_BYTES)
        return [_DISCARD[:size]] if landing.revoked else _places(span, landing, within, size)

    def came(self, position: int) -> None:
        place, span, landing = self._wanted[self._at]
        stop = self._start + span.count * span.slot_bytes
        if position == stop:
            self._at += 1
            self._start = stop
            if not landing.revoked:
                self._landed(place)

    def whole(self, position: int) -> bool:
        return position == self._size


def _places(span: Span, landing: Landing, within: int, size: int) -> list[memoryview]:
    """Where bytes [within, within + size) of a span's slots go, as far as IOV_MAX views reach."""
    buffer, slot_bytes, strides = landing.buffer, span.slot_bytes, landing.strides
    if len(strides) == 1 and strides[0].source == 0 and strides[0].size == slot_bytes:
        start, step = strides[0].start, strides[0].step
        if step == slot_bytes:
            return [buffer[start + within : start + within + size]]
        row, offset = divmod(within, slot_bytes)
        stop = within + size
        views = [buffer[start + row * step + offset : start + row * step + min(slot_bytes, offset + size)]]
        last = min(-(-stop // slot_bytes), row + IOV_MAX)
        views += [buffer[at : at + slot_bytes] for at in range(start + (row + 1) * step, start + last * step, step)]
        surplus = last * slot_bytes - stop
        if surplus > 0 and len(views) > 1:
            views[-1] = views[-1][: slot_bytes - surplus]
        return views
    return _scattered(span, landing, within, size)


def _scattered(span: Span, landing: Landing, within: int, size: int) -> list[memoryview]:
    """The same for pieces with gaps between them: what is in no stride goes nowhere."""
    views: list[memoryview] = []
    position, stop = within, within + size
    while position < stop and len(views) < IOV_MAX:
        row, offset = divmod(position, span.slot_bytes)
        end = span.slot_bytes
        view: memoryview | None = None
        for stride in landing.strides:
            if offset < stride.source:
                end = stride.source
                break
            if offset < stride.source + stride.size:
                end = stride.source + stride.size
                at = stride.start + row * stride.step + offset - stride.source
                view = landing.buffer[at : at + min(end - offset, stop - position)]
                break
        length = min(end - offset, stop - position)
        if view is None:
            view = _DISCARD[: min(length, len(_DISCARD))]
        views.append(view)
        position += len(view)
    return views


def _together(tables: Sequence[NodeTable]) -> NodeTable:
    """Tables of consecutive keys as one."""
    extra: list[VersionRow] = []
    start = 0
    for table in tables:
        extra += [VersionRow(row.row + start, row.digest, row.location, row.generation, row.shard, row.trusted)
                  for row in table.extra]
        start += len(table.location)
    return NodeTable(np.concatenate([table.digest for table in tables]),
                     np.concatenate([table.location for table in tables]),
                     np.concatenate([table.generation for table in tables]),
                     np.concatenate([table.shard for table in tables]),
                     np.concatenate([table.trusted for table in tables]), tuple(extra))
