"""An engine process of a test: what it is to do, and what it said. `tests/engines/drive.py` is the process."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore.localset import start, stop
from tests.support.cli import ROOT, run

LIVE = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(1200),
    pytest.mark.engines,
]
"""Marks of tests with engines in processes of their own."""
PROCESS_DEADLINE_S = 600
CAPACITY = "2GiB"
IN_ONE_PROCESS = {"distributed_executor_backend": "uni"}
"""Scheduler and worker in the test's process, where faults can reach them; vLLM's default is three processes."""

STEPS = {"max_num_batched_tokens": 256}
"""A prompt of 1,000 tokens takes four steps."""


@dataclass
class Engine:
    """What an engine process is to do."""

    model: Path
    rounds: list[dict[str, Any]]
    root: Path
    new_tokens: int = 16
    several_processes: bool = False
    tier: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def begin(self, name: str) -> Process:
        request = {
            "model": str(self.model), "rounds": self.rounds, "new_tokens": self.new_tokens,
            "tier": self.tier,
            "settings": {"store": str(self.root / "kv"), "start": True, "capacity": CAPACITY,
                         "get_deadline_ms": 20_000, "match_deadline_ms": 20_000, "put_deadline_ms": 40_000,
                         **self.settings},
            "engine": {**({} if self.several_processes else IN_ONE_PROCESS), **self.engine},
        }
        return Process(self.root / name, request, self.several_processes)

    def run(self, name: str) -> list[dict[str, Any]]:
        return self.begin(name).answer()


class Process:
    """An engine process under way."""

    def __init__(self, place: Path, request: dict[str, Any], several_processes: bool) -> None:
        self._place = place
        place.with_suffix(".request").write_text(json.dumps(request))
        environment = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        environment |= {
            "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1",
            "OMP_NUM_THREADS": "2", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1" if several_processes else "0",
        }
        with place.with_suffix(".log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.engines.drive", str(place.with_suffix(".request")),
                 str(place.with_suffix(".answer"))],
                cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log,
            )

    def answer(self) -> list[dict[str, Any]]:
        try:
            code = self._process.wait(PROCESS_DEADLINE_S)
        finally:
            self._process.kill()
        assert code == 0, self._place.with_suffix(".log").read_text(errors="replace")[-6000:]
        answer: list[dict[str, Any]] = json.loads(self._place.with_suffix(".answer").read_text())
        return answer


def make_store_with_quota(root: Path, tenant: str, quota: str) -> None:
    """The store that the engines of a test find, with a tenant that may hold so much."""
    store = str(root / "kv")
    start(store, 2 << 30)
    stop(store)
    for words in (["add", tenant], ["quota", tenant, quota]):
        assert run("tenant", *words, store=store).code == 0


def model_at(name: str, models: Path) -> Path:
    from tests.engines.models import model_at as made

    return made(name, models)


def some_tokens(count: int, seed: int, vocabulary: int = 512) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, vocabulary) for _ in range(count)]


def tokens_of(answer: dict[str, Any]) -> list[list[int]]:
    return [output["tokens"] for output in answer["outputs"]]


def cached_of(answer: dict[str, Any]) -> list[int]:
    return [output["cached"] for output in answer["outputs"]]


def says_something(tokens: Sequence[int]) -> bool:
    """A model that repeats itself could not show that its cache is wrong."""
    return len(set(tokens)) >= len(tokens) // 2
