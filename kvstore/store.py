"""The store as an engine sees it: match, get_into and put on chains of keys.

`KVStore` lives on one event loop, `BlockingKVStore` (from `KVStore.blocking`) has the same verbs without await and a
loop thread of its own. Both check a call before anything is read or written: the buffer (size = keys × block bytes
exactly, contiguous, host memory, writable for get_into), the deadline, and that the store is open and in the process
that opened it. Every refusal is one line. A block that is not there is never an error: reports count it.

URLs: a path, or file:///absolute/path: of a store's directory, which this process then owns, or of a cluster.toml (any
path that ends in .toml) or etcd://HOST:PORT/NAME, a cluster's map in etcd. The nodes of these two are at servers, and
any number of processes may have them open.

A store must not be carried across a fork: the child has neither its threads nor its locks, and every call there is
refused. At interpreter exit a blocking store that is still open is closed, with a bounded wait.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from types import TracebackType
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from efs.clusterfs import open_cluster
from efs.clustermap import ETCD_SCHEME, parse_etcd_url
from efs.errors import InvalidArgument, StoreClosed
from efs.fs import FileSystem, OnSegment
from efs.groups import AnyFileSystem
from efs.limits import MAX_DEADLINE_MS
from efs.types import GetReport, NodeInfo, PutItem, PutReport
from kvstore.buffers import flat_bytes
from kvstore.config import Config
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout
from kvstore.loopthread import LoopThread
from kvstore.tenancy import apply_quotas
from kvstore.tenants import find_tenant

CLOSE_WAIT_S: Final = 10.0
"""Most that closing a blocking store waits for the filesystem, whose own waits are shorter."""
EXIT_CLOSE_WAIT_S: Final = 0.6
EXIT_STOP_WAIT_S: Final = 0.1
"""The same at interpreter exit, for the filesystem and then for the thread."""

# A process must end within a second while a disk hangs.
assert EXIT_CLOSE_WAIT_S + EXIT_STOP_WAIT_S < 1.0


class UnsupportedUrl(InvalidArgument):
    """The URL names a kind of store that this version does not open."""


class ForkedStore(StoreClosed):
    """The store was opened by another process, before a fork; open it again in this one."""


def store_root(url: str | os.PathLike[str]) -> str:
    """The directory that a store URL names. UnsupportedUrl, also for the URL of a cluster; InvalidArgument for an empty
    or malformed one."""
    if cluster_of(url) is not None:
        raise UnsupportedUrl(f"{os.fspath(url)}: this works on a store's own directory, not on a cluster")
    return _path_of(url)


def cluster_of(url: str | os.PathLike[str]) -> str | None:
    """The cluster.toml or the etcd:// URL that a store URL names; None when it names a directory. Errors as
    `store_root`."""
    if isinstance(url, str) and url.startswith(ETCD_SCHEME):
        return str(parse_etcd_url(url))
    path = _path_of(url)
    return path if path.endswith(".toml") and not os.path.isdir(path) else None


def _path_of(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url)
    if not isinstance(text, str) or not text or "\0" in text:
        raise InvalidArgument(f"the store URL is {text!r}, must be a path or file:// URL")
    scheme, colon, rest = text.partition(":")
    if not colon or "/" in scheme or not (rest.startswith("//") or scheme == "file"):
        root = text
    elif scheme != "file":
        raise UnsupportedUrl(f"{text}: unknown scheme {scheme!r}; give a path, a file:// or an etcd:// URL")
    else:
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/") or parts.query or parts.fragment:
            raise InvalidArgument(f"{text}: a file URL must be file:// and an absolute path, such as file:///var/lib/kvstore")
        root = unquote(parts.path)
    return root


class KVStore:
    """A KV cache store on the running event loop; made by `open`, usable as an async context manager."""

    def __init__(self, filesystem: AnyFileSystem, root: str, *, config: Config | None = None) -> None:
        """For `open`, and for tests with a filesystem of their own; must run on the loop that will use the store."""
        self._filesystem = filesystem
        self._root = root
        self._config = config or Config()
        self._pid = os.getpid()
        self._loop = asyncio.get_running_loop()
        self._closing: asyncio.Task[None] | None = None

    @classmethod
    async def open(cls, url: str | os.PathLike[str], *, config: Config | None = None) -> KVStore:
        """Open a store: own its directory, or connect to a cluster. config: defaults when None. UnsupportedUrl,
        StoreNotFound, Locked, IdentityMismatch, …"""
        config = config or Config()
        cluster = cluster_of(url)
        filesystem: AnyFileSystem = (
            await open_cluster(cluster, mapped=config.mapped, scrub=config.scrub) if cluster is not None
            else await FileSystem.open(store_root(url), mapped=config.mapped, scrub=config.scrub))
        root = filesystem.root if cluster is not None and filesystem.root is not None else store_root(url)
        try:
            apply_quotas(filesystem, root)
        except BaseException:
            await filesystem.close()
            raise
        return cls(filesystem, root, config=config)

    @classmethod
    def blocking(cls, url: str | os.PathLike[str], *, config: Config | None = None) -> BlockingKVStore:
        """The same store for code without an event loop."""
        return BlockingKVStore(url, config=config)

    @property
    def root(self) -> str:
        """The store's directory, that of its cluster.toml, or the one that its map in etcd names."""
        return self._root

    @property
    def config(self) -> Config:
        """The settings in effect."""
        return self._config

    @property
    def filesystem(self) -> AnyFileSystem:
        """The filesystem below, for maintenance commands."""
        return self._filesystem

    def namespace(self, *, model: str, weights: str, layout: BlockLayout, parallel: tuple[int, ...] = (0, 1),
                  group: int = 0, tenant: str | None = None) -> Namespace:
        """A namespace with the tenant's secret and generation from the store's tenants file as it is now."""
        if tenant is None:
            return Namespace(model, weights, layout, parallel, group)
        known = find_tenant(self._root, tenant)
        return Namespace(model, weights, layout, parallel, group, known.name, known.generation, known.secret)

    async def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int:
        """Leading blocks present, by metadata alone: a promise, which a fetch may correct. strict: until it is
        certain."""
        self._check(chain)
        deadline_ms = _deadline(deadline_ms, self._config.match_deadline_ms)
        if not chain:
            return 0
        return await self._filesystem.match(chain.keys, strict=strict, deadline_ms=deadline_ms)

    async def get_into(self, chain: Chain, out: Any, *, on_segment: OnSegment | None = None,
                       deadline_ms: float | None = None) -> GetReport:
        """Fetch blocks into `out`, segment-major, len(chain) × block bytes. Bytes of blocks that are not ok are
        undefined.

        on_segment(i, leading_blocks) runs on the loop's thread once for each segment, in order; an exception in it
        cancels the call and comes out of it.
        """
        self._check(chain)
        deadline_ms = _deadline(deadline_ms, self._config.get_deadline_ms)
        target = flat_bytes(out, "out", writable=True, size=len(chain) * chain.layout.block_bytes)
        if not chain:
            return GetReport(blocks=0, ok=(), rebuilt=0, hedged=0, corrupt=0, missing=0, raced=0, bytes=0, seconds=0.0)
        return await self._filesystem.get_into(chain.keys, chain.layout.shape, target.data, on_segment=on_segment,
                                               deadline_ms=deadline_ms)

    async def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        """Store blocks from `blocks`, block-major, len(chain) × block bytes, which must not change before the
        return."""
        self._check(chain)
        deadline_ms = _deadline(deadline_ms, self._config.put_deadline_ms)
        source = flat_bytes(blocks, "blocks", size=len(chain) * chain.layout.block_bytes)
        if not chain:
            return PutReport(acked=0, already=0, failed=0, at_risk=0)
        tag = chain.namespace.tenant_tag
        items = [PutItem(key, depth, tag) for key, depth in zip(chain.keys, chain.depths, strict=True)]
        return await self._filesystem.put(items, chain.layout.shape, source.data, deadline_ms=deadline_ms)

    async def nodes(self) -> list[NodeInfo]:
        """Identity and fill of the nodes."""
        self._check_usable()
        return await self._filesystem.nodes()

    async def close(self) -> None:
        """Close the store; a second close waits for the first one. In a forked child it does nothing."""
        if os.getpid() != self._pid:
            return
        if self._closing is None:
            self._closing = asyncio.ensure_future(self._filesystem.close())
        await asyncio.shield(self._closing)

    async def __aenter__(self) -> KVStore:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None,
                        trace: TracebackType | None) -> None:
        await self.close()

    def _check(self, chain: Chain) -> None:
        if not isinstance(chain, Chain):
            raise InvalidArgument(f"chain is of type {type(chain).__name__}, must be a Chain of a namespace")
        self._check_usable()

    def _check_usable(self) -> None:
        _check_process(self._pid)
        if self._closing is not None:
            raise StoreClosed("the store is closed")
        if asyncio.get_running_loop() is not self._loop:
            raise InvalidArgument("the store belongs to another event loop; open one here, or use KVStore.blocking")


class BlockingKVStore:
    """A KVStore behind plain calls, safe to use from several threads; made by `KVStore.blocking`."""

    def __init__(self, url: str | os.PathLike[str], *, config: Config | None = None) -> None:
        cluster_of(url)
        self._thread = LoopThread("kvstore")
        try:
            self._store = self._thread.call(KVStore.open(url, config=config))
        except BaseException:
            self._thread.stop(CLOSE_WAIT_S)
            raise
        # Runs when the object is gone and at interpreter exit, whichever is first; so it must not refer to self.
        self._finalizer = weakref.finalize(self, _close, self._store, self._thread, EXIT_CLOSE_WAIT_S, EXIT_STOP_WAIT_S)

    @property
    def root(self) -> str:
        """The store's directory."""
        return self._store.root

    @property
    def config(self) -> Config:
        """The settings in effect."""
        return self._store.config

    def namespace(self, *, model: str, weights: str, layout: BlockLayout, parallel: tuple[int, ...] = (0, 1),
                  group: int = 0, tenant: str | None = None) -> Namespace:
        """`KVStore.namespace`."""
        return self._store.namespace(model=model, weights=weights, layout=layout, parallel=parallel, group=group,
                                     tenant=tenant)

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int:
        """`KVStore.match`."""
        _check_process(self._thread.pid)
        return self._thread.call(self._store.match(chain, strict=strict, deadline_ms=deadline_ms))

    def get_into(self, chain: Chain, out: Any, *, on_segment: OnSegment | None = None,
                 deadline_ms: float | None = None) -> GetReport:
        """`KVStore.get_into`; on_segment runs on the store's thread, not on the caller's."""
        _check_process(self._thread.pid)
        return self._thread.call(self._store.get_into(chain, out, on_segment=on_segment, deadline_ms=deadline_ms))

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        """`KVStore.put`."""
        _check_process(self._thread.pid)
        return self._thread.call(self._store.put(chain, blocks, deadline_ms=deadline_ms))

    def nodes(self) -> list[NodeInfo]:
        """`KVStore.nodes`."""
        _check_process(self._thread.pid)
        return self._thread.call(self._store.nodes())

    def close(self) -> None:
        """Close the store and end its thread; a second close, and one in a forked child, does nothing."""
        if self._finalizer.detach() is not None:
            _close(self._store, self._thread, CLOSE_WAIT_S, CLOSE_WAIT_S)

    def __enter__(self) -> BlockingKVStore:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()


def _close(store: KVStore, thread: LoopThread, close_wait_s: float, stop_wait_s: float) -> None:
    """Close a blocking store within these waits; what still hangs then is left to its daemon threads."""
    if os.getpid() != thread.pid:
        return
    if thread.is_current():
        # The last reference went in a callback, or the collector ran there.
        thread.stop_after(store.close())
        return
    try:
        thread.call(store.close(), close_wait_s)
    except TimeoutError:
        pass
    finally:
        thread.stop(stop_wait_s)


def _check_process(pid: int) -> None:
    if os.getpid() != pid:
        raise ForkedStore(f"this store was opened by process {pid}, before a fork; open it again in {os.getpid()}")


def _deadline(given_ms: float | None, default_ms: float) -> float:
    deadline_ms = default_ms if given_ms is None else given_ms
    if not isinstance(deadline_ms, (int, float)) or not 0 < deadline_ms <= MAX_DEADLINE_MS:
        raise InvalidArgument(f"deadline_ms is {deadline_ms!r}, must be above 0 and at most {MAX_DEADLINE_MS}")
    return deadline_ms
