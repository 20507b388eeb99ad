"""The caller's buffer of a fetch, seen as shards and as segments.

The buffer holds n blocks segment-major (see `efs.shape`). `landing` tells a node where the pieces of its shards belong,
`segment_hashes` reads back what landed; `shard_rows`, `wanted_rows` and `store_rows` give Reed-Solomon the shards as
2-D arrays, in place where a shard is one whole piece, through a copy where segment borders or padding cut it.

`PartTarget` is the same for a fetch of some of the buffer's blocks, which has numbers of its own for them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.checksum import xxh3_64
from efs.contract import Landing, Stride
from efs.shape import BlockShape, Piece


class Target:
    """A flat writable byte view of `blocks · shape.block_bytes`."""

    def __init__(self, out: memoryview, shape: BlockShape, blocks: int) -> None:
        self.out = out
        self.shape = shape
        self.blocks = blocks
        self._bytes: NDArray[np.uint8] = np.frombuffer(out, np.uint8)
        # By shard its strides, as (source, size, start for block 0, step): only the start depends on the block.
        self._strides = tuple(
            tuple(Stride(piece.shard_offset, piece.size, self._start(piece), shape.segment_bytes[piece.segment])
                  for piece in pieces)
            for pieces in shape.pieces
        )
        # By shard where its pieces of all blocks go: (source, size, (blocks, size) view of the buffer).
        self._places = tuple(
            tuple((piece.shard_offset, piece.size, self._piece_rows(piece, 0, blocks)) for piece in pieces)
            for pieces in shape.pieces
        )
        self._whole = tuple(
            len(pieces) == 1 and pieces[0].size == shape.shard_bytes for pieces in shape.pieces
        )

    def _start(self, piece: Piece) -> int:
        return self.blocks * self.shape.segment_offsets[piece.segment] + piece.segment_offset

    def _piece_rows(self, piece: Piece, start: int, stop: int) -> NDArray[np.uint8]:
        """(stop - start, piece.size) view of one piece of neighbouring blocks."""
        offset = self.blocks * self.shape.segment_offsets[piece.segment]
        step = self.shape.segment_bytes[piece.segment]
        region = self._bytes[offset : offset + self.blocks * step].reshape(self.blocks, step)
        return region[start:stop, piece.segment_offset : piece.segment_offset + piece.size]

    def landing(self, shard: int, block: int, done: Collection[int] = ()) -> Landing:
        """Where one data shard of blocks from `block` on belongs, but for its pieces in `done` segments."""
        strides = self._strides[shard]
        if done:
            strides = tuple([stride for stride, piece in zip(strides, self.shape.pieces[shard], strict=True)
                             if piece.segment not in done])
        if len(strides) == 1:
            source, size, start, step = strides[0]
            return Landing(self.out, (Stride(source, size, start + block * step, step),))
        return Landing(self.out, tuple([Stride(source, size, start + block * step, step)
                                        for source, size, start, step in strides]))

    def store_slots(self, shard: int, block: int, slots: NDArray[np.uint8]) -> None:
        """Copy (count, slot bytes) of one data shard of blocks from `block` on to their places."""
        stop = block + len(slots)
        for source, size, rows in self._places[shard]:
            rows[block:stop] = slots[:, source : source + size]

    def segment_hashes(self, segment: int, start: int, stop: int) -> list[int]:
        """xxh3_64 of one segment of each of the blocks [start, stop)."""
        size = self.shape.segment_bytes[segment]
        first = self.blocks * self.shape.segment_offsets[segment]
        out = self.out
        return [xxh3_64(out[at : at + size]) for at in range(first + start * size, first + stop * size, size)]

    def shard_rows(self, shard: int, start: int, stop: int) -> NDArray[np.uint8]:
        """(stop - start, shard_bytes): a view where the shard is whole in the buffer, else a zero-padded copy."""
        pieces = self.shape.pieces[shard]
        if self._whole[shard]:
            return self._piece_rows(pieces[0], start, stop)
        rows = np.zeros((stop - start, self.shape.shard_bytes), np.uint8)
        for piece in pieces:
            rows[:, piece.shard_offset : piece.shard_offset + piece.size] = self._piece_rows(piece, start, stop)
        return rows

    def wanted_rows(self, shard: int, start: int, stop: int) -> NDArray[np.uint8]:
        """What to rebuild a shard into: the buffer itself where the shard is whole, else memory for `store_rows`."""
        if self._whole[shard]:
            return self._piece_rows(self.shape.pieces[shard][0], start, stop)
        return np.empty((stop - start, self.shape.shard_bytes), np.uint8)

    def store_rows(self, shard: int, start: int, stop: int, rows: NDArray[np.uint8], done: NDArray[np.bool_]) -> None:
        """Copy what was rebuilt into `wanted_rows` to its pieces, but for those in segments that are done, of
        (segments, stop - start); nothing to do where the shard is whole."""
        if self._whole[shard]:
            return
        for piece in self.shape.pieces[shard]:
            part = rows[:, piece.shard_offset : piece.shard_offset + piece.size]
            left = ~done[piece.segment]
            self._piece_rows(piece, start, stop)[left] = part[left]


@dataclass(frozen=True, slots=True)
class Part:
    """Some blocks of a buffer of `blocks` blocks: block i of the part is block `rows[i]` of the buffer. Ascending."""

    blocks: int
    rows: NDArray[np.intp]

    def breaks(self, start: int, stop: int) -> list[int]:
        """Where in [start, stop) of the part a block is not the neighbour of the one before it in the buffer."""
        return (np.flatnonzero(np.diff(self.rows[start:stop]) != 1) + start + 1).tolist()


class PartTarget(Target):
    """A part of a buffer, by the part's own block numbers. Blocks that are named together must be neighbours in the
    buffer too."""

    def __init__(self, out: memoryview, shape: BlockShape, part: Part) -> None:
        super().__init__(out, shape, part.blocks)
        self._rows: list[int] = part.rows.tolist()

    def landing(self, shard: int, block: int, done: Collection[int] = ()) -> Landing:
        return super().landing(shard, self._rows[block], done)

    def store_slots(self, shard: int, block: int, slots: NDArray[np.uint8]) -> None:
        super().store_slots(shard, self._rows[block], slots)

    def segment_hashes(self, segment: int, start: int, stop: int) -> list[int]:
        return super().segment_hashes(segment, *self._there(start, stop))

    def shard_rows(self, shard: int, start: int, stop: int) -> NDArray[np.uint8]:
        return super().shard_rows(shard, *self._there(start, stop))

    def wanted_rows(self, shard: int, start: int, stop: int) -> NDArray[np.uint8]:
        return super().wanted_rows(shard, *self._there(start, stop))

    def store_rows(self, shard: int, start: int, stop: int, rows: NDArray[np.uint8], done: NDArray[np.bool_]) -> None:
        super().store_rows(shard, *self._there(start, stop), rows, done)

    def _there(self, start: int, stop: int) -> tuple[int, int]:
        first = self._rows[start]
        return first, first + stop - start
