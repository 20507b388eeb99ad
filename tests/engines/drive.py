"""One engine process: `python -m tests.engines.drive REQUEST.json ANSWER.json` runs rounds of prompts and writes an answer.

Request: {"model": directory, "settings": extra configuration or null (no store), "rounds": [[prompt, ...], ...],
"new_tokens": n, "engine": more arguments of vLLM, "saved_blocks": n or null}. A prompt is a list of token ids. All
prompts of a round run at once; the engine's own prefix cache is emptied between rounds. With `saved_blocks` the process
ends only when the store holds so many blocks more than it has been given. Answer: {"rounds": [[{"tokens": [...],
"cached": tokens that were not computed, "first_token_s": s}, ...]], "counts": {...}, "free_blocks": [before, after]}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

WAIT_S = 60.0


def engine(request: dict[str, Any]) -> LLM:
    connector = None
    if request["settings"] is not None:
        connector = KVTransferConfig(
            kv_connector=request.get("connector", "KVStoreConnector"),
            kv_connector_module_path=request.get("module", "kvstore.connectors.vllm"),
            kv_role="kv_both", kv_load_failure_policy="recompute", kv_connector_extra_config=request["settings"],
        )
    arguments = {"max_model_len": 4096, "dtype": "bfloat16", **request.get("engine", {})}
    return LLM(
        request["model"], skip_tokenizer_init=True, enforce_eager=True, disable_log_stats=False, seed=0,
        prefix_caching_hash_algo="sha256_cbor", kv_transfer_config=connector, **arguments,
    )


def counts_of(llm: LLM) -> dict[str, int]:
    """The connector's counts as vLLM's metrics have them."""
    return {
        metric.labels["what"]: int(metric.value)
        for metric in llm.get_metrics() if metric.name == "vllm:kvstore"
    }


def run_round(llm: LLM, prompts: list[list[int]], new_tokens: int) -> list[dict[str, Any]]:
    sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [
        {
            "tokens": list(output.outputs[0].token_ids),
            "cached": output.num_cached_tokens,
            "first_token_s": output.metrics.first_token_latency if output.metrics is not None else None,
        }
        for output in outputs
    ]


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    llm = engine(request)
    rounds = []
    for number, prompts in enumerate(request["rounds"]):
        if number:
            assert llm.reset_prefix_cache()
        rounds.append(run_round(llm, prompts, request["new_tokens"]))
    wanted = request.get("saved_blocks") or 0
    until = time.monotonic() + WAIT_S
    counts: dict[str, int] = {}
    while time.monotonic() < until:
        # Counts come with a step of the engine, so there has to be one.
        run_round(llm, [[1, 2, 3]], 1)
        counts = counts_of(llm)
        if counts.get("save_blocks", 0) + counts.get("save_already_blocks", 0) >= wanted:
            break
        time.sleep(0.1)
    Path(sys.argv[2]).write_text(json.dumps({"rounds": rounds, "counts": counts}))


if __name__ == "__main__":
    main()
