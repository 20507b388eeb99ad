"""vLLM with the store behind it, for real: engine processes end, others begin, and what they say stays the same.

Each engine is a process of its own (`tests/engines/drive.py`). The first one of a model computes everything and
saves; its answers are what every later one is compared with. Skipped where vLLM is not installed; `make test-engines`
installs it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

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


def test_llama_two_engines_share_one_local_store_and_a_third_goes_on_from_both(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    prompts = [some_tokens(1000, 1), some_tokens(1000, 2)]
    both = [Engine(model, [{"prompts": [prompt]}], root, several_processes=True, engine=STEPS).begin(f"e{number}")
            for number, prompt in enumerate(prompts)]
    cold = [process.answer()[0] for process in both]
    assert [cached_of(answer) for answer in cold] == [[0], [0]]
    assert [answer["counts"]["save_blocks"] for answer in cold] == [7, 7]

    phases = {"match": prompts[1], "load": prompts[1], "compute": some_tokens(1000, 91), "save": some_tokens(1000, 92)}
    *aborted, both_at_once, evicted, mended = Engine(model, [
        *({"prompts": [prompts[0]], "before": [["abort", phase, prompt]]} for phase, prompt in phases.items()),
        {"prompts": prompts},
        {"prompts": [prompts[0]], "before": [["evict", 5]]},
        {"prompts": [prompts[0]]},
    ], root, engine=STEPS).run("third")

    # After an abort in any phase every page is free again (the driver sees to that), and others are served.
    for answer in aborted:
        assert answer["injected"] == 1
        assert cached_of(answer) == [896]
        assert tokens_of(answer) == tokens_of(cold[0])
    assert cached_of(both_at_once) == [896, 896]
    assert tokens_of(both_at_once) == [tokens_of(answer)[0] for answer in cold]
    assert all(says_something(tokens) for tokens in tokens_of(both_at_once))
    assert both_at_once["counts"]["saved_ms"] + both_at_once["counts"].get("wasted_ms", 0) > 0
    # What was evicted after the question is computed, and stored again.
    assert evicted["injected"] == 1
    assert evicted["counts"]["load_failed_missing"] == 1
    assert evicted["counts"]["save_blocks"] == 2
    assert cached_of(evicted) == [640]
    assert tokens_of(evicted) == tokens_of(cold[0])
    assert cached_of(mended) == [896]
    assert tokens_of(mended) == tokens_of(cold[0])


@pytest.mark.parametrize("tier", [False, True])
def test_llama_after_a_reset_loads_and_saves_nothing_more(root: Path, models: Path, tier: bool) -> None:
    model = model_at("llama", models)
    prompts = [some_tokens(500, seed) for seed in (61, 62)]
    cold, warm, *after = Engine(model, [
        {"prompts": prompts[:1]}, {"prompts": prompts[:1]},
        {"prompts": prompts, "before": [["reset"]]}, {"prompts": prompts},
    ], root, tier=tier).run("only")

    assert cached_of(warm) == [384]
    for answer in after:
        assert cached_of(answer) == [0, 0]
        assert tokens_of(answer)[:1] == tokens_of(cold)
        assert not {"loads", "save_begun_blocks"} & answer["counts"].keys()
    assert [answer["counts"].get("ended_by_reset") for answer in (warm, *after)] == [None, 1, None]


def test_llama_with_a_store_that_is_full_saves_nothing_more_and_says_the_same(root: Path, models: Path) -> None:
    model = model_at("llama", models)
    short, long = some_tokens(450, 51), some_tokens(1000, 52)
    make_store_with_quota(root, "acme", "500KB")
    saved, refused, found, not_found = Engine(model, [
        {"prompts": [short]}, {"prompts": [long]}, {"prompts": [short]}, {"prompts": [long]},
    ], root, settings={"tenant": "acme"}).run("only")

    assert saved["counts"]["save_blocks"] == 3
    # Each of the two times that a round runs its prompts.
    assert refused["counts"]["save_failed_blocks"] == 2 * 7
    assert refused["counts"].get("save_blocks", 0) == 0
    assert cached_of(found) == [384]
    assert tokens_of(found) == tokens_of(saved)
    assert cached_of(not_found) == [0]
    assert tokens_of(not_found) == tokens_of(refused)


def test_llama_asked_to_leave_it_alone_or_with_a_store_that_hangs_or_holds_other_pages_computes_the_same(
    root: Path, models: Path
) -> None:
    model = model_at("llama", models)
    prompt = some_tokens(1000, 61)
    (cold,) = Engine(model, [{"prompts": [prompt]}], root).run("first")
    assert says_something(tokens_of(cold)[0])

    deadlines = {"match_deadline_ms": 3000, "get_deadline_ms": 3000}
    left_alone, asked, fetched, found = Engine(model, [
        {"prompts": [prompt], "bypass": True},
        {"prompts": [prompt], "before": [["hang", "match"]]},
        {"prompts": [prompt], "before": [["hang", "get_into"]]},
        {"prompts": [prompt]},
    ], root, settings=deadlines).run("second")
    assert cached_of(left_alone) == [0]
    # Each of the two times that a round runs its prompts.
    assert left_alone["counts"]["bypassed_asked"] == 2
    assert tokens_of(left_alone) == tokens_of(cold)
    # Nobody answers a question by its deadline, or a load.
    assert asked["injected"] == 1
    assert cached_of(asked) == [0]
    assert tokens_of(asked) == tokens_of(cold)
    assert fetched["injected"] == 1
    assert fetched["counts"]["lost_tokens"] == 896
    assert fetched["counts"]["wasted_ms"] > 0
    assert cached_of(fetched) == [0]
    assert tokens_of(fetched) == tokens_of(cold)
    assert cached_of(found) == [896]
    assert tokens_of(found) == tokens_of(cold)

    # The kill-switch: nothing is asked and nothing saved.
    (switched_off,) = Engine(model, [{"prompts": [prompt]}], root, settings={"bypass": True}).run("off")
    assert cached_of(switched_off) == [0]
    assert tokens_of(switched_off) == tokens_of(cold)
    assert switched_off["counts"] == {}

    # Pages of other blocks are other names: nothing is found, and nothing wrong.
    other, own = Engine(model, [{"prompts": [prompt]}, {"prompts": [prompt]}], root,
                        engine={"block_size": 64}).run("third")
    assert cached_of(other) == [0]
    assert other["counts"]["save_blocks"] == 15
    assert cached_of(own) == [960]
    assert tokens_of(own) == tokens_of(other)


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

    # On some CPUs an answer behind cached pages differs in last bits from one without: what is loaded is compared with
    # the engine's own prefix cache, what is computed anew with what was.
    assert [output["cached"] for output in cold["again"]] == [896]
    from_cache = [output["tokens"] for output in cold["again"]]
    assert corrupt_one["injected"] == 1
    assert cached_of(corrupt_one) == [896]
    assert tokens_of(corrupt_one) == from_cache
    assert corrupt_three["injected"] == 4
    assert cached_of(corrupt_three) == [0]
    assert tokens_of(corrupt_three) == tokens_of(cold)
    assert tokens_of(mended) == (from_cache if cached_of(mended) == [896] else tokens_of(cold))


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
