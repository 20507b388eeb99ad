"""vLLM's own cache in host memory with the store behind it, for real: a fresh engine goes on from chunks of another.

As in `tests/engines/test_vllm.py`, with `KVStoreTier` under vLLM's tiered offloading. vLLM refuses its offloading
worker without a GPU; `tests/engines/memcpy.py` stands in for it. Between rounds vLLM's host cache is emptied, so that
every round asks the store.
"""

from __future__ import annotations

from pathlib import Path

from tests.engines.enginerun import (
    LIVE,
    STEPS,
    Engine,
    cached_of,
    make_store_with_quota,
    model_at,
    says_something,
    some_tokens,
    tokens_of,
)

pytestmark = LIVE


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
    assert warm["counts"]["loads"] == 1
    assert warm["counts"]["load_bytes"] == cold_alone["counts"]["save_bytes"]
    assert warm["counts"].get("saved_ms", 0) + warm["counts"].get("wasted_ms", 0) > 0
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


def test_llama_two_engines_share_a_store_behind_their_tiers_and_no_phase_of_a_request_holds_a_slot(
    root: Path, models: Path
) -> None:
    model = model_at("llama", models)
    prompts = [some_tokens(1000, 1), some_tokens(1000, 2)]
    both = [Engine(model, [{"prompts": [prompt]}], root, tier=True, several_processes=True, engine=STEPS)
            .begin(f"e{number}") for number, prompt in enumerate(prompts)]
    cold = [process.answer()[0] for process in both]
    assert [cached_of(answer) for answer in cold] == [[0], [0]]
    assert [answer["counts"]["save_blocks"] for answer in cold] == [7, 7]

    # Chunks go by the host cache, which takes some more steps than saving pages does.
    phases = {"match": prompts[1], "load": prompts[1], "compute": some_tokens(3500, 91), "save": some_tokens(3500, 92)}
    *aborted, both_at_once, left_alone, evicted, mended = Engine(model, [
        *({"prompts": [prompts[0]], "before": [["abort", phase, prompt]]} for phase, prompt in phases.items()),
        {"prompts": prompts},
        {"prompts": [prompts[0]], "bypass": True},
        {"prompts": [prompts[0]], "before": [["evict", 5]]},
        {"prompts": [prompts[0]]},
    ], root, tier=True, engine=STEPS).run("third")

    # After an abort in any phase every page and every slot is free again (the driver sees to that).
    for answer in aborted:
        assert answer["injected"] == 1
        assert cached_of(answer) == [896]
        assert tokens_of(answer) == tokens_of(cold[0])
    assert cached_of(both_at_once) == [896, 896]
    assert tokens_of(both_at_once) == [tokens_of(answer)[0] for answer in cold]
    assert cached_of(left_alone) == [0]
    assert left_alone["counts"]["bypassed_asked"] == 2
    assert tokens_of(left_alone) == tokens_of(cold[0])
    assert evicted["injected"] == 1
    assert evicted["counts"]["load_failed_missing"] == 1
    assert evicted["counts"]["lost_tokens"] == 2 * 128
    assert cached_of(evicted) == [640]
    assert tokens_of(evicted) == tokens_of(cold[0])
    assert cached_of(mended) == [896]
    assert tokens_of(mended) == tokens_of(cold[0])


def test_llama_behind_a_tier_a_store_that_hangs_rots_or_is_switched_off_changes_no_token(
    root: Path, models: Path
) -> None:
    model = model_at("llama", models)
    prompt = some_tokens(1000, 61)
    (cold,) = Engine(model, [{"prompts": [prompt]}], root, tier=True).run("first")
    assert says_something(tokens_of(cold)[0])

    deadlines = {"match_deadline_ms": 3000, "get_deadline_ms": 3000}
    asked, fetched, found, rebuilt, lost = Engine(model, [
        {"prompts": [prompt], "before": [["hang", "match"]]},
        {"prompts": [prompt], "before": [["hang", "get_into"]]},
        {"prompts": [prompt]},
        {"prompts": [prompt], "before": [["corrupt", 2]]},
        # Whether the first two are mended by now or turned over once more, three others are not what they were.
        {"prompts": [prompt], "before": [["corrupt", 5]]},
    ], root, tier=True, settings=deadlines).run("second")
    for answer in (asked, fetched, found, rebuilt, lost):
        assert tokens_of(answer) == tokens_of(cold)
    # Nobody answers a question by its deadline, or a load.
    assert asked["injected"] == 1
    assert cached_of(asked) == [0]
    assert fetched["injected"] == 1
    assert fetched["counts"]["lost_tokens"] == 896
    assert cached_of(fetched) == [0]
    assert cached_of(found) == [896]
    assert rebuilt["injected"] == 2
    assert cached_of(rebuilt) == [896]
    assert lost["injected"] == 5
    assert cached_of(lost) == [0]

    (switched_off,) = Engine(model, [{"prompts": [prompt]}], root, tier=True, settings={"bypass": True}).run("off")
    assert cached_of(switched_off) == [0]
    assert tokens_of(switched_off) == tokens_of(cold)
    assert switched_off["counts"] == {}


def test_llama_behind_a_tier_a_store_that_is_full_saves_nothing_more(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    short, long = some_tokens(450, 51), some_tokens(1000, 52)
    make_store_with_quota(root, "acme", "500KB")
    saved, refused, found, not_found = Engine(model, [
        {"prompts": [short]}, {"prompts": [long]}, {"prompts": [short]}, {"prompts": [long]},
    ], root, tier=True, settings={"tenant": "acme"}).run("only")

    assert saved["counts"]["save_blocks"] == 3
    assert refused["counts"]["save_failed_blocks"] >= 7
    assert refused["counts"].get("save_blocks", 0) == 0
    assert cached_of(found) == [384]
    assert tokens_of(found) == tokens_of(saved)
    assert cached_of(not_found) == [0]
    assert tokens_of(not_found) == tokens_of(refused)


def test_llama_preempted_requests_load_from_the_tier_and_leave_no_page_behind(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    prompts = [some_tokens(900, seed) for seed in (21, 22, 23)]
    # 8 pages for each prompt fit, 11 for each answer do not.
    cold, warm = Engine(model, [{"prompts": prompts}, {"prompts": prompts}], root, tier=True, new_tokens=400,
                        engine={"num_gpu_blocks_override": 26, "max_model_len": 2048}).run("only")

    assert 0 < cold["preemptions"] < warm["preemptions"]
    assert warm["counts"]["loads"] >= 3
    assert all(cached >= 896 for cached in cached_of(warm))
    # What follows differs in last bits without any store too: a preempted answer is computed anew as a prompt.
    assert [tokens[:16] for tokens in tokens_of(warm)] == [tokens[:16] for tokens in tokens_of(cold)]
    assert {len(tokens) for tokens in tokens_of(warm)} == {400}


def test_llama_on_two_ranks_has_the_parts_of_both_in_a_chunk(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    prompt = some_tokens(1000, 31)
    cold, warm = (Engine(model, [{"prompts": [prompt]}], root, tier=True, several_processes=True,
                         engine={"tensor_parallel_size": 2}).run(name)[0] for name in ("first", "second"))

    assert cold["counts"]["save_blocks"] == 7
    assert warm["counts"]["loads"] == 1
    assert warm["counts"]["load_bytes"] == cold["counts"]["save_bytes"]
    assert cached_of(warm) == [896]
    assert tokens_of(warm) == tokens_of(cold)
