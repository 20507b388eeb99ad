"""What happened when: fetch, copy, scatter, compute as spans, written as a Chrome trace and drawn as a picture.

A span is on a *lane*. Host spans are two readings of the clock. Device spans are two timed events; they are turned
into times only in `spans()`, after the device is done, and against an *origin*: an event recorded at a known reading
of the clock. All times are milliseconds from the origin.

The JSON is the Trace Event Format that chrome://tracing and Perfetto read: complete events ("ph": "X", microseconds),
one thread a lane, named by metadata events. Spans beyond MAX_EVENT_SPANS are counted and not kept.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from efs.clock import Clock, SystemClock
from gdr.device import Device, Event
from gdr.limits import MAX_EVENT_SPANS

LANES: Final = ("fetch", "copy", "scatter", "wait", "compute", "write-back")
_COLOURS: Final = {"fetch": "#4477aa", "copy": "#66ccee", "scatter": "#228833", "wait": "#ee6677",
                   "compute": "#ccbb44", "write-back": "#aa3377"}


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted from `start_ms` to `stop_ms` after the timeline's origin."""

    lane: str
    name: str
    start_ms: float
    stop_ms: float
    detail: dict[str, int] = field(default_factory=dict)


class Timeline:
    """Collects spans from any thread."""

    def __init__(self, device: Device, *, clock: Clock | None = None) -> None:
        self._device = device
        self._clock = clock or SystemClock()
        self._lock = threading.Lock()
        self._host: list[Span] = []
        self._on_device: list[tuple[str, str, Event, Event, dict[str, int]]] = []
        self.restart()

    def restart(self) -> None:
        """Forget all spans; the origin is now."""
        stream = self._device.compute_stream()
        stream.synchronize()
        with self._lock:
            self._host.clear()
            self._on_device.clear()
            self.left_out = 0
            self._origin = stream.record(timed=True)
            self._origin_s = self._clock.monotonic()

    def now(self) -> float:
        """Milliseconds since the origin."""
        return (self._clock.monotonic() - self._origin_s) * 1000

    def host(self, lane: str, name: str, start_ms: float, stop_ms: float, **detail: int) -> None:
        """A span measured on the host, in `now()` readings."""
        with self._lock:
            if self._room():
                self._host.append(Span(lane, name, start_ms, stop_ms, detail))

    def device(self, lane: str, name: str, start: Event, stop: Event, **detail: int) -> None:
        """A span between two timed events of one stream."""
        with self._lock:
            if self._room():
                self._on_device.append((lane, name, start, stop, detail))

    def _room(self) -> bool:
        if len(self._host) + len(self._on_device) < MAX_EVENT_SPANS:
            return True
        self.left_out += 1
        return False

    def spans(self) -> list[Span]:
        """All spans by start. Blocks until the events of device spans are done."""
        with self._lock:
            found = list(self._host)
            on_device = list(self._on_device)
        for lane, name, start, stop, detail in on_device:
            stop.synchronize()
            found.append(Span(lane, name, self._device.elapsed_ms(self._origin, start),
                              self._device.elapsed_ms(self._origin, stop), detail))
        return sorted(found, key=lambda span: (span.start_ms, span.stop_ms))


def busy_ms(spans: Sequence[Span], lane: str) -> float:
    """Milliseconds in which at least one span of the lane was running."""
    return sum(stop - start for start, stop in _merged(spans, lane))


def hidden_share(spans: Sequence[Span], lane: str, under: str) -> float:
    """Share of a lane's busy time in which the lane `under` was busy too; 1.0 when the lane did nothing."""
    mine, theirs = _merged(spans, lane), _merged(spans, under)
    total = sum(stop - start for start, stop in mine)
    both = sum(
        max(0.0, min(stop, other_stop) - max(start, other_start))
        for start, stop in mine
        for other_start, other_stop in theirs
    )
    return both / total if total else 1.0


def _merged(spans: Sequence[Span], lane: str) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for start, stop in sorted((span.start_ms, span.stop_ms) for span in spans if span.lane == lane):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def chrome_trace(spans: Sequence[Span]) -> dict[str, Any]:
    """The spans as a Trace Event Format document."""
    lanes = _lanes(spans)
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 1, "tid": number, "name": "thread_name", "args": {"name": lane}}
        for number, lane in enumerate(lanes)
    ]
    events.extend(
        {"ph": "X", "pid": 1, "tid": lanes.index(span.lane), "name": span.name, "cat": span.lane,
         "ts": round(span.start_ms * 1000, 3), "dur": round((span.stop_ms - span.start_ms) * 1000, 3), "args":
         span.detail}
        for span in spans
    )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(spans: Sequence[Span], path: Path) -> None:
    """Write the Chrome trace as JSON."""
    path.write_text(json.dumps(chrome_trace(spans)) + "\n", encoding="utf-8")


@dataclass(frozen=True, slots=True)
class Panel:
    """One part of a picture: spans from the origin on, to `stop_ms` or to the last one."""

    title: str
    spans: Sequence[Span]
    stop_ms: float | None = None


def save_picture(panels: Sequence[Panel], path: Path) -> None:
    """Draw the panels under each other as a PNG, lanes over time. Needs matplotlib."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    heights = [1.0 + 0.42 * len(_lanes(panel.spans)) for panel in panels]
    figure = Figure(figsize=(11, sum(heights)), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
    for axes, panel in zip(all_axes[:, 0], panels, strict=True):
        lanes = _lanes(panel.spans)
        for row, lane in enumerate(lanes):
            bars = [(span.start_ms, span.stop_ms - span.start_ms) for span in panel.spans if span.lane == lane]
            colour = _COLOURS.get(lane, "#bbbbbb")
            # Neighbours differ in shade, and a line of the bar's own colour keeps the shortest visible.
            shades = [(colour, 1.0 if number % 2 else 0.6) for number in range(len(bars))]
            axes.broken_barh(bars, (row - 0.4, 0.8), facecolors=shades, edgecolor=colour, linewidth=0.4)
        axes.set_yticks(range(len(lanes)), lanes)
        axes.invert_yaxis()
        axes.set_xlim(0, panel.stop_ms)
        axes.set_title(panel.title, loc="left", fontsize=10)
        axes.grid(axis="x", alpha=0.3)
    all_axes[-1, 0].set_xlabel("milliseconds since the request began")
    figure.savefig(path, dpi=120, format="png")


def _lanes(spans: Sequence[Span]) -> list[str]:
    found = {span.lane for span in spans}
    return [lane for lane in LANES if lane in found] + sorted(found - set(LANES))
