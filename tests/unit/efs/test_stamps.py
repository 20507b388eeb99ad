"""Access stamps: raised by use, set by a put, written when they changed, and worth nothing when damaged."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry, SlotClass, location_of
from efs.limits import EXTENT_BYTES, MIB, PAGE_BYTES
from efs.shard import entry_bytes
from efs.stamps import Stamps, load_stamps, read_stamps, stamp_file_bytes, stamp_file_name, write_stamps
from tests.support.faultio import FaultIo

V41 = Geometry(EXTENT_BYTES, SlotClass(11_392, 176))
SMALL = Geometry(1 * MIB, SlotClass(128, entry_bytes(1)))
PAGES = Geometry(1 * MIB, SlotClass(4_096, entry_bytes(2)))
PLENTY = 64 * MIB
PLACES = st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)))


def at(*pairs: tuple[int, int]) -> np.ndarray:
    return np.array([location_of(extent, slot) for extent, slot in pairs], np.int64)


def kept(stamps: Stamps, extent: int) -> dict[int, int]:
    row = stamps.row(extent)
    return {int(slot): int(row[slot]) for slot in np.flatnonzero(row)}


# -- In memory


def test_a_touch_raises_stamps_and_never_lowers_them() -> None:
    stamps = Stamps(3, PLENTY)
    stamps.attach(0, V41)
    stamps.attach(2, V41)
    stamps.take_dirty()
    locations = at((0, 5), (2, 5_791), (0, 6))
    assert stamps.touch(locations, 100) == 3
    assert stamps.touch(locations[:2], 101) == 2
    assert stamps.touch(locations, 100) == 0
    assert stamps.touch(locations, 101) == 1
    assert stamps.get(locations).tolist() == [101, 101, 101]
    assert stamps.touch(locations, 99) == 0
    assert (kept(stamps, 0), kept(stamps, 2)) == ({5: 101, 6: 101}, {5_791: 101})


def test_a_touch_that_changes_nothing_makes_nothing_dirty() -> None:
    stamps = Stamps(2, PLENTY)
    stamps.attach(0, V41)
    stamps.touch(at((0, 5)), 100)
    assert [file.extent for file in stamps.take_dirty()] == [0]
    stamps.touch(at((0, 5)), 100)
    assert not stamps.dirty
    assert stamps.take_dirty() == []
    stamps.touch(at((0, 5)), 101)
    assert stamps.dirty
    assert [file.extent for file in stamps.take_dirty()] == [0]


def test_locations_that_do_not_exist_any_more_are_skipped() -> None:
    stamps = Stamps(3, PLENTY)
    stamps.attach(0, PAGES)
    stamps.attach(2, SMALL)
    gone = [-1, int(at((0, PAGES.slots))[0]), int(at((1, 0))[0]), int(at((3, 0))[0]), 1 << 60, -(1 << 60)]
    assert stamps.touch(np.array([*gone, *at((0, 1), (2, SMALL.slots - 1)).tolist()], np.int64), 7) == 2
    assert stamps.touch(np.array(gone, np.int64), 8) == 0
    assert stamps.touch(np.zeros(0, np.int64), 8) == 0
    assert (kept(stamps, 0), kept(stamps, 1), kept(stamps, 2)) == ({1: 7}, {}, {SMALL.slots - 1: 7})


def test_a_new_record_gets_its_own_stamp_even_a_lower_one() -> None:
    stamps = Stamps(2, PLENTY)
    stamps.attach(1, V41)
    stamps.set(at((1, 0), (1, 1)), 500)
    stamps.take_dirty()
    stamps.set(at((1, 0), (1, 1)), np.array([3, 600], np.uint32))
    assert kept(stamps, 1) == {0: 3, 1: 600}
    assert stamps.dirty
    with pytest.raises(InvalidArgument):
        stamps.set(at((1, 0), (0, 0)), 1)
    with pytest.raises(InvalidArgument):
        stamps.get(at((1, V41.slots)))


def test_an_extent_begins_anew_when_it_is_attached_again() -> None:
    stamps = Stamps(2, PLENTY)
    stamps.attach(0, PAGES)
    stamps.set(at((0, 3)), 9)
    stamps.attach(0, SMALL)
    assert kept(stamps, 0) == {}
    assert len(stamps.row(0)) == SMALL.slots
    stamps.set(at((0, SMALL.slots - 1)), 9)
    stamps.detach(0)
    assert len(stamps.row(0)) == 0
    assert not stamps.dirty
    stamps.attach(0, SMALL)
    assert kept(stamps, 0) == {}


def test_a_class_with_more_slots_does_not_disturb_the_stamps_of_others() -> None:
    stamps = Stamps(3, PLENTY)
    stamps.attach(2, PAGES)
    stamps.set(at((2, PAGES.slots - 1)), 4)
    stamps.attach(1, SMALL, np.arange(SMALL.slots, dtype=np.uint32))
    assert kept(stamps, 2) == {PAGES.slots - 1: 4}
    assert stamps.get(at((1, 77))).tolist() == [77]


@settings(deadline=None, max_examples=60)
@given(st.lists(st.tuples(st.booleans(), PLACES, st.integers(0, 50))))
def test_stamps_equal_a_dict_after_any_calls(calls: list[tuple[bool, list[tuple[int, int]], int]]) -> None:
    stamps, model = Stamps(3, PLENTY), dict[int, int]()
    for extent in range(3):
        stamps.attach(extent, PAGES)
    for put, pairs, stamp in calls:
        if put:
            pairs = [pair for pair in pairs if 0 <= pair[0] < 3]
            stamps.set(at(*pairs), stamp)
            model.update(dict.fromkeys(at(*pairs).tolist(), stamp))
        else:
            stamps.touch(at(*pairs), stamp)
            for location in at(*pairs).tolist():
                if 0 <= location >> SLOT_BITS < 3:
                    model[location] = max(model.get(location, 0), stamp)
    for extent in range(3):
        mine = {location & SLOT_MASK: stamp for location, stamp in model.items() if location >> SLOT_BITS == extent}
        assert kept(stamps, extent) == {slot: stamp for slot, stamp in mine.items() if stamp}


def test_a_row_cannot_be_written_from_outside() -> None:
    stamps = Stamps(1, PLENTY)
    stamps.attach(0, PAGES)
    with pytest.raises(ValueError, match="read-only"):
        stamps.row(0)[0] = 1


# -- On disk


@pytest.fixture
def io() -> FaultIo:
    return FaultIo()


def flushed(io: FaultIo, directory: Path, stamps: Stamps) -> list[int]:
    assert write_stamps(io, str(directory), stamps.take_dirty()) == []
    return sorted(int(name, 16) for name in os.listdir(directory))


def test_file_bytes_are_pinned(io: FaultIo, tmp_path: Path) -> None:
    geometry = Geometry(1 * MIB, SlotClass(102_400, entry_bytes(3)))
    assert geometry.slots == 10
    stamps = Stamps(300, PLENTY)
    stamps.attach(258, geometry)
    stamps.set(at((258, 1), (258, 9)), np.array([0x01020304, 28_891_666], np.uint32))
    assert flushed(io, tmp_path, stamps) == [258]
    assert (tmp_path / "00000102").read_bytes().hex() == (
        "45465354" "0100" "0000" "02010000" "00900100" "a8000000" "0a000000" "671b8b9bb57c2480"
        "00000000" "04030201" + "00000000" * 7 + "12dab801"
    )  # fmt: skip
    assert stat.S_IMODE(os.stat(tmp_path / "00000102").st_mode) == 0o600


def test_stamps_come_back_after_a_restart(io: FaultIo, tmp_path: Path) -> None:
    stamps = Stamps(3, PLENTY)
    stamps.attach(0, V41)
    stamps.attach(2, PAGES)
    stamps.set(at((0, 17), (2, 3)), np.array([5, 6], np.uint32))
    assert flushed(io, tmp_path, stamps) == [0, 2]
    loaded = load_stamps(io, str(tmp_path), {0: V41, 1: V41, 2: PAGES}, remove_others=True)
    assert sorted(loaded) == [0, 2]
    again = Stamps(3, PLENTY)
    again.attach(0, V41, loaded[0])
    again.attach(2, PAGES, loaded[2])
    assert (kept(again, 0), kept(again, 2)) == ({17: 5}, {3: 6})
    assert not again.dirty
    assert again.touch(at((0, 17)), 7) == 1
    assert io.open_files == 0


def test_only_changed_extents_are_written_and_from_a_private_copy(io: FaultIo, tmp_path: Path) -> None:
    stamps = Stamps(3, PLENTY)
    for extent in range(3):
        stamps.attach(extent, PAGES)
    flushed(io, tmp_path, stamps)
    stamps.set(at((1, 0)), 1)
    files = stamps.take_dirty()
    stamps.set(at((1, 0)), 2)
    assert [file.extent for file in files] == [1]
    before = io.operations
    assert write_stamps(io, str(tmp_path), files) == []
    assert io.names(since=before) == ["open", "truncate", "pwrite", "close"]
    assert load_stamps(io, str(tmp_path), {1: PAGES}, remove_others=False)[1][0] == 1
    assert stamps.dirty


def one_file(io: FaultIo, directory: Path) -> Path:
    stamps = Stamps(6, PLENTY)
    stamps.attach(5, PAGES)
    stamps.set(at((5, 3), (5, 200)), 77)
    flushed(io, directory, stamps)
    return directory / stamp_file_name(5)


def test_any_flipped_bit_of_a_stamp_file_makes_it_worth_nothing(io: FaultIo, tmp_path: Path) -> None:
    path = one_file(io, tmp_path)
    data = path.read_bytes()
    assert load_stamps(io, str(tmp_path), {5: PAGES}, remove_others=False)[5][200] == 77
    for bit in range(8 * len(data)):
        if bit > 400 and bit % 127:
            continue
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        assert load_stamps(io, str(tmp_path), {5: PAGES}, remove_others=False) == {}


@pytest.mark.parametrize("size", [0, 1, 31, 32, 33, 32 + 4 * PAGES.slots - 1, 32 + 4 * PAGES.slots + 1])
def test_a_stamp_file_of_another_length_is_worth_nothing(io: FaultIo, tmp_path: Path, size: int) -> None:
    os.truncate(one_file(io, tmp_path), size)
    assert load_stamps(io, str(tmp_path), {5: PAGES}, remove_others=False) == {}


def test_a_stamp_file_of_another_extent_or_class_is_worth_nothing(io: FaultIo, tmp_path: Path) -> None:
    path = one_file(io, tmp_path)
    assert load_stamps(io, str(tmp_path), {5: SMALL}, remove_others=False) == {}
    path.rename(tmp_path / stamp_file_name(4))
    assert load_stamps(io, str(tmp_path), {4: PAGES}, remove_others=False) == {}


def test_an_owner_removes_stamp_files_without_use_and_nothing_else(io: FaultIo, tmp_path: Path) -> None:
    one_file(io, tmp_path)
    (tmp_path / stamp_file_name(1)).write_bytes(b"damaged")
    (tmp_path / stamp_file_name(2)).write_bytes(b"free extent")
    for name in ("notes", "0000000G", "000000010", "ABCDEF01"):
        (tmp_path / name).write_bytes(b"not ours")
    everything = sorted(os.listdir(tmp_path))
    geometries = {1: PAGES, 5: PAGES}
    assert list(load_stamps(io, str(tmp_path), geometries, remove_others=False)) == [5]
    assert sorted(os.listdir(tmp_path)) == everything
    assert list(load_stamps(io, str(tmp_path), geometries, remove_others=True)) == [5]
    assert sorted(os.listdir(tmp_path)) == ["000000010", "00000005", "0000000G", "ABCDEF01", "notes"]


def test_a_missing_directory_or_an_unreadable_file_is_no_error(io: FaultIo, tmp_path: Path) -> None:
    assert load_stamps(io, str(tmp_path / "absent"), {5: PAGES}, remove_others=True) == {}
    one_file(io, tmp_path)
    io.fail("preadv", errno.EIO)
    assert load_stamps(io, str(tmp_path), {5: PAGES}, remove_others=True) == {}
    io.verify()
    assert io.open_files == 0


def test_one_extent_is_read_alone_and_is_zeros_where_its_file_is_worth_nothing(io: FaultIo, tmp_path: Path) -> None:
    path = one_file(io, tmp_path)
    assert np.flatnonzero(read_stamps(io, str(tmp_path), 5, PAGES)).tolist() == [3, 200]
    assert not read_stamps(io, str(tmp_path), 4, PAGES).any()
    assert read_stamps(io, str(tmp_path), 5, SMALL).tolist() == [0] * SMALL.slots
    path.write_bytes(path.read_bytes()[:-1])
    assert not read_stamps(io, str(tmp_path), 5, PAGES).any()


def test_a_failed_write_is_told_and_tried_again(io: FaultIo, tmp_path: Path) -> None:
    stamps = Stamps(3, PLENTY)
    stamps.attach(0, PAGES)
    stamps.attach(1, PAGES)
    stamps.attach(2, PAGES)
    io.fail("pwrite", errno.ENOSPC, skip=1)
    failed = write_stamps(io, str(tmp_path), stamps.take_dirty())
    io.clear()
    assert failed == [1]
    assert io.open_files == 0
    stamps.put_back([*failed, 0])
    stamps.detach(0)
    assert [file.extent for file in stamps.take_dirty()] == [1]


def test_files_grow_to_the_budget_and_not_beyond(io: FaultIo, tmp_path: Path) -> None:
    each = stamp_file_bytes(V41.slots)
    assert each == 6 * PAGE_BYTES
    stamps = Stamps(4, 2 * each + PAGE_BYTES)
    for extent in range(4):
        stamps.attach(extent, V41)
    assert flushed(io, tmp_path, stamps) == [0, 1]
    assert not stamps.dirty
    stamps.set(at((0, 0), (3, 0)), 5)
    assert [file.extent for file in stamps.take_dirty()] == [0]
    used = sum(os.stat(tmp_path / name).st_blocks * 512 for name in os.listdir(tmp_path))
    assert used <= stamps.budget_bytes


def test_files_found_at_start_count_against_the_budget() -> None:
    each = stamp_file_bytes(PAGES.slots)
    stamps = Stamps(3, 2 * each)
    stamps.attach(0, PAGES, np.zeros(PAGES.slots, np.uint32))
    stamps.attach(1, PAGES)
    stamps.attach(2, PAGES)
    assert [file.extent for file in stamps.take_dirty()] == [1]


def test_a_file_that_became_shorter_is_cut(io: FaultIo, tmp_path: Path) -> None:
    stamps = Stamps(1, PLENTY)
    stamps.attach(0, SMALL)
    flushed(io, tmp_path, stamps)
    stamps.attach(0, PAGES)
    stamps.set(at((0, 9)), 3)
    flushed(io, tmp_path, stamps)
    assert os.stat(tmp_path / stamp_file_name(0)).st_size == 32 + 4 * PAGES.slots
    assert load_stamps(io, str(tmp_path), {0: PAGES}, remove_others=False)[0][9] == 3


def test_wrong_calls_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="extents is 0"):
        Stamps(0, PLENTY)
    stamps = Stamps(2, PLENTY)
    for extent in (-1, 2):
        with pytest.raises(InvalidArgument, match="the node has 2"):
            stamps.attach(extent, PAGES)
    for wrong in (np.zeros(PAGES.slots - 1, np.uint32), np.zeros(PAGES.slots, np.int64)):
        with pytest.raises(InvalidArgument, match="must be uint32"):
            stamps.attach(0, PAGES, cast("NDArray[np.uint32]", wrong))
