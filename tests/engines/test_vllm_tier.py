"""vLLM's own cache in host memory with the store behind it, for real: a fresh engine goes on from chunks of another.

As in `tests/engines/test_vllm.py`, with `KVStoreTier` under vLLM's tiered offloading. vLLM refuses its offloading
worker without a GPU; `tests/engines/memcpy.py` stands in for it. Between rounds vLLM's host cache is emptied, so that
every round asks the store.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.engines.enginerun import Engine, cached_of, model_at, says_something, some_tokens, tokens_of

pytestmark = [
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed"),
    pytest.mark.timeout(1200),
    pytest.mark.engines,
]


def test_llama_goes_on_from_the_tier_and_every_failure_is_recomputed_to_the_same_tokens(
    root: Path, models: Path
) -> None:
    model = model_at("llama", models)
    shared = some_tokens(1300, 3)
    three = [shared + some_tokens(60, seed) for seed in (4, 5, 6)]
    alone = some_tokens(1000, 7)
    cold_three, cold_alone = Engine(model, [{"prompts": three}, {"prompts": [alone]}], root, tier=True,
                                    several_processes=True).run("first")
    assert cached_of(cold_alone) == [0]
    assert says_something(tokens_of(cold_alone)[0])
    assert cold_alone["counts"]["save_blocks"] == 7

    warm, zeroed, missing, degraded, gone = Engine(model, [
        {"prompts": [alone]},
        {"prompts": [alone], "before": [["zero_chunk"]]},
        {"prompts": three, "before": [["fail_block", 7]]},
        {"prompts": [alone], "before": [["kill_servers", 1]]},
        {"prompts": [alone], "before": [["kill_all"]]},
    ], root, tier=True).run("second")

    assert cached_of(warm) == [896]
    assert warm["counts"]["hit_tokens"] == 896
    assert tokens_of(warm) == tokens_of(cold_alone)
    # The negative control: with one chunk wrong the same comparison fails.
    assert cached_of(zeroed) == [896]
    assert zeroed["injected"]
    assert tokens_of(zeroed) != tokens_of(cold_alone)
    # A load that fails at chunk 7 is good up to there.
    assert missing["injected"]
    assert missing["counts"]["load_failed_missing"]
    assert missing["counts"]["lost_tokens"]
    assert set(cached_of(missing)) <= {896, 1280}
    assert 896 in cached_of(missing)
    assert tokens_of(missing) == tokens_of(cold_three)
    assert degraded["injected"] == 1
    assert cached_of(degraded) == [896]
    assert tokens_of(degraded) == tokens_of(cold_alone)
    assert gone["injected"] == 5
    assert cached_of(gone) == [0]
    assert tokens_of(gone) == tokens_of(cold_alone)


def test_gpt_oss_goes_on_from_the_tier_with_a_window(root: Path, models: Path) -> None:
    model = model_at("gptoss", models)
    prompt = some_tokens(1000, 7)
    (cold,) = Engine(model, [{"prompts": [prompt]}], root, tier=True).run("first")
    assert cached_of(cold) == [0]
    assert says_something(tokens_of(cold)[0])
    # All chunks of the group that sees everything, the last one of the group with the window.
    assert cold["counts"]["save_blocks"] == 7 + 1

    warm, zeroed = Engine(model, [
        {"prompts": [prompt]}, {"prompts": [prompt], "before": [["zero_chunk"]]},
    ], root, tier=True).run("second")
    assert cached_of(warm) == [896]
    assert warm["counts"]["hit_tokens"] == 896
    assert tokens_of(warm) == tokens_of(cold)
    assert cached_of(zeroed) == [896]
    assert zeroed["injected"] >= 2
    assert tokens_of(zeroed) != tokens_of(cold)
