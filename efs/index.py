"""The index of a node: which slot holds which version of which key. LMDB; rebuildable from the tables of the slab.

One environment in the directory `index/` of a node, one unnamed database, format version 1:

    key     48 bytes   block key (32) ‖ block digest (16)
    value   16 bytes   location u64 ‖ slot generation u64, little-endian

so the versions of a key are neighbours and a listing comes sorted by key, then digest. Invariants:

- The index is a hint. Tables win wherever the two disagree: an entry whose slot holds another generation is stale.
- Deletes compare: an entry goes only if its value is the one that the caller saw. A late delete cannot remove a newer
  record of the same version.
- The map never grows: `map_bytes` is the budget fixed when the node was made, and the data file never exceeds it.
- Data before index: a commit passes through `Io.index_commit`, after the caller wrote (and in power mode synced) what
  the entries speak of. Commits are not synced here (`sync=False`); `sync` does that, through `Io.index_sync`.
- One thread writes. Read transactions live inside one call, never across calls, because an open one keeps LMDB from
  reusing pages. A long scan takes a new transaction for each page of it.

*Full map.* LMDB copies every page that it changes and reuses an old copy two transactions later, so deleting needs free
pages too, and a transaction that met MapFull can only be aborted. The index therefore takes at most one entry for
every ENTRY_BYTES of its budget (IndexFull), which leaves 40 % of the pages free under churn of random keys; puts and
deletes go in one transaction, deletes of at most DELETE_BATCH, and in halves of it as often as MapFull asks for that:
each one that commits frees pages for the one after the next. A process that was killed inside a read transaction beside
the owner keeps all pages of then and since from being reused: a MapFull first has such readers forgotten, and is tried
again if there were any.

*Crash argument.* kill -9: LMDB's last committed transaction stands, its pages are in the page cache. Power loss:
without syncs the file may be anything, also wrong in ways that LMDB does not notice; the node therefore never opens an
index of before an unclean boot but rebuilds it (`efs/recovery.py`).

Files are 0600 and the directory 0700. LMDB does its own system calls, so links are looked for before it opens anything.
"""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import lmdb
import numpy as np
from numpy.typing import NDArray

from efs.errors import EfsError, OpenFailed
from efs.limits import DELETE_BATCH, DIGEST_BYTES, KEY_BYTES, PAGE_BYTES
from efs.osio import Io, sync_directory

INDEX_KEY_BYTES: Final = KEY_BYTES + DIGEST_BYTES
ENTRY_BYTES: Final = 240
"""Budget for one entry. Under churn LMDB takes 140 to 150 bytes an entry; at a budget of 145 deletes got stuck, at 190
the map was 80 % full, at 240 60 % (measured, 12 turnovers of random keys)."""
SCAN_PAGE: Final = 4096
"""Entries that a scan reads in one transaction."""
DATA_FILE: Final = "data.mdb"
LOCK_FILE: Final = "lock.mdb"

_VALUE: Final = struct.Struct("<QQ")
_Change = Callable[["lmdb.Transaction[bytes]", Sequence[tuple[bytes, bytes]]], int]


class IndexFull(EfsError):
    """No room in the map for another entry, or not even for the copies that a delete makes."""


class IndexDamaged(EfsError):
    """LMDB cannot read the index: it is lost, and has to be rebuilt from the tables."""


@dataclass(frozen=True, slots=True)
class Held:
    """One version of a key and where it lies."""

    digest: bytes
    location: int
    generation: int


@dataclass(frozen=True, slots=True)
class IndexEntry:
    """One entry as the index has it; `index_key` is key ‖ digest."""

    index_key: bytes
    location: int
    generation: int


class Index:
    """An open index. `look_up`, `page`, `scan` and `entries` may be called on any thread, the rest on one."""

    def __init__(self, env: lmdb.Environment, path: str, io: Io) -> None:
        self.most_entries = int(env.info()["map_size"]) // ENTRY_BYTES
        """Entries that the budget is good for."""
        self._env = env
        self._path = path
        self._io = io

    @classmethod
    def create(cls, io: Io, path: str, map_bytes: int) -> None:
        """Make an empty index; the directory is made when absent, and files of a lost index in it are removed. Nobody
        may have it open. The caller syncs the directory above."""
        if os.path.lexists(path):
            _refuse_links(path)
            for name in io.listdir(path):
                io.unlink(os.path.join(path, name))
        else:
            io.mkdir(path)
        index = cls._open(io, path, map_bytes)
        try:
            index.sync()
        finally:
            index.close()
        sync_directory(io, path)

    @classmethod
    def open(cls, io: Io, path: str, map_bytes: int) -> Index:
        """Open for the owner and forget readers that died. IndexDamaged when the files are lost or not an index; a
        second opening in one process is refused with OpenFailed."""
        _refuse_links(path)
        if not os.path.exists(os.path.join(path, DATA_FILE)):
            raise IndexDamaged(f"{path}: there is no {DATA_FILE}")
        return cls._open(io, path, map_bytes)

    @classmethod
    def _open(cls, io: Io, path: str, map_bytes: int) -> Index:
        try:
            env = lmdb.open(path, map_size=map_bytes, sync=False, metasync=False, writemap=False, mode=0o600,
                            create=False, max_readers=126)
        except lmdb.Error as error:
            raise _opening(path, error) from error
        return cls._checked(env, path, io)

    @classmethod
    def open_read_only(cls, io: Io, path: str) -> Index:
        """Open beside the owner, from another process, or without one."""
        _refuse_links(path)
        try:
            env = lmdb.open(path, readonly=True, create=False)
        except lmdb.Error as error:
            raise _opening(path, error) from error
        return cls._checked(env, path, io)

    @classmethod
    def _checked(cls, env: lmdb.Environment, path: str, io: Io) -> Index:
        """Refuse a file that was cut short: reading its map behind the end would end the process with SIGBUS."""
        try:
            if not env.flags()["readonly"]:
                env.reader_check()
            if env.stat()["psize"] != PAGE_BYTES:
                raise IndexDamaged(f"{path}: pages of {env.stat()['psize']} bytes, expected {PAGE_BYTES}")
            needed = (env.info()["last_pgno"] + 1) * PAGE_BYTES
            found = os.stat(os.path.join(path, DATA_FILE)).st_size
            if found < needed:
                raise IndexDamaged(f"{path}: {found} bytes, its last page ends at {needed}")
        except lmdb.Error as error:
            env.close()
            raise IndexDamaged(f"{path}: {error}") from error
        except EfsError:
            env.close()
            raise
        return cls(env, path, io)

    def close(self) -> None:
        """Close the environment. Never while another thread may be inside it."""
        self._env.close()

    # -- reading

    @property
    def entries(self) -> int:
        """Number of entries at the last commit."""
        return int(self._env.stat()["entries"])

    def look_up(self, keys: Sequence[bytes]) -> list[list[Held]]:
        """The versions of each 32-byte key, sorted by digest."""
        try:
            with self._env.begin(buffers=False) as transaction, transaction.cursor() as cursor:
                return [_versions(cursor, key) for key in keys]
        except lmdb.Error as error:
            raise IndexDamaged(f"{self._path}: {error}") from error

    def get(self, index_keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        """(location, generation) of exact entries."""
        try:
            with self._env.begin(buffers=False) as transaction:
                values = [transaction.get(key) for key in index_keys]
        except lmdb.Error as error:
            raise IndexDamaged(f"{self._path}: {error}") from error
        return [None if value is None else _unpack(self._path, value) for value in values]

    def page(self, after: bytes | None, limit: int) -> list[IndexEntry]:
        """Up to `limit` entries in order, from behind the index key `after`."""
        found: list[IndexEntry] = []
        try:
            with self._env.begin(buffers=False) as transaction, transaction.cursor() as cursor:
                more = cursor.first() if after is None else cursor.set_range(after)
                if more and after is not None and cursor.key() == after:
                    more = cursor.next()
                while more and len(found) < limit:
                    key, value = cursor.item()
                    found.append(IndexEntry(key, *_unpack(self._path, value)))
                    more = cursor.next()
        except lmdb.Error as error:
            raise IndexDamaged(f"{self._path}: {error}") from error
        return found

    def scan(self) -> Iterator[IndexEntry]:
        """All entries in order, a transaction for each SCAN_PAGE of them: changes meanwhile may or may not show."""
        after = None
        while batch := self.page(after, SCAN_PAGE):
            yield from batch
            after = batch[-1].index_key

    # -- writing: one thread only

    def put(self, index_keys: Sequence[bytes], locations: NDArray[np.int64],
            generations: NDArray[np.uint64]) -> None:
        """Write n entries, replacing what their index keys had: in one transaction, in several where the map is full.
        IndexFull when the budget is used up, or the map has no room for one more: some may then be written. OSError
        when a commit failed."""
        if not len(index_keys):
            return
        if self.entries + len(index_keys) > self.most_entries:
            raise IndexFull(f"{self._path}: the budget of {self.most_entries} index entries is used up")
        values = np.empty((len(index_keys), 2), "<u8")
        values[:, 0], values[:, 1] = locations, generations
        items = sorted(zip(index_keys, values.view("V16").reshape(-1).tolist(), strict=True))

        def insert(transaction: lmdb.Transaction[bytes], batch: Sequence[tuple[bytes, bytes]]) -> int:
            transaction.cursor().putmulti(batch)
            return len(batch)

        self._in_batches(items, len(items), insert)

    def delete(self, entries: Sequence[IndexEntry]) -> int:
        """Remove entries whose value is still the given one; returns how many were there. IndexFull when the map has no
        room to remove even one."""
        items = sorted((entry.index_key, _VALUE.pack(entry.location, entry.generation)) for entry in entries)

        def remove(transaction: lmdb.Transaction[bytes], batch: Sequence[tuple[bytes, bytes]]) -> int:
            return sum(transaction.delete(key) for key, value in batch if transaction.get(key) == value)

        return self._in_batches(items, DELETE_BATCH, remove)

    def sync(self) -> None:
        """Make all commits durable. OSError when the system cannot: the caller must not trust the index to be."""
        try:
            self._io.index_sync(self._path, lambda: self._env.sync(True))
        except lmdb.Error as error:
            raise _system_error(error) from error

    def _in_batches(self, items: Sequence[tuple[bytes, bytes]], size: int, change: _Change) -> int:
        """Change the index for all items, `size` in a transaction, fewer where the map is full. Sum of the results."""
        total = position = 0
        while position < len(items):
            batch = items[position : position + size]
            try:
                total += self._commit(batch, change)
            except IndexFull:
                if self._env.reader_check():
                    continue
                if len(batch) == 1:
                    raise
                size = len(batch) // 2
                continue
            position += len(batch)
        return total

    def _commit(self, batch: Sequence[tuple[bytes, bytes]], change: _Change) -> int:
        try:
            transaction = self._env.begin(write=True)
            try:
                result = change(transaction, batch)
                self._io.index_commit(self._path, transaction.commit)
            finally:
                transaction.abort()  # Does nothing after a commit.
        except lmdb.MapFullError as error:
            raise IndexFull(f"{self._path}: the map is full") from error
        except lmdb.Error as error:
            raise _system_error(error) from error
        return result


def _versions(cursor: lmdb.Cursor[bytes], key: bytes) -> list[Held]:
    found: list[Held] = []
    more = cursor.set_range(key)
    while more:
        index_key = cursor.key()
        if not index_key.startswith(key):
            break
        found.append(Held(index_key[KEY_BYTES:], *_unpack("index", cursor.value())))
        more = cursor.next()
    return found


def _unpack(path: str, value: bytes) -> tuple[int, int]:
    if len(value) != _VALUE.size:
        raise IndexDamaged(f"{path}: a value of {len(value)} bytes, expected {_VALUE.size}")
    location, generation = _VALUE.unpack(value)
    return location, generation


def _refuse_links(path: str) -> None:
    """Neither the directory nor a file in it may be a symbolic link: LMDB would follow it."""
    for name in (path, os.path.join(path, DATA_FILE), os.path.join(path, LOCK_FILE)):
        if os.path.islink(name):
            raise OpenFailed(name, OSError(errno.ELOOP, os.strerror(errno.ELOOP)))


def _opening(path: str, error: Any) -> EfsError:
    """What a failed opening means: a system's refusal, or a file that is not there or not an index."""
    code = getattr(error, "code", 0)
    if code > 0 and code != errno.ENOENT:
        return OpenFailed(path, OSError(code, os.strerror(code)))
    if code == 0:
        return OpenFailed(path, OSError(errno.EBUSY, str(error)))
    return IndexDamaged(f"{path}: {error}")


def _system_error(error: Any) -> Exception:
    """LMDB's error as OSError where the system raised it, else as IndexDamaged."""
    code = getattr(error, "code", 0)
    return OSError(code, os.strerror(code)) if code > 0 else IndexDamaged(str(error))
