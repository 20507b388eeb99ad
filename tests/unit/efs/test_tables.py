"""Tables in memory: what is verified when, what is gathered how, what stays."""

from __future__ import annotations

import numpy as np
import pytest

from efs.extent import Geometry, SlotClass
from efs.limits import MIN_EXTENT_BYTES
from efs.shard import LOCAL_BYTES, view_entries, wrap_entries
from efs.tables import LOOK, Table, Tables, stretches_of
from tests.support.records import LARGE, SMALL, Records, make_records

NODE_INDEX = 2
GEOMETRY = Geometry(MIN_EXTENT_BYTES, SlotClass.of(SMALL))


def table_of(extent: int, records: Records, geometry: Geometry = GEOMETRY) -> Table:
    """A table with these records in its first slots, generation 100 · extent + row + 1, as if read from disk."""
    raw = np.zeros((geometry.slots, geometry.slot_class.entry_bytes), np.uint8)
    generations = np.arange(len(records), dtype=np.uint64) + np.uint64(100 * extent + 1)
    raw[: len(records)] = wrap_entries(records.headers, generations, 5, 3)
    return Table(extent, geometry, view_entries(raw, geometry.slot_class.segments))


def test_a_look_shows_digest_generation_epoch_and_shard() -> None:
    records = make_records(10, NODE_INDEX)
    table = table_of(0, records)
    look = table.look_at(np.array([3, 9, 10])).view(LOOK)
    assert [row.tobytes() for row in look["digest"][:2]] == [records.digests[3], records.digests[9]]
    assert look["generation"].tolist() == [4, 10, 0]
    assert look["boot_epoch"].tolist() == [3, 3, 0]
    assert look["shard"][:2].tolist() == records.headers[[3, 9], 6].tolist()
    assert table.torn == 0


@pytest.mark.parametrize("byte", [0, 8, 16, 24, LOCAL_BYTES, LOCAL_BYTES + 50])
def test_a_damaged_entry_shows_as_no_record_and_is_counted_once(byte: int) -> None:
    table = table_of(0, make_records(10, NODE_INDEX))
    table.raw[4, byte] ^= 1
    for _ in range(2):
        assert (table.look_at(np.arange(10)).view(LOOK)["generation"] == 0).tolist() == [row == 4 for row in range(10)]
    assert table.torn == 1


def test_an_entry_is_verified_once(monkeypatch: pytest.MonkeyPatch) -> None:
    table = table_of(0, make_records(10, NODE_INDEX))
    table.look_at(np.arange(10))
    monkeypatch.setattr("efs.tables.check_entries", lambda *_: pytest.fail("verified again"))
    assert table.look_at(np.arange(10)).view(LOOK)["generation"].all()


def test_filled_and_cleared_slots_show_at_once() -> None:
    records = make_records(10, NODE_INDEX)
    table = table_of(0, records)
    raw = wrap_entries(records.headers[:2], np.array([77, 78], np.uint64), 5, 3)
    table.fill(20, raw)
    table.clear(np.array([0, 1]))
    look = table.look_at(np.array([0, 1, 2, 20, 21])).view(LOOK)
    assert look["generation"].tolist() == [0, 0, 3, 77, 78]
    assert not table.raw[:2].any()
    assert table.headers(np.array([21])).tobytes() == records.headers[1].tobytes()


def test_looks_of_several_extents_come_in_the_order_asked() -> None:
    tables = Tables(8)
    tables.add([table_of(extent, make_records(20, NODE_INDEX, seed=extent)) for extent in range(5)], range(5))
    source = np.random.default_rng(1)
    extents = source.integers(0, 5, 300)
    slots = source.integers(0, 20, 300)
    for order in (np.argsort(extents, kind="stable"), np.arange(300)):
        look = tables.look((extents[order] << 20) | slots[order])
        assert look is not None
        assert look["generation"].tolist() == (100 * extents[order] + slots[order] + 1).tolist()
    assert tables.look(np.array([0, 7 << 20])) is None
    nothing = tables.look(np.zeros(0, np.int64))
    assert nothing is not None
    assert len(nothing) == 0


def test_tables_of_two_classes_are_looked_at_together() -> None:
    tables = Tables(8)
    geometry = Geometry(MIN_EXTENT_BYTES, SlotClass.of(LARGE))
    large = table_of(1, make_records(5, NODE_INDEX, seed=2, shape=LARGE), geometry)
    tables.add([table_of(0, make_records(5, NODE_INDEX)), large], (0, 1))
    look = tables.look(np.array([0, (1 << 20) | 3, 4]))
    assert look is not None
    assert look["generation"].tolist() == [1, 104, 5]


def test_the_table_unused_for_longest_goes_and_pinned_ones_stay() -> None:
    made = [table_of(extent, make_records(5, NODE_INDEX, seed=extent)) for extent in range(6)]
    tables = Tables(8, most_bytes=3 * made[0].bytes)
    made[0].pins = 1
    for table in made[:3]:
        tables.add([table], (table.extent,))
    assert tables.get(1) is made[1]
    tables.add([made[3]], (3,))
    assert tables.missing(range(6)) == [2, 4, 5]
    tables.add([made[4], made[5]], (4, 5))
    assert tables.missing(range(6)) == [1, 2, 3]


def test_tables_of_one_call_stay_together_even_above_the_bound() -> None:
    made = [table_of(extent, make_records(5, NODE_INDEX, seed=extent)) for extent in range(6)]
    tables = Tables(8, most_bytes=made[0].bytes)
    tables.add(made, range(6))
    assert tables.missing(range(6)) == []
    tables.add([], (2,))
    assert tables.missing(range(6)) == [0, 1, 3, 4, 5]


def test_a_table_that_is_there_is_not_replaced_by_a_late_one() -> None:
    tables = Tables(8)
    first, late = (table_of(3, make_records(5, NODE_INDEX, seed=seed)) for seed in (1, 2))
    tables.add([first], (3,))
    tables.add([late], (3,))
    assert tables.get(3) is first
    before = tables.version(3)
    tables.remove(3)
    assert tables.get(3) is None
    assert tables.version(3) != before


@pytest.mark.parametrize("extents", [[0], [0, 0, 1, 1, 0], [3] * 50, [place % 7 for place in range(100)]])
def test_stretches_cover_every_row_once_and_name_one_extent_each(extents: list[int]) -> None:
    rows = np.array(extents)
    parts = stretches_of(rows)
    covered = [row for part in parts for row in np.arange(len(rows))[part].tolist()]
    assert sorted(covered) == list(range(len(rows)))
    assert all(len(set(rows[part].tolist())) == 1 for part in parts)
