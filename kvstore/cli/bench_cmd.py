"""`kvstore bench`: the reference work in units of memcpy, beside its targets. The work is in `kvstore.bench`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, cast

import typer
from rich.table import Table

from kvstore.bench import run_bench
from kvstore.benchserved import run_served_bench
from kvstore.benchwork import REFERENCE_BLOCKS, BenchReport, Plan, Row
from kvstore.cli.failures import NOT_ALL, UsageMistake
from kvstore.cli.options import JsonOption, terminal_of
from kvstore.cli.terminal import Json, human_bytes, table
from kvstore.config import parse_size

_HELP = """Measure the store on this machine, in units of a memcpy of the same bytes taken in the same run.

Reference work: 757 blocks of 113,920 bytes (DeepSeek-V4.1-Flash) into pre-touched shared memory: fetched from a fresh
store and from one aged by writing three times its capacity, through maps and by preadv, with all nodes, one and two
gone, and cold; hashed and matched; put. Every fetch is verified byte by byte; a run that misses a block fails the
benchmark. Stores are made in a temporary directory below --directory, which needs about 3 GiB, and removed. Exit code
8 when a run failed; with --strict 1 when a target was missed.

--servers measures twelve `kvstore node serve` processes on this machine instead: fetched over TCP and Unix sockets,
with one server stopped, with two killed, and put.

\b
Examples:
  kvstore bench
  kvstore bench --directory /mnt/nvme0 --json > bench.json
  kvstore bench --runs 3 --no-cold
  kvstore bench --servers
"""


def register(app: typer.Typer) -> None:
    app.command("bench", help=_HELP, short_help="Measure this machine against memcpy.")(bench)


def bench(
    context: typer.Context,
    directory: Annotated[
        str | None, typer.Option("--directory", metavar="DIR", help="Where the stores are made.  [default: $TMPDIR]")
    ] = None,
    runs: Annotated[int, typer.Option("--runs", metavar="N", min=1, help="Timed runs of each case.")] = 9,
    blocks: Annotated[int, typer.Option("--blocks", metavar="N", min=16, max=781, help="Blocks of the work.")] = (
        REFERENCE_BLOCKS
    ),
    aged_capacity: Annotated[
        str, typer.Option("--aged-capacity", metavar="SIZE", help="Raw capacity of the store that is aged.")
    ] = "768MiB",
    cold: Annotated[bool, typer.Option("--cold/--no-cold", help="Also with the page cache dropped.")] = True,
    servers: Annotated[bool, typer.Option("--servers", help="Node servers instead of an embedded store.")] = False,
    seed: Annotated[int, typer.Option("--seed", metavar="N", help="Of tokens, bytes and sessions.")] = 1,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 when a target was missed.")] = False,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if directory is not None and not Path(directory).is_dir():
        raise UsageMistake(f"{directory}: not a directory")
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-", dir=directory) as place:
        plan = Plan(
            Path(place),
            blocks=blocks,
            runs=runs,
            seed=seed,
            cold=cold,
            aged_bytes=parse_size(aged_capacity, "--aged-capacity"),
        )
        with terminal.progress("bench", 1.0) as advance:
            report = (run_served_bench if servers else run_bench)(plan, progress=advance)
    terminal.result(cast("Json", report.document()), lambda console: console.print(_as_table(report)))
    return NOT_ALL if strict and report.missed else 0


def _as_table(report: BenchReport) -> Table:
    title = f"{report.plan.blocks} blocks of 113,920 bytes, {report.plan.runs} runs, {report.machine['cpu']}"
    shown = table(
        "case",
        "reached",
        "target",
        "",
        "median",
        "memcpy",
        "slots a range",
        title=title,
        right=("reached", "target", "median", "memcpy", "slots a range"),
    )
    for row in report.rows:
        verdict = {True: "[green]met[/green]", False: "[red]missed[/red]", None: ""}[row.met]
        slots = row.notes.get("slots_per_range")
        shown.add_row(
            row.case,
            _value(row, row.value),
            "" if row.target is None else _value(row, row.target),
            verdict,
            _ms(row.milliseconds),
            _ms(row.memcpy_ms),
            "" if slots is None else f"{slots:.1f}",
        )
    return shown


def _value(row: Row, value: float) -> str:
    if row.unit == "bytes":
        return human_bytes(value)
    if row.unit == "ms":
        return _ms(value)
    return f"{value:.0%}" if row.unit == "share" else f"{value:.2f} x"


def _ms(value: float | None) -> str:
    return "" if value is None else f"{value:.1f} ms"
