"""A closed store laid down on disk record by record, without any node or filesystem running, for tests of readers.

`lay_store` makes twelve node directories and writes whole blocks into them through the slab and the index alone.
`LaidStore` knows where every record lies, so that a test can damage exactly one thing with a plain file edit.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.cluster import init_store, read_store_config
from efs.codec import Codec
from efs.extent import Geometry, SlotClass, location_of
from efs.index import Index, IndexEntry
from efs.limits import DATA_SHARDS, KIB, MIB, STRIPE_SHARDS
from efs.nodedir import index_path, open_slab, read_config, slab_path
from efs.osio import SystemIo
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.shape import BlockShape
from efs.shard import block_templates, finish_headers, template_digests, wrap_entries

SHAPE = BlockShape(5_000, (2_000, 3_000))
EXTENT_BYTES = 256 * KIB
CAPACITY_BYTES = STRIPE_SHARDS * 6 * MIB
LONG_AGO_MS = 1_700_000_000_000


class UnsyncedIo(SystemIo):
    """Tests lose no power: nothing is synced."""

    def fsync(self, fd: int) -> None:
        pass

    def fdatasync(self, fd: int) -> None:
        pass

    def index_sync(self, path: str, sync: Callable[[], None]) -> None:
        pass


@dataclass(frozen=True, slots=True)
class LaidBlock:
    """One block: its key, digest and the twelve finished headers and payloads, by node."""

    key: bytes
    digest: bytes
    headers: tuple[bytes, ...]
    payloads: tuple[bytes, ...]


def make_blocks(seed: int, count: int, shape: BlockShape = SHAPE) -> list[LaidBlock]:
    """Blocks of random bytes under random keys."""
    source, generator = random.Random(seed), np.random.default_rng(seed)
    keys = [source.randbytes(32) for _ in range(count)]
    padded = np.zeros((count, DATA_SHARDS * shape.shard_bytes), np.uint8)
    padded[:, : shape.block_bytes] = generator.integers(0, 256, (count, shape.block_bytes), np.uint8)
    shards = [np.ascontiguousarray(part) for part in np.split(padded, DATA_SHARDS, axis=1)]
    parity = [np.zeros((count, shape.shard_bytes), np.uint8) for _ in range(STRIPE_SHARDS - DATA_SHARDS)]
    Codec().encode(shards, parity)
    shards += parity
    spans = list(zip(shape.segment_offsets, shape.segment_bytes, strict=True))
    hashes = np.array([[xxh3_64(row[at : at + size].tobytes()) for at, size in spans] for row in padded], np.uint64)
    templates = block_templates(keys, np.arange(count, dtype=np.uint32), bytes(8), shape, hashes)
    digests = template_digests(templates)
    headers = [
        finish_headers(templates, shard, np.array([xxh3_64(row.tobytes()) for row in shards[shard]], np.uint64))
        for shard in range(STRIPE_SHARDS)
    ]
    blocks = []
    for row, key in enumerate(keys):
        order = [shard_of_node(node, rotation_of(placement_group(key))) for node in range(STRIPE_SHARDS)]
        blocks.append(
            LaidBlock(
                key,
                digests[row].tobytes(),
                tuple(headers[shard][row].tobytes() for shard in order),
                tuple(shards[shard][row].tobytes() for shard in order),
            )
        )
    return blocks


class LaidStore:
    """A store on disk and the place of each of its records. All edits are to be made while nothing has it open."""

    def __init__(self, root: str, blocks: Sequence[LaidBlock]) -> None:
        self.root = root
        self.blocks = tuple(blocks)
        self.config = read_store_config(UnsyncedIo(), root)
        self.geometry = Geometry(EXTENT_BYTES, SlotClass.of(SHAPE))

    def location(self, block: int) -> int:
        """The same on every node: blocks lie in order, from the first extent on."""
        return location_of(*divmod(block, self.geometry.slots))

    def generation(self, block: int) -> int:
        return (1 << 40) + 1 + block

    def node_path(self, node: int) -> str:
        return self.config.node_paths[node]

    def index_entry(self, block: int) -> IndexEntry:
        key = self.blocks[block].key + self.blocks[block].digest
        return IndexEntry(key, self.location(block), self.generation(block))

    def edit_slab(self, node: int, offset: int, change: Callable[[bytes], bytes], size: int = 1) -> None:
        """Replace bytes of a node's slab file by what `change` makes of them."""
        with open(slab_path(self.node_path(node)), "r+b") as file:
            file.seek(offset)
            before = file.read(size)
            file.seek(offset)
            file.write(change(before))

    def entry_offset(self, block: int) -> int:
        return self.geometry.entry_position(self.location(block))

    def slot_offset(self, block: int) -> int:
        return self.geometry.slot_position(self.location(block))

    def write_entry(self, node: int, location: int, header: bytes, generation: int) -> None:
        raw = _entry(header, generation)
        self.edit_slab(node, self.geometry.entry_position(location), lambda _: raw, len(raw))

    def clear_entry(self, node: int, block: int) -> None:
        size = self.geometry.slot_class.entry_bytes
        self.edit_slab(node, self.entry_offset(block), lambda _: bytes(size), size)

    def put_index(self, node: int, entry: IndexEntry) -> None:
        self._index(node, lambda index: put_entries(index, [entry]))

    def drop_index(self, node: int, block: int) -> None:
        self._index(node, lambda index: index.delete([self.index_entry(block)]))

    def drop(self, node: int, block: int) -> None:
        """Remove a record in order: table entry and index entry."""
        self.clear_entry(node, block)
        self.drop_index(node, block)

    def _index(self, node: int, change: Callable[[Index], object]) -> None:
        config = read_config(UnsyncedIo(), self.node_path(node))
        index = Index.open(UnsyncedIo(), index_path(self.node_path(node)), config.plan.index_bytes)
        try:
            change(index)
        finally:
            index.close()


def put_entries(index: Index, entries: Sequence[IndexEntry]) -> None:
    index.put(
        [entry.index_key for entry in entries],
        np.array([entry.location for entry in entries], np.int64),
        np.array([entry.generation for entry in entries], np.uint64),
    )


def flip(data: bytes) -> bytes:
    """The same bytes with one bit of the first one turned."""
    return bytes([data[0] ^ 0x10]) + data[1:]


def lay_store(root: str, blocks: Sequence[LaidBlock]) -> LaidStore:
    """Make a store and write all shards of the blocks, in order, on every node."""
    init_store(
        UnsyncedIo(),
        root,
        CAPACITY_BYTES,
        node_paths=None,
        durability="process",
        extent_bytes=EXTENT_BYTES,
        source=random.Random(root),
    )
    store = LaidStore(root, blocks)
    for node in range(STRIPE_SHARDS):
        _lay_node(store, node)
    return store


def _lay_node(store: LaidStore, node: int) -> None:
    io, path = UnsyncedIo(), store.node_path(node)
    config = read_config(io, path)
    slab = open_slab(io, path, config, writable=True)
    index = Index.open(io, index_path(path), config.plan.index_bytes)
    try:
        for start in range(0, len(store.blocks), store.geometry.slots):
            part = store.blocks[start : start + store.geometry.slots]
            slab.assign(start // store.geometry.slots, store.geometry.slot_class, sync=False)
            payload = np.zeros((len(part), SHAPE.slot_bytes), np.uint8)
            payload[:, : SHAPE.shard_bytes] = _rows(b"".join(block.payloads[node] for block in part), len(part))
            generations = np.arange(start, start + len(part), dtype=np.uint64) + np.uint64(store.generation(0))
            headers = _rows(b"".join(block.headers[node] for block in part), len(part))
            entries = wrap_entries(headers, generations, LONG_AGO_MS, 0)
            location = store.location(start)
            slab.write_payload(store.geometry, location, payload)
            slab.write_entries(store.geometry, location, entries)
        put_entries(index, [store.index_entry(block) for block in range(len(store.blocks))])
    finally:
        index.close()
        slab.close()


def _entry(header: bytes, generation: int) -> bytes:
    generations = np.array([generation], np.uint64)
    return wrap_entries(_rows(header, 1), generations, LONG_AGO_MS, 0).tobytes()


def _rows(data: bytes, count: int) -> NDArray[np.uint8]:
    return np.frombuffer(data, np.uint8).reshape(count, len(data) // count)


def tree_of(root: str) -> list[str]:
    """All paths below a directory, sorted."""
    return sorted(os.path.join(where, name) for where, folders, files in os.walk(root) for name in folders + files)
