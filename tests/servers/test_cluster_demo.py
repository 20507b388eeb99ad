"""`make cluster-demo` without the model: it fails when its faults do not happen, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.cli import ROOT, environment
from tests.support.leftovers import processes_naming
from tests.support.servers import short_directory
from tests.support.waiting import eventually
from tools.cluster_demo import Cluster, Demo, DemoFailed, Interrupted, LineProcess, Processes, stop_one
from tools.cluster_engine import bytes_of, chain_of
from tools.etcdprocess import find_etcd

DEADLINE_S: Final = 300
WORDS: Final = (sys.executable, "-m", "tools.cluster_demo", "--blocks", "32", "--rounds", "2", "--without-model",
                "--shared")
ENDED: Final = (sys.executable, "-c", "")

pytestmark = pytest.mark.timeout(DEADLINE_S + 60)


@pytest.mark.slow
@pytest.mark.parametrize("etcd", [True, False])
def test_a_cluster_that_lost_servers_while_two_engines_used_it_is_whole_again(etcd: bool) -> None:
    if etcd and find_etcd() is None:
        pytest.skip("there is no etcd")
    done = subprocess.run([*WORDS, *(() if etcd else ("--without-etcd",))], cwd=ROOT, env=environment(),
                          capture_output=True, text=True, timeout=DEADLINE_S, check=False)
    assert done.returncode == 0, done.stderr
    steps = [line.partition(":")[0] for line in done.stdout.splitlines()]
    assert steps == (["filled", "stopped", "killed", "back", "replaced", "mended"] if etcd else
                     ["no etcd", "filled", "stopped", "killed", "back", "mended"])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_demonstration_that_is_ended_leaves_no_process_and_no_file(number: signal.Signals) -> None:
    with short_directory() as base:
        with subprocess.Popen([*WORDS], cwd=ROOT, env=environment() | {"TMPDIR": str(base)}, text=True,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as demo:
            assert demo.stdout is not None
            assert any(line.startswith("filled") for line in demo.stdout)
            assert len(processes_naming(base)) > 3
            demo.send_signal(number)
            rest = demo.stdout.read()
        assert demo.returncode == 128 + number, rest
        assert f"ended by {number.name}" in rest
        assert eventually(lambda: not processes_naming(base))
        assert list(base.iterdir()) == []


@pytest.fixture
def processes() -> Iterator[Processes]:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    with Processes() as made:
        yield made
    for number, handler in before.items():
        signal.signal(number, handler)


def test_an_interruption_waits_until_what_is_being_started_is_known(processes: Processes) -> None:
    went_on = []

    def interrupted_inside() -> None:
        with processes.held():
            os.kill(os.getpid(), signal.SIGTERM)
            went_on.append(True)

    with pytest.raises(Interrupted, match="SIGTERM"):
        interrupted_inside()
    assert went_on
    with pytest.raises(Interrupted, match="SIGTERM"):
        processes.start([sys.executable, "-c", "import time; time.sleep(600)"])
    processes.__exit__()
    assert [process.returncode for process in processes._started] == [-signal.SIGKILL]


class Undisturbed(LineProcess):
    """An engine that finds everything, and never had to rebuild anything."""

    def __init__(self, processes: Processes, blocks: int) -> None:
        super().__init__(processes.start(ENDED))
        self._blocks = blocks

    def tell(self, line: str) -> None:
        assert line.startswith("get ")

    def answer(self, wait_s: float = 0.0) -> dict[str, int]:
        return {"blocks": self._blocks, "wrong": 0, "rebuilt": 0, "hedged": 0}


class WithoutServers(Cluster):
    """A cluster to which no fault happens."""

    def stop(self, node: int) -> None:
        assert node >= 0


@pytest.mark.parametrize(("blocks", "why"), [(8, "no block was rebuilt"), (7, "found 7 of 8 blocks")])
def test_a_fault_that_cost_nothing_or_too_much_fails_it(processes: Processes, blocks: int, why: str) -> None:
    demo = Demo(WithoutServers(Path("/nowhere"), False, processes), rounds=2)
    demo.engines, demo.stored = {"left": Undisturbed(processes, blocks)}, {"left": 8}
    with pytest.raises(DemoFailed, match=why):
        stop_one(demo)


def test_a_server_that_does_not_stop_or_die_fails_it(processes: Processes) -> None:
    """A process that has ended by itself was not killed."""
    ended = LineProcess.start(processes, ENDED)
    ended.process.wait()
    with pytest.raises(DemoFailed, match="was not killed"):
        Cluster(Path("/nowhere"), False, processes, servers={4: ended}).kill(4)
    ended.end()


def test_conversations_are_known_by_name_alone() -> None:
    assert (bytes_of("left", 2, 1) == bytes_of("left", 0, 3)[2:]).all()
    assert (bytes_of("left", 0, 1) != bytes_of("right", 0, 1)).any()
    assert list(chain_of("left", 3)[:2]) == list(chain_of("left", 2))
