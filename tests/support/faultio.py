"""An `Io` that can fail, shorten, hang, kill and record, operation by operation.

Every call is one operation with a number, counted from 1 in the order of entry. A test arms faults and then says
`verify()`: a fault that did not happen as often as asked fails the test.

A hang is real: the calling operating system thread blocks in read(2) on a pipe, below the seam, without the interpreter
lock, until `release`. A kill is real as well: SIGKILL to the own process at an operation, optionally after a prefix of
the write was done (a torn write).
"""

from __future__ import annotations

import errno
import mmap
import os
import signal
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from efs.osio import Buffer, Io, SystemIo

READS = ("preadv",)
WRITES = ("pwrite", "pwritev")
SYNCS = ("fdatasync", "fsync", "index_sync")


@dataclass(frozen=True, slots=True)
class Operation:
    """One call as it entered. `data` is kept only when the recorder was asked to keep it."""

    number: int
    name: str
    path: str
    offset: int = 0
    size: int = 0
    nowait: bool = False
    data: bytes | None = None
    target: str = ""


@dataclass(slots=True)
class Fault:
    """Something armed. It applies to operations of one of `names` whose path contains `path`, after the first `skip`
    of them and `times` times (None: until `disarm`). Which kind it is, the fields after `times` say."""

    names: tuple[str, ...]
    path: str
    skip: int
    times: int | None
    error: int | None = None
    most_bytes: int | None = None
    gate: Gate | None = None
    count: int = field(default=0)
    armed: bool = field(default=True)

    def disarm(self) -> None:
        self.armed = False

    def wants(self, operation: Operation) -> bool:
        if not self._matches(operation) or (self.times is not None and self.count >= self.times):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        return True

    def holds_back(self, operation: Operation) -> bool:
        """Whether a read that must not wait meets a file that hangs."""
        return self.gate is not None and not self.gate.released and self._matches(operation)

    def happen(self) -> None:
        """Fail or hang, on the calling thread."""
        if self.error is not None:
            raise OSError(self.error, os.strerror(self.error))
        if self.gate is not None:
            self.gate.wait()

    def _matches(self, operation: Operation) -> bool:
        return self.armed and operation.name in self.names and self.path in operation.path


class Gate:
    """Where hung threads wait. `entered` is set once a thread is stuck."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()
        self.entered = threading.Event()

    @property
    def released(self) -> bool:
        return self._write < 0

    def wait(self) -> None:
        """Block the calling thread in the kernel until `release`."""
        self.entered.set()
        os.read(self._read, 1)

    def release(self) -> None:
        """Let all threads go on; whoever comes later does not wait."""
        if self._write >= 0:
            os.close(self._write)
            self._write = -1


class FaultIo:
    """`Io` around another one (the system's by default). Safe to call on any thread."""

    def __init__(self, inner: Io | None = None, keep_data: bool = False) -> None:
        self._inner = inner or SystemIo()
        self._keep_data = keep_data
        self._mutex = threading.Lock()
        self._paths: dict[int, str] = {}
        self._faults: list[Fault] = []
        self._kill_at: int | None = None
        self._kill_after_bytes = 0
        self.log: list[Operation] = []

    # -- arming

    def fail(self, names: str | tuple[str, ...], error: int, *, path: str = "", skip: int = 0,
             times: int | None = 1) -> Fault:
        """Make operations fail with an errno, before they do anything."""
        return self._arm(Fault(_names(names), path, skip, times, error=error))

    def fail_after(self, names: str | tuple[str, ...], done_bytes: int, error: int, *, path: str = "", skip: int = 0,
                   times: int | None = 1) -> Fault:
        """Make a write fail with an errno after a prefix of `done_bytes` reached the file."""
        return self._arm(Fault(_names(names), path, skip, times, error=error, most_bytes=done_bytes))

    def shorten(self, names: str | tuple[str, ...], most_bytes: int, *, path: str = "", skip: int = 0,
                times: int | None = None) -> Fault:
        """Make reads or writes move at most `most_bytes` a call."""
        return self._arm(Fault(_names(names), path, skip, times, most_bytes=most_bytes))

    def hang(self, names: str | tuple[str, ...], *, path: str = "", skip: int = 0, times: int | None = 1) -> Gate:
        """Make the calling thread hang in the kernel, then do the operation. A `nowait` read of the path meanwhile
        raises BlockingIOError, as a kernel without the page would. The gate's `entered` shows that it happened."""
        gate = Gate()
        self._arm(Fault(_names(names), path, skip, times, gate=gate))
        return gate

    def kill_at(self, number: int, after_bytes: int = 0) -> None:
        """SIGKILL this process when operation `number` is entered; a write first does a prefix of `after_bytes`."""
        self._kill_at = number
        self._kill_after_bytes = after_bytes

    # -- asking

    @property
    def operations(self) -> int:
        """Operations entered so far."""
        return len(self.log)

    def injected(self) -> int:
        """How often any armed fault happened."""
        return sum(fault.count for fault in self._faults)

    def verify(self) -> None:
        """AssertionError for each fault that did not happen, or not as often as asked."""
        for fault in self._faults:
            wanted = 1 if fault.times is None else fault.times
            assert fault.count >= wanted, f"{fault.names} of {fault.path!r}: {fault.count} faults, wanted {wanted}"

    def clear(self) -> None:
        """`verify`, then forget all faults."""
        self.verify()
        self._faults.clear()

    def names(self, path: str = "", since: int = 0) -> list[str]:
        """Names of the logged operations on paths that contain `path`, after operation number `since`."""
        return [entry.name for entry in self.log if entry.number > since and path in entry.path]

    @property
    def open_files(self) -> int:
        """Descriptors opened through this Io and not closed."""
        return len(self._paths)

    # -- the seam

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        self._enter("open", path)
        fd = self._inner.open(path, flags, mode)
        with self._mutex:
            self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        """A close that fails has closed the file all the same, as close(2) does."""
        try:
            self._enter("close", self._path(fd))
        finally:
            with self._mutex:
                self._paths.pop(fd, None)
            self._inner.close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, nowait: bool = False) -> int:
        size = sum(len(view) for view in buffers)
        fault = self._enter("preadv", self._path(fd), offset, size, nowait)
        if fault is not None and fault.most_bytes is not None:
            buffers = _cut(buffers, fault.most_bytes)
        return self._inner.preadv(fd, buffers, offset, nowait)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return self._write("pwrite", fd, [data], offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        return self._write("pwritev", fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        self._enter("fdatasync", self._path(fd))
        self._inner.fdatasync(fd)

    def fsync(self, fd: int) -> None:
        self._enter("fsync", self._path(fd))
        self._inner.fsync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._enter("allocate", self._path(fd), offset, length)
        self._inner.allocate(fd, offset, length)

    def truncate(self, fd: int, length: int) -> None:
        self._enter("truncate", self._path(fd), length)
        self._inner.truncate(fd, length)

    def size(self, fd: int) -> int:
        self._enter("size", self._path(fd))
        return self._inner.size(fd)

    def map(self, fd: int, length: int, writable: bool) -> mmap.mmap:
        self._enter("map", self._path(fd), 0, length)
        return self._inner.map(fd, length, writable)

    def rename(self, source: str, target: str) -> None:
        self._enter("rename", source, target=target)
        self._inner.rename(source, target)

    def unlink(self, path: str) -> None:
        self._enter("unlink", path)
        self._inner.unlink(path)

    def mkdir(self, path: str) -> None:
        self._enter("mkdir", path)
        self._inner.mkdir(path)

    def listdir(self, path: str) -> list[str]:
        self._enter("listdir", path)
        return self._inner.listdir(path)

    def lock(self, fd: int) -> None:
        self._enter("lock", self._path(fd))
        self._inner.lock(fd)

    def unlock(self, fd: int) -> None:
        self._enter("unlock", self._path(fd))
        self._inner.unlock(fd)

    def index_commit(self, path: str, commit: Callable[[], None]) -> None:
        self._enter("index_commit", path)
        self._inner.index_commit(path, commit)

    def index_sync(self, path: str, sync: Callable[[], None]) -> None:
        self._enter("index_sync", path)
        self._inner.index_sync(path, sync)

    # -- inside

    def _arm(self, fault: Fault) -> Fault:
        with self._mutex:
            self._faults.append(fault)
        return fault

    def _path(self, fd: int) -> str:
        return self._paths.get(fd, f"fd {fd}")

    def _write(self, name: str, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        data = b"".join(views) if self._keep_data else None
        number, fault = self._note(name, self._path(fd), offset, sum(len(view) for view in views), data=data)
        if number == self._kill_at:
            if self._kill_after_bytes:
                self._inner.pwritev(fd, _cut(views, self._kill_after_bytes), offset)
            _kill()
        if fault is None:
            return self._inner.pwritev(fd, views, offset)
        if fault.most_bytes is None:
            fault.happen()
            return self._inner.pwritev(fd, views, offset)
        done = self._inner.pwritev(fd, _cut(views, fault.most_bytes), offset) if fault.most_bytes else 0
        if fault.error is not None:
            raise OSError(fault.error, os.strerror(fault.error))
        return done

    def _enter(self, name: str, path: str, offset: int = 0, size: int = 0, nowait: bool = False,
               target: str = "") -> Fault | None:
        """What every operation but a write does first. Returns a fault that shortens, after all others happened."""
        number, fault = self._note(name, path, offset, size, nowait, target=target)
        if number == self._kill_at:
            _kill()
        if fault is None or (fault.most_bytes is not None and fault.error is None):
            return fault
        fault.happen()
        return None

    def _note(self, name: str, path: str, offset: int, size: int, nowait: bool = False, *, data: bytes | None = None,
              target: str = "") -> tuple[int, Fault | None]:
        """Number and log an operation and find the first armed fault that wants it, which is then counted."""
        with self._mutex:
            operation = Operation(len(self.log) + 1, name, path, offset, size, nowait, data, target)
            self.log.append(operation)
            for fault in self._faults:
                if nowait and fault.holds_back(operation):
                    raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
                if fault.wants(operation):
                    fault.count += 1
                    return operation.number, fault
            return operation.number, None


def _names(names: str | tuple[str, ...]) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _cut(views: Sequence[memoryview], most_bytes: int) -> list[memoryview]:
    """The first `most_bytes` of a sequence of views."""
    kept: list[memoryview] = []
    for view in views:
        if most_bytes <= 0:
            break
        kept.append(view[:most_bytes])
        most_bytes -= len(view)
    return kept


def _kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    threading.Event().wait()  # The signal may take a moment; nothing more happens on this thread.
