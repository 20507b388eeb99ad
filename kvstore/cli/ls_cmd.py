"""`kvstore ls`: the blocks of a store, one a line, in order of their keys."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import typer

from efs.index import IndexEntry
from efs.limits import DEPTH_UNKNOWN, KEY_BYTES
from efs.nodeview import Records, Slot, locations_of
from efs.storeview import StoreView, last_key
from kvstore.cli.keys import parse_prefix
from kvstore.cli.options import JsonOption, RootOption, config_of, terminal_of, url_of
from kvstore.cli.terminal import Terminal, human_age
from kvstore.store import store_root
from kvstore.tenants import NO_TENANT_TAG, list_tenants

_HELP = """List the blocks of a store in order of their keys: key, nodes that hold it, size, depth in its chain,
tenant, age.

Reads files only; works beside a running owner. A block with several versions has a line for each. Continue a listing
with --after and the last key shown.

\b
Examples:
  kvstore ls
  kvstore ls --limit 0 --json | jq '.blocks | length'
  kvstore ls --after 3fa9c0de --limit 100
"""


@dataclass(frozen=True, slots=True)
class Listed:
    """One version of a block. nodes: how many indexes list it; the rest is from the first sound record, None
    without."""

    key: bytes
    digest: bytes
    nodes: int
    block_bytes: int | None
    depth: int | None
    tenant: str | None
    arrival_ms: int | None


def register(app: typer.Typer) -> None:
    app.command("ls", help=_HELP, short_help="List blocks.")(ls)


def ls(
    context: typer.Context,
    limit: Annotated[int, typer.Option("--limit", metavar="N", min=0, help="Most lines; 0 is all.")] = 1000,
    after: Annotated[
        str | None, typer.Option("--after", metavar="KEY", help="Begin behind this key or prefix.")
    ] = None,
    store: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    root = store_root(url_of(config_of(context, store)))
    start = None
    if after is not None:
        start = bytes.fromhex(parse_prefix(after).ljust(2 * KEY_BYTES, "f"))
    with StoreView.open(root) as view:
        show = _show_json if terminal.as_json else _show_text
        more = show(terminal, _listing(view, start, _tenants(root)), limit)
    if more:
        terminal.remark(f"more than {limit} blocks: continue with --after KEY, or use --limit 0")


def _tenants(root: str) -> dict[bytes, str]:
    """Names by tag, as far as this user may read them."""
    try:
        return {tenant.tag: tenant.name for tenant in list_tenants(root)}
    except (OSError, ValueError):
        return {}


def _listing(view: StoreView, start: bytes | None, tenants: dict[bytes, str]) -> Iterator[Listed]:
    after = start
    while entries := view.next_entries(after):
        versions: dict[bytes, dict[int, IndexEntry]] = {}
        for index, page in entries.items():
            for entry in page:
                versions.setdefault(entry.index_key, {})[index] = entry
        records = _records(view, versions)
        for index_key in sorted(versions):
            yield _listed(index_key, len(versions[index_key]), records.get(index_key), tenants)
        after = last_key(entries)


def _records(view: StoreView, versions: dict[bytes, dict[int, IndexEntry]]) -> dict[bytes, Records]:
    """The first sound record of each version. Nodes are asked in turn, each once, for what the ones before it
    lacked."""
    found: dict[bytes, Records] = {}
    for node in view.views:
        wanted = [
            held[node.node_index] for key, held in versions.items() if key not in found and node.node_index in held
        ]
        for entry, record in zip(wanted, node.records(locations_of(wanted)), strict=True):
            whose = record["key"].tobytes() + record["digest"].tobytes()
            if record["status"] == Slot.LIVE and whose == entry.index_key:
                found[entry.index_key] = record
    return found


def _listed(index_key: bytes, nodes: int, record: Records | None, tenants: dict[bytes, str]) -> Listed:
    key, digest = index_key[:KEY_BYTES], index_key[KEY_BYTES:]
    if record is None:
        return Listed(key, digest, nodes, None, None, None, None)
    tag = int(record["tenant_tag"]).to_bytes(8, "little")
    tenant = None if tag == NO_TENANT_TAG else tenants.get(tag, tag.hex())
    depth = int(record["depth"])
    return Listed(
        key,
        digest,
        nodes,
        int(record["block_bytes"]),
        None if depth == DEPTH_UNKNOWN else depth,
        tenant,
        int(record["arrival_ms"]),
    )


def _show_text(terminal: Terminal, listing: Iterator[Listed], limit: int) -> bool:
    now_ms = time.time() * 1000
    terminal.write(f"{'key':64}  {'digest':32}  nodes       bytes   depth       age  tenant\n")
    for position, block in enumerate(listing):
        if limit and position >= limit:
            return True
        age = "?" if block.arrival_ms is None else human_age((now_ms - block.arrival_ms) / 1000)
        terminal.write(
            f"{block.key.hex()}  {block.digest.hex()}  {block.nodes:5}  {_known(block.block_bytes):>10}  "
            f"{_known(block.depth):>6}  {age:>8}  {block.tenant or '-'}\n"
        )
    return False


def _show_json(terminal: Terminal, listing: Iterator[Listed], limit: int) -> bool:
    """One document, written as the listing comes, so that its size does not matter to memory."""
    more = False
    terminal.write('{"blocks": [')
    for position, block in enumerate(listing):
        if limit and position >= limit:
            more = True
            break
        document = {
            "key": block.key.hex(),
            "digest": block.digest.hex(),
            "nodes": block.nodes,
            "block_bytes": block.block_bytes,
            "depth": block.depth,
            "tenant": block.tenant,
            "arrival_ms": block.arrival_ms,
        }
        terminal.write((",\n  " if position else "\n  ") + json.dumps(document))
    terminal.write(f'\n], "more": {json.dumps(more)}}}\n')
    return more


def _known(value: int | None) -> str:
    return "?" if value is None else str(value)
