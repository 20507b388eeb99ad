"""Frames of the protocol between a client and a node server: their layout, and a parser without I/O. Version 1.

A connection carries frames in both directions. A frame is a header of 48 bytes, then metadata, then a body, each as
long as the header says. Integers are little-endian.

    offset  bytes  field
    0       4      magic b"EFSW"
    4       1      protocol version, 1
    5       1      kind (`Kind`)
    6       2      zero
    8       8      request id: chosen by the client, not 0; 0 in a handshake and in a TOUCH
    16      4      bytes of metadata, at most WIRE_METADATA_BYTES
    20      4      bytes of body, at most WIRE_BODY_BYTES, 0 unless the kind is PUT or PIECE
    24      4      ms until the deadline of a request, 1 to MAX_DEADLINE_MS; 0 in every other frame
    28      4      zero
    32      8      xxh3_64 of the metadata
    40      8      xxh3_64 of bytes [0, 40)

A body has no checksum of its own: it is slots of records, whose headers have one. A server checks those before it
stores anything, a client before it uses anything.

*Conversation.* After the handshake (`efs/handshake.py`) the client sends requests and the server answers each with
exactly one ANSWER or ERROR under the same id, in any order, whatever became of the request; a READ has PIECEs before
that, a GET a TABLE and then PIECEs. CANCEL names a request whose answer nobody waits for, and has no answer of its own;
nor has TOUCH. An id may be used again once it is answered. `efs/messages.py` has the metadata of every kind.

*Refusals.* A header is checked whole before anything is allocated for it: magic, version, zeros, lengths, checksum, and
whether its receiver expects such a frame now. What fails, or metadata that do not fit their checksum, is a WireError,
and ends the connection: after it nobody knows where a frame begins.

*Parsing.* `FrameParser` says where the next bytes belong (`views`) and is told how many came (`advance`), so bytes go
from the socket to their destination without a copy. Behind the end of a section it asks for some more bytes of its
own, which it copies. Where the bytes of a body belong is asked of the receiver anew before every single step: what
became unwanted meanwhile gets none.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Protocol

from efs.checksum import xxh3_64
from efs.errors import WireError
from efs.limits import IOV_MAX, MAX_DEADLINE_MS, WIRE_AHEAD_BYTES, WIRE_BODY_BYTES, WIRE_METADATA_BYTES

MAGIC: Final = b"EFSW"
PROTOCOL_VERSION: Final = 1
HEADER_BYTES: Final = 48
MAX_FRAME_BYTES: Final = HEADER_BYTES + WIRE_METADATA_BYTES + WIRE_BODY_BYTES
MAX_REQUEST_ID: Final = (1 << 64) - 1

_LAYOUT: Final = struct.Struct("<4sBBHQIIIIQ")
_HASH: Final = struct.Struct("<Q")
_NO_METADATA_HASH: Final = xxh3_64(b"")


class Kind(IntEnum):
    """What a frame is. Numbers below 64 go from client to server, the others back."""

    HELLO = 1
    PROOF = 2
    LOOK_UP = 16
    HEADERS = 17
    READ = 18
    PUT = 19
    TOUCH = 20
    DROP = 21
    VERIFY = 22
    LIST = 23
    COLLECT = 24
    INFO = 25
    BURY = 26
    TENANT_BYTES = 27
    TAKE_PLACE = 28
    GET = 29
    CANCEL = 31
    CHALLENGE = 65
    WELCOME = 66
    ANSWER = 80
    PIECE = 81
    ERROR = 82
    TABLE = 83


_KINDS: Final = {kind.value: kind for kind in Kind}
_WITH_BODY: Final = frozenset({Kind.PUT, Kind.PIECE})
_WITH_DEADLINE: Final = frozenset({Kind.LOOK_UP, Kind.HEADERS, Kind.READ, Kind.PUT, Kind.DROP, Kind.VERIFY, Kind.LIST,
                                   Kind.COLLECT, Kind.INFO, Kind.BURY, Kind.TENANT_BYTES, Kind.TAKE_PLACE, Kind.GET})
_WITHOUT_ID: Final = frozenset({Kind.HELLO, Kind.PROOF, Kind.TOUCH, Kind.CHALLENGE, Kind.WELCOME})


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a frame."""

    kind: Kind
    request_id: int = 0
    metadata_bytes: int = 0
    body_bytes: int = 0
    deadline_ms: int = 0
    metadata_hash: int = _NO_METADATA_HASH


def encode_frame(kind: Kind, request_id: int = 0, metadata: bytes = b"", *, body_bytes: int = 0,
                 deadline_ms: int = 0) -> bytes:
    """Header and metadata of a frame; the body, if any, is to follow it. WireError for a frame that no receiver would
    take."""
    fields = Header(kind, request_id, len(metadata), body_bytes, deadline_ms, xxh3_64(metadata))
    wrong = _wrong(fields)
    if wrong is not None:
        raise WireError(wrong)
    head = _LAYOUT.pack(MAGIC, PROTOCOL_VERSION, kind, 0, request_id, len(metadata), body_bytes, deadline_ms, 0,
                        fields.metadata_hash)
    return b"".join((head, _HASH.pack(xxh3_64(head)), metadata))


def decode_header(raw: bytes | bytearray | memoryview) -> Header:
    """The header in 48 bytes; WireError when it is none, naming the first thing that is wrong."""
    if len(raw) != HEADER_BYTES:
        raise WireError(f"a header of {len(raw)} bytes, expected {HEADER_BYTES}")
    magic, version, number, zero, request_id, metadata, body, deadline_ms, nought, metadata_hash = _LAYOUT.unpack_from(
        raw)
    if magic != MAGIC:
        raise WireError("bad magic: this is no frame of the protocol")
    if version != PROTOCOL_VERSION:
        raise WireError(f"protocol version {version}, this program speaks {PROTOCOL_VERSION}")
    if _HASH.unpack_from(raw, _LAYOUT.size)[0] != xxh3_64(bytes(raw[: _LAYOUT.size])):
        raise WireError("a header with a wrong checksum")
    kind = _KINDS.get(number)
    if kind is None:
        raise WireError(f"a frame of the unknown kind {number}")
    if zero or nought:
        raise WireError("a header with something where zeros must be")
    header = Header(kind, request_id, metadata, body, deadline_ms, metadata_hash)
    wrong = _wrong(header)
    if wrong is not None:
        raise WireError(wrong)
    return header


def _wrong(header: Header) -> str | None:
    """What makes a header one that must not be: the same check before it is sent and after it came."""
    kind = header.kind
    if header.metadata_bytes > WIRE_METADATA_BYTES:
        return f"{header.metadata_bytes} bytes of metadata, at most {WIRE_METADATA_BYTES}"
    if not 0 <= header.body_bytes <= (WIRE_BODY_BYTES if kind in _WITH_BODY else 0):
        return f"a {kind.name} with a body of {header.body_bytes} bytes"
    if not (1 <= header.deadline_ms <= MAX_DEADLINE_MS if kind in _WITH_DEADLINE else header.deadline_ms == 0):
        return f"a {kind.name} with a deadline of {header.deadline_ms} ms"
    anonymous = kind in _WITHOUT_ID or (kind is Kind.ERROR and header.request_id == 0)
    if not 0 <= header.request_id <= MAX_REQUEST_ID or anonymous != (header.request_id == 0):
        return f"a {kind.name} with request id {header.request_id}"
    return None


class FrameSink(Protocol):
    """Whoever receives the frames of a connection. Any method may raise WireError, which ends it."""

    def expect(self, header: Header) -> None:
        """A frame begins. Refuse it here if it must not come now: nothing was allocated for it yet."""
        ...

    def begin_body(self, header: Header, metadata: bytes) -> None:
        """The metadata of a frame with a body are there and sound."""
        ...

    def body_views(self, offset: int, size: int) -> Sequence[memoryview]:
        """Where the next bytes of the body go, which begin at `offset`: writable views, not empty, of `size` bytes
        together at most and 1 at least."""
        ...

    def body_came(self, offset: int) -> None:
        """The bytes of the body below `offset` are in their places."""
        ...

    def complete(self, header: Header, metadata: bytes) -> None:
        """The frame is whole."""
        ...


class FrameParser:
    """Cuts a stream of bytes into frames, and counts them (`frames`). After a WireError it must not be used.

    ahead: memory for what it takes beyond the end of a section. It is used between `views` and `advance` only, so all
    parsers of a thread may have the same."""

    def __init__(self, sink: FrameSink, ahead: memoryview | None = None) -> None:
        self._sink = sink
        self._head = bytearray(HEADER_BYTES)
        self._ahead = memoryview(bytearray(WIRE_AHEAD_BYTES)) if ahead is None else ahead
        self._stopped = False
        self._header: Header | None = None
        self._metadata: bytearray | None = None
        self._known: bytes = b""
        self._filled = 0
        self._asked = 0
        self.frames = 0

    @property
    def within(self) -> bool:
        """Whether a frame has begun and is not whole."""
        return self._header is not None or self._filled > 0

    def views(self) -> list[memoryview]:
        """Where the next bytes go: at least one view, at most IOV_MAX, none empty."""
        views, whole = self._section()
        self._asked = sum(map(len, views))
        if whole and len(views) < IOV_MAX:
            views.append(self._ahead)
        return views

    def advance(self, count: int) -> None:
        """`count` bytes were put into the last `views`, in order."""
        surplus = count - self._asked
        self._step(min(count, self._asked))
        position = 0
        while position < surplus and not self._stopped:
            begun = position
            for view in self._section(surplus - position)[0]:
                size = min(len(view), surplus - position)
                view[:size] = self._ahead[position : position + size]
                position += size
            self._step(position - begun)

    def stop(self) -> None:
        """Take no further bytes for frames, also not those that came with the last ones."""
        self._stopped = True

    def feed(self, data: bytes | memoryview) -> None:
        """Take bytes from memory instead."""
        rest = memoryview(data)
        while len(rest) and not self._stopped:
            views, took = self.views(), 0
            for view in views:
                size = min(len(view), len(rest))
                view[:size] = rest[:size]
                rest, took = rest[size:], took + size
            self.advance(took)

    def _section(self, most: int = WIRE_BODY_BYTES) -> tuple[list[memoryview], bool]:
        """Views of what is missing of the current section, of a body at most so much, and whether that is all of it."""
        if self._header is None:
            return [memoryview(self._head)[self._filled :]], True
        if self._metadata is not None:
            return [memoryview(self._metadata)[self._filled :]], True
        left = self._header.body_bytes - self._filled
        views = list(self._sink.body_views(self._filled, min(left, most)))[:IOV_MAX]
        return views, sum(map(len, views)) == left

    def _step(self, count: int) -> None:
        """So many bytes of the current section came."""
        self._filled += count
        header = self._header
        if header is None:
            if self._filled == HEADER_BYTES:
                self._begin(decode_header(self._head))
        elif self._metadata is not None:
            if self._filled == header.metadata_bytes:
                self._check_metadata(header, bytes(self._metadata))
        else:
            self._sink.body_came(self._filled)
            if self._filled == header.body_bytes:
                self._end(header)

    def _begin(self, header: Header) -> None:
        self._sink.expect(header)
        self._header, self._filled = header, 0
        if header.metadata_bytes:
            self._metadata = bytearray(header.metadata_bytes)
        else:
            self._check_metadata(header, b"")

    def _check_metadata(self, header: Header, metadata: bytes) -> None:
        if xxh3_64(metadata) != header.metadata_hash:
            raise WireError(f"metadata of a {header.kind.name} with a wrong checksum")
        self._metadata, self._known, self._filled = None, metadata, 0
        if header.body_bytes:
            self._sink.begin_body(header, metadata)
        else:
            self._end(header)

    def _end(self, header: Header) -> None:
        metadata, self._known = self._known, b""
        self._header, self._filled = None, 0
        self.frames += 1
        self._sink.complete(header, metadata)
