"""Which tenant tags a store has purged: the file `tombstones` of the store's root.

    magic     8 bytes b"EFSTOMB1"
    count     uint32, little-endian as all of it
    zero      uint32
    entries   count times: tag 8 bytes, pending uint16 (bit i: node i has not dropped its records yet), zero 6 bytes;
              ascending by tag
    hash      uint64, xxh3_64 of everything before it

It is replaced as a whole, synced and renamed, so it is always one that was written. A tombstone is written before the
first record of its tag is dropped, and never removed: a directory that comes back from anywhere still meets it. A file
that does not check is CorruptRecord, and the store does not open: to read it as empty could bring purged blocks back.
Put it back from a copy; or remove it and purge again, which buries every tag that the tenants file has retired.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Mapping
from typing import Final

from efs.checksum import xxh3_64
from efs.errors import CorruptRecord, InvalidArgument, OpenFailed
from efs.limits import MAX_TOMBSTONES, STRIPE_SHARDS
from efs.osio import Io, read_file, replace_file

TOMBSTONES_FILE: Final = "tombstones"
MAGIC: Final = b"EFSTOMB1"
HEAD: Final = struct.Struct("<8sII")
ENTRY: Final = struct.Struct("<8sH6x")
HASH: Final = struct.Struct("<Q")
MOST_FILE_BYTES: Final = HEAD.size + MAX_TOMBSTONES * ENTRY.size + HASH.size

Tombstones = Mapping[bytes, frozenset[int]]
"""By purged tag the nodes that have not dropped its records yet."""


def read_tombstones(io: Io, root: str) -> dict[bytes, frozenset[int]]:
    """All tombstones; none when there is no file. CorruptRecord or OpenFailed names it."""
    path = os.path.join(root, TOMBSTONES_FILE)
    try:
        data = read_file(io, path, MOST_FILE_BYTES)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise OpenFailed(path, error) from error
    return _parse(path, data)


def write_tombstones(io: Io, root: str, tombstones: Tombstones) -> None:
    """Replace the file, durably. OpenFailed names it; InvalidArgument when there are too many."""
    if len(tombstones) > MAX_TOMBSTONES:
        raise InvalidArgument(f"{len(tombstones)} tenant tags are purged, a store remembers at most {MAX_TOMBSTONES}")
    entries = (ENTRY.pack(tag, sum(1 << node for node in nodes)) for tag, nodes in sorted(tombstones.items()))
    body = HEAD.pack(MAGIC, len(tombstones), 0) + b"".join(entries)
    try:
        replace_file(io, root, TOMBSTONES_FILE, body + HASH.pack(xxh3_64(body)))
    except OSError as error:
        raise OpenFailed(os.path.join(root, TOMBSTONES_FILE), error) from error


def _parse(path: str, data: bytes) -> dict[bytes, frozenset[int]]:
    if len(data) < HEAD.size + HASH.size:
        raise CorruptRecord(f"{path} has {len(data)} bytes, too few for tombstones")
    body = data[: -HASH.size]
    magic, count, _ = HEAD.unpack_from(body)
    if magic != MAGIC or len(body) != HEAD.size + count * ENTRY.size:
        raise CorruptRecord(f"{path} is no file of tombstones, or was cut")
    if HASH.unpack(data[-HASH.size :])[0] != xxh3_64(body):
        raise CorruptRecord(f"{path}: the checksum of the tombstones is wrong")
    return {tag: frozenset(node for node in range(STRIPE_SHARDS) if pending >> node & 1)
            for tag, pending in ENTRY.iter_unpack(body[HEAD.size :])}
