"""`kvstore tenant`: whose blocks a store keeps apart."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated

import typer

from efs.cluster import read_store_config
from efs.groups import AnyFileSystem
from efs.nodedir import OwnerLock
from efs.osio import SystemIo
from efs.storeview import StoreView
from efs.tenantcount import count_tags
from efs.tombstones import Tombstones, read_tombstones
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import JsonOption, RootOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.session import with_filesystem
from kvstore.cli.terminal import Json, human_bytes, table
from kvstore.config import parse_size
from kvstore.store import store_root
from kvstore.tenancy import Purged, purge_tenant, uses_of
from kvstore.tenants import Tenant, add_tenant, list_tenants, rotate_tenant, set_quota

_HELP = """Tenants of a store: names whose blocks no other tenant can find.

A tenant's secret keys every hash of its blocks and stays in the store's tenants file, which only its owner may read.
It is never printed. `list` works beside a running owner; `add`, `rotate`, `purge` and `quota` need ownership.
"""
_ADD = """Add a tenant with a new random secret.

\b
Example:
  kvstore tenant add acme
"""
_LIST = """List tenants: generation, what their blocks take, quota, the tag on their records, what is being purged.

"stored" counts as capacity does: slots on all nodes that can be read. "blocks" are ten twelfths of it: bytes before
coding, padding included. Counted from the tables on disk for at most --seconds, and estimated from that where they are
more. "purging" names nodes that could not be reached by a purge and may still hold records.

\b
Example:
  kvstore tenant list --json
"""
_ROTATE = """Give a tenant a new secret and generation: none of its blocks can be found any more.

The blocks stay on disk until they are evicted (`purge` removes them). Needs --yes, because it cannot be undone.

\b
Example:
  kvstore tenant rotate acme --yes
"""
_PURGE = """Remove everything that was ever stored for a tenant; it gets a new secret and can store again at once.

What is purged is never found, served, repaired or stored again, also not from nodes that are away now: they drop it
when they are back, before they serve. Killed half way, the next run or the next owner finishes it. Nodes that could not
be reached are listed, here and by `list`, until they have dropped everything. The bytes of a removed block stay on disk
until their slots are used again. Needs --yes and ownership: a running owner is named and left alone.

Exit codes: 0 done on all nodes; 1 some node is still to do; 8 could not run.

\b
Example:
  kvstore tenant purge acme --yes
"""
_QUOTA = """Set how much of the store's capacity a tenant may take, or "none".

It counts as capacity does: slots on all nodes, 1.2 times the payload. A put of new blocks that would go above it stores
none of them and says so; nothing is evicted for it. Takes effect when the store is opened next.

\b
Examples:
  kvstore tenant quota acme 10GiB
  kvstore tenant quota acme none
"""

NameArgument = Annotated[str, typer.Argument(metavar="NAME", help="1 to 64 of a-z, A-Z, 0-9, '.', '_', '-'.")]


def register(app: typer.Typer) -> None:
    tenant = typer.Typer(
        name="tenant",
        help=_HELP,
        short_help="Add, list, limit and purge tenants.",
        rich_markup_mode=None,
        add_completion=False,
    )
    tenant.command("add", help=_ADD, short_help="Add a tenant.")(add)
    tenant.command("list", help=_LIST, short_help="List tenants.")(list_)
    tenant.command("rotate", help=_ROTATE, short_help="Make a tenant's blocks unreachable.")(rotate)
    tenant.command("purge", help=_PURGE, short_help="Remove all of a tenant's blocks.")(purge)
    tenant.command("quota", help=_QUOTA, short_help="Limit what a tenant may take.")(quota)
    app.add_typer(tenant)


def add(context: typer.Context, name: NameArgument, store: RootOption = None, as_json: JsonOption = False) -> None:
    terminal = terminal_of(context, as_json)
    with _owned(context, store) as root:
        made = add_tenant(root, name)
    terminal.result(_document(made), lambda console: console.print(f"tenant {made.name} added, tag {made.tag.hex()}"))


def list_(
    context: typer.Context,
    seconds: Annotated[float, typer.Option("--seconds", metavar="S", min=0.0, help="Longest time to count.")] = 5.0,
    store: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    root = _root(context, store)
    tenants = list_tenants(root)
    with StoreView.open(root) as view:
        counted = count_tags(view.views, seconds, time.monotonic)
    uses = uses_of(tenants, counted.live_bytes)
    tombstones = read_tombstones(SystemIo(), root)
    shown = table("tenant", "generation", "blocks", "stored", "quota", "tag", "purging",
                  right=("generation", "blocks", "stored", "quota"))
    documents: list[Json] = []
    for tenant in tenants:
        use, left = uses[tenant.name], _left(tenant, tombstones)
        shown.add_row(tenant.name, str(tenant.generation), human_bytes(use.payload_bytes),
                      human_bytes(use.stored_bytes), _shown_quota(tenant), tenant.tag.hex(),
                      "unfinished" if tenant.purging else f"node {', '.join(map(str, left))}" if left else "")
        documents.append({**_document(tenant), "stored_bytes": use.stored_bytes, "payload_bytes": use.payload_bytes,
                          "purge_pending": left})
    terminal.result({"tenants": documents, "exact": counted.covered == 1.0},
                    lambda console: console.print(shown if tenants else "no tenants"))
    if counted.covered < 1.0:
        terminal.remark(f"sizes are estimated from {counted.covered:.0%} of the extents")


def rotate(
    context: typer.Context,
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False,
    store: RootOption = None,
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


def purge(
    context: typer.Context,
    name: NameArgument,
    yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if not yes:
        raise UsageMistake(f"purging tenant {name} removes all its blocks for good: say --yes")

    async def work(filesystem: AnyFileSystem) -> Purged:
        assert filesystem.root is not None
        return await purge_tenant(filesystem, filesystem.root, name, unless_empty=True)

    done = with_filesystem(url_of(config_of(context, store)), work)
    left = list(done.report.missing)
    document: dict[str, Json] = {**_document(done.tenant), "dropped": done.report.dropped, "purge_pending": left}
    terminal.result(document, lambda console: console.print(
        f"tenant {done.tenant.name} is at generation {done.tenant.generation}, {done.report.dropped} records removed"))
    if left:
        terminal.remark(f"not purged yet: node {', '.join(map(str, left))}; they drop everything when they are back")
    return NOT_ALL if left else 0


def quota(
    context: typer.Context,
    name: NameArgument,
    size: Annotated[str, typer.Argument(metavar="SIZE", help='Such as 10GiB, or "none".')],
    store: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    quota_bytes = None if size == "none" else parse_size(size, "quota")
    with _owned(context, store) as root:
        made = set_quota(root, name, quota_bytes)
    terminal.result(_document(made), lambda console: console.print(f"tenant {made.name}: quota {_shown_quota(made)}"))


def _shown_quota(tenant: Tenant) -> str:
    return "none" if tenant.quota_bytes is None else human_bytes(tenant.quota_bytes)


def _left(tenant: Tenant, tombstones: Tombstones) -> list[int]:
    """Nodes that a purge of this tenant could not reach yet."""
    return sorted(frozenset[int]().union(*(tombstones.get(tag, frozenset()) for tag in tenant.retired)))


def _document(tenant: Tenant) -> dict[str, Json]:
    return {
        "name": tenant.name,
        "generation": tenant.generation,
        "tag": tenant.tag.hex(),
        "retired": [tag.hex() for tag in tenant.retired],
        "quota_bytes": tenant.quota_bytes,
        "purging": tenant.purging,
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
