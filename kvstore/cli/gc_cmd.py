"""`kvstore gc`: have every node free space now."""

from __future__ import annotations

import typer

from efs.groups import AnyFileSystem
from efs.limits import MAX_DEADLINE_MS
from efs.types import NodeInfo
from kvstore.cli.failures import NOT_ALL
from kvstore.cli.options import JsonOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.session import with_filesystem
from kvstore.cli.terminal import Json, human_bytes, table

_HELP = """Free space now: every node evicts its least recently used blocks down to the low watermark.

Nodes do this by themselves when they are fuller than the high watermark; a node that is at the low one or below does
nothing. What is evicted is gone, as in any collection. Needs ownership: a running owner is named and left alone.

Exit codes: 0 done; 1 some node is away or did not finish within a minute; 8 could not run.

\b
Examples:
  kvstore gc
  kvstore gc --json
"""


def register(app: typer.Typer) -> None:
    app.command("gc", help=_HELP, short_help="Free space down to the low watermark.")(gc)


def gc(context: typer.Context, store: StoreOption = None, as_json: JsonOption = False) -> int:
    terminal = terminal_of(context, as_json)
    url = url_of(config_of(context, store))

    async def work(filesystem: AnyFileSystem) -> tuple[dict[int, int], list[NodeInfo]]:
        return await filesystem.collect(deadline_ms=MAX_DEADLINE_MS), await filesystem.nodes()

    evicted, nodes = with_filesystem(url, work)
    left = [info.node_index for info in nodes if info.node_index not in evicted]
    shown = table("node", "evicted", "records", "live", right=("node", "evicted", "records", "live"))
    for info in nodes:
        if info.node_index in evicted:
            shown.add_row(str(info.node_index), str(evicted[info.node_index]), str(info.records),
                          human_bytes(info.live_bytes))
    document: dict[str, Json] = {
        "evicted": sum(evicted.values()),
        "nodes": [{"node": info.node_index, "evicted": evicted[info.node_index], "records": info.records,
                   "live_bytes": info.live_bytes} for info in nodes if info.node_index in evicted],
        "missing": left,
    }
    terminal.result(document, lambda console: console.print(shown))
    if left:
        terminal.remark("not collected: node " + ", ".join(map(str, left)))
    return NOT_ALL if left else 0
