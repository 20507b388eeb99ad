"""Where a command's results go: tables for a person, one JSON document for a program, a bar only on a terminal.

Standard output carries results and nothing else; remarks and progress go to standard error. A progress bar is shown
only when both are terminals, so that neither a pipe nor a log ever contains one.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvstore.cli.streams import knows_unicode

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
Advance = Callable[[float], None]
"""Called with the work done so far, in the unit of the total."""


class Terminal:
    """The output of one command."""

    def __init__(self, as_json: bool) -> None:
        self.as_json = as_json
        width = None if sys.stdout.isatty() else 160
        self._out = Console(file=sys.stdout, width=width, highlight=False, soft_wrap=width is not None)
        self._err = Console(file=sys.stderr, highlight=False, soft_wrap=not sys.stderr.isatty())

    def result(self, document: Json, show: Callable[[Console], None]) -> None:
        """Print the JSON document, or let `show` print to the console."""
        if self.as_json:
            sys.stdout.write(json.dumps(document, indent=2, ensure_ascii=not knows_unicode()) + "\n")
        else:
            show(self._out)

    def announce(self, document: Json, text: str) -> None:
        """One line at once, for whoever waits for it: the text, or the JSON document of a line each."""
        sys.stdout.write((json.dumps(document, ensure_ascii=not knows_unicode()) if self.as_json else text) + "\n")
        sys.stdout.flush()

    def write(self, text: str) -> None:
        """Raw text to standard output, for documents that are written piece by piece."""
        sys.stdout.write(text)

    def show(self, renderable: object) -> None:
        self._out.print(renderable)

    def remark(self, text: str) -> None:
        """A line for a person on standard error: a warning, or what happens next. Not shown with --json."""
        if not self.as_json:
            self._err.print(escape(text))

    @contextmanager
    def progress(self, what: str, total: float | None) -> Iterator[Advance]:
        """A progress bar, when there is somebody to see it."""
        if self.as_json or not (sys.stdout.isatty() and sys.stderr.isatty()):
            yield lambda _done: None
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self._err, transient=True) as bar:
            task = bar.add_task(escape(what), total=total)
            yield lambda done: bar.update(task, completed=done)


def table(*headings: str, title: str | None = None, right: Sequence[str] = ()) -> Table:
    """An empty table; the headings named in `right` are numbers and stand right."""
    made = Table(title=title, title_justify="left", title_style="bold", header_style="bold", box=None, pad_edge=False)
    for heading in headings:
        made.add_column(escape(heading), justify="right" if heading in right else "left", overflow="fold")
    return made


def human_bytes(size: float) -> str:
    """A size with a binary unit: 1536 → "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    raise AssertionError("the last unit takes every size")


def human_age(seconds: float) -> str:
    """An age in its largest unit: 5400 → "1.5 h"."""
    for unit, length in (("d", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= length:
            return f"{seconds / length:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
