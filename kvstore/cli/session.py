"""Running one piece of asynchronous work on an open store, and the chain that a command line describes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import numpy as np
import uvloop
from numpy.typing import NDArray

from efs.clusterfs import open_cluster
from efs.fs import FileSystem
from efs.groups import AnyFileSystem
from kvstore.cli.failures import UsageMistake
from kvstore.cli.tokens import Addressing
from kvstore.config import Config
from kvstore.keys import Chain
from kvstore.store import KVStore, cluster_of, store_root

Result = TypeVar("Result")


def with_store(url: str, config: Config, work: Callable[[KVStore], Awaitable[Result]]) -> Result:
    """Own the store, run `work` on it, close it. Locked names the owner's pid when there is one."""

    async def run() -> Result:
        async with await KVStore.open(url, config=config) as store:
            return await work(store)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def with_filesystem(url: str, work: Callable[[AnyFileSystem], Awaitable[Result]]) -> Result:
    """`with_store` for maintenance: the filesystem alone, which does nothing in the background. Of a cluster this is
    the process that looks after it; Locked names another one."""

    async def run() -> Result:
        cluster = cluster_of(url)
        filesystem: AnyFileSystem = (await FileSystem.open(store_root(url), maintain=False) if cluster is None
                      else await open_cluster(cluster, care="by hand"))
        try:
            return await work(filesystem)
        finally:
            await filesystem.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


async def watched(work: Awaitable[Result], reached: Callable[[], float], advance: Callable[[float], None]) -> Result:
    """The result of `work`, with a progress bar moved meanwhile."""
    running = asyncio.ensure_future(work)
    try:
        while not running.done():
            await asyncio.wait((running,), timeout=0.1)
            advance(reached())
        return running.result()
    finally:
        running.cancel()


def chain_of(store: KVStore, addressing: Addressing, tokens: NDArray[np.uint32]) -> Chain:
    """The chain of all full blocks of the tokens."""
    namespace = store.namespace(
        model=addressing.model, weights=addressing.weights, layout=addressing.layout, tenant=addressing.tenant
    )
    return namespace.chain(tokens, lora=addressing.lora, salt=addressing.salt)


def part_of(chain: Chain, first: int, count: int | None) -> Chain:
    """`count` blocks from block `first` on, to the end when None; UsageMistake when the chain does not have them."""
    if first < 0 or (count is not None and count < 0):
        raise UsageMistake("--first and --count must not be negative")
    stop = len(chain) if count is None else first + count
    if first > len(chain) or stop > len(chain):
        raise UsageMistake(f"blocks {first} to {stop} asked, the tokens make {len(chain)} full blocks")
    return chain[first:stop]


def pieces(blocks: int, block_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """[start, stop) of pieces of about `piece_bytes`; whole runs of 64 blocks where a piece is as large as that."""
    size = max(1, piece_bytes // block_bytes)
    if size > 64:
        size -= size % 64
    return [(start, min(start + size, blocks)) for start in range(0, blocks, size)]
