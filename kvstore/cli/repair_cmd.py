"""`kvstore repair`: give blocks that lost shards their shards back."""

from __future__ import annotations

from dataclasses import asdict

import typer

from efs.fsck import resume_key
from efs.groups import AnyFileSystem
from efs.repair import RepairReport
from kvstore.cli.failures import DAMAGE, NOT_ALL
from kvstore.cli.options import (
    JsonOption,
    MaxDurationOption,
    ResumeOption,
    StoreOption,
    config_of,
    require_duration,
    terminal_of,
    url_of,
)
from kvstore.cli.session import watched, with_filesystem
from kvstore.cli.terminal import Json

_HELP = """Rebuild missing shards of blocks that can still be read, from ten sound shards of the same version.

Needs ownership: a running owner is named and left alone; it repairs what its reads meet by itself. What is rebuilt is
byte for byte what was lost, and looks used when its sources were. A node that has evicted what is as cold refuses it,
and the block is left to die; a block with fewer than ten shards is left to the sweep. Nodes that are away stay as they
are; one that is back and missed changes is brought up to date first. Can be stopped at any moment and run again.

Exit codes: 0 done, every node was looked at to the end; 1 shards are still missing, nodes are away or not up to date
yet, or it was stopped before the end; 4 a block turned out damaged beyond repair; 8 could not run.

\b
Examples:
  kvstore repair
  kvstore repair --max-duration 600
"""


def register(app: typer.Typer) -> None:
    app.command("repair", help=_HELP, short_help="Rebuild missing shards.")(repair)


def repair(
    context: typer.Context,
    max_duration: MaxDurationOption = None,
    resume: ResumeOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    url = url_of(config_of(context, store))
    after = resume_key(resume)
    require_duration(max_duration)
    with terminal.progress("repair", 1.0) as advance:

        async def work(filesystem: AnyFileSystem) -> tuple[RepairReport, list[int]]:
            upkeep = filesystem.upkeep
            if upkeep.syncing:
                await watched(upkeep.sync(), lambda: upkeep.share_done, advance)
            run = upkeep.repair(after=after, max_seconds=max_duration)
            return await watched(run, lambda: upkeep.share_done, advance), list(upkeep.syncing)

        report, syncing = with_filesystem(url, work)
    terminal.result(document_of(report, syncing), lambda console: console.print(summary(report, syncing)))
    if report.hopeless or report.inconsistent:
        return DAMAGE
    left = report.failed or report.unplaced or report.missing or syncing or report.resume is not None
    return NOT_ALL if left else 0


def document_of(report: RepairReport, syncing: list[int]) -> dict[str, Json]:
    document = asdict(report)
    for name in ("hopeless", "inconsistent"):
        document[name] = [{"key": key.hex(), "digest": digest.hex()} for key, digest in getattr(report, name)]
    document["missing"] = list(report.missing)
    document["syncing"] = list(syncing)
    return document


def summary(report: RepairReport, syncing: list[int]) -> str:
    lines = [
        f"looked at  {report.records} records in {report.seconds:.1f} s",
        f"repaired   {report.rebuilt} shards of {report.found} blocks that lacked some"
        + (f"; {report.corrupt} damaged ones were dropped" if report.corrupt else ""),
    ]
    left = []
    if report.cold:
        left.append(f"{report.cold} shards too cold to come back")
    if report.failed:
        left.append(f"{report.failed} shards that could not be stored")
    if report.unplaced:
        left.append(f"{report.unplaced} shards of nodes that take nothing new")
    if report.hopeless or report.inconsistent:
        left.append(f"{len(report.hopeless) + len(report.inconsistent)} blocks damaged beyond repair")
    if report.missing:
        left.append("nodes " + ", ".join(map(str, report.missing)) + " that are away, with what they lack")
    if syncing:
        left.append("nodes " + ", ".join(map(str, syncing)) + " that are not up to date yet")
    if left:
        lines.append("left       " + "; ".join(left))
    if report.resume is not None:
        lines.append(f"stopped    continue with --resume {report.resume}")
    return "\n".join(lines)
