"""A whole store as it lies on disk, read-only, beside its owner or without one: twelve `NodeView`s, or why there are
fewer.

A node that cannot be viewed is a `problem`, a finding with a stable name; the others are used without it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from efs.cluster import StoreConfig, absent_because, check_node_id, read_store_config
from efs.errors import CorruptRecord, EfsError, FormatUnsupported, IdentityMismatch, OpenFailed
from efs.findings import Finding, Kind
from efs.index import IndexDamaged, IndexEntry
from efs.indexprobe import unreadable_indexes
from efs.limits import DIGEST_BYTES, KEY_BYTES, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, LOCK_FILE, NodePlace, index_path, slab_path, written_pid
from efs.nodeview import NodeView
from efs.osio import Io, SystemIo

PAGE_ENTRIES: Final = 1024
"""Index entries of each node that a merge holds. More than the versions of one key, so every page crosses a key."""
LOOKS_FOR_A_LOCK: Final = 8
LOCKS_FILE: Final = "/proc/locks"


class StoreView:
    """The nodes of a store that can be read (`views`, by index), and what is wrong with the others (`problems`)."""

    def __init__(
        self, io: Io, root: str, config: StoreConfig, views: Sequence[NodeView], problems: Sequence[Finding]
    ) -> None:
        self.root = root
        self.config = config
        self.views = list(views)
        self.problems = list(problems)
        self._lost: list[NodeView] = []
        self._io = io

    @classmethod
    @contextmanager
    def open(cls, root: str, io: Io | None = None, *, probe: bool = False) -> Iterator[StoreView]:
        """StoreNotFound, FormatUnsupported or CorruptRecord when the store's own files cannot be read.

        probe: have every index read by another process first (`efs/indexprobe.py`).
        """
        io = io or SystemIo()
        config = read_store_config(io, root)
        views: list[NodeView] = []
        problems: list[Finding] = []
        unreadable = unreadable_indexes([index_path(path) for path in config.node_paths]) if probe else {}
        try:
            for index, path in enumerate(config.node_paths):
                found = _view(
                    io, path, config.place(index), config.node_ids[index], unreadable.get(index)
                )
                if isinstance(found, NodeView):
                    views.append(found)
                else:
                    problems.append(found)
            yield cls(io, root, config, views, problems)
        finally:
            for view in views:
                view.close()

    @property
    def node_capacity(self) -> int:
        """Bytes that each node may occupy."""
        return self.config.capacity_bytes // STRIPE_SHARDS

    def owner(self) -> int | None:
        """Process id of the running owner, None when there is none."""
        return lock_holder(self._io, self.root)

    def next_entries(self, after: bytes | None, limit: int = PAGE_ENTRIES) -> dict[int, list[IndexEntry]]:
        """The index entries of all nodes behind a key, merged up to one common key: for every key that shows, all its
        versions on all nodes, at most `limit` entries of a node. Continue behind the last key; empty at the end.

        A node whose index turns out to be damaged is left out from here on (`lose`).
        """
        start = None if after is None else after + b"\xff" * DIGEST_BYTES
        pages: dict[int, list[IndexEntry]] = {}
        for view in tuple(self.views):
            try:
                pages[view.node_index] = view.page(start, limit)
            except IndexDamaged as error:
                self.lose(view, error)
        borders = [page[-1].index_key[:KEY_BYTES] for page in pages.values() if len(page) == limit]
        border = min(borders, default=None)
        found = {
            index: [entry for entry in page if border is None or entry.index_key[:KEY_BYTES] < border]
            for index, page in pages.items()
        }
        return found if any(found.values()) else {}

    def entries_of(self, keys: Sequence[bytes]) -> dict[int, list[IndexEntry]]:
        """All index entries of some keys, now. Damaged indexes as in `next_entries`."""
        found: dict[int, list[IndexEntry]] = {}
        for view in tuple(self.views):
            try:
                found[view.node_index] = view.versions(keys)
            except IndexDamaged as error:
                self.lose(view, error)
        return found

    def lose(self, view: NodeView, error: IndexDamaged) -> None:
        """An index that could be opened cannot be read: the node is a problem, and no view any more."""
        self.views.remove(view)
        self._lost.append(view)
        self.problems.append(Finding(Kind.INDEX_LOST, view.node_index, detail=str(error)))

    def counters(self) -> dict[str, int]:
        """The client's counters now; all zero when there is no file of them."""
        try:
            file = CounterFile.open(os.path.join(self.root, COUNTERS_FILE), writable=False, io=self._io)
        except EfsError:
            return CounterFile.in_memory().snapshot()
        try:
            return file.snapshot()
        finally:
            file.close()


def last_key(entries: Mapping[int, Sequence[IndexEntry]]) -> bytes:
    """The greatest key of some merged entries."""
    return max(page[-1].index_key[:KEY_BYTES] for page in entries.values() if page)


def _view(io: Io, path: str, place: NodePlace, node_id: str, unreadable: str | None) -> NodeView | Finding:
    """The node at its place, or what is wrong with it. unreadable: what is known already of its index."""
    index = place.node_index
    why = absent_because(path)
    if why is not None:
        return Finding(Kind.NODE_ABSENT, index, detail=why)
    try:
        check_node_id(io, path, node_id)
        if unreadable is not None and os.path.lexists(slab_path(path)):
            return Finding(Kind.INDEX_LOST, index, detail=unreadable)
        return NodeView.open(io, path, place)
    except (IdentityMismatch, FormatUnsupported) as error:
        return Finding(Kind.WRONG_IDENTITY, index, detail=str(error))
    except IndexDamaged as error:
        return Finding(Kind.INDEX_LOST, index, detail=str(error))
    except (OpenFailed, CorruptRecord) as error:
        lost = not os.path.lexists(slab_path(path))
        return Finding(Kind.SLAB_LOST if lost else Kind.NODE_UNREADABLE, index, detail=str(error))


def lock_holder(io: Io, directory: str) -> int | None:
    """Process id of whoever holds the lock of a directory, found without touching the lock: trying to take it, even
    shared and for a moment, could refuse an owner that starts just then.

    The kernel shows its list of locks a page at a time, and while others come and go one may slip from a page that is
    still to come to one that was read. So a lock that is not in the list is looked for again while the process that
    wrote its id lives.
    """
    try:
        found = os.stat(os.path.join(directory, LOCK_FILE))
    except OSError:
        return None
    written = written_pid(io, directory)
    for _ in range(LOOKS_FOR_A_LOCK):
        holder = _listed_holder(found, written)
        if holder is not None or written is None or not os.path.exists(f"/proc/{written}"):
            return holder
    return None


def _listed_holder(lock: os.stat_result, written: int | None) -> int | None:
    try:
        lines = Path(LOCKS_FILE).read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    device = f"{os.major(lock.st_dev):02x}:{os.minor(lock.st_dev):02x}"
    for line in lines:
        fields = line.split()
        # Some file systems show another device here than stat does; there the process id must be the written one.
        if (
            len(fields) >= 6
            and fields[1] == "FLOCK"
            and fields[3] == "WRITE"
            and fields[5].endswith(f":{lock.st_ino}")
        ):
            pid = int(fields[4])
            if fields[5] == f"{device}:{lock.st_ino}" or pid == written:
                return pid if pid > 0 else written
    return None
