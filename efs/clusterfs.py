"""A filesystem over nodes at servers, as cluster.toml (`efs/clusterfile.py`) or a map in etcd (`efs/clustermap.py`)
names them.

Any number of processes may have one cluster open at once, each with a reader, a writer and a mender of its own. What an
embedded store may assume because it has one owner is kept here like this (docs/decisions/0010):

- *Locks.* Each server owns its directories. A client owns nothing.
- *Upkeep.* Sweeps and background scrubs assume that they are the only ones. A client does them only while it holds
  the lock of the root (the directory of cluster.toml, or the one that the map names), on the machine that is named as
  `upkeep_host`; everybody else leaves that alone. The one who has the lock connects as an operator, and notes its
  progress there.
- *Counters.* The file `counters` has one writer: the holder of that lock. Everybody else counts in memory.
- *Purged tenants.* The tombstones are beside the file. The holder of the lock has every node bury them when it opens
  the cluster; servers below the same root do so by themselves when they start (`efs/serving.py`).
- *Nodes that were away* are not gated. What they hold is named by its digest and what they lack is missing, so no
  read mixes anything and no put counts what is not there.

*A map in etcd* is read once at opening and followed from then on: where a place has got another address or another
node, the connections to it are made anew. Reads and writes never wait for etcd, and go on with the last map when
it is gone, for ever. No copy is kept on disk: a client that starts while etcd is away is told so. A map that is older
than the one in use, of another cluster, or not readable is not followed.

Opening goes on without up to two places whose servers are other nodes than the map says (`efs/limits.py`
OTHERS_TOLERATED): that is what a replaced node looks like whose old server still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, Literal

from efs.clock import Clock, SystemClock
from efs.cluster import StoreConfig
from efs.clusterfile import ClusterConfig, read_cluster
from efs.clustermap import ETCD_SCHEME, ClusterMap, EtcdUrl, changed_places, may_follow, parse_etcd_url
from efs.codec import Codec
from efs.errors import EfsError, HandshakeFailed, IdentityMismatch, InvalidArgument, Locked, OpenFailed
from efs.etcd import EtcdStore
from efs.fs import FileSystem
from efs.handshake import Role, Tokens, read_token
from efs.limits import EXTENT_BYTES, OTHERS_TOLERATED, STRIPE_SHARDS, WIRE_HANDSHAKE_MS
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


async def open_cluster(where: str, *, io: Io | None = None, clock: Clock | None = None, care: Care = "background",
                       scrub: bool = False) -> FileSystem:
    """Open the cluster that a cluster.toml or the map of an etcd:// URL describes. A node that cannot be reached is a
    degraded node.

    StoreNotFound, CorruptRecord, … name the file or URL, EtcdUnavailable the etcd; IdentityMismatch and HandshakeFailed
    say which server is another or refuses. With care "by hand" also Locked, naming the process that looks after the
    store, and InvalidArgument on a machine, or without a token, that cannot.
    """
    io, clock = io or SystemIo(), clock or SystemClock()
    if where.startswith(ETCD_SCHEME):
        return await _open_mapped(parse_etcd_url(where), io, clock, care, scrub)
    path = os.path.abspath(where)
    filesystem, _ = await _open(read_cluster(io, path), os.path.dirname(path), 0, io, clock, care, scrub)
    return filesystem


async def _open_mapped(url: EtcdUrl, io: Io, clock: Clock, care: Care, scrub: bool) -> FileSystem:
    store = EtcdStore(url)
    try:
        held = (await store.read()).map
        filesystem, nodes = await _open(held.config(), held.root, OTHERS_TOLERATED, io, clock, care, scrub)
    finally:
        await store.close()
    follower = _Follower(filesystem, nodes, held)
    filesystem.attend("map", lambda: store.follow(follower.apply))
    return filesystem


class _Follower:
    """Takes a filesystem's nodes to where a newer map says that they are."""

    def __init__(self, filesystem: FileSystem, nodes: Sequence[RemoteNode], held: ClusterMap) -> None:
        self._filesystem = filesystem
        self._nodes = tuple(nodes)
        self._held = held

    async def apply(self, found: ClusterMap) -> None:
        why = may_follow(self._held, found)
        if why is not None:
            _LOG.warning("going on with version %d of the map, not with what is in etcd: %s", self._held.version, why)
            return
        changed, self._held = changed_places(self._held, found), found
        endpoints = found.config().endpoints
        for index in changed:
            node, node_id, endpoint = self._nodes[index], found.places[index].node_id, endpoints[index]
            _LOG.warning("node %d is %s at %s from now on (version %d of the map)", index, node_id, endpoint,
                         found.version)
            await node.relink(replace(node.place, endpoint=endpoint, node_id=node_id))
            self._filesystem.note_replaced(index, node_id, str(endpoint))
            self._filesystem.counters.add("places_changed")


async def _open(config: ClusterConfig, root: str, others_tolerated: int, io: Io, clock: Clock, care: Care,
                scrub: bool) -> tuple[FileSystem, Sequence[RemoteNode]]:
    """The filesystem and its nodes."""
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
        await _connect(config, role, tokens, clock, counters, nodes, others_tolerated)
        tombstones = await _bury(io, root, nodes, clock) if lock is not None else {}
        counters.add("nodes_degraded", sum(node.suspect for node in nodes))
        filesystem = FileSystem(
            nodes, codec=Codec(), counters=counters, clock=clock, config=_store_config(config), lock=lock,
            progress=read_progress(io, root) if lock is not None else Progress(), tombstones=tombstones,
            io=io if lock is not None else None, maintain=lock is not None and care == "background", scrub=scrub,
            root=root)
        return filesystem, nodes
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
                   opened: list[RemoteNode], others_tolerated: int) -> None:
    """Connect to all nodes at once; every node that was made is in `opened`, in order unless one refused. So many
    servers may be another node than is wanted, and refuse: these are tried again later."""
    places = [RemotePlace(endpoint, config.cluster_id, node_id, index, role, tokens, config.durability)
              for index, (endpoint, node_id) in enumerate(zip(config.endpoints, config.node_ids, strict=True))]
    made: list[RemoteNode | BaseException] = list(await asyncio.gather(
        *(RemoteNode.open(place, clock, counters, WIRE_HANDSHAKE_MS) for place in places), return_exceptions=True))
    others = [index for index, failure in enumerate(made) if isinstance(failure, IdentityMismatch | HandshakeFailed)]
    if len(others) <= others_tolerated:
        for index in others:
            _LOG.warning("node %d is not where it should be: %s", index, made[index])
            made[index] = RemoteNode.begin(places[index], clock, counters)
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
