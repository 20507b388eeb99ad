"""The operation log: an `Io` that passes everything through and writes down what it did to files and directories.

Paths in the log are relative to the root that is recorded; what lies outside is passed through and not logged. A file
is known by an inode number, so that its bytes follow it through a rename. Each operation is done and logged under one
lock: the log is in the order in which things happened, whatever the number of threads.

*The index.* LMDB writes its file itself. At `index_commit` and `index_sync` the data file is compared with what it was
at the last of them, and each page that differs is logged as a write of its own, the two meta pages last, which is the
order in which LMDB writes. So a prefix of the log may end between the pages of a commit and its meta page, where the
commit before it still stands. Its lock file is never part of a state: what a killed process leaves in it is tested
with real processes.

*Maps.* Stores into a mapped file leave no trace here. Whoever checks a state may put anything there.
"""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from efs.index import DATA_FILE, LOCK_FILE
from efs.limits import PAGE_BYTES
from efs.osio import Buffer, SystemIo

META_PAGES = 2


class Kind(StrEnum):
    """What an operation changes: bytes of a file, the entries of a directory, or what of both is durable."""

    WRITE = "write"
    TRUNCATE = "truncate"
    EXTEND = "extend"
    """Allocation: the file is at least so long."""
    CREATE = "create"
    RENAME = "rename"
    UNLINK = "unlink"
    MKDIR = "mkdir"
    SYNC = "sync"
    SYNC_DIRECTORY = "sync directory"


OF_BYTES = frozenset({Kind.WRITE, Kind.TRUNCATE, Kind.EXTEND})
OF_NAMES = frozenset({Kind.CREATE, Kind.RENAME, Kind.UNLINK, Kind.MKDIR})
SYNCS = frozenset({Kind.SYNC, Kind.SYNC_DIRECTORY})


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. inode: of the file, -1 for directories. offset: of a write, or the length of the other changes of
    bytes. target: the new name of a rename. cuttable: whether a killed process can leave a part of this write."""

    kind: Kind
    path: str
    inode: int = -1
    offset: int = 0
    data: bytes = b""
    target: str = ""
    cuttable: bool = True

    @property
    def directory(self) -> str:
        """The directory whose entries an operation on names changes."""
        return os.path.dirname(self.path)

    def __str__(self) -> str:
        extent = f" {self.offset}+{len(self.data)}" if self.kind in OF_BYTES else ""
        return f"{self.kind} {self.path}{extent}{f' to {self.target}' if self.target else ''}"


class Recorder(SystemIo):
    """`Io` of the system, with a log of what happens below `root`. inodes: of the files that are there already."""

    def __init__(self, root: str, inodes: dict[str, int] | None = None) -> None:
        self.root = root
        self.ops: list[Op] = []
        self._lock = threading.RLock()
        self._inodes = dict(inodes or {})
        self._next_inode = max(self._inodes.values(), default=0) + 1
        self._files: dict[int, tuple[str, int]] = {}
        self._pages: dict[int, list[bytes]] = {}
        for path, inode in self._inodes.items():
            if os.path.basename(path) == DATA_FILE:
                self._pages[inode] = self._read_pages(path)

    @property
    def position(self) -> int:
        """Operations logged so far."""
        with self._lock:
            return len(self.ops)

    # -- the seam

    def open(self, path: str, flags: int, mode: int = 0o600) -> int:
        with self._lock:
            name = self._name(path)
            fd = super().open(path, flags, mode)
            if name is None or flags & os.O_DIRECTORY:
                self._files[fd] = (path if name is None else name, -1)
                return fd
            if flags & os.O_CREAT and name not in self._inodes:
                self._log(Op(Kind.CREATE, name, self._new_inode(name)))
            elif flags & os.O_TRUNC:
                self._log(Op(Kind.TRUNCATE, name, self._inodes[name]))
            self._files[fd] = (name, self._inodes[name])
            return fd

    def close(self, fd: int) -> None:
        with self._lock:
            self._files.pop(fd, None)
            super().close(fd)

    def pwrite(self, fd: int, data: Buffer, offset: int) -> int:
        return self.pwritev(fd, [data], offset)

    def pwritev(self, fd: int, buffers: Sequence[Buffer], offset: int) -> int:
        with self._lock:
            wrote = super().pwritev(fd, buffers, offset)
            path, inode = self._files[fd]
            if inode >= 0:
                self._log(Op(Kind.WRITE, path, inode, offset, b"".join(buffers)[:wrote]))
            return wrote

    def fdatasync(self, fd: int) -> None:
        with self._lock:
            super().fdatasync(fd)
            self._log_sync(fd)

    def fsync(self, fd: int) -> None:
        with self._lock:
            super().fsync(fd)
            self._log_sync(fd)

    def allocate(self, fd: int, offset: int, length: int) -> None:
        with self._lock:
            super().allocate(fd, offset, length)
            path, inode = self._files[fd]
            self._log(Op(Kind.EXTEND, path, inode, offset + length))

    def truncate(self, fd: int, length: int) -> None:
        with self._lock:
            super().truncate(fd, length)
            path, inode = self._files[fd]
            self._log(Op(Kind.TRUNCATE, path, inode, length))

    def map(self, fd: int, length: int, writable: bool) -> mmap.mmap:
        with self._lock:
            return super().map(fd, length, writable)

    def rename(self, source: str, target: str) -> None:
        with self._lock:
            super().rename(source, target)
            name, new = self._name(source), self._name(target)
            assert name is not None, "only what is recorded is renamed"
            assert new is not None, "only what is recorded is renamed"
            assert os.path.dirname(name) == os.path.dirname(new), "the model knows renames within a directory"
            self._inodes[new] = self._inodes.pop(name)
            self._log(Op(Kind.RENAME, name, self._inodes[new], target=new))

    def unlink(self, path: str) -> None:
        with self._lock:
            super().unlink(path)
            name = self._name(path)
            inode = self._inodes.pop(name, None) if name is not None else None
            if name is not None and inode is not None:
                self._log(Op(Kind.UNLINK, name, inode))

    def mkdir(self, path: str) -> None:
        with self._lock:
            super().mkdir(path)
            name = self._name(path)
            if name is not None:
                self._log(Op(Kind.MKDIR, name))

    def index_commit(self, path: str, commit: Callable[[], None]) -> None:
        with self._lock:
            super().index_commit(path, commit)
            self._log_pages(path)

    def index_sync(self, path: str, sync: Callable[[], None]) -> None:
        with self._lock:
            super().index_sync(path, sync)
            name = self._log_pages(path)
            self._log(Op(Kind.SYNC, name, self._inodes[name]))

    # -- inside

    def _log(self, op: Op) -> None:
        self.ops.append(op)

    def _log_sync(self, fd: int) -> None:
        path, inode = self._files[fd]
        if inode >= 0:
            self._log(Op(Kind.SYNC, path, inode))
        elif not os.path.isabs(path):
            self._log(Op(Kind.SYNC_DIRECTORY, path))

    def _log_pages(self, path: str) -> str:
        """Log what LMDB wrote since its file was last looked at; returns the file's name."""
        name = self._name(os.path.join(path, DATA_FILE))
        assert name is not None, f"the index in {path} is not recorded"
        if name not in self._inodes:
            self._log(Op(Kind.CREATE, name, self._new_inode(name)))
        inode = self._inodes[name]
        before, now = self._pages.get(inode, []), self._read_pages(name)
        changed = [number for number, page in enumerate(now) if number >= len(before) or before[number] != page]
        changed.sort(key=lambda number: (number < META_PAGES, number))
        for number in changed:
            self._log(Op(Kind.WRITE, name, inode, number * PAGE_BYTES, now[number], cuttable=False))
        self._pages[inode] = now
        return name

    def _read_pages(self, name: str) -> list[bytes]:
        with open(os.path.join(self.root, name), "rb") as file:
            data = file.read()
        return [data[start : start + PAGE_BYTES] for start in range(0, len(data), PAGE_BYTES)]

    def _new_inode(self, name: str) -> int:
        inode, self._next_inode = self._next_inode, self._next_inode + 1
        self._inodes[name] = inode
        return inode

    def _name(self, path: str) -> str | None:
        """The path below the root; None for what is not recorded."""
        name = os.path.relpath(path, self.root)
        outside = name.startswith(os.pardir) or os.path.basename(name) == LOCK_FILE
        return None if outside else "" if name == os.curdir else name
