"""A process that serves node directories: opens them, listens, and ends when it is told to.

A directory that is a spare (`efs/sparedir.py`) is owned and served as one until it is given a place; from then on it is
a node like the others, without a restart.

It owns its directories as an embedding process does, with the same locks. Nothing listens before every node is open,
and has dropped what was purged: a node keeps no note of that itself, so where its directory is below a store's root
(ROOT/nodes/NN) the tombstones of the root are buried first (`efs/purge.py`).
At the end no request is taken any more, those under way are answered, the nodes sync and mark themselves clean. The
status page (`efs/statuspage.py`), when there is one, says all that time that the server is draining.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from efs.background import Background
from efs.clock import Clock, Deadline
from efs.cluster import STORE_FILE, Durability
from efs.clustermap import EtcdUrl
from efs.endpoint import Endpoint
from efs.errors import InvalidArgument, NodeUnavailable
from efs.etcd import Registration
from efs.exposition import NodeSample, ServerSample
from efs.handshake import Tokens
from efs.iothread import IoThread, pass_on
from efs.limits import INFO_DEADLINE_MS
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import COUNTERS_FILE, NodePlace, OwnerLock, read_config
from efs.osio import Io
from efs.purge import buried
from efs.servedspare import ServedSpare
from efs.server import NodeServer, require_token
from efs.session import Served, ServedNode
from efs.sparedir import is_spare, read_spare, settle
from efs.statuspage import StatusPage
from efs.tombstones import read_tombstones
from efs.types import NodeInfo

_LOG: Final = logging.getLogger(__name__)

Ready = Callable[[Sequence[Served], Sequence[Endpoint], Endpoint | None], None]


@dataclass(slots=True)
class _Process:
    """What is open so far."""

    io: Io
    clock: Clock
    durability: Durability
    mapped: bool
    served: list[Served] = field(default_factory=list)
    """In the order of the directories; a spare is replaced by the node that it becomes."""
    nodes: dict[str, DirectoryNode] = field(default_factory=dict)
    """By id."""
    locks: dict[str, OwnerLock] = field(default_factory=dict)
    """Of spares, by id; a node has its own."""
    counters: list[CounterFile] = field(default_factory=list)
    server: NodeServer | None = None

    async def look(self) -> ServerSample:
        """A spare is no node: there is nothing to measure about it."""
        assert self.server is not None
        samples = [await self._sample(self.server, self.nodes[served.node_id], served)
                   for served in self.served if isinstance(served, ServedNode)]
        return ServerSample(samples, self.server.draining)

    async def _sample(self, server: NodeServer, node: DirectoryNode, served: ServedNode) -> NodeSample:
        try:
            info = await node.info(Deadline.after_ms(self.clock, INFO_DEADLINE_MS))
        except NodeUnavailable:
            info = NodeInfo(node.node_index, served.node_id, "closed", node.config.plan.capacity_bytes, 0, 0, 0, 0, 0)
        load = server.load(served.node_id)
        return NodeSample(info, load.connections, load.in_flight, node.queued, served.counters.snapshot())

    async def close_nodes(self) -> None:
        await asyncio.gather(*(served.close() for served in self.served if isinstance(served, ServedSpare)))
        for lock in self.locks.values():
            lock.release()
        await asyncio.gather(*(node.close() for node in self.nodes.values()))

    def close_counters(self) -> None:
        for counted in self.counters:
            counted.close()

    async def open(self, path: str) -> None:
        spare = is_spare(path)
        node_id = read_spare(self.io, path).node_id if spare else read_config(self.io, path).node_id
        if node_id in [other.node_id for other in self.served]:
            raise InvalidArgument(f"{path}: node {node_id} is named twice")
        self.served.append(self._open_spare(path) if spare else await self._open_node(path))

    def _open_spare(self, path: str) -> ServedSpare:
        lock = OwnerLock.take(self.io, path)
        config = read_spare(self.io, path)
        self.locks[config.node_id] = lock
        return ServedSpare(config, path, self.durability, self._become)

    async def _open_node(self, path: str) -> ServedNode:
        config = read_config(self.io, path)
        counted = CounterFile.open(f"{path}/{COUNTERS_FILE}", writable=True, io=self.io)
        self.counters.append(counted)
        node = await DirectoryNode.open(path, config.place, self.io, self.clock, counters=counted, mapped=self.mapped,
                                        durability=self.durability)
        self.nodes[config.node_id] = node
        try:
            await _bury_purged(self.io, node, path, self.clock)
        except BaseException:
            await self.nodes.pop(config.node_id).close()
            raise
        _LOG.info("%s is open", path, extra={"node": node.node_index})
        return ServedNode(node, config.place.cluster_id, config.node_id, self.durability, counted,
                          slab=node.slab_place)

    async def _become(self, spare: ServedSpare, place: NodePlace) -> None:
        """Go on with the node of a place where there was a spare. On a thread of its own, because its disk may hang
        while others of the process are fine."""
        assert self.server is not None
        thread = IoThread("efs-spare-settling", self.clock)
        try:
            await thread.submit(partial(settle, self.io, spare.directory, spare.config, place), pass_on)
        finally:
            await thread.close(0)
        self.locks[spare.node_id].release()
        if spare.node_id not in self.nodes:
            node = await self._open_node(spare.directory)
            self.served[self.served.index(spare)] = node
            self.server.go_on_with(node)
        _LOG.warning("the spare %s is node %d of group %d from now on", spare.node_id, place.node_index, place.group,
                     extra={"node": place.node_index})


async def serve_nodes(paths: Sequence[str], endpoints: Sequence[Endpoint], *, io: Io, clock: Clock, tokens: Tokens,
                      durability: Durability, mapped: bool, ready: Ready, stop: asyncio.Event,
                      register: EtcdUrl | None = None, metrics: Endpoint | None = None) -> None:
    """Serve until `stop` is set. metrics: where the status page listens. `ready` is called once, with the nodes, the
    addresses as they are, and that of the status page.

    register: the cluster in etcd to which the nodes belong; there it is said that they are served.

    InvalidArgument for an address that needs a token, or the same node twice; Locked, OpenFailed, … name a directory.
    """
    for endpoint in endpoints:
        require_token(endpoint, tokens)
    process = _Process(io, clock, durability, mapped)
    page = StatusPage(process.look)
    async with AsyncExitStack() as stack:  # What was pushed last ends first.
        stack.callback(process.close_counters)
        stack.push_async_callback(page.close)
        stack.push_async_callback(process.close_nodes)
        for path in paths:
            await process.open(path)
        process.server = NodeServer(process.served, io, clock, tokens)
        stack.push_async_callback(process.server.close)
        addresses = [process.server.listen(endpoint) for endpoint in endpoints]
        ready(process.served, addresses, None if metrics is None else await page.listen(io, metrics))
        if register is not None:
            background = Background()
            stack.push_async_callback(background.close)
            lease = Registration(register, process.served, list(map(str, addresses)), clock)
            background.start("lease", lease.run)
        await stop.wait()
        _LOG.info("told to end: requests under way are answered, nodes are closed")
    _LOG.info("ended")


async def _bury_purged(io: Io, node: DirectoryNode, path: str, clock: Clock) -> None:
    """Have a node of a store's root drop and refuse what the root notes as purged. NodeUnavailable when it cannot."""
    root = os.path.dirname(os.path.dirname(path))
    tombstones = read_tombstones(io, root) if os.path.lexists(os.path.join(root, STORE_FILE)) else {}
    if tombstones:
        results = await buried([node], {0: tuple(tombstones)}, clock)
        if not results[0][1]:
            raise NodeUnavailable(node.node_index, "records of purged tenants could not be dropped from it")
