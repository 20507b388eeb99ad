"""`make cluster-demo` without the model, and that it fails when its faults do not happen."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.cli import ROOT, environment
from tools.cluster_demo import Cluster, Demo, DemoFailed, LineProcess, stop_one
from tools.cluster_engine import bytes_of, chain_of

DEADLINE_S: Final = 110
STEPS: Final = ("filled", "stopped", "killed", "back", "mended")


@pytest.mark.slow
def test_a_cluster_that_lost_servers_while_two_engines_used_it_is_whole_again() -> None:
    words = [sys.executable, "-m", "tools.cluster_demo", "--blocks", "32", "--rounds", "2", "--without-model",
             "--shared"]
    done = subprocess.run(words, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=DEADLINE_S,
                          check=False)
    assert done.returncode == 0, done.stderr
    assert tuple(line.partition(":")[0] for line in done.stdout.splitlines()) == STEPS


class Undisturbed(LineProcess):
    """An engine that finds everything, and never had to rebuild anything."""

    def __init__(self, blocks: int) -> None:
        super().__init__([sys.executable, "-c", ""])
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
def test_a_fault_that_cost_nothing_or_too_much_fails_it(blocks: int, why: str) -> None:
    demo = Demo(WithoutServers(Path("/nowhere"), False), rounds=2)
    demo.engines, demo.stored = {"left": Undisturbed(blocks)}, {"left": 8}
    with pytest.raises(DemoFailed, match=why):
        stop_one(demo)
    demo.engines["left"].end()


def test_a_server_that_does_not_stop_or_die_fails_it() -> None:
    """A process that has ended by itself was not killed."""
    ended = LineProcess([sys.executable, "-c", ""])
    ended.process.wait()
    with pytest.raises(DemoFailed, match="was not killed"):
        Cluster(Path("/nowhere"), False, {4: ended}).kill(4)
    ended.end()


def test_conversations_are_known_by_name_alone() -> None:
    assert (bytes_of("left", 2, 1) == bytes_of("left", 0, 3)[2:]).all()
    assert (bytes_of("left", 0, 1) != bytes_of("right", 0, 1)).any()
    assert list(chain_of("left", 3)[:2]) == list(chain_of("left", 2))
