"""`kvstore node`: work on single nodes of a store."""

from __future__ import annotations

from typing import Annotated

import typer

from efs.groups import AnyFileSystem
from efs.osio import SystemIo
from efs.repair import RepairReport
from efs.replace import prepare_node
from kvstore.cli import serve_cmd
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import JsonOption, RootOption, config_of, terminal_of, url_of
from kvstore.cli.repair_cmd import document_of, summary
from kvstore.cli.session import watched, with_filesystem
from kvstore.cli.terminal import Json
from kvstore.store import store_root

_HELP = """Nodes of a store, one by one."""
_REPLACE = """Make an empty directory the node N and fill it from the other eleven.

The directory is the old place of the node, or --path; it must be absent or empty, so move away what is left of the old
node first. The new node has a new identity: the old directory is refused should it turn up again. While it is being
filled it counts for no read and no acknowledgement. Needs ownership, ten other nodes, and --yes. Killed on the way,
the same command goes on; so does, in the background, whoever opens the store next.

A cluster.toml beside the store names the new node then too, as its next version: give clients on other machines the new
file. A map in etcd is not changed: use `kvstore cluster replace-node` there, and in the roots of later groups.

Exit codes: 0 the node is complete; 1 it is not up to date yet; 2 wrong request; 8 could not run.

\b
Examples:
  kvstore node replace 7 --yes
  kvstore node replace 7 --path /mnt/nvme12/kv --yes
"""


def register(app: typer.Typer) -> None:
    node = typer.Typer(
        name="node", help=_HELP, short_help="Replace or serve nodes.", rich_markup_mode=None, add_completion=False
    )
    node.command("replace", help=_REPLACE, short_help="Replace a node by an empty directory.")(replace)
    node.command("serve", help=serve_cmd.HELP, short_help=serve_cmd.SHORT_HELP)(serve_cmd.serve)
    app.add_typer(node)


def replace(
    context: typer.Context,
    node: Annotated[int, typer.Argument(metavar="N", help="Index of the node, 0 to 11.")],
    path: Annotated[str | None, typer.Option("--path", metavar="DIR", help="Put the new node there.")] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Really do it.")] = False,
    store: RootOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if not yes:
        raise UsageMistake(f"replacing node {node} gives up what is left of the old one for good: say --yes")
    root = store_root(url_of(config_of(context, store)))
    prepared = prepare_node(SystemIo(), root, node, path)
    with terminal.progress(f"fill node {node}", 1.0) as advance:

        async def work(filesystem: AnyFileSystem) -> tuple[RepairReport | None, int, list[int]]:
            upkeep = filesystem.upkeep
            before = filesystem.counters.get("repair_rebuilt")
            report = await watched(upkeep.sync(), lambda: upkeep.share_done, advance)
            return report, filesystem.counters.get("repair_rebuilt") - before, list(upkeep.syncing)

        report, rebuilt, syncing = with_filesystem(root, work)
    document: dict[str, Json] = {
        "node": node,
        "path": prepared.path,
        "node_id": prepared.node_id,
        "resumed": prepared.resumed,
        "rebuilt": rebuilt,
        "complete": node not in syncing,
        "last_pass": None if report is None else document_of(report, syncing),
    }

    def show(line: str) -> str:
        return line if report is None or node not in syncing else line + "\n" + summary(report, syncing)

    state = "complete" if node not in syncing else "not up to date yet"
    terminal.result(
        document,
        lambda console: console.print(show(f"node {node} at {prepared.path} is {state}: {rebuilt} shards rebuilt")),
    )
    return NOT_ALL if node in syncing else 0
