"""`kvstore tenant`: whose blocks a store keeps apart."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from efs.cluster import read_store_config
from efs.nodedir import OwnerLock
from efs.osio import SystemIo
from kvstore.cli.failures import UsageMistake
from kvstore.cli.options import JsonOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.terminal import Json, table
from kvstore.store import store_root
from kvstore.tenants import Tenant, add_tenant, list_tenants, rotate_tenant

_HELP = """Tenants of a store: names whose blocks no other tenant can find.

A tenant's secret keys every hash of its blocks and stays in the store's tenants file, which only its owner may read.
It is never printed. `list` works beside a running owner; `add` and `rotate` need ownership.
"""
_ADD = """Add a tenant with a new random secret.

\b
Example:
  kvstore tenant add acme
"""
_LIST = """List tenants: name, generation, the tag on its records, tags of earlier generations.

\b
Example:
  kvstore tenant list --json
"""
_ROTATE = """Give a tenant a new secret and generation: none of its blocks can be found any more.

The blocks stay on disk until they are evicted. Needs --yes, because it cannot be undone.

\b
Example:
  kvstore tenant rotate acme --yes
"""

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 of a-z, A-Z, 0-9, '.', '_', '-'.")]


def register(app: typer.Typer) -> None:
    tenant = typer.Typer(
        name="tenant",
        help=_HELP,
        short_help="Add, list and rotate tenants.",
        rich_markup_mode=None,
        add_completion=False,
    )
    tenant.command("add", help=_ADD, short_help="Add a tenant.")(add)
    tenant.command("list", help=_LIST, short_help="List tenants.")(list_)
    tenant.command("rotate", help=_ROTATE, short_help="Make a tenant's blocks unreachable.")(rotate)
    app.add_typer(tenant)


def add(context: typer.Context, name: NameArgument, store: StoreOption = None, as_json: JsonOption = False) -> None:
    terminal = terminal_of(context, as_json)
    with _owned(context, store) as root:
        made = add_tenant(root, name)
    terminal.result(_document(made), lambda console: console.print(f"tenant {made.name} added, tag {made.tag.hex()}"))


def list_(context: typer.Context, store: StoreOption = None, as_json: JsonOption = False) -> None:
    terminal = terminal_of(context, as_json)
    root = _root(context, store)
    tenants = list_tenants(root)
    shown = table("tenant", "generation", "tag", "earlier tags", right=("generation",))
    for tenant in tenants:
        shown.add_row(
            tenant.name, str(tenant.generation), tenant.tag.hex(), " ".join(tag.hex() for tag in tenant.retired)
        )
    terminal.result(
        {"tenants": [_document(tenant) for tenant in tenants]},
        lambda console: console.print(shown if tenants else "no tenants"),
    )


def rotate(
    context: typer.Context,
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    if not yes:
        raise UsageMistake(f"rotating tenant {name} makes all its blocks unreachable for good: say --yes")
    with _owned(context, store) as root:
        made = rotate_tenant(root, name)
    terminal.result(
        _document(made),
        lambda console: console.print(f"tenant {made.name} is at generation {made.generation}, tag {made.tag.hex()}"),
    )


def _document(tenant: Tenant) -> dict[str, Json]:
    return {
        "name": tenant.name,
        "generation": tenant.generation,
        "tag": tenant.tag.hex(),
        "retired": [tag.hex() for tag in tenant.retired],
    }


def _root(context: typer.Context, store: str | None) -> str:
    """The root of an existing store."""
    root = store_root(url_of(config_of(context, store)))
    read_store_config(SystemIo(), root)
    return root


@contextmanager
def _owned(context: typer.Context, store: str | None) -> Iterator[str]:
    """The root, owned for the duration: a running owner is named and keeps its tenants."""
    root = _root(context, store)
    lock = OwnerLock.take(SystemIo(), root)
    try:
        yield root
    finally:
        lock.release()
