"""Named counters that another process can read while they count: a small mapped file of uint64.

File: 8 bytes magic b"EFSCNT01", then one little-endian uint64 for each name of `COUNTERS`, in order. New names are
appended only. One file per node directory (`counters`), one per store root for what the client sees. `snapshot` needs
no lock: a counter is one aligned word.

A counter goes up only. One thread adds (the event loop's); any number of threads and processes read. A file that is
shorter than this program's list is of an older program: its owner lengthens it, a reader takes what is missing for
zero. What is beyond the list is of a newer program and left alone.

Counters are best effort: power loss may set them back or empty them, and damage to them is not worth a node. So a file
that does not begin like one of counters starts at zero; one that does, with another version behind it, is of another
program and refused. Its blocks are allocated before it is mapped, because a store into a hole of a full disk ends the
process.

After `close` counting goes on in memory: a thread that was abandoned may still finish.
"""

from __future__ import annotations

import mmap
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

from efs.errors import FormatUnsupported, InvalidArgument, OpenFailed
from efs.osio import Io, SystemIo, read_exactly, write_fully

if TYPE_CHECKING:
    from prometheus_client import Metric

FAMILY: Final = b"EFSCNT"
MAGIC: Final = FAMILY + b"01"
WORD_BYTES: Final = 8

COUNTERS: tuple[str, ...] = (
    # reads, as the client sees them
    "get_calls", "get_blocks", "get_bytes", "get_missed_blocks", "get_deadline",
    "rebuilt_blocks", "hedged_shards", "corrupt_shards", "missing_shards", "raced_shards", "late_shards",
    "mixed_versions", "match_calls", "match_blocks",
    # writes, as the client sees them
    "put_calls", "put_acked", "put_already", "put_failed", "put_at_risk", "put_deadline", "put_refused",
    # a node's own
    "node_put_records", "node_put_known", "node_evicted", "node_dropped", "node_full", "node_io_errors",
    "node_read_only", "node_suspect", "node_torn_entries", "node_index_mismatch", "node_index_rebuilt",
    "node_unverified_checked", "node_verify_failed", "node_mended", "staged_reads", "node_queue_refused",
    # the store, as its owner sees it: nodes left out at an opening
    "nodes_degraded",
    # a node's collections of space: how many, the latest stamp of anything it evicted, records refused as too cold
    "node_collections", "node_evicted_stamp", "node_too_cold",
    # sweeps of the store
    "sweep_runs", "sweep_records", "sweep_hollow", "sweep_losing", "sweep_purged", "sweep_dropped", "sweep_spared",
    # repair and scrub of the store
    "repair_runs", "repair_records", "repair_found", "repair_rebuilt", "repair_cold", "repair_corrupt",
    "repair_misplaced", "repair_failed", "scrub_runs", "scrub_records", "scrub_bytes", "scrub_dropped", "scrub_failed",
    "nodes_synced",
    # tenants: records that a node refused as purged; purges, records that they dropped; blocks that a quota refused
    "node_put_purged", "purge_runs", "purge_dropped", "put_over_quota",
    # a node's server: clients let in, connections lost or closed for what came over them
    "wire_sessions", "wire_lost",
    # nodes at servers, as a client sees them: connections made, connections lost, answers that nobody waited for
    "remote_connected", "remote_lost", "remote_late",
    # changes of a cluster's map that a client went along with: places with another node or another address
    "places_changed",
    # what a node's server sent of slots that readers asked for
    "wire_reads", "wire_read_bytes",
    # blocks that a fetch looked for at an earlier owner, because the present one had none of them
    "previous_owner_blocks",
    # blocks that fetches delivered from there, to be moved to the present owner: how many were queued, had no room, are
    # there now, are not
    "move_queued", "move_dropped", "move_done", "move_failed",
)
NODE_COUNTERS: Final = tuple(name for name in COUNTERS if name != "node_mended"
                             and (name.startswith(("node_", "wire_")) or name == "staged_reads"))
"""Those that a node's own file counts; all others are counted by clients."""

FILE_BYTES: Final = len(MAGIC) + WORD_BYTES * len(COUNTERS)
_PLACES: Final[Mapping[str, int]] = {name: place for place, name in enumerate(COUNTERS)}


class CounterFile:
    """Counters in a mapped file; `add` in the owner, `snapshot` anywhere."""

    def __init__(self, mapping: mmap.mmap | None) -> None:
        """Over a mapped file (shorter when it is of an older program) or over memory. Use the class methods."""
        self._mapping = mapping
        self._view = memoryview(mapping if mapping is not None else bytearray(FILE_BYTES))
        length = min(len(self._view), FILE_BYTES) // WORD_BYTES * WORD_BYTES
        self._words = self._view[len(MAGIC) : max(length, len(MAGIC))].cast("Q")

    @classmethod
    def in_memory(cls) -> CounterFile:
        """Counters without a file, for tests and for clients without a directory."""
        return cls(None)

    @classmethod
    def open(cls, path: str, writable: bool, io: Io | None = None) -> CounterFile:
        """Map the file, creating it (0600) when writable and absent. OpenFailed names the path; FormatUnsupported when
        the file is something else. Read-only counters of a file that is not finished yet are all zero."""
        io = io if io is not None else SystemIo()
        if sys.byteorder != "little":
            raise FormatUnsupported(path, "little-endian", f"the {sys.byteorder}-endian one of this machine")
        try:
            fd = io.open(path, os.O_RDWR | os.O_CREAT if writable else os.O_RDONLY)
        except OSError as error:
            raise OpenFailed(path, error) from error
        try:
            return cls(_map_counters(io, fd, path, writable))
        except OSError as error:
            raise OpenFailed(path, error) from error
        finally:
            io.close(fd)

    def add(self, name: str, count: int = 1) -> None:
        """Count up; an unknown name or a negative count is InvalidArgument, a read-only file TypeError."""
        if count < 0:
            raise InvalidArgument(f"counter {name} cannot go down by {-count}")
        place = _place_of(name)
        self._words[place] = self._words[place] + count

    def raise_to(self, name: str, value: int) -> None:
        """For counters that are the highest of something: never down."""
        self.add(name, max(0, value - self.get(name)))

    def get(self, name: str) -> int:
        place = _place_of(name)
        return self._words[place] if place < len(self._words) else 0

    def snapshot(self) -> dict[str, int]:
        """All counters by name."""
        return {name: self.get(name) for name in COUNTERS}

    def nonzero(self, names: Sequence[str]) -> dict[str, int]:
        """Those of some counters that have counted anything."""
        return {name: count for name in names if (count := self.get(name))}

    def close(self) -> None:
        """Unmap the file. What is read or counted from here on is a private copy. A second call does nothing."""
        if self._mapping is not None:
            copy = bytearray(FILE_BYTES)
            copy[len(MAGIC) : len(MAGIC) + WORD_BYTES * len(self._words)] = self._words.tobytes()
            self._words.release()
            self._view.release()
            self._mapping.close()
            self._mapping = None
            self._view = memoryview(copy)
            self._words = self._view[len(MAGIC) :].cast("Q")


def _place_of(name: str) -> int:
    place = _PLACES.get(name)
    if place is None:
        raise InvalidArgument(f"there is no counter {name!r}")
    return place


def _map_counters(io: Io, fd: int, path: str, writable: bool) -> mmap.mmap | None:
    """The mapped file, made whole when writable; None for one that has no counters yet."""
    size = io.size(fd)
    head = bytearray(min(size, len(MAGIC)))
    read_exactly(io, fd, memoryview(head), 0)
    finished = bytes(head) == MAGIC
    if not finished and len(head) == len(MAGIC) and head.startswith(FAMILY) and head[len(FAMILY) :].isdigit():
        raise FormatUnsupported(path, bytes(head), MAGIC)
    if writable:
        if not finished:
            io.truncate(fd, 0)
        io.allocate(fd, 0, FILE_BYTES)
        write_fully(io, fd, memoryview(MAGIC), 0)
        return io.map(fd, max(size if finished else 0, FILE_BYTES), True)
    if not finished:
        return None
    return io.map(fd, size, False)


class CounterCollector:
    """Counters for prometheus-client: register it with a registry of your own (`registry.register(collector)`).

    sources: the values of `labels`, with a function that gives the counters of that moment, usually
    `CounterFile.snapshot`. names: which counters. Each becomes `<prefix>_<name>_total`.
    """

    def __init__(self, sources: Mapping[tuple[str, ...], Callable[[], Mapping[str, int]]], prefix: str = "efs", *,
                 labels: Sequence[str] = ("part",), names: Sequence[str] = COUNTERS) -> None:
        self._sources = dict(sources)
        self._prefix = prefix
        self._labels = tuple(labels)
        self._names = tuple(names)

    def collect(self) -> Iterable[Metric]:
        # Importing prometheus_client takes 80 ms and fills its global registry: only who exports pays for that.
        from prometheus_client.core import CounterMetricFamily

        snapshots = {values: snapshot() for values, snapshot in self._sources.items()}
        for name in self._names:
            family = CounterMetricFamily(
                f"{self._prefix}_{name}", f"{name.replace('_', ' ')} since the store was made", labels=self._labels
            )
            for values, counters in snapshots.items():
                family.add_metric(values, counters.get(name, 0))
            yield family
