"""The record: a self-describing header and a shard's payload. This docstring is the format, version 1.

All integers are little-endian. A header with n segments has H(n) = 96 + 8 · ceil(12 n / 8) bytes:

    offset      bytes  field
    0           4      magic b"EFSR"
    4           2      format version, 1
    6           1      shard index, 0–11 (0–9 data, 10–11 parity)
    7           1      k, 10
    8           1      m, 2
    9           1      zero
    10          2      n, number of segments, 1–256
    12          4      depth of the block in its chain (0 = first), 0xFFFFFFFF when unknown
    16          8      tenant tag, zeros without a tenant
    24          8      xxh3_64 of the payload: s = ceil(block size / 10) bytes, without slot padding
    32          32     key
    64          16     block digest
    80          8      block size
    88          8 n    xxh3_64 of each segment of the block
    88 + 8 n    4 n    length of each segment
    …           0 or 4 zeros up to a multiple of 8
    H − 8       8      xxh3_64 of all header bytes before it

Block digest = xxh3_128 of bytes [80, 88 + 12 n): size, segment hashes, segment lengths. The twelve headers of a block
differ in shard index, payload hash and header hash only. A header is valid when every field is in its range, the
lengths add up to the size, and both hashes agree. It is checked before it is written and after it was read.

On a node a header stands in a *table entry* of 32 + H bytes:

    0           8      slot generation, never 0 for a live entry; greater for each use of any slot of a node
    8           8      arrival, wall time in ms
    16          4      boot epoch: the node's count of unclean boots at the time of writing
    20          4      zero
    24          8      xxh3_64 of bytes [0, 24) and the header's own hash
    32          H      header

A free entry is all zeros. Entries that are neither zeros nor valid are torn writes: their slot is free. One exception:
rewriting the entry of a held record changes node-local fields only, so where it dies half way the header stands, and
the record with it if its payload does (`efs/recovery.py`). An entry is removed by zeros, which begin with its
generation: a generation of 0 before a valid header is a removal that died half way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64, xxh3_128
from efs.errors import CorruptRecord, InvalidArgument
from efs.limits import (
    DATA_SHARDS,
    FORMAT_VERSION,
    KEY_BYTES,
    MAX_BLOCK_BYTES,
    MAX_SEGMENTS,
    PARITY_SHARDS,
    SLOT_ALIGN_BYTES,
    STRIPE_SHARDS,
)
from efs.shape import BlockShape

MAGIC: Final = b"EFSR"
LOCAL_BYTES: Final = 32
TENANT_TAG_BYTES: Final = 8
NO_TENANT: Final = bytes(TENANT_TAG_BYTES)
_MAGIC_WORD: Final = int.from_bytes(MAGIC, "little")
_DIGESTED_FROM: Final = 80
"""Where the digested bytes of a header begin: block size, segment hashes, segment lengths."""
_HASHES_FROM: Final = 88
_SEGMENTS_AT: Final = 10

Bools = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Header:
    """A parsed and valid header."""

    key: bytes
    digest: bytes
    shard: int
    depth: int
    tenant_tag: bytes
    payload_hash: int
    shape: BlockShape
    segment_hashes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Entry:
    """A parsed and valid table entry."""

    header: Header
    generation: int
    arrival_ms: int
    boot_epoch: int


# -- Sizes and views ------------------------------------------------------------------------------------------------


def header_bytes(segments: int) -> int:
    """H(n) of the module docstring."""
    return 96 + -(-12 * segments // 8) * 8


def entry_bytes(segments: int) -> int:
    """Bytes of a table entry whose header has this many segments."""
    return LOCAL_BYTES + header_bytes(segments)


def segments_of_entry(size: int) -> int:
    """The number of segments for which a table entry has `size` bytes; InvalidArgument when there is none."""
    segments = (size - LOCAL_BYTES - 96) // 12
    if not 1 <= segments <= MAX_SEGMENTS or entry_bytes(segments) != size:
        raise InvalidArgument(f"no table entry has {size} bytes")
    return segments


_Field = tuple[str, object, int]


def _header_fields(segments: int, base: int) -> list[_Field]:
    """(name, format, offset) of each header field, for a header that begins at `base`."""
    lengths = _HASHES_FROM + 8 * segments
    end = header_bytes(segments)
    fields: list[_Field] = [
        ("magic", "<u4", 0),
        ("version", "<u2", 4),
        ("shard", "u1", 6),
        ("k", "u1", 7),
        ("m", "u1", 8),
        ("zero", "u1", 9),
        ("segments", "<u2", _SEGMENTS_AT),
        ("depth", "<u4", 12),
        ("tenant_tag", "<u8", 16),
        ("payload_hash", "<u8", 24),
        ("key", ("<u8", (4,)), 32),
        ("digest", ("<u8", (2,)), 64),
        ("block_bytes", "<u8", _DIGESTED_FROM),
        ("segment_hashes", ("<u8", (segments,)), _HASHES_FROM),
        ("segment_bytes", ("<u4", (segments,)), lengths),
        ("header_hash", "<u8", end - 8),
    ]
    if lengths + 4 * segments < end - 8:
        fields.append(("padding", "<u4", lengths + 4 * segments))
    return [(name, form, base + offset) for name, form, offset in fields]


def _packed(fields: list[_Field], size: int) -> np.dtype[np.void]:
    names, forms, offsets = zip(*fields, strict=True)
    specification = {"names": list(names), "formats": list(forms), "offsets": list(offsets), "itemsize": size}
    return cast("np.dtype[np.void]", np.dtype(specification))  # type: ignore[call-overload]


@lru_cache(maxsize=64)
def header_dtype(segments: int) -> np.dtype[np.void]:
    """Structured view of a header, itemsize `header_bytes(segments)`; the header fields of `entry_dtype`."""
    _require_segments(segments)
    return _packed(_header_fields(segments, 0), header_bytes(segments))


@lru_cache(maxsize=64)
def entry_dtype(segments: int) -> np.dtype[np.void]:
    """Structured view of a table entry, itemsize `entry_bytes(segments)`, unaligned and packed by offset.

    Fields: generation u8, arrival_ms u8, boot_epoch u4, local_zero u4, local_hash u8; magic u4, version u2, shard u1,
    k u1, m u1, zero u1, segments u2, depth u4, tenant_tag u8, payload_hash u8, key (4,) u8, digest (2,) u8,
    block_bytes u8, segment_hashes (S,) u8, segment_bytes (S,) u4, header_hash u8, padding u4 where the format has it.
    Digest and key are arrays of little-endian uint64 so that they compare at once. header (H,) u1 is all of the header
    once more. Rows are assigned ten times faster as bytes (`raw_entries`) than as structures.
    """
    _require_segments(segments)
    local: list[_Field] = [
        ("generation", "<u8", 0),
        ("arrival_ms", "<u8", 8),
        ("boot_epoch", "<u4", 16),
        ("local_zero", "<u4", 20),
        ("local_hash", "<u8", 24),
    ]
    whole: _Field = ("header", ("u1", (header_bytes(segments),)), LOCAL_BYTES)
    return _packed([*local, *_header_fields(segments, LOCAL_BYTES), whole], entry_bytes(segments))


def view_entries(raw: NDArray[np.uint8], segments: int) -> NDArray[np.void]:
    """(m, E) or (m · E,) C-contiguous bytes as (m,) entries of `entry_dtype(segments)`, without a copy."""
    if not raw.flags.c_contiguous or raw.size % entry_bytes(segments):
        raise InvalidArgument(f"{raw.shape} bytes are no contiguous entries of {entry_bytes(segments)}")
    return raw.reshape(-1).view(entry_dtype(segments))


def raw_entries(entries: NDArray[np.void]) -> NDArray[np.uint8]:
    """(m,) entries as (m, E) bytes: a view when they are contiguous, else a copy."""
    flat = np.ascontiguousarray(entries).view(np.uint8)
    return flat.reshape(len(entries), entries.dtype.itemsize)


def entry_headers(entries: NDArray[np.void]) -> NDArray[np.uint8]:
    """(m, H) header bytes of (m,) entries, as a view when the entries are contiguous."""
    return raw_entries(entries)[:, LOCAL_BYTES:]


def _require_segments(segments: int) -> None:
    if not 1 <= segments <= MAX_SEGMENTS:
        raise InvalidArgument(f"a block has {segments} segments, must have 1 to {MAX_SEGMENTS}")


def _segments_of_header(size: int) -> int:
    return segments_of_entry(size + LOCAL_BYTES)


# -- Hashes of many rows --------------------------------------------------------------------------------------------


def _rows(columns: NDArray[np.uint8]) -> list[bytes]:
    """Each row of (n, w) bytes as one `bytes` object: the fastest way into a hash function that takes one buffer."""
    row = np.dtype(f"V{columns.shape[1]}")
    return cast("list[bytes]", np.ascontiguousarray(columns).reshape(-1).view(row).tolist())


def _hashes(columns: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(n,) xxh3_64 of each row."""
    return np.fromiter(map(xxh3_64, _rows(columns)), np.uint64, len(columns))


def _digests(headers: NDArray[np.uint8], segments: int) -> NDArray[np.uint64]:
    """(n, 2) block digests computed from (n, H) headers."""
    digested = _rows(headers[:, _DIGESTED_FROM : _HASHES_FROM + 12 * segments])
    return np.frombuffer(b"".join(map(xxh3_128, digested)), "<u8").reshape(-1, 2)


# -- Building -------------------------------------------------------------------------------------------------------


def block_templates(
    keys: Sequence[bytes],
    depths: NDArray[np.uint32],
    tenant_tags: Sequence[bytes] | bytes,
    shape: BlockShape,
    segment_hashes: NDArray[np.uint64],
) -> NDArray[np.uint8]:
    """What the twelve headers of each of n blocks share: (n, H) uint8, block digest included.

    depths: (n,). tenant_tags: one 8-byte tag for all, or n of them. segment_hashes: (n, S), xxh3_64 of each segment.
    Shard index, payload hash and header hash are still zero; `finish_headers` fills them. InvalidArgument for a
    wrong count, length or type.
    """
    count, segments = len(keys), len(shape.segment_bytes)
    tags = [tenant_tags] * count if isinstance(tenant_tags, bytes) else tenant_tags
    _require_lengths("a key", keys, KEY_BYTES)
    _require_lengths("a tenant tag", tags, TENANT_TAG_BYTES)
    _require_array("depths", depths, (count,), np.uint32)
    _require_array("segment_hashes", segment_hashes, (count, segments), np.uint64)
    if len(tags) != count:
        raise InvalidArgument(f"{len(tags)} tenant tags for {count} keys")
    templates = np.zeros((count, header_bytes(segments)), np.uint8)
    fields = templates.reshape(-1).view(header_dtype(segments))
    fields["magic"] = _MAGIC_WORD
    fields["version"] = FORMAT_VERSION
    fields["k"] = DATA_SHARDS
    fields["m"] = PARITY_SHARDS
    fields["segments"] = segments
    fields["depth"] = depths
    fields["tenant_tag"] = np.frombuffer(b"".join(tags), "<u8")
    fields["key"] = np.frombuffer(b"".join(keys), "<u8").reshape(count, 4)
    fields["block_bytes"] = shape.block_bytes
    fields["segment_hashes"] = segment_hashes
    fields["segment_bytes"] = np.array(shape.segment_bytes, np.uint32)
    fields["digest"] = _digests(templates, segments)
    return templates


def template_digests(templates: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """(n, 2) uint64 block digests of templates (or headers), as a copy."""
    fields = _as_headers(templates)
    return np.array(fields["digest"], np.uint64)


def finish_headers(
    templates: NDArray[np.uint8], shards: int | NDArray[np.uint8], payload_hashes: NDArray[np.uint64]
) -> NDArray[np.uint8]:
    """Complete (n, H) headers of one shard of each block; the templates are left as they are.

    shards: one index for all rows or (n,). payload_hashes: (n,), xxh3_64 of s bytes of payload.
    """
    count = len(templates)
    _require_array("payload_hashes", payload_hashes, (count,), np.uint64)
    if isinstance(shards, np.ndarray):
        _require_array("shards", shards, (count,), np.uint8)
    if count and not (int(np.min(shards)) >= 0 and int(np.max(shards)) < STRIPE_SHARDS):
        raise InvalidArgument(f"a shard index is not 0 to {STRIPE_SHARDS - 1}")
    headers = np.array(templates, np.uint8, order="C")
    fields = _as_headers(headers)
    fields["shard"] = shards
    fields["payload_hash"] = payload_hashes
    fields["header_hash"] = _hashes(headers[:, :-8])
    return headers


def build_headers(
    keys: Sequence[bytes],
    shards: int | NDArray[np.uint8],
    depths: NDArray[np.uint32],
    tenant_tags: Sequence[bytes] | bytes,
    shape: BlockShape,
    segment_hashes: NDArray[np.uint64],
    payload_hashes: NDArray[np.uint64],
) -> NDArray[np.uint8]:
    """`block_templates` and `finish_headers` in one. A put of all twelve shards makes the templates once instead."""
    return finish_headers(block_templates(keys, depths, tenant_tags, shape, segment_hashes), shards, payload_hashes)


def wrap_entries(
    headers: NDArray[np.uint8],
    generations: NDArray[np.uint64],
    arrivals_ms: int | NDArray[np.uint64],
    boot_epoch: int,
) -> NDArray[np.uint8]:
    """(n, E) table entries around (n, H) valid headers. Also how an entry is rewritten with a new arrival or epoch."""
    count = len(headers)
    segments = _segments_of_header(headers.shape[1])
    _require_array("generations", generations, (count,), np.uint64)
    if isinstance(arrivals_ms, np.ndarray):
        _require_array("arrivals_ms", arrivals_ms, (count,), np.uint64)
    if count and not generations.min():
        raise InvalidArgument("a slot generation is 0, which means free")
    raw = np.zeros((count, entry_bytes(segments)), np.uint8)
    raw[:, LOCAL_BYTES:] = headers
    entries = view_entries(raw, segments)
    entries["generation"] = generations
    entries["arrival_ms"] = arrivals_ms
    entries["boot_epoch"] = boot_epoch
    entries["local_hash"] = _local_hashes(raw)
    return raw


def _local_hashes(raw: NDArray[np.uint8]) -> NDArray[np.uint64]:
    return _hashes(np.concatenate((raw[:, :24], raw[:, -8:]), axis=1))


def _as_headers(headers: NDArray[np.uint8]) -> NDArray[np.void]:
    if headers.ndim != 2 or headers.dtype != np.uint8 or not headers.flags.c_contiguous:
        raise InvalidArgument(f"headers must be a C-contiguous (n, H) uint8 array, not {headers.dtype}{headers.shape}")
    return headers.reshape(-1).view(header_dtype(_segments_of_header(headers.shape[1])))


def _require_lengths(what: str, values: Sequence[bytes], size: int) -> None:
    wrong = set(map(len, values)) - {size}
    if wrong:
        raise InvalidArgument(f"{what} has {min(wrong)} bytes, must have {size}")


def _require_array(what: str, array: NDArray[np.generic], shape: tuple[int, ...], dtype: type[np.generic]) -> None:
    if array.shape != shape or array.dtype != dtype:
        raise InvalidArgument(f"{what} is {array.dtype}{array.shape}, must be {np.dtype(dtype)}{shape}")


# -- Checking -------------------------------------------------------------------------------------------------------


def _header_checks(fields: NDArray[np.void]) -> Iterator[tuple[str, Bools]]:
    """Name and result of each check that needs no hash; `fields` has the header fields of `entry_dtype`."""
    sizes = fields["segment_bytes"]
    yield "magic", fields["magic"] == _MAGIC_WORD
    yield "format version", fields["version"] == FORMAT_VERSION
    yield "shard index", fields["shard"] < STRIPE_SHARDS
    yield "k and m", (fields["k"] == DATA_SHARDS) & (fields["m"] == PARITY_SHARDS)
    yield "zero byte", fields["zero"] == 0
    yield "number of segments", fields["segments"] == sizes.shape[1]
    yield "block size", (fields["block_bytes"] > 0) & (fields["block_bytes"] <= MAX_BLOCK_BYTES)
    yield "segment lengths", (sizes > 0).all(axis=1) & (sizes.sum(axis=1, dtype=np.uint64) == fields["block_bytes"])
    if "padding" in (fields.dtype.names or ()):
        yield "padding", fields["padding"] == 0


def _hash_checks(fields: NDArray[np.void], headers: NDArray[np.uint8]) -> Iterator[tuple[str, Bools]]:
    """Header hash, then block digest, of (n, H) headers and the fields in them."""
    yield "header checksum", fields["header_hash"] == _hashes(headers[:, :-8])
    yield "block digest", (fields["digest"] == _digests(headers, fields["segment_hashes"].shape[1])).all(axis=1)


def _local_checks(entries: NDArray[np.void], raw: NDArray[np.uint8]) -> Iterator[tuple[str, Bools]]:
    yield "generation", entries["generation"] > 0
    yield "local zero field", entries["local_zero"] == 0
    yield "local checksum", entries["local_hash"] == _local_hashes(raw)


def check_headers(headers: NDArray[np.uint8]) -> Bools:
    """(n,) whether each row of (n, H) is a valid header: every check of `parse_header`, vectorised."""
    fields = _as_headers(headers)
    valid = _all_of(_header_checks(fields), len(fields))
    if valid.all():
        return _all_of(_hash_checks(fields, headers), len(fields))
    rows = np.flatnonzero(valid)
    valid[rows] = _all_of(_hash_checks(fields[rows], headers[rows]), len(rows))
    return valid


def check_entries(entries: NDArray[np.void], slot_bytes: int | None = None) -> Bools:
    """(m,) whether each entry is live and valid: local checksum, generation above 0, and a valid header.

    With `slot_bytes` the header's block must also belong into slots of that size, so that entries which an extent
    kept from another class are refused.
    """
    valid = _all_of(_header_checks(entries), len(entries))
    if slot_bytes is not None:
        valid &= _belong(entries, slot_bytes)
    rows = np.flatnonzero(valid)
    live = entries if len(rows) == len(entries) else entries[rows]
    raw = raw_entries(live)
    sound = _all_of(_local_checks(live, raw), len(rows))
    valid[rows] = sound & _all_of(_hash_checks(live, raw[:, LOCAL_BYTES:]), len(rows))
    return valid


def headers_stand(entries: NDArray[np.void], slot_bytes: int) -> Bools:
    """(m,) whether each entry is one of a record of this slot size but for its node-local fields, and not removed."""
    headers = np.ascontiguousarray(entry_headers(entries))
    return cast("Bools", check_headers(headers) & _belong(entries, slot_bytes) & (entries["generation"] != 0))


def _belong(entries: NDArray[np.void], slot_bytes: int) -> Bools:
    """(m,) whether the block's shards need slots of exactly this size."""
    units = np.uint64(DATA_SHARDS * SLOT_ALIGN_BYTES)
    # ceil(ceil(b / 10) / 64) = ceil(b / 640)
    needed = (entries["block_bytes"] + (units - np.uint64(1))) // units * np.uint64(SLOT_ALIGN_BYTES)
    return cast("Bools", needed == slot_bytes)


def free_entries(entries: NDArray[np.void]) -> Bools:
    """(m,) whether each entry is all zeros. An entry neither free nor valid is torn."""
    raw = raw_entries(entries)
    words: NDArray[np.uint64] = raw.reshape(-1).view(np.uint64).reshape(len(raw), raw.shape[1] // 8)
    return cast("Bools", ~words.any(axis=1))


def _all_of(checks: Iterator[tuple[str, Bools]], count: int) -> Bools:
    valid = np.ones(count, np.bool_)
    for _, passed in checks:
        valid &= passed
    return valid


def _require_all(what: str, checks: Iterator[tuple[str, Bools]]) -> None:
    for name, passed in checks:
        if not passed.all():
            raise CorruptRecord(f"{what}: {name} is wrong")


# -- Parsing one ----------------------------------------------------------------------------------------------------


def parse_header(data: bytes | memoryview) -> Header:
    """Parse and check one header; CorruptRecord names the first check that fails."""
    headers = np.frombuffer(data, np.uint8).reshape(1, -1)
    segments = _counted_segments(headers[0])
    if headers.shape[1] != header_bytes(segments):
        raise CorruptRecord(f"header: {headers.shape[1]} bytes, {segments} segments take {header_bytes(segments)}")
    fields = headers.reshape(-1).view(header_dtype(segments))
    _require_all("header", _header_checks(fields))
    _require_all("header", _hash_checks(fields, headers))
    row = fields[0]
    return Header(
        key=row["key"].tobytes(),
        digest=row["digest"].tobytes(),
        shard=int(row["shard"]),
        depth=int(row["depth"]),
        tenant_tag=row["tenant_tag"].tobytes(),
        payload_hash=int(row["payload_hash"]),
        shape=shape_of(headers[0]),
        segment_hashes=tuple(row["segment_hashes"].tolist()),
    )


def shape_of(header: NDArray[np.uint8] | bytes | memoryview) -> BlockShape:
    """Sizes written in a header that was checked before; CorruptRecord when they make no shape."""
    raw = np.frombuffer(header, np.uint8)
    segments = _counted_segments(raw)
    if len(raw) != header_bytes(segments):
        raise CorruptRecord(f"header: {len(raw)} bytes, {segments} segments take {header_bytes(segments)}")
    fields = raw.view(header_dtype(segments))[0]
    try:
        return BlockShape(int(fields["block_bytes"]), tuple(fields["segment_bytes"].tolist()))
    except InvalidArgument as error:
        raise CorruptRecord(f"header: {error}") from error


def parse_entry(data: bytes | memoryview) -> Entry | None:
    """Parse and check one table entry; None for a free one (all zeros), CorruptRecord for a torn one."""
    raw = np.frombuffer(data, np.uint8)
    if not raw.any():
        return None
    if len(raw) < LOCAL_BYTES:
        raise CorruptRecord(f"table entry: {len(raw)} bytes")
    header = parse_header(raw[LOCAL_BYTES:].data)
    entries = view_entries(raw, len(header.segment_hashes))
    _require_all("table entry", _local_checks(entries, raw.reshape(1, -1)))
    row = entries[0]
    return Entry(header, int(row["generation"]), int(row["arrival_ms"]), int(row["boot_epoch"]))


def _counted_segments(header: NDArray[np.uint8]) -> int:
    """The number of segments that a header says it has, in range but not checked further."""
    if len(header) < header_bytes(1):
        raise CorruptRecord(f"header: {len(header)} bytes")
    segments = int(header[_SEGMENTS_AT]) | int(header[_SEGMENTS_AT + 1]) << 8
    if not 1 <= segments <= MAX_SEGMENTS:
        raise CorruptRecord(f"header: number of segments is {segments}")
    return segments
