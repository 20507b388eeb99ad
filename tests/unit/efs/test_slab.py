"""The slab file: what is written is read, what is damaged is named, and the order of writes is the one that is told."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from efs.errors import CorruptRecord, IdentityMismatch, InvalidArgument, OpenFailed
from efs.extent import Geometry, SlotClass, location_of
from efs.limits import IOV_MAX, MIB, PAGE_BYTES
from efs.osio import SystemIo
from efs.shard import check_entries, free_entries, raw_entries, wrap_entries
from efs.slab import Slab
from tests.support.faultio import FaultIo
from tests.support.records import LARGE, SMALL, Records, make_records

NODE = bytes(range(16))
EXTENT = 1 * MIB
EXTENTS = 4
SMALL_CLASS = SlotClass.of(SMALL)
LARGE_CLASS = SlotClass.of(LARGE)


@pytest.fixture
def io() -> FaultIo:
    return FaultIo(keep_data=True)


@pytest.fixture
def path(tmp_path: Path, io: FaultIo) -> str:
    made = str(tmp_path / "slab")
    Slab.create(io, made, EXTENT, EXTENTS)
    return made


def opened(io: FaultIo, path: str, *, writable: bool = True, mapped: bool = False) -> Slab:
    return Slab.open(io, path, NODE, EXTENT, EXTENTS, writable=writable, mapped=mapped)


def padded(records: Records) -> np.ndarray:
    slots = np.zeros((len(records), records.shape.slot_bytes), np.uint8)
    slots[:, : records.shape.shard_bytes] = records.payload
    return slots


def stored(slab: Slab, geometry: Geometry, location: int, records: Records) -> None:
    generations = np.arange(1, len(records) + 1, dtype=np.uint64)
    slab.clear_entries(geometry, location, len(records))
    slab.write_payload(geometry, location, padded(records))
    slab.write_entries(geometry, location, wrap_entries(records.headers, generations, 1, 1))


def allocated(path: str) -> int:
    return os.stat(path).st_blocks * 512


# -- The file


def test_a_new_slab_is_full_size_sparse_private_and_free(io: FaultIo, path: str) -> None:
    assert os.stat(path).st_size == EXTENT * EXTENTS
    assert allocated(path) == 0
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600
    slab = opened(io, path)
    assert all(state.geometry is None and state.problem is None for state in slab.scan())
    slab.close()
    slab.close()
    assert io.open_files == 0


def test_a_slab_is_never_made_over_another(io: FaultIo, path: str) -> None:
    with pytest.raises(FileExistsError):
        Slab.create(io, path, EXTENT, EXTENTS)


def test_an_absent_slab_is_named(io: FaultIo, tmp_path: Path) -> None:
    with pytest.raises(OpenFailed, match="absent: No such file"):
        opened(io, str(tmp_path / "absent"))


def test_a_symbolic_link_is_not_followed(io: FaultIo, path: str, tmp_path: Path) -> None:
    os.symlink(path, tmp_path / "link")
    with pytest.raises(OpenFailed, match="link"):
        opened(io, str(tmp_path / "link"))


def test_a_slab_that_cannot_be_mapped_leaves_no_descriptor_open(io: FaultIo, path: str) -> None:
    io.fail("map", errno.ENOMEM)
    with pytest.raises(OpenFailed, match="slab"):
        opened(io, path, mapped=True)
    io.verify()
    assert io.open_files == 0


def test_a_closed_slab_refuses_with_an_error_not_with_another_file(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    slab.close()
    with pytest.raises(OSError, match="closed"):
        slab.read_payload(geometry, 0, 1)


# -- Extents


def test_disk_space_is_taken_extent_by_extent(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    for used, extent in enumerate((2, 0), start=1):
        slab.assign(extent, SMALL_CLASS, sync=False)
        assert used * EXTENT <= allocated(path) <= used * EXTENT + 16 * PAGE_BYTES
    slab.assign(2, LARGE_CLASS, sync=False)
    assert allocated(path) <= 2 * EXTENT + 16 * PAGE_BYTES
    slab.close()


def test_an_assigned_extent_is_found_by_the_next_open(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(1, SMALL_CLASS, sync=True)
    slab.close()
    slab = opened(io, path, writable=False)
    assert [state.geometry for state in slab.scan()] == [None, geometry, None, None]
    assert free_entries(slab.read_table(1, geometry)).all()
    slab.close()


def test_a_reassigned_extent_shows_nothing_of_its_old_table(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    old = slab.assign(1, SMALL_CLASS, sync=False)
    stored(slab, old, location_of(1, 0), make_records(old.slots, 0))
    assert check_entries(slab.read_table(1, old), SMALL.slot_bytes).all()
    new = slab.assign(1, LARGE_CLASS, sync=False)
    assert slab.read_class(1) == new
    assert free_entries(slab.read_table(1, new)).all()
    slab.close()


def test_assignment_goes_allocate_zeros_sync_header_sync(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    before = io.operations
    geometry = slab.assign(1, SMALL_CLASS, sync=True)
    steps = [(entry.name, entry.offset - EXTENT, entry.size) for entry in io.log[before:] if "sync" not in entry.name]
    assert [entry.name for entry in io.log[before:]] == [
        "allocate", "pwrite", "pwrite", "fdatasync", "pwrite", "fdatasync",
    ]  # fmt: skip
    assert steps == [
        ("allocate", 0, EXTENT),
        ("pwrite", 0, PAGE_BYTES),
        ("pwrite", PAGE_BYTES, geometry.data_offset - PAGE_BYTES),
        ("pwrite", 0, PAGE_BYTES),
    ]
    datas = [entry.data for entry in io.log[before:] if entry.data is not None]
    assert not any(datas[0] + datas[1])
    assert any(datas[2])
    slab.close()


@pytest.mark.parametrize("step", range(4))
def test_an_assignment_that_fails_half_way_leaves_the_old_class_or_a_free_extent(
    io: FaultIo, path: str, step: int
) -> None:
    slab = opened(io, path)
    old = slab.assign(1, SMALL_CLASS, sync=False)
    records = make_records(old.slots, 0)
    stored(slab, old, location_of(1, 0), records)
    io.fail(("allocate", "pwrite"), errno.ENOSPC, skip=step)
    with pytest.raises(OSError, match="No space"):
        slab.assign(1, LARGE_CLASS, sync=False)
    io.clear()
    left = slab.read_class(1)
    assert left == (old if step < 2 else None)
    if left is not None:
        assert check_entries(slab.read_table(1, old)).all()
    assert slab.assign(1, LARGE_CLASS, sync=False) == slab.read_class(1)
    slab.close()


def test_a_table_is_zeroed_in_bounded_pieces(io: FaultIo, tmp_path: Path) -> None:
    path = str(tmp_path / "large")
    Slab.create(io, path, 8 * MIB, 1)
    slab = Slab.open(io, path, NODE, 8 * MIB, 1)
    before = io.operations
    geometry = slab.assign(0, SlotClass(64, 144), sync=False)
    sizes = [entry.size for entry in io.log[before:] if entry.name == "pwrite"]
    assert geometry.data_offset > 5 * MIB
    assert max(sizes) == 1 * MIB
    assert sum(sizes) == geometry.data_offset + PAGE_BYTES
    slab.close()


# -- Damage to the file


def overwrite(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def test_a_damaged_header_page_costs_its_extent_only(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(1, SMALL_CLASS, sync=False)
    slab.assign(2, SMALL_CLASS, sync=False)
    overwrite(path, EXTENT + 30, b"\xff")
    states = slab.scan()
    assert [state.geometry for state in states] == [None, None, geometry, None]
    assert isinstance(states[1].problem, CorruptRecord)
    assert str(states[1].problem) == f"{path} extent 1: header page fails its checksum"
    slab.close()


def test_an_extent_copied_to_another_place_is_refused(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    slab.assign(1, SMALL_CLASS, sync=False)
    data = Path(path).read_bytes()
    overwrite(path, 2 * EXTENT, data[EXTENT : 2 * EXTENT])
    with pytest.raises(IdentityMismatch, match="extent 2: extent index is 1, expected 2"):
        slab.read_class(2)
    slab.close()


def test_the_slab_of_another_node_is_refused_extent_by_extent(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    slab.assign(1, SMALL_CLASS, sync=False)
    slab.close()
    other = Slab.open(io, path, bytes(16), EXTENT, EXTENTS)
    problem = other.scan()[1].problem
    assert isinstance(problem, IdentityMismatch)
    assert f"node id is {NODE.hex()}, expected {bytes(16).hex()}" in str(problem)
    other.close()


def test_a_truncated_slab_names_the_lost_extents_and_read_only_leaves_it_alone(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    slab.assign(2, SMALL_CLASS, sync=False)
    slab.close()
    os.truncate(path, 2 * EXTENT + 9)
    slab = opened(io, path, writable=False, mapped=True)
    states = slab.scan()
    assert [state.geometry for state in states] == [geometry, None, None, None]
    assert [str(state.problem) for state in states[2:]] == [
        f"{path} extent {extent}: ends at byte {(extent + 1) * EXTENT}, the file had {2 * EXTENT + 9}"
        for extent in (2, 3)
    ]
    assert slab.mapped_slots(geometry, location_of(0, 0), 1).shape == (1, SMALL.slot_bytes)
    with pytest.raises(CorruptRecord, match="slots end at byte"):
        slab.mapped_slots(geometry, location_of(2, 0), 1)
    slab.close()
    assert os.stat(path).st_size == 2 * EXTENT + 9


def test_a_truncated_slab_opened_by_its_owner_is_whole_again_and_serves_what_is_left(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    slab.assign(3, SMALL_CLASS, sync=False)
    records = make_records(10, 0)
    stored(slab, geometry, location_of(0, 3), records)
    slab.close()
    os.truncate(path, EXTENT)
    slab = opened(io, path, mapped=True)
    assert slab.size_bytes == EXTENT
    assert [state.problem is not None for state in slab.scan()] == [False, True, True, True]
    assert (slab.mapped_slots(geometry, location_of(0, 3), 10) == padded(records)).all()
    assert not slab.mapped_slots(geometry, location_of(3, 0), geometry.slots).any()
    slab.close()
    slab = opened(io, path)
    assert [(state.geometry, state.problem) for state in slab.scan()[1:]] == [(None, None)] * 3
    slab.close()


def test_an_empty_slab_file_opens_with_nothing_in_it(io: FaultIo, path: str) -> None:
    os.truncate(path, 0)
    slab = opened(io, path, writable=False, mapped=True)
    assert slab.view is None
    assert all(isinstance(state.problem, CorruptRecord) for state in slab.scan())
    slab.close()


def test_the_tail_of_a_slab_that_is_too_long_is_never_used(io: FaultIo, path: str) -> None:
    os.truncate(path, (EXTENTS + 1) * EXTENT)
    slab = opened(io, path, mapped=True)
    assert slab.view is not None
    assert len(slab.view) == EXTENTS * EXTENT
    assert len(slab.scan()) == EXTENTS
    slab.close()
    assert os.stat(path).st_size == (EXTENTS + 1) * EXTENT


# -- Records


@pytest.mark.parametrize("records", [make_records(70, 0), make_records(12, 3, shape=LARGE)], ids=["small", "large"])
def test_records_are_read_back_by_every_way(io: FaultIo, path: str, records: Records) -> None:
    slab = opened(io, path, mapped=True)
    slot_class = SlotClass.of(records.shape)
    geometry = slab.assign(3, slot_class, sync=False)
    location = location_of(3, 5)
    stored(slab, geometry, location, records)
    table = slab.read_table(3, geometry)
    valid = check_entries(table, slot_class.slot_bytes)
    assert np.flatnonzero(valid).tolist() == list(range(5, 5 + len(records)))
    assert (~valid == free_entries(table)).all()
    assert [row.tobytes() for row in table["key"][5 : 5 + len(records)]] == list(records.keys)
    some = slab.read_entries(geometry, location + 2, 3)
    assert (raw_entries(some) == raw_entries(table)[7:10]).all()
    slots = padded(records)
    assert (slab.read_payload(geometry, location, len(records)) == slots).all()
    into = np.ones((4, slot_class.slot_bytes), np.uint8)
    assert slab.read_payload(geometry, location + 1, 4, into) is into
    assert (into == slots[1:5]).all()
    assert (slab.mapped_slots(geometry, location, len(records)) == slots).all()
    slab.close()


class CacheIo(SystemIo):
    """A page cache as a test wants it: a read that must not wait ends with an errno, or with all bytes but some."""

    def __init__(self, error: int | None, fewer: int = 0) -> None:
        self.error, self.fewer, self.asked = error, fewer, 0

    def preadv(self, fd: int, buffers: object, offset: int, nowait: bool = False) -> int:
        views: list[memoryview] = list(buffers)  # type: ignore[call-overload]
        if nowait:
            self.asked += 1
            if self.error is not None:
                raise OSError(self.error, os.strerror(self.error))
        got = super().preadv(fd, views, offset)
        return got - self.fewer if nowait else got


@pytest.mark.parametrize("way", ["blocking", "now"])
def test_scattered_reads_fill_more_buffers_than_one_call_takes(tmp_path: Path, way: str) -> None:
    io = FaultIo(CacheIo(None))
    Slab.create(io, str(tmp_path / "slab"), EXTENT, EXTENTS)
    slab = opened(io, str(tmp_path / "slab"))
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    records = make_records(700, 0)
    stored(slab, geometry, 0, records)
    into = np.zeros((2 * 700, 64), np.uint8)
    buffers = [row.data for row in into]
    assert len(buffers) > IOV_MAX
    before = io.operations
    if way == "now":
        assert slab.read_scattered_now(geometry, 0, buffers)
    else:
        slab.read_scattered(geometry, 0, buffers)
    assert [(entry.name, entry.nowait) for entry in io.log[before:]] == [("preadv", way == "now")] * 2
    assert (into.reshape(700, 128) == padded(records)).all()
    slab.close()


@pytest.mark.parametrize(
    "io", [CacheIo(errno.EAGAIN), CacheIo(errno.ENOTSUP), CacheIo(None, 1)], ids=["cold", "tmpfs", "partly cached"]
)
def test_a_read_that_would_wait_says_so(tmp_path: Path, io: CacheIo) -> None:
    Slab.create(io, str(tmp_path / "slab"), EXTENT, EXTENTS)
    slab = Slab.open(io, str(tmp_path / "slab"), NODE, EXTENT, EXTENTS)
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    assert slab.read_scattered_now(geometry, 0, [memoryview(bytearray(128))]) is False
    assert io.asked == 1
    slab.close()


def test_a_disk_error_in_a_read_that_does_not_wait_is_an_error(tmp_path: Path) -> None:
    io = CacheIo(errno.EIO)
    Slab.create(io, str(tmp_path / "slab"), EXTENT, EXTENTS)
    slab = Slab.open(io, str(tmp_path / "slab"), NODE, EXTENT, EXTENTS)
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    with pytest.raises(OSError, match="Input/output"):
        slab.read_scattered_now(geometry, 0, [memoryview(bytearray(128))])
    slab.close()


def test_short_reads_and_writes_are_completed(io: FaultIo, path: str) -> None:
    io.shorten(("preadv", "pwrite"), 1_001)
    slab = opened(io, path)
    geometry = slab.assign(1, SMALL_CLASS, sync=False)
    records = make_records(50, 0)
    stored(slab, geometry, location_of(1, 0), records)
    assert slab.read_class(1) == geometry
    assert (slab.read_payload(geometry, location_of(1, 0), 50) == padded(records)).all()
    assert check_entries(slab.read_table(1, geometry)).sum() == 50
    io.verify()
    slab.close()


def test_one_range_is_one_write(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(1, SMALL_CLASS, sync=False)
    before = io.operations
    stored(slab, geometry, location_of(1, 0), make_records(300, 0))
    assert io.names(since=before) == ["pwrite"] * 3
    slab.close()


def test_cleared_entries_are_free_and_their_neighbours_are_not(io: FaultIo, path: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(1, SMALL_CLASS, sync=False)
    stored(slab, geometry, location_of(1, 0), make_records(10, 0))
    slab.clear_entries(geometry, location_of(1, 3), 4)
    table = slab.read_table(1, geometry)
    assert np.flatnonzero(check_entries(table)).tolist() == [0, 1, 2, 7, 8, 9]
    assert free_entries(table)[3:7].all()
    slab.close()


# -- Wrong calls

Call = Callable[[Slab, Geometry], object]
ROWS = np.zeros((2, SMALL.slot_bytes), np.uint8)
WRONG_CALLS: dict[str, Call] = {
    "no extent": lambda slab, geometry: slab.read_class(EXTENTS),
    "negative extent": lambda slab, geometry: slab.assign(-1, SMALL_CLASS, sync=False),
    "too large a class": lambda slab, geometry: slab.assign(0, SlotClass(EXTENT, 144), sync=False),
    "behind the slots": lambda slab, geometry: slab.read_payload(geometry, geometry.slots - 1, 2),
    "behind the slab": lambda slab, geometry: slab.clear_entries(geometry, location_of(EXTENTS, 0), 1),
    "negative location": lambda slab, geometry: slab.read_entries(geometry, -1, 1),
    "no slots": lambda slab, geometry: slab.clear_entries(geometry, 0, 0),
    "geometry of another slab": lambda slab, geometry: slab.read_payload(Geometry(2 * MIB, SMALL_CLASS), 0, 1),
    "rows of another class": lambda slab, geometry: slab.write_payload(geometry, 0, ROWS[:, :64].copy()),
    "rows with gaps": lambda slab, geometry: slab.write_payload(geometry, 0, ROWS[:, ::-1]),
    "rows of words": lambda slab, geometry: slab.write_payload(geometry, 0, ROWS.astype(np.uint16)),
    "entries of another class": lambda slab, geometry: slab.write_entries(geometry, 0, np.zeros((1, 152), np.uint8)),
    "rows that do not match": lambda slab, geometry: slab.read_payload(geometry, 0, 3, ROWS),
    "buffers behind the slots": lambda slab, geometry: slab.read_scattered(
        geometry, geometry.slots - 1, [memoryview(bytearray(129))]
    ),
    "no map": lambda slab, geometry: slab.mapped_slots(geometry, 0, 1),
}


@pytest.mark.parametrize("name", WRONG_CALLS)
def test_a_wrong_call_is_refused_before_it_touches_the_file(io: FaultIo, path: str, name: str) -> None:
    slab = opened(io, path)
    geometry = slab.assign(0, SMALL_CLASS, sync=False)
    before = io.operations
    with pytest.raises(InvalidArgument):
        WRONG_CALLS[name](slab, geometry)
    assert io.operations == before
    slab.close()


@pytest.mark.parametrize(("extent_bytes", "extents"), [(EXTENT + 1, 4), (0, 4), (EXTENT, 0), (EXTENT, 1 << 25)])
def test_impossible_sizes_are_refused_before_a_file_is_made(
    io: FaultIo, tmp_path: Path, extent_bytes: int, extents: int
) -> None:
    with pytest.raises(InvalidArgument):
        Slab.create(io, str(tmp_path / "wrong"), extent_bytes, extents)
    assert os.listdir(tmp_path) == []
