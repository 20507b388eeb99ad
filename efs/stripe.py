"""All that the nodes hold of one key, shard by shard: the slow and thorough look behind `inspect` and mending.

Where records are is taken from the nodes' listings, which only operators may have, or from their tables. Either way a
shard is *sound* only when its header parses, names this key, digest and shard, and the payload that was read has the
hash that the header gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.ask import all_of, tables_of
from efs.checksum import xxh3_64
from efs.clock import Deadline
from efs.contract import ABSENT, Landing, Node, NodeTable, Span, Stride
from efs.errors import CorruptRecord, EfsError
from efs.health import Health
from efs.limits import DIGEST_BYTES, MAX_VERSIONS_PER_KEY
from efs.placement import node_of_shard, placement_group, rotation_of
from efs.shard import Header, parse_header
from efs.types import ListedRecord


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record as a node's table shows it; `segments` as of `ListedRecord`."""

    key: bytes
    digest: bytes
    location: int
    generation: int
    shard: int
    segments: int


@dataclass(frozen=True, slots=True)
class SoundShard:
    """A shard whose header and payload agree. payload: (shard_bytes,) uint8."""

    node_index: int
    record: ListedRecord | FoundRecord
    header: Header
    payload: NDArray[np.uint8]


def listed_before(key: bytes) -> bytes | None:
    """The `after` with which a listing begins at this key."""
    number = int.from_bytes(key, "big")
    return (number - 1).to_bytes(len(key), "big") + b"\xff" * DIGEST_BYTES if number else None


async def records_of(nodes: Mapping[int, Node], key: bytes, deadline: Deadline,
                     enough: int) -> dict[int, list[ListedRecord]]:
    """The records of one key on each node that answered."""
    limit = 2 * MAX_VERSIONS_PER_KEY
    calls = {index: node.list(listed_before(key), limit, deadline) for index, node in nodes.items()}
    pages, _ = await all_of(calls, deadline, enough)
    return {index: [record for record in page.records if record.key == key] for index, page in pages.items()}


async def found_of(nodes: Mapping[int, Node], key: bytes, digest: bytes, segments: int, health: Health,
                   deadline: Deadline, enough: int) -> dict[int, FoundRecord]:
    """The records of one version in their right places, on each node that answered."""
    tables, _ = await tables_of({index: (node, [key]) for index, node in nodes.items()}, health, deadline, enough)
    rotation = rotation_of(placement_group(key))
    found = {index: table.version(0, digest) for index, table in tables.items()}
    return {index: FoundRecord(key, digest, row.location, row.generation, row.shard, segments)
            for index, row in found.items() if row is not None and node_of_shard(row.shard, rotation) == index}


async def read_sound(node: Node, record: ListedRecord | FoundRecord, deadline: Deadline) -> SoundShard | None:
    """Read one record and check it; None when it is not sound, or gone. NodeUnavailable when the node cannot say."""
    where = np.array([record.location], np.int64), np.array([record.generation], np.uint64)
    raw = (await node.headers(*where, record.segments, deadline))[0]
    try:
        header = parse_header(raw.tobytes())
    except CorruptRecord:
        return None
    if (header.key, header.digest, header.shard) != (record.key, record.digest, record.shard):
        return None
    size = header.shape.shard_bytes
    payload = np.empty(size, np.uint8)
    span = Span(record.location, 1, size, header.shape.slot_bytes)
    await node.read([(span, Landing(payload.data, (Stride(0, size, 0, size),)))], lambda _: None, deadline)
    if xxh3_64(payload.data) != header.payload_hash:
        return None
    return SoundShard(node.node_index, record, header, payload)


async def sound_shards(nodes: Mapping[int, Node], records: Mapping[int, ListedRecord | FoundRecord],
                       deadline: Deadline, enough: int) -> dict[int, SoundShard]:
    """The sound ones of these records, by node; after `enough` of them the rest gets the lag grace only."""
    calls = {index: read_sound(nodes[index], record, deadline) for index, record in records.items()}
    results, _ = await all_of(calls, deadline, enough)
    return {index: shard for index, shard in results.items() if shard is not None}


@dataclass(frozen=True, slots=True)
class ShardReport:
    """One record as `inspect` shows it.

    in_place: the shard is the one that this node must hold of this key. trusted: the node vouches for the payload since
    its last unclean boot. sound: header and payload were read and agree; None when the node could not be asked.
    """

    node_index: int
    record: ListedRecord
    in_place: bool
    trusted: bool
    sound: bool | None


async def shards_of(nodes: Mapping[int, Node], key: bytes, health: Health,
                    deadline: Deadline) -> tuple[ShardReport, ...]:
    """Every record of a key on these nodes, by digest, then shard, then node."""
    tables, _ = await tables_of({index: (node, [key]) for index, node in nodes.items()}, health, deadline, len(nodes))
    rotation = rotation_of(placement_group(key))
    reports = []
    for index, records in (await records_of(nodes, key, deadline, len(nodes))).items():
        trusted = _trusted(tables.get(index))
        for record in records:
            try:
                sound: bool | None = await read_sound(nodes[index], record, deadline) is not None
            except EfsError:
                sound = None
            in_place = node_of_shard(record.shard, rotation) == index
            reports.append(ShardReport(index, record, in_place, record.digest in trusted, sound))
    return tuple(sorted(reports, key=lambda report: (report.record.digest, report.record.shard, report.node_index)))


def _trusted(table: NodeTable | None) -> set[bytes]:
    """The digests that a table of one key vouches for."""
    if table is None:
        return set()
    digests = {row.digest for row in table.extra if row.trusted}
    if table.location[0] != ABSENT and table.trusted[0]:
        digests.add(table.digest[0].tobytes())
    return digests
