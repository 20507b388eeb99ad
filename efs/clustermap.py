"""The map of a cluster as it stands in etcd, and what servers leave beside it. Pure: no I/O. Format version 1.

Everything of the cluster NAME has a key below /NAME/:

    /NAME/map               the map, one JSON document, as below; persistent
    /NAME/servers/NODE_ID   one JSON document of each node that is being served, under its server's lease

    {"format_version": 1, "version": 3,
     "cluster_id": "32 hex digits", "durability": "process" or "power",
     "root": "/absolute/path", "upkeep_host": "name" or null,
     "token_file": "/path" or null, "operator_token_file": "/path" or null,
     "node_capacity_bytes": …, "extent_bytes": …,                          what a node is made with
     "retention_seconds": …,                                               left out where it is the default
     "groups": [{"places": [{"node_id": …, "address": …, "incarnation": 1, "drain": false}, … twelve in order],
                 "added_at": seconds since 1970, left out for the first group}, …],
     "spares": [{"node_id": …, "address": …}, …]}                          left out where there is none

*The map* is changed by an operator's command only. Each change raises `version` by one and is written only if the
document is still the one that was read, so that of two changes at once one is refused. `incarnation` counts the nodes
that a place has had; each has an id of its own. Clients ask a server for the id that the map names, so that a server
of an earlier incarnation is refused wherever it turns up. Groups are added at the end and never removed
(`efs/ownership.py`); node n of the cluster is place n mod 12 of group n div 12. A spare is a node in no place; one
change takes it out of the list and puts it into a place.

*Paths* of the root and of token files are as each client's machine has them, and tokens never stand in etcd. The root
is where the tenants file is looked for, and on `upkeep_host` the lock and the notes of who looks after the store.

*Servers* say where they listen and how they are, for as long as they hold their lease. That a lease ended makes a
server suspect to whoever looks; it changes no map and no client's mind (docs/decisions/0011).
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import msgspec

from efs.cluster import Durability
from efs.clusterfile import (
    ClusterConfig,
    Spare,
    require_drainable,
    require_members,
    require_number,
    require_spare,
    require_spares,
)
from efs.endpoint import parse_endpoint
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument
from efs.limits import ETCD_DOCUMENT_BYTES, GROUP_RETENTION_SECONDS, STRIPE_SHARDS
from efs.ownership import Ownership

MAP_FORMAT_VERSION: Final = 1
ETCD_SCHEME: Final = "etcd://"
_URL: Final = re.compile(r"etcd://(\[[0-9A-Fa-f:.]+\]|[^:\[\]/@?#\s]+):([0-9]{1,5})/([A-Za-z0-9][A-Za-z0-9._-]{0,127})")
_MOST: Final = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class EtcdUrl:
    """Where a cluster's map is: an etcd server and the name of the cluster there."""

    host: str
    port: int
    name: str

    def __str__(self) -> str:
        return f"{ETCD_SCHEME}{self.host}:{self.port}/{self.name}"

    @property
    def server(self) -> str:
        """The etcd server, for messages."""
        return f"{self.host}:{self.port}"

    @property
    def map_key(self) -> bytes:
        return f"/{self.name}/map".encode()

    @property
    def servers_prefix(self) -> bytes:
        return f"/{self.name}/servers/".encode()

    def server_key(self, node_id: str) -> bytes:
        return self.servers_prefix + node_id.encode()


def parse_etcd_url(text: str) -> EtcdUrl:
    """InvalidArgument says how such a URL is written."""
    match = _URL.fullmatch(text)
    if match is None or not 0 < int(match[2]) <= 65_535:
        raise InvalidArgument(f"{text}: must be etcd://HOST:PORT/NAME, such as etcd://127.0.0.1:2379/prod")
    return EtcdUrl(match[1], int(match[2]), match[3])


@dataclass(frozen=True, slots=True)
class MapPlace:
    """A place of a group: who is there, at which address, the how many-th it is, and whether it gets nothing new."""

    node_id: str
    address: str
    incarnation: int
    drain: bool = False


@dataclass(frozen=True, slots=True)
class MapSpare:
    """A node in no place: who it is, and at which address."""

    node_id: str
    address: str


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """See the module docstring. places: of all groups, twelve each, in order."""

    version: int
    cluster_id: str
    durability: Durability
    root: str
    node_capacity_bytes: int
    extent_bytes: int
    places: tuple[MapPlace, ...]
    upkeep_host: str | None = None
    token_file: str | None = None
    operator_token_file: str | None = None
    ownership: Ownership = field(default_factory=Ownership)
    spares: tuple[MapSpare, ...] = ()

    def __post_init__(self) -> None:
        node_ids = [place.node_id for place in self.places]
        require_members(self.cluster_id, node_ids, self.ownership.groups)
        require_spares(node_ids, [spare.node_id for spare in self.spares])
        require_drainable(self.draining)
        for path in (self.root, self.token_file, self.operator_token_file):
            if path is not None and (not os.path.isabs(path) or "\0" in path):
                raise InvalidArgument(f"the path {path!r} must be absolute")
        for address in [*(place.address for place in self.places), *(spare.address for spare in self.spares)]:
            if (endpoint := parse_endpoint(address)).path is not None and not os.path.isabs(endpoint.path):
                raise InvalidArgument(f"the address {address!r} must have an absolute path")
        numbers = (self.version, self.node_capacity_bytes, self.extent_bytes,
                   *(place.incarnation for place in self.places))
        if not all(1 <= number <= _MOST for number in numbers):
            raise InvalidArgument("a version, size or incarnation is below 1 or too large")

    @property
    def draining(self) -> frozenset[int]:
        """Numbers of the nodes that get nothing new."""
        return frozenset(number for number, place in enumerate(self.places) if place.drain)

    def config(self) -> ClusterConfig:
        """The map as what clients connect to."""
        return ClusterConfig(self.cluster_id, self.durability, tuple(place.node_id for place in self.places),
                             tuple(parse_endpoint(place.address) for place in self.places), self.upkeep_host,
                             self.token_file, self.operator_token_file, self.version, self.ownership,
                             self.draining, tuple(place.incarnation for place in self.places),
                             tuple(Spare(spare.node_id, parse_endpoint(spare.address)) for spare in self.spares))

    def with_group(self, nodes: Sequence[tuple[str, str]], now: float) -> ClusterMap:
        """The next version, with one more group of twelve (id, address) nodes, added now."""
        added_at = max(int(now), self.ownership.added_at[-1])
        ownership = replace(self.ownership, added_at=(*self.ownership.added_at, added_at))
        return replace(self, version=self.version + 1, ownership=ownership,
                       places=(*self.places, *(MapPlace(node_id, address, 1) for node_id, address in nodes)))

    def with_node(self, node_index: int, address: str, node_id: str) -> ClusterMap:
        """The next version, with another node in a place: its next incarnation."""
        old = self._place(node_index)
        return self._with(node_index, MapPlace(node_id, address, old.incarnation + 1))

    def with_address(self, node_index: int, address: str) -> ClusterMap:
        """The next version, with the same node at another address."""
        return self._with(node_index, replace(self._place(node_index), address=address))

    def with_drain(self, node_index: int, drain: bool) -> ClusterMap:
        """The next version, with a node drained or not any more."""
        return self._with(node_index, replace(self._place(node_index), drain=drain))

    def with_spare(self, node_id: str, address: str) -> ClusterMap:
        """The next version, with one more spare."""
        return replace(self, version=self.version + 1, spares=(*self.spares, MapSpare(node_id, address)))

    def without_spare(self, node_id: str) -> ClusterMap:
        """The next version, without a spare."""
        require_spare(node_id, [spare.node_id for spare in self.spares])
        return replace(self, version=self.version + 1,
                       spares=tuple(spare for spare in self.spares if spare.node_id != node_id))

    def with_spare_placed(self, node_index: int, node_id: str) -> ClusterMap:
        """The next version, with a spare in a place instead of the node there: the place's next incarnation."""
        left = self.without_spare(node_id)
        spare = next(spare for spare in self.spares if spare.node_id == node_id)
        placed = MapPlace(node_id, spare.address, self._place(node_index).incarnation + 1)
        return replace(self, version=left.version, spares=left.spares, places=self._places_with(node_index, placed))

    def _place(self, node_index: int) -> MapPlace:
        require_number(node_index, len(self.places))
        return self.places[node_index]

    def _with(self, node_index: int, place: MapPlace) -> ClusterMap:
        return replace(self, places=self._places_with(node_index, place), version=self.version + 1)

    def _places_with(self, node_index: int, place: MapPlace) -> tuple[MapPlace, ...]:
        return (*self.places[:node_index], place, *self.places[node_index + 1 :])


@dataclass(frozen=True, slots=True)
class ServerNote:
    """What a server says of a node that it serves: the addresses at which it listens, and the node's state. Of a spare
    the index is NO_PLACE and the state "spare"."""

    node_id: str
    node_index: int
    addresses: tuple[str, ...]
    state: str


# -- Documents ------------------------------------------------------------------------------------------------------


class _Group(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    places: list[MapPlace]
    added_at: int = 0


class _Map(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    format_version: int
    version: int
    cluster_id: str
    durability: Durability
    root: str
    upkeep_host: str | None
    token_file: str | None
    operator_token_file: str | None
    node_capacity_bytes: int
    extent_bytes: int
    groups: list[_Group]
    retention_seconds: int = GROUP_RETENTION_SECONDS
    spares: list[MapSpare] = []


class _Format(msgspec.Struct):
    format_version: int


def encode_map(cluster_map: ClusterMap) -> bytes:
    """The document of a map, of one line for each place, so that a person can read it with any etcd client."""
    values = cluster_map
    groups = [_Group(list(values.places[STRIPE_SHARDS * group : STRIPE_SHARDS * (group + 1)]), added_at)
              for group, added_at in enumerate(values.ownership.added_at)]
    document = _Map(MAP_FORMAT_VERSION, values.version, values.cluster_id, values.durability, values.root,
                    values.upkeep_host, values.token_file, values.operator_token_file, values.node_capacity_bytes,
                    values.extent_bytes, groups, values.ownership.retention_seconds, list(values.spares))
    data = msgspec.json.format(msgspec.json.encode(document), indent=1)
    assert len(data) <= ETCD_DOCUMENT_BYTES
    return data


def decode_map(data: bytes, where: str) -> ClusterMap:
    """CorruptRecord and FormatUnsupported name `where` it came from."""
    try:
        _require_size(data)
        version = msgspec.json.decode(data, type=_Format).format_version
        if version != MAP_FORMAT_VERSION:
            raise FormatUnsupported(where, version, MAP_FORMAT_VERSION)
        document = msgspec.json.decode(data, type=_Map)
        sizes = {len(group.places) for group in document.groups}
        if sizes != {STRIPE_SHARDS}:
            found = ", ".join(str(len(group.places)) for group in document.groups)
            raise InvalidArgument(f"{len(document.groups)} groups of {found or 0} places, each must have "
                                  f"{STRIPE_SHARDS}")
        ownership = Ownership(tuple(group.added_at for group in document.groups), document.retention_seconds)
        places = tuple(place for group in document.groups for place in group.places)
        return ClusterMap(document.version, document.cluster_id, document.durability, document.root,
                          document.node_capacity_bytes, document.extent_bytes, places, document.upkeep_host,
                          document.token_file, document.operator_token_file, ownership, tuple(document.spares))
    except (msgspec.DecodeError, InvalidArgument, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"{where}: {error}") from error


def encode_note(note: ServerNote) -> bytes:
    data = msgspec.json.encode(note)
    assert len(data) <= ETCD_DOCUMENT_BYTES
    return data


def decode_note(data: bytes, where: str) -> ServerNote:
    """CorruptRecord names `where` it came from."""
    try:
        _require_size(data)
        return msgspec.json.decode(data, type=ServerNote)
    except (msgspec.DecodeError, InvalidArgument, UnicodeDecodeError, RecursionError) as error:
        raise CorruptRecord(f"{where}: {error}") from error


def _require_size(data: bytes) -> None:
    if len(data) > ETCD_DOCUMENT_BYTES:
        raise InvalidArgument(f"a document of {len(data)} bytes, at most {ETCD_DOCUMENT_BYTES}")


# -- Changes --------------------------------------------------------------------------------------------------------


def may_follow(held: ClusterConfig, found: ClusterConfig) -> str | None:
    """Why a client that goes by `held` must not go over to `found`; None when it may."""
    if found.cluster_id != held.cluster_id:
        return f"it is of cluster {found.cluster_id}, this is {held.cluster_id}"
    if found.durability != held.durability:
        return f"its durability is {found.durability}, the store was opened with {held.durability}"
    if found.version < held.version:
        return f"its version is {found.version}, and {held.version} was seen already"
    if found.ownership.added_at[: held.ownership.groups] != held.ownership.added_at:
        return "it lacks groups that were there"
    return None


def changed_places(held: ClusterConfig, found: ClusterConfig) -> list[int]:
    """Numbers of the places of `held` where there is another node, or the same one elsewhere."""
    places = zip(held.node_ids, held.endpoints, found.node_ids, found.endpoints, strict=False)
    return [index for index, (old_id, old, new_id, new) in enumerate(places) if (old_id, old) != (new_id, new)]
