"""vLLM with the store behind it, for real: engine processes end, others begin, and what they say stays the same.

Each engine is a process of its own (`tests/engines/drive.py`). The first one of a model computes everything and
saves; its answers are what every later one is compared with. Skipped where vLLM is not installed; `make test-engines`
installs it.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from kvstore.localset import stop
from tests.support.cli import ROOT
from tests.support.servers import short_directory

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(1200),
    pytest.mark.engines,
]

BLOCK = 128
PROCESS_DEADLINE_S = 600
CAPACITY = "2GiB"
IN_ONE_PROCESS = {"distributed_executor_backend": "uni"}
"""Scheduler and worker in the test's process, where faults can reach them; vLLM's default is three processes."""


@dataclass
class Engine:
    """What an engine process is to do."""

    model: Path
    rounds: list[dict[str, Any]]
    root: Path
    new_tokens: int = 16
    several_processes: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    engine: dict[str, Any] = field(default_factory=dict)

    def begin(self, name: str) -> Process:
        request = {
            "model": str(self.model), "rounds": self.rounds, "new_tokens": self.new_tokens,
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


@pytest.fixture
def root() -> Iterator[Path]:
    with short_directory() as path:
        yield path
        if (path / "kv" / "cluster.toml").exists():
            stop(str(path / "kv"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


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


def test_llama_two_engines_share_one_local_store_and_a_third_goes_on_from_both(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    prompts = [some_tokens(1000, 1), some_tokens(1000, 2)]
    both = [Engine(model, [{"prompts": [prompt]}], root, several_processes=True).begin(f"e{number}")
            for number, prompt in enumerate(prompts)]
    cold = [process.answer()[0] for process in both]
    assert [cached_of(answer) for answer in cold] == [[0], [0]]
    assert [answer["counts"]["save_blocks"] for answer in cold] == [7, 7]

    aborted, both_at_once = Engine(model, [
        {"prompts": [prompts[0]], "before": [["abort", prompts[1]]]}, {"prompts": prompts},
    ], root).run("third")

    assert aborted["injected"] == 1
    assert cached_of(aborted) == [896]
    assert cached_of(both_at_once) == [896, 896]
    assert tokens_of(both_at_once) == [tokens_of(answer)[0] for answer in cold]
    assert tokens_of(aborted) == tokens_of(cold[0])
    assert all(says_something(tokens) for tokens in tokens_of(both_at_once))


def test_gpt_oss_every_failure_is_recomputed_to_the_same_tokens(root: Path, models: Path) -> None:
    model = model_at("gptoss", models)
    shared = some_tokens(1300, 3)
    three = [shared + some_tokens(60, seed) for seed in (4, 5, 6)]
    alone = some_tokens(1000, 7)
    cold_three, cold_alone = Engine(model, [{"prompts": three}, {"prompts": [alone]}], root).run("first")
    assert says_something(tokens_of(cold_alone)[0])
    assert cold_alone["counts"]["save_blocks"] == 14

    warm, zeroed, missing, degraded, gone = Engine(model, [
        {"prompts": [alone]},
        {"prompts": [alone], "before": [["zero_page"]]},
        {"prompts": three, "before": [["fail_block", 7]]},
        {"prompts": [alone], "before": [["kill_servers", 1]]},
        {"prompts": [alone], "before": [["kill_all"]]},
    ], root).run("second")

    assert cached_of(warm) == [896]
    assert tokens_of(warm) == tokens_of(cold_alone)
    # The negative control: with one page of each group wrong the same comparison fails.
    assert cached_of(zeroed) == [896]
    assert zeroed["injected"] >= 2
    assert tokens_of(zeroed) != tokens_of(cold_alone)
    # Three loads that all fail at block 7 are followed by loads of the seven blocks before it.
    assert missing["injected"] == 3
    assert missing["counts"]["load_failed_missing"] == 3
    # Or by what another one of the three has computed meanwhile.
    assert set(cached_of(missing)) <= {896, 1280}
    assert 896 in cached_of(missing)
    assert tokens_of(missing) == tokens_of(cold_three)
    assert degraded["injected"] == 1
    assert cached_of(degraded) == [896]
    assert tokens_of(degraded) == tokens_of(cold_alone)
    assert gone["injected"] == 5
    assert cached_of(gone) == [0]
    assert tokens_of(gone) == tokens_of(cold_alone)


def test_smollm2_answers_the_same_from_a_store_that_lost_and_forged_nodes(root: Path, models: Path) -> None:
    model = model_at("smollm2", models)
    prompt = some_tokens(1000, 8, 40_000)
    (cold,) = Engine(model, [{"prompts": [prompt]}], root).run("first")

    corrupt_one, corrupt_three, mended = Engine(model, [
        {"prompts": [prompt], "before": [["corrupt", 1]]},
        {"prompts": [prompt], "before": [["corrupt", 4]]},
        {"prompts": [prompt]},
    ], root, settings={"min_tokens": 128}).run("second")

    assert corrupt_one["injected"] == 1
    assert cached_of(corrupt_one) == [896]
    assert tokens_of(corrupt_one) == tokens_of(cold)
    assert corrupt_three["injected"] == 4
    assert cached_of(corrupt_three) == [0]
    assert tokens_of(corrupt_three) == tokens_of(cold)
    assert tokens_of(mended) == tokens_of(cold)


def test_deepseek_goes_on_from_compressed_pages_of_sixteen_tokens(root: Path, models: Path) -> None:
    model = model_at("deepseek", models)
    prompt = some_tokens(500, 9)
    (cold,) = Engine(model, [{"prompts": [prompt]}], root).run("first")
    warm, zeroed = Engine(model, [
        {"prompts": [prompt]}, {"prompts": [prompt], "before": [["zero_page"]]},
    ], root).run("second")

    # Compressed pages are computed with in another way than they are made, so the last bits differ: what is compared
    # with is the engine's own prefix cache, which holds the same 496 tokens.
    assert cached_of(cold) == [0]
    assert [output["cached"] for output in cold["again"]] == [496]
    expected = [output["tokens"] for output in cold["again"]]
    assert cached_of(warm) == [496]
    assert tokens_of(warm) == expected
    assert zeroed["injected"]
    assert tokens_of(zeroed) != expected


def test_llama_preempted_requests_load_and_save_and_leave_no_page_behind(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    prompts = [some_tokens(900, seed) for seed in (21, 22, 23)]
    # 8 pages for each prompt fit, 11 for each answer do not.
    cold, warm = Engine(model, [{"prompts": prompts}, {"prompts": prompts}], root, new_tokens=400,
                        engine={"num_gpu_blocks_override": 26, "max_model_len": 2048}).run("only")

    assert 0 < cold["preemptions"] < warm["preemptions"]
    assert warm["counts"]["loads"] >= 3
    assert all(cached >= 896 for cached in cached_of(warm))
    # What follows differs in last bits without any store too: a preempted answer is computed anew as a prompt.
    assert [tokens[:16] for tokens in tokens_of(warm)] == [tokens[:16] for tokens in tokens_of(cold)]
    assert {len(tokens) for tokens in tokens_of(warm)} == {400}


def test_llama_on_two_ranks_stores_and_loads_the_part_of_each(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    prompt = some_tokens(1000, 31)
    cold, warm = Engine(model, [{"prompts": [prompt]}, {"prompts": [prompt]}], root, several_processes=True,
                        engine={"tensor_parallel_size": 2}).run("only")

    assert cold["counts"]["save_blocks"] == 2 * 7
    assert warm["counts"]["loads"] == 2
    assert cached_of(warm) == [896]
    assert tokens_of(warm) == tokens_of(cold)
