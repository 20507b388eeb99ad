"""`kvstore fsck`: check a store against its formats; read-only unless repair is asked for, twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Final

import typer
from rich.console import Console
from rich.markup import escape

from efs.errors import EfsError, Locked
from efs.findings import Finding, Sums
from efs.fsck import Fsck, Options
from efs.fsckrepair import MendReport, mend_store
from efs.limits import STRIPE_SHARDS
from efs.osio import SystemIo
from efs.storeview import StoreView
from kvstore.cli.failures import COULD_NOT_RUN, DAMAGE, REPAIRED, UsageMistake
from kvstore.cli.options import (
    JsonOption,
    MaxDurationOption,
    ResumeOption,
    RootOption,
    config_of,
    terminal_of,
    url_of,
)
from kvstore.cli.terminal import Terminal, human_bytes
from kvstore.store import store_root

_HELP = """Check a store: identities, extents, tables against indexes both ways, every block's shards, accounting.

Reads only, unless --repair --yes. Works beside a running owner, where a suspicion is looked at again until it is
certain, and without one. With --deep every payload byte is read and checked, and the shards of each block against
each other.

With --repair --yes, what was found is then mended from any ten sound shards, and what cannot be mended is dropped:
hollow stripes, orphan slots, torn and damaged entries, stale index entries; a lost index is rebuilt from the tables.
It needs ownership: a running owner is named and left alone. Afterwards everything is checked once more.
--max-duration bounds a check, not the mending.

Exit codes: 0 nothing found; 1 found and repaired; 4 damage found, or left; 8 could not run, or stopped by
--max-duration before the end without damage; 2 wrong request.

\b
Examples:
  kvstore fsck
  kvstore fsck --deep --json > report.json
  kvstore fsck --deep --max-duration 3600
  kvstore fsck --repair --yes
"""

FINDINGS_KEPT: Final = 100_000
"""Findings that one repair works from; a store that has more is repaired in several runs."""


def register(app: typer.Typer) -> None:
    app.command("fsck", help=_HELP, short_help="Check a store; repair it when asked.")(fsck)


def fsck(
    context: typer.Context,
    deep: Annotated[bool, typer.Option("--deep", help="Read and check every byte.")] = False,
    max_duration: MaxDurationOption = None,
    resume: ResumeOption = None,
    repair: Annotated[bool, typer.Option("--repair", help="Mend what is found; needs --yes.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Really change the store.")] = False,
    store: RootOption = None,
    as_json: JsonOption = False,
) -> int:
    terminal = terminal_of(context, as_json)
    if repair != yes:
        raise UsageMistake("fsck changes nothing unless it is given both --repair and --yes")
    options = Options(deep=deep, max_duration_s=max_duration, resume=resume)
    root = store_root(url_of(config_of(context, store)))
    write = _Json(terminal) if terminal.as_json else _Text(terminal)
    found: list[Finding] = []
    sums = _check(terminal, root, options, write, found, needs_ownership=repair)
    left, mended = sums, None
    if repair and (sums.found or sums.torn):
        mended = _mend(terminal, root, found, sums.torn > 0)
        write.mended(mended)
        left = _check(terminal, root, options, write, [])
    write.end(sums)
    if left.found:
        return DAMAGE
    if left.resume is not None:
        return COULD_NOT_RUN
    return REPAIRED if mended is not None else 0


def _check(terminal: Terminal, root: str, options: Options, write: _Text | _Json, found: list[Finding],
           needs_ownership: bool = False) -> Sums:
    """One run, its findings written; the first FINDINGS_KEPT are added to `found`."""
    with StoreView.open(root, probe=True) as view, terminal.progress("check", 1.0) as advance:
        if needs_ownership and (owner := view.owner()) is not None:
            raise Locked(root, owner)
        run = Fsck(view, options, progress=advance)
        for finding in run.run():
            write.finding(finding)
            if len(found) < FINDINGS_KEPT:
                found.append(finding)
        write.sums(run.sums)
    return run.sums


def _mend(terminal: Terminal, root: str, found: list[Finding], torn: bool) -> MendReport:
    """Mend; what keeps the store from being opened is a remark, and damage that the next check finds."""
    try:
        return asyncio.run(mend_store(SystemIo(), root, found, torn))
    except Locked:
        raise
    except EfsError as error:
        terminal.remark(f"the store cannot be opened, only files were mended: {error}")
        return MendReport(0, 0, 0, 0, 0, 0)


class _Text:
    """Findings and sums as lines."""

    def __init__(self, terminal: Terminal) -> None:
        self._terminal = terminal

    def finding(self, finding: Finding) -> None:
        self._terminal.show(_line(finding))

    def sums(self, sums: Sums) -> None:
        _show_sums(self._terminal, sums)

    def mended(self, report: MendReport) -> None:
        self._terminal.show(
            f"mended   {report.rebuilt} shards rebuilt, {report.dropped} records dropped, {report.indexes} indexes and "
            f"{report.slabs} slabs made anew, {report.extents} extents freed, {report.checked} nodes gone through "
            "entry by entry"
        )

    def end(self, sums: Sums) -> None:
        pass


class _Json:
    """One document, written finding by finding, so that their number does not matter to memory."""

    def __init__(self, terminal: Terminal) -> None:
        self._write: Callable[[str], None] = terminal.write
        self._first = True
        self._list = "findings"
        self._write('{"findings": [')

    def finding(self, finding: Finding) -> None:
        self._write(("\n  " if self._first else ",\n  ") + json.dumps(finding.document()))
        self._first = False

    def sums(self, sums: Sums) -> None:
        document = asdict(sums)
        document["found"] = dict(sums.found)
        clean = json.dumps(not sums.found and sums.resume is None)
        names = ("clean", "sums") if self._list == "findings" else ("clean_now", "sums_now")
        self._write(f'\n], "{names[0]}": {clean}, "{names[1]}": {json.dumps(document)}')

    def mended(self, report: MendReport) -> None:
        self._list, self._first = "left", True
        self._write(f', "mended": {json.dumps(asdict(report))}, "left": [')

    def end(self, sums: Sums) -> None:
        self._write("}\n")


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
