"""The map of a cluster as it stands in etcd, and what servers leave beside it. Pure: no I/O. Format version 1.

Everything of the cluster NAME has a key below /NAME/:

    /NAME/map               the map, one JSON document, as below; persistent
    /NAME/servers/NODE_ID   one JSON document of each node that is being served, under its server's lease

    {"format_version": 1, "version": 3,
     "cluster_id": "32 hex digits", "durability": "process" or "power",
     "root": "/absolute/path", "upkeep_host": "name" or null,
     "token_file": "/path" or null, "operator_token_file": "/path" or null,
     "node_capacity_bytes": …, "extent_bytes": …,                          what a node is made with
     "groups": [{"places": [{"node_id": …, "address": …, "incarnation": 1}, … twelve in the order of their index]}]}

*The map* is changed by an operator's command only. Each change raises `version` by one and is written only if the
document is still the one that was read, so that of two changes at once one is refused. `incarnation` counts the nodes
that a place has had; each has an id of its own. Clients ask a server for the id that the map names, so that a server
of an earlier incarnation is refused wherever it turns up. There is one group: the filesystem has no more.

*Paths* of the root and of token files are as each client's machine has them, and tokens never stand in etcd. The root
is where the tenants file is looked for, and on `upkeep_host` the lock and the notes of who looks after the store.

*Servers* say where they listen and how they are, for as long as they hold their lease. That a lease ended makes a
server suspect to whoever looks; it changes no map and no client's mind (docs/decisions/0011).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from efs.cluster import Durability
from efs.clusterfile import ClusterConfig, require_members
from efs.endpoint import parse_endpoint
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument
from efs.limits import ETCD_DOCUMENT_BYTES, STRIPE_SHARDS

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
    """One of the twelve places: who is there, at which address, and the how many-th it is."""

    node_id: str
    address: str
    incarnation: int


@dataclass(frozen=True, slots=True)
class ClusterMap:
    """See the module docstring."""

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

    def __post_init__(self) -> None:
        if len(self.places) != STRIPE_SHARDS:
            raise InvalidArgument(f"{len(self.places)} places, expected {STRIPE_SHARDS}")
        require_members(self.cluster_id, [place.node_id for place in self.places])
        for path in (self.root, self.token_file, self.operator_token_file):
            if path is not None and (not os.path.isabs(path) or "\0" in path):
                raise InvalidArgument(f"the path {path!r} must be absolute")
        for place in self.places:
            if (endpoint := parse_endpoint(place.address)).path is not None and not os.path.isabs(endpoint.path):
                raise InvalidArgument(f"the address {place.address!r} must have an absolute path")
        numbers = (self.version, self.node_capacity_bytes, self.extent_bytes,
                   *(place.incarnation for place in self.places))
        if not all(1 <= number <= _MOST for number in numbers):
            raise InvalidArgument("a version, size or incarnation is below 1 or too large")

    def config(self) -> ClusterConfig:
        """The map as what clients connect to."""
        return ClusterConfig(self.cluster_id, self.durability, tuple(place.node_id for place in self.places),
                             tuple(parse_endpoint(place.address) for place in self.places), self.upkeep_host,
                             self.token_file, self.operator_token_file)

    def with_node(self, node_index: int, address: str, node_id: str) -> ClusterMap:
        """The next version, with another node in a place: its next incarnation."""
        old = self._place(node_index)
        return self._with(node_index, MapPlace(node_id, address, old.incarnation + 1))

    def with_address(self, node_index: int, address: str) -> ClusterMap:
        """The next version, with the same node at another address."""
        return self._with(node_index, replace(self._place(node_index), address=address))

    def _place(self, node_index: int) -> MapPlace:
        if not 0 <= node_index < STRIPE_SHARDS:
            raise InvalidArgument(f"no node has index {node_index}, must be 0 to {STRIPE_SHARDS - 1}")
        return self.places[node_index]

    def _with(self, node_index: int, place: MapPlace) -> ClusterMap:
        places = (*self.places[:node_index], place, *self.places[node_index + 1 :])
        return replace(self, places=places, version=self.version + 1)


@dataclass(frozen=True, slots=True)
class ServerNote:
    """What a server says of a node that it serves: the addresses at which it listens, and the node's state."""

    node_id: str
    node_index: int
    addresses: tuple[str, ...]
    state: str


# -- Documents ------------------------------------------------------------------------------------------------------


class _Group(msgspec.Struct, forbid_unknown_fields=True):
    places: list[MapPlace]


class _Map(msgspec.Struct, forbid_unknown_fields=True):
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


class _Format(msgspec.Struct):
    format_version: int


def encode_map(cluster_map: ClusterMap) -> bytes:
    """The document of a map, of one line for each place, so that a person can read it with any etcd client."""
    values = cluster_map
    document = _Map(MAP_FORMAT_VERSION, values.version, values.cluster_id, values.durability, values.root,
                    values.upkeep_host, values.token_file, values.operator_token_file, values.node_capacity_bytes,
                    values.extent_bytes, [_Group(list(values.places))])
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
        if len(document.groups) != 1:
            raise InvalidArgument(f"{len(document.groups)} groups, this program knows one")
        return ClusterMap(document.version, document.cluster_id, document.durability, document.root,
                          document.node_capacity_bytes, document.extent_bytes, tuple(document.groups[0].places),
                          document.upkeep_host, document.token_file, document.operator_token_file)
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


def may_follow(held: ClusterMap, found: ClusterMap) -> str | None:
    """Why a client that goes by `held` must not go over to `found`; None when it may."""
    if found.cluster_id != held.cluster_id:
        return f"it is of cluster {found.cluster_id}, this is {held.cluster_id}"
    if found.durability != held.durability:
        return f"its durability is {found.durability}, the store was opened with {held.durability}"
    if found.version < held.version:
        return f"its version is {found.version}, and {held.version} was seen already"
    return None


def changed_places(held: ClusterMap, found: ClusterMap) -> list[int]:
    """Indices of the places where there is another node, or the same one elsewhere."""
    return [index for index, (old, new) in enumerate(zip(held.places, found.places, strict=True)) if old != new]
