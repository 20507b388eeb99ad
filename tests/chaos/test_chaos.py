"""Chaos with fixed seeds, as a user would run it: two minutes of every kind of damage to a store of its own, the
beginning of a run against servers, and nothing broken."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.leftovers import processes_naming
from tests.support.waiting import eventually
from tools.chaosrig.plan import EVERY_KIND_SECONDS, KINDS
from tools.chaosrig.serverplan import kinds_of, server_plan
from tools.etcdprocess import find_etcd

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
SEED = 1
SERVERS_SEED = 497
SERVERS_SECONDS = 30
"""Three or four episodes, where there is a core for each; on a busy machine one, which suffices."""
PROCESS_SECONDS = 840
"""The first deck is finished whatever time it takes; with a core for itself that is two minutes."""


def chaos(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "tools/chaos.py", *arguments], cwd=ROOT, capture_output=True, text=True,
                          timeout=PROCESS_SECONDS, check=False)


def test_two_minutes_of_every_fault_at_once_break_nothing(tmp_path: Path) -> None:
    done = chaos("--seed", str(SEED), "--seconds", str(EVERY_KIND_SECONDS), "--json", "--directory", str(tmp_path))
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    totals = document["totals"]
    assert document["violations"] == []
    assert done.returncode == 0, done.stderr
    assert {kind: faults["struck"] > 0 and faults["episodes"] > 0 for kind, faults in document["faults"].items()} == \
        dict.fromkeys(KINDS, True)
    assert (totals["wrong_blocks"], totals["lost_blocks"], totals["leaked_bytes"], totals["late_bytes"]) == (0, 0, 0, 0)
    assert totals["fsck_false_findings"] == 0
    assert 0 < totals["highest_du_bytes"] <= totals["capacity_bytes"]
    for name in ("hit_blocks", "guarded_hits", "claims_tested", "missed_blocks", "rebuilt_blocks", "restarts",
                 "puts_cut_by_a_kill", "evicted_records", "fsck_runs_in_quiet", "cancelled_reads"):
        assert totals[name] > 0, name
    assert list(tmp_path.iterdir()) == [], "a good run leaves nothing behind"


def test_servers_and_clients_that_are_hurt_together_break_nothing(tmp_path: Path) -> None:
    done = chaos("--servers", "--seed", str(SERVERS_SEED), "--seconds", str(SERVERS_SECONDS), "--json", "--directory",
                 str(tmp_path))
    assert done.stdout, done.stderr
    document: dict[str, Any] = json.loads(done.stdout)
    totals, faults = document["totals"], document["faults"]
    assert document["violations"] == []
    assert done.returncode == 0, done.stderr
    assert set(faults) == set(kinds_of(find_etcd() is not None))
    planned = server_plan(SERVERS_SEED, SERVERS_SECONDS, find_etcd() is not None)
    assert 1 <= document["episodes_done"] <= len(planned)
    done_kinds = {kind for episode in planned[: document["episodes_done"]] for kind in episode.kinds}
    assert {kind for kind in faults if faults[kind]["struck"] > 0} == done_kinds
    assert (totals["wrong_blocks"], totals["lost_blocks"], totals["leaked_bytes"], totals["late_bytes"]) == (0, 0, 0, 0)
    assert totals["fsck_false_findings"] == 0
    assert 0 < totals["highest_du_bytes"] <= totals["capacity_bytes"]
    for name in ("hit_blocks", "guarded_hits", "claims_tested", "rebuilt_blocks", "fsck_runs"):
        assert totals[name] > 0, name
    assert list(tmp_path.iterdir()) == [], "a good run leaves nothing behind"


def test_a_run_that_is_ended_leaves_no_process(tmp_path: Path) -> None:
    words = [sys.executable, "tools/chaos.py", "--servers", "--seed", str(SERVERS_SEED), "--directory", str(tmp_path)]
    with subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as run:
        assert run.stdout is not None
        assert any(line.startswith("episode 0") for line in run.stdout)
        assert len(processes_naming(tmp_path)) > 12
        run.send_signal(signal.SIGTERM)
        rest = run.stdout.read()
    assert run.returncode == 130, rest
    assert "interrupted" in rest
    assert eventually(lambda: not processes_naming(tmp_path))


@pytest.mark.parametrize("more", [(), ("--servers",)])
def test_a_seed_prints_the_same_schedule_every_time(more: tuple[str, ...]) -> None:
    first, second = (chaos("--seed", "5", "--seconds", "300", "--plan", *more) for _ in range(2))
    assert first.returncode == 0
    assert first.stdout == second.stdout
    assert len(first.stdout.splitlines()) > 20


@pytest.mark.parametrize("arguments", [("--seconds", "0"), ("--seconds", "abc"), ("--seed", "x"), ("--what",)])
def test_a_wrong_request_is_refused_without_a_traceback(arguments: tuple[str, ...]) -> None:
    done = chaos(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
