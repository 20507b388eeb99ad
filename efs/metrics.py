"""Named counters that another process can read while they count: a small mapped file of uint64.

File: 8 bytes magic b"EFSCNT01", then one little-endian uint64 for each name of `COUNTERS`, in order. New names are appended
only. One file per node directory (`counters`), one per store root for what the client sees. `snapshot` needs no lock: a
counter is one aligned word.
"""

from __future__ import annotations

COUNTERS: tuple[str, ...] = (
    # reads, as the client sees them
    "get_calls", "get_blocks", "get_bytes", "get_missed_blocks", "get_deadline",
    "rebuilt_blocks", "hedged_shards", "corrupt_shards", "missing_shards", "raced_shards", "late_shards",
    "mixed_versions", "match_calls", "match_blocks",
    # writes, as the client sees them
    "put_calls", "put_acked", "put_already", "put_failed", "put_at_risk", "put_deadline", "put_refused",
    # a node's own
    "node_put_records", "node_put_known", "node_evicted", "node_dropped", "node_full", "node_io_errors", "node_read_only",
    "node_suspect", "node_torn_entries", "node_index_mismatch", "node_index_rebuilt", "node_unverified_checked",
    "node_verify_failed", "node_mended", "staged_reads", "node_queue_refused",
)


class CounterFile:
    """Counters in a mapped file; `add` in the owner, `snapshot` anywhere."""

    @classmethod
    def in_memory(cls) -> CounterFile:
        """Counters without a file, for tests and for clients without a directory."""
        raise NotImplementedError

    @classmethod
    def open(cls, path: str, writable: bool) -> CounterFile:
        """Map the file, creating it (0600) when writable and absent. OpenFailed names the path."""
        raise NotImplementedError

    def add(self, name: str, count: int = 1) -> None:
        raise NotImplementedError

    def get(self, name: str) -> int:
        raise NotImplementedError

    def snapshot(self) -> dict[str, int]:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError
