"""`kvstore cluster`: make a store for node servers, and look at one through them."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from typing import Annotated

import typer
from rich.console import Console

from efs.clock import SystemClock
from efs.cluster import StoreConfig, init_store, read_store_config
from efs.clusterfile import CLUSTER_FILE, ClusterConfig, read_cluster, write_cluster
from efs.clusterfs import open_cluster
from efs.clustermap import ETCD_SCHEME, ClusterMap, MapPlace, ServerNote, parse_etcd_url
from efs.endpoint import is_local, parse_endpoint
from efs.errors import EfsError, InvalidArgument, StoreNotFound
from efs.etcd import EtcdStore
from efs.handshake import Tokens, read_token
from efs.health import NodeState
from efs.limits import STRIPE_SHARDS
from efs.osio import Io, SystemIo, remove_tree
from efs.types import NodeInfo
from kvstore.cli import drain_cmd, group_cmd, localset_cmd, place_cmd, spare_cmd
from kvstore.cli.addresses import SOCKETS, listening
from kvstore.cli.description import run_alone, with_etcd
from kvstore.cli.failures import NOT_ALL, ChangedMeanwhile, UsageMistake
from kvstore.cli.options import (
    CapacityOption,
    DurabilityOption,
    ExtentBytesOption,
    JsonOption,
    config_of,
    terminal_of,
)
from kvstore.cli.terminal import Json, human_bytes, table

_HELP = """Stores whose nodes are at servers."""
_INIT = """Make a store of twelve node directories under ROOT, and ROOT/cluster.toml, which clients open.

--listen unix gives every node a socket under ROOT/sockets; --listen tcp:HOST:PORT gives node N the port PORT + N. The
file says where servers are to listen; start them with `kvstore node serve`. This machine is noted as the one on which
a client looks after the store. Once copied to other machines the file works there too, for TCP addresses. With the
servers stopped, ROOT is a store like any other: `kvstore fsck` and `kvstore repair` work on it.

With --operator-token-file servers that are started with the same option ask for that one whoever looks after the store
or runs repair, scrub, sweep, gc and purge; clients that cannot read the file fetch and put all the same.

With --etcd there is no file: the same stands in etcd, as the map of the cluster NAME, which clients follow. The name
must not be in use.

\b
Examples:
  kvstore cluster init /var/lib/kv --capacity 100GiB --listen unix
  kvstore node serve /var/lib/kv/nodes/00 --listen unix:/var/lib/kv/sockets/00
  kvstore cluster init /var/lib/kv --capacity 100GiB --listen tcp:10.0.0.7:7400 --token-file /etc/kvstore/token
  kvstore cluster init /var/lib/kv --capacity 100GiB --listen unix --etcd etcd://127.0.0.1:2379/prod
"""
_STATUS = """Show the nodes of a cluster as a client sees them: state, records, space; and whether its spares answer.

Exit codes: 0 all nodes serve and all spares answer; 1 some do not; 2 wrong request; 8 could not run.

\b
Example:
  kvstore cluster status /var/lib/kv/cluster.toml
  kvstore cluster status etcd://127.0.0.1:2379/prod
"""


def register(app: typer.Typer) -> None:
    cluster = typer.Typer(
        name="cluster", help=_HELP, short_help="Make and show clusters.", rich_markup_mode=None, add_completion=False
    )
    cluster.command("init", help=_INIT, short_help="Make a store for node servers.")(init)
    cluster.command("status", help=_STATUS, short_help="Show the nodes of a cluster.")(status)
    cluster.command("add-group", help=group_cmd.HELP, short_help="Add twelve nodes as one more EC group.")(
        group_cmd.add)
    cluster.command("add-spare", help=spare_cmd.ADD, short_help="Add a node in no place, for replace-node.")(
        spare_cmd.add)
    cluster.command("remove-spare", help=spare_cmd.REMOVE, short_help="Remove a spare.")(spare_cmd.remove)
    cluster.command("replace-node", help=place_cmd.REPLACE, short_help="Put an empty node into a place of the map.")(
        place_cmd.replace_node)
    cluster.command("drain", help=drain_cmd.HELP, short_help="Have a node get nothing new.")(drain_cmd.drain)
    cluster.command("move-node", help=place_cmd.MOVE, short_help="Give a node of the map another address.")(
        place_cmd.move_node)
    cluster.command("start", help=localset_cmd.START, short_help="Start servers on this machine.")(localset_cmd.start)
    cluster.command("stop", help=localset_cmd.STOP, short_help="End servers on this machine.")(localset_cmd.stop)
    app.add_typer(cluster)


def init(
    context: typer.Context,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory to make it in.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOW", help="unix, or tcp:HOST:PORT of node 0.")],
    capacity: CapacityOption = None,
    durability: DurabilityOption = None,
    extent_bytes: ExtentBytesOption = None,
    token_file: Annotated[
        str | None, typer.Option("--token-file", metavar="FILE", help="Secret that servers will ask for, mode 0600.")
    ] = None,
    operator_token_file: Annotated[
        str | None,
        typer.Option("--operator-token-file", metavar="FILE", help="Secret that servers will ask operators for."),
    ] = None,
    etcd: Annotated[
        str | None, typer.Option("--etcd", metavar="URL", help="Write the map there: etcd://HOST:PORT/NAME.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    config = config_of(context, capacity=capacity, durability=durability, extent_bytes=extent_bytes)
    if config.capacity is None:
        raise UsageMistake("no capacity given: use --capacity SIZE, such as 100GiB")
    io, root = SystemIo(), os.path.abspath(root)
    addresses = listening(listen, root)
    url = None if etcd is None else parse_etcd_url(etcd)
    if url is not None:
        with_etcd(url, _require_no_map)
    if operator_token_file is not None and token_file is None:
        raise UsageMistake("--operator-token-file needs --token-file")
    token_file, operator_token_file = (None if file is None else _readable(io, os.path.abspath(file))
                                       for file in (token_file, operator_token_file))
    finish = partial(_finish, io, root, addresses, listen == "unix", token_file, operator_token_file, url is None)
    warnings = init_store(io, root, config.capacity, node_paths=None, durability=config.durability,
                          extent_bytes=config.extent_bytes, finish=finish)
    if token_file is None and not all(is_local(parse_endpoint(address, root)) for address in addresses):
        warnings.append("other machines reach these addresses: servers will not start there without a token, and "
                        "clients need it too; make the cluster with --token-file")
    store = read_store_config(io, root)
    where = os.path.join(root, CLUSTER_FILE)
    if url is not None:
        first = _first_map(store, root, addresses, token_file, operator_token_file)
        with_etcd(url, lambda etcd_store: etcd_store.create(first))
        where = str(url)
    for warning in warnings:
        terminal.remark(f"warning: {warning}")
    terminal.result(
        {"cluster": where, "root": root, "capacity_bytes": config.capacity, "durability": store.durability,
         "nodes": list(store.node_paths), "addresses": list(addresses), "warnings": warnings},
        lambda console: console.print(
            f"cluster made at {where}: {human_bytes(config.capacity or 0)}, {store.durability}; "
            f"serve {store.node_paths[0]} at {parse_endpoint(addresses[0], root)}, and so on"
        ),
    )


def _finish(io: Io, root: str, addresses: Sequence[str], sockets: bool, token_file: str | None,
            operator_token_file: str | None, described: bool, store: StoreConfig) -> None:
    """Make what a cluster has beside its store: the directory of its sockets, and cluster.toml unless a map describes
    it. After an error nothing of that is left."""
    try:
        if sockets:
            io.mkdir(os.path.join(root, SOCKETS))
        if described:
            write_cluster(io, root, store.cluster_id, store.durability, store.node_ids, addresses,
                          upkeep_host=socket.gethostname(), token_file=token_file,
                          operator_token_file=operator_token_file)
    except (OSError, EfsError, KeyboardInterrupt):
        for name in (SOCKETS, CLUSTER_FILE):
            with suppress(OSError):
                remove_tree(io, os.path.join(root, name))
        raise


async def _require_no_map(store: EtcdStore) -> None:
    try:
        await store.read()
    except StoreNotFound:
        return
    raise InvalidArgument(f"{store.url}: there is a cluster of this name already")


def _readable(io: Io, token_file: str) -> str:
    """The path, of a file that holds a token. Errors as `read_token`."""
    read_token(io, token_file)
    return token_file


def _first_map(store: StoreConfig, root: str, addresses: Sequence[str], token_file: str | None,
               operator_token_file: str | None) -> ClusterMap:
    places = tuple(MapPlace(node_id, str(parse_endpoint(address, root)), 1)
                   for node_id, address in zip(store.node_ids, addresses, strict=True))
    return ClusterMap(1, store.cluster_id, store.durability, root, store.capacity_bytes // STRIPE_SHARDS,
                      store.extent_bytes, places, socket.gethostname(), token_file, operator_token_file)


def status(
    context: typer.Context,
    where: spare_cmd.WhereArgument,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    in_etcd = with_etcd(parse_etcd_url(where), _map_and_notes) if where.startswith(ETCD_SCHEME) else None
    config = read_cluster(SystemIo(), where) if in_etcd is None else in_etcd[0].config()

    async def ask() -> tuple[list[NodeInfo], list[dict[str, Json]]]:
        filesystem = await open_cluster(where, care="none")
        try:
            if len(filesystem.groups) != config.ownership.groups:
                raise ChangedMeanwhile(f"{where}: a group was added just now; ask again")
            token = None if config.token_file is None else read_token(SystemIo(), config.token_file)
            return await filesystem.nodes(), await spare_cmd.looked_at(config, Tokens(token))
        finally:
            await filesystem.close()

    nodes, spares = run_alone(ask())
    rows: list[dict[str, Json]] = [
        {**asdict(node), "group": node.node_index // STRIPE_SHARDS, "address": str(endpoint), "incarnation": number}
        for node, endpoint, number in zip(nodes, config.endpoints, config.incarnations, strict=True)]
    serving = sum(node.state == NodeState.SERVING for node in nodes)
    document: dict[str, Json] = {"cluster_id": config.cluster_id, "durability": config.durability,
                                 "upkeep_host": config.upkeep_host, "nodes_serving": serving,
                                 "version": config.version, "groups": _groups(config)}
    if in_etcd is not None:
        found, notes = in_etcd
        document |= {"root": found.root}
        for row, place in zip(rows, found.places, strict=True):
            note = notes.get(place.node_id)
            row |= {"lease": None if note is None else note.state}
    document |= {"nodes": list(rows), "spares": list(spares)}

    def show(console: Console) -> None:
        _show(console, config, rows, serving, in_etcd is not None)
        if spares:
            spare_cmd.show(console, spares)

    terminal.result(document, show)
    ready = all(spare["state"] == spare_cmd.READY for spare in spares)
    return 0 if serving == len(nodes) and ready else NOT_ALL


def _groups(config: ClusterConfig) -> list[Json]:
    """When each group was added, and until when those who owned its blocks before are asked for them."""
    retention = config.ownership.retention_seconds
    return [{"group": group, "added_at": at, "previous_owners_until": at + retention if group else None}
            for group, at in enumerate(config.ownership.added_at)]


async def _map_and_notes(store: EtcdStore) -> tuple[ClusterMap, Mapping[str, ServerNote]]:
    return (await store.read()).map, await store.servers()


def _show(console: Console, config: ClusterConfig, rows: Sequence[Mapping[str, Json]], serving: int,
          mapped: bool) -> None:
    groups = config.ownership.groups
    console.print(f"cluster {config.cluster_id}  durability {config.durability}  version {config.version} of the map")
    console.print(f"{serving} of {len(rows)} nodes serve" + (f", {groups} groups" if groups > 1 else ""))
    now, retention = SystemClock().wall(), config.ownership.retention_seconds
    for group, added_at in enumerate(config.ownership.added_at):
        left = added_at + retention - now
        if group and left > 0:
            console.print(f"group {group} is new: previous owners are asked for {left / 3600:.1f} more hours")
    of_groups = ("group",) if groups > 1 else ()
    of_map = ("lease",) if mapped else ()
    shown = table("node", *of_groups, "state", "live", "of", "records", "incarnation", *of_map, "address",
                  right=("node", "group", "live", "of", "records", "incarnation"))
    for row in rows:
        live, capacity = row["live_bytes"], row["capacity_bytes"]
        assert isinstance(live, int)
        assert isinstance(capacity, int)
        sizes = (human_bytes(live), human_bytes(capacity), str(row["records"])) if capacity > 0 else ("", "", "")
        leases = (str(row["lease"] or "none"),) if mapped else ()
        shown.add_row(str(row["node_index"]), *(str(row[name]) for name in of_groups), str(row["state"]), *sizes,
                      str(row["incarnation"]), *leases, str(row["address"]),
                      style=None if row["state"] == NodeState.SERVING else "red")
    console.print(shown)
