"""The outcome of the demonstration: as a table for a person, as a document for a program.

The table has a frame on a terminal and none in a pipe, so that a log holds plain text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich import box
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.table import Table

from efs.limits import DATA_SHARDS
from kvstore.demo.messages import TurnResult
from kvstore.demo.steps import Expected

MISMATCH: Final = 1
"""Exit code when a step did not come out as it must."""
WIDE_COLUMNS: Final = 108
_HEADINGS: Final = ("blocks", "rebuilt", "corrupt", "prefilled", "MB", "load", "rest", "cold", "saved")
_LEGEND: Final = "load: match, fetch, copy · rest: prefill of the other tokens · cold: of all, no store · seconds"
_WIDE_ONLY: Final = frozenset({"MB", "load", "rest"})


@dataclass(frozen=True, slots=True)
class Step:
    """One process that used the store. baseline_seconds: prefill of the same prompt without a store."""

    title: str
    pid: int
    expected: Expected
    found: TurnResult
    baseline_seconds: float
    differences: tuple[str, ...]

    @property
    def saved_seconds(self) -> float:
        """Prefill time without the store, less match, fetch and prefill of the rest."""
        return self.baseline_seconds - self.found.load_seconds - self.found.prefill_seconds


@dataclass(frozen=True, slots=True)
class Exchange:
    """What was asked in a turn and answered without a store."""

    question: str
    answer: str
    prompt_tokens: int
    prefill_seconds: float


@dataclass(frozen=True, slots=True)
class DemoReport:
    """All of it. store_bytes: disk space of the store after all turns, None when it is not the demonstration's own.

    left_out: why steps are missing, None when none is. threads: of torch, in every process. kept: where the
    store was left, None when it was removed. prepare_seconds: finding (converted False) or making the converted model.
    """

    model: str
    block_bytes: int
    block_tokens: int
    segments: int
    threads: int
    converted: bool
    prepare_seconds: float
    exchanges: tuple[Exchange, ...]
    steps: tuple[Step, ...]
    store_bytes: int | None
    left_out: str | None
    kept: str | None
    seconds: float

    @property
    def ok(self) -> bool:
        return bool(self.steps) and not any(step.differences for step in self.steps)

    @property
    def exit_code(self) -> int:
        return 0 if self.ok else MISMATCH

    def document(self) -> dict[str, Any]:
        """Everything but the keys, as JSON values."""
        return {
            "ok": self.ok,
            "model": self.model,
            "block": {"bytes": self.block_bytes, "tokens": self.block_tokens, "segments": self.segments},
            "threads": self.threads,
            "prepare": {"converted": self.converted, "seconds": round(self.prepare_seconds, 3)},
            "conversation": [_rounded(asdict(exchange)) for exchange in self.exchanges],
            "steps": [_step_document(step) for step in self.steps],
            "store_bytes": self.store_bytes,
            "left_out": self.left_out,
            "kept": self.kept,
            "seconds": round(self.seconds, 3),
        }

    def table(self) -> Screen:
        """What to print on a rich console."""
        return Screen(self)


@dataclass(frozen=True, slots=True)
class Screen:
    """A report on a console: conversation, table, verdict."""

    report: DemoReport

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        report = self.report
        shard_bytes = -(-report.block_bytes // DATA_SHARDS)
        yield f"[bold]{escape(report.model)}[/bold] resumes a conversation from KV in 12 erasure-coded directories"
        yield (
            f"one block: {report.block_tokens} tokens, {report.block_bytes:,} bytes of KV, {report.segments} segments; "
            f"12 shards of {shard_bytes:,} bytes, any 10 of which are enough"
        )
        yield ""
        for number, exchange in enumerate(report.exchanges, 1):
            yield f"[dim]turn {number}, {exchange.prompt_tokens:,} tokens[/dim]  {escape(exchange.question)}"
            yield f"        [italic]{escape(' '.join(exchange.answer.split()))} …[/italic]"
        yield ""
        yield _steps_table(report.steps, framed=console.is_terminal, narrow=options.max_width < WIDE_COLUMNS)
        yield f"[dim]{_LEGEND}[/dim]"
        for step in report.steps:
            for line in step.differences:
                yield f"[bold red]{escape(step.title)}: {escape(line)}[/bold red]"
        yield ""
        yield from _closing_lines(report)


def _steps_table(steps: Sequence[Step], framed: bool, narrow: bool) -> Table:
    """A row for each process; a narrow one leaves out what the others imply."""
    padding = (0, 0, 0, 0 if narrow and framed else 1)
    table = Table(box=box.ROUNDED if framed else None, header_style="bold", pad_edge=framed, padding=padding)
    table.add_column("a process each", no_wrap=True)
    for heading in _HEADINGS:
        if not narrow or heading not in _WIDE_ONLY:
            table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("" if narrow else "answer", no_wrap=True)
    for step in steps:
        cells = dict(zip(_HEADINGS, _numbers(step), strict=True))
        answer = "✓" if narrow else "same ✓" if step.expected.same_answer else "differs ✓"
        table.add_row(
            escape(step.title),
            *(cell for heading, cell in cells.items() if not narrow or heading not in _WIDE_ONLY),
            f"[green]{answer}[/green]" if not step.differences else "[bold red]WRONG[/bold red]",
        )
    return table


def _numbers(step: Step) -> tuple[str, ...]:
    """The cells under _HEADINGS."""
    found, report = step.found, step.found.get
    resumed = report is not None and report.blocks > 0 and step.expected.same_answer
    return (
        str(report.blocks if report else 0),
        str(report.rebuilt if report else 0),
        str(report.corrupt if report else 0),
        f"{found.prefilled_tokens:,}/{found.prompt_tokens:,}",
        f"{report.bytes / 1e6:.1f}" if report else "0.0",
        f"{found.load_seconds:.2f}",
        f"{found.prefill_seconds:.1f}",
        f"{step.baseline_seconds:.1f}",
        f"{step.saved_seconds:.1f}" if resumed else "-",
    )


def _closing_lines(report: DemoReport) -> list[str]:
    lines = []
    last_turn = report.steps[len(report.exchanges) - 1] if len(report.steps) >= len(report.exchanges) > 1 else None
    if last_turn is not None and last_turn.found.get is not None and last_turn.baseline_seconds > 0:
        got, saved = last_turn.found.get, last_turn.saved_seconds
        lines.append(
            f"turn {len(report.exchanges)} in a new process: {got.blocks} blocks, {got.bytes / 1e6:.1f} MB, back in "
            f"{last_turn.found.load_seconds:.2f} s; {saved:.1f} s of {last_turn.baseline_seconds:.1f} s prefill saved "
            f"({saved / last_turn.baseline_seconds:.0%}), {report.threads} threads"
        )
    if report.store_bytes is not None and report.steps:
        blocks = sum(step.expected.acked for step in report.steps)
        lines.append(
            f"{blocks} blocks, {blocks * report.block_bytes / 1e6:.1f} MB of KV, "
            f"take {report.store_bytes / 1e6:.1f} MB in the 12 directories"
        )
    if report.left_out is not None:
        lines.append(f"[yellow]{escape(report.left_out)}[/yellow]")
    if report.kept is not None:
        lines.append(f"kept: {escape(report.kept)}")
    wrong = sum(bool(step.differences) for step in report.steps)
    verdict = "[bold green]every step came out exactly as it must[/bold green]" if report.ok else (
        f"[bold red]{wrong} of {len(report.steps)} steps came out wrong[/bold red]")
    lines.append(f"{verdict}, {report.seconds:.0f} s in all")
    return lines


def _step_document(step: Step) -> dict[str, Any]:
    found = _rounded(asdict(step.found))
    found["keys"] = len(step.found.keys)
    if step.found.get is not None:
        found["get"]["ok"] = sum(step.found.get.ok)
    return {
        "title": step.title,
        "pid": step.pid,
        "ok": not step.differences,
        "differences": list(step.differences),
        "expected": asdict(step.expected),
        "found": found,
        "baseline_prefill_seconds": round(step.baseline_seconds, 4),
        "saved_seconds": round(step.saved_seconds, 4),
    }


def _rounded(values: Mapping[str, Any]) -> dict[str, Any]:
    """The same with floats cut to four digits, at any depth."""
    return {
        name: round(value, 4) if isinstance(value, float) else _rounded(value) if isinstance(value, dict) else value
        for name, value in values.items()
    }
