"""Which version a fetch reads: complete, incomplete, six and six, misplaced, late."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from efs.contract import ABSENT, NodeTable, VersionRow
from efs.pinning import Pins
from efs.survey import Survey

A = bytes(range(16))
B = bytes(range(1, 17))
ROTATION = np.array([0, 5, 11], np.uint8)


def shard_of(node: int, block: int) -> int:
    return (node - int(ROTATION[block])) % 12


def table(node: int, held: dict[int, list[bytes]], shard_shift: int = 0) -> NodeTable:
    """A node's table for three blocks: block -> versions held, the first one in the arrays."""
    digest = np.zeros((3, 2), np.uint64)
    location = np.full(3, ABSENT, np.int64)
    generation = np.zeros(3, np.uint64)
    shard = np.zeros(3, np.uint8)
    extra = []
    for block, versions in held.items():
        index = (shard_of(node, block) + shard_shift) % 12
        for place, version in enumerate(versions):
            if place == 0:
                digest[block] = np.frombuffer(version, np.uint64)
                location[block], generation[block], shard[block] = 100 * node + block, 7, index
            else:
                extra.append(VersionRow(block, version, 1000 + 100 * node + block, 8, index, True))
    return NodeTable(digest, location, generation, shard, np.ones(3, np.bool_), tuple(extra))


def fill(pins: Pins, held_by: dict[int, dict[int, list[bytes]]], failed: tuple[int, ...] = ()) -> None:
    for node in range(12):
        if node in failed:
            pins.fail(node)
        else:
            pins.add(node, table(node, held_by.get(node, {})))
    pins.resolve()


def test_complete_version_is_pinned_with_its_locations() -> None:
    pins = Pins(ROTATION)
    fill(pins, {node: {0: [A], 1: [A], 2: [B]} for node in range(12)})
    assert pins.pinned.all()
    assert pins.digest[2].tobytes() == B
    assert pins.location[3].tolist() == [300, 301, 302]


def test_block_is_pinned_as_soon_as_ten_tables_show_it() -> None:
    pins = Pins(ROTATION)
    for node in range(9):
        pins.add(node, table(node, {0: [A], 1: [A], 2: [A]}))
    pins.resolve()
    assert not pins.pinned.any()
    assert not pins.missed.any()
    pins.add(9, table(9, {0: [A], 1: [A], 2: [A]}))
    pins.resolve()
    assert pins.settled
    assert pins.pinned.all()
    pins.add(10, table(10, {0: [A]}))
    assert pins.location[10].tolist() == [1000, ABSENT, ABSENT]


def test_absent_block_is_a_miss_once_ten_can_no_longer_be_reached() -> None:
    pins = Pins(ROTATION)
    for node in range(2):
        pins.add(node, table(node, {1: [A], 2: [A]}))
    pins.resolve()
    assert not pins.missed.any()
    pins.add(2, table(2, {1: [A], 2: [A]}))
    pins.resolve()
    assert pins.missed.tolist() == [True, False, False]


def test_three_nodes_gone_make_every_block_a_miss() -> None:
    pins = Pins(ROTATION)
    fill(pins, {node: {0: [A], 1: [A], 2: [A]} for node in range(12)}, failed=(0, 4, 8))
    assert pins.settled
    assert pins.missed.all()


def test_six_shards_of_one_write_and_six_of_another_are_never_combined() -> None:
    pins = Pins(ROTATION)
    fill(pins, {node: {0: [A if node < 6 else B], 1: [A], 2: [A]} for node in range(12)})
    assert pins.missed.tolist() == [True, False, False]
    assert pins.mixed >= 1


def test_complete_version_beside_an_incomplete_one_is_pinned_from_both_rows() -> None:
    pins = Pins(ROTATION)
    held = {node: {0: [B, A] if node < 5 else [A], 1: [A], 2: [A]} for node in range(12)}
    fill(pins, held)
    assert pins.pinned.all()
    assert pins.digest[0].tobytes() == A
    assert [int(pins.location[node, 0]) for node in range(12)] == [
        1000 + 100 * node if node < 5 else 100 * node for node in range(12)
    ]


def test_two_complete_versions_give_the_one_with_more_shards_then_the_smaller_digest() -> None:
    pins = Pins(ROTATION)
    fill(pins, {node: {0: [B, A], 1: [B, A] if node < 11 else [B], 2: [A]} for node in range(12)})
    assert pins.digest[0].tobytes() == min(A, B)
    assert pins.digest[1].tobytes() == B


def test_record_with_the_wrong_shard_index_is_not_counted() -> None:
    pins = Pins(ROTATION)
    for node in range(12):
        pins.add(node, table(node, {0: [A], 1: [A], 2: [A]}, shard_shift=1 if node in (2, 3, 6) else 0))
    pins.resolve()
    assert pins.missed.all()
    assert pins.misplaced == 9


@pytest.mark.parametrize("gone", [(), (0,), (3, 9)])
def test_up_to_two_failed_tables_leave_everything_readable(gone: tuple[int, ...]) -> None:
    pins = Pins(ROTATION)
    fill(pins, {node: {0: [A], 1: [A], 2: [A]} for node in range(12)}, failed=gone)
    assert pins.pinned.all()
    for node in gone:
        assert (pins.location[node] == ABSENT).all()


def test_no_table_at_all_is_a_miss() -> None:
    pins = Pins(ROTATION)
    for node in range(12):
        pins.fail(node)
    pins.resolve()
    assert pins.missed.all()


class Counted(tuple[VersionRow, ...]):
    """Versions that count how often somebody goes through all of them."""

    rounds = 0

    def __iter__(self) -> Iterator[VersionRow]:
        self.rounds += 1
        return super().__iter__()


def test_many_keys_of_two_versions_are_not_looked_for_one_by_one() -> None:
    blocks = 300
    rotation = np.zeros(blocks, np.uint8)
    words = [np.frombuffer(version, np.uint64) for version in (A, B)]
    tables = {}
    for node in range(12):
        extra = Counted(VersionRow(row, B, 5_000 + row, 8, node, True) for row in range(blocks))
        tables[node] = NodeTable(np.tile(words[0], (blocks, 1)), np.arange(blocks), np.full(blocks, 7, np.uint64),
                                 np.full(blocks, node, np.uint8), np.ones(blocks, np.bool_), extra)
    pins = Pins(rotation)
    for node, found in tables.items():
        pins.add(node, found)
    pins.resolve()
    assert pins.pinned.all()
    survey = Survey(rotation, tables)
    assert survey.complete.all()
    assert set(survey.versions(7)) == {A, B}
    assert max(found.extra.rounds for found in tables.values() if isinstance(found.extra, Counted)) < 10
