"""One client's connection at a server: handshake, requests, answers.

Every request runs as a task of its own, is answered once, and is over by its deadline, which the server's own clock
measures. CANCEL ends the task; what a node has begun it finishes (`efs/contract.py`). When the connection ends, all of
its tasks are.

*Bounds.* Before the handshake is done, frames have no body and WIRE_HANDSHAKE_BYTES of metadata. Then WIRE_IN_FLIGHT
requests at a time. The bytes of all requests of all connections are counted against one budget (`Intake`) before they
are received; a put that does not fit is received into nowhere and refused, so that the connection lives on, and puts
leave room for requests without a body. READs are read as fast as the client takes them, WIRE_SEND_QUEUE_BYTES ahead and
WIRE_READS_AT_ONCE pieces at a time. Of tables, headers, lists and bytes by tenant WIRE_LARGE_ANSWERS are made at a
time, and none while more than that many bytes wait for the client. A client that does not take its answers is not
listened to any more once WIRE_UNREAD_BYTES wait for it.

*Bodies* are received into memory that is used again for later ones, once the node has answered the put: then nothing
refers to it. A put that was cancelled, failed or came to its deadline may still be written from its body, which is
left to it for good and counts until it is gone.

*What is stored was checked.* A process that embeds its nodes may trust its own memory; a server does not trust the
network: the payload of every record must have the checksum in its header, and zeros behind it. That a header is sound
and of this key and place is then checked by the node itself (`efs/batch.py`), as of every put.

*Reads* are sent from the node's memory map where it shows one and the slots are resident, else from memory that the
node has read them into. A slot may be overwritten while it is being sent: the client verifies what it gets.
"""

from __future__ import annotations

import asyncio
import logging
import random
import socket
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.clock import Clock, Deadline
from efs.contract import ABSENT, Landing, Node, NodeTable, PutBatch, Span, Stride
from efs.errors import (
    EfsError,
    IdentityMismatch,
    InvalidArgument,
    NodeUnavailable,
    OutdatedMap,
    PlaceNotGiven,
    WireError,
)
from efs.handshake import (
    OPERATOR_KINDS,
    Challenge,
    Hello,
    Role,
    Tokens,
    Welcome,
    client_proof,
    decode_hello,
    decode_proof,
    encode_message,
    require_proof,
    server_proof,
)
from efs.limits import (
    NONCE_BYTES,
    WIRE_FRAME_MS,
    WIRE_HANDSHAKE_BYTES,
    WIRE_HANDSHAKE_MS,
    WIRE_IN_FLIGHT,
    WIRE_LARGE_ANSWERS,
    WIRE_LOST_MS,
    WIRE_PIECE_BYTES,
    WIRE_READS_AT_ONCE,
    WIRE_SEND_QUEUE_BYTES,
    WIRE_SMALL_BYTES,
    WIRE_SMALL_SHARE,
    WIRE_UNREAD_BYTES,
)
from efs.messages import (
    GetAsk,
    PutHead,
    decode_drops,
    decode_get,
    decode_keys,
    decode_list,
    decode_places,
    decode_put,
    decode_record_name,
    decode_spans,
    decode_tags,
    decode_touch,
    encode_error,
    encode_get_table,
    encode_info,
    encode_number,
    encode_outcome,
    encode_page,
    encode_position,
    encode_table,
    encode_tenant_bytes,
)
from efs.metrics import CounterFile
from efs.scratch import Scratch
from efs.servedspare import ServedSpare
from efs.shard import LOCAL_BYTES, header_bytes, header_dtype, segments_of_entry
from efs.sharedslab import SlabPlace
from efs.spans import cuts
from efs.staging import buffer_bytes
from efs.stream import Stream
from efs.wire import Header, Kind, encode_frame

_LOG: Final = logging.getLogger(__name__)
_REQUESTS: Final = frozenset({Kind.LOOK_UP, Kind.HEADERS, Kind.READ, Kind.PUT, Kind.DROP, Kind.VERIFY, Kind.LIST,
                              Kind.COLLECT, Kind.INFO, Kind.BURY, Kind.TENANT_BYTES, Kind.TAKE_PLACE, Kind.GET})
_LARGE_ANSWERS: Final = frozenset({Kind.LOOK_UP, Kind.HEADERS, Kind.LIST, Kind.TENANT_BYTES})


@dataclass(slots=True)
class MapSeen:
    """The version of the cluster's map by which a node goes: the one in etcd where its server is registered there, else
    the latest one by which a client has written. It is forgotten when the server ends, and soon heard again."""

    version: int = 0
    _told: bool = False

    def told(self, version: int) -> None:
        """What etcd says counts, also when it is less: somebody has put an older map back."""
        self.version, self._told = version, True

    def require(self, version: int, node_index: int) -> None:
        """OutdatedMap for a write by an older one. 0 is of a client that goes by no map."""
        if 0 < version < self.version:
            raise OutdatedMap(node_index, f"it is by version {version} of the map, the node knows of {self.version}")

    def wrote(self, version: int) -> None:
        """Somebody has written by this version, in a request that was sound."""
        if not self._told:
            self.version = max(self.version, version)


@dataclass(frozen=True, slots=True)
class ServedNode:
    """A node and what identifies it. durability: what its acknowledgements promise. slab: what clients of the same
    machine may read by themselves, if anything."""

    node: Node
    cluster_id: str
    node_id: str
    durability: str
    counters: CounterFile
    map_seen: MapSeen = field(default_factory=MapSeen)
    slab: SlabPlace | None = None

    @property
    def node_index(self) -> int:
        return self.node.node_index


Served = ServedNode | ServedSpare


@dataclass(slots=True)
class Intake:
    """Bytes of requests that a server holds, against what it may hold."""

    most_bytes: int
    held_bytes: int = 0

    def take(self, size: int, *, small: bool) -> bool:
        """Whether there is room, also for the small ones that are to come if this is not one."""
        most = self.most_bytes if small else int(self.most_bytes * (1 - WIRE_SMALL_SHARE))
        if self.held_bytes + size > most:
            return False
        self.held_bytes += size
        return True

    def keep(self, payload: NDArray[np.uint8]) -> None:
        """A view of a body that may still be written from: it counts until nothing refers to it any more."""
        # Views of a view refer to what that one is of, not to itself.
        body = payload.base
        self.held_bytes += payload.nbytes
        weakref.finalize(body, self.give, payload.nbytes).atexit = False

    def give(self, size: int) -> None:
        self.held_bytes -= size


class SessionHost(Protocol):
    """What a session needs of its server."""

    tokens: Tokens
    intake: Intake
    bodies: Scratch
    clock: Clock
    draining: bool
    ahead: memoryview

    @property
    def nodes(self) -> Mapping[str, Served]:
        """By node id."""
        ...

    def ended(self, session: Session, why: str) -> None: ...


class Session:
    """A `FrameSink` for what one client sends."""

    def __init__(self, host: SessionHost, connection: socket.socket, peer: str) -> None:
        self._host = host
        self.peer = peer
        self._hello: Hello | None = None
        self._nonce = random.SystemRandom().randbytes(NONCE_BYTES)
        self._served: Served | None = None
        self._role = Role.DATA
        self._local = connection.family == socket.AF_UNIX
        self._began = host.clock.monotonic()
        self._running: dict[int, asyncio.Task[None]] = {}
        self._coming = 0
        self._put: PutHead | None = None
        self._body: bytearray | None = None
        self._nowhere = memoryview(bytearray())
        self._large = asyncio.Semaphore(WIRE_LARGE_ANSWERS)
        self._reads = asyncio.Semaphore(WIRE_READS_AT_ONCE)
        self._stream = Stream(connection, self, host.clock, self._lost, host.ahead, WIRE_UNREAD_BYTES)

    @property
    def busy(self) -> bool:
        """Whether a request is under way, or its answer is."""
        return bool(self._running) or self._stream.queued_bytes > 0

    @property
    def node_id(self) -> str | None:
        """The node that its client was let in to."""
        return None if self._served is None else self._served.node_id

    @property
    def in_flight(self) -> int:
        """Requests that are not answered yet."""
        return len(self._running)

    def watch(self) -> None:
        """Close the connection when something takes too long: called now and then."""
        age_ms = (self._host.clock.monotonic() - self._began) * 1000
        if self._served is None and age_ms > WIRE_HANDSHAKE_MS:
            self.close("the handshake takes too long")
        elif self._stream.frame_ms > WIRE_FRAME_MS:
            self.close("a frame takes too long to arrive")
        elif self._stream.stuck_ms > WIRE_LOST_MS:
            self.close("the client does not take its answers")

    def close(self, why: str) -> None:
        self._stream.close(why)

    def _lost(self, why: str) -> None:
        for task in self._running.values():
            task.cancel()
        self._host.intake.give(self._coming)
        self._coming, self._body, self._put = 0, None, None
        if self._served is not None and "closed the connection" not in why:
            self._served.counters.add("wire_lost")
        self._host.ended(self, why)

    # -- frames in

    def expect(self, header: Header) -> None:
        if self._served is None:
            wanted = Kind.HELLO if self._hello is None else Kind.PROOF
            if header.kind is not wanted or header.metadata_bytes > WIRE_HANDSHAKE_BYTES:
                raise WireError(f"a {header.kind.name} of {header.metadata_bytes} bytes where a {wanted.name} must be")
            return
        if header.kind in _REQUESTS:
            if header.request_id in self._running:
                raise WireError(f"request id {header.request_id} is in use")
            if len(self._running) >= WIRE_IN_FLIGHT:
                raise WireError(f"more than {WIRE_IN_FLIGHT} requests at once")
        elif header.kind not in (Kind.CANCEL, Kind.TOUCH):
            raise WireError(f"a {header.kind.name} from a client")
        if not self._host.intake.take(header.metadata_bytes, small=header.metadata_bytes <= WIRE_SMALL_BYTES):
            raise WireError("the server holds as many requests as it may")
        self._coming = header.metadata_bytes

    def begin_body(self, header: Header, metadata: bytes) -> None:
        self._put = decode_put(metadata, header.body_bytes)
        if self._host.intake.take(header.body_bytes, small=False):
            self._coming += header.body_bytes
            self._body = self._host.bodies.take(buffer_bytes(header.body_bytes))
        elif len(self._nowhere) == 0:
            self._nowhere = memoryview(bytearray(WIRE_HANDSHAKE_BYTES))

    def body_views(self, offset: int, size: int) -> Sequence[memoryview]:
        if self._body is not None:
            return [memoryview(self._body)[offset : offset + size]]
        return [self._nowhere[:size]]

    def body_came(self, offset: int) -> None:
        pass

    def complete(self, header: Header, metadata: bytes) -> None:
        held, self._coming = self._coming, 0
        head, body, self._put, self._body = self._put, self._body, None, None
        if self._served is None:
            self._shake(header, metadata)
        elif header.kind is Kind.CANCEL:
            self._host.intake.give(held)
            task = self._running.get(header.request_id)
            if task is not None:
                task.cancel()
        elif header.kind is Kind.TOUCH:
            self._host.intake.give(held)
            if isinstance(self._served, ServedNode):
                self._served.node.touch(*decode_touch(metadata))
        else:
            self._start(self._served, header, metadata, head, body, held)

    def _start(self, served: Served, header: Header, metadata: bytes, head: PutHead | None, body: bytearray | None,
               held: int) -> None:
        try:
            work = self._work(served, header, metadata, head, body)
        except BaseException:
            self._host.intake.give(held)
            raise
        task = asyncio.create_task(self._serve(served.node_index, header, work))
        self._running[header.request_id] = task
        task.add_done_callback(partial(self._over, served.node_index, header.request_id, held))

    # -- handshake

    def _shake(self, header: Header, metadata: bytes) -> None:
        try:
            if header.kind is Kind.HELLO:
                self._greet(decode_hello(metadata))
            else:
                self._admit(decode_proof(metadata).proof)
        except EfsError as error:
            self._stream.send(encode_frame(Kind.ERROR, 0, encode_error(error)))
            raise WireError(str(error)) from error

    def _greet(self, hello: Hello) -> None:
        self._hello = hello
        proof = server_proof(self._host.tokens.of(Role(hello.role)), hello, self._nonce)
        self._stream.send(encode_frame(Kind.CHALLENGE, 0, encode_message(Challenge(self._nonce, proof))))

    def _admit(self, proof: bytes) -> None:
        assert self._hello is not None
        hello, role = self._hello, Role(self._hello.role)
        token = self._host.tokens.of(role)
        if token is not None:
            require_proof(proof, client_proof(token, hello, self._nonce), "the client", role)
        served = self._host.nodes.get(hello.node_id)
        if served is None:
            raise IdentityMismatch("the server", "what it serves", ", ".join(sorted(self._host.nodes)), hello.node_id)
        if served.cluster_id != hello.cluster_id:
            raise IdentityMismatch(f"node {hello.node_id}", "cluster id", served.cluster_id, hello.cluster_id)
        if isinstance(served, ServedSpare) and hello.node_index >= 0:
            raise PlaceNotGiven(f"node {hello.node_id} is a spare that has not been given the place {hello.node_index}")
        if served.node_index != hello.node_index:
            wanted = hello.node_index if hello.node_index >= 0 else "that of a spare"
            raise IdentityMismatch(f"node {hello.node_id}", "index", served.node_index, wanted)
        self._served, self._role = served, role
        served.counters.add("wire_sessions")
        slab = served.slab if self._local and isinstance(served, ServedNode) else None
        welcome = Welcome(served.node_index, served.durability, slab)
        self._stream.send(encode_frame(Kind.WELCOME, 0, encode_message(welcome)))

    # -- requests

    def _work(self, served: Served, header: Header, metadata: bytes, head: PutHead | None,
              body: bytearray | None) -> Callable[[Deadline], Awaitable[bytes]]:
        """What a request asks for, its metadata decoded. WireError when they cannot be."""
        kind = header.kind
        if kind in OPERATOR_KINDS and self._role is not Role.OPERATOR:
            return partial(_refuse, InvalidArgument(f"{kind.name} is for operators"))
        if self._host.draining:
            return partial(_refuse, NodeUnavailable(served.node_index, "its server is ending"))
        if isinstance(served, ServedSpare):
            return served.work(kind, metadata)
        node = served.node
        if kind is Kind.TAKE_PLACE:
            return partial(_refuse, InvalidArgument("it is a node and has its place"))
        if kind is Kind.PUT:
            if head is None:
                raise WireError("a put without a body")
            return partial(self._store, node, head, body)
        if kind is Kind.READ:
            return partial(self._read, node, header.request_id, decode_spans(metadata))
        if kind is Kind.GET:
            return partial(self._get, node, header.request_id, decode_get(metadata))
        if kind is Kind.LOOK_UP:
            return partial(_look_up, node, decode_keys(metadata))
        if kind is Kind.HEADERS:
            return partial(_headers, node, *decode_places(metadata))
        if kind is Kind.DROP:
            items = decode_drops(metadata)
            return partial(_counted, lambda deadline: node.drop(items, deadline))
        if kind is Kind.VERIFY:
            key, digest = decode_record_name(metadata)
            return partial(_counted, lambda deadline: node.verify(key, digest, deadline))
        if kind is Kind.LIST:
            return partial(_list, node, *decode_list(metadata))
        if kind is Kind.BURY:
            tags = decode_tags(metadata)
            return partial(_counted, lambda deadline: node.bury(tags, deadline))
        if kind is Kind.TENANT_BYTES:
            return partial(_tenant_bytes, node)
        if kind is Kind.COLLECT:
            return partial(_counted, node.collect)
        return partial(_info, node)

    async def _serve(self, node_index: int, header: Header, work: Callable[[Deadline], Awaitable[bytes]]) -> None:
        deadline = Deadline.after_ms(self._host.clock, header.deadline_ms)
        try:
            try:
                async with asyncio.timeout(header.deadline_ms / 1000):
                    answer = encode_frame(Kind.ANSWER, header.request_id, await self._made(header.kind, work, deadline))
            except TimeoutError as error:
                raise NodeUnavailable(node_index, "no answer by the deadline") from error
        except EfsError as error:
            answer = encode_frame(Kind.ERROR, header.request_id, encode_error(error))
        except asyncio.CancelledError:
            answer = _cancelled(node_index, header.request_id)
        except Exception:
            _LOG.exception("a %s failed in a way that it must not", header.kind.name)
            broken = NodeUnavailable(node_index, "its server has a defect: see its log")
            answer = encode_frame(Kind.ERROR, header.request_id, encode_error(broken))
        self._running.pop(header.request_id, None)
        self._stream.send(answer)

    async def _made(self, kind: Kind, work: Callable[[Deadline], Awaitable[bytes]], deadline: Deadline) -> bytes:
        """The answer; a large one only with room for it."""
        if kind not in _LARGE_ANSWERS:
            return await work(deadline)
        async with self._large:
            await self._stream.room(WIRE_SEND_QUEUE_BYTES)
            return await work(deadline)

    def _over(self, node_index: int, request_id: int, held: int, task: asyncio.Task[None]) -> None:
        """Of every request; one that was cancelled before its task began was not answered by it."""
        self._host.intake.give(held)
        if self._running.get(request_id) is task:
            del self._running[request_id]
            self._stream.send(_cancelled(node_index, request_id))

    async def _store(self, node: Node, head: PutHead, body: bytearray | None, deadline: Deadline) -> bytes:
        if body is None:
            raise NodeUnavailable(node.node_index, "its server holds as many requests as it may")
        assert isinstance(self._served, ServedNode)
        self._served.map_seen.require(head.map_version, node.node_index)
        batch = head.batch(body)
        check_payload(batch)
        try:
            outcome = await node.put(batch, deadline)
        except BaseException:
            self._host.intake.keep(batch.payload)
            raise
        self._served.map_seen.wrote(head.map_version)
        self._host.bodies.give(body)
        return encode_outcome(outcome)

    async def _get(self, node: Node, request_id: int, ask: GetAsk, deadline: Deadline) -> bytes:
        """Send the table, with wanted headers if they are in memory: it does not wait for a disk. Then the slots of the
        stretches, unless tables of other nodes of this process would wait for them: the client waits for all tables."""
        async with self._large:
            await self._stream.room(WIRE_SEND_QUEUE_BYTES)
            table = node.look_up_now(ask.keys)
            if table is None:
                table = await node.look_up(ask.keys, deadline)
            headers = _headers_of(node, table, ask.segments) if ask.segments else None
            self._stream.send(encode_frame(Kind.TABLE, request_id, encode_get_table(table, headers)))
        if len(self._host.nodes) > 1:
            return b""
        spans = [Span(location, count, ask.shard_bytes, ask.slot_bytes)
                 for stretch in cuts(table.location, ask.stretches) for _, location, count in stretch]
        return await self._read(node, request_id, spans, deadline) if spans else b""

    async def _read(self, node: Node, request_id: int, spans: Sequence[Span], deadline: Deadline) -> bytes:
        """Send the slots of all spans, a piece at a time."""
        assert self._served is not None
        counters, position = self._served.counters, 0
        for parts in _pieces(spans):
            async with self._reads:
                await self._stream.room(WIRE_SEND_QUEUE_BYTES)
                bodies = await slots_of(node, parts, deadline)
                size = sum(map(len, bodies))
                head = encode_frame(Kind.PIECE, request_id, encode_position(position), body_bytes=size)
                self._stream.send(head, *(body.data for body in bodies))
            position += size
            counters.add("wire_read_bytes", size)
        counters.add("wire_reads")
        return b""


def _cancelled(node_index: int, request_id: int) -> bytes:
    gone = NodeUnavailable(node_index, "the request was cancelled")
    return encode_frame(Kind.ERROR, request_id, encode_error(gone))


def check_payload(batch: PutBatch) -> None:
    """InvalidArgument unless each payload has the checksum in its header, sound or not, and zeros behind it."""
    size = batch.shard_bytes
    fields = batch.headers.reshape(-1).view(header_dtype(segments_of_entry(batch.headers.shape[1] + LOCAL_BYTES)))
    for row, (slot, expected) in enumerate(zip(batch.payload, fields["payload_hash"].tolist(), strict=True)):
        if xxh3_64(slot[:size]) != expected:
            raise InvalidArgument(f"row {row} of the batch has a payload that its header does not describe")
    if batch.payload[:, size:].any():
        raise InvalidArgument("a payload of the batch has something behind its end")


def _pieces(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Spans cut and put together so that each group has about WIRE_PIECE_BYTES, at least one slot."""
    group: list[Span] = []
    size = 0
    for span in spans:
        done = 0
        while done < span.count:
            if group and size + span.slot_bytes > WIRE_PIECE_BYTES:
                yield group
                group, size = [], 0
            count = min(span.count - done, max(1, (WIRE_PIECE_BYTES - size) // span.slot_bytes))
            group.append(Span(span.location + done, count, span.shard_bytes, span.slot_bytes))
            done += count
            size += count * span.slot_bytes
    if group:
        yield group


async def slots_of(node: Node, spans: Sequence[Span], deadline: Deadline) -> list[NDArray[np.uint8]]:
    """The bytes of each span's slots, flat: views of the node's memory where it shows them, else copies."""
    shown = node.views_now(spans)
    bodies: list[NDArray[np.uint8]] = []
    missing: list[tuple[Span, Landing]] = []
    for at, span in enumerate(spans):
        view = shown[at] if shown is not None else None
        if view is not None:
            bodies.append(view.reshape(-1))
            continue
        body = np.empty(span.count * span.slot_bytes, np.uint8)
        landing = Landing(body.data, (Stride(0, span.slot_bytes, 0, span.slot_bytes),))
        if not node.read_now(span, landing):
            missing.append((span, landing))
        bodies.append(body)
    if missing:
        await node.read(missing, lambda _: None, deadline)
    return bodies


async def _refuse(error: EfsError, deadline: Deadline) -> bytes:
    raise error


async def _look_up(node: Node, keys: Sequence[bytes], deadline: Deadline) -> bytes:
    table = node.look_up_now(keys)
    return encode_table(table if table is not None else await node.look_up(keys, deadline))


async def _headers(node: Node, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                   deadline: Deadline) -> bytes:
    found = node.headers_now(locations, generations, segments)
    return (found if found is not None else await node.headers(locations, generations, segments, deadline)).tobytes()


def _headers_of(node: Node, table: NodeTable, segments: int) -> NDArray[np.uint8] | None:
    """One for each row of a table, of zeros where nothing is held; None where that is not in memory."""
    held = np.flatnonzero(table.location != ABSENT)
    found = node.headers_now(table.location[held], table.generation[held], segments)
    if found is None:
        return None
    rows = np.zeros((len(table.location), header_bytes(segments)), np.uint8)
    rows[held] = found
    return rows


async def _counted(ask: Callable[[Deadline], Awaitable[int]], deadline: Deadline) -> bytes:
    return encode_number(await ask(deadline))


async def _list(node: Node, after: bytes | None, limit: int, deadline: Deadline) -> bytes:
    return encode_page(await node.list(after, limit, deadline))


async def _tenant_bytes(node: Node, deadline: Deadline) -> bytes:
    return encode_tenant_bytes(await node.tenant_bytes(deadline))


async def _info(node: Node, deadline: Deadline) -> bytes:
    return encode_info(await node.info(deadline))
