"""The description of a cluster for commands that change it, a cluster.toml or a map in etcd: read, and written anew.

What is written is refused when what was read is not what stands there any more, so that of two commands at once one
does what it says and the other nothing.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import uvloop

from efs.clusterfile import ClusterConfig, read_cluster
from efs.clustermap import ETCD_SCHEME, ClusterMap, EtcdUrl, parse_etcd_url
from efs.etcd import EtcdStore, HeldMap
from efs.handshake import Tokens, read_token
from efs.osio import Io

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class Description:
    """What was read, and where. held: the map, if it is in etcd."""

    where: str
    config: ClusterConfig
    held: HeldMap | None = None

    @property
    def root(self) -> str:
        """The directory in which the cluster's store.toml is, on a machine that has it."""
        return self.held.map.root if self.held is not None else os.path.dirname(os.path.abspath(self.where))


def run_alone(work: Awaitable[Result]) -> Result:
    """Run something to its end on a loop of its own."""

    async def run() -> Result:
        return await work

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def with_etcd(url: EtcdUrl, work: Callable[[EtcdStore], Awaitable[Result]]) -> Result:
    """Run `work` with a connection to etcd."""

    async def run() -> Result:
        store = EtcdStore(url)
        try:
            return await work(store)
        finally:
            await store.close()

    return run_alone(run())


def described(io: Io, where: str) -> Description:
    """The description that stands at a path or an etcd:// URL."""
    if not where.startswith(ETCD_SCHEME):
        return Description(where, read_cluster(io, where))
    held = with_etcd(parse_etcd_url(where), lambda store: store.read())
    return Description(where, held.map.config(), held)


def rewritten(description: Description, in_file: Callable[[str, ClusterConfig], ClusterConfig],
              in_map: Callable[[ClusterMap], ClusterMap]) -> ClusterConfig:
    """What stands there after a change: `in_file` writes it to the file, `in_map` makes the next map. InvalidArgument
    when somebody else was faster; then nothing was written."""
    held = description.held
    if held is None:
        return in_file(description.where, description.config)
    changed = in_map(held.map)
    with_etcd(parse_etcd_url(description.where), lambda store: store.change(held, changed))
    return changed.config()


def tokens_of(io: Io, config: ClusterConfig) -> Tokens:
    """What an operator shows servers. OpenFailed and InvalidArgument name the file."""
    data, operator = (None if path is None else read_token(io, path)
                      for path in (config.token_file, config.operator_token_file))
    return Tokens(data, operator)
