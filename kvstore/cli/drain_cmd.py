"""`kvstore cluster drain`: have a node get nothing new, so that it can be taken away without failing a write."""

from __future__ import annotations

from typing import Annotated

import typer

from efs.clusterfile import require_number, set_drain
from efs.osio import SystemIo
from kvstore.cli.description import described, rewritten
from kvstore.cli.options import JsonOption, terminal_of
from kvstore.cli.place_cmd import NodeArgument

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
    io = SystemIo()
    description = described(io, where)
    require_number(node, len(description.config.node_ids))
    config = description.config
    if (node in config.draining) == undo:
        config = rewritten(description, lambda path, held: set_drain(io, path, held, node, not undo),
                           lambda found: found.with_drain(node, not undo))
    terminal.result(
        {"node": node, "drain": not undo, "version": config.version},
        lambda console: console.print(
            f"node {node} gets {'blocks again' if undo else 'nothing new'} in version {config.version} of the map"))
