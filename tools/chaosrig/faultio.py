"""The owner's door to the operating system with faults behind it, armed and disarmed while it runs.

A fault concerns the files of one node directory, by path:

    hang_read    reads block in the kernel, on their operating system thread, until disarmed
    hang_write   writes do
    slow         reads and writes take DELAY_S longer
    full         writes and allocations fail with ENOSPC
    eio          reads and writes fail with EIO

A read that must not wait (`nowait`) says EAGAIN where the disk hangs or is slow, as a kernel without the page does.
Each time a fault strikes otherwise it is counted.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import Counter
from collections.abc import Sequence
from typing import Final

from efs.osio import Buffer, SystemIo

READS: Final = frozenset({"preadv"})
WRITES: Final = frozenset({"pwrite", "pwritev", "allocate"})
STRIKES: Final = {
    "hang_read": READS,
    "hang_write": WRITES - {"allocate"},
    "slow": READS | WRITES,
    "full": WRITES,
    "eio": READS | WRITES,
}
DELAY_S: Final = 0.08
ERRNO: Final = {"full": errno.ENOSPC, "eio": errno.EIO}


class ArmedFault:
    """One kind on the files below one directory."""

    def __init__(self, kind: str, directory: str) -> None:
        self.kind = kind
        self.names = STRIKES[kind]
        self.below = directory.rstrip(os.sep) + os.sep
        self._wait_on, self._release = os.pipe()
        self._mutex = threading.Lock()
        self._over = False

    def strike(self) -> None:
        """On the calling thread: block, wait, or raise OSError."""
        code = ERRNO.get(self.kind)
        if code is not None:
            raise OSError(code, os.strerror(code))
        if self.kind == "slow":
            time.sleep(DELAY_S)
        else:
            os.read(self._wait_on, 1)

    def end(self) -> None:
        """Let every blocked thread go on, and those that come later pass. The pipe's reading end stays open for
        them."""
        with self._mutex:
            if not self._over:
                self._over = True
                os.close(self._release)


class ChaosIo(SystemIo):
    """`Io` of the system with armed faults; safe on any thread."""

    def __init__(self) -> None:
        self._mutex = threading.Lock()
        self._paths: dict[int, str] = {}
        self._faults: tuple[ArmedFault, ...] = ()
        self.struck: Counter[str] = Counter()

    def arm(self, kind: str, directory: str) -> None:
        """From now on, until `disarm`."""
        self._faults = (*self._faults, ArmedFault(kind, directory))

    def disarm(self) -> None:
        """End all faults."""
        faults, self._faults = self._faults, ()
        for fault in faults:
            fault.end()

    # -- the seam

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._paths[fd] = path
        return fd

    def close(self, fd: int) -> None:
        self._paths.pop(fd, None)
        super().close(fd)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, nowait: bool = False) -> int:
        self._enter("preadv", fd, nowait)
        return super().preadv(fd, buffers, offset, nowait)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        self._enter("pwrite", fd)
        return super().pwrite(fd, data, offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        self._enter("pwritev", fd)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        self._enter("allocate", fd)
        super().allocate(fd, offset, length)

    def _enter(self, name: str, fd: int, nowait: bool = False) -> None:
        for fault in self._faults:
            if name not in fault.names or not self._paths.get(fd, "").startswith(fault.below):
                continue
            if nowait and fault.kind not in ERRNO:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            with self._mutex:
                self.struck[fault.kind] += 1
            fault.strike()
