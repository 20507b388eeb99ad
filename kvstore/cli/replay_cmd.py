"""`kvstore replay`: a request trace through a real store, beside exact models. The work is in `kvstore.replay`."""

from __future__ import annotations

import asyncio
import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated, cast

import typer
import uvloop
from rich.table import Table

from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import JsonOption, terminal_of
from kvstore.cli.replay_plot import PlotFile
from kvstore.cli.terminal import Advance, Json, Terminal, human_bytes, table
from kvstore.config import parse_size
from kvstore.replay import ReplayReport, Workload, replay
from kvstore.replayplan import StorePlan, plan_store

DEFAULT_CAPACITY = "10%"
POINTS_ALLOWED = 2.0

_HELP = """Run a request trace through a real store with real eviction, and compare its hit ratio with exact models.

FILE is a trace of one JSON object a line, plain, .gz or .xz: timestamp in ms, input_length, output_length and hash_ids,
which stand for 512 tokens each with a partial last one (Mooncake), or for full blocks of 128 tokens. Each request is
matched, fetched, and put as far as it was missing; payloads are small and checked on the way back. The trace's time
drives the store's clock. The models, on the same trace: a cache without a limit, exact LRU that gives up the tail of a
chain before its head, and Belady's, which knows the future.

--capacity is a percentage of the trace's unique blocks, which the store then keeps, or the raw size of a store; it may
be given several times. Stores are made in a temporary directory below --directory, and removed. With --json one object
is printed, an array of them for several capacities. With --strict exit code 1 when the hit ratio by token is more than
2 points away from exact LRU.

\b
Examples:
  kvstore replay trace.jsonl
  kvstore replay trace.jsonl.xz --capacity 5% --capacity 10% --capacity 20% --capacity 50% --plot replay.png
  kvstore replay trace.jsonl --capacity 64MiB --requests 500 --json
"""


def register(app: typer.Typer) -> None:
    app.command("replay", help=_HELP, short_help="Hit ratio of a request trace, beside exact models.")(run_replay)


def run_replay(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The trace.")],
    capacities: Annotated[
        list[str] | None,
        typer.Option("--capacity", metavar="SIZE|PERCENT", help=f"Of the store.  [default: {DEFAULT_CAPACITY}]"),
    ] = None,
    block_bytes: Annotated[
        str | None,
        typer.Option("--block-bytes", metavar="SIZE", help="Payload of a block, with a size as capacity only."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", metavar="N", min=1, help="Only the first N requests.")
    ] = None,
    stretch: Annotated[float, typer.Option("--stretch", metavar="X", help="Factor of the trace's time.")] = 1.0,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Also draw a PNG (needs matplotlib).")] = (
        None
    ),
    directory: Annotated[
        str | None, typer.Option("--directory", metavar="DIR", help="Where the stores are made.  [default: $TMPDIR]")
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 when over 2 points off exact LRU.")] = False,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if directory is not None and not Path(directory).is_dir():
        raise UsageMistake(f"{directory}: not a directory")
    drawing = None if plot is None else PlotFile(plot)
    size = None if block_bytes is None else parse_size(block_bytes, "--block-bytes")
    workload = Workload.load(file, requests)
    plans = [(text, plan_store(text, workload.unique_blocks, size)) for text in capacities or [DEFAULT_CAPACITY]]
    reports = _replay_all(terminal, workload, plans, stretch, directory)
    documents = [cast("Json", report.document()) for report in reports]
    terminal.result(documents[0] if len(documents) == 1 else documents,
                    lambda console: console.print(_as_table(workload, reports)))
    if drawing is not None:
        drawing.draw(workload, reports)
    return NOT_ALL if strict and any(abs(report.points_below_lru) > POINTS_ALLOWED for report in reports) else 0


def _replay_all(terminal: Terminal, workload: Workload, plans: list[tuple[str, StorePlan]], stretch: float,
                directory: str | None) -> list[ReplayReport]:
    reports: list[ReplayReport] = []
    with (
        terminal.progress("replay", len(plans) * len(workload.requests)) as advance,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        for text, plan in plans:
            before = len(reports) * len(workload.requests)
            with tempfile.TemporaryDirectory(prefix="kvstore-replay-", dir=directory) as place:
                work = replay(workload, plan, Path(place) / "store", capacity=text, stretch=stretch,
                              progress=partial(_advance_behind, advance, before))
                reports.append(runner.run(work))
    return reports


def _advance_behind(advance: Advance, before: int, done: int) -> None:
    advance(before + done)


def _as_table(workload: Workload, reports: list[ReplayReport]) -> Table:
    title = (f"{workload.name}: {len(workload.requests)} requests, {workload.unique_blocks} unique blocks in "
             f"{workload.asked_blocks} asked for, {workload.seconds:.0f} s; hit ratio by token")
    headings = ("capacity", "blocks", "raw", "time", "this store", "exact LRU", "points below", "Belady", "infinite",
                "by block")
    shown = table(*headings, title=title, right=headings[1:])
    for report in reports:
        below = report.points_below_lru
        shown.add_row(
            report.capacity,
            str(report.capacity_blocks),
            human_bytes(report.capacity_bytes),
            f"x {report.stretch:g}",
            f"[bold]{report.token_hit_ratio:.3f}[/bold]",
            f"{report.lru_token_hit_ratio:.3f}",
            f"[{'green' if abs(below) <= POINTS_ALLOWED else 'red'}]{below:+.1f}[/]",
            f"{report.belady_token_hit_ratio:.3f}",
            f"{report.infinite_token_hit_ratio:.3f}",
            f"{report.block_hit_ratio:.3f}",
        )
    return shown
