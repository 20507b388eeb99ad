"""What a node checks of a put batch before it touches anything, and the names of its records. Pure.

A header is checked by whoever built it and again here, before it is stored: a record that could not be read back must
not be written. The payload's own hash is not taken again; the read verifies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from efs.contract import PutBatch
from efs.errors import InvalidArgument
from efs.limits import DATA_SHARDS, KEY_BYTES, MAX_KEYS_PER_CALL, SLOT_ALIGN_BYTES, STRIPE_SHARDS
from efs.placement import rotations_of
from efs.shard import LOCAL_BYTES, check_headers, header_dtype, segments_of_entry


@dataclass(frozen=True, slots=True)
class BatchFields:
    """What the headers of a checked batch say. `index_keys[r]` is key ‖ digest of row r; `fields` is (n,) of
    `header_dtype`."""

    segments: int
    index_keys: list[bytes]
    fields: NDArray[np.void]


def check_batch(batch: PutBatch, node_index: int) -> BatchFields:
    """InvalidArgument, naming the first row that is wrong, unless every record may be stored on this node."""
    check_form(batch)
    count = len(batch.keys)
    segments = segments_of_entry(batch.headers.shape[1] + LOCAL_BYTES)
    fields = batch.headers.reshape(-1).view(header_dtype(segments))
    keys = np.frombuffer(b"".join(batch.keys), "<u8").reshape(-1, KEY_BYTES // 8)
    _require("is not a valid header", check_headers(batch.headers))
    _require("has the header of another key", (fields["key"] == keys).all(axis=1))
    sizes = (fields["block_bytes"] + np.uint64(DATA_SHARDS - 1)) // np.uint64(DATA_SHARDS)
    _require(f"has no shard of {batch.shard_bytes} bytes", sizes == batch.shard_bytes)
    _require(f"is not the shard that node {node_index} holds", fields["shard"] == _expected_shards(batch, node_index))
    digests = fields["digest"].tobytes()
    size = len(digests) // count
    names = [key + digests[row * size : (row + 1) * size] for row, key in enumerate(batch.keys)]
    return BatchFields(segments, names, fields)


def check_form(batch: PutBatch) -> None:
    """InvalidArgument unless keys, headers and payload are as many and of the sizes that a batch has, whatever is in
    them."""
    count = len(batch.keys)
    if not 1 <= count <= MAX_KEYS_PER_CALL:
        raise InvalidArgument(f"a batch has {count} records, must have 1 to {MAX_KEYS_PER_CALL}")
    require_keys(batch.keys)
    for name, array in (("headers", batch.headers), ("payload", batch.payload)):
        if array.ndim != 2 or array.dtype != np.uint8 or not array.flags.c_contiguous or len(array) != count:
            raise InvalidArgument(f"{name} must be C-contiguous uint8 of {count} rows, not {array.dtype}{array.shape}")
    segments_of_entry(batch.headers.shape[1] + LOCAL_BYTES)
    slot_bytes = -(-batch.shard_bytes // SLOT_ALIGN_BYTES) * SLOT_ALIGN_BYTES
    if batch.shard_bytes < 1 or batch.payload.shape[1] != slot_bytes:
        raise InvalidArgument(
            f"payload rows have {batch.payload.shape[1]} bytes; shards of {batch.shard_bytes} take {slot_bytes}"
        )


def require_keys(keys: Sequence[bytes]) -> None:
    """InvalidArgument for too many keys in one call, or one that has not KEY_BYTES."""
    if len(keys) > MAX_KEYS_PER_CALL:
        raise InvalidArgument(f"{len(keys)} keys in one call, at most {MAX_KEYS_PER_CALL}")
    if set(map(len, keys)) - {KEY_BYTES}:
        wrong = next(row for row, key in enumerate(keys) if len(key) != KEY_BYTES)
        raise InvalidArgument(f"key {wrong} has {len(keys[wrong])} bytes, must have {KEY_BYTES}")


def _expected_shards(batch: PutBatch, node_index: int) -> NDArray[np.uint8]:
    if not 0 <= node_index < STRIPE_SHARDS:
        raise InvalidArgument(f"node index {node_index} is outside 0 to {STRIPE_SHARDS - 1}")
    shards = (node_index + STRIPE_SHARDS - rotations_of(batch.keys).astype(np.int16)) % STRIPE_SHARDS
    return shards.astype(np.uint8)


def _require(what: str, holds: NDArray[np.bool_]) -> None:
    if not holds.all():
        raise InvalidArgument(f"row {int(np.argmin(holds))} of the batch {what}")
