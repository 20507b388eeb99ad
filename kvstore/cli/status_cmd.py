"""`kvstore status`: nodes, fill, blocks and counters, from the files alone: also beside an owner, also with nodes
missing."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Annotated

import typer
from rich.console import Console

from efs.extent import extent_of
from efs.findings import Kind
from efs.limits import DATA_SHARDS, PLACEMENT_GROUPS, STRIPE_SHARDS
from efs.osio import SystemIo
from efs.placement import placement_group
from efs.progress import read_progress
from efs.storeview import StoreView, last_key, lock_holder
from efs.tombstones import read_tombstones
from kvstore.cli.options import JsonOption, RootOption, config_of, terminal_of, url_of
from kvstore.cli.terminal import Json, human_bytes, table
from kvstore.store import store_root

_HELP = """Show the state of a store: nodes, capacity, used space, blocks, blocks at risk, counters.

Reads files only, so it works beside a running owner and without one, and with nodes missing. Blocks count by the
indexes: at risk are those on 10 or 11 nodes that can be read, unreadable those on fewer that missing nodes may
complete, incomplete the rest. They are counted for at most --seconds and estimated from that where there are more.
Counters count since the store was made; those of nodes are summed over the nodes that can be read.

\b
Examples:
  kvstore status
  kvstore status --store /var/lib/kvstore --json
"""


@dataclass(slots=True)
class Census:
    """Blocks by the nodes that list them, and live bytes by node. covered: share of all keys that was counted."""

    blocks: int = 0
    whole: int = 0
    at_risk: int = 0
    unreadable: int = 0
    incomplete: int = 0
    covered: float = 0.0
    live_bytes: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class NodeRow:
    """One node for display. Sizes in bytes, None for a node that cannot be read."""

    node: int
    state: str
    path: str
    capacity_bytes: int
    disk_bytes: int | None = None
    live_bytes: int | None = None
    records: int | None = None
    detail: str = ""


def register(app: typer.Typer) -> None:
    app.command("status", help=_HELP, short_help="Show nodes, space, blocks and counters.")(status)


def status(
    context: typer.Context,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", min=0.0, help="Longest time to count blocks.")
    ] = 5.0,
    store: RootOption = None,
    as_json: JsonOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    root = store_root(url_of(config_of(context, store)))
    with StoreView.open(root) as view:
        with terminal.progress("count blocks", 1.0) as advance:
            census = count_blocks(view, seconds, advance)
        rows = node_rows(view, census)
        counters = _counters(view)
        owner = view.owner()
        document: dict[str, Json] = {
            "root": root,
            "cluster_id": view.config.cluster_id,
            "owner_pid": owner,
            "durability": view.config.durability,
            "capacity_bytes": view.config.capacity_bytes,
            "disk_bytes": sum(row.disk_bytes or 0 for row in rows),
            "live_bytes": sum(row.live_bytes or 0 for row in rows),
            "nodes_readable": len(view.views),
            "nodes": [asdict(row) for row in rows],
            "blocks": census.blocks,
            "whole": census.whole,
            "at_risk": census.at_risk,
            "unreadable": census.unreadable,
            "incomplete": census.incomplete,
            "exact": census.covered == 1.0,
            "purge_pending": sorted(frozenset[int]().union(*read_tombstones(SystemIo(), root).values())),
            "counters": counters,
        }
    terminal.result(document, lambda console: _show(console, document, rows, census, counters))


def count_blocks(view: StoreView, seconds: float, advance: object = None) -> Census:
    """Merge the indexes and count versions by the nodes that list them, for at most `seconds`; then scale up."""
    census = Census()
    away = STRIPE_SHARDS - len(view.views)
    views = {node.node_index: node for node in view.views}
    ends_at = time.monotonic() + seconds
    after: bytes | None = None
    while entries := view.next_entries(after):
        held: Counter[bytes] = Counter()
        for index, page in entries.items():
            held.update(entry.index_key for entry in page)
            for extent, records in Counter(extent_of(entry.location) for entry in page).items():
                geometry = views[index].geometry(extent)
                census.live_bytes[index] += records * (geometry.slot_class.slot_bytes if geometry is not None else 0)
        for nodes, versions in Counter(held.values()).items():
            census.blocks += versions
            if nodes == STRIPE_SHARDS:
                census.whole += versions
            elif nodes >= DATA_SHARDS:
                census.at_risk += versions
            elif nodes + away >= DATA_SHARDS:
                census.unreadable += versions
            else:
                census.incomplete += versions
        after = last_key(entries)
        census.covered = (placement_group(after) + 1) / PLACEMENT_GROUPS
        if callable(advance):
            advance(census.covered)
        if time.monotonic() >= ends_at:
            break
    else:
        census.covered = 1.0
    return census if census.covered == 1.0 else _scaled(census)


def _scaled(census: Census) -> Census:
    """Keys are hashes, so what holds for a share of them holds for all."""

    def whole(part: int) -> int:
        return round(part / census.covered)

    return Census(
        whole(census.blocks),
        whole(census.whole),
        whole(census.at_risk),
        whole(census.unreadable),
        whole(census.incomplete),
        census.covered,
        Counter({index: whole(size) for index, size in census.live_bytes.items()}),
    )


def node_rows(view: StoreView, census: Census) -> list[NodeRow]:
    """The twelve nodes as they lie on disk; live bytes are what the census counted. Serving is what some process holds:
    the store's owner or a node server."""
    io = SystemIo()
    readable = {node.node_index: node for node in view.views}
    problems = {problem.node: problem for problem in view.problems}
    syncing = read_progress(io, view.root).syncing
    rows = []
    for index, path in enumerate(view.config.node_paths):
        node = readable.get(index)
        if node is None:
            problem = problems[index]
            state = "absent" if problem.kind is Kind.NODE_ABSENT else problem.kind.value
            rows.append(NodeRow(index, state, path, view.node_capacity, detail=problem.detail))
        else:
            running = "closed" if lock_holder(io, path) is None else "serving"
            rows.append(
                NodeRow(
                    index,
                    "syncing" if index in syncing else running,
                    path,
                    node.config.plan.capacity_bytes,
                    node.space().total,
                    census.live_bytes[index],
                    node.index.entries,
                )
            )
    return rows


def _counters(view: StoreView) -> dict[str, int]:
    """The client's counters and the sums of the nodes'."""
    counters = Counter(view.counters())
    for node in view.views:
        counters.update(node.counters())
    return dict(counters)


def _show(
    console: Console, document: dict[str, Json], rows: list[NodeRow], census: Census, counters: dict[str, int]
) -> None:
    about = "" if census.covered == 1.0 else "about "
    capacity = sum(row.capacity_bytes for row in rows)
    disk, live = sum(row.disk_bytes or 0 for row in rows), sum(row.live_bytes or 0 for row in rows)
    owner = document["owner_pid"]
    console.print(
        f"store     {document['root']}  ({document['durability']}, "
        + (f"owned by process {owner})" if owner is not None else "no owner running)")
    )
    console.print(f"nodes     {document['nodes_readable']} of {STRIPE_SHARDS}")
    console.print(f"capacity  {human_bytes(capacity)}; {human_bytes(live)} in live slots, {human_bytes(disk)} on disk")
    console.print(
        f"blocks    {about}{census.blocks}: {census.whole} whole, {census.at_risk} at risk, "
        f"{census.unreadable} unreadable, {census.incomplete} incomplete"
    )
    if document["purge_pending"]:
        console.print(f"purging   nodes {document['purge_pending']} may still hold records of purged tenants")
    shown = table(
        "node", "state", "live", "disk", "of", "records", "path", right=("node", "live", "disk", "of", "records")
    )
    for row in rows:
        style = None if row.disk_bytes is not None else "red"
        shown.add_row(
            str(row.node),
            row.state,
            _size(row.live_bytes),
            _size(row.disk_bytes),
            human_bytes(row.capacity_bytes),
            "" if row.records is None else str(row.records),
            row.path,
            style=style,
        )
    console.print(shown)
    nonzero = {name: count for name, count in counters.items() if count}
    if nonzero:
        console.print("counters  " + ", ".join(f"{name} {count}" for name, count in nonzero.items()))


def _size(size: int | None) -> str:
    return "" if size is None else human_bytes(size)
