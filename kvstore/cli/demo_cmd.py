"""`kvstore demo`: a real language model resumes a conversation from the store. The work is in `kvstore.demo`, which is
loaded when the command runs: no other command needs it."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.options import JsonOption, root_options, terminal_of
from kvstore.cli.sigterm import ended_by_sigterm
from kvstore.store import cluster_of, store_root

_HELP = """Watch a real language model resume a conversation from erasure-coded blocks, with nodes removed and bytes
flipped.

Needs the extra `transformers` (in a clone: pip install ".[transformers]"). Everything happens in a directory of its
own, which is removed at the end unless --keep is given. With --store the turns use that store or cluster, under keys of
this run alone, and nothing in it is damaged; KVSTORE_STORE is not looked at. Exits non-zero when any step does not come
out exactly as it must.

\b
Examples:
  kvstore demo
  kvstore demo --workdir /mnt/nvme0/demo --keep
  kvstore demo --json > demo.json
"""


def register(app: typer.Typer) -> None:
    app.command("demo", help=_HELP, short_help="Resume a real model's conversation from the store.")(demo)


def demo(
    context: typer.Context,
    workdir: Annotated[
        str | None,
        typer.Option("--workdir", metavar="DIR", help="An empty directory to work in.  [default: a temporary one]"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave that directory behind.")] = False,
    turns: Annotated[int, typer.Option("--turns", metavar="N", help="Turns of the conversation, 1 to 6.")] = 3,
    store: Annotated[
        str | None, typer.Option("--store", metavar="URL", help="Use this existing store or cluster.")
    ] = None,
    as_json: JsonOption = False,
) -> int:
    from kvstore.demo import run

    terminal = terminal_of(context, as_json)
    url = store if store is not None else root_options(context).store
    place = None if url is None else cluster_of(url) or store_root(url)
    with ended_by_sigterm():
        report = run(workdir=workdir, keep=keep, store=place, turns=turns, remark=terminal.remark)
    terminal.result(report.document(), lambda console: console.print(report.table()))
    return report.exit_code
