"""cluster.toml: which nodes make a store, and at which addresses their servers are. Format version 1.

    format_version = 1
    cluster_id = "32 hex digits"
    durability = "process" or "power"      what an acknowledgement promises; every server must promise the same
    upkeep_host = "name"                   optional: the machine on which a client looks after the store
    token_file = "path"                    optional: the token that servers ask clients for
    operator_token_file = "path"           optional: the token of operators, where they have one of their own
    version = 2                            optional, 1: rises with each change that clients must not mix up
    groups_added = [1764484800]            optional: when each EC group but the first was added, seconds since 1970
    retention_seconds = 604800             optional: how long look-ups go to earlier owners after that

    [[node]]                               twelve times for each EC group, in the order of their index
    id = "32 hex digits"
    address = "unix:PATH" or "tcp:HOST:PORT"
    drain = true                           optional: nothing new goes to it; at most one in a group

Relative paths begin at the file's directory, in which the tenants file stands too. Several nodes may have one address.
A field that is not listed here is refused: a misspelt token file must not mean that there is none.

Nodes of a cluster are numbered through: node n is node n mod 12 of group n div 12.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from efs.cluster import DURABILITIES, MOST_FILE_BYTES, Durability
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument, OpenFailed, StoreNotFound
from efs.limits import ACK_SHARDS, FORMAT_VERSION, GROUP_RETENTION_SECONDS, STRIPE_SHARDS
from efs.nodedir import ID_HEX_DIGITS
from efs.osio import Io, read_file, replace_file
from efs.ownership import Ownership

CLUSTER_FILE: Final = "cluster.toml"


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

    def __post_init__(self) -> None:
        require_members(self.cluster_id, self.node_ids, self.ownership.groups)
        require_drainable(self.draining)

    def of_group(self, group: int) -> Sequence[tuple[str, Endpoint]]:
        """Id and address of the twelve nodes of a group."""
        some = slice(STRIPE_SHARDS * group, STRIPE_SHARDS * (group + 1))
        return list(zip(self.node_ids[some], self.endpoints[some], strict=True))


class _Node(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    address: str
    drain: bool = False


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


def read_cluster(io: Io, path: str) -> ClusterConfig:
    """StoreNotFound when there is no such file; OpenFailed, FormatUnsupported or CorruptRecord, naming it, when it
    cannot be used."""
    return _read(io, path)[1]


def _read(io: Io, path: str) -> tuple[_File, ClusterConfig]:
    try:
        values = tomllib.loads(read_file(io, path, MOST_FILE_BYTES).decode())
    except FileNotFoundError as error:
        raise StoreNotFound(path, "there is no such file") from error
    except OSError as error:
        raise OpenFailed(path, error) from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise CorruptRecord(f"{path}: {error}") from error
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
    token, operator_token = (None if name is None else os.path.join(base, name)
                             for name in (file.token_file, file.operator_token_file))
    return ClusterConfig(file.cluster_id, file.durability, tuple(node.id for node in file.node),
                         tuple(parse_endpoint(node.address, base) for node in file.node), file.upkeep_host, token,
                         operator_token, file.version, Ownership((0, *file.groups_added), file.retention_seconds),
                         frozenset(number for number, node in enumerate(file.node) if node.drain))


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


def require_drainable(draining: Collection[int]) -> None:
    """InvalidArgument for more nodes of a group than puts can go without."""
    for group, count in Counter(number // STRIPE_SHARDS for number in draining).items():
        if count > STRIPE_SHARDS - ACK_SHARDS:
            raise InvalidArgument(f"{count} nodes of group {group} are to be drained, puts can go without "
                                  f"{STRIPE_SHARDS - ACK_SHARDS}")


def write_cluster(io: Io, root: str, cluster_id: str, durability: Durability, node_ids: Sequence[str],
                  addresses: Sequence[str], *, upkeep_host: str | None, token_file: str | None) -> str:
    """Write ROOT/cluster.toml; returns its path. Addresses as they are to stand in it. OpenFailed names the path."""
    assert durability in DURABILITIES
    nodes = [_Node(node_id, address) for node_id, address in zip(node_ids, addresses, strict=True)]
    path = os.path.join(root, CLUSTER_FILE)
    _write(io, path, _File(FORMAT_VERSION, cluster_id, durability, nodes, upkeep_host, token_file))
    return path


def add_group(io: Io, path: str, node_ids: Sequence[str], addresses: Sequence[str], now: float) -> ClusterConfig:
    """Write cluster.toml anew with one more group, its next version; comments in it are lost. InvalidArgument for what
    can be no group, else as `read_cluster`; then nothing was written."""
    file, held = _read(io, path)
    added = max(int(now), held.ownership.added_at[-1])
    nodes = [_Node(node_id, address) for node_id, address in zip(node_ids, addresses, strict=True)]
    wanted = msgspec.structs.replace(file, version=file.version + 1, groups_added=[*file.groups_added, added],
                                     node=[*file.node, *nodes])
    config = _checked(wanted, os.path.dirname(os.path.abspath(path)))
    _write(io, path, wanted)
    return config


def set_drain(io: Io, path: str, number: int, drain: bool) -> ClusterConfig:
    """Write cluster.toml anew, its next version, with a node drained or not any more. Errors as `add_group`."""
    file, held = _read(io, path)
    if not 0 <= number < len(file.node):
        raise InvalidArgument(f"no node has index {number}, must be 0 to {len(file.node) - 1}")
    if file.node[number].drain == drain:
        return held
    nodes = list(file.node)
    nodes[number] = msgspec.structs.replace(nodes[number], drain=drain)
    wanted = msgspec.structs.replace(file, version=file.version + 1, node=nodes)
    config = _checked(wanted, os.path.dirname(os.path.abspath(path)))
    _write(io, path, wanted)
    return config


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
    try:
        replace_file(io, root, os.path.basename(path), ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise OpenFailed(path, error) from error


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
