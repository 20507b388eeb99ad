"""The store as an engine sees it: match, get_into and put on chains of keys.

`KVStore` lives on one event loop, `BlockingKVStore` (from `KVStore.blocking`) has the same verbs without await and a loop
thread of its own. Both check a call before anything is read or written: the buffer (size = keys × block bytes exactly,
contiguous, host memory, writable for get_into), the deadline, and that the store is open and in the process that opened
it. Every refusal is one line. A block that is not there is never an error: reports count it.

URLs: a path, or file:///absolute/path. A path that ends in .toml and etcd:// name clusters, which this version does not have.

A store must not be carried across a fork: the child has neither its threads nor its locks, and every call there is refused.
At interpreter exit a blocking store that is still open is closed, with a bounded wait.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any

from efs.errors import InvalidArgument, StoreClosed
from efs.fs import FileSystem, OnSegment
from efs.types import GetReport, NodeInfo, PutReport
from kvstore.config import Config
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout


class UnsupportedUrl(InvalidArgument):
    """The URL names a kind of store that this version does not open."""


class ForkedStore(StoreClosed):
    """The store was opened by another process, before a fork; open it again in this one."""


class KVStore:
    """A KV cache store on the running event loop; made by `open`, usable as an async context manager."""

    @classmethod
    async def open(cls, url: str, *, config: Config | None = None) -> KVStore:
        """Open and own a store. config: defaults when None. UnsupportedUrl, StoreNotFound, Locked, IdentityMismatch, …"""
        raise NotImplementedError

    @classmethod
    def blocking(cls, url: str, *, config: Config | None = None) -> BlockingKVStore:
        """The same store for code without an event loop."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def config(self) -> Config:
        raise NotImplementedError

    @property
    def filesystem(self) -> FileSystem:
        """The filesystem below, for maintenance commands."""
        raise NotImplementedError

    def namespace(self, *, model: str, weights: str, layout: BlockLayout, parallel: tuple[int, ...] = (0, 1), group: int = 0,
                  tenant: str | None = None) -> Namespace:
        """A namespace with the tenant's secret and generation from the store's tenants file as it is now."""
        raise NotImplementedError

    async def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int:
        """Leading blocks present, by metadata alone: a promise, which a fetch may correct. strict: until it is certain."""
        raise NotImplementedError

    async def get_into(self, chain: Chain, out: Any, *, on_segment: OnSegment | None = None,
                       deadline_ms: float | None = None) -> GetReport:
        """Fetch blocks into `out`, segment-major, len(chain) × block bytes. Bytes of blocks that are not ok are undefined.

        on_segment(i, leading_blocks) runs on the loop's thread once for each segment, in order; an exception in it
        cancels the call and comes out of it.
        """
        raise NotImplementedError

    async def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        """Store blocks from `blocks`, block-major, len(chain) × block bytes, which must not change before the return."""
        raise NotImplementedError

    async def nodes(self) -> list[NodeInfo]:
        """Identity and fill of the nodes."""
        raise NotImplementedError

    async def close(self) -> None:
        """Close the store; a second close does nothing."""
        raise NotImplementedError

    async def __aenter__(self) -> KVStore:
        raise NotImplementedError

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        raise NotImplementedError


class BlockingKVStore:
    """A KVStore behind plain calls, safe to use from several threads; made by `KVStore.blocking`."""

    @property
    def url(self) -> str:
        raise NotImplementedError

    @property
    def config(self) -> Config:
        raise NotImplementedError

    def namespace(self, *, model: str, weights: str, layout: BlockLayout, parallel: tuple[int, ...] = (0, 1), group: int = 0,
                  tenant: str | None = None) -> Namespace:
        raise NotImplementedError

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int:
        raise NotImplementedError

    def get_into(self, chain: Chain, out: Any, *, on_segment: OnSegment | None = None,
                 deadline_ms: float | None = None) -> GetReport:
        raise NotImplementedError

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        raise NotImplementedError

    def nodes(self) -> list[NodeInfo]:
        raise NotImplementedError

    def close(self) -> None:
        """Close the store and end its thread; a second close does nothing."""
        raise NotImplementedError

    def __enter__(self) -> BlockingKVStore:
        raise NotImplementedError

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        raise NotImplementedError
