"""A filesystem over nodes at servers, as cluster.toml (`efs/clusterfile.py`) or a map in etcd (`efs/clustermap.py`)
names them: an `efs.fs.FileSystem` for each EC group, and an `efs.groups.GroupedFileSystem` over these.

Any number of processes may have one cluster open at once, each with a reader, a writer and a mender of its own. What an
embedded store may assume because it has one owner is kept here like this (docs/decisions/0010):

- *Locks.* Each server owns its directories. A client owns nothing.
- *Upkeep.* Sweeps and background scrubs assume that they are the only ones. A client does them only while it holds
  the lock of the root (the directory of cluster.toml, or the one that the map names), on the machine that is named as
  `upkeep_host`; everybody else leaves that alone. The one who has the lock connects as an operator, and notes its
  progress there.
- *Groups.* What an embedded store notes in its root (progress, tombstones) every group but the first notes in a
  directory of its own there: `group-01`, and so on. All groups bury what any of them has noted as purged, because one
  that was added later knows nothing of it.
- *Counters.* The file `counters` has one writer: the holder of that lock. Everybody else counts in memory.
- *Purged tenants.* The tombstones are beside the file. The holder of the lock has every node bury them when it opens
  the cluster; servers below the same root do so by themselves when they start (`efs/serving.py`).
- *Nodes that were away* are not gated. What they hold is named by its digest and what they lack is missing, so no
  read mixes anything and no put counts what is not there.

*A map in etcd* is read once at opening and followed from then on: where a place has got another address or another
node, the connections to it are made anew; another group is opened. Reads and writes never wait for etcd, and go on
with the last map when it is gone, for ever. No copy is kept on disk: a client that starts while etcd is away is told
so. A map that is older than the one in use, of another cluster, or not readable is not followed.

Opening by a map goes on without up to two places of each group whose servers are other nodes than the map says
(`efs/limits.py` OTHERS_TOLERATED): that is what a replaced node looks like whose old server still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Final, Literal

from efs.clock import Clock, SystemClock
from efs.cluster import StoreConfig
from efs.clusterfile import ClusterConfig, read_cluster
from efs.clustermap import ETCD_SCHEME, ClusterMap, EtcdUrl, changed_places, may_follow, parse_etcd_url
from efs.codec import Codec
from efs.errors import EfsError, HandshakeFailed, IdentityMismatch, InvalidArgument, Locked, OpenFailed
from efs.etcd import EtcdStore
from efs.fs import FileSystem
from efs.groups import GroupedFileSystem
from efs.handshake import Role, Tokens, read_token
from efs.limits import EXTENT_BYTES, OTHERS_TOLERATED, STRIPE_SHARDS, WIRE_HANDSHAKE_MS
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, OwnerLock
from efs.osio import Io, SystemIo
from efs.progress import Progress, read_progress
from efs.purge import ALL_NODES, buried
from efs.quota import Quotas
from efs.remote import RemoteNode
from efs.tombstones import Tombstones, read_tombstones, write_tombstones

_LOG: Final = logging.getLogger(__name__)


Care = Literal["background", "by hand", "none"]
"""Of a client for its store: in the background, if it is the one to do so; only what it is asked for, but as the one
who looks after the store, or not at all; none."""


async def open_cluster(where: str, *, io: Io | None = None, clock: Clock | None = None, care: Care = "background",
                       scrub: bool = False) -> GroupedFileSystem:
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
    client = await _Client.open(read_cluster(io, path), os.path.dirname(path), 0, io, clock, care, scrub)
    return client.filesystem


async def _open_mapped(url: EtcdUrl, io: Io, clock: Clock, care: Care, scrub: bool) -> GroupedFileSystem:
    store = EtcdStore(url)
    try:
        held = (await store.read()).map
        client = await _Client.open(held.config(), held.root, OTHERS_TOLERATED, io, clock, care, scrub)
    finally:
        await store.close()

    async def apply(found: ClusterMap) -> None:
        await client.follow(found.config())

    client.filesystem.attend("map", lambda: store.follow(apply))
    return client.filesystem


class _Client:
    """A cluster as this process has it open: how its nodes were connected to, for those that move or are added. Made
    with `open`; the filesystem owns everything."""

    filesystem: GroupedFileSystem

    def __init__(self, config: ClusterConfig, root: str, io: Io, clock: Clock, lock: OwnerLock | None, role: Role,
                 tokens: Tokens, maintain: bool, scrub: bool) -> None:
        self._config = config
        self._root = root
        self._io = io
        self._clock = clock
        self._lock = lock
        self._role = role
        self._tokens = tokens
        self._maintain = maintain
        self._scrub = scrub
        self._quotas = Quotas((), clock)
        self._counters = (CounterFile.open(os.path.join(root, COUNTERS_FILE), writable=True, io=io)
                          if lock is not None else CounterFile.in_memory())
        self._nodes: list[RemoteNode] = []
        """Of all groups, by number."""

    @classmethod
    async def open(cls, config: ClusterConfig, root: str, others_tolerated: int, io: Io, clock: Clock, care: Care,
                   scrub: bool) -> _Client:
        """others_tolerated: in each group, how many servers may be another node than is wanted."""
        lock = _upkeep_lock(io, root, config, care)
        client: _Client | None = None
        try:
            role, tokens = _tokens(io, config, lock)
            if role is Role.DATA and lock is not None:
                if care == "by hand":
                    raise InvalidArgument(f"{config.operator_token_file} cannot be read, only operators may do this")
                lock.release()
                lock = None
            maintain = lock is not None and care == "background"
            client = cls(config, root, io, clock, lock, role, tokens, maintain, scrub)
            await client._connect(others_tolerated)
            groups = await client._groups(range(config.ownership.groups))
            client.filesystem = GroupedFileSystem(groups, config.ownership, counters=client._counters, clock=clock,
                                                  quotas=client._quotas, lock=lock, root=root)
            return client
        except BaseException:
            if client is not None:
                await asyncio.gather(*(node.close() for node in client._nodes))
                client._counters.close()
            if lock is not None:
                lock.release()
            raise

    # -- nodes

    def _places(self, config: ClusterConfig) -> list[RemotePlace]:
        """By number."""
        return [RemotePlace(endpoint, config.cluster_id, node_id, number % STRIPE_SHARDS, self._role, self._tokens,
                            config.durability)
                for number, (endpoint, node_id) in enumerate(zip(config.endpoints, config.node_ids, strict=True))]

    async def _connect(self, others_tolerated: int) -> None:
        """Connect to all nodes at once; every node that was made is in `_nodes`, in order unless one refused. Servers
        that are another node or refuse are tried again later, where so few are tolerated."""
        places = self._places(self._config)
        made: list[RemoteNode | BaseException] = list(await asyncio.gather(
            *(RemoteNode.open(place, self._clock, self._counters, WIRE_HANDSHAKE_MS) for place in places),
            return_exceptions=True))
        others = [number for number, failure in enumerate(made)
                  if isinstance(failure, IdentityMismatch | HandshakeFailed)]
        if max(Counter(number // STRIPE_SHARDS for number in others).values(), default=0) <= others_tolerated:
            for number in others:
                _LOG.warning("node %d is not where it should be: %s", number, made[number])
                made[number] = RemoteNode.begin(places[number], self._clock, self._counters)
        self._nodes += [node for node in made if isinstance(node, RemoteNode)]
        for failure in made:
            if isinstance(failure, EfsError):
                raise failure
            if isinstance(failure, BaseException):
                raise RuntimeError("a node could not be made") from failure
        for number, node in enumerate(self._nodes):
            if node.suspect:
                _LOG.warning("the cluster is opened without node %d: %s does not answer", number, node.place.endpoint)
        self._counters.add("nodes_degraded", sum(node.suspect for node in self._nodes))

    # -- groups

    async def _groups(self, numbers: Sequence[int]) -> list[FileSystem]:
        """The filesystems of groups whose nodes are there."""
        tombstones = [read_tombstones(self._io, _notes(self._root, group)) if self._lock is not None else {}
                      for group in range(self._config.ownership.groups)]
        purged = frozenset[bytes]().union(*tombstones)
        return [await self._group(group, {**dict.fromkeys(purged, ALL_NODES), **tombstones[group]})
                for group in numbers]

    async def _group(self, group: int, tombstones: Tombstones) -> FileSystem:
        nodes = self._nodes[STRIPE_SHARDS * group : STRIPE_SHARDS * (group + 1)]
        self._quotas.extend(nodes)
        if self._lock is None:
            return self._filesystem(group, nodes, None, Progress(), {})
        notes = _notes(self._root, group)
        if not os.path.isdir(notes):
            self._io.mkdir(notes)
        left = await _bury(self._io, notes, nodes, tombstones, self._clock)
        return self._filesystem(group, nodes, notes, read_progress(self._io, notes), left)

    def _filesystem(self, group: int, nodes: Sequence[RemoteNode], notes: str | None, progress: Progress,
                    tombstones: Tombstones) -> FileSystem:
        return FileSystem(nodes, codec=Codec(), counters=self._counters, clock=self._clock, quotas=self._quotas,
                          config=_store_config(self._config, group), progress=progress, tombstones=tombstones,
                          io=self._io if notes is not None else None, notes=notes, maintain=self._maintain,
                          scrub=self._scrub, root=self._root)

    # -- changes

    async def follow(self, found: ClusterConfig) -> None:
        """Go over to a later description of the cluster: other nodes and addresses, further groups."""
        why = may_follow(self._config, found)
        if why is not None:
            _LOG.warning("going on with version %d of the map, not with what was found: %s", self._config.version, why)
            return
        held, self._config = self._config, found
        places = self._places(found)
        for number in changed_places(held, found):
            node, place = self._nodes[number], places[number]
            _LOG.warning("node %d is %s at %s from now on (version %d of the map)", number, place.node_id,
                         place.endpoint, found.version)
            await node.relink(place)
            self.filesystem.note_replaced(number, place.node_id, str(place.endpoint))
            self._counters.add("places_changed")
        if found.ownership != held.ownership:
            added = range(held.ownership.groups, found.ownership.groups)
            for place in places[len(self._nodes) :]:
                self._nodes.append(RemoteNode.begin(place, self._clock, self._counters))
            self.filesystem.extend(await self._groups(added), found.ownership)
            _LOG.warning("the cluster has %d groups from now on (version %d of the map)", found.ownership.groups,
                         found.version)


def _notes(root: str, group: int) -> str:
    """Where the one who looks after the store notes what concerns a group."""
    return root if group == 0 else os.path.join(root, f"group-{group:02d}")


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


async def _bury(io: Io, notes: str, nodes: Sequence[RemoteNode], tombstones: Tombstones, clock: Clock) -> Tombstones:
    """Have every node of a group that is there refuse and drop what was purged: a server forgets that when it ends.
    Where that could not be done it is noted as pending, and done before the next sweep."""
    if not tombstones:
        return tombstones
    reached = [None if node.suspect else node for node in nodes]
    results = await buried(reached, dict.fromkeys(range(STRIPE_SHARDS), tuple(tombstones)), clock)
    pending = ALL_NODES - {index for index, (_, complete) in results.items() if complete}
    left = dict.fromkeys(tombstones, pending)
    if left != read_tombstones(io, notes):
        write_tombstones(io, notes, left)
    return left


def _store_config(config: ClusterConfig, group: int) -> StoreConfig:
    """What the filesystem of a group wants to know of its nodes: who they are, and where."""
    ids, endpoints = zip(*config.of_group(group), strict=True)
    return StoreConfig(config.cluster_id, 0, config.durability, EXTENT_BYTES, tuple(map(str, endpoints)), tuple(ids))
