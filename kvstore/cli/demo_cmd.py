"""`kvstore demo`: a real language model resumes a conversation from the store. The work is in `kvstore.demo`, which is
loaded when the command runs: it needs torch and transformers, which a storage node does not install."""

from __future__ import annotations

from typing import Annotated

import typer

from kvstore.cli.options import JsonOption, terminal_of

_HELP = """Watch a real language model resume a conversation from erasure-coded blocks, with nodes removed and bytes
flipped.

Needs the extra `transformers` (pip install "kvstore[transformers]"). Everything happens in a directory of its own,
which is removed at the end unless --keep is given. Exits non-zero when any step does not come out exactly as it must.

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
        str | None, typer.Option("--workdir", metavar="DIR", help="Where to work.  [default: a temporary directory]")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Leave the store behind.")] = False,
    turns: Annotated[int, typer.Option("--turns", metavar="N", min=1, help="Turns of the conversation.")] = 3,
    as_json: JsonOption = False,
) -> int:
    from kvstore.demo import run  # Lazily: see the module docstring.

    terminal = terminal_of(context, as_json)
    report = run(workdir=workdir, keep=keep, turns=turns, remark=terminal.remark)
    terminal.result(report.document(), lambda console: console.print(report.table()))
    return int(report.exit_code)
