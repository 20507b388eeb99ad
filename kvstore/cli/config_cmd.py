"""`kvstore config`: the settings in effect, each with where it came from, and those of the store itself."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from efs.cluster import STORE_FILE, read_store_config
from efs.errors import StoreNotFound
from efs.osio import SystemIo
from kvstore.cli.failures import UsageMistake
from kvstore.cli.options import JsonOption, StoreOption, config_of, terminal_of
from kvstore.cli.terminal import Json, table
from kvstore.config import Config, Setting
from kvstore.store import cluster_of, store_root

_HELP = """Show the settings in effect, each with its value and its source.

With NAME only that one. Where a store is given and exists, the settings that it was made with follow; they stand in its
store.toml. An unknown NAME is refused with exit code 2, as is an unknown setting in a file, in the environment or in
--set.

\b
Examples:
  kvstore config
  kvstore config get_deadline_ms
  KVSTORE_MAPPED=yes kvstore --set put_deadline_ms=2000 config --json
"""


def register(app: typer.Typer) -> None:
    app.command("config", help=_HELP, short_help="Show settings and their sources.")(config)


def config(
    context: typer.Context,
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Show this setting only.", show_default=False)
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    effective = config_of(context, store)
    settings = effective.settings()
    if name is not None:
        settings = [setting for setting in settings if setting.name == name]
        if not settings:
            known = ", ".join(setting.name for setting in effective.settings())
            raise UsageMistake(f"unknown setting {name!r}; there are {known}")
    of_store = _store_settings(effective) if name is None else []
    document: dict[str, Json] = {"settings": [_as_json(setting) for setting in settings]}
    if of_store:
        document["store"] = [_as_json(setting) for setting in of_store]
    of_store = [replace(setting, name=f"store: {setting.name}") for setting in of_store]
    terminal.result(document, lambda console: console.print(_as_table([*settings, *of_store])))


def _as_json(setting: Setting) -> Json:
    return {"name": setting.name, "value": setting.value, "source": setting.source, "meaning": setting.meaning}


def _store_settings(effective: Config) -> list[Setting]:
    """What the store at hand was made with; nothing when none is given, it is not there, or it is a cluster."""
    if not effective.store or cluster_of(effective.store) is not None:
        return []
    root = store_root(effective.store)
    try:
        made = read_store_config(SystemIo(), root)
    except StoreNotFound:
        return []
    source = f"file {os.path.join(root, STORE_FILE)}"
    rows: tuple[tuple[str, str | int, str], ...] = (
        ("cluster_id", made.cluster_id, "identity of the store"),
        ("capacity_bytes", made.capacity_bytes, "raw bytes over all nodes"),
        ("durability", made.durability, "what an acknowledgement promises"),
        ("extent_bytes", made.extent_bytes, "bytes of an extent"),
        ("node_paths", " ".join(made.node_paths), "node directories in order"),
    )
    return [Setting(name, value, source, meaning) for name, value, meaning in rows]


def _as_table(settings: list[Setting]) -> Table:
    shown = table("setting", "value", "source", "meaning")
    for setting in settings:
        shown.add_row(
            setting.name,
            "-" if setting.value is None else escape(str(setting.value)),
            escape(setting.source),
            setting.meaning,
        )
    return shown
