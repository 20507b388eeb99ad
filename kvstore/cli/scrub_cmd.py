"""`kvstore scrub`: read and check every shard, and mend those that are not sound."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from efs.groups import AnyFileSystem
from efs.limits import SCRUB_STEP_BYTES
from efs.scrub import ScrubReport
from kvstore.cli.failures import DAMAGE, NOT_ALL, REPAIRED, UsageMistake
from kvstore.cli.options import (
    JsonOption,
    StoreOption,
    config_of,
    require_duration,
    terminal_of,
    url_of,
)
from kvstore.cli.session import watched, with_filesystem
from kvstore.cli.terminal import human_bytes
from kvstore.config import parse_size

_HELP = """Read and check every shard of every node; those that are not sound are dropped and rebuilt.

Needs ownership: a running owner is named and left alone; it scrubs in the background when the setting `scrub` is on.
Goes on where the last scrub of this store stopped, by --max-duration, by a signal or with its owner; --from-start
begins anew. --rate bounds the bytes read per second.

Exit codes: 0 everything that the round had left was looked at and is sound; 1 damage was found and mended, nodes are
away, or it was stopped before the end of the round; 4 damage was found and not all of it mended; 8 could not run.

\b
Examples:
  kvstore scrub
  kvstore scrub --max-duration 3600 --rate 50MB
"""


def register(app: typer.Typer) -> None:
    app.command("scrub", help=_HELP, short_help="Check every shard and mend what is not sound.")(scrub)


def scrub(
    context: typer.Context,
    max_duration: Annotated[
        float | None,
        typer.Option("--max-duration", metavar="S", help="Stop after this many seconds; the next scrub goes on."),
    ] = None,
    from_start: Annotated[bool, typer.Option("--from-start", help="Begin a new round.")] = False,
    rate: Annotated[str | None, typer.Option("--rate", metavar="SIZE", help="Most bytes read per second.")] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    url = url_of(config_of(context, store))
    require_duration(max_duration)
    per_second = None
    if rate is not None:
        per_second = parse_size(rate, "--rate") // SCRUB_STEP_BYTES
        if not per_second:
            raise UsageMistake(f"--rate {rate}: must be at least {SCRUB_STEP_BYTES} bytes")
    with terminal.progress("scrub", 1.0) as advance:

        async def work(filesystem: AnyFileSystem) -> ScrubReport:
            upkeep = filesystem.upkeep
            run = upkeep.scrub(max_seconds=max_duration, per_second=per_second, from_start=from_start)
            return await watched(run, lambda: upkeep.share_done, advance)

        report = with_filesystem(url, work)
    document = asdict(report)
    document["missing"] = list(report.missing)
    after = report.cursor.after
    document["cursor"] = {"node": report.cursor.node, "after": None if after is None else after.hex()}
    terminal.result(document, lambda console: console.print(_summary(report)))
    if report.failed or report.rebuilt < report.unsound:
        return DAMAGE
    if report.missing or not report.finished:
        return NOT_ALL
    return REPAIRED if report.unsound else 0


def _summary(report: ScrubReport) -> str:
    lines = [
        f"checked  {report.records} shards, {human_bytes(report.bytes)}, in {report.seconds:.1f} s",
        f"found    {report.unsound} that were not sound; {report.rebuilt} shards rebuilt"
        + (f"; {report.failed} that could not be read" if report.failed else ""),
    ]
    if report.missing:
        lines.append("away     nodes " + ", ".join(map(str, report.missing)) + ", which were not looked at to the end")
    if not report.finished:
        lines.append(f"stopped  on node {report.cursor.node}; the rest was not looked at, the next scrub goes on there")
    return "\n".join(lines)
