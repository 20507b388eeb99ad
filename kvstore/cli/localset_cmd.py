"""`kvstore cluster start` and `stop`: the servers of a store on this machine, shared by everybody who needs them."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from kvstore import localset
from kvstore.cli.options import JsonOption, config_of, terminal_of

START = """See to it that every node of ROOT is served on this machine, and print the path of its cluster.toml.

Makes the store first when there is none, with --capacity. Servers that run already are left as they are; the others
are started in six processes of two nodes each, which go on after this command and write to ROOT/servers.log. Engines
that are told to start a store do the same, so it does not matter who comes first.

Exit codes: 0 every node answers; 2 wrong request; 8 could not run.

\b
Example:
  kvstore cluster start /var/lib/kv --capacity 100GiB
"""
STOP = """End the servers of ROOT's nodes cleanly.

Exit codes: 0 ended, or none ran; 2 wrong request; 8 some did not end.

\b
Example:
  kvstore cluster stop /var/lib/kv
"""


def start(
    context: typer.Context,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory of the store.")],
    capacity: Annotated[
        str | None, typer.Option("--capacity", metavar="SIZE", help="Raw bytes of a new store, such as 100GiB.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    file = localset.start(os.path.abspath(root), config_of(context, capacity=capacity).capacity)
    terminal.result({"cluster": file}, lambda console: console.print(file))


def stop(
    context: typer.Context,
    root: Annotated[str, typer.Argument(metavar="ROOT", help="Directory of the store.")],
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    ended = localset.stop(os.path.abspath(root))
    terminal.result({"ended": ended}, lambda console: console.print(f"{ended} server processes ended"))
