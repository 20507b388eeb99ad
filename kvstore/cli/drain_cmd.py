"""`kvstore cluster drain`: have a node get nothing new, so that it can be taken away without failing a write."""

from __future__ import annotations

from typing import Annotated

import typer

from efs.clusterfile import set_drain
from efs.clustermap import ETCD_SCHEME, ClusterMap, parse_etcd_url
from efs.etcd import EtcdStore
from efs.osio import SystemIo
from kvstore.cli.options import JsonOption, terminal_of
from kvstore.cli.place_cmd import NodeArgument, with_etcd

HELP = """Have node N of a cluster get nothing new; it goes on answering reads, as read-only.

With 10+2 on twelve nodes the others take eleven shards of each new block, which is then at risk until the node is
replaced and `kvstore repair` has run, or until --undo and a repair. So at most one node of a group is drained. What the
node holds stays readable: stop its server when you like, and give its place to another one with `replace-node`, which
ends the draining. Clients of a map in etcd follow within seconds, those of a cluster.toml when they read it again.

\b
Examples:
  kvstore cluster drain etcd://127.0.0.1:2379/prod 7
  kvstore cluster drain /var/lib/kv/cluster.toml 7 --undo
"""


def drain(
    context: typer.Context,
    where: Annotated[str, typer.Argument(metavar="WHERE", help="The cluster.toml, or etcd://HOST:PORT/NAME.")],
    node: NodeArgument,
    undo: Annotated[bool, typer.Option("--undo", help="Let it get new blocks again.")] = False,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    if where.startswith(ETCD_SCHEME):
        version = with_etcd(parse_etcd_url(where), lambda etcd: _change(etcd, node, not undo)).version
    else:
        version = set_drain(SystemIo(), where, node, not undo).version
    terminal.result(
        {"node": node, "drain": not undo, "version": version},
        lambda console: console.print(
            f"node {node} gets {'blocks again' if undo else 'nothing new'} in version {version} of the map"))


async def _change(etcd: EtcdStore, node: int, wanted: bool) -> ClusterMap:
    held = await etcd.read()
    changed = held.map.with_drain(node, wanted)
    if changed.places == held.map.places:
        return held.map
    await etcd.change(held, changed)
    return changed
