"""What the metadata of each kind of frame say (`efs/wire.py`). Pure: bytes from values, and values from bytes.

Where there may be many rows they are fixed layouts, little-endian and without padding; the rest is MessagePack. Numbers
of rows follow from lengths where they can; where they cannot, a request begins with them.

    LOOK_UP   the keys, 32 bytes each
      answer  uint32 rows, uint32 further versions; digests (16 bytes), locations (int64), generations (uint64), shards
              (uint8), trusted (uint8), a column after the other; then each further version as uint32 row, digest,
              location, generation, shard, trusted
    GET       uint32 keys, shard bytes, slot bytes, segments of the headers that are wanted too or 0; the keys; then
              uint32 start and stop of each stretch of keys whose shards are wanted
      TABLE   uint32 bytes of a header or 0; a header for each key, of zeros where there is none; then the answer to a
              LOOK_UP
      PIECE   as of a READ of the spans into which the table cuts the stretches (`efs/spans.py`)
      answer  empty, after the last piece, or right behind the table: then the client asks for shards by READs
    HEADERS   uint32 rows, uint32 segments; locations; generations
      answer  the headers, one after the other
    READ      uint32 rows, then of each span: int64 location, uint32 slots, uint32 shard bytes, uint32 slot bytes
      PIECE   uint64 position of its body in the slots of all spans, one after the other; pieces come in order
      answer  empty, after the last piece
    PUT       uint32 records, header bytes, shard bytes, slot bytes, stamp; uint8 repair; uint64 map version,
              or 0; the keys; the headers. Body: the slots
      answer  uint8 stored for each record; then why the others were not, UTF-8, maybe empty
    TOUCH     uint32 stamp, uint8 what follows: 0 keys, 1 locations
    DROP      array of [key, digest, generation, older than ms];  answer: how many
    VERIFY    key, digest;                                       answer: true or false
    LIST      [after or nil, limit]
      answer  uint32 records, uint8 bytes of `after` (0: the end), `after`, then of each record: key, digest, location,
              generation, block bytes (uint64), arrival ms (uint64), stamp, depth, segments (uint32), tenant tag (8
              bytes), shard (uint8)
    COLLECT   empty;                                             answer: how many
    INFO      empty;                                             answer: map of the fields of `NodeInfo`, of a spare
              those of `SpareInfo`
    TAKE_PLACE  [group, index], to a spare alone;                answer: empty, when it is that node
    BURY      tenant tags, 8 bytes each;                         answer: how many records went
    TENANT_BYTES  empty;                                         answer: map from tenant tag to bytes
    ERROR     [kind, why], kind one of `ERRORS`

Whoever decodes checks: a message that is too short, too long or out of range is a WireError.
"""

from __future__ import annotations

import struct
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from efs.contract import NodeTable, PutBatch, PutOutcome, Span, VersionRow
from efs.errors import (
    EfsError,
    InvalidArgument,
    NodeFull,
    NodeReadOnly,
    NodeUnavailable,
    OutdatedMap,
    PlaceNotGiven,
    WireError,
)
from efs.limits import (
    DIGEST_BYTES,
    HOLLOW_GRACE_MS,
    KEY_BYTES,
    MAX_CLUSTER_GROUPS,
    MAX_KEYS_PER_CALL,
    MAX_SEGMENTS,
    MAX_SLOTS_PER_EXTENT,
    MAX_VERSIONS_PER_KEY,
    STRIPE_SHARDS,
    WIRE_BODY_BYTES,
    WIRE_LISTED,
    WIRE_METADATA_BYTES,
)
from efs.shard import header_bytes
from efs.types import DropItem, ListedRecord, ListPage, NodeInfo, SpareInfo

T = TypeVar("T")

_PAIR: Final = struct.Struct("<II")
_PUT: Final = struct.Struct("<IIIIIBQ")
_TOUCH: Final = struct.Struct("<IB")
_GET: Final = struct.Struct("<IIII")
_COUNT: Final = struct.Struct("<I")
_BOUND: Final = np.dtype("<u4")
_LIST: Final = struct.Struct("<IB")
_POSITION: Final = struct.Struct("<Q")
_VERSION: Final = np.dtype([("row", "<u4"), ("digest", "V16"), ("location", "<i8"), ("generation", "<u8"),
                            ("shard", "u1"), ("trusted", "u1")])
_SPAN: Final = np.dtype([("location", "<i8"), ("count", "<u4"), ("shard_bytes", "<u4"), ("slot_bytes", "<u4")])
_RECORD: Final = np.dtype([
    ("key", "V32"), ("digest", "V16"), ("location", "<i8"), ("generation", "<u8"), ("block_bytes", "<u8"),
    ("arrival_ms", "<u8"), ("stamp", "<u4"), ("depth", "<u4"), ("segments", "<u4"), ("tenant_tag", "V8"),
    ("shard", "u1"),
])
_TAG_BYTES: Final = 8
_ROW_BYTES: Final = DIGEST_BYTES + 8 + 8 + 1 + 1


def _unpack(layout: struct.Struct, data: bytes) -> tuple[Any, ...]:
    if len(data) < layout.size:
        raise WireError(f"a message of {len(data)} bytes, expected {layout.size} at least")
    return layout.unpack_from(data)


def _require_size(what: str, data: bytes, size: int) -> None:
    if len(data) != size:
        raise WireError(f"{what} of {len(data)} bytes, expected {size}")


def _decode(data: bytes, kind: type[T]) -> T:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise WireError(f"a message that does not say what it must: {error}") from error


# -- Keys and tables -------------------------------------------------------------------------------------------------


def encode_keys(keys: Sequence[bytes]) -> bytes:
    return b"".join(keys)


def decode_keys(data: bytes) -> list[bytes]:
    if len(data) % KEY_BYTES or len(data) > KEY_BYTES * MAX_KEYS_PER_CALL:
        raise WireError(f"keys of {len(data)} bytes together")
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def encode_table(table: NodeTable) -> bytes:
    extra = np.zeros(len(table.extra), _VERSION)
    for at, row in enumerate(table.extra):
        extra[at] = (row.row, row.digest, row.location, row.generation, row.shard, row.trusted)
    columns = (table.digest.astype("<u8", copy=False), table.location.astype("<i8", copy=False),
               table.generation.astype("<u8", copy=False), table.shard, table.trusted, extra)
    head = _PAIR.pack(len(table.location), len(table.extra))
    return b"".join((head, *(column.tobytes() for column in columns)))


def decode_table(data: bytes, rows: int) -> NodeTable:
    """The table of `rows` keys."""
    count, further = _unpack(_PAIR, data)
    if count != rows:
        raise WireError(f"a table of {count} keys, asked for {rows}")
    _require_size("a table", data, _PAIR.size + count * _ROW_BYTES + further * _VERSION.itemsize)
    at = _PAIR.size

    def column(dtype: str, width: int = 1) -> NDArray[Any]:
        nonlocal at
        made = np.frombuffer(data, dtype, count * width, at).copy()
        at += made.nbytes
        return made

    table = NodeTable(column("<u8", 2).reshape(count, 2), column("<i8"), column("<u8"), column("u1"),
                      column("u1") != 0, ())
    extra = np.frombuffer(data, _VERSION, further, at)
    if further and int(extra["row"].max()) >= count:
        raise WireError("a version of a key that was not asked for")
    table.extra = tuple(VersionRow(int(row["row"]), row["digest"].tobytes(), int(row["location"]),
                                   int(row["generation"]), int(row["shard"]), bool(row["trusted"])) for row in extra)
    return table


@dataclass(frozen=True, slots=True)
class GetAsk:
    """What a GET asks for; see `efs.contract.GetSink`."""

    keys: Sequence[bytes]
    stretches: Sequence[tuple[int, int]]
    shard_bytes: int
    slot_bytes: int
    segments: int

    @property
    def fits(self) -> bool:
        """Whether the table with its headers is no larger than a frame, whatever the node holds."""
        header = header_bytes(self.segments) if self.segments else 0
        row = _ROW_BYTES + (MAX_VERSIONS_PER_KEY - 1) * _VERSION.itemsize + header
        return _COUNT.size + _PAIR.size + len(self.keys) * row <= WIRE_METADATA_BYTES


def encode_get(ask: GetAsk) -> bytes:
    head = _GET.pack(len(ask.keys), ask.shard_bytes, ask.slot_bytes, ask.segments)
    return b"".join((head, *ask.keys, np.array(ask.stretches, _BOUND).tobytes()))


def decode_get(data: bytes) -> GetAsk:
    """An ask that can be answered: no key's shard twice, and a table that fits a frame."""
    count, shard_bytes, slot_bytes, segments = _unpack(_GET, data)
    start = _GET.size + count * KEY_BYTES
    if len(data) < start or (len(data) - start) % (2 * _BOUND.itemsize):
        raise WireError(f"a get of {count} keys in {len(data)} bytes")
    bounds = np.frombuffer(data, _BOUND, -1, start).astype(np.int64).reshape(-1, 2)
    if len(bounds) and ((bounds[:, 0] >= bounds[:, 1]).any() or int(bounds.max()) > count
                        or (np.diff(np.sort(bounds, axis=0).reshape(-1)) < 0).any()):
        raise WireError("stretches of keys that a get does not have, or has twice")
    if not 1 <= shard_bytes <= slot_bytes <= WIRE_BODY_BYTES or segments > MAX_SEGMENTS:
        raise WireError(f"a get of {shard_bytes} bytes in slots of {slot_bytes}, with headers of {segments} segments")
    ask = GetAsk(decode_keys(data[_GET.size : start]), [(low, high) for low, high in bounds.tolist()], shard_bytes,
                 slot_bytes, segments)
    if not ask.fits:
        raise WireError(f"a get of {count} keys with headers of {segments} segments")
    return ask


def encode_get_table(table: NodeTable, headers: NDArray[np.uint8] | None) -> bytes:
    if headers is None:
        return _COUNT.pack(0) + encode_table(table)
    return b"".join((_COUNT.pack(headers.shape[1]), headers.tobytes(), encode_table(table)))


def decode_get_table(data: bytes, rows: int, segments: int) -> tuple[NodeTable, NDArray[np.uint8] | None]:
    """Table and headers of `rows` keys; headers only if headers of so many segments were asked for."""
    (size,) = _unpack(_COUNT, data)
    if size not in (0, header_bytes(segments) if segments else 0):
        raise WireError(f"headers of {size} bytes, asked for {segments} segments")
    start = _COUNT.size + rows * size
    headers = None
    if size:
        if len(data) < start:
            raise WireError(f"a table of {len(data)} bytes, expected more than {start}")
        headers = np.frombuffer(data, np.uint8, rows * size, _COUNT.size).reshape(rows, size).copy()
    return decode_table(data[start:], rows), headers


def encode_places(locations: NDArray[np.int64], generations: NDArray[np.uint64], segments: int) -> bytes:
    return b"".join((_PAIR.pack(len(locations), segments), locations.astype("<i8", copy=False).tobytes(),
                     generations.astype("<u8", copy=False).tobytes()))


def decode_places(data: bytes) -> tuple[NDArray[np.int64], NDArray[np.uint64], int]:
    """Locations, generations and the number of segments; the answer to it fits a frame."""
    count, segments = _unpack(_PAIR, data)
    _require_size("places", data, _PAIR.size + 16 * count)
    if not 1 <= segments <= MAX_SEGMENTS or count * header_bytes(segments) > WIRE_METADATA_BYTES:
        raise WireError(f"headers of {count} records with {segments} segments")
    return (np.frombuffer(data, "<i8", count, _PAIR.size).astype(np.int64),
            np.frombuffer(data, "<u8", count, _PAIR.size + 8 * count).astype(np.uint64), segments)


def decode_headers(data: bytes, rows: int, segments: int) -> NDArray[np.uint8]:
    """(rows, header bytes)."""
    _require_size("headers", data, rows * header_bytes(segments))
    return np.frombuffer(data, np.uint8).reshape(rows, header_bytes(segments)).copy()


# -- Spans -----------------------------------------------------------------------------------------------------------


def encode_spans(spans: Sequence[Span]) -> bytes:
    rows = np.array([(span.location, span.count, span.shard_bytes, span.slot_bytes) for span in spans], _SPAN)
    return rows.tobytes()


def decode_spans(data: bytes) -> list[Span]:
    if len(data) % _SPAN.itemsize or len(data) > _SPAN.itemsize * MAX_KEYS_PER_CALL:
        raise WireError(f"spans of {len(data)} bytes together")
    rows = np.frombuffer(data, _SPAN)
    if len(rows) and (rows["count"].min() < 1 or rows["count"].max() > MAX_SLOTS_PER_EXTENT
                      or rows["slot_bytes"].min() < 1 or rows["slot_bytes"].max() > WIRE_BODY_BYTES
                      or (rows["shard_bytes"] > rows["slot_bytes"]).any()):
        raise WireError("a span that no extent can hold")
    return [Span(*fields) for fields in rows.tolist()]


def decode_nothing(data: bytes) -> None:
    _require_size("an empty answer", data, 0)


def encode_position(position: int) -> bytes:
    return _POSITION.pack(position)


def decode_position(data: bytes) -> int:
    _require_size("a position", data, _POSITION.size)
    return int(_POSITION.unpack(data)[0])


# -- Changes ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PutHead:
    """A put without its payload, which is the body: `records` rows of `slot_bytes`."""

    keys: list[bytes]
    headers: NDArray[np.uint8]
    shard_bytes: int
    slot_bytes: int
    stamp: int
    repair: bool
    map_version: int

    @property
    def body_bytes(self) -> int:
        return len(self.keys) * self.slot_bytes

    def batch(self, body: bytearray) -> PutBatch:
        """The put, with the payload at the beginning of `body`."""
        payload = np.frombuffer(body, np.uint8, self.body_bytes).reshape(len(self.keys), self.slot_bytes)
        return PutBatch(self.keys, self.headers, payload, self.shard_bytes, self.stamp, self.repair)


def put_metadata_bytes(records: int, header_size: int) -> int:
    """Metadata of a put of so many records."""
    return _PUT.size + records * (KEY_BYTES + header_size)


def encode_put(batch: PutBatch, map_version: int = 0) -> bytes:
    """map_version: of the map of the cluster by which the batch is written; 0 of a client that goes by none."""
    head = _PUT.pack(len(batch.keys), batch.headers.shape[1], batch.shard_bytes, batch.payload.shape[1], batch.stamp,
                     batch.repair, map_version)
    return b"".join((head, *batch.keys, batch.headers.tobytes()))


def decode_put(data: bytes, body_bytes: int) -> PutHead:
    """What a put says, agreeing with the length of its body."""
    records, header_size, shard_bytes, slot_bytes, stamp, repair, map_version = _unpack(_PUT, data)
    _require_size("a put", data, put_metadata_bytes(records, header_size))
    fits = records * slot_bytes == body_bytes and 1 <= shard_bytes <= slot_bytes
    if not fits or not 1 <= records <= MAX_KEYS_PER_CALL:
        raise WireError(f"a put of {records} records of {slot_bytes} bytes in a body of {body_bytes}")
    start = _PUT.size + records * KEY_BYTES
    headers = np.frombuffer(data, np.uint8, records * header_size, start).reshape(records, header_size).copy()
    return PutHead(decode_keys(data[_PUT.size : start]), headers, shard_bytes, slot_bytes, stamp, repair != 0,
                   map_version)


def encode_outcome(outcome: PutOutcome) -> bytes:
    return outcome.stored.astype(np.uint8).tobytes() + (outcome.why or "").encode()


def decode_outcome(data: bytes, records: int) -> PutOutcome:
    if len(data) < records:
        raise WireError(f"the outcome of {len(data)} records, {records} were put")
    why = data[records:].decode("utf-8", "replace")
    return PutOutcome(np.frombuffer(data, np.uint8, records) != 0, why or None)


def encode_touch(keys: Sequence[bytes], locations: NDArray[np.int64] | None, stamp: int) -> bytes:
    rows = b"".join(keys) if locations is None else locations.astype("<i8", copy=False).tobytes()
    return _TOUCH.pack(stamp, locations is not None) + rows


def decode_touch(data: bytes) -> tuple[list[bytes], NDArray[np.int64] | None, int]:
    stamp, places = _unpack(_TOUCH, data)
    rest = data[_TOUCH.size :]
    if not places:
        return decode_keys(rest), None, stamp
    if len(rest) % 8:
        raise WireError(f"locations of {len(rest)} bytes together")
    return [], np.frombuffer(rest, "<i8").astype(np.int64), stamp


def encode_drops(items: Sequence[DropItem]) -> bytes:
    return msgspec.msgpack.encode([(item.key, item.digest, item.generation, item.older_than_ms) for item in items])


def decode_drops(data: bytes) -> list[DropItem]:
    items = [DropItem(*fields) for fields in _decode(data, list[tuple[bytes, bytes, int, int]])]
    for item in items:
        if (len(item.key), len(item.digest)) != (KEY_BYTES, DIGEST_BYTES) or item.generation < 0:
            raise WireError("a drop of what can be no record")
        if not 0 <= item.older_than_ms <= HOLLOW_GRACE_MS:
            raise WireError(f"a drop of what is older than {item.older_than_ms} ms")
    return items


def decode_record_name(data: bytes) -> tuple[bytes, bytes]:
    _require_size("key and digest", data, KEY_BYTES + DIGEST_BYTES)
    return data[:KEY_BYTES], data[KEY_BYTES:]


# -- The rest --------------------------------------------------------------------------------------------------------


def encode_list(after: bytes | None, limit: int) -> bytes:
    return msgspec.msgpack.encode((after, limit))


def decode_list(data: bytes) -> tuple[bytes | None, int]:
    after, limit = _decode(data, tuple[bytes | None, int])
    if after is not None and len(after) > 255:
        raise WireError(f"a listing behind {len(after)} bytes")
    return after, min(limit, WIRE_LISTED)


def encode_page(page: ListPage) -> bytes:
    rows = np.array([(r.key, r.digest, r.location, r.generation, r.block_bytes, r.arrival_ms, r.stamp, r.depth,
                      r.segments, r.tenant_tag, r.shard) for r in page.records], _RECORD)
    after = page.after or b""
    return b"".join((_LIST.pack(len(rows), len(after)), after, rows.tobytes()))


def decode_page(data: bytes) -> ListPage:
    count, border = _unpack(_LIST, data)
    _require_size("a page", data, _LIST.size + border + count * _RECORD.itemsize)
    start = _LIST.size + border
    records = tuple(
        ListedRecord(key=row["key"].tobytes(), digest=row["digest"].tobytes(), location=int(row["location"]),
                     generation=int(row["generation"]), shard=int(row["shard"]), block_bytes=int(row["block_bytes"]),
                     depth=int(row["depth"]), tenant_tag=row["tenant_tag"].tobytes(),
                     arrival_ms=int(row["arrival_ms"]), stamp=int(row["stamp"]), segments=int(row["segments"]))
        for row in np.frombuffer(data, _RECORD, count, start))
    return ListPage(records, data[_LIST.size : start] or None)


def encode_number(value: int | bool) -> bytes:
    return msgspec.msgpack.encode(value)


def decode_count(data: bytes) -> int:
    return _decode(data, int)


def decode_flag(data: bytes) -> bool:
    return _decode(data, bool)


def encode_info(info: NodeInfo | SpareInfo) -> bytes:
    return msgspec.msgpack.encode(info)


def decode_info(data: bytes) -> NodeInfo:
    return _decode(data, NodeInfo)


def decode_spare_info(data: bytes) -> SpareInfo:
    return _decode(data, SpareInfo)


def encode_place_given(group: int, node_index: int) -> bytes:
    return msgspec.msgpack.encode((group, node_index))


def decode_place_given(data: bytes) -> tuple[int, int]:
    """Group and index."""
    group, node_index = _decode(data, tuple[int, int])
    if not 0 <= group < MAX_CLUSTER_GROUPS or not 0 <= node_index < STRIPE_SHARDS:
        raise WireError(f"a place {node_index} of group {group}")
    return group, node_index


def encode_tags(tags: Collection[bytes]) -> bytes:
    return b"".join(sorted(tags))


def decode_tags(data: bytes) -> list[bytes]:
    if len(data) % _TAG_BYTES:
        raise WireError(f"tenant tags of {len(data)} bytes together")
    return [data[at : at + _TAG_BYTES] for at in range(0, len(data), _TAG_BYTES)]


def encode_tenant_bytes(held: Mapping[bytes, int]) -> bytes:
    return msgspec.msgpack.encode(dict(held))


def decode_tenant_bytes(data: bytes) -> dict[bytes, int]:
    return _decode(data, dict[bytes, int])


ERRORS: Final = ("invalid", "read-only", "full", "outdated", "spare", "unavailable")
"""Kinds of ERROR. Whatever else goes wrong on a server makes its node unavailable to the client."""


def encode_error(error: EfsError) -> bytes:
    """The kind of an error and what it says, without the name of the node, which the client puts before it again."""
    if isinstance(error, InvalidArgument):
        return msgspec.msgpack.encode(("invalid", str(error)))
    named = isinstance(error, NodeUnavailable | NodeFull | OutdatedMap)
    why = str(error).partition(": ")[2] if named else str(error)
    kind = ("read-only" if isinstance(error, NodeReadOnly) else "full" if isinstance(error, NodeFull)
            else "outdated" if isinstance(error, OutdatedMap) else "spare" if isinstance(error, PlaceNotGiven)
            else "unavailable")
    return msgspec.msgpack.encode((kind, why))


def decode_error(data: bytes, node_index: int) -> EfsError:
    kind, why = _decode(data, tuple[str, str])
    if kind == "invalid":
        return InvalidArgument(why)
    if kind == "read-only":
        return NodeReadOnly(node_index, why)
    if kind == "full":
        return NodeFull(node_index, why)
    if kind == "outdated":
        return OutdatedMap(node_index, why)
    if kind == "spare":
        return PlaceNotGiven(why)
    return NodeUnavailable(node_index, why)
