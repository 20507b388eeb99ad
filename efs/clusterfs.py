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

*Versions.* Every put says by which version of the description it is made. Where a node has heard of a later one and
refuses, the description is read again, also a cluster.toml, and gone over to in the background; the put waits for
that within its deadline and is made once more.

Opening by a map goes on without up to two places of each group whose servers are other nodes than the map says
(`efs/limits.py` OTHERS_TOLERATED): that is what a replaced node looks like whose old server still runs.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Final, Literal

from efs.clock import Clock, Deadline, SystemClock
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
from efs.link import MapHeld, RemotePlace
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
who looks after the store, or not at all; none. Whoever looks after the store, all of the first kind move blocks to new
groups (`efs/moving.py`)."""


async def open_cluster(where: str, *, io: Io | None = None, clock: Clock | None = None, care: Care = "background",
                       mapped: bool = False, scrub: bool = False) -> GroupedFileSystem:
    """Open the cluster that a cluster.toml or the map of an etcd:// URL describes. A node that cannot be reached is a
    degraded node. mapped: as of `FileSystem.open`, of the slabs that servers of this machine share.

    StoreNotFound, CorruptRecord, … name the file or URL, EtcdUnavailable the etcd; IdentityMismatch and HandshakeFailed
    say which server is another or refuses. With care "by hand" also Locked, naming the process that looks after the
    store, and InvalidArgument on a machine, or without a token, that cannot.
    """
    io, clock = io or SystemIo(), clock or SystemClock()
    if where.startswith(ETCD_SCHEME):
        return await _open_etcd(parse_etcd_url(where), io, clock, care, mapped, scrub)
    path = os.path.abspath(where)

    async def read() -> ClusterConfig:
        return read_cluster(io, path)

    client = await _Client.open(read, os.path.dirname(path), 0, io, clock, care, mapped, scrub)
    return client.filesystem


async def _open_etcd(url: EtcdUrl, io: Io, clock: Clock, care: Care, mapped: bool, scrub: bool) -> GroupedFileSystem:
    store = EtcdStore(url)

    async def read() -> ClusterConfig:
        """On a connection of its own: following has the other one."""
        asking = EtcdStore(url)
        try:
            return (await asking.read()).map.config()
        finally:
            await asking.close()

    try:
        root = (await store.read()).map.root
    finally:
        await store.close()
    client = await _Client.open(read, root, OTHERS_TOLERATED, io, clock, care, mapped, scrub)

    async def apply(found: ClusterMap) -> None:
        await client.follow(found.config())

    client.filesystem.attend("map", lambda: store.follow(apply))
    return client.filesystem


Read = Callable[[], Awaitable[ClusterConfig]]


class _Client:
    """A cluster as this process has it open: how its nodes were connected to, for those that move or are added. Made
    with `open`; the filesystem owns everything."""

    filesystem: GroupedFileSystem

    def __init__(self, read: Read, config: ClusterConfig, root: str, io: Io, clock: Clock, lock: OwnerLock | None,
                 role: Role, tokens: Tokens, maintain: bool, mapped: bool, scrub: bool) -> None:
        self._read = read
        self._config = config
        self._map_held = MapHeld(config.version)
        self._changing = asyncio.Lock()
        self._root = root
        self._io = io
        self._clock = clock
        self._lock = lock
        self._role = role
        self._tokens = tokens
        self._maintain = maintain
        self._mapped = mapped
        self._scrub = scrub
        self._quotas = Quotas((), clock)
        self._counters = (CounterFile.open(os.path.join(root, COUNTERS_FILE), writable=True, io=io)
                          if lock is not None else CounterFile.in_memory())
        self._nodes: list[RemoteNode] = []
        """Of all groups, by number."""

    @classmethod
    async def open(cls, read: Read, root: str, others_tolerated: int, io: Io, clock: Clock, care: Care,
                   mapped: bool, scrub: bool) -> _Client:
        """read: how to read the description of the cluster. others_tolerated: in each group, how many servers may be
        another node than is wanted."""
        config = await read()
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
            client = cls(read, config, root, io, clock, lock, role, tokens, maintain, mapped, scrub)
            client._nodes = await client._connect(client._places(config), others_tolerated)
            client._counters.add("nodes_degraded", sum(node.suspect for node in client._nodes))
            groups = await client._groups(config, range(config.ownership.groups), client._nodes)
            client.filesystem = GroupedFileSystem(groups, config.ownership, counters=client._counters, clock=clock,
                                                  quotas=client._quotas, lock=lock, root=root,
                                                  map_held=client._map_held, renew=client.renew,
                                                  move=care == "background")
            client.filesystem.drain(config.draining)
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
                            config.durability, self._map_held, self._mapped)
                for number, (endpoint, node_id) in enumerate(zip(config.endpoints, config.node_ids, strict=True))]

    async def _connect(self, places: Sequence[RemotePlace], others_tolerated: int) -> list[RemoteNode]:
        """Connect to all nodes of some groups at once. Where that fails or is given up, no connection is left."""
        opened: list[RemoteNode] = []
        try:
            return await self._open_nodes(places, others_tolerated, opened)
        except BaseException:
            await asyncio.gather(*(node.close() for node in opened))
            raise

    async def _open_nodes(self, places: Sequence[RemotePlace], others_tolerated: int,
                          opened: list[RemoteNode]) -> list[RemoteNode]:
        """Open nodes, each of which is in `opened` as soon as it is open. Servers that are another node or refuse are
        tried again later, where so few are tolerated."""
        async def one(place: RemotePlace) -> RemoteNode:
            node = await RemoteNode.open(place, self._clock, self._counters, WIRE_HANDSHAKE_MS)
            opened.append(node)
            return node

        made = list(await asyncio.gather(*map(one, places), return_exceptions=True))
        others = [at for at, failure in enumerate(made) if isinstance(failure, IdentityMismatch | HandshakeFailed)]
        if max(Counter(at // STRIPE_SHARDS for at in others).values(), default=0) <= others_tolerated:
            for at in others:
                _LOG.warning("a node is not where it should be: %s", made[at])
                made[at] = node = RemoteNode.begin(places[at], self._clock, self._counters)
                opened.append(node)
        nodes = [node for node in made if isinstance(node, RemoteNode)]
        failures = [failure for failure in made if isinstance(failure, BaseException)]
        if failures:
            first = next((failure for failure in failures if isinstance(failure, EfsError)), failures[0])
            raise first if isinstance(first, EfsError) else RuntimeError("a node could not be made") from first
        for node in nodes:
            if node.suspect:
                _LOG.warning("going on without node %d at %s, which does not answer", node.node_index,
                             node.place.endpoint)
        return nodes

    # -- groups

    async def _groups(self, config: ClusterConfig, numbers: Sequence[int],
                      nodes: Sequence[RemoteNode]) -> list[FileSystem]:
        """The filesystems of groups with these nodes. All that can fail comes before the first of them is made: it has
        tasks from then on."""
        tombstones = [read_tombstones(self._io, _notes(self._root, group)) if self._lock is not None else {}
                      for group in range(config.ownership.groups)]
        purged = frozenset[bytes]().union(*tombstones)
        members = {group: nodes[STRIPE_SHARDS * at : STRIPE_SHARDS * (at + 1)] for at, group in enumerate(numbers)}
        noted = {group: await self._noted(group, some, {**dict.fromkeys(purged, ALL_NODES), **tombstones[group]})
                 for group, some in members.items()}
        return [self._filesystem(config, group, some, *noted[group]) for group, some in members.items()]

    async def _noted(self, group: int, nodes: Sequence[RemoteNode],
                     tombstones: Tombstones) -> tuple[str | None, Progress, Tombstones]:
        """Where what concerns a group is noted, and what is noted there, after its nodes buried what was purged."""
        if self._lock is None:
            return None, Progress(), {}
        notes = _notes(self._root, group)
        if not os.path.isdir(notes):
            try:
                self._io.mkdir(notes)
            except OSError as error:
                raise OpenFailed(notes, error) from error
        left = await _bury(self._io, notes, nodes, tombstones, self._clock)
        return notes, read_progress(self._io, notes), left

    def _filesystem(self, config: ClusterConfig, group: int, nodes: Sequence[RemoteNode], notes: str | None,
                    progress: Progress, tombstones: Tombstones) -> FileSystem:
        self._quotas.extend(nodes)
        return FileSystem(nodes, codec=Codec(), counters=self._counters, clock=self._clock, quotas=self._quotas,
                          config=_store_config(config, group), progress=progress, tombstones=tombstones,
                          io=self._io if notes is not None else None, notes=notes, maintain=self._maintain,
                          scrub=self._scrub, root=self._root)

    # -- changes

    async def renew(self, version: int, deadline: Deadline) -> bool:
        """After a put by a version that failed: if nodes refuse that one, go over to what is written now. Whether a
        later one is in use."""
        if self._map_held.version > version:
            return True
        if not self._map_held.outdated:
            return False
        try:
            async with asyncio.timeout(deadline.left()):
                found = await self._read()
        except (EfsError, TimeoutError) as error:
            _LOG.warning("nodes know of a later map than version %d, which could not be read: %s", version, error)
            return False
        # In the background, because it is not to be given up half way; the new groups then have their connections.
        followed = asyncio.Event()

        async def follow() -> None:
            try:
                await self.follow(found)
            except EfsError as error:
                _LOG.warning("going on with version %d of the map: %s", version, error)
            finally:
                followed.set()

        self.filesystem.attend("map", follow)
        with suppress(TimeoutError):
            async with asyncio.timeout(deadline.left()):
                await followed.wait()
        return self._map_held.version > version

    async def follow(self, found: ClusterConfig) -> None:
        """Go over to a later description of the cluster: other nodes and addresses, further groups. Where the groups
        cannot be opened, the places are followed all the same, and the version in use stays that of before."""
        async with self._changing:
            await self._follow(found)

    async def _follow(self, found: ClusterConfig) -> None:
        held = self._config
        why = may_follow(held, found)
        if why is not None:
            _LOG.warning("going on with version %d of the map, not with what was found: %s", held.version, why)
            return
        places = self._places(found)
        for number in changed_places(held, found):
            node, place = self._nodes[number], places[number]
            _LOG.warning("node %d is %s at %s from now on (version %d of the map)", number, place.node_id,
                         place.endpoint, found.version)
            await node.relink(place)
            self.filesystem.note_replaced(number, place.node_id, str(place.endpoint))
            self._counters.add("places_changed")
        self._config = _as_before(found, held)
        if found.ownership != held.ownership:
            await self._extend(found, places[len(self._nodes) :])
        self.filesystem.drain(found.draining)
        self._config = found
        self._map_held.version = found.version

    async def _extend(self, found: ClusterConfig, places: Sequence[RemotePlace]) -> None:
        """Open the groups that these places are."""
        nodes = await self._connect(places, STRIPE_SHARDS)
        try:
            added = range(self._config.ownership.groups, found.ownership.groups)
            self.filesystem.extend(await self._groups(found, added, nodes), found.ownership)
        except BaseException:
            await asyncio.gather(*(node.close() for node in nodes))
            raise
        self._nodes += nodes
        _LOG.warning("the cluster has %d groups from now on (version %d of the map)", found.ownership.groups,
                     found.version)


def _notes(root: str, group: int) -> str:
    """Where the one who looks after the store notes what concerns a group."""
    return root if group == 0 else os.path.join(root, f"group-{group:02d}")


def _as_before(found: ClusterConfig, held: ClusterConfig) -> ClusterConfig:
    """What was found of the groups that are open, by the version and the ownership of before."""
    nodes = len(held.node_ids)
    return replace(found, version=held.version, ownership=held.ownership, node_ids=found.node_ids[:nodes],
                   endpoints=found.endpoints[:nodes], incarnations=found.incarnations[:nodes],
                   draining=frozenset(number for number in found.draining if number < nodes))


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
