"""`kvstore cluster replace-node` and `move-node`: another node, or another address, in a place of a map in etcd.

What is written is a new version of the map, if nobody else wrote one meanwhile; clients and servers see it by
themselves. A replacement that was interrupted goes on when the same command is given again: the directory that it
made is recognised by its node.toml and by never having been served.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Awaitable, Callable
from typing import Annotated, TypeVar

import typer
import uvloop

from efs.cluster import absent_because
from efs.clustermap import ClusterMap, EtcdUrl, parse_etcd_url
from efs.endpoint import Endpoint, parse_endpoint
from efs.errors import InvalidArgument, StoreExists
from efs.etcd import EtcdStore, HeldMap
from efs.limits import STRIPE_SHARDS
from efs.nodedir import NodePlace, create_directory, machine_boot_id, plan_node, read_boot, read_config
from efs.osio import Io, SystemIo
from efs.replace import note_in_root
from kvstore.cli.failures import UsageMistake
from kvstore.cli.options import JsonOption, StoreOption, config_of, terminal_of, url_of

Result = TypeVar("Result")

REPLACE = """Put a new, empty node into the place N of a cluster in etcd.

The node is made in --directory, which must be absent or empty, on this machine; serve it at --address then, and run
`kvstore repair` to fill it. It has an identity of its own: clients refuse the old server from the moment they see the
new map, wherever it turns up. Refused while the old server holds its lease: stop it first. Needs --yes. Killed on the
way, the same command goes on. Where the cluster's root is on this machine, its store.toml names the new node too: with
the servers stopped `kvstore fsck` works on it as before.

\b
Example:
  export KVSTORE_STORE=etcd://10.0.0.1:2379/prod
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


def with_etcd(url: EtcdUrl, work: Callable[[EtcdStore], Awaitable[Result]]) -> Result:
    """Run `work` with a connection to etcd."""

    async def run() -> Result:
        store = EtcdStore(url)
        try:
            return await work(store)
        finally:
            await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def replace_node(
    context: typer.Context,
    node: NodeArgument,
    address: AddressOption,
    directory: Annotated[str, typer.Option("--directory", metavar="DIR", help="Make the new node there.")],
    yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    if not yes:
        raise UsageMistake(f"replacing node {node} gives up what the old one holds for good: say --yes")
    url = parse_etcd_url(url_of(config_of(context, store)))
    endpoint, path = _endpoint(address), os.path.abspath(directory)

    async def work(etcd: EtcdStore) -> tuple[ClusterMap, bool]:
        held = await etcd.read()
        wanted = held.map.with_node(node, str(endpoint), "0" * 32)
        old = held.map.places[node]
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
    note_in_root(SystemIo(), found.root, NodePlace(found.cluster_id, *divmod(node, STRIPE_SHARDS)), path, place.node_id)
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
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    url, endpoint = parse_etcd_url(url_of(config_of(context, store))), _endpoint(address)

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


def _endpoint(address: str) -> Endpoint:
    endpoint = parse_endpoint(address, os.getcwd())
    if endpoint.path is None and endpoint.port == 0:
        raise UsageMistake(f"--address {address}: clients need the port")
    return endpoint


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
