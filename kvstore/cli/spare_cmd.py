"""`kvstore cluster add-spare` and `remove-spare`: nodes in no place, ready for `replace-node`; and how `status` shows
them."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Mapping, Sequence
from typing import Annotated

import typer
from rich.console import Console

from efs.clock import SystemClock
from efs.cluster import make_directories
from efs.clusterfile import ClusterConfig, Spare, add_spare, remove_spare
from efs.endpoint import Endpoint
from efs.errors import EfsError, HandshakeFailed, IdentityMismatch, InvalidArgument
from efs.handshake import Tokens
from efs.limits import STRIPE_SHARDS
from efs.nodedir import NodePlan, machine_boot_id, plan_node
from efs.osio import Io, SystemIo
from efs.sparedir import create_spare, is_spare, read_spare
from efs.spares import ask_spare, why_not
from kvstore.cli.addresses import address_with_port
from kvstore.cli.description import Description, described, rewritten, run_alone, tokens_of
from kvstore.cli.failures import UsageMistake
from kvstore.cli.options import CapacityOption, ExtentBytesOption, JsonOption, config_of, terminal_of
from kvstore.cli.terminal import Json, human_bytes, table
from kvstore.config import Config

ADD = """Add a spare to a cluster: a node in no place, which `replace-node` can give one.

Makes an empty directory in --directory, which must be absent or empty, unless an earlier try has made it, and lists it
with its address, with a warning where another node is served there. Serve it there with `kvstore node serve`, or move
it to another machine first. It is empty and holds nothing until `replace-node` gives it a place, which nothing does by
itself. `status` says whether it answers.

--capacity as for `init`, the raw bytes over twelve such nodes; for a map in etcd the size is that of the other nodes
unless another is given.

\b
Examples:
  kvstore cluster add-spare etcd://10.0.0.1:2379/prod --directory /mnt/s/kv --address tcp:10.0.0.9:7400
  kvstore cluster add-spare /var/lib/kv/cluster.toml --directory /mnt/s/kv --address unix:/run/kv/s --capacity 100GiB
"""
REMOVE = """Remove a spare from a cluster. SPARE is its node id, or its address where it is the only one there.

Its directory is left as it is, and so is its server; `add-spare` with the same directory lists it again, also at
another address.

\b
Example:
  kvstore cluster remove-spare etcd://10.0.0.1:2379/prod tcp:10.0.0.9:7400
"""
READY, UNREACHABLE = "ready", "unreachable"
WhereArgument = Annotated[str, typer.Argument(metavar="WHERE", help="The cluster.toml, or etcd://HOST:PORT/NAME.")]


def add(
    context: typer.Context,
    where: WhereArgument,
    directory: Annotated[str, typer.Option("--directory", metavar="DIR", help="Make the spare there.")],
    address: Annotated[str, typer.Option("--address", metavar="ADDRESS", help="unix:PATH or tcp:HOST:PORT.")],
    capacity: CapacityOption = None,
    extent_bytes: ExtentBytesOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    settings = config_of(context, capacity=capacity, extent_bytes=extent_bytes)
    io, path, endpoint = SystemIo(), os.path.abspath(directory), address_with_port(address)
    description = described(io, where)
    made = _made(io, path, description.config, endpoint)
    there = made in [spare.node_id for spare in description.config.spares]
    node_id = made or _make(io, path, description.config, _plan(description, settings))
    other = _who_is_there(io, description.config, Spare(node_id, endpoint))
    warnings = [] if other is None else [f"another server is at {endpoint}: {other}"]
    config = description.config if there else rewritten(
        description, lambda file, held: add_spare(io, file, held, node_id, str(endpoint)),
        lambda found: found.with_spare(node_id, str(endpoint)))
    for warning in warnings:
        terminal.remark(f"warning: {warning}")
    terminal.result(
        {"node_id": node_id, "address": str(endpoint), "directory": path, "spares": len(config.spares),
         "version": config.version, "changed": not there, "warnings": warnings},
        lambda console: console.print(
            f"{path} is the spare {node_id}, one of {len(config.spares)} of the cluster; serve it at {endpoint}"),
    )


def remove(
    context: typer.Context,
    where: WhereArgument,
    spare: Annotated[str, typer.Argument(metavar="SPARE", help="Node id or address of the spare.")],
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    io = SystemIo()
    description = described(io, where)
    node_id = _named(description.config.spares, spare)
    config = rewritten(description, lambda file, held: remove_spare(io, file, held, node_id),
                       lambda found: found.without_spare(node_id))
    terminal.result(
        {"node_id": node_id, "spares": len(config.spares), "version": config.version},
        lambda console: console.print(f"{node_id} is no spare any more; {len(config.spares)} are left"),
    )


def _made(io: Io, path: str, config: ClusterConfig, endpoint: Endpoint) -> str | None:
    """The id of the spare that is in a directory, None when there is none. InvalidArgument when it cannot be listed at
    this address."""
    if not is_spare(path):
        return None
    found = read_spare(io, path)
    if found.cluster_id != config.cluster_id:
        raise InvalidArgument(f"{path} is a spare of cluster {found.cluster_id}, this is {config.cluster_id}")
    if found.node_id in config.node_ids:
        raise InvalidArgument(f"{path} was given the place {config.node_ids.index(found.node_id)}: serve it, and give "
                              "the same `replace-node` again")
    listed = next((spare.endpoint for spare in config.spares if spare.node_id == found.node_id), endpoint)
    if listed != endpoint:
        raise InvalidArgument(f"{path} is listed at {listed}: remove that spare first")
    return found.node_id


def _plan(description: Description, settings: Config) -> NodePlan:
    capacity, extent_bytes = settings.capacity, settings.extent_bytes
    if capacity is None and description.held is not None:
        found = description.held.map
        return plan_node(found.node_capacity_bytes, extent_bytes or found.extent_bytes)
    if capacity is None:
        raise UsageMistake("no capacity given: use --capacity SIZE, such as 100GiB")
    return plan_node(capacity // STRIPE_SHARDS, extent_bytes)


def _make(io: Io, path: str, config: ClusterConfig, plan: NodePlan) -> str:
    node_id = f"{random.SystemRandom().getrandbits(128):032x}"
    make_directories(io, os.path.dirname(path))
    return create_spare(io, path, config.cluster_id, node_id, plan, machine_boot_id()).node_id


def _who_is_there(io: Io, config: ClusterConfig, spare: Spare) -> str | None:
    """What a server at the address of a spare says that does not serve it; None where it does, or where none answers
    yet."""
    try:
        run_alone(ask_spare(config, spare, tokens_of(io, config), SystemClock()))
    except (HandshakeFailed, IdentityMismatch) as error:
        return str(error)
    except EfsError:
        return None
    return None


def _named(spares: Sequence[Spare], name: str) -> str:
    found = [spare.node_id for spare in spares if name in (spare.node_id, str(spare.endpoint))]
    if not found:
        raise InvalidArgument(f"the cluster has no spare {name}")
    if len(found) > 1:
        raise InvalidArgument(f"{len(found)} spares are at {name}: give the node id of one")
    return found[0]


# -- For `status` ---------------------------------------------------------------------------------------------------


async def looked_at(config: ClusterConfig, tokens: Tokens) -> list[dict[str, Json]]:
    """A row for each spare: who it is, whether it answers, and why not."""
    return list(await asyncio.gather(*(_row(config, spare, tokens) for spare in config.spares)))


async def _row(config: ClusterConfig, spare: Spare, tokens: Tokens) -> dict[str, Json]:
    row: dict[str, Json] = {"node_id": spare.node_id, "address": str(spare.endpoint)}
    try:
        info = await ask_spare(config, spare, tokens, SystemClock())
    except EfsError as error:
        return {**row, "state": UNREACHABLE, "why": why_not(spare.endpoint, error), "capacity_bytes": None}
    return {**row, "state": READY, "why": None, "capacity_bytes": info.capacity_bytes}


def show(console: Console, rows: Sequence[Mapping[str, Json]]) -> None:
    shown = table("spare", "state", "capacity", "address", right=("capacity",))
    for row in rows:
        capacity, ready = row["capacity_bytes"], row["state"] == READY
        size = human_bytes(capacity) if isinstance(capacity, int) else ""
        shown.add_row(str(row["node_id"]), str(row["state"] if ready else f"{row['state']}: {row['why']}"), size,
                      str(row["address"]), style=None if ready else "red")
    console.print(shown)
