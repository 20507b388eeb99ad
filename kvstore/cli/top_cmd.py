"""`kvstore top`: the nodes of a store or a cluster while they work, drawn anew every second."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated

import typer
import uvloop
from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from kvstore.cli.options import JsonLinesOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.readings import (
    ClusterSource,
    DirectorySource,
    NodeChange,
    Reading,
    Source,
    client_changes,
    node_changes,
    serving,
)
from kvstore.cli.terminal import Json, Terminal, human_bytes, table
from kvstore.store import cluster_of, store_root

_HELP = """Watch the nodes of a store or a cluster: state, fill, records, and what they do a second.

STORE is a store's directory, a cluster.toml or etcd://HOST:PORT/NAME. A directory is read as files, beside its owner;
its fill is what it occupies on disk. A cluster is asked through its servers; its fill is live slots, and what clients
count is that of the process which looks after the store, where that is on this machine. Reads are requests for shards
that a server answered; what clients on its machine read from the shared slab is not in them. Ends with Ctrl-C. Without
a terminal, or with --once, one frame is printed, from two readings --interval apart. With --json a line of JSON for
each frame.

\b
Examples:
  kvstore top
  kvstore top /var/lib/kv/cluster.toml
  kvstore top --store /var/lib/kvstore --once --json
"""
_LEAST_INTERVAL_S = 0.1
_SOUND = ("serving", "closed")
"""States in which nothing is wrong with a node: on disk nobody may have it open."""

Frame = tuple[Reading | None, Reading]


def register(app: typer.Typer) -> None:
    app.command("top", help=_HELP, short_help="Watch the nodes of a store or cluster.")(top)


def top(
    context: typer.Context,
    place: Annotated[
        str | None, typer.Argument(metavar="STORE", help="As --store.")
    ] = None,
    once: Annotated[bool, typer.Option("--once", help="Print one frame and end.")] = False,
    interval: Annotated[
        float, typer.Option("--interval", metavar="S", min=_LEAST_INTERVAL_S, help="Seconds between frames.")
    ] = 1.0,
    store: StoreOption = None,
    as_json: JsonLinesOption = False,
) -> None:
    terminal = terminal_of(context, as_json)
    url = url_of(config_of(context, place if place is not None else store))
    once = once or not (terminal.as_json or sys.stdout.isatty())
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        try:
            runner.run(_show(terminal, url, interval, once))
        except KeyboardInterrupt:
            return


async def _show(terminal: Terminal, url: str, interval_s: float, once: bool) -> None:
    cluster = cluster_of(url)
    source: Source = DirectorySource(store_root(url)) if cluster is None else await ClusterSource.open(cluster)
    try:
        async with aclosing(_frames(source, interval_s)) as frames:
            if once:
                await anext(frames)
                _print(terminal, url, await anext(frames))
            elif terminal.as_json:
                async for frame in frames:
                    _print(terminal, url, frame)
            else:
                with Live(auto_refresh=False) as live:
                    async for frame in frames:
                        live.update(_picture(url, frame), refresh=True)
    finally:
        await source.close()


async def _frames(source: Source, interval_s: float) -> AsyncGenerator[Frame, None]:
    before: Reading | None = None
    while True:
        now = await source.read(time.monotonic())
        yield before, now
        before = now
        await asyncio.sleep(interval_s)


def _print(terminal: Terminal, url: str, frame: Frame) -> None:
    if terminal.as_json:
        terminal.announce(_document(url, frame), "")
    else:
        terminal.show(_picture(url, frame))


def _document(url: str, frame: Frame) -> dict[str, Json]:
    before, now = frame
    clients = client_changes(before, now)
    nodes: list[Json] = []
    for change in node_changes(before, now):
        row = asdict(change)
        nodes.append({**row.pop("now"), **row})
    shown = None if clients is None else {
        name: {"total": total, "per_s": per_s} for name, (total, per_s) in clients.items()}
    moment = datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return {"time": moment, "store": url, "nodes_serving": serving(now), "nodes": nodes, "client": shown}


def _picture(url: str, frame: Frame) -> Group:
    before, now = frame
    clients = client_changes(before, now)
    head = f"{url}  {serving(now)} of {len(now.nodes)} nodes serve"
    lines = [Text(head, style="bold")]
    if clients is None:
        lines.append(Text("clients  unknown: the store is looked after on another machine, or by nobody"))
    else:
        parts = [f"{name.replace('_', ' ')} {total:,}{'' if per_s is None else f' ({per_s:,.0f}/s)'}"
                 for name, (total, per_s) in clients.items()]
        lines.append(Text("clients  " + ", ".join(parts)))
    return Group(*lines, _table(node_changes(before, now)))


def _table(changes: Sequence[NodeChange]) -> Table:
    numbers = ("node", "used", "of", "fill", "records", "puts/s", "evicted/s", "reads/s", "read B/s", "errors")
    made = table("node", "state", *numbers[1:], right=numbers)
    for change in changes:
        now = change.now
        made.add_row(
            str(now.node), now.state, _size(now.used_bytes), _size(now.capacity_bytes),
            "" if change.fill is None else f"{change.fill:.1%}", "" if now.records is None else f"{now.records:,}",
            _rate(change.puts_per_s), _rate(change.evicted_per_s), _rate(change.reads_per_s),
            _size(change.read_bytes_per_s), f"{change.io_errors:,}" if now.capacity_bytes else "",
            style=None if now.state in _SOUND else "red")
    return made


def _size(size: float | None) -> str:
    return "" if size is None else human_bytes(size)


def _rate(per_s: float | None) -> str:
    return "" if per_s is None else f"{per_s:,.0f}"
