"""The timeline: what is busy, what is hidden under what, and the two files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gdr.device import CpuDevice
from gdr.timeline import Panel, Span, Timeline, busy_ms, chrome_trace, hidden_share, save_picture, save_trace
from tests.support.clock import FakeClock

SPANS = [
    Span("copy", "segment 0", 1.0, 3.0, {"bytes": 10}),
    Span("copy", "segment 1", 2.0, 5.0),
    Span("copy", "segment 2", 8.0, 9.0),
    Span("compute", "layer 0", 4.0, 8.5),
    Span("fetch", "2 blocks", 0.0, 1.0),
]


def test_overlapping_spans_of_a_lane_count_once() -> None:
    assert busy_ms(SPANS, "copy") == pytest.approx(5.0)
    assert busy_ms(SPANS, "compute") == pytest.approx(4.5)
    assert busy_ms(SPANS, "nothing") == 0


def test_the_hidden_share_is_what_ran_while_the_other_lane_was_busy() -> None:
    assert hidden_share(SPANS, "copy", "compute") == pytest.approx((1.0 + 0.5) / 5.0)
    assert hidden_share(SPANS, "fetch", "compute") == 0
    assert hidden_share(SPANS, "nothing", "compute") == 1.0


def test_host_and_device_spans_stand_on_one_scale_that_begins_at_the_origin() -> None:
    clock = FakeClock()
    device = CpuDevice(clock=clock)
    timeline = Timeline(device, clock=clock)
    stream = device.new_stream("copy")
    clock.advance(0.001)
    start = stream.record(timed=True)
    clock.advance(0.002)
    timeline.device("copy", "segment 0", start, stream.record(timed=True), blocks=3)
    begun = timeline.now()
    clock.advance(0.004)
    timeline.host("fetch", "3 blocks", begun, timeline.now())
    first, second = timeline.spans()
    assert (first.lane, second.lane) == ("copy", "fetch")
    assert (first.start_ms, first.stop_ms) == pytest.approx((1.0, 3.0))
    assert (second.start_ms, second.stop_ms) == pytest.approx((3.0, 7.0))
    assert first.detail == {"blocks": 3}
    timeline.restart()
    assert timeline.spans() == []
    assert timeline.now() == 0


def test_more_spans_than_the_limit_are_counted_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gdr.timeline.MAX_EVENT_SPANS", 3)
    timeline = Timeline(CpuDevice())
    for _ in range(5):
        timeline.host("fetch", "x", 0.0, 1.0)
    assert len(timeline.spans()) == 3
    assert timeline.left_out == 2


def test_the_trace_is_what_chrome_reads(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(SPANS, path)
    document = json.loads(path.read_text())
    assert document == chrome_trace(SPANS)
    events = document["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    assert list(names.values()) == ["fetch", "copy", "compute"]
    complete = [event for event in events if event["ph"] == "X"]
    assert len(complete) == len(SPANS)
    assert all(names[event["tid"]] == event["cat"] for event in complete)
    first = next(event for event in complete if event["name"] == "segment 0")
    assert (first["ts"], first["dur"], first["args"]) == (1000.0, 2000.0, {"bytes": 10})


def test_the_picture_is_a_png_of_some_size(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "picture.png"
    save_picture([Panel("all", SPANS), Panel("beginning", SPANS, 4.0)], path)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG\r\n")
    assert len(data) > 5_000
