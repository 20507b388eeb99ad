"""The client: one erasure-coded filesystem over the twelve nodes of a store directory, embedded in this process.

Store root: `store.toml` (format version, cluster id, capacity, durability, extent bytes, node paths), `tenants.toml`
(0600), `lock` (flock; holds the owner's pid), `counters`. Node directories: `nodes/00` … `nodes/11` below the root or
twelve paths of the operator's choice.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from efs.clock import Clock
from efs.osio import Io
from efs.shape import BlockShape
from efs.types import GetReport, NodeInfo, PutItem, PutReport

__all__ = ["FileSystem", "OnSegment", "PutItem"]

OnSegment = Callable[[int, int], None]


class FileSystem:
    """Get, put and match by key. Knows nothing of tokens or models."""

    @classmethod
    def init(cls, root: str, capacity_bytes: int, *, node_paths: Sequence[str] | None = None, durability: str = "process",
             extent_bytes: int | None = None, io: Io | None = None, clock: Clock | None = None) -> list[str]:
        """Make a store; returns warnings (such as: all nodes share one device). StoreExists for a place that is not empty."""
        raise NotImplementedError

    @classmethod
    async def open(cls, root: str, *, io: Io | None = None, clock: Clock | None = None, mapped: bool = False) -> FileSystem:
        """Own the store and its node directories. An absent node directory is a degraded node, never made anew.

        mapped: read slabs through memory maps (a failing disk then ends the process with SIGBUS) instead of preadv.
        """
        raise NotImplementedError

    async def get_into(self, keys: Sequence[bytes], shape: BlockShape, out: Any, *, on_segment: OnSegment | None = None,
                       deadline_ms: float) -> GetReport:
        """Fetch blocks into a segment-major buffer of len(keys) · block_bytes."""
        raise NotImplementedError

    async def put(self, items: Sequence[PutItem], shape: BlockShape, blocks: Any, *, deadline_ms: float) -> PutReport:
        """Store blocks from a block-major buffer."""
        raise NotImplementedError

    async def match(self, keys: Sequence[bytes], *, strict: bool = False, deadline_ms: float) -> int:
        """How many leading keys are present, by metadata alone."""
        raise NotImplementedError

    async def nodes(self) -> list[NodeInfo]:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError
