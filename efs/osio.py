"""The only door to the operating system for data: every byte that the filesystem reads or writes goes through `Io`.

Tests replace it to fail, hang, shorten, count or record any operation. Three rules hold for every implementation:

- One method call is one numbered operation. `preadv`, `pwritev` and `pwrite` may be short, exactly as the system call;
  `read_exactly` and `write_fully` below loop.
- `index_commit` and `index_sync` are in the list because LMDB does its own system calls: passing them through the door
  gives crash tests their place in the order write → sync → commit. `path` is the directory of the index.
- `preadv(nowait=True)` answers from the page cache only: it raises BlockingIOError where it would have to wait and
  may return less than asked. It never blocks, so it may run on the event loop's thread; everything else here may
  block and belongs on a node's own threads, except at start and close.

Files are made 0600 and directories 0700, and no symbolic link is followed.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Protocol

from efs.limits import IOV_MAX

Buffer = memoryview | bytearray | bytes
NEW_SUFFIX: Final = ".new"
"""Of a file that has not got its name yet."""


class Io(Protocol):
    """Files as numbered operations. Errors are OSError, as the system reports them."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int: ...

    def close(self, fd: int) -> None: ...

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, nowait: bool = False) -> int: ...

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int: ...

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int: ...

    def fdatasync(self, fd: int) -> None: ...

    def fsync(self, fd: int) -> None: ...

    def allocate(self, fd: int, offset: int, length: int) -> None: ...

    def truncate(self, fd: int, length: int) -> None: ...

    def size(self, fd: int) -> int: ...

    def map(self, fd: int, length: int, writable: bool) -> mmap.mmap: ...

    def rename(self, source: str, target: str) -> None: ...

    def unlink(self, path: str) -> None: ...

    def mkdir(self, path: str) -> None: ...

    def listdir(self, path: str) -> list[str]: ...

    def lock(self, fd: int) -> None: ...

    def unlock(self, fd: int) -> None: ...

    def index_commit(self, path: str, commit: Callable[[], None]) -> None: ...

    def index_sync(self, path: str, sync: Callable[[], None]) -> None: ...


class SystemIo:
    """`Io` by the system calls of the same names."""

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, nowait: bool = False) -> int:
        return os.preadv(fd, buffers, offset, os.RWF_NOWAIT if nowait else 0)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return os.pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        os.fsync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        os.posix_fallocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        os.ftruncate(fd, length)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def map(self, fd: int, length: int, writable: bool) -> mmap.mmap:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        return mmap.mmap(fd, length, mmap.MAP_SHARED, protection)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        os.mkdir(path, 0o700)

    def listdir(self, path: str) -> list[str]:
        return sorted(os.listdir(path))

    def lock(self, fd: int) -> None:
        """Take an exclusive lock without waiting; BlockingIOError when another process has it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlock(self, fd: int) -> None:
        """Give a lock up. Closing alone would leave it to every child that was forked meanwhile and holds the file."""
        fcntl.flock(fd, fcntl.LOCK_UN)

    def index_commit(self, path: str, commit: Callable[[], None]) -> None:
        commit()

    def index_sync(self, path: str, sync: Callable[[], None]) -> None:
        sync()


def write_fully(io: Io, fd: int, data: memoryview, offset: int) -> None:
    """Write all of a flat byte view at an offset, through short writes; a write of zero bytes is EIO."""
    done = 0
    while done < len(data):
        wrote = io.pwrite(fd, data[done:], offset + done)
        if wrote <= 0:
            raise OSError(errno.EIO, "a write made no progress")
        done += wrote


def read_exactly(io: Io, fd: int, into: memoryview, offset: int) -> None:
    """Fill a flat byte view from an offset, through short reads; the end of the file is EIO (a truncated file)."""
    read_scattered(io, fd, [into], offset)


def read_scattered(io: Io, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Fill flat byte views, one after the other, from one contiguous range, through short reads and IOV_MAX."""
    pending = [view for view in buffers if len(view) > 0]
    position, within = 0, 0
    while position < len(pending):
        batch = pending[position : position + IOV_MAX]
        batch[0] = batch[0][within:]
        got = io.preadv(fd, batch, offset)
        if got <= 0:
            raise OSError(errno.EIO, "a read ended before the range did")
        offset += got
        within += got
        while position < len(pending) and within >= len(pending[position]):
            within -= len(pending[position])
            position += 1


def write_file(io: Io, path: str, data: bytes) -> None:
    """Write a small file in place and sync it. Interrupted, it leaves a part."""
    fd = io.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_fully(io, fd, memoryview(data), 0)
        io.fsync(fd)
    finally:
        io.close(fd)


def replace_file(io: Io, directory: str, name: str, data: bytes) -> None:
    """Write a small file whole: temporary file, sync, rename, sync of the directory.

    Until the rename the old file is untouched; a failure before it removes the temporary file, as far as that works.
    """
    path = os.path.join(directory, name)
    temporary = path + NEW_SUFFIX
    try:
        write_file(io, temporary, data)
        io.rename(temporary, path)
    except OSError:
        with suppress(OSError):
            io.unlink(temporary)
        raise
    sync_directory(io, directory)


def read_file(io: Io, path: str, most_bytes: int) -> bytes:
    """The whole of a small file; refuses one larger than `most_bytes` with EFBIG."""
    fd = io.open(path, os.O_RDONLY)
    try:
        size = io.size(fd)
        if size > most_bytes:
            raise OSError(errno.EFBIG, f"larger than {most_bytes} bytes")
        data = bytearray(size)
        read_exactly(io, fd, memoryview(data), 0)
        return bytes(data)
    finally:
        io.close(fd)


def sync_directory(io: Io, path: str) -> None:
    """Make the entries of a directory durable."""
    fd = io.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        io.fsync(fd)
    finally:
        io.close(fd)


def remove_tree(io: Io, path: str) -> None:
    """Remove a file, a link, or a directory with everything in it, following no link. OSError."""
    if os.path.isdir(path) and not os.path.islink(path):
        for name in io.listdir(path):
            remove_tree(io, os.path.join(path, name))
        os.rmdir(path)
    else:
        io.unlink(path)


def remove_empty_directory(path: str) -> None:
    """Remove a directory in which nothing is. OSError."""
    os.rmdir(path)
