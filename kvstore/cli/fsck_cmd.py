"""`kvstore fsck`: check a store against its formats; read-only."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from efs.findings import Finding, Sums
from efs.fsck import Fsck, Options
from efs.limits import STRIPE_SHARDS
from efs.storeview import StoreView
from kvstore.cli.failures import COULD_NOT_RUN, DAMAGE
from kvstore.cli.options import JsonOption, StoreOption, config_of, terminal_of, url_of
from kvstore.cli.terminal import Terminal, human_bytes
from kvstore.store import store_root

_HELP = """Check a store: identities, extents, tables against indexes both ways, every block's shards, accounting.

Reads only; nothing is repaired. Works beside a running owner, where a suspicion is looked at again until it is
certain, and without one. With --deep every payload byte is read and checked, and the shards of each block against
each other. Exit codes: 0 nothing found; 4 damage found; 8 could not run, or stopped by --max-duration before the end
without a finding; 2 wrong request.

\b
Examples:
  kvstore fsck
  kvstore fsck --deep --json > report.json
  kvstore fsck --deep --max-duration 3600
"""


def register(app: typer.Typer) -> None:
    app.command("fsck", help=_HELP, short_help="Check a store, reading only.")(fsck)


def fsck(
    context: typer.Context,
    deep: Annotated[bool, typer.Option("--deep", help="Read and check every byte.")] = False,
    max_duration: Annotated[
        float | None,
        typer.Option("--max-duration", metavar="S", help="Stop after this many seconds; --resume goes on."),
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option("--resume", metavar="KEY", help="Go on behind this key, printed by a run that stopped."),
    ] = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    options = Options(deep=deep, max_duration_s=max_duration, resume=resume)
    root = store_root(url_of(config_of(context, store)))
    with StoreView.open(root, probe=True) as view, terminal.progress("check", 1.0) as advance:
        run = Fsck(view, options, progress=advance)
        damaged = _write_json(terminal, run) if terminal.as_json else _write_text(terminal, run)
    if damaged:
        return DAMAGE
    return COULD_NOT_RUN if run.sums.resume is not None else 0


def _write_text(terminal: Terminal, run: Fsck) -> bool:
    damaged = False
    for finding in run.run():
        damaged = True
        terminal.show(_line(finding))
    _show_sums(terminal, run.sums)
    return damaged


def _write_json(terminal: Terminal, run: Fsck) -> bool:
    """One document, written finding by finding, so that their number does not matter to memory."""
    damaged = False
    terminal.write('{"findings": [')
    for finding in run.run():
        terminal.write((",\n  " if damaged else "\n  ") + json.dumps(finding.document()))
        damaged = True
    sums = asdict(run.sums)
    sums["found"] = dict(run.sums.found)
    terminal.write(
        f'\n], "clean": {json.dumps(not damaged and run.sums.resume is None)}, "sums": {json.dumps(sums)}}}\n'
    )
    return damaged


def _line(finding: Finding) -> str:
    parts = [f"[red]{finding.kind.value}[/red]"]
    if finding.node is not None:
        parts.append(f"node {finding.node}")
    if finding.key is not None:
        parts.append(f"key {finding.key.hex()}")
    if finding.location is not None:
        parts.append(f"extent {finding.location >> 20} slot {finding.location & 0xFFFFF}")
    return "  ".join(parts) + (": " + escape(finding.detail) if finding.detail else "")


def _show_sums(terminal: Terminal, sums: Sums) -> None:
    def show(console: Console) -> None:
        found = ", ".join(f"{count} {kind}" for kind, count in sorted(Counter(sums.found).items())) or "nothing"
        console.print(f"nodes    {sums.nodes} of {STRIPE_SHARDS} read")
        console.print(
            f"blocks   {sums.versions}: {sums.readable} readable, {sums.at_risk} of them at risk, "
            f"{sums.unreadable} unreadable, {sums.hollow} hollow, "
            f"{sums.fading} being evicted, {sums.young} too young to judge"
        )
        console.print(
            f"records  {sums.records} in tables, {sums.index_entries} in indexes, {sums.torn} torn, "
            f"{sums.unverified} not verified since an unclean stop"
        )
        console.print(
            f"space    {human_bytes(sums.live_bytes)} in live slots, {human_bytes(sums.allocated_bytes)} of extents, "
            f"{human_bytes(sums.total_bytes)} on disk; {human_bytes(sums.verified_bytes)} of payload verified"
        )
        if sums.resume is not None:
            console.print(f"stopped  after {sums.seconds:.1f} s; continue with --resume {sums.resume}")
        console.print(
            f"found    {found} in {sums.seconds:.1f} s" + (", beside a running owner" if sums.beside_owner else "")
        )

    terminal.result(None, show)
