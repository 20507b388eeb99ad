"""cluster.toml: which nodes make a store, and at which addresses their servers are. Format version 1.

    format_version = 1
    cluster_id = "32 hex digits"
    durability = "process" or "power"      what an acknowledgement promises; every server must promise the same
    upkeep_host = "name"                   optional: the machine on which a client looks after the store
    token_file = "path"                    optional: the token that servers ask clients for
    operator_token_file = "path"           optional: the token of operators, where servers have one of their own for
                                           them; who looks after the store needs it, all other clients do not
    version = 2                            optional, 1: rises with each change that clients must not mix up
    groups_added = [1764484800]            optional: when each EC group but the first was added, seconds since 1970
    retention_seconds = 604800             optional: how long look-ups go to earlier owners after that

    [[node]]                               twelve times for each EC group, in the order of their index
    id = "32 hex digits"
    address = "unix:PATH" or "tcp:HOST:PORT"
    drain = true                           optional: nothing new goes to it; at most one in a group
    incarnation = 2                        optional, 1: how many nodes the place has had, with this one

    [[spare]]                              optional: a node in no place, ready to be given one
    id = "32 hex digits"
    address = "unix:PATH" or "tcp:HOST:PORT"

Relative paths begin at the file's directory, in which the tenants file stands too. Several nodes may have one address.
A field that is not listed here is refused: a misspelt token file must not mean that there is none.

Nodes of a cluster are numbered through: node n is node n mod 12 of group n div 12.

Whoever changes the file has its directory locked while it reads and writes it, and is refused while somebody else has.
A change that was thought out before says what the file said then, and is refused when it says something else by now:
so a spare is given to one place only. Adding and removing spares leaves `version` alone, because it is nothing to
clients.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Final

import msgspec

from efs.cluster import DURABILITIES, MOST_FILE_BYTES, Durability
from efs.dirlock import locked_directory
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument, OpenFailed, StoreNotFound
from efs.limits import ACK_SHARDS, FORMAT_VERSION, GROUP_RETENTION_SECONDS, MAX_CLUSTER_SPARES, STRIPE_SHARDS
from efs.nodedir import ID_HEX_DIGITS, parse_toml
from efs.osio import Io, read_file, replace_file
from efs.ownership import Ownership

CLUSTER_FILE: Final = "cluster.toml"


@dataclass(frozen=True, slots=True)
class Spare:
    """A node in no place: its id, and where its server is."""

    node_id: str
    endpoint: Endpoint


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What cluster.toml says, paths joined to its directory, or a map in etcd. Node n, numbered through all groups,
    has id `node_ids[n]` at `endpoints[n]`."""

    cluster_id: str
    durability: Durability
    node_ids: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]
    upkeep_host: str | None = None
    token_file: str | None = None
    operator_token_file: str | None = None
    version: int = 1
    ownership: Ownership = field(default_factory=Ownership)
    draining: frozenset[int] = frozenset()
    """Numbers of the nodes that get nothing new."""
    incarnations: tuple[int, ...] = ()
    """How many nodes each place has had; by number, as the ids."""
    spares: tuple[Spare, ...] = ()

    def __post_init__(self) -> None:
        require_members(self.cluster_id, self.node_ids, self.ownership.groups)
        require_spares(self.node_ids, [spare.node_id for spare in self.spares])
        require_drainable(self.draining)

    def of_group(self, group: int) -> Sequence[tuple[str, Endpoint]]:
        """Id and address of the twelve nodes of a group."""
        some = slice(STRIPE_SHARDS * group, STRIPE_SHARDS * (group + 1))
        return list(zip(self.node_ids[some], self.endpoints[some], strict=True))


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    address: str
    drain: bool = False
    incarnation: int = 1


class _Spare(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    address: str


class _File(msgspec.Struct, forbid_unknown_fields=True):
    format_version: int
    cluster_id: str
    durability: Durability
    node: list[_Node]
    upkeep_host: str | None = None
    token_file: str | None = None
    operator_token_file: str | None = None
    version: int = 1
    groups_added: list[int] = []
    retention_seconds: int = GROUP_RETENTION_SECONDS
    spare: list[_Spare] = []


def read_cluster(io: Io, path: str) -> ClusterConfig:
    """StoreNotFound when there is no such file; OpenFailed, FormatUnsupported or CorruptRecord, naming it, when it
    cannot be used."""
    return _read(io, path)[1]


def _read(io: Io, path: str) -> tuple[_File, ClusterConfig]:
    try:
        data = read_file(io, path, MOST_FILE_BYTES)
    except FileNotFoundError as error:
        raise StoreNotFound(path, "there is no such file") from error
    except OSError as error:
        raise OpenFailed(path, error) from error
    values = parse_toml(path, data)
    if values.get("format_version") != FORMAT_VERSION:
        raise FormatUnsupported(path, values.get("format_version"), FORMAT_VERSION)
    try:
        file = msgspec.convert(values, _File)
        return file, _checked(file, os.path.dirname(os.path.abspath(path)))
    except (msgspec.ValidationError, InvalidArgument) as error:
        raise CorruptRecord(f"{path}: {error}") from error


def _checked(file: _File, base: str) -> ClusterConfig:
    if file.version < 1:
        raise InvalidArgument(f"version is {file.version}, must be 1 at least")
    if (least := min((node.incarnation for node in file.node), default=1)) < 1:
        raise InvalidArgument(f"an incarnation is {least}, must be 1 at least")
    token, operator_token = (None if name is None else os.path.join(base, name)
                             for name in (file.token_file, file.operator_token_file))
    return ClusterConfig(file.cluster_id, file.durability, tuple(node.id for node in file.node),
                         tuple(parse_endpoint(node.address, base) for node in file.node), file.upkeep_host, token,
                         operator_token, file.version, Ownership((0, *file.groups_added), file.retention_seconds),
                         frozenset(number for number, node in enumerate(file.node) if node.drain),
                         tuple(node.incarnation for node in file.node),
                         tuple(Spare(spare.id, parse_endpoint(spare.address, base)) for spare in file.spare))


def require_members(cluster_id: str, node_ids: Sequence[str], groups: int) -> None:
    """InvalidArgument unless these are ids, no node's twice, and twelve for each group."""
    for name in (cluster_id, *node_ids):
        if len(name) != ID_HEX_DIGITS or set(name) - set("0123456789abcdef"):
            raise InvalidArgument(f"the id {name!r} must be {ID_HEX_DIGITS} hex digits")
    if len(set(node_ids)) != len(node_ids):
        raise InvalidArgument("a node is named twice")
    if len(node_ids) != groups * STRIPE_SHARDS:
        of = "" if groups == 1 else f" for {groups} groups"
        raise InvalidArgument(f"{len(node_ids)} nodes, expected {groups * STRIPE_SHARDS}{of}")


def require_spares(node_ids: Sequence[str], spare_ids: Sequence[str]) -> None:
    """InvalidArgument unless these are ids, none of them that of a node or another spare, and not too many."""
    for name in spare_ids:
        if len(name) != ID_HEX_DIGITS or set(name) - set("0123456789abcdef"):
            raise InvalidArgument(f"the id {name!r} of a spare must be {ID_HEX_DIGITS} hex digits")
    if len({*node_ids, *spare_ids}) != len(node_ids) + len(spare_ids):
        raise InvalidArgument("a spare is named twice, or is a node too")
    if len(spare_ids) > MAX_CLUSTER_SPARES:
        raise InvalidArgument(f"{len(spare_ids)} spares, at most {MAX_CLUSTER_SPARES}")


def require_drainable(draining: Collection[int]) -> None:
    """InvalidArgument for more nodes of a group than puts can go without."""
    for group in sorted({number // STRIPE_SHARDS for number in draining}):
        mine = sorted(number for number in draining if number // STRIPE_SHARDS == group)
        if len(mine) > STRIPE_SHARDS - ACK_SHARDS:
            raise InvalidArgument(f"nodes {', '.join(map(str, mine))} of group {group} are to be drained, puts can go "
                                  f"without {STRIPE_SHARDS - ACK_SHARDS}")


def write_cluster(io: Io, root: str, cluster_id: str, durability: Durability, node_ids: Sequence[str],
                  addresses: Sequence[str], *, upkeep_host: str | None, token_file: str | None,
                  operator_token_file: str | None = None) -> str:
    """Write ROOT/cluster.toml; returns its path. Addresses as they are to stand in it. OpenFailed names the path."""
    assert durability in DURABILITIES
    nodes = [_Node(node_id, address) for node_id, address in zip(node_ids, addresses, strict=True)]
    path = os.path.join(root, CLUSTER_FILE)
    _write(io, path, _File(FORMAT_VERSION, cluster_id, durability, nodes, upkeep_host, token_file,
                            operator_token_file))
    return path


# -- Changes --------------------------------------------------------------------------------------------------------


def add_group(io: Io, path: str, held: ClusterConfig, node_ids: Sequence[str], addresses: Sequence[str],
              now: float) -> ClusterConfig:
    """Write cluster.toml anew with one more group, its next version; comments in it are lost.

    held: what it is taken to say. InvalidArgument when it says something else by now, or is being changed, and for
    what can be no group; else as `read_cluster`; then nothing was written."""
    added = max(int(now), held.ownership.added_at[-1])
    nodes = [_Node(node_id, address) for node_id, address in zip(node_ids, addresses, strict=True)]
    return _change(io, path, held, lambda file: msgspec.structs.replace(
        file, version=file.version + 1, groups_added=[*file.groups_added, added], node=[*file.node, *nodes]))


def set_drain(io: Io, path: str, held: ClusterConfig, number: int, drain: bool) -> ClusterConfig:
    """Write cluster.toml anew, its next version, with a node drained or not any more. Errors as `add_group`."""
    return _change(io, path, held, lambda file: _with_node(
        file, number, msgspec.structs.replace(file.node[number], drain=drain)))


def add_spare(io: Io, path: str, held: ClusterConfig, node_id: str, address: str) -> ClusterConfig:
    """Write cluster.toml anew with one more spare. Errors as `add_group`."""
    return _change(io, path, held,
                   lambda file: msgspec.structs.replace(file, spare=[*file.spare, _Spare(node_id, address)]))


def remove_spare(io: Io, path: str, held: ClusterConfig, node_id: str) -> ClusterConfig:
    """Write cluster.toml anew without a spare. Errors as `add_group`."""
    require_spare(node_id, [spare.node_id for spare in held.spares])
    return _change(io, path, held, lambda file: _without_spare(file, node_id))


def place_spare(io: Io, path: str, held: ClusterConfig, number: int, node_id: str) -> ClusterConfig:
    """Write cluster.toml anew, its next version, with a spare in a place instead of the node there: the place's next
    incarnation. Errors as `add_group`."""
    require_number(number, len(held.node_ids))
    require_spare(node_id, [spare.node_id for spare in held.spares])

    def placed(file: _File) -> _File:
        spare = next(spare for spare in file.spare if spare.id == node_id)
        node = _Node(node_id, spare.address, incarnation=file.node[number].incarnation + 1)
        return _with_node(_without_spare(file, node_id), number, node)

    return _change(io, path, held, placed)


def replace_node(io: Io, path: str, held: ClusterConfig, number: int, node_id: str) -> ClusterConfig:
    """Write cluster.toml anew, its next version, with another node in a place, at the address of the one before: the
    place's next incarnation. Errors as `add_group`."""
    require_number(number, len(held.node_ids))
    return _change(io, path, held, lambda file: _with_node(
        file, number, _Node(node_id, file.node[number].address, incarnation=file.node[number].incarnation + 1)))


def require_number(number: int, nodes: int) -> None:
    """InvalidArgument unless there is a node of this number."""
    if not 0 <= number < nodes:
        raise InvalidArgument(f"no node has index {number}, must be 0 to {nodes - 1}")


def require_spare(node_id: str, spare_ids: Collection[str]) -> None:
    """InvalidArgument unless there is a spare of this id."""
    if node_id not in spare_ids:
        raise InvalidArgument(f"the cluster has no spare {node_id}")


def _with_node(file: _File, number: int, node: _Node) -> _File:
    nodes = [*file.node[:number], node, *file.node[number + 1 :]]
    return msgspec.structs.replace(file, version=file.version + 1, node=nodes)


def _without_spare(file: _File, node_id: str) -> _File:
    return msgspec.structs.replace(file, spare=[spare for spare in file.spare if spare.id != node_id])


def _change(io: Io, path: str, held: ClusterConfig, change: Callable[[_File], _File]) -> ClusterConfig:
    root = os.path.dirname(os.path.abspath(path))
    with _locked(io, root, path):
        file, found = _read(io, path)
        if found != held:
            raise InvalidArgument(f"{path}: somebody else has changed it just now; nothing was written")
        wanted = change(file)
        config = _checked(wanted, root)
        _write(io, path, wanted)
    return config


def _locked(io: Io, directory: str, path: str) -> AbstractContextManager[None]:
    """Nobody else changes the file meanwhile."""
    busy = InvalidArgument(f"{path}: somebody else is changing it just now; nothing was written")
    return locked_directory(io, directory, lambda error: OpenFailed(directory, error), busy)


def _write(io: Io, path: str, file: _File) -> None:
    root = os.path.dirname(os.path.abspath(path))
    _checked(file, root)
    lines = [f"format_version = {file.format_version}", f'cluster_id = "{file.cluster_id}"',
             f'durability = "{file.durability}"']
    for name in ("upkeep_host", "token_file", "operator_token_file"):
        if (value := getattr(file, name)) is not None:
            lines.append(f"{name} = {_quoted(value)}")
    if file.version != 1:
        lines.append(f"version = {file.version}")
    if file.groups_added:
        lines.append(f"groups_added = {file.groups_added}")
    if file.retention_seconds != GROUP_RETENTION_SECONDS:
        lines.append(f"retention_seconds = {file.retention_seconds}")
    for node in file.node:
        lines += ["", "[[node]]", f'id = "{node.id}"', f"address = {_quoted(node.address)}"]
        if node.drain:
            lines.append("drain = true")
        if node.incarnation != 1:
            lines.append(f"incarnation = {node.incarnation}")
    for spare in file.spare:
        lines += ["", "[[spare]]", f'id = "{spare.id}"', f"address = {_quoted(spare.address)}"]
    try:
        replace_file(io, root, os.path.basename(path), ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise OpenFailed(path, error) from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
