"""The picture of a replay: hit ratio by token over capacity, of the store and of the models.

matplotlib is an extra and takes half a second to import, so it is imported here when a picture is asked for, and before
the replay, which is long.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from kvstore.cli.failures import UsageMistake
from kvstore.cli.outfile import BY_UMASK, output_file, require_file
from kvstore.replay import ReplayReport, Workload

INCHES: Final = (6.4, 4.0)
DOTS_PER_INCH: Final = 110
_MODELS: Final = (
    ("infinite cache", "infinite_token_hit_ratio", "#8a8a8a", ":"),
    ("Belady (knows the future)", "belady_token_hit_ratio", "#4c78a8", "--"),
    ("exact LRU, tail first", "lru_token_hit_ratio", "#54a24b", "-"),
)


class PlotFile:
    """A PNG to be written. UsageMistake, when it is made, for a place that is none and for want of matplotlib."""

    def __init__(self, path: Path) -> None:
        if path.suffix.lower() != ".png":
            raise UsageMistake(f"--plot {path}: must end in .png")
        if not path.parent.is_dir():
            raise UsageMistake(f"--plot {path}: {path.parent} is not a directory")
        require_file(str(path))
        try:
            self._figures: Any = import_module("matplotlib.figure")
        except ImportError as error:
            raise UsageMistake(
                f"--plot needs matplotlib, which is not installed ({error}): in a clone, pip install '.[plot]'"
            ) from None
        self._path = path

    def draw(self, workload: Workload, reports: Sequence[ReplayReport]) -> None:
        """Write the file."""
        ordered = sorted(reports, key=lambda report: report.capacity_blocks)
        shares = [100 * report.capacity_blocks / workload.unique_blocks for report in ordered]
        figure = self._figures.Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        for label, field, color, line in _MODELS:
            axes.plot(shares, [getattr(report, field) for report in ordered], line, color=color, label=label,
                      marker="." if len(ordered) == 1 else "")
        axes.plot(shares, [report.token_hit_ratio for report in ordered], "o", color="#e45756", label="this store")
        axes.set_xscale("log")
        axes.set_xticks(shares, [f"{share:.3g} %" for share in shares], minor=False)
        axes.set_xticks([], minor=True)
        axes.set_ylim(0, 1)
        axes.set_xlabel("blocks kept, of all unique blocks of the trace")
        axes.set_ylabel("hit ratio by token")
        axes.set_title(f"{workload.name}: {len(workload.requests)} requests", fontsize=10)
        axes.grid(alpha=0.3)
        axes.legend(loc="best", fontsize=8)
        with output_file(str(self._path), BY_UMASK) as file:
            figure.savefig(file, dpi=DOTS_PER_INCH, format="png")
