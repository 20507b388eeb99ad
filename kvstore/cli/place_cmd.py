"""`kvstore cluster replace-node` and `move-node`: another node, or another address, in a place of a cluster.

What is written is a new version of the map, if nobody else wrote one meanwhile; clients and servers see it by
themselves. A replacement that was interrupted goes on when the same command is given again: a directory that it was
making is made anew (`efs/nodedir.py`), one that it made is recognised by its node.toml and by never having been served,
and a spare (`kvstore/cli/spareplace.py`) by
what its server says.
"""

from __future__ import annotations

import os
import random
from typing import Annotated

import typer

from efs.cluster import absent_because
from efs.clustermap import ClusterMap, EtcdUrl, parse_etcd_url
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import InvalidArgument, StoreExists
from efs.etcd import EtcdStore, HeldMap
from efs.limits import STRIPE_SHARDS
from efs.nodedir import NodePlace, create_directory, machine_boot_id, plan_node, read_boot, read_config
from efs.osio import Io, SystemIo
from efs.replace import note_in_root, require_root_of
from kvstore.cli.addresses import address_with_port
from kvstore.cli.description import with_etcd
from kvstore.cli.failures import UsageMistake
from kvstore.cli.options import ClusterOption, JsonOption, MapOption, config_of, terminal_of, url_of
from kvstore.cli.spareplace import replace_by_spare
from kvstore.cli.terminal import Terminal

REPLACE = """Put another, empty node into the place N of a cluster, for `kvstore repair` to fill.

Without --directory and --address it is a spare of the cluster (`add-spare`), the first one whose server answers, unless
it is smaller than all other nodes of the group; those before it are named and left where they are. In one write it
leaves the list of spares and has the place; then its server is told, and serves as node N without a restart. This works
for a cluster.toml and a map in etcd. With both options, for a map in etcd, the node is made in --directory, which must
be absent or empty, on this machine; serve it at --address then.

The new node has an identity of its own: clients refuse the old server from the moment they see the new map, wherever it
turns up. Refused while the old server holds its lease, and for a spare also while it answers: stop it first. Needs
--yes. Killed on the way, the same command goes on. Where the cluster's root is on this machine, its store.toml names
the new node too: with the servers stopped `kvstore fsck` works on it as before. A node of group 1 or later is named so
in the root of its group, if you give that with --root.

Exit codes: 0 done; 1 the spare has the place, and its server does not answer any more: give the command again; 2 wrong
request; 8 could not run, or no spare answers and is large enough.

\b
Examples:
  export KVSTORE_STORE=etcd://10.0.0.1:2379/prod
  kvstore cluster replace-node 7 --yes
  kvstore cluster replace-node 7 --directory /mnt/b/kv --address tcp:10.0.0.9:7407 --yes
"""
MOVE = """Say that the node N of a cluster in etcd is at another address from now on.

Move its directory, or start its server there; it stays the same node, with what it holds.

\b
Example:
  kvstore cluster move-node 7 --address tcp:10.0.0.9:7407
"""
NodeArgument = Annotated[int, typer.Argument(metavar="N", help="Number of the node: 0 to 11, 12 to 23 in group 1, …")]
AddressOption = Annotated[str, typer.Option("--address", metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT.")]


def replace_node(
    context: typer.Context,
    node: NodeArgument,
    address: Annotated[
        str | None, typer.Option("--address", metavar="ADDRESS", help="Where the new node will be served.")
    ] = None,
    directory: Annotated[
        str | None, typer.Option("--directory", metavar="DIR", help="Make the new node there.  [default: take a spare]")
    ] = None,
    root: Annotated[
        str | None, typer.Option("--root", metavar="ROOT", help="Root of the node's group, on this machine.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False,
    store: ClusterOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if not yes:
        raise UsageMistake(f"replacing node {node} gives up what the old one holds for good: say --yes")
    where = url_of(config_of(context, store))
    if address is None and directory is None:
        return replace_by_spare(terminal, where, node, root)
    if address is None or directory is None:
        raise UsageMistake("--directory and --address belong together: both for a new node, none for a spare")
    _replace_by_new(terminal, parse_etcd_url(where), node, address_with_port(address), os.path.abspath(directory), root)
    return 0


def _replace_by_new(terminal: Terminal, url: EtcdUrl, node: int, endpoint: Endpoint, path: str,
                    root: str | None) -> None:
    async def work(etcd: EtcdStore) -> tuple[ClusterMap, bool]:
        held = await etcd.read()
        wanted = held.map.with_node(node, str(endpoint), "0" * 32)
        old = held.map.places[node]
        if root is not None:
            require_root_of(SystemIo(), root, _place(wanted, node))
        made = _made_before(SystemIo(), path, _place(wanted, node))
        if made == old.node_id:
            if str(parse_endpoint(old.address)) != str(endpoint):
                raise InvalidArgument(f"{path} is node {node} already, at {old.address}: use `move-node`")
            return held.map, False
        if old.node_id in await etcd.servers():
            raise InvalidArgument(f"node {node} is being served at {old.address}: stop its server first, and wait for "
                                  "its lease to end")
        node_id = made or _make(SystemIo(), path, wanted, node)
        changed = held.map.with_node(node, str(endpoint), node_id)
        await etcd.change(held, changed)
        return changed, True

    found, written = with_etcd(url, work)
    place = found.places[node]
    note_in_root(SystemIo(), root or found.root, _place(found, node), path, place.node_id)
    terminal.result(
        {"node": node, "node_id": place.node_id, "address": place.address, "incarnation": place.incarnation,
         "version": found.version, "directory": path, "changed": written},
        lambda console: console.print(
            f"node {node} is {place.node_id} (incarnation {place.incarnation}) in version {found.version} of the map; "
            f"serve {path} at {place.address}, then run kvstore repair"
        ),
    )


def move_node(
    context: typer.Context,
    node: NodeArgument,
    address: AddressOption,
    store: MapOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    url, endpoint = parse_etcd_url(url_of(config_of(context, store))), address_with_port(address)

    async def work(etcd: EtcdStore) -> tuple[HeldMap, ClusterMap]:
        held = await etcd.read()
        changed = held.map.with_address(node, str(endpoint))
        if changed.places == held.map.places:
            return held, held.map
        await etcd.change(held, changed)
        return held, changed

    held, found = with_etcd(url, work)
    place = found.places[node]
    terminal.result(
        {"node": node, "node_id": place.node_id, "address": place.address, "incarnation": place.incarnation,
         "version": found.version, "changed": found is not held.map},
        lambda console: console.print(f"node {node} is at {place.address} in version {found.version} of the map"),
    )


def _made_before(io: Io, path: str, place: NodePlace) -> str | None:
    """The id of the node that an earlier attempt made there, or that is there anyhow; None when nothing is there.
    StoreExists for everything else."""
    if absent_because(path) is not None:
        return None
    config = read_config(io, path)
    boot = read_boot(io, path)
    if config.place != place or boot is None or boot.boots > 0:
        raise StoreExists(path)
    return config.node_id


def _make(io: Io, path: str, wanted: ClusterMap, node_index: int) -> str:
    node_id = f"{random.SystemRandom().getrandbits(128):032x}"
    plan = plan_node(wanted.node_capacity_bytes, wanted.extent_bytes)
    create_directory(io, path, _place(wanted, node_index), node_id, plan, machine_boot_id())
    return node_id


def _place(cluster_map: ClusterMap, number: int) -> NodePlace:
    return NodePlace(cluster_map.cluster_id, *divmod(number, STRIPE_SHARDS))
