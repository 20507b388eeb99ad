"""`kvstore cluster add-group`: twelve more nodes for a cluster, as one more EC group.

The map is changed last, and only when the servers of all twelve answer as the nodes that they must be: from that
moment on clients put blocks there. Until then the same command can be given again as often as one likes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from typing import Annotated

import typer

from efs.clock import Deadline, SystemClock
from efs.cluster import STORE_FILE, StoreConfig, init_store, read_store_config
from efs.clusterfile import ClusterConfig, add_group
from efs.endpoint import parse_endpoint
from efs.errors import EfsError, InvalidArgument
from efs.handshake import Role, Tokens, read_token
from efs.limits import INFO_DEADLINE_MS, STRIPE_SHARDS, WIRE_HANDSHAKE_MS
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.osio import Io, SystemIo
from efs.remote import RemoteNode
from kvstore.cli.addresses import SOCKETS, of_a_group
from kvstore.cli.description import Description, described, rewritten, run_alone
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import CapacityOption, ExtentBytesOption, JsonOption, config_of, terminal_of
from kvstore.config import Config

HELP = """Add an EC group of twelve nodes to a cluster: a cluster.toml, or a map in etcd.

Makes twelve node directories under ROOT, unless they are there from an earlier try, and then looks whether their
servers answer. If all do, the group is added to the cluster; else start them and give the same command again. New
blocks are then spread over all groups. Nothing is copied at once: for the retention time look-ups go to the new owner
of a block and then to the one before, and blocks that are put again or read move. The rest stays where it is.

--listen as for `init`; or give --address once, where one process serves all of them, or twelve times. With the servers
stopped ROOT is a store like any other, for fsck and repair. A cluster.toml is written anew, without its comments; give
clients on other machines the new file. They follow a map in etcd by themselves.

Exit codes: 0 the group is part of the cluster; 1 servers do not answer yet, nothing was changed; 2 wrong request; 8
could not run.

\b
Examples:
  kvstore cluster add-group /var/lib/kv/cluster.toml /mnt/b/kv --capacity 100GiB --listen unix
  kvstore cluster add-group etcd://127.0.0.1:2379/prod /mnt/b/kv --listen tcp:10.0.0.8:7400
"""


def add(
    context: typer.Context,
    where: Annotated[str, typer.Argument(metavar="WHERE", help="The cluster.toml, or etcd://HOST:PORT/NAME.")],
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory to make the nodes in.")],
    listen: Annotated[str | None, typer.Option("--listen", metavar="HOW", help="unix, or tcp:HOST:PORT.")] = None,
    address: Annotated[
        list[str] | None, typer.Option("--address", metavar="ADDRESS", help="Of all nodes, or twelve times.")
    ] = None,
    capacity: CapacityOption = None,
    extent_bytes: ExtentBytesOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    settings = config_of(context, capacity=capacity, extent_bytes=extent_bytes)
    io, root = SystemIo(), os.path.abspath(root)
    cluster = described(io, where)
    addresses = of_a_group(listen, address or [], root)
    store = _made(io, root, cluster)
    there = store is not None and set(store.node_ids) <= set(cluster.config.node_ids)
    number = store.group if store is not None and there else cluster.config.ownership.groups
    if not there:
        _require_free(cluster.config, addresses)
    if store is None:
        store, warnings = _make(io, root, cluster, settings, listen)
        for warning in warnings:
            terminal.remark(f"warning: {warning}")
    silent = {} if there else _silent(io, cluster.config, store, addresses)
    changed = not there and not silent
    version = _write(io, cluster, store, addresses) if changed else cluster.config.version
    terminal.result(
        {"cluster": where, "group": number, "root": root, "nodes": list(store.node_paths), "addresses": addresses,
         "version": version, "changed": changed, "silent": {str(index): why for index, why in silent.items()}},
        lambda console: console.print(
            f"{STRIPE_SHARDS - len(silent)} of {STRIPE_SHARDS} servers answer: start the others, such as "
            f"{store.node_paths[min(silent)]} at {addresses[min(silent)]}, and give this command again" if silent
            else f"group {number} is part of the cluster, version {version} of its map"))
    for index, why in silent.items():
        terminal.remark(f"node {index}: {why}")
    return NOT_ALL if silent else 0


def _made(io: Io, root: str, cluster: Description) -> StoreConfig | None:
    """What an earlier try made in the root; None when there is nothing. InvalidArgument when it is something else."""
    if not os.path.lexists(os.path.join(root, STORE_FILE)):
        return None
    store, config = read_store_config(io, root), cluster.config
    if store.cluster_id != config.cluster_id:
        raise InvalidArgument(f"{root} belongs to cluster {store.cluster_id}, this is {config.cluster_id}")
    if store.durability != config.durability:
        raise InvalidArgument(f"{root}: durability is {store.durability}, the cluster's is {config.durability}")
    known = set(store.node_ids) & set(config.node_ids)
    if not known and store.group != config.ownership.groups:
        raise InvalidArgument(f"{root} was made as group {store.group}, the next one is {config.ownership.groups}")
    if known and len(known) < STRIPE_SHARDS:
        raise InvalidArgument(f"{root}: {len(known)} of its nodes are in the cluster already")
    return store


def _make(io: Io, root: str, cluster: Description, settings: Config,
          listen: str | None) -> tuple[StoreConfig, list[str]]:
    """The directories of the next group, as large as those that a map in etcd speaks of unless other sizes are given;
    and warnings."""
    capacity, extent_bytes, config = settings.capacity, settings.extent_bytes, cluster.config
    if capacity is None and cluster.held is not None:
        found = cluster.held.map
        capacity, extent_bytes = STRIPE_SHARDS * found.node_capacity_bytes, extent_bytes or found.extent_bytes
    if capacity is None:
        raise UsageMistake("no capacity given: use --capacity SIZE, such as 100GiB")
    warnings = init_store(io, root, capacity, node_paths=None, durability=config.durability, extent_bytes=extent_bytes,
                          group_of=(config.cluster_id, config.ownership.groups))
    if listen == "unix":
        io.mkdir(os.path.join(root, SOCKETS))
    return read_store_config(io, root), warnings


def _require_free(config: ClusterConfig, addresses: Sequence[str]) -> None:
    taken = {str(endpoint): number for number, endpoint in enumerate(config.endpoints)}
    for address in addresses:
        if address in taken:
            raise InvalidArgument(f"{address} is the address of node {taken[address]} already")


def _silent(io: Io, config: ClusterConfig, store: StoreConfig, addresses: Sequence[str]) -> dict[int, str]:
    """Why nodes of the new group do not answer as they must."""
    tokens = Tokens(None if config.token_file is None else read_token(io, config.token_file))
    places = [RemotePlace(parse_endpoint(address), config.cluster_id, node_id, index, Role.DATA, tokens,
                          config.durability)
              for index, (node_id, address) in enumerate(zip(store.node_ids, addresses, strict=True))]

    async def ask(place: RemotePlace) -> str | None:
        clock = SystemClock()
        try:
            node = await RemoteNode.open(place, clock, CounterFile.in_memory(), WIRE_HANDSHAKE_MS)
        except EfsError as error:
            return str(error)
        try:
            await node.info(Deadline.after_ms(clock, INFO_DEADLINE_MS))
        except EfsError as error:
            return str(error)
        finally:
            await node.close()
        return None

    async def ask_all() -> list[str | None]:
        return list(await asyncio.gather(*map(ask, places)))

    return {index: why for index, why in enumerate(run_alone(ask_all())) if why is not None}


def _write(io: Io, cluster: Description, store: StoreConfig, addresses: Sequence[str]) -> int:
    """Add the group; the version that has it."""
    now = SystemClock().wall()
    return rewritten(
        cluster,
        lambda path, held: add_group(io, path, held, store.node_ids, addresses, now),
        lambda found: found.with_group(list(zip(store.node_ids, addresses, strict=True)), now),
    ).version
