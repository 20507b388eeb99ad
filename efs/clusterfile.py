"""cluster.toml: which twelve nodes make a store, and at which addresses their servers are. Format version 1.

    format_version = 1
    cluster_id = "32 hex digits"
    durability = "process" or "power"      what an acknowledgement promises; every server must promise the same
    upkeep_host = "name"                   optional: the machine on which a client looks after the store
    token_file = "path"                    optional: the token that servers ask clients for
    operator_token_file = "path"           optional: the token of operators, where they have one of their own

    [[node]]                               twelve times, in the order of their index
    id = "32 hex digits"
    address = "unix:PATH" or "tcp:HOST:PORT"

Relative paths begin at the file's directory, in which the tenants file stands too. Several nodes may have one address.
A field that is not listed here is refused: a misspelt token file must not mean that there is none.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import msgspec

from efs.cluster import DURABILITIES, MOST_FILE_BYTES, Durability
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument, OpenFailed, StoreNotFound
from efs.limits import FORMAT_VERSION, STRIPE_SHARDS
from efs.nodedir import ID_HEX_DIGITS
from efs.osio import Io, read_file, replace_file

CLUSTER_FILE: Final = "cluster.toml"


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What cluster.toml says, paths joined to its directory. Node i has id `node_ids[i]` at `endpoints[i]`."""

    cluster_id: str
    durability: Durability
    node_ids: tuple[str, ...]
    endpoints: tuple[Endpoint, ...]
    upkeep_host: str | None = None
    token_file: str | None = None
    operator_token_file: str | None = None


class _Node(msgspec.Struct, forbid_unknown_fields=True):
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


def read_cluster(io: Io, path: str) -> ClusterConfig:
    """StoreNotFound when there is no such file; OpenFailed, FormatUnsupported or CorruptRecord, naming it, when it
    cannot be used."""
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
        return _checked(msgspec.convert(values, _File), os.path.dirname(os.path.abspath(path)))
    except (msgspec.ValidationError, InvalidArgument) as error:
        raise CorruptRecord(f"{path}: {error}") from error


def _checked(file: _File, base: str) -> ClusterConfig:
    ids = [node.id for node in file.node]
    if len(ids) != STRIPE_SHARDS:
        raise InvalidArgument(f"{len(ids)} nodes, expected {STRIPE_SHARDS}")
    require_members(file.cluster_id, ids)
    tokens = [None if name is None else os.path.join(base, name)
              for name in (file.token_file, file.operator_token_file)]
    return ClusterConfig(file.cluster_id, file.durability, tuple(ids),
                         tuple(parse_endpoint(node.address, base) for node in file.node), file.upkeep_host, *tokens)


def require_members(cluster_id: str, node_ids: Sequence[str]) -> None:
    """InvalidArgument unless these are ids, and no node's twice."""
    for name in (cluster_id, *node_ids):
        if len(name) != ID_HEX_DIGITS or set(name) - set("0123456789abcdef"):
            raise InvalidArgument(f"the id {name!r} must be {ID_HEX_DIGITS} hex digits")
    if len(set(node_ids)) != len(node_ids):
        raise InvalidArgument("a node is named twice")


def write_cluster(io: Io, root: str, cluster_id: str, durability: Durability, node_ids: Sequence[str],
                  addresses: Sequence[str], *, upkeep_host: str | None, token_file: str | None) -> str:
    """Write ROOT/cluster.toml; returns its path. Addresses as they are to stand in it. OpenFailed names the path."""
    assert durability in DURABILITIES
    for address in addresses:
        parse_endpoint(address, root)
    lines = [f"format_version = {FORMAT_VERSION}", f'cluster_id = "{cluster_id}"', f'durability = "{durability}"']
    if upkeep_host is not None:
        lines.append(f"upkeep_host = {_quoted(upkeep_host)}")
    if token_file is not None:
        lines.append(f"token_file = {_quoted(token_file)}")
    for node_id, address in zip(node_ids, addresses, strict=True):
        lines += ["", "[[node]]", f'id = "{node_id}"', f"address = {_quoted(address)}"]
    path = os.path.join(root, CLUSTER_FILE)
    try:
        replace_file(io, root, CLUSTER_FILE, ("\n".join(lines) + "\n").encode())
    except OSError as error:
        raise OpenFailed(path, error) from error
    return path


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)
