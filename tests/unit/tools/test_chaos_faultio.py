"""Armed faults strike the files of their node, and no others, and end when they are told to."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.waiting import eventually
from tools.chaosrig.faultio import ChaosIo


class Files:
    """A file on each of two nodes."""

    def __init__(self, folder: Path) -> None:
        self.io = ChaosIo()
        self.directory = str(folder / "nodes" / "01")
        self.fds: list[int] = []
        for name in ("01", "010"):
            (folder / "nodes" / name).mkdir(parents=True)
            self.fds.append(self.io.open(str(folder / "nodes" / name / "slab"), os.O_RDWR | os.O_CREAT))
            self.io.pwrite(self.fds[-1], b"sound", 0)

    def read(self, fd: int, nowait: bool = False) -> bytes:
        data = bytearray(5)
        self.io.preadv(fd, [memoryview(data)], 0, nowait)
        return bytes(data)


@pytest.fixture
def files(tmp_path: Path) -> Iterator[Files]:
    made = Files(tmp_path)
    yield made
    made.io.disarm()
    for fd in made.fds:
        made.io.close(fd)


def test_errors_strike_the_files_of_their_node_only_until_disarmed(files: Files) -> None:
    hurt, other = files.fds
    files.io.arm("eio", files.directory)
    files.io.arm("full", files.directory)
    for attempt in (lambda: files.read(hurt), lambda: files.io.pwrite(hurt, b"x", 0)):
        with pytest.raises(OSError, match="Input/output") as raised:
            attempt()
        assert raised.value.errno == errno.EIO
    assert files.read(other) == b"sound"
    files.io.disarm()
    assert files.read(hurt) == b"sound"
    assert files.io.struck["eio"] == 2


def test_a_full_disk_still_reads(files: Files) -> None:
    files.io.arm("full", files.directory)
    with pytest.raises(OSError, match="No space left"):
        files.io.pwritev(files.fds[0], [b"x"], 0)
    with pytest.raises(OSError, match="No space left"):
        files.io.allocate(files.fds[0], 0, 4096)
    assert files.read(files.fds[0]) == b"sound"


def test_a_hang_holds_its_thread_until_disarmed_and_a_read_that_must_not_wait_says_so(files: Files) -> None:
    files.io.arm("hang_read", files.directory)
    got: list[bytes] = []
    thread = threading.Thread(target=lambda: got.append(files.read(files.fds[0])), daemon=True)
    thread.start()
    assert eventually(lambda: files.io.struck["hang_read"] == 1)
    with pytest.raises(BlockingIOError):
        files.read(files.fds[0], nowait=True)
    assert thread.is_alive()
    assert got == []
    files.io.disarm()
    thread.join(20)
    assert got == [b"sound"]
    assert files.read(files.fds[0]) == b"sound"


def test_a_slow_disk_answers_in_the_end(files: Files) -> None:
    files.io.arm("slow", files.directory)
    with pytest.raises(BlockingIOError):
        files.read(files.fds[0], nowait=True)
    assert files.read(files.fds[0]) == b"sound"
    assert files.io.struck["slow"] == 1
