"""`kvstore doctor`: does this machine offer what the store needs, and what does it mean where it does not."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvstore.cli.failures import COULD_NOT_RUN
from kvstore.cli.options import JsonOption, StoreOption, config_of, terminal_of
from kvstore.cli.terminal import table
from kvstore.machine import Check, examine
from kvstore.store import cluster_of

_STYLE = {"ok": "green", "warn": "yellow", "fail": "bold red"}

_HELP = """Check the machine: file system, system calls, libraries and limits, each with what it means for the store.

The directory that is checked is --directory, else the store's, else the current one. Nothing is left behind in it: the
file that is used for trying out is removed before the command ends. Exit code 8 when a check fails.

\b
Examples:
  kvstore doctor
  kvstore doctor --directory /mnt/nvme0 --json
"""


def register(app: typer.Typer) -> None:
    app.command("doctor", help=_HELP, short_help="Check this machine.")(doctor)


def doctor(
    context: typer.Context,
    directory: Annotated[
        str | None, typer.Option("--directory", metavar="DIR", help="Check this directory's file system.")
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    url = config_of(context, store).store
    own = url if url and cluster_of(url) is None else None
    chosen = directory or own or "."
    checks = examine(Path(chosen))
    failed = any(check.status == "fail" for check in checks)
    terminal.result(
        {
            "directory": str(Path(chosen).resolve()),
            "ok": not failed,
            "checks": [{"name": c.name, "status": c.status, "value": c.value, "meaning": c.meaning} for c in checks],
        },
        lambda console: console.print(_as_table(checks)),
    )
    return COULD_NOT_RUN if failed else 0


def _as_table(checks: list[Check]) -> object:
    shown = table("check", "", "found", "what it means")
    for check in checks:
        style = _STYLE[check.status]
        shown.add_row(check.name, f"[{style}]{check.status}[/{style}]", check.value, check.meaning)
    return shown
