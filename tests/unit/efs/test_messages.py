"""What the metadata of frames say: back as they were sent, and whatever else comes is a WireError and nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest

from efs import messages as m
from efs.contract import ABSENT, NodeTable, PutOutcome, Span, VersionRow
from efs.errors import WireError
from efs.limits import WIRE_METADATA_BYTES
from efs.shard import header_bytes
from efs.types import DropItem, ListedRecord, ListPage
from tests.support.records import make_keys, make_records

MUTATIONS: Final = 3_000
KEYS: Final = make_keys(4, 1)
DIGEST: Final = b"d" * 16
TABLE: Final = NodeTable(np.arange(8, dtype=np.uint64).reshape(4, 2), np.array([7, ABSENT, 9, 1 << 40]),
                         np.array([1, 0, 3, 4], np.uint64), np.array([0, 0, 11, 5], np.uint8),
                         np.array([True, False, False, True]),
                         (VersionRow(2, DIGEST, 33, 6, 4, False), VersionRow(3, DIGEST, 34, 7, 4, True)))
HEADERS: Final = np.arange(4 * header_bytes(2), dtype=np.uint8).reshape(4, header_bytes(2))
BATCH: Final = make_records(4, 5).batch()
RECORD: Final = ListedRecord(key=KEYS[0], digest=DIGEST, location=5, generation=2, shard=3, block_bytes=100, depth=1,
                             tenant_tag=bytes(8), arrival_ms=77, stamp=3, segments=1)

VALID: Final[dict[str, tuple[bytes, Callable[[bytes], Any]]]] = {
    "keys": (m.encode_keys(KEYS), m.decode_keys),
    "table": (m.encode_table(TABLE), partial(m.decode_table, rows=4)),
    "get": (m.encode_get(m.GetAsk(KEYS, [(2, 4), (0, 1)], 100, 128, 2)), m.decode_get),
    "get table": (m.encode_get_table(TABLE, HEADERS), partial(m.decode_get_table, rows=4, segments=2)),
    "get table without headers": (m.encode_get_table(TABLE, None), partial(m.decode_get_table, rows=4, segments=2)),
    "places": (m.encode_places(TABLE.location, TABLE.generation, 2), m.decode_places),
    "headers": (HEADERS.tobytes(), partial(m.decode_headers, rows=4, segments=2)),
    "spans": (m.encode_spans([Span(3, 2, 100, 128), Span(9, 1, 100, 128)]), m.decode_spans),
    "position": (m.encode_position(4_096), m.decode_position),
    "put": (m.encode_put(BATCH, 3), partial(m.decode_put, body_bytes=BATCH.payload.size)),
    "outcome": (m.encode_outcome(PutOutcome(np.array([True, False, True]), "too cold")),
                partial(m.decode_outcome, records=3)),
    "touch by keys": (m.encode_touch(KEYS, None, 9), m.decode_touch),
    "touch by places": (m.encode_touch(KEYS, TABLE.location, 9), m.decode_touch),
    "drops": (m.encode_drops([DropItem(KEYS[0], DIGEST, 4, 0), DropItem(KEYS[1], DIGEST, 5, 1_000)]), m.decode_drops),
    "record name": (KEYS[0] + DIGEST, m.decode_record_name),
    "list": (m.encode_list(KEYS[0] + DIGEST, 100), m.decode_list),
    "page": (m.encode_page(ListPage((RECORD, RECORD), KEYS[0])), m.decode_page),
    "number": (m.encode_number(17), m.decode_count),
    "flag": (m.encode_number(True), m.decode_flag),
    "place given": (m.encode_place_given(1, 11), m.decode_place_given),
    "tags": (m.encode_tags([b"a" * 8, b"b" * 8]), m.decode_tags),
    "tenant bytes": (m.encode_tenant_bytes({b"a" * 8: 5}), m.decode_tenant_bytes),
    "error": (m.encode_error(WireError("x")), partial(m.decode_error, node_index=3)),
}


def mutated(source: random.Random, data: bytes) -> bytes:
    """With bytes changed, cut off, put in, repeated or swapped."""
    changed = bytearray(data)
    for _ in range(source.randrange(1, 4)):
        at = source.randrange(len(changed) + 1)
        match source.randrange(5):
            case 0 if at < len(changed):
                changed[at] = source.choice([0, 1, 0x7F, 0x80, 0xFF, source.randrange(256)])
            case 1:
                del changed[at:]
            case 2:
                changed[at:at] = source.randbytes(source.randrange(1, 40))
            case 3:
                changed += changed[at:]
            case _:
                changed[at : at + 4] = source.choice([b"\xff" * 4, bytes(4), b"\xff\xff\xff\x7f"])
    return bytes(changed)


@pytest.mark.parametrize("what", VALID)
def test_a_message_that_was_changed_is_refused_or_says_something_that_could_be_sent(what: str) -> None:
    data, decode = VALID[what]
    decode(data)
    source, refused = random.Random(what), 0
    for _ in range(MUTATIONS):
        try:
            decode(mutated(source, data))
        except WireError:
            refused += 1
    assert refused > 0, "nothing that was changed was refused"


@pytest.mark.parametrize("headers", [HEADERS, None])
def test_a_table_comes_back_with_its_headers_and_further_versions(headers: Any) -> None:
    table, found = m.decode_get_table(m.encode_get_table(TABLE, headers), 4, 2)
    for name in ("digest", "location", "generation", "shard", "trusted"):
        assert (getattr(table, name) == getattr(TABLE, name)).all(), name
    assert table.extra == TABLE.extra
    if headers is None:
        assert found is None
    else:
        assert found is not None
        assert (found == headers).all()


def test_a_get_comes_back_as_it_was_sent() -> None:
    ask = m.GetAsk(KEYS, [(2, 4), (0, 1)], 100, 128, 2)
    assert m.decode_get(m.encode_get(ask)) == ask


def test_the_largest_table_that_a_get_may_ask_for_fits_a_frame() -> None:
    count = next(count for count in range(30_000, 0, -1) if m.GetAsk([b""] * count, [], 1, 1, 60).fits)
    extra = tuple(VersionRow(row, DIGEST, 1, 1, 1, True) for row in range(count) for _ in range(3))
    table = NodeTable(np.zeros((count, 2), np.uint64), np.zeros(count, np.int64), np.ones(count, np.uint64),
                      np.zeros(count, np.uint8), np.ones(count, np.bool_), extra)
    largest = m.encode_get_table(table, np.zeros((count, header_bytes(60)), np.uint8))
    assert WIRE_METADATA_BYTES * 0.99 < len(largest) <= WIRE_METADATA_BYTES
