"""A process that serves node directories: opens them, listens, and ends when it is told to.

It owns its directories as an embedding process does, with the same locks. Nothing listens before every node is open,
and has dropped what was purged: a node keeps no note of that itself, so where its directory is below a store's root
(ROOT/nodes/NN) the tombstones of the root are buried first (`efs/purge.py`).
At the end no request is taken any more, those under way are answered, the nodes sync and mark themselves clean.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence

from efs.background import Background
from efs.clock import Clock
from efs.cluster import STORE_FILE, Durability
from efs.clustermap import EtcdUrl
from efs.endpoint import Endpoint
from efs.errors import InvalidArgument, NodeUnavailable
from efs.etcd import Registration
from efs.handshake import Tokens
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import COUNTERS_FILE, read_config
from efs.osio import Io
from efs.purge import buried
from efs.server import NodeServer, require_token
from efs.session import ServedNode
from efs.tombstones import read_tombstones

Ready = Callable[[Sequence[ServedNode], Sequence[Endpoint]], None]


async def serve_nodes(paths: Sequence[str], endpoints: Sequence[Endpoint], *, io: Io, clock: Clock, tokens: Tokens,
                      durability: Durability, mapped: bool, ready: Ready, stop: asyncio.Event,
                      register: EtcdUrl | None = None) -> None:
    """Serve until `stop` is set. `ready` is called once, with the nodes and the addresses as they are.

    register: the cluster in etcd to which the nodes belong; there it is said that they are served.

    InvalidArgument for an address that needs a token, or the same node twice; Locked, OpenFailed, … name a directory.
    """
    for endpoint in endpoints:
        require_token(endpoint, tokens)
    nodes: list[DirectoryNode] = []
    counters: list[CounterFile] = []
    try:
        served: list[ServedNode] = []
        for path in paths:
            config = read_config(io, path)
            if config.node_id in [other.node_id for other in served]:
                raise InvalidArgument(f"{path}: node {config.node_id} is named twice")
            counted = CounterFile.open(f"{path}/{COUNTERS_FILE}", writable=True, io=io)
            counters.append(counted)
            node = await DirectoryNode.open(path, config.place, io, clock, counters=counted, mapped=mapped,
                                            durability=durability)
            nodes.append(node)
            await _bury_purged(io, node, path, clock)
            served.append(ServedNode(node, config.place.cluster_id, config.node_id, durability, counted))
        server = NodeServer(served, io, clock, tokens)
        background = Background()
        try:
            addresses = [server.listen(endpoint) for endpoint in endpoints]
            ready(served, addresses)
            if register is not None:
                background.start("lease", Registration(register, served, list(map(str, addresses)), clock).run)
            await stop.wait()
        finally:
            await background.close()
            await server.close()
    finally:
        await asyncio.gather(*(node.close() for node in nodes))
        for counted in counters:
            counted.close()


async def _bury_purged(io: Io, node: DirectoryNode, path: str, clock: Clock) -> None:
    """Have a node of a store's root drop and refuse what the root notes as purged. NodeUnavailable when it cannot."""
    root = os.path.dirname(os.path.dirname(path))
    tombstones = read_tombstones(io, root) if os.path.lexists(os.path.join(root, STORE_FILE)) else {}
    if tombstones:
        results = await buried([node], {0: tuple(tombstones)}, clock)
        if not results[0][1]:
            raise NodeUnavailable(node.node_index, "records of purged tenants could not be dropped from it")
