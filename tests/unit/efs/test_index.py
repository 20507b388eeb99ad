"""The index: versions under a key, compared deletes, a full map, lost files."""

from __future__ import annotations

import errno
import os
import random
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from efs.errors import OpenFailed
from efs.index import INDEX_KEY_BYTES, Held, Index, IndexDamaged, IndexEntry, IndexFull
from efs.limits import DELETE_BATCH, MIB, MIN_INDEX_BUDGET_BYTES
from efs.osio import SystemIo
from tests.support.faultio import FaultIo
from tests.support.records import make_keys

DIGEST = b"d" * 16


@pytest.fixture
def place(tmp_path: Path) -> str:
    made = str(tmp_path / "index")
    Index.create(SystemIo(), made, MIB)
    return made


@pytest.fixture
def index(place: str) -> Iterator[Index]:
    opened = Index.open(SystemIo(), place, MIB)
    yield opened
    opened.close()


def put(index: Index, entries: list[IndexEntry]) -> None:
    index.put([entry.index_key for entry in entries], np.array([entry.location for entry in entries], np.int64),
              np.array([entry.generation for entry in entries], np.uint64))


def entries_of(count: int, seed: int, run: int = 64, first: int = 0) -> list[IndexEntry]:
    return [IndexEntry(key + DIGEST, first + place, first + place + 1)
            for place, key in enumerate(make_keys(count, seed, run))]


def test_versions_of_a_key_come_sorted_by_digest(index: Index) -> None:
    key, other = make_keys(2, 1)
    digests = [bytes([value]) * 16 for value in (9, 1, 5)]
    put(index, [IndexEntry(key + digest, place, place + 10) for place, digest in enumerate(digests)])
    put(index, [IndexEntry(other + DIGEST, 2**40, 2**63)])
    assert index.look_up([key, make_keys(1, 2)[0], other]) == [
        [Held(digests[1], 1, 11), Held(digests[2], 2, 12), Held(digests[0], 0, 10)],
        [],
        [Held(DIGEST, 2**40, 2**63)],
    ]
    assert index.entries == 4


def test_a_key_is_not_found_by_its_neighbours(index: Index) -> None:
    low, high = b"\x00" * 31 + b"\x01", b"\x00" * 31 + b"\x03"
    put(index, [IndexEntry(low + b"\xff" * 16, 1, 1), IndexEntry(high + bytes(16), 2, 2)])
    assert index.look_up([b"\x00" * 31 + b"\x02", b"\xff" * 32]) == [[], []]


def test_the_last_put_of_a_version_counts(index: Index) -> None:
    key = make_keys(1, 1)[0]
    put(index, [IndexEntry(key + DIGEST, 1, 1)])
    put(index, [IndexEntry(key + DIGEST, 7, 9)])
    assert index.look_up([key]) == [[Held(DIGEST, 7, 9)]]
    assert index.get([key + DIGEST, key + bytes(16)]) == [(7, 9), None]
    assert index.entries == 1


def test_only_an_entry_with_the_given_value_is_deleted(index: Index) -> None:
    first, second, third = entries_of(3, 1)
    put(index, [first, second, third])
    late = [IndexEntry(first.index_key, first.location, first.generation + 1),
            IndexEntry(second.index_key, second.location + 1, second.generation), third]
    assert index.delete(late) == 1
    assert [entry.index_key for entry in index.page(None, 10)] == sorted([first.index_key, second.index_key])


@pytest.mark.parametrize("size", [1, 3, 100, 1_000])
def test_pages_of_any_size_show_everything_in_order(index: Index, size: int) -> None:
    entries = sorted(entries_of(100, 1), key=lambda entry: entry.index_key)
    put(index, entries)
    found, after = [], None
    while page := index.page(after, size):
        found += page
        after = page[-1].index_key
    assert found == entries
    assert list(index.scan()) == entries
    assert index.page(entries[40].index_key[:20], 1)[0].index_key >= entries[40].index_key[:20]


def test_entries_survive_closing(place: str) -> None:
    entries = entries_of(50, 1)
    index = Index.open(SystemIo(), place, MIB)
    put(index, entries)
    index.sync()
    index.close()
    again = Index.open(SystemIo(), place, MIB)
    assert again.entries == 50
    again.close()


# -- Commits through the door ---------------------------------------------------------------------------------------


def test_commits_and_syncs_pass_through_the_door(place: str) -> None:
    io = FaultIo()
    index = Index.open(io, place, MIB)
    put(index, entries_of(10, 1))
    index.sync()
    index.delete(entries_of(10, 1))
    index.close()
    assert io.names("index") == ["index_commit", "index_sync", "index_commit"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_commit_that_fails_changes_nothing_and_the_next_one_works(place: str, code: int) -> None:
    io = FaultIo()
    index = Index.open(io, place, MIB)
    old, new = entries_of(5, 1), entries_of(5, 2)
    put(index, old)
    io.fail("index_commit", code, times=2)
    with pytest.raises(OSError, match=os.strerror(code)):
        put(index, new)
    with pytest.raises(OSError, match=os.strerror(code)):
        index.delete(old)
    io.clear()
    assert list(index.scan()) == sorted(old, key=lambda entry: entry.index_key)
    put(index, new)
    assert index.delete(old) == 5
    assert index.entries == 5
    index.close()


def test_a_sync_that_fails_is_an_error(place: str) -> None:
    io = FaultIo()
    index = Index.open(io, place, MIB)
    io.fail("index_sync", errno.EIO)
    with pytest.raises(OSError, match="Input/output"):
        index.sync()
    io.clear()
    index.close()


# -- A full map -----------------------------------------------------------------------------------------------------


def test_the_budget_bounds_the_entries_and_the_file(place: str, index: Index) -> None:
    fitting = index.most_entries // 300
    for seed in range(fitting):
        put(index, entries_of(300, seed, run=1, first=300 * seed))
    with pytest.raises(IndexFull):
        put(index, entries_of(300, fitting, run=1))
    assert index.entries == fitting * 300
    assert os.stat(os.path.join(place, "data.mdb")).st_blocks * 512 <= MIB


def test_a_full_index_can_be_emptied(index: Index) -> None:
    held = entries_of(index.most_entries, 5, run=1)
    for start in range(0, len(held), 500):
        put(index, held[start : start + 500])
    assert index.entries == index.most_entries
    random.Random(1).shuffle(held)
    assert index.delete(held) == len(held)
    assert index.entries == 0
    put(index, held[:1_000])


@pytest.mark.parametrize("run", [1, 64])
def test_a_full_index_is_turned_over_many_times_without_getting_stuck(index: Index, run: int) -> None:
    held: list[IndexEntry] = []
    for seed in range(40):
        new = entries_of(757, seed, run, first=757 * seed)
        excess = max(0, len(held) + len(new) - index.most_entries)
        assert index.delete(held[:excess]) == excess
        held = held[excess:]
        put(index, new)
        held += new
    assert index.entries == len(held)
    assert index.entries > index.most_entries - 757
    sample = held[:: len(held) // 50]
    assert index.get([entry.index_key for entry in sample]) == [(entry.location, entry.generation) for entry in sample]


def test_deletes_go_in_batches(place: str) -> None:
    io = FaultIo()
    index = Index.open(io, place, 8 * MIB)
    entries = entries_of(DELETE_BATCH * 2 + 1, 1)
    put(index, entries)
    before = io.operations
    assert index.delete(entries) == len(entries)
    assert io.names(since=before) == ["index_commit"] * 3
    index.close()


# -- Files ----------------------------------------------------------------------------------------------------------


def test_a_second_opening_in_one_process_is_refused(place: str, index: Index) -> None:
    with pytest.raises(OpenFailed, match="already open"):
        Index.open(SystemIo(), place, MIB)
    put(index, entries_of(3, 1))
    assert index.entries == 3


def test_files_are_private(place: str, index: Index) -> None:
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o700
    assert {stat.S_IMODE(os.stat(os.path.join(place, name)).st_mode) for name in os.listdir(place)} == {0o600}


@pytest.mark.parametrize("name", ["", "data.mdb", "lock.mdb"])
def test_symbolic_links_are_not_followed(tmp_path: Path, place: str, name: str) -> None:
    original = os.path.join(place, name).rstrip("/")
    os.rename(original, tmp_path / "elsewhere")
    os.symlink(tmp_path / "elsewhere", original)
    with pytest.raises(OpenFailed, match="symbolic links"):
        Index.open(SystemIo(), place, MIB)


def spoil(place: str, how: str) -> None:
    data = os.path.join(place, "data.mdb")
    if how == "deleted":
        os.unlink(data)
        os.unlink(os.path.join(place, "lock.mdb"))
        os.rmdir(place)
    elif how == "zeroed":
        size = os.stat(data).st_size
        Path(data).write_bytes(bytes(size))
    elif how == "garbage":
        Path(data).write_bytes(random.Random(3).randbytes(100_000))
    elif how == "cut inside a page":
        os.truncate(data, 100)
    else:
        os.truncate(data, 16_384)


@pytest.mark.parametrize("how", ["deleted", "zeroed", "garbage", "cut inside a page", "cut behind the first pages"])
def test_a_lost_index_is_told_apart_and_made_anew(place: str, how: str) -> None:
    index = Index.open(SystemIo(), place, MIB)
    put(index, entries_of(2_000, 1))
    index.sync()
    index.close()
    spoil(place, how)
    with pytest.raises(IndexDamaged):
        Index.open(SystemIo(), place, MIB)
    Index.create(SystemIo(), place, MIB)
    again = Index.open(SystemIo(), place, MIB)
    assert again.entries == 0
    put(again, entries_of(10, 1))
    again.close()


def test_a_directory_without_the_files_is_a_lost_index(tmp_path: Path) -> None:
    with pytest.raises(IndexDamaged):
        Index.open(SystemIo(), str(tmp_path / "none"), MIN_INDEX_BUDGET_BYTES)
    with pytest.raises((IndexDamaged, OpenFailed)):
        Index.open_read_only(SystemIo(), str(tmp_path / "none"))


# -- Other processes ------------------------------------------------------------------------------------------------

READER = """
import sys
from efs.index import Index
from efs.osio import SystemIo
index = Index.open_read_only(SystemIo(), sys.argv[1])
if len(sys.argv) > 2:
    transaction = index._env.begin()
    transaction.get(b"x" * 48)
print(sum(1 for _ in index.scan()), flush=True)
sys.stdin.read()
"""


def test_another_process_reads_beside_the_owner(place: str, index: Index) -> None:
    put(index, entries_of(123, 1))
    child = subprocess.run([sys.executable, "-c", READER, place], input="", capture_output=True, text=True, timeout=60)
    assert child.stdout == "123\n", child.stderr
    put(index, entries_of(10, 2))


def test_a_killed_reader_does_not_hold_pages_for_ever(place: str) -> None:
    index = Index.open(SystemIo(), place, MIB)
    put(index, entries_of(100, 1))
    child = subprocess.Popen([sys.executable, "-c", READER, place, "hold"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "100\n"
        assert str(child.pid) in index._env.readers()
        child.send_signal(signal.SIGKILL)
    index.close()
    again = Index.open(SystemIo(), place, MIB)
    assert str(child.pid) not in again._env.readers()
    again.close()


def test_a_reader_that_is_killed_beside_the_owner_does_not_fill_the_map(place: str, index: Index) -> None:
    held = entries_of(2_000, 1)
    put(index, held)
    child = subprocess.Popen([sys.executable, "-c", READER, place, "hold"], stdin=subprocess.PIPE,
                             stdout=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "2000\n"
        child.send_signal(signal.SIGKILL)
    assert str(child.pid) in index._env.readers()
    for turn in range(2, 30):
        assert index.delete(held) == len(held)
        held = entries_of(2_000, turn)
        put(index, held)
    assert str(child.pid) not in index._env.readers()
    assert index.entries == len(held)


def test_index_keys_have_the_documented_length() -> None:
    assert INDEX_KEY_BYTES == 48
