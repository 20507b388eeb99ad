"""What `kvstore top` shows: counters and fill of a store at one moment, and what changed from one moment to the next.

Counters only go up, so a rate is a difference by the time between. A counter that went down is of a node that was made
anew: that rate is unknown, as all are in a first reading.

A store's own directory is read as files, beside its owner. A cluster is asked through its servers, as a client that
looks after nothing; what clients count (reads, rebuilt blocks, hedges) is then that of the process which looks after
the store, from the file in the cluster's root, and unknown where there is no such file on this machine: other engines
keep theirs in memory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from efs.clusterfs import open_cluster
from efs.errors import EfsError
from efs.groups import GroupedFileSystem
from efs.health import NodeState
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE
from efs.storeview import StoreView
from kvstore.cli.status_cmd import Census, node_rows

Counts = Mapping[str, int]


@dataclass(frozen=True, slots=True)
class NodeReading:
    """used_bytes: live slots of a node at a server, else what the directory occupies. Sizes and records are None where
    the node cannot be asked."""

    node: int
    state: str
    used_bytes: int | None
    capacity_bytes: int | None
    records: int | None
    counters: Counts


@dataclass(frozen=True, slots=True)
class Reading:
    """at_s: any clock that only goes on. client: None where unknown."""

    at_s: float
    nodes: Sequence[NodeReading]
    client: Counts | None


@dataclass(frozen=True, slots=True)
class NodeChange:
    """A node, and what it did a second. None: unknown."""

    now: NodeReading
    fill: float | None
    puts_per_s: float | None
    evicted_per_s: float | None
    reads_per_s: float | None
    read_bytes_per_s: float | None
    io_errors: int


CLIENT_RATES = {"read_blocks": "get_blocks", "missed_blocks": "get_missed_blocks", "put_blocks": "put_acked",
                "rebuilt": "rebuilt_blocks", "corrupt": "corrupt_shards", "hedged": "hedged_shards"}
"""What is shown of clients, by the counters that count it."""


def rate(before: Counts | None, now: Counts | None, name: str, seconds: float) -> float | None:
    if before is None or now is None or seconds <= 0:
        return None
    change = now.get(name, 0) - before.get(name, 0)
    return change / seconds if change >= 0 else None


def _share(part: int | None, whole: int | None) -> float | None:
    return part / whole if part is not None and whole else None


def node_changes(before: Reading | None, now: Reading) -> list[NodeChange]:
    earlier = {node.node: node.counters for node in before.nodes if node.capacity_bytes} if before is not None else {}
    seconds = now.at_s - before.at_s if before is not None else 0.0
    changes = []
    for node in now.nodes:
        old, new = earlier.get(node.node), node.counters if node.capacity_bytes else None
        served = node.counters.get("wire_sessions", 0) > 0
        changes.append(NodeChange(
            node, _share(node.used_bytes, node.capacity_bytes),
            rate(old, new, "node_put_records", seconds), rate(old, new, "node_evicted", seconds),
            rate(old, new, "wire_reads", seconds) if served else None,
            rate(old, new, "wire_read_bytes", seconds) if served else None, node.counters.get("node_io_errors", 0)))
    return changes


def client_changes(before: Reading | None, now: Reading) -> dict[str, tuple[int, float | None]] | None:
    """For each of CLIENT_RATES what was counted in all, and a second; None where clients are unknown."""
    if now.client is None:
        return None
    seconds = now.at_s - before.at_s if before is not None else 0.0
    return {shown: (now.client.get(name, 0), rate(before.client if before else None, now.client, name, seconds))
            for shown, name in CLIENT_RATES.items()}


class Source(Protocol):
    """Where readings come from."""

    async def read(self, at_s: float) -> Reading: ...

    async def close(self) -> None: ...


class DirectorySource:
    """The files of a store's own directory."""

    def __init__(self, root: str) -> None:
        self._root = root

    async def read(self, at_s: float) -> Reading:
        with StoreView.open(self._root) as view:
            counted = {node.node_index: {name: count for name, count in node.counters().items() if count}
                       for node in view.views}
            nodes = [NodeReading(row.node, row.state, row.disk_bytes,
                                 row.capacity_bytes if row.node in counted else None, row.records,
                                 counted.get(row.node, {}))
                     for row in node_rows(view, Census())]
            return Reading(at_s, nodes, view.counters())

    async def close(self) -> None:
        """Nothing is open between readings."""


class ClusterSource:
    """The servers of a cluster. Made with `open`."""

    def __init__(self, filesystem: GroupedFileSystem, counters_path: str) -> None:
        self._filesystem = filesystem
        self._counters_path = counters_path

    @classmethod
    async def open(cls, where: str) -> ClusterSource:
        """Errors as `efs.clusterfs.open_cluster`; servers that do not answer are no error."""
        filesystem = await open_cluster(where, care="none")
        assert filesystem.root is not None
        return cls(filesystem, os.path.join(filesystem.root, COUNTERS_FILE))

    async def read(self, at_s: float) -> Reading:
        nodes = []
        for info in await self._filesystem.nodes():
            known = info.capacity_bytes > 0
            nodes.append(NodeReading(
                info.node_index, info.state, info.live_bytes if known else None,
                info.capacity_bytes if known else None, info.records if known else None, info.counters))
        return Reading(at_s, nodes, self._client())

    def _client(self) -> Counts | None:
        try:
            file = CounterFile.open(self._counters_path, writable=False)
        except EfsError:
            return None
        try:
            return file.snapshot()
        finally:
            file.close()

    async def close(self) -> None:
        await self._filesystem.close()


def serving(reading: Reading) -> int:
    return sum(node.state == NodeState.SERVING for node in reading.nodes)
