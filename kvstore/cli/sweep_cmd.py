"""`kvstore sweep`: remove stripes that can never be read."""

from __future__ import annotations

from dataclasses import asdict

import typer

from efs.fsck import resume_key
from efs.groups import AnyFileSystem
from efs.sweep import SweepReport
from kvstore.cli.failures import NOT_ALL
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
from kvstore.cli.session import with_filesystem

_HELP = """Remove what can never be read: versions on fewer than ten nodes, and versions that lost to a complete one.

Nothing younger than two minutes is removed, because its put may still be running. With nodes away only what they could
not complete goes, and no version that lost: it is kept until all twelve nodes can be asked. An owner sweeps by itself
every hour. Needs ownership: a running owner is named and left alone. Can be stopped at any moment and run again.

Exit codes: 0 done; 1 stopped by --max-duration before the end, or some node is away; 8 could not run.

\b
Examples:
  kvstore sweep
  kvstore sweep --max-duration 600
"""


def register(app: typer.Typer) -> None:
    app.command("sweep", help=_HELP, short_help="Remove stripes that can never be read.")(sweep)


def sweep(
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

    async def work(filesystem: AnyFileSystem) -> SweepReport:
        return await filesystem.sweep(after=after, max_seconds=max_duration)

    report = with_filesystem(url, work)
    document = asdict(report) | {"missing": list(report.missing)}
    terminal.result(document, lambda console: console.print(summary(report)))
    return NOT_ALL if report.missing or report.resume is not None else 0


def summary(report: SweepReport) -> str:
    lines = [
        f"looked at  {report.records} records in {report.seconds:.1f} s",
        f"found      {report.hollow} hollow stripes, {report.losing} versions that lost",
        f"removed    {report.dropped} records" + (f"; {report.spared} were too young" if report.spared else ""),
    ]
    if report.missing:
        lines.append("away       nodes " + ", ".join(map(str, report.missing)))
    if report.resume is not None:
        lines.append(f"stopped    continue with --resume {report.resume}")
    return "\n".join(lines)
