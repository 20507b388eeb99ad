"""The node protocol: what every node does, a directory in this process as well as a server behind a socket.

All operations are batched. Keys are 32 bytes, digests 16 bytes. One node holds at most one shard of a version: which
index follows from the key's placement and is checked. An implementation raises NodeUnavailable when it cannot serve,
InvalidArgument for what the caller did wrong, and never returns a record that fails its own checks.

All methods are called on the event loop's thread and all state that they show belongs to that thread. `look_up_now` and
`read_now` answer from memory and page cache, never block and never wait; they are how a warm read costs no thread hop.
A node that has to ask a disk or a network says None or False there, and the awaiting twin is used. An awaiting method
that is cancelled leaves nothing behind in the caller's memory: bytes reach a `Landing` on the loop's thread only, and
only while the call is being awaited.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from efs.clock import Deadline
from efs.types import DropItem, ListPage, NodeInfo

ABSENT = -1
TOO_COLD = "too cold: what is held is hotter"
"""`PutOutcome.why` of records that a node did not take because it would have to give up hotter ones."""
PURGED = "purged: records of this tenant tag are refused"
"""`PutOutcome.why` of records that a node did not take because their tenant tag was buried."""


@dataclass(frozen=True, slots=True)
class VersionRow:
    """One more version of an asked key, beside the one in the arrays of its `NodeTable`."""

    row: int
    digest: bytes
    location: int
    generation: int
    shard: int
    trusted: bool


@dataclass(slots=True)
class NodeTable:
    """What one node holds of n asked keys; row i speaks of keys[i].

    digest: (n, 2) uint64, the 16 digest bytes as two little-endian words; zeros where nothing is held.
    location: (n,) int64, opaque to the caller except that neighbours in one extent differ by 1; ABSENT where nothing.
    generation: (n,) uint64. shard: (n,) uint8, the index stored in the record.
    trusted: (n,) bool, False for a record of before an unclean boot whose payload was not checked since.
    extra: further versions, in no order.
    """

    digest: NDArray[np.uint64]
    location: NDArray[np.int64]
    generation: NDArray[np.uint64]
    shard: NDArray[np.uint8]
    trusted: NDArray[np.bool_]
    extra: tuple[VersionRow, ...]

    def version(self, row: int, digest: bytes) -> VersionRow | None:
        """The record of one version of an asked key."""
        if self.location[row] != ABSENT and self.digest[row].tobytes() == digest:
            return VersionRow(row, digest, int(self.location[row]), int(self.generation[row]), int(self.shard[row]),
                              bool(self.trusted[row]))
        return next((other for other in self.extra if (other.row, other.digest) == (row, digest)), None)

    def extra_by_row(self) -> dict[int, list[VersionRow]]:
        """The further versions of each row that has some."""
        found: dict[int, list[VersionRow]] = {}
        for other in self.extra:
            found.setdefault(other.row, []).append(other)
        return found


@dataclass(slots=True)
class Span:
    """A contiguous range of slots on one node: `count` neighbouring locations from `location`, each of `slot_bytes`
    with `shard_bytes` of payload."""

    location: int
    count: int
    shard_bytes: int
    slot_bytes: int


class Stride(NamedTuple):
    """Where one piece of each shard of a span goes: row r takes bytes [source, source + size) of its shard to
    [start + r · step, start + r · step + size) of the landing's buffer."""

    source: int
    size: int
    start: int
    step: int


@dataclass(slots=True)
class Landing:
    """The destination of a span: a flat writable byte view and the strides of its pieces, in source order.

    `revoked` is set by the reader when it no longer wants the bytes (the block was rebuilt, the call returned). A node
    looks at it on the loop's thread before every single copy into the buffer and then copies nothing: a late byte
    must never land on verified ones.
    """

    buffer: memoryview
    strides: tuple[Stride, ...]
    revoked: bool = False


class GetSink(Protocol):
    """What a `Node.get` is to bring, and where to. Called on the loop's thread while the get is awaited."""

    @property
    def stretches(self) -> Sequence[tuple[int, int]]:
        """[start, stop) of neighbouring keys whose shards are wanted, in the order of their use; no key twice."""
        ...

    @property
    def shard_bytes(self) -> int: ...

    @property
    def slot_bytes(self) -> int: ...

    @property
    def segments(self) -> int:
        """Of the headers that are wanted with the table; 0: none."""
        ...

    def table_came(self, table: NodeTable, headers: NDArray[np.uint8] | None) -> None:
        """The node's table, once and first. headers: (n, H(segments)) of the versions in its arrays, rows of zeros as
        of `Node.headers` and where nothing is held; None where the node does not give them with a table."""
        ...

    def places(self) -> Sequence[tuple[Span, Landing]]:
        """After the table, by a node that goes on with shards: where they go, cut and ordered as `efs.spans.cuts` says
        of the locations in its table."""
        ...

    def landed(self, index: int) -> None:
        """As of `Node.read`, for the places."""
        ...


@dataclass(frozen=True, slots=True)
class PutBatch:
    """n records for one node. `payload` is private to the call until it is done, also when its caller gave up.

    headers: n complete header bytes, all of one size. payload: (n, slot_bytes) uint8, C-contiguous, zero-padded.
    Order is the order of placement: neighbours are put into neighbouring slots where space allows.
    repair: the records were rebuilt and `stamp` is that of what they were rebuilt from. A node that has evicted such
    records, or would have to evict hotter ones for them, does not store them: TOO_COLD.
    """

    keys: Sequence[bytes]
    headers: NDArray[np.uint8]
    payload: NDArray[np.uint8]
    shard_bytes: int
    stamp: int
    repair: bool = False


@dataclass(frozen=True, slots=True)
class PutOutcome:
    """Row by row whether the record is now held (stored, or held before with the same digest and checked)."""

    stored: NDArray[np.bool_]
    why: str | None


class Node(Protocol):
    """One storage node."""

    @property
    def node_index(self) -> int: ...

    @property
    def suspect(self) -> bool:
        """Whether the oldest running operation is older than HUNG_MS. Until it ends reads and writes are refused."""
        ...

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        """The table of the keys when every answer is in memory, else None."""
        ...

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        """The table of the keys."""
        ...

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        """Give the table of the keys to the sink. A node for which another question costs a round trip gives the wanted
        headers with it, if it has them in memory, and goes on with shards, as `read` does with the places that the sink
        then names; others stop there. What did not land when it ends, in whatever way, is to be read as if it had not
        been asked for."""
        ...

    async def headers(self, locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        """(r, H(segments)) header bytes of records; a row of zeros where the slot was reused, the entry fails its
        checks, or the header has another number of segments."""
        ...

    def headers_now(self, locations: NDArray[np.int64], generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        """`headers` from memory, else None."""
        ...

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """For each span a (count, slot_bytes) read-only view of its slots where they are in this process's memory and
        no byte of them needs waiting now, else None; None in all where the node never shows its memory. What is shown
        may change with any later use of the slot, as what is read may: the reader verifies what it copied."""
        ...

    def read_now(self, span: Span, landing: Landing) -> bool:
        """Copy a span to its landing if no byte of it needs waiting for. On False the landing's bytes are undefined."""
        ...

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        """Copy spans to their landings in order and call `landed(i)` after each, on the loop's thread.

        A span whose landing was revoked is skipped without a call. Raises NodeUnavailable at the first span that cannot
        be read. What is read is not verified here.
        """
        ...

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        """Store records: payload first, then table entries, then index. Held (key, digest) pairs are not stored twice:
        their arrival is renewed. NodeReadOnly or NodeUnavailable when nothing could be stored, also NodeFull unless it
        is a repair. A full node evicts its coldest records for hotter ones."""
        ...

    def touch(self, keys: Sequence[bytes], locations: NDArray[np.int64] | None, stamp: int) -> None:
        """Note that the keys were used at `stamp` (clamped to the node's own clock). Never blocks, best effort.
        With `locations` from a look-up of the same keys no second look-up is made."""
        ...

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        """Remove exactly these records (see DropItem); returns how many were there and old enough."""
        ...

    async def verify(self, key: bytes, digest: bytes, deadline: Deadline) -> bool:
        """Re-read the node's own record and check payload against header. True when sound (and then trusted); when not,
        the record is dropped. False when there is none. A client's word alone never drops anything."""
        ...

    async def list(self, after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        """Records sorted by key then digest, from behind `after`."""
        ...

    async def collect(self, deadline: Deadline) -> int:
        """Free space now, down to the low watermark, as the node does by itself above the high one; returns how many
        records were evicted. NodeUnavailable when the deadline came first."""
        ...

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        """From now on refuse records of these tenant tags (8 bytes each), also from repair and from puts that are under
        way, and drop those that are held: some BURY_RECORDS a call; returns how many went. Call again until that is 0:
        then none is left. NodeUnavailable or NodeReadOnly when the disk cannot be told now. Of what a node buries it
        keeps no note: whoever opens it says so again."""
        ...

    async def tenant_bytes(self, deadline: Deadline) -> Mapping[bytes, int]:
        """Bytes of slots that hold a record, by tenant tag, of the tags that have any."""
        ...

    async def info(self, deadline: Deadline) -> NodeInfo: ...

    async def close(self) -> None:
        """Stop serving; waits for running operations, but not for a hung one."""
        ...
