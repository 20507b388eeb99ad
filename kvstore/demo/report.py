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
        yield _steps_table(report.steps, framed=console.is_terminal)
        for step in report.steps:
            for line in step.differences:
                yield f"[bold red]{escape(step.title)}: {escape(line)}[/bold red]"
        yield ""
        yield from _closing_lines(report)


def _steps_table(steps: Sequence[Step], framed: bool) -> Table:
    table = Table(box=box.ROUNDED if framed else None, header_style="bold", pad_edge=framed)
    table.add_column("each row is a new process")
    for heading in ("blocks\nloaded", "\nrebuilt", "shards\ncorrupt", "tokens\nprefilled", "MB\nfetched", "load\ns",
                    "prefill\ns", "without\nstore s", "saved\ns"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("\nanswer", no_wrap=True)
    table.add_column("", no_wrap=True)
    for step in steps:
        found = step.found
        report = found.get
        same = step.expected.same_answer
        table.add_row(
            escape(step.title),
            str(report.blocks if report else 0),
            str(report.rebuilt if report else 0),
            str(report.corrupt if report else 0),
            f"{found.prefilled_tokens:,} of {found.prompt_tokens:,}",
            f"{report.bytes / 1e6:.1f}" if report else "0.0",
            f"{found.load_seconds:.2f}",
            f"{found.prefill_seconds:.2f}",
            f"{step.baseline_seconds:.2f}",
            f"{step.saved_seconds:.2f}" if same and report and report.blocks else "-",
            ("same" if same else "differs") if not step.differences else "?",
            "[green]ok[/green]" if not step.differences else "[bold red]WRONG[/bold red]",
        )
    return table


def _closing_lines(report: DemoReport) -> list[str]:
    lines = []
    resumed = [step for step in report.steps if step.found.get is not None and step.found.get.blocks
               and step.expected.same_answer]
    if resumed:
        best = max(resumed, key=lambda step: step.saved_seconds)
        share = best.saved_seconds / best.baseline_seconds
        lines.append(
            f"{escape(best.title)}: {best.saved_seconds:.1f} s of {best.baseline_seconds:.1f} s prefill saved "
            f"({share:.0%}), {report.threads} threads"
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
