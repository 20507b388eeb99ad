"""etcd as the place of a cluster's map: read, changed by compare-and-swap, followed; and servers under their leases.

Every call ends within ETCD_CALL_MS, as what was asked for or as EtcdUnavailable. After any failure the connection is
given up and the next call makes a new one, because neither the channel nor the watch of the client library can be
relied on after an etcd was stopped, killed or cut off.

*Following.* `follow` hands over the map as it is read, then again whenever it may have changed. A watch only says when
to read; what counts is what was read. Because a watch can die without a word, the map is read every ETCD_REREAD_MS all
the same, and when that fails everything begins anew, after ETCD_RETRY_MS, doubling up to MAX_ETCD_RETRY_MS, for ever.
Nothing is handed over meanwhile: whoever follows goes on with the map that it has.

*Serving.* `Registration` keeps a lease of ETCD_LEASE_SECONDS and under it a note of each node that a process serves.
While etcd is away the process serves as before; when it is back there is a new lease.

The library (package `aetcd`) is loaded when the first client is made; without it `etcd://` is refused.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from efs.clock import Clock, Deadline
from efs.clustermap import (
    ClusterMap,
    EtcdUrl,
    ServerNote,
    decode_map,
    decode_note,
    encode_map,
    encode_note,
)
from efs.errors import EfsError, EtcdUnavailable, InvalidArgument, StoreNotFound
from efs.limits import (
    ETCD_BEAT_MS,
    ETCD_CALL_MS,
    ETCD_LEASE_SECONDS,
    ETCD_REREAD_MS,
    ETCD_RETRY_MS,
    INFO_DEADLINE_MS,
    MAX_ETCD_RETRY_MS,
    STRIPE_SHARDS,
)
from efs.servedspare import ServedSpare
from efs.session import Served, ServedNode
from efs.types import NO_PLACE

T = TypeVar("T")

_LOG: Final = logging.getLogger(__name__)
_OPTIONS: Final = {
    # A proxy of the environment is for the web, not for coordination.
    "grpc.enable_http_proxy": 0,
    # A new channel must not inherit how long the last one waits before it connects again.
    "grpc.use_local_subchannel_pool": 1,
}


@dataclass(frozen=True, slots=True)
class HeldMap:
    """A map, the revision at which it was written, and the one of etcd when it was read."""

    map: ClusterMap
    written_at: int
    read_at: int


class EtcdStore:
    """One cluster's keys in one etcd. Belongs to the running loop; must be closed."""

    def __init__(self, url: EtcdUrl) -> None:
        self.url = url
        self._client: Any = None

    async def close(self) -> None:
        """End the connection, in bounded time. A later call makes a new one."""
        client, self._client = self._client, None
        if client is None:
            return
        try:
            async with asyncio.timeout(ETCD_CALL_MS / 1000):
                await client.close()
        except Exception as error:
            _LOG.debug("a connection to etcd was not closed cleanly: %s", error)
        _be_cancelled()

    # -- the map

    async def read(self) -> HeldMap:
        """StoreNotFound when there is no map; CorruptRecord or FormatUnsupported when it cannot be used."""
        found = await self._call(lambda client: client.get(self.url.map_key))
        if found is None:
            raise StoreNotFound(self.url, "there is no map under this name")
        return HeldMap(decode_map(found.value, str(self.url)), found.mod_revision, found.header.revision)

    async def create(self, cluster_map: ClusterMap) -> None:
        """InvalidArgument when there is a map under this name."""
        if not await self._swap(cluster_map, 0):
            raise InvalidArgument(f"{self.url}: there is a cluster of this name already")

    async def change(self, held: HeldMap, cluster_map: ClusterMap) -> None:
        """Write the next version. InvalidArgument when the map is not `held` any more."""
        assert cluster_map.version == held.map.version + 1
        if not await self._swap(cluster_map, held.written_at):
            raise InvalidArgument(f"{self.url}: somebody else has changed the map just now; nothing was written")

    async def _swap(self, cluster_map: ClusterMap, written_at: int) -> bool:
        key, data = self.url.map_key, encode_map(cluster_map)

        async def swap(client: Any) -> bool:
            as_held = client.transactions.mod(key) == written_at
            swapped, _ = await client.transaction([as_held], [client.transactions.put(key, data)], [])
            return bool(swapped)

        return await self._call(swap)

    async def follow(self, apply: Callable[[ClusterMap], Awaitable[None]]) -> None:
        """Hand the map to `apply` when it was read and whenever it may have changed, for ever; see the module
        docstring. `apply` is called again with what it knows already."""
        retry_ms, reached = ETCD_RETRY_MS, True

        async def seen(cluster_map: ClusterMap) -> None:
            nonlocal retry_ms, reached
            if not reached:
                _LOG.warning("etcd at %s answers again", self.url.server)
            retry_ms, reached = ETCD_RETRY_MS, True
            await apply(cluster_map)

        try:
            while True:
                try:
                    await self._follow(seen)
                except EfsError as error:
                    if reached:
                        _LOG.warning("going on with the last map: %s", error)
                    reached = False
                await self.close()
                await asyncio.sleep(retry_ms / 1000)
                retry_ms = min(2 * retry_ms, MAX_ETCD_RETRY_MS)
        finally:
            await self.close()

    async def _follow(self, apply: Callable[[ClusterMap], Awaitable[None]]) -> None:
        """One watch, until anything fails."""
        held = await self.read()
        await apply(held.map)
        key, after = self.url.map_key, held.read_at + 1
        watch = await self._call(lambda client: client.watch(key, start_revision=after))
        changed = asyncio.Event()
        watching = asyncio.create_task(_note_events(watch, changed), name="watch of a cluster's map")
        try:
            while not watching.done():
                with suppress(TimeoutError):
                    async with asyncio.timeout(ETCD_REREAD_MS / 1000):
                        await changed.wait()
                changed.clear()
                await apply((await self.read()).map)
        finally:
            watching.cancel()
            await asyncio.wait((watching,), timeout=ETCD_CALL_MS / 1000)

    # -- servers

    async def servers(self) -> Mapping[str, ServerNote]:
        """By node id, what servers say whose lease has not ended. A note that cannot be read is left out."""
        prefix = self.url.servers_prefix
        notes: dict[str, ServerNote] = {}
        for found in await self._call(lambda client: client.get_prefix(prefix)):
            try:
                note = decode_note(found.value, str(self.url))
            except EfsError as error:
                _LOG.warning("a server's note cannot be read: %s", error)
                continue
            if found.key == self.url.server_key(note.node_id):
                notes[note.node_id] = note
        return notes

    async def grant(self) -> int:
        """A new lease."""
        return int((await self._call(lambda client: client.lease(ETCD_LEASE_SECONDS))).id)

    async def renew(self, lease: int) -> bool:
        """False when the lease has ended."""
        answer = await self._call(lambda client: client.refresh_lease(lease))
        return answer is not None and answer.TTL > 0

    async def revoke(self, lease: int) -> None:
        await self._call(lambda client: client.revoke_lease(lease))

    async def note(self, note: ServerNote, lease: int) -> None:
        key, data = self.url.server_key(note.node_id), encode_note(note)
        await self._call(lambda client: client.put(key, data, lease=lease))

    async def forget(self, node_id: str) -> None:
        key = self.url.server_key(node_id)
        await self._call(lambda client: client.delete(key))

    # -- inside

    async def _call(self, ask: Callable[[Any], Awaitable[T]]) -> T:
        if self._client is None:
            self._client = _new_client(self.url)
        try:
            async with asyncio.timeout(ETCD_CALL_MS / 1000):
                answer = await ask(self._client)
        except Exception as error:
            await self.close()
            raise EtcdUnavailable(self.url.server, _reason(error)) from error
        _be_cancelled()
        return answer


def _be_cancelled() -> None:
    """Raise the cancellation of this task that the library may have taken for its own: it waits for tasks that it has
    cancelled, and swallows what comes meanwhile. Without this who follows a map could not be stopped any more."""
    task = asyncio.current_task()
    if task is not None and task.cancelling():
        raise asyncio.CancelledError


async def _note_events(watch: Any, changed: asyncio.Event) -> None:
    """Set `changed` at each event, and when the watch has ended for whatever reason."""
    try:
        async for _ in watch:
            changed.set()
    except Exception as error:
        _LOG.debug("a watch ended: %s", error)
    finally:
        changed.set()


def _new_client(url: EtcdUrl) -> Any:
    try:
        import aetcd
    except ImportError as error:
        raise InvalidArgument(f"{url}: etcd needs the package aetcd: in a clone, pip install '.[etcd]'") from error
    return aetcd.Client(url.host, url.port, timeout=ETCD_CALL_MS / 1000, options=_OPTIONS)


def _reason(error: Exception) -> str:
    kind = type(error).__name__
    if kind == "ConnectionFailedError":
        return "it cannot be reached"
    if isinstance(error, TimeoutError) or kind in ("ConnectionTimeoutError", "WatchTimeoutError"):
        return "it does not answer"
    return " ".join(f"{kind}: {error}".split())[:200]


class Registration:
    """Says in etcd which nodes this process serves; see the module docstring. `run` in the background."""

    def __init__(self, url: EtcdUrl, served: Sequence[Served], addresses: Sequence[str], clock: Clock) -> None:
        """served: looked at anew each time, because a spare becomes a node."""
        self._store = EtcdStore(url)
        self._served = served
        self._addresses = tuple(addresses)
        self._clock = clock
        self._strange: set[str] = set()
        """Nodes of which was said already that the map does not name them."""

    async def run(self) -> None:
        """Until it is cancelled; then the lease is given back if etcd answers."""
        retry_ms, reached = ETCD_RETRY_MS, True
        try:
            while True:
                try:
                    await self._hold()
                    retry_ms, reached = ETCD_RETRY_MS, True
                except EfsError as error:
                    if reached:
                        _LOG.warning("serving without a lease: %s", error)
                    reached = False
                await asyncio.sleep(retry_ms / 1000)
                retry_ms = min(2 * retry_ms, MAX_ETCD_RETRY_MS)
        finally:
            await self._store.close()

    async def _hold(self) -> None:
        """One lease, until it has ended."""
        lease = await self._store.grant()
        told: dict[str, ServerNote] = {}
        try:
            while True:
                found = (await self._store.read()).map
                places = found.places
                named = {(place.node_id, number % STRIPE_SHARDS) for number, place in enumerate(places)}
                named |= {(spare.node_id, NO_PLACE) for spare in found.spares}
                for served in list(self._served):
                    if isinstance(served, ServedNode) and served.cluster_id == found.cluster_id:
                        served.map_seen.told(found.version)
                    await self._tell(served, (served.node_id, served.node_index) in named, told, lease)
                await asyncio.sleep(ETCD_BEAT_MS / 1000)
                if not await self._store.renew(lease):
                    return
        except asyncio.CancelledError:
            with suppress(EtcdUnavailable):
                await self._store.revoke(lease)
            raise

    async def _tell(self, served: Served, in_map: bool, told: dict[str, ServerNote], lease: int) -> None:
        node_id, index = served.node_id, served.node_index
        if not in_map:
            if node_id not in self._strange and isinstance(served, ServedSpare):
                _LOG.warning("the map lists no spare %s", node_id)
            elif node_id not in self._strange:
                _LOG.warning("the map names another node %d than %s: clients do not come", index, node_id)
            self._strange.add(node_id)
            if told.pop(node_id, None) is not None:
                await self._store.forget(node_id)
            return
        try:
            state = ("spare" if isinstance(served, ServedSpare)
                     else (await served.node.info(Deadline.after_ms(self._clock, INFO_DEADLINE_MS))).state)
        except EfsError as error:
            _LOG.info("node %d does not say how it is: %s", index, error)
            state = "suspect"
        note = ServerNote(node_id, index, self._addresses, state)
        if told.get(node_id) != note:
            await self._store.note(note, lease)
            told[node_id] = note
