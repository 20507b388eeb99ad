"""`kvstore cluster`: make a store for node servers, and look at one through them."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from efs.cluster import read_store_config
from efs.clusterfile import ClusterConfig, read_cluster, write_cluster
from efs.clusterfs import open_cluster
from efs.endpoint import parse_endpoint
from efs.fs import FileSystem
from efs.health import NodeState
from efs.limits import STRIPE_SHARDS
from efs.osio import SystemIo
from efs.types import NodeInfo
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import JsonOption, config_of, terminal_of
from kvstore.cli.terminal import Json, human_bytes, table

_HELP = """Stores whose nodes are at servers."""
_INIT = """Make a store of twelve node directories under ROOT, and ROOT/cluster.toml, which clients open.

--listen unix gives every node a socket under ROOT/sockets; --listen tcp:HOST:PORT gives node N the port PORT + N. The
file says where servers are to listen; start them with `kvstore node serve`. This machine is noted as the one on which
a client looks after the store. Once copied to other machines the file works there too, for TCP addresses. With the
servers stopped, ROOT is a store like any other: `kvstore fsck` and `kvstore repair` work on it.

\b
Examples:
  kvstore cluster init /var/lib/kv --capacity 100GiB --listen unix
  kvstore node serve /var/lib/kv/nodes/00 --listen unix:/var/lib/kv/sockets/00
  kvstore cluster init /var/lib/kv --capacity 100GiB --listen tcp:10.0.0.7:7400 --token-file /etc/kvstore/token
"""
_STATUS = """Show the nodes of a cluster as a client sees them: state, records, space.

Exit codes: 0 all twelve serve; 1 some do not; 2 wrong request; 8 could not run.

\b
Example:
  kvstore cluster status /var/lib/kv/cluster.toml
"""
_SOCKETS = "sockets"


def register(app: typer.Typer) -> None:
    cluster = typer.Typer(
        name="cluster", help=_HELP, short_help="Make and show clusters.", rich_markup_mode=None, add_completion=False
    )
    cluster.command("init", help=_INIT, short_help="Make a store for node servers.")(init)
    cluster.command("status", help=_STATUS, short_help="Show the nodes of a cluster.")(status)
    app.add_typer(cluster)


def init(
    context: typer.Context,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory to make it in.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOW", help="unix, or tcp:HOST:PORT of node 0.")],
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE", help="Raw bytes over all twelve nodes, such as 100GiB.")
    ] = None,
    durability: Annotated[
        str | None, typer.Option("--durability", metavar="MODE", help="process or power.  [default: process]")
    ] = None,
    extent_bytes: Annotated[
        str | None,
        typer.Option("--extent-bytes", metavar="SIZE", help="Bytes of an extent.  [default: by the capacity]"),
    ] = None,
    token_file: Annotated[
        str | None, typer.Option("--token-file", metavar="FILE", help="Secret that servers will ask for.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    config = config_of(context, capacity=capacity, durability=durability, extent_bytes=extent_bytes)
    if config.capacity is None:
        raise UsageMistake("no capacity given: use --capacity SIZE, such as 100GiB")
    io, root = SystemIo(), os.path.abspath(root)
    addresses = _addresses(listen, root)
    warnings = FileSystem.init(root, config.capacity, durability=config.durability, extent_bytes=config.extent_bytes)
    if listen == "unix":
        io.mkdir(os.path.join(root, _SOCKETS))
    store = read_store_config(io, root)
    path = write_cluster(io, root, store.cluster_id, store.durability, store.node_ids, addresses,
                         upkeep_host=socket.gethostname(),
                         token_file=None if token_file is None else os.path.abspath(token_file))
    for warning in warnings:
        terminal.remark(f"warning: {warning}")
    terminal.result(
        {"cluster": path, "root": root, "capacity_bytes": config.capacity, "durability": store.durability,
         "nodes": list(store.node_paths), "addresses": list(addresses), "warnings": list(warnings)},
        lambda console: console.print(
            f"cluster made at {path}: {human_bytes(config.capacity or 0)}, {store.durability}; "
            f"serve {store.node_paths[0]} at {parse_endpoint(addresses[0], root)}, and so on"
        ),
    )


def _addresses(listen: str, root: str) -> list[str]:
    """The address of each node as it is to stand in the file; refused before anything is made."""
    if listen == "unix":
        addresses = [f"unix:{_SOCKETS}/{index:02d}" for index in range(STRIPE_SHARDS)]
    else:
        first = parse_endpoint(listen)
        if first.path is not None or first.port == 0:
            raise UsageMistake(f"--listen {listen}: must be unix, or tcp:HOST:PORT with the port of node 0")
        host = f"[{first.host}]" if ":" in first.host else first.host
        addresses = [f"tcp:{host}:{first.port + index}" for index in range(STRIPE_SHARDS)]
    for address in addresses:
        parse_endpoint(address, root)
    return addresses


def status(
    context: typer.Context,
    file: Annotated[str, typer.Argument(metavar="FILE", help="The cluster.toml.")],
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    config = read_cluster(SystemIo(), file)

    async def ask() -> list[NodeInfo]:
        filesystem = await open_cluster(file, care="none")
        try:
            return await filesystem.nodes()
        finally:
            await filesystem.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        nodes = runner.run(ask())
    rows: list[Json] = [{**asdict(node), "address": str(endpoint)}
                        for node, endpoint in zip(nodes, config.endpoints, strict=True)]
    serving = sum(node.state == NodeState.SERVING for node in nodes)
    document: dict[str, Json] = {"cluster_id": config.cluster_id, "durability": config.durability,
                                 "upkeep_host": config.upkeep_host, "nodes_serving": serving, "nodes": rows}
    terminal.result(document, lambda console: _show(console, config, nodes, serving))
    return 0 if serving == STRIPE_SHARDS else NOT_ALL


def _show(console: Console, config: ClusterConfig, nodes: Sequence[NodeInfo], serving: int) -> None:
    console.print(f"cluster {config.cluster_id}  durability {config.durability}")
    console.print(f"{serving} of {STRIPE_SHARDS} nodes serve")
    shown = table("node", "state", "live", "of", "records", "address", right=("node", "live", "of", "records"))
    for node, endpoint in zip(nodes, config.endpoints, strict=True):
        known = node.capacity_bytes > 0
        shown.add_row(str(node.node_index), node.state, human_bytes(node.live_bytes) if known else "",
                      human_bytes(node.capacity_bytes) if known else "", str(node.records) if known else "",
                      str(endpoint), style=None if node.state == NodeState.SERVING else "red")
    console.print(shown)
