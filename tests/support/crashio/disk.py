"""A disk in memory: files by inode, names, directories. What was not synced can be left out of it, piece by piece.

The model promises less than file systems do: bytes of a file are durable once it was synced, an entry of a directory
once the directory was; neither order nor anything else connects them before. A rename is atomic. A file that was never
named in a durable directory is gone.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from efs.index import LOCK_FILE
from tests.support.crashio.log import OF_BYTES, SYNCS, Kind, Op


@dataclass(slots=True)
class Disk:
    """Contents of a directory tree. Paths are relative, "" is the root, which is always there."""

    files: dict[int, bytearray] = field(default_factory=dict)
    names: dict[str, int] = field(default_factory=dict)
    directories: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, root: str) -> Disk:
        """What lies below a real directory, without locks of indexes."""
        disk = cls()
        for place, directories, names in os.walk(root):
            below = os.path.relpath(place, root)
            prefix = "" if below == os.curdir else below
            disk.directories.update(os.path.join(prefix, name) for name in directories)
            for name in sorted(names):
                if name != LOCK_FILE:
                    inode = len(disk.files) + 1
                    disk.files[inode] = bytearray((Path(place) / name).read_bytes())
                    disk.names[os.path.join(prefix, name)] = inode
        return disk

    def copy(self) -> Disk:
        return Disk({inode: bytearray(data) for inode, data in self.files.items()}, dict(self.names),
                    set(self.directories))

    def fork(self) -> Disk:
        """A copy whose files are those of this one, for changes that replace the files that they touch."""
        return Disk(dict(self.files), dict(self.names), set(self.directories))

    def content(self, name: str) -> bytes:
        return bytes(self.files[self.names[name]])

    def apply(self, op: Op) -> None:
        """Let an operation happen. One that needs what is not there (any more) makes it or does nothing."""
        if op.kind in OF_BYTES:
            self._change_bytes(self.files.setdefault(op.inode, bytearray()), op)
        elif op.kind is Kind.CREATE:
            self.files.setdefault(op.inode, bytearray())
            self.names[op.path] = op.inode
        elif op.kind is Kind.RENAME:
            self.names.pop(op.path, None)
            self.files.setdefault(op.inode, bytearray())
            self.names[op.target] = op.inode
        elif op.kind is Kind.UNLINK:
            self.names.pop(op.path, None)
        elif op.kind is Kind.MKDIR:
            self.directories.add(op.path)

    def _change_bytes(self, file: bytearray, op: Op) -> None:
        if op.kind is Kind.TRUNCATE and len(file) > op.offset:
            del file[op.offset :]
        end = op.offset + len(op.data)
        if len(file) < end:
            file.extend(bytes(end - len(file)))
        if op.kind is Kind.WRITE:
            file[op.offset : end] = op.data

    def with_ops(self, ops: Iterable[Op]) -> Disk:
        """A copy after some operations; this one stays as it is."""
        ops = list(ops)
        disk = self.fork()
        for inode in {op.inode for op in ops if op.kind in OF_BYTES}:
            disk.files[inode] = bytearray(disk.files.get(inode, b""))
        for op in ops:
            disk.apply(op)
        return disk

    def put_down(self, root: str) -> None:
        """Make it real in a directory that does not exist."""
        os.mkdir(root, 0o700)
        kept = {""}
        for name in sorted(self.directories):
            if os.path.dirname(name) in kept:
                os.mkdir(os.path.join(root, name), 0o700)
                kept.add(name)
        for name, inode in self.names.items():
            if os.path.dirname(name) in kept:
                fd = os.open(os.path.join(root, name), os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
                os.write(fd, self.files[inode])
                os.close(fd)


@dataclass(slots=True)
class History:
    """A disk while a log happens to it. live: as a process sees it. durable: what is certain to outlive the power.
    pending: what happened since, in order. position: operations of the log that have happened."""

    live: Disk
    durable: Disk
    ops: list[Op]
    pending: list[Op] = field(default_factory=list)
    position: int = 0

    @classmethod
    def begin(cls, before: Disk, ops: list[Op]) -> History:
        """From a disk of which everything is durable."""
        return cls(before.copy(), before.copy(), ops)

    def step(self) -> None:
        """Let the next operation happen."""
        op = self.ops[self.position]
        self.position += 1
        if op.kind not in SYNCS:
            self.live.apply(op)
            self.pending.append(op)
            return
        left = []
        for earlier in self.pending:
            if _covers(op, earlier):
                self.durable.apply(earlier)
            else:
                left.append(earlier)
        self.pending = left


def _covers(sync: Op, op: Op) -> bool:
    if op.kind in OF_BYTES:
        return sync.kind is Kind.SYNC and sync.inode == op.inode
    return sync.kind is Kind.SYNC_DIRECTORY and sync.path == op.directory


def part_of(op: Op, start: int, stop: int) -> Op:
    """The part of a write that lies in [start, stop) of its file."""
    first, last = max(start - op.offset, 0), max(stop - op.offset, 0)
    return replace(op, offset=op.offset + first, data=op.data[first:last])


def borders_in(op: Op, sector_bytes: int) -> list[int]:
    """Positions in the file at which a write can be cut between sectors."""
    first = (op.offset // sector_bytes + 1) * sector_bytes
    return list(range(first, op.offset + len(op.data), sector_bytes))


def sectors_of(op: Op, sector_bytes: int) -> list[Op]:
    """A write in pieces that end on sector borders."""
    cuts = [op.offset, *borders_in(op, sector_bytes), op.offset + len(op.data)]
    return [part_of(op, start, stop) for start, stop in pairwise(cuts)]
