"""Cutting a put into pieces, and filling one piece's staging: hash, copy, encode, headers. No I/O.

A piece is what is encoded and handed to the nodes at a time: blocks of at most PUT_PIECE_BYTES (at least one block),
cut at borders of runs where that is possible. In a piece the blocks of one rotation are a *group*: shard i of all of
them goes to the same node. A node's rows are ordered by shard index, then by position in the chain; that is, group
after group. So each node writes its shards in segment order and a run stays contiguous.

Filling goes in chunks of PUT_CHUNK_BYTES: the segments of a chunk are hashed from the caller's memory, its shards
copied to the nodes' buffers (padded with zeros to the slot), parity encoded there, and each row hashed while it is
hot. `fill` is a generator that yields between slices of PUT_SLICE_BYTES, so that its caller can let the event loop
serve others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.codec import Codec
from efs.limits import DATA_SHARDS, PUT_CHUNK_BYTES, PUT_PIECE_BYTES, PUT_SLICE_BYTES, STRIPE_SHARDS
from efs.shape import BlockShape
from efs.shard import block_templates, finish_headers
from efs.types import PutItem

Rows = NDArray[np.intp]
Bytes = NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Group:
    """Blocks of one rotation in a piece: their positions in the caller's buffer, in chain order."""

    rotation: int
    blocks: Rows


@dataclass(frozen=True, slots=True)
class Piece:
    """Groups in order of rotation; row r of the piece is the r-th block of all groups in that order."""

    groups: tuple[Group, ...]

    @property
    def rows(self) -> int:
        return sum(len(group.blocks) for group in self.groups)

    @property
    def blocks(self) -> Rows:
        """(rows,) positions in the caller's buffer."""
        return np.concatenate([group.blocks for group in self.groups])

    def node_order(self, node_index: int) -> list[int]:
        """Indices of groups in the order of this node's rows: by the shard that the node holds of each."""
        return sorted(range(len(self.groups)), key=lambda at: (node_index - self.groups[at].rotation) % STRIPE_SHARDS)


def cut(blocks: Rows, rotation: NDArray[np.uint8], run: NDArray[np.int64], block_bytes: int) -> list[Piece]:
    """Pieces for the blocks at these ascending positions. rotation and run (a number for each run) are by position."""
    most = max(1, PUT_PIECE_BYTES // block_bytes)
    pieces: list[Piece] = []
    start = 0
    while start < len(blocks):
        stop = min(start + most, len(blocks))
        if stop < len(blocks):
            cut_run = run[blocks[stop]]
            border = stop
            while border > start and run[blocks[border - 1]] == cut_run:
                border -= 1
            if border > start:
                stop = border
        part = blocks[start:stop]
        turns = rotation[part]
        pieces.append(Piece(tuple(Group(int(turn), part[turns == turn]) for turn in np.unique(turns))))
        start = stop
    return pieces


class Filling:
    """One piece on its way into twelve buffers.

    buffers: twelve flat uint8 arrays of at least rows · slot_bytes. source: (n, block_bytes) uint8, the caller's
    memory. segment_hashes: (rows, S) by row of the piece. After `fill` has ended, `payload(i)` and `headers(i)` are
    node i's rows and `row_of(i)` says which row of the piece each of them is.
    """

    def __init__(self, piece: Piece, shape: BlockShape, buffers: Sequence[Bytes]) -> None:
        rows = piece.rows
        self.piece = piece
        self.shape = shape
        self.segment_hashes = np.zeros((rows, len(shape.segment_bytes)), np.uint64)
        self._payload = [buffer[: rows * shape.slot_bytes].reshape(rows, shape.slot_bytes) for buffer in buffers]
        self._views = [buffer.data for buffer in buffers]
        self._hashes = np.zeros((STRIPE_SHARDS, rows), np.uint64)
        self._templates: Bytes | None = None
        sizes = [len(group.blocks) for group in piece.groups]
        self._first_row = np.concatenate(([0], np.cumsum(sizes))).tolist()
        # By node: where each group's rows begin, and for each row the piece's row and the shard that it is.
        self._start: list[dict[int, int]] = []
        self._row: list[Rows] = []
        self._shard: list[NDArray[np.uint8]] = []
        group_of_row = np.repeat(np.arange(len(sizes)), sizes)
        rotation = np.array([group.rotation for group in piece.groups], np.int64)[group_of_row]
        for node_index in range(STRIPE_SHARDS):
            order = piece.node_order(node_index)
            ends = np.cumsum([sizes[at] for at in order])
            self._start.append(dict(zip(order, [0, *ends.tolist()], strict=False)))
            row = np.concatenate([np.arange(self._first_row[at], self._first_row[at + 1]) for at in order])
            self._row.append(row)
            self._shard.append(((node_index - rotation[row]) % STRIPE_SHARDS).astype(np.uint8))

    def fill(self, source: Bytes, codec: Codec) -> Iterator[None]:
        """Hash, copy and encode everything; yields between slices."""
        most = max(1, PUT_CHUNK_BYTES // self.shape.block_bytes)
        since = 0
        flat = source.reshape(-1).data
        for at, group in enumerate(self.piece.groups):
            for low in range(0, len(group.blocks), most):
                blocks = group.blocks[low : low + most]
                self._hash_segments(flat, blocks, self._first_row[at] + low)
                self._fill_chunk(source, codec, at, low, blocks)
                since += len(blocks) * self.shape.block_bytes
                if since >= PUT_SLICE_BYTES:
                    since = 0
                    yield

    def _hash_segments(self, flat: memoryview, blocks: Rows, row: int) -> None:
        size = self.shape.block_bytes
        ranges = list(zip(self.shape.segment_offsets, self.shape.segment_bytes, strict=True))
        hashes = [xxh3_64(flat[base + offset : base + offset + length])
                  for base in (blocks * size).tolist() for offset, length in ranges]
        self.segment_hashes[row : row + len(blocks)] = np.array(hashes, np.uint64).reshape(len(blocks), -1)

    def _fill_chunk(self, source: Bytes, codec: Codec, at: int, low: int, blocks: Rows) -> None:
        rotation = self.piece.groups[at].rotation
        count, shard_bytes, slot_bytes = len(blocks), self.shape.shard_bytes, self.shape.slot_bytes
        first = int(blocks[0])
        rows = source[first : first + count] if int(blocks[-1]) == first + count - 1 else source[blocks]
        shards: list[Bytes] = []
        for shard in range(STRIPE_SHARDS):
            node_index = (shard + rotation) % STRIPE_SHARDS
            start = self._start[node_index][at] + low
            target = self._payload[node_index][start : start + count]
            if shard < DATA_SHARDS:
                begin = min(shard * shard_bytes, self.shape.block_bytes)
                size = min(shard_bytes, self.shape.block_bytes - begin)
                target[:, :size] = rows[:, begin : begin + size]
                if size < slot_bytes:
                    target[:, size:] = 0
            elif shard_bytes < slot_bytes:
                target[:, shard_bytes:] = 0
            shards.append(target[:, :shard_bytes])
        codec.encode(shards[:DATA_SHARDS], shards[DATA_SHARDS:])
        for shard in range(STRIPE_SHARDS):
            node_index = (shard + rotation) % STRIPE_SHARDS
            start = self._start[node_index][at] + low
            view = self._views[node_index]
            offsets = range(start * slot_bytes, (start + count) * slot_bytes, slot_bytes)
            self._hashes[node_index, start : start + count] = [xxh3_64(view[o : o + shard_bytes]) for o in offsets]

    def describe(self, items: Sequence[PutItem]) -> Bytes:
        """(rows, H) header templates by row of the piece, from what the caller said of the blocks."""
        described = [items[block] for block in self.piece.blocks.tolist()]
        depths = np.array([item.depth for item in described], np.uint32)
        tags = {item.tenant_tag for item in described}
        self._templates = block_templates(
            [item.key for item in described], depths,
            tags.pop() if len(tags) == 1 else [item.tenant_tag for item in described], self.shape, self.segment_hashes)
        return self._templates

    def row_of(self, node_index: int) -> Rows:
        """(rows,) the piece's row that each of the node's rows is."""
        return self._row[node_index]

    def payload(self, node_index: int) -> Bytes:
        """(rows, slot_bytes), a view of the node's buffer."""
        return self._payload[node_index]

    def headers(self, node_index: int) -> Bytes:
        """(rows, H) headers in the node's order; `describe` comes first."""
        assert self._templates is not None
        return finish_headers(self._templates[self._row[node_index]], self._shard[node_index], self._hashes[node_index])
