"""A filesystem over nodes at servers, as cluster.toml names them (`efs/clusterfile.py`).

Any number of processes may have one cluster open at once, each with a reader, a writer and a mender of its own. What an
embedded store may assume because it has one owner is kept here like this (docs/decisions/0010):

- *Locks.* Each server owns its directories. A client owns nothing.
- *Upkeep.* Sweeps and background scrubs assume that they are the only ones. A client does them only while it holds
  the lock of the directory of cluster.toml, on the machine that the file names as `upkeep_host`; everybody else leaves
  that alone. The one who has the lock connects as an operator, and notes its progress beside the file.
- *Counters.* The file `counters` has one writer: the holder of that lock. Everybody else counts in memory.
- *Purged tenants.* The tombstones are beside the file. The holder of the lock has every node bury them when it opens
  the cluster; servers below the same root do so by themselves when they start (`efs/serving.py`).
- *Nodes that were away* are not gated. What they hold is named by its digest and what they lack is missing, so no
  read mixes anything and no put counts what is not there.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from typing import Final, Literal

from efs.clock import Clock, SystemClock
from efs.cluster import StoreConfig
from efs.clusterfile import ClusterConfig, read_cluster
from efs.codec import Codec
from efs.errors import EfsError, InvalidArgument, Locked, OpenFailed
from efs.fs import FileSystem
from efs.handshake import Role, Tokens, read_token
from efs.limits import EXTENT_BYTES, STRIPE_SHARDS, WIRE_HANDSHAKE_MS
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, OwnerLock
from efs.osio import Io, SystemIo
from efs.progress import Progress, read_progress
from efs.purge import buried
from efs.remote import RemoteNode
from efs.tombstones import Tombstones, read_tombstones, write_tombstones

_LOG: Final = logging.getLogger(__name__)


Care = Literal["background", "by hand", "none"]
"""Of a client for its store: in the background, if it is the one to do so; only what it is asked for, but as the one
who looks after the store, or not at all; none."""


async def open_cluster(path: str, *, io: Io | None = None, clock: Clock | None = None, care: Care = "background",
                       scrub: bool = False) -> FileSystem:
    """Open the cluster that a cluster.toml describes. A node that cannot be reached is a degraded node.

    StoreNotFound, CorruptRecord, … name the file; IdentityMismatch and HandshakeFailed say which server is another or
    refuses. With care "by hand" also Locked, naming the process that looks after the store, and InvalidArgument on a
    machine, or without a token, that cannot.
    """
    io, clock = io or SystemIo(), clock or SystemClock()
    path = os.path.abspath(path)
    config = read_cluster(io, path)
    root = os.path.dirname(path)
    lock = _upkeep_lock(io, root, config, care)
    counters: CounterFile | None = None
    nodes: list[RemoteNode] = []
    try:
        role, tokens = _tokens(io, config, lock)
        if role is Role.DATA and lock is not None:
            if care == "by hand":
                raise InvalidArgument(f"{config.operator_token_file} cannot be read, and only operators may do this")
            lock.release()
            lock = None
        counters = (CounterFile.open(os.path.join(root, COUNTERS_FILE), writable=True, io=io) if lock is not None
                    else CounterFile.in_memory())
        await _connect(config, role, tokens, clock, counters, nodes)
        tombstones = await _bury(io, root, nodes, clock) if lock is not None else {}
        counters.add("nodes_degraded", sum(node.suspect for node in nodes))
        return FileSystem(nodes, codec=Codec(), counters=counters, clock=clock, config=_store_config(config), lock=lock,
                          progress=read_progress(io, root) if lock is not None else Progress(), tombstones=tombstones,
                          io=io if lock is not None else None, scrub=scrub,
                          maintain=lock is not None and care == "background")
    except BaseException:
        await asyncio.gather(*(node.close() for node in nodes))
        if counters is not None:
            counters.close()
        if lock is not None:
            lock.release()
        raise


def _upkeep_lock(io: Io, root: str, config: ClusterConfig, care: Care) -> OwnerLock | None:
    """The lock of who looks after the store, None when that is not this process."""
    if care == "none":
        return None
    here = socket.gethostname()
    if care == "by hand":
        if config.upkeep_host != here:
            raise InvalidArgument(f"the store is looked after on {config.upkeep_host or 'no machine'}, this is {here}")
        return OwnerLock.take(io, root)
    if config.upkeep_host != here:
        return None
    try:
        return OwnerLock.take(io, root)
    except Locked as error:
        _LOG.info("the store is looked after by process %s", error.pid)
    except OpenFailed as error:
        _LOG.info("the store is not looked after by this process: %s", error)
    return None


def _tokens(io: Io, config: ClusterConfig, lock: OwnerLock | None) -> tuple[Role, Tokens]:
    """The role in which to connect, and the tokens for it. Who may not read the operators' token is no operator."""
    data = None if config.token_file is None else read_token(io, config.token_file)
    if lock is None:
        return Role.DATA, Tokens(data)
    if config.operator_token_file is None:
        return Role.OPERATOR, Tokens(data)
    try:
        return Role.OPERATOR, Tokens(data, read_token(io, config.operator_token_file))
    except OpenFailed as error:
        _LOG.info("the store is not looked after by this process: %s", error)
        return Role.DATA, Tokens(data)


async def _connect(config: ClusterConfig, role: Role, tokens: Tokens, clock: Clock, counters: CounterFile,
                   opened: list[RemoteNode]) -> None:
    """Connect to all nodes at once; every node that was made is in `opened`, in order unless one refused."""
    places = [RemotePlace(endpoint, config.cluster_id, node_id, index, role, tokens, config.durability)
              for index, (endpoint, node_id) in enumerate(zip(config.endpoints, config.node_ids, strict=True))]
    made: Sequence[RemoteNode | BaseException] = await asyncio.gather(
        *(RemoteNode.open(place, clock, counters, WIRE_HANDSHAKE_MS) for place in places), return_exceptions=True)
    opened += [node for node in made if isinstance(node, RemoteNode)]
    for failure in made:
        if isinstance(failure, EfsError):
            raise failure
        if isinstance(failure, BaseException):
            raise RuntimeError("a node could not be made") from failure
    for node in opened:
        if node.suspect:
            _LOG.warning("the cluster is opened without node %d: %s does not answer", node.node_index,
                         node.place.endpoint)


async def _bury(io: Io, root: str, nodes: Sequence[RemoteNode], clock: Clock) -> Tombstones:
    """Have every node that is there refuse and drop what was purged: a server forgets that when it ends. Where that
    could not be done it is noted as pending, and done before the next sweep."""
    tombstones = read_tombstones(io, root)
    if not tombstones:
        return tombstones
    reached = [None if node.suspect else node for node in nodes]
    results = await buried(reached, dict.fromkeys(range(STRIPE_SHARDS), tuple(tombstones)), clock)
    pending = frozenset(range(STRIPE_SHARDS)) - {index for index, (_, complete) in results.items() if complete}
    left = dict.fromkeys(tombstones, pending)
    if left != tombstones:
        write_tombstones(io, root, left)
    return left


def _store_config(config: ClusterConfig) -> StoreConfig:
    """What the filesystem wants to know of its nodes: who they are, and where."""
    return StoreConfig(config.cluster_id, 0, config.durability, EXTENT_BYTES, tuple(map(str, config.endpoints)),
                       config.node_ids)
