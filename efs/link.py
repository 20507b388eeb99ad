"""A client's connection to one node at a server: made, kept, and made anew when it is lost.

While there is no connection `ask` refuses at once, so that a node that is gone costs a caller nothing; it is tried
again in the background, after PROBE_BACKOFF_MS, doubling up to MAX_PROBE_BACKOFF_MS with each failure in a row.

*Answers.* Every request keeps its id until the server has answered it, also when nobody waits any more: then the
server is told (CANCEL), and whatever still comes under that id is received into memory that nobody reads. A caller's
buffer gets bytes only while its `ask` is being awaited, and of those only what its `Pieces` want at that moment.

*Overdue.* A server answers every request by its deadline, a cancelled one at once. A link is *suspect* while it owes
an answer and has been silent for HUNG_MS, or is that much late with one; that is what a stopped process, a dead
network and a dripping one look like from here. It is asked nothing until it has answered. After WIRE_LOST_MS of that
the connection is given up. An answer that nobody asked for ends it too.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Protocol, TypeVar

from efs.clock import Clock, Deadline
from efs.endpoint import Endpoint, connect
from efs.errors import (
    EfsError,
    HandshakeFailed,
    IdentityMismatch,
    InvalidArgument,
    NodeUnavailable,
    PlaceNotGiven,
    WireError,
)
from efs.handshake import (
    Hello,
    Role,
    Tokens,
    client_proof,
    decode_challenge,
    decode_welcome,
    encode_message,
    require_proof,
    server_proof,
)
from efs.handshake import Proof as ProofMessage
from efs.limits import (
    HUNG_MS,
    MAX_PROBE_BACKOFF_MS,
    NONCE_BYTES,
    PROBE_BACKOFF_MS,
    WIRE_AHEAD_BYTES,
    WIRE_HANDSHAKE_BYTES,
    WIRE_HANDSHAKE_MS,
    WIRE_IN_FLIGHT,
    WIRE_LOST_MS,
    WIRE_UNSENT_BYTES,
    WIRE_WATCH_MS,
)
from efs.messages import decode_error, decode_position
from efs.metrics import CounterFile
from efs.osio import Io
from efs.sharedslab import SharedSlab
from efs.stream import Buffer, Stream
from efs.types import NO_PLACE
from efs.wire import Header, Kind, encode_frame

T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)


@dataclass(slots=True)
class MapHeld:
    """The version of the cluster's map by which a client writes, the same for all of its nodes; 0: by none. refused:
    the latest one for which some node has refused a write."""

    version: int = 0
    refused: int = 0

    @property
    def outdated(self) -> bool:
        return self.refused >= self.version > 0


@dataclass(frozen=True, slots=True)
class RemotePlace:
    """Which node is wanted, where, and in which role; with the index NO_PLACE a spare. durability: what its
    acknowledgements must promise; None: any. mapped: read the slab that it shares through a memory map."""

    endpoint: Endpoint
    cluster_id: str
    node_id: str
    node_index: int
    role: Role = Role.DATA
    tokens: Tokens = field(default_factory=Tokens)
    durability: str | None = None
    map_held: MapHeld = field(default_factory=MapHeld)
    mapped: bool = False

    def __str__(self) -> str:
        return "a spare" if self.node_index == NO_PLACE else f"node {self.node_index}"


class Pieces(Protocol):
    """Where the bodies of PIECEs go: bytes [0, size) of everything that was asked for. Any method may raise WireError,
    which ends the connection."""

    def table_came(self, metadata: bytes) -> None:
        """A TABLE."""
        ...

    def views(self, position: int, size: int) -> Sequence[memoryview]:
        """Where the bytes from `position` on belong, as `FrameSink.body_views`."""
        ...

    def came(self, position: int) -> None:
        """The bytes below `position` are there."""
        ...

    def whole(self, position: int) -> bool:
        """Whether `position` is the end."""
        ...


@dataclass(slots=True)
class _Pending:
    """A request without its answer. answer: None once nobody waits for it. due: when it must be answered."""

    answer: asyncio.Future[bytes] | None
    pieces: Pieces | None
    began: float
    due: float
    position: int = 0


class Link:
    """A `FrameSink` for what a server sends. `start` begins to connect."""

    def __init__(self, place: RemotePlace, clock: Clock, counters: CounterFile, io: Io | None = None) -> None:
        """io: with what to open a slab that the server shares; None: leave it alone."""
        self._place = place
        self._io = io
        self._clock = clock
        self._counters = counters
        self._stream: Stream | None = None
        self._pending: dict[int, _Pending] = {}
        self._next_id = 1
        self._ready = False
        self._was_ready = False
        self._why = "it is not connected yet"
        self._closed = False
        self._hello: Hello | None = None
        self._challenged = False
        self._nowhere = memoryview(bytearray(WIRE_AHEAD_BYTES))
        self._receiving: _Pending | None = None
        self._ended = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.settled = asyncio.Event()
        """Whether the first attempt has ended."""
        self.slab: SharedSlab | None = None
        """The server's slab, while there is a connection and the server shares it."""
        self.refusal: EfsError | None = None
        """Why the server does not take this client, where trying again will not help by itself."""

    def start(self) -> None:
        self._task = asyncio.create_task(self._keep(), name=f"link to {self._place}")

    @property
    def ready(self) -> bool:
        return self._ready

    @property
    def suspect(self) -> bool:
        """Whether there is no connection, or one that owes an answer; see the module docstring."""
        return not self._ready or self._owing_ms > HUNG_MS

    @property
    def _owing_ms(self) -> float:
        """For how long the server is silent or late with an answer that it owes."""
        if not self._pending or self._stream is None:
            return 0.0
        now = self._clock.monotonic()
        silent = now - max(self._stream.received_at, next(iter(self._pending.values())).began)
        late = now - min(pending.due for pending in self._pending.values())
        return max(silent, late) * 1000

    def unavailable(self, why: str) -> NodeUnavailable:
        return NodeUnavailable(self._place.node_index, why)

    def require_open(self) -> None:
        if self._closed:
            raise self.unavailable("it was closed")

    # -- asking

    async def ask(self, kind: Kind, metadata: bytes, deadline: Deadline, decode: Callable[[bytes], T], *,
                  body: Sequence[Buffer] = (), body_bytes: int = 0, pieces: Pieces | None = None) -> T:
        """What `decode` makes of the metadata of the answer. The body must not change until it is there, also when the
        call was given up. NodeUnavailable, also for an answer that cannot be decoded, which ends the connection; or
        what the server answered instead. WireError for what no frame can hold; then nothing is sent."""
        stream = self._require_ready()
        left = deadline.left()
        if left <= 0:
            raise self.unavailable("no answer by the deadline")
        request_id, self._next_id = self._next_id, self._next_id + 1
        frame = encode_frame(kind, request_id, metadata, body_bytes=body_bytes, deadline_ms=max(1, int(left * 1000)))
        answer: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        now = self._clock.monotonic()
        pending = self._pending[request_id] = _Pending(answer, pieces, now, now + left)
        stream.send(frame, *body)
        try:
            await asyncio.wait((answer,), timeout=left)
            if not answer.done():
                raise self.unavailable("no answer by the deadline")
            return decode(answer.result())
        except WireError as error:
            stream.close(str(error))
            raise self.unavailable(str(error)) from error
        finally:
            if self._pending.get(request_id) is pending:
                self._give_up(request_id, pending)
            if answer.done() and not answer.cancelled():
                answer.exception()

    def tell(self, kind: Kind, metadata: bytes) -> None:
        """Send something that has no answer, if it can be sent."""
        if self._ready and self._stream is not None and self._stream.queued_bytes < WIRE_UNSENT_BYTES:
            self._stream.send(encode_frame(kind, 0, metadata))

    def _require_ready(self) -> Stream:
        self.require_open()
        stream = self._stream
        if stream is None or not self._ready:
            raise self.unavailable(self._why)
        if self.suspect:
            raise self.unavailable("it owes an answer")
        if len(self._pending) >= WIRE_IN_FLIGHT:
            raise self.unavailable(f"{len(self._pending)} requests wait for its answer")
        if stream.queued_bytes >= WIRE_UNSENT_BYTES:
            raise self.unavailable("it does not take what is sent")
        return stream

    def _give_up(self, request_id: int, pending: _Pending) -> None:
        """Nobody waits any more: what still comes lands nowhere."""
        pending.answer = pending.pieces = None
        pending.due = min(pending.due, self._clock.monotonic())
        self._counters.add("remote_late")
        if self._stream is not None:
            self._stream.send(encode_frame(Kind.CANCEL, request_id))

    # -- frames in

    def expect(self, header: Header) -> None:
        if not self._ready:
            wanted = Kind.WELCOME if self._challenged else Kind.CHALLENGE
            if header.kind not in (wanted, Kind.ERROR) or header.metadata_bytes > WIRE_HANDSHAKE_BYTES:
                raise WireError(f"a {header.kind.name} of {header.metadata_bytes} bytes where a {wanted.name} must be")
            return
        if header.kind not in (Kind.ANSWER, Kind.PIECE, Kind.ERROR, Kind.TABLE):
            raise WireError(f"a {header.kind.name} from a server")
        if header.request_id not in self._pending:
            raise WireError(f"an answer to request {header.request_id}, which is not waiting for one")

    def begin_body(self, header: Header, metadata: bytes) -> None:
        pending = self._pending[header.request_id]
        if decode_position(metadata) != pending.position:
            raise WireError("a piece in the wrong place")
        self._receiving = pending

    def body_views(self, offset: int, size: int) -> Sequence[memoryview]:
        pending = self._receiving
        if pending is not None and pending.pieces is not None:
            return pending.pieces.views(pending.position + offset, size)
        return [self._nowhere[:size]]

    def body_came(self, offset: int) -> None:
        pending = self._receiving
        if pending is None or pending.pieces is None:
            return
        self._tell(pending, partial(pending.pieces.came, pending.position + offset))

    @staticmethod
    def _tell(pending: _Pending, news: Callable[[], None]) -> None:
        """Tell whoever waits that something is there. What goes wrong with them is theirs to see."""
        try:
            news()
        except WireError:
            raise
        except BaseException as error:
            pending.pieces = None
            if pending.answer is not None and not pending.answer.done():
                pending.answer.set_exception(error)

    def complete(self, header: Header, metadata: bytes) -> None:
        if not self._ready:
            try:
                self._shake(header, metadata)
            except (HandshakeFailed, IdentityMismatch) as error:
                self.refusal = error
                raise
        elif header.kind is Kind.PIECE:
            self._receiving = None
            pending = self._pending.get(header.request_id)
            if pending is not None:
                pending.position += header.body_bytes
        elif header.kind is Kind.TABLE:
            pending = self._pending[header.request_id]
            if pending.pieces is not None:
                self._tell(pending, partial(pending.pieces.table_came, metadata))
            elif pending.answer is not None and not pending.answer.done():
                raise WireError("a table that was not asked for")
        else:
            # Until it is answered it is pending, so that an answer that cannot be read ends it with the connection.
            self._answered(self._pending[header.request_id], header, metadata)
            del self._pending[header.request_id]

    def _answered(self, pending: _Pending, header: Header, metadata: bytes) -> None:
        answer = pending.answer
        if answer is None or answer.done():
            return
        if header.kind is Kind.ERROR:
            answer.set_exception(decode_error(metadata, self._place.node_index))
        elif pending.pieces is not None and not pending.pieces.whole(pending.position):
            answer.set_exception(self.unavailable("its answer ended early"))
        else:
            answer.set_result(metadata)

    # -- handshake

    def _shake(self, header: Header, metadata: bytes) -> None:
        place, hello = self._place, self._hello
        assert hello is not None
        assert self._stream is not None
        if header.kind is Kind.ERROR:
            said = decode_error(metadata, place.node_index)
            if isinstance(said, PlaceNotGiven):
                raise said
            raise HandshakeFailed(f"{place} at {place.endpoint}: {_reason(said)}")
        if header.kind is Kind.CHALLENGE:
            challenge = decode_challenge(metadata)
            token = place.tokens.of(place.role)
            if token is not None:
                expected = server_proof(token, hello, challenge.nonce)
                require_proof(challenge.proof, expected, f"the server {place.endpoint}", place.role, _hint(place))
            self._challenged = True
            proof = client_proof(token, hello, challenge.nonce)
            self._stream.send(encode_frame(Kind.PROOF, 0, encode_message(ProofMessage(proof))))
            return
        welcome = decode_welcome(metadata)
        if welcome.node_index != place.node_index:
            raise IdentityMismatch(place.endpoint, "node index", welcome.node_index, place.node_index)
        if place.durability not in (None, welcome.durability):
            raise IdentityMismatch(place.endpoint, "durability", welcome.durability, place.durability)
        if self._io is not None and welcome.slab is not None:
            self.slab = SharedSlab.open(self._io, welcome.slab, place.node_id, mapped=place.mapped)
        self._ready = self._was_ready = True
        self.refusal = None
        self._counters.add("remote_connected")
        self.settled.set()

    # -- life

    async def _keep(self) -> None:
        """Connect, and again whenever the connection is lost."""
        failures = 0
        while not self._closed:
            if await self._once():
                failures = 0
            self.settled.set()
            if self._closed:
                return
            backoff_ms = min(PROBE_BACKOFF_MS * 2.0 ** min(failures, 16), MAX_PROBE_BACKOFF_MS)
            failures += 1
            await asyncio.sleep(backoff_ms / 1000)

    async def _once(self) -> bool:
        """One connection, from beginning to end. Whether it got as far as being ready."""
        self._ended.clear()
        self._challenged = self._was_ready = False
        began = self._clock.monotonic()
        try:
            async with asyncio.timeout(WIRE_HANDSHAKE_MS / 1000):
                connection = await connect(self._place.endpoint)
        except TimeoutError:
            self._why = f"{self._place.endpoint} does not answer"
            return False
        except OSError as error:
            self._why = f"{self._place.endpoint}: {error.strerror or error}"
            return False
        self._hello = Hello(self._place.cluster_id, self._place.node_id, self._place.node_index,
                            self._place.role.value, random.SystemRandom().randbytes(NONCE_BYTES))
        self._stream = stream = Stream(connection, self, self._clock, self._lost)
        try:
            stream.send(encode_frame(Kind.HELLO, 0, encode_message(self._hello)))
            while not self._ended.is_set():
                try:
                    async with asyncio.timeout(WIRE_WATCH_MS / 1000):
                        await self._ended.wait()
                except TimeoutError:
                    self._watch(stream, began)
        finally:
            stream.close("it was closed")
        return self._was_ready

    def _watch(self, stream: Stream, began: float) -> None:
        now = self._clock.monotonic()
        if not self._ready:
            if (now - began) * 1000 > WIRE_HANDSHAKE_MS:
                stream.close("the handshake takes too long")
        elif self._owing_ms > WIRE_LOST_MS:
            stream.close("it owes an answer for too long")

    def _lost(self, why: str) -> None:
        self._why = f"{self._place.endpoint}: {why}"
        if self._ready and not self._closed:
            self._counters.add("remote_lost")
            _LOG.info("the connection to %s was lost: %s", self._place, self._why)
        self._ready = False
        if self.slab is not None:
            self.slab.close()
            self.slab = None
        self._ended.set()
        self._receiving = None
        pending, self._pending = self._pending, {}
        for request in pending.values():
            if request.answer is not None and not request.answer.done():
                request.answer.set_exception(self.unavailable(self._why))

    async def close(self) -> None:
        """End it for good. A second call does nothing."""
        self._closed = True
        if self._stream is not None:
            self._stream.close("it was closed")
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait((self._task,))


def _hint(place: RemotePlace) -> str:
    """For an operator who has no token but the one that is for everybody."""
    if place.role is not Role.OPERATOR or place.tokens.operator is not None:
        return ""
    return ": where servers have an --operator-token-file, operator_token_file of the cluster must name it too"


def _reason(error: EfsError) -> str:
    return str(error) if isinstance(error, InvalidArgument) else str(error).partition(": ")[2]
