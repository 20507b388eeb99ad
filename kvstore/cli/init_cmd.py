"""`kvstore init`: make a store."""

from __future__ import annotations

from typing import Annotated

import typer

from efs.fs import FileSystem
from efs.limits import STRIPE_SHARDS
from kvstore.cli.failures import UsageMistake
from kvstore.cli.options import (
    CapacityOption,
    DurabilityOption,
    ExtentBytesOption,
    JsonOption,
    RootOption,
    config_of,
    terminal_of,
)
from kvstore.cli.terminal import human_bytes
from kvstore.store import store_root

_HELP = """Make a store: one root directory, or a root and twelve node directories, one for each disk.

PATHS is nothing (the root is --store), the root, or twelve node directories in order (the root is then --store).
Directories are made where they are missing; one that is not empty is refused with exit code 2 and nothing is changed.
Capacity is the raw total over the twelve nodes, of which 1.35 to 1.4 bytes hold a byte of KV. Sizes take a unit: 10GB
is 10,000,000,000 bytes, 10GiB is 10,737,418,240; without a unit they are bytes. Durability `process`: what was
acknowledged survives a kill of every process. `power`: it survives loss of power too.

\b
Examples:
  kvstore init /var/lib/kvstore --capacity 100GiB
  kvstore init --store /var/lib/kvstore --capacity 12TB --durability power /mnt/nvme{0..11}/kv
"""


def register(app: typer.Typer) -> None:
    app.command("init", help=_HELP, short_help="Make a store.")(init)


def init(
    context: typer.Context,
    paths: Annotated[
        list[str] | None,
        typer.Argument(metavar="[PATHS]...", help="The root, or twelve node directories.", show_default=False),
    ] = None,
    capacity: CapacityOption = None,
    durability: DurabilityOption = None,
    extent_bytes: ExtentBytesOption = None,
    store: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    given = list(paths or ())
    named = store
    if len(given) == 1:
        if store is not None and store != given[0]:
            raise UsageMistake(f"two roots given: --store {store} and {given[0]}")
        named = given[0]
    elif len(given) not in (0, STRIPE_SHARDS):
        raise UsageMistake(f"{len(given)} paths given, must be the root alone or {STRIPE_SHARDS} node directories")
    config = config_of(context, named, capacity=capacity, durability=durability, extent_bytes=extent_bytes)
    if not config.store:
        raise UsageMistake("no root given: name it, or use --store, or set KVSTORE_STORE")
    if config.capacity is None:
        raise UsageMistake("no capacity given: use --capacity SIZE, such as 100GiB")
    root = store_root(config.store)
    warnings = FileSystem.init(
        root,
        config.capacity,
        node_paths=given if len(given) == STRIPE_SHARDS else None,
        durability=config.durability,
        extent_bytes=config.extent_bytes,
    )
    for warning in warnings:
        terminal.remark(f"warning: {warning}")
    terminal.result(
        {"root": root, "capacity_bytes": config.capacity, "durability": config.durability, "warnings": list(warnings)},
        lambda console: console.print(
            f"store made at {root}: {human_bytes(config.capacity or 0)}, {config.durability}"
        ),
    )
