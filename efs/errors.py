"""What can go wrong in the filesystem, and what the caller should do about it.

One small tree. Every class carries the exit code that a command line should use and says whether the same
call may succeed later. A miss is never an error: it is a value in a report.
"""

from __future__ import annotations

from typing import ClassVar


class EfsError(Exception):
    """Base of every error that this package raises on purpose; `str(error)` is one line for a person."""

    exit_code: ClassVar[int] = 8
    retryable: ClassVar[bool] = False


class InvalidArgument(EfsError, ValueError):
    """The caller's argument is wrong: a size, a type, a limit. Correct the call."""

    exit_code = 2


class StoreNotFound(EfsError):
    """There is no store at this path. Check the path or run `kvstore init`."""

    exit_code = 2

    def __init__(self, path: object, why: str = "no store.toml in it") -> None:
        super().__init__(f"no store at {path}: {why}")


class StoreExists(EfsError):
    """`init` was asked to write into a place that already holds something."""

    exit_code = 2

    def __init__(self, path: object) -> None:
        super().__init__(f"{path} is not an empty directory; nothing was changed")


class Locked(EfsError):
    """Another process owns the directory. Stop it, or use a read-only command."""

    retryable = True

    def __init__(self, path: object, pid: int | None) -> None:
        self.pid = pid
        holder = f"process {pid}" if pid is not None else "an unknown process"
        super().__init__(f"{path} is owned by {holder}")


class IdentityMismatch(EfsError):
    """A directory is not the node that the store expects there: moved, swapped, cloned, or of another store."""

    def __init__(self, path: object, field: str, found: object, expected: object) -> None:
        super().__init__(f"{path}: {field} is {found}, expected {expected}")


class FormatUnsupported(EfsError):
    """The data on disk is of a format version that this program does not read."""

    def __init__(self, path: object, found: object, expected: object) -> None:
        super().__init__(f"{path}: format version {found}, this program reads {expected}")


class CorruptRecord(EfsError):
    """A record header, table entry or extent header fails its checks. Never passed on as data."""


class CodecError(EfsError):
    """Shards that cannot be encoded or rebuilt: wrong index, count, length or type."""


class NodeUnavailable(EfsError):
    """A node cannot serve now: its directory is absent, its disk fails, or its queue is full. Use other nodes. A
    negative index is that of a spare, which has no place."""

    retryable = True

    def __init__(self, node_index: int, why: str) -> None:
        self.node_index = node_index
        super().__init__(f"{f'node {node_index}' if node_index >= 0 else 'the spare'} is unavailable: {why}")


class NodeReadOnly(NodeUnavailable):
    """A node whose fsync failed: it serves reads and refuses writes until it is checked and restarted."""


class NodeFull(EfsError):
    """A node has no space for the record even after eviction."""

    retryable = True

    def __init__(self, node_index: int, why: str) -> None:
        self.node_index = node_index
        super().__init__(f"node {node_index} is full: {why}")


class OutdatedMap(EfsError):
    """A write by an older map of the cluster than the node knows of. Read the map again, and write by that."""

    retryable = True

    def __init__(self, node_index: int, why: str) -> None:
        self.node_index = node_index
        super().__init__(f"node {node_index} refuses a write: {why}")


class PlaceNotGiven(EfsError):
    """A spare is asked for as a node whose place it has not been given, or not yet. Tried again by itself."""

    retryable = True


class StoreClosed(EfsError):
    """The store was closed; open it again."""


class OpenFailed(EfsError):
    """A file or directory could not be opened at start; the message names the path and the reason."""

    def __init__(self, path: object, error: OSError) -> None:
        super().__init__(f"{path}: {error.strerror or error}")


class EtcdUnavailable(EfsError):
    """The etcd that has a cluster's map cannot be reached or does not answer. Stores that are open go on without it."""

    retryable = True

    def __init__(self, server: object, why: str) -> None:
        super().__init__(f"etcd at {server}: {why}")


class WireError(EfsError):
    """The other side of a connection does not keep to the protocol. The connection is closed."""


class HandshakeFailed(EfsError):
    """A server and its client do not accept each other: wrong token, or a role that was not given."""
