"""The door to the operating system: short reads and writes, refusals, modes, and files replaced whole."""

from __future__ import annotations

import errno
import itertools
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.limits import IOV_MAX
from efs.osio import (
    Buffer,
    SystemIo,
    read_exactly,
    read_file,
    read_scattered,
    replace_file,
    sync_directory,
    write_fully,
)

DATA = bytes(range(1, 24))


class ShortIo(SystemIo):
    """Every read and write moves at most the next of `steps` bytes (0: no progress), then as much as is asked."""

    def __init__(self, steps: Sequence[int] = ()) -> None:
        self.steps = list(steps)
        self.calls = 0

    def _limit(self, asked: int) -> int:
        self.calls += 1
        return min(asked, self.steps.pop(0)) if self.steps else asked

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, nowait: bool = False) -> int:
        assert 0 < len(buffers) <= IOV_MAX
        left = self._limit(sum(len(view) for view in buffers))
        taken = []
        for view in buffers:
            taken.append(view[:left])
            left -= len(taken[-1])
        return super().preadv(fd, taken, offset, nowait)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return super().pwrite(fd, data[: self._limit(len(data))], offset)


class FailingIo(SystemIo):
    """Raises at the n-th operation of the listed kinds; records the names of all of them."""

    def __init__(self, fail_at: int = -1, code: int = errno.ENOSPC) -> None:
        self.fail_at = fail_at
        self.code = code
        self.log: list[str] = []

    def _step(self, name: str) -> None:
        self.log.append(name)
        if len(self.log) - 1 == self.fail_at:
            raise OSError(self.code, os.strerror(self.code))

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._step("open")
        return super().open(path, flags, mode)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        self._step("pwrite")
        return super().pwrite(fd, data, offset)

    def fsync(self, fd: int) -> None:
        self._step("fsync")
        super().fsync(fd)

    def rename(self, source: str, target: str) -> None:
        self._step("rename")
        super().rename(source, target)


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def file_with(tmp_path: Path, data: bytes) -> int:
    path = tmp_path / "file"
    path.write_bytes(data)
    return os.open(path, os.O_RDWR)


# -- Short reads and writes ----------------------------------------------------------------------------------------


def test_a_write_split_at_every_byte_is_completed(tmp_path: Path) -> None:
    for first in range(1, len(DATA)):
        fd = file_with(tmp_path, b"")
        io = ShortIo([first])
        write_fully(io, fd, memoryview(DATA), 5)
        assert os.pread(fd, 100, 0) == bytes(5) + DATA
        assert io.calls == 2
        os.close(fd)


def test_a_write_byte_by_byte_is_completed(tmp_path: Path) -> None:
    fd = file_with(tmp_path, b"")
    io = ShortIo([1] * len(DATA))
    write_fully(io, fd, memoryview(DATA), 0)
    assert os.pread(fd, 100, 0) == DATA
    assert io.calls == len(DATA)
    os.close(fd)


@pytest.mark.parametrize("written_before", [0, 1, 7])
def test_a_write_without_progress_is_an_error_not_a_loop(tmp_path: Path, written_before: int) -> None:
    fd = file_with(tmp_path, b"")
    with pytest.raises(OSError, match="made no progress") as failed:
        write_fully(ShortIo([*[1] * written_before, 0]), fd, memoryview(DATA), 0)
    assert failed.value.errno == errno.EIO
    os.close(fd)


def test_writing_nothing_calls_nothing(tmp_path: Path) -> None:
    fd = file_with(tmp_path, b"")
    io = ShortIo()
    write_fully(io, fd, memoryview(b""), 0)
    assert io.calls == 0
    os.close(fd)


def test_a_read_split_at_every_byte_is_completed(tmp_path: Path) -> None:
    fd = file_with(tmp_path, b"??" + DATA)
    for first in range(1, len(DATA)):
        into = bytearray(len(DATA))
        io = ShortIo([first])
        read_exactly(io, fd, memoryview(into), 2)
        assert into == DATA
        assert io.calls == 2
    os.close(fd)


def test_a_scattered_read_split_at_every_pair_of_bytes_is_completed(tmp_path: Path) -> None:
    fd = file_with(tmp_path, DATA)
    sizes = [3, 0, 1, 8, 0, 6, 5, 0]
    assert sum(sizes) == len(DATA)
    for first, second in itertools.product(range(1, len(DATA)), repeat=2):
        buffers = [bytearray(size) for size in sizes]
        read_scattered(ShortIo([first, second]), fd, [memoryview(buffer) for buffer in buffers], 0)
        assert b"".join(buffers) == DATA
    os.close(fd)


@given(sizes=st.lists(st.integers(0, 9), max_size=12), steps=st.lists(st.integers(1, 12), max_size=12))
def test_any_split_of_any_buffers_reads_the_range(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], steps: list[int]
) -> None:
    data = bytes(index % 251 for index in range(4 + sum(sizes)))
    fd = file_with(tmp_path_factory.mktemp("read"), data)
    buffers = [bytearray(size) for size in sizes]
    read_scattered(ShortIo(steps), fd, [memoryview(buffer) for buffer in buffers], 4)
    assert b"".join(buffers) == data[4:]
    os.close(fd)


@pytest.mark.parametrize("count", [IOV_MAX - 1, IOV_MAX, IOV_MAX + 1, 2 * IOV_MAX + 17])
@pytest.mark.parametrize("steps", [[], [1], [IOV_MAX * 2 + 1], [2 * IOV_MAX - 1, 3]])
def test_more_buffers_than_one_system_call_takes(tmp_path: Path, count: int, steps: list[int]) -> None:
    data = bytes(index % 253 for index in range(2 * count))
    fd = file_with(tmp_path, data)
    into = bytearray(2 * count)
    whole = memoryview(into)
    io = ShortIo(steps)
    read_scattered(io, fd, [whole[2 * index : 2 * index + 2] for index in range(count)], 0)
    assert into == data
    assert io.calls >= -(-count // IOV_MAX)
    os.close(fd)


def test_reading_no_bytes_calls_nothing(tmp_path: Path) -> None:
    fd = file_with(tmp_path, b"")
    io = ShortIo()
    read_scattered(io, fd, [memoryview(bytearray())] * 3, 0)
    read_exactly(io, fd, memoryview(bytearray()), 0)
    assert io.calls == 0
    os.close(fd)


@pytest.mark.parametrize("there", [0, 1, len(DATA) - 1])
def test_a_truncated_file_is_an_error(tmp_path: Path, there: int) -> None:
    fd = file_with(tmp_path, DATA[:there])
    with pytest.raises(OSError, match="ended before the range did") as failed:
        read_exactly(SystemIo(), fd, memoryview(bytearray(len(DATA))), 0)
    assert failed.value.errno == errno.EIO
    os.close(fd)


# -- Small files -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_read_file_returns_the_whole_file_up_to_its_limit(tmp_path: Path, size: int) -> None:
    (tmp_path / "file").write_bytes(b"x" * size)
    assert read_file(ShortIo([1, 1]), str(tmp_path / "file"), size) == b"x" * size


def test_read_file_refuses_a_larger_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 11)
    before = descriptors()
    with pytest.raises(OSError, match="larger than 10 bytes") as refused:
        read_file(SystemIo(), str(tmp_path / "file"), 10)
    assert refused.value.errno == errno.EFBIG
    assert descriptors() == before


def test_replace_file_leaves_the_new_content_private_and_nothing_else(tmp_path: Path) -> None:
    for data in (b"first", b"", b"second, longer"):
        replace_file(ShortIo([1, 2]), str(tmp_path), "node.toml", data)
        assert (tmp_path / "node.toml").read_bytes() == data
        assert stat.S_IMODE(os.stat(tmp_path / "node.toml").st_mode) == 0o600
        assert os.listdir(tmp_path) == ["node.toml"]


def test_replace_file_syncs_the_data_before_the_rename_and_the_directory_after(tmp_path: Path) -> None:
    io = FailingIo()
    replace_file(io, str(tmp_path), "boot", b"data")
    assert io.log == ["open", "pwrite", "fsync", "rename", "open", "fsync"]


@pytest.mark.parametrize("fail_at", range(4))
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_failed_replace_keeps_the_old_file_and_leaves_no_temporary(tmp_path: Path, fail_at: int, code: int) -> None:
    replace_file(SystemIo(), str(tmp_path), "boot", b"old")
    before = descriptors()
    io = FailingIo(fail_at, code)
    with pytest.raises(OSError, match=os.strerror(code)) as failed:
        replace_file(io, str(tmp_path), "boot", b"new")
    assert failed.value.errno == code
    assert len(io.log) == fail_at + 1
    assert os.listdir(tmp_path) == ["boot"]
    assert (tmp_path / "boot").read_bytes() == b"old"
    assert descriptors() == before


def test_what_a_crash_left_behind_does_not_stop_the_next_replace(tmp_path: Path) -> None:
    (tmp_path / "boot.new").write_bytes(b"half a file that is longer than the new one")
    replace_file(SystemIo(), str(tmp_path), "boot", b"new")
    assert (tmp_path / "boot").read_bytes() == b"new"
    assert os.listdir(tmp_path) == ["boot"]


# -- Links, modes, locks -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [os.O_RDONLY, os.O_RDWR, os.O_WRONLY | os.O_CREAT | os.O_TRUNC])
def test_a_symbolic_link_is_not_followed(tmp_path: Path, flags: int) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "link").symlink_to("secret")
    with pytest.raises(OSError, match="symbolic links") as refused:
        SystemIo().open(str(tmp_path / "link"), flags)
    assert refused.value.errno == errno.ELOOP
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_reading_and_replacing_through_a_link_never_touch_its_target(tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"secret")
    (tmp_path / "file").symlink_to("secret")
    (tmp_path / "file.new").symlink_to("secret")
    with pytest.raises(OSError, match="symbolic links"):
        read_file(SystemIo(), str(tmp_path / "file"), 100)
    with pytest.raises(OSError, match="symbolic links"):
        replace_file(SystemIo(), str(tmp_path), "file", b"new")
    replace_file(SystemIo(), str(tmp_path), "file", b"new")
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "secret").read_bytes() == b"secret"


def test_a_directory_that_is_a_link_is_not_synced_through(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there")
    with pytest.raises(OSError, match="link"):
        sync_directory(SystemIo(), str(tmp_path / "link"))


def test_new_files_and_directories_are_private(tmp_path: Path) -> None:
    io = SystemIo()
    io.mkdir(str(tmp_path / "made"))
    io.close(io.open(str(tmp_path / "made" / "file"), os.O_RDWR | os.O_CREAT))
    assert stat.S_IMODE(os.stat(tmp_path / "made").st_mode) == 0o700
    assert stat.S_IMODE(os.stat(tmp_path / "made" / "file").st_mode) == 0o600


def test_descriptors_are_not_inherited_by_other_programs(tmp_path: Path) -> None:
    io = SystemIo()
    fd = io.open(str(tmp_path / "file"), os.O_RDWR | os.O_CREAT)
    assert not os.get_inheritable(fd)
    io.close(fd)


def test_a_lock_held_by_another_process_is_refused_at_once(tmp_path: Path) -> None:
    io = SystemIo()
    path = str(tmp_path / "lock")
    program = (
        "import sys, os, efs.osio; io = efs.osio.SystemIo(); fd = io.open(sys.argv[1], os.O_RDWR | os.O_CREAT);"
        "io.lock(fd); print('locked', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdin is not None
        assert holder.stdout.readline() == "locked\n"
        fd = io.open(path, os.O_RDWR)
        with pytest.raises(BlockingIOError):
            io.lock(fd)
        holder.stdin.close()
        assert holder.wait(timeout=30) == 0
    io.lock(fd)
    io.close(fd)


# -- What the system reports is passed on --------------------------------------------------------------------------


def test_descriptors_used_up_is_reported_and_recovered_from(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(DATA)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    baseline = descriptors()
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, hard))
    held: list[int] = []

    def open_until_refused() -> None:
        for _ in range(1000):
            held.append(SystemIo().open(str(tmp_path / "file"), os.O_RDONLY))

    try:
        with pytest.raises(OSError, match="Too many open files") as failed:
            open_until_refused()
    finally:
        for fd in held:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert failed.value.errno == errno.EMFILE
    assert read_file(SystemIo(), str(tmp_path / "file"), 100) == DATA
    assert descriptors() == baseline


def test_a_read_that_need_not_wait_is_answered_from_the_page_cache_or_refused(tmp_path: Path) -> None:
    fd = file_with(tmp_path, DATA)
    into = bytearray(len(DATA))
    refusal, got = 0, 0
    try:
        got = SystemIo().preadv(fd, [memoryview(into)], 0, nowait=True)
    except OSError as error:
        refusal = error.errno or -1
    # tmpfs knows no RWF_NOWAIT: the caller reads in a thread then.
    assert (refusal, bytes(into[:got])) in ((0, DATA), (errno.EOPNOTSUPP, b""))
    os.close(fd)


def test_allocation_really_takes_the_blocks_and_truncation_makes_holes(tmp_path: Path) -> None:
    io = SystemIo()
    fd = io.open(str(tmp_path / "slab"), os.O_RDWR | os.O_CREAT)
    io.truncate(fd, 1 << 20)
    assert io.size(fd) == 1 << 20
    assert os.fstat(fd).st_blocks * 512 < 1 << 20
    io.allocate(fd, 1 << 18, 1 << 18)
    assert 1 << 18 <= os.fstat(fd).st_blocks * 512 < 1 << 19
    io.close(fd)


def test_a_shared_map_shows_what_is_written(tmp_path: Path) -> None:
    io = SystemIo()
    fd = file_with(tmp_path, DATA)
    mapping = io.map(fd, len(DATA), False)
    io.pwrite(fd, b"\xff", 3)
    assert mapping[3] == 0xFF
    with pytest.raises(TypeError):
        mapping[3] = 0
    mapping.close()
    io.close(fd)


def test_listdir_is_sorted_and_index_operations_pass_through(tmp_path: Path) -> None:
    for name in ("b", "a", "c"):
        (tmp_path / name).touch()
    assert SystemIo().listdir(str(tmp_path)) == ["a", "b", "c"]
    called: list[str] = []
    SystemIo().index_commit("index", lambda: called.append("commit"))
    SystemIo().index_sync("index", lambda: called.append("sync"))
    assert called == ["commit", "sync"]
