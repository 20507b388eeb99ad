"""One result out of those of several EC groups. Pure.

Nodes of a cluster are numbered through: node i of group g is node 12 · g + i in everything that is joined here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from efs.limits import STRIPE_SHARDS
from efs.purge import PurgeReport
from efs.repair import RepairReport
from efs.scrub import ScrubReport
from efs.sweep import SweepReport
from efs.types import GetReport, PutReport

Rows = NDArray[np.intp]
"""Positions in a call of the keys that a group has of it, ascending."""


def numbered(group: int, node_index: int) -> int:
    """The number in the cluster of a node of a group."""
    return STRIPE_SHARDS * group + node_index


class SegmentJoin:
    """Segments of one fetch, of which each group settles its own blocks: one fires once all groups have settled it, in
    order, with the leading blocks of all. `of(part)` is the `on_segment` of the group with `rows[part]`.

    The counts of a group never grow from segment to segment, so neither do these."""

    def __init__(self, blocks: int, segments: int, rows: Sequence[Rows],
                 on_segment: Callable[[int, int], None]) -> None:
        self._rows = tuple(rows)
        self._on_segment = on_segment
        self._leading = [blocks] * segments
        self._waiting = [len(rows)] * segments
        self._fired = 0

    def of(self, part: int) -> Callable[[int, int], None]:
        rows = self._rows[part]

        def settled(segment: int, leading: int) -> None:
            if leading < len(rows):
                self._leading[segment] = min(self._leading[segment], int(rows[leading]))
            self._waiting[segment] -= 1
            while self._fired < len(self._waiting) and not self._waiting[self._fired]:
                self._fired += 1
                self._on_segment(self._fired - 1, self._leading[self._fired - 1])

        return settled


def joined_get(blocks: int, parts: Sequence[tuple[Rows, GetReport]], seconds: float) -> GetReport:
    """The report of a fetch of so many blocks."""
    ok = np.zeros(blocks, np.bool_)
    for rows, report in parts:
        ok[rows] = report.ok
    leading = blocks if ok.all() else int(ok.argmin())
    summed = {name: sum(getattr(report, name) for _, report in parts)
              for name in ("rebuilt", "hedged", "corrupt", "missing", "raced", "bytes")}
    return GetReport(blocks=leading, ok=tuple(ok.tolist()), seconds=seconds, **summed)


def joined_put(reports: Sequence[PutReport]) -> PutReport:
    whys = (report.why for report in reports if report.why is not None)
    return PutReport(sum(report.acked for report in reports), sum(report.already for report in reports),
                     sum(report.failed for report in reports), sum(report.at_risk for report in reports),
                     next(whys, None))


class _Resumable(Protocol):
    """What the reports of long work have in common."""

    @property
    def missing(self) -> tuple[int, ...]: ...

    @property
    def seconds(self) -> float: ...


Report = TypeVar("Report", bound=_Resumable)


def _summed(report: type[Report], reports: Sequence[Report], **chosen: object) -> Report:
    """Numbers and tuples added up, `missing` numbered, the longest time; the rest as `chosen`."""
    values: dict[str, object] = dict(chosen)
    values["missing"] = tuple(numbered(group, index) for group, one in enumerate(reports) for index in one.missing)
    values["seconds"] = max(one.seconds for one in reports)
    for name in [field.name for field in fields(report) if field.name not in values]:  # type: ignore[arg-type]
        parts = [getattr(one, name) for one in reports]
        values[name] = sum(parts[1:], parts[0])
    return report(**values)


def _resume(resumes: Sequence[str | None]) -> str | None:
    """Where the next run begins, so that no group has anything left out: the lowest key that was reached."""
    return min((resume for resume in resumes if resume is not None), default=None)


def joined_repair(reports: Sequence[RepairReport]) -> RepairReport:
    return _summed(RepairReport, reports, resume=_resume([report.resume for report in reports]))


def joined_sweep(reports: Sequence[SweepReport]) -> SweepReport:
    return _summed(SweepReport, reports, resume=_resume([report.resume for report in reports]))


def joined_scrub(reports: Sequence[ScrubReport]) -> ScrubReport:
    """The cursor is that of the first group that has not come to its end."""
    behind = next((group for group, report in enumerate(reports) if not report.finished), len(reports) - 1)
    cursor = reports[behind].cursor
    return _summed(ScrubReport, reports, finished=all(report.finished for report in reports),
                   cursor=replace(cursor, node=numbered(behind, cursor.node)))


def joined_purge(reports: Sequence[PurgeReport]) -> PurgeReport:
    missing = tuple(numbered(group, index) for group, one in enumerate(reports) for index in one.missing)
    return PurgeReport(sum(report.dropped for report in reports), missing)
