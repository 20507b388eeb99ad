"""`kvstore top`: rates from readings, one frame for a pipe, frames one after another on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE
from kvstore.cli.readings import NodeReading, Reading, client_changes, node_changes, rate
from tests.support.cli import ROOT, command, environment, run
from tests.support.laidstore import LaidStore, lay_store, make_blocks

NODE = 7
DEADLINE_S = 60.0

Watched = tuple[subprocess.Popen[bytes], int]


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), make_blocks(seed=1, count=5))


def reading(at_s: float, counters: dict[str, int], client: dict[str, int] | None = None) -> Reading:
    return Reading(at_s, [NodeReading(NODE, "serving", 50, 200, 3, counters)], client)


# -- Rates -----------------------------------------------------------------------------------------------------------


def test_a_rate_is_the_difference_by_the_time_between() -> None:
    before = reading(10.0, {"node_put_records": 100, "wire_sessions": 1}, {"get_blocks": 5})
    now = reading(12.0, {"node_put_records": 150, "node_evicted": 8, "wire_sessions": 1, "wire_reads": 6}, {
        "get_blocks": 25, "rebuilt_blocks": 3})
    (change,) = node_changes(before, now)
    assert (change.puts_per_s, change.evicted_per_s, change.reads_per_s, change.read_bytes_per_s) == (25, 4, 3, 0)
    assert change.fill == 0.25
    clients = client_changes(before, now)
    assert clients is not None
    assert clients["read_blocks"] == (25, 10)
    assert clients["rebuilt"] == (3, 1.5)


def test_what_is_not_known_is_not_shown_as_zero() -> None:
    (first,) = node_changes(None, reading(1.0, {"node_put_records": 9}))
    assert first.puts_per_s is None
    (embedded,) = node_changes(reading(1.0, {}), reading(2.0, {"node_put_records": 9}))
    assert (embedded.puts_per_s, embedded.reads_per_s) == (9, None)
    assert client_changes(None, reading(1.0, {})) is None
    away = Reading(2.0, [NodeReading(NODE, "suspect", None, None, None, {})], None)
    (gone,) = node_changes(reading(1.0, {"node_put_records": 9}), away)
    assert (gone.fill, gone.puts_per_s) == (None, None)
    (back,) = node_changes(away, reading(3.0, {"node_put_records": 9}))
    assert back.puts_per_s is None


def test_counters_of_a_node_that_was_made_anew_are_no_rate() -> None:
    assert rate({"a": 5}, {"a": 4}, "a", 1.0) is None
    assert rate({"a": 5}, {"a": 5}, "a", 0.0) is None


# -- One frame -------------------------------------------------------------------------------------------------------


def test_one_frame_of_a_store_on_disk(store: LaidStore) -> None:
    shutil.rmtree(Path(store.root) / "nodes" / f"{NODE:02d}")
    outcome = run("top", store.root, "--once", "--interval", "0.1")
    assert outcome.code == 0, outcome.err
    assert "0 of 12 nodes serve" in outcome.out
    (row,) = [line for line in outcome.out.splitlines() if re.match(rf" *{NODE} ", line)]
    assert row.split()[:2] == [str(NODE), "absent"]
    document = run("--store", store.root, "--json", "top", "--once", "--interval", "0.1").document()
    assert document["nodes"][0]["records"] == 5
    assert document["nodes"][0]["puts_per_s"] == 0
    assert document["nodes"][NODE]["puts_per_s"] is None
    assert document["client"]["rebuilt"] == {"total": 0, "per_s": 0}


def test_a_store_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    outcome = run("top", str(tmp_path / "nothing"), "--once")
    assert outcome.code == 2
    assert str(tmp_path / "nothing") in outcome.error_line
    assert run("top").code == 2


# -- A terminal ------------------------------------------------------------------------------------------------------


@pytest.fixture
def watched(store: LaidStore) -> Iterator[Watched]:
    """`kvstore top` on a terminal, and the terminal's other end. Ctrl-C works also where whoever runs the tests was
    started without it."""
    here, there = pty.openpty()
    process = subprocess.Popen(command("top", store.root, "--interval", "0.1"), cwd=ROOT, stdin=there, stdout=there,
                               stderr=there, preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
                               env=environment() | {"TERM": "xterm", "COLUMNS": "160", "LINES": "40"})
    os.close(there)
    yield process, here
    if process.poll() is None:
        process.kill()
    process.wait()
    os.close(here)


def read_until(terminal: int, text: bytes) -> bytes:
    until, data = time.monotonic() + DEADLINE_S, b""
    while text not in data:
        readable, _, _ = select.select([terminal], [], [], max(0.0, until - time.monotonic()))
        assert readable, f"{text!r} did not come: {data[-500:]!r}"
        data += os.read(terminal, 65_536)
    return data


def test_frames_follow_the_counters_until_ctrl_c(store: LaidStore, watched: Watched) -> None:
    process, terminal = watched
    read_until(terminal, b"rebuilt 0")
    counters = CounterFile.open(f"{store.root}/{COUNTERS_FILE}", writable=True)
    counters.add("rebuilt_blocks", 4_321)
    counters.close()
    read_until(terminal, b"rebuilt 4,321")
    process.send_signal(signal.SIGINT)
    assert process.wait(DEADLINE_S) == 0
