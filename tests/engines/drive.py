"""One engine process of a test: `python -m tests.engines.drive REQUEST.json ANSWER.json`.

Request: {"model": directory, "settings": the connector's, or null for an engine without, "tier": whether the store is a
tier behind vLLM's own cache in host memory, "new_tokens": n, "engine": more arguments of vLLM, "rounds": [{"prompts":
[[token, ...], ...], "before": [[action, argument ...], ...], "bypass": whether they ask to be left alone}, ...]}.

All prompts of a round run at once, and then again, which the engine serves from its own prefix cache. Before each
round its actions are taken (`tests/engines/faults.py`). After each round the engine's own prefix cache is emptied
(with a tier in the engine's process, its cache in host memory too), which fails unless every page is free again (with
such a tier, every slot of that cache too). The process ends when all that was saved is stored. Answer: for each round
{"outputs": [{"tokens", "cached", "first_token_s"}, ...], "again": [the same], "counts": {...}, "injected": faults that
happened in it, "preemptions": since the engine began}.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from tests.engines.faults import Faults

WAIT_S = 60.0
MOST_TOKENS = 4096


HOST_CACHE_BYTES = 64 << 20


def connector(request: dict[str, Any]) -> KVTransferConfig | None:
    if request["settings"] is None:
        return None
    if not request["tier"]:
        return KVTransferConfig(
            kv_connector="KVStoreConnector", kv_connector_module_path="kvstore.connectors.vllm", kv_role="kv_both",
            kv_load_failure_policy="recompute", kv_connector_extra_config=request["settings"],
        )
    tier = {"type": "KVStoreTier", "module_path": "kvstore.connectors.vllm", **request["settings"]}
    return KVTransferConfig(
        kv_connector="KVStoreOffloadingConnector", kv_connector_module_path="kvstore.connectors.vllm",
        kv_role="kv_both", kv_connector_extra_config={
            "spec_name": "MemcpyTieringSpec", "spec_module_path": "tests.engines.memcpy",
            "cpu_bytes_to_use": HOST_CACHE_BYTES, "secondary_tiers": [tier],
        },
    )


def engine(request: dict[str, Any]) -> LLM:
    arguments = {"max_model_len": MOST_TOKENS, "dtype": "bfloat16", "enforce_eager": True, **request.get("engine", {})}
    return LLM(request["model"], skip_tokenizer_init=True, disable_log_stats=False, seed=0,
               prefix_caching_hash_algo="sha256_cbor", kv_transfer_config=connector(request), **arguments)


class Driver:
    """An engine and what it has counted so far."""

    def __init__(self, request: dict[str, Any]) -> None:
        self._new_tokens = request["new_tokens"]
        self._tier = request["tier"]
        self.llm = engine(request)
        self._faults = Faults(self.llm, request["settings"])
        self._counts: dict[str, int] = {}

    def round(self, prompts: list[list[int]], before: list[list[Any]], bypass: bool) -> dict[str, Any]:
        for action, *arguments in before:
            self._faults.take(action, *arguments)
        outputs = self.generate(prompts, self._new_tokens, bypass)
        again = self.generate(prompts, self._new_tokens, bypass)
        self._settle()
        assert self._slots_held() == 0, "some slots of the host cache are still held"
        assert self.llm.reset_prefix_cache(), "some pages are still held"
        self._empty_host_cache()
        counts = self._counted()
        new = {name: amount - self._counts.get(name, 0) for name, amount in counts.items()}
        self._counts = counts
        return {"outputs": outputs, "again": again, "counts": {name: amount for name, amount in new.items() if amount},
                "injected": self._faults.end(), "preemptions": self._preempted()}

    def generate(self, prompts: list[list[int]], new_tokens: int, bypass: bool = False) -> list[dict[str, Any]]:
        sampling = SamplingParams(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False,
                                  extra_args={"kv_transfer_params": {"kvstore_bypass": True}} if bypass else None)
        outputs = self.llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return [
            {
                "tokens": list(output.outputs[0].token_ids),
                "cached": output.num_cached_tokens,
                "first_token_s": output.metrics.first_token_latency,
            }
            for output in outputs
        ]

    def _slots_held(self) -> int:
        """Slots of a tier's host cache that a request or a transfer still holds; only seen in the engine's process."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if not self._tier or core is None:
            return 0
        cache = core.scheduler.connector.scheduler.manager.primary_tier
        return int(cache._num_allocated_chunks - len(cache._free_list) - cache._num_evictable_cache_chunks)

    def _empty_host_cache(self) -> None:
        """vLLM's own reset of a tier's host cache, past the store's connector, to which it means other weights. Only
        possible in the engine's process."""
        core = getattr(self.llm.llm_engine.engine_core, "engine_core", None)
        if self._tier and core is not None:
            OffloadingConnector.reset_cache(core.scheduler.connector)

    def _preempted(self) -> int:
        """Since the engine began."""
        return sum(int(metric.value) for metric in self.llm.get_metrics() if metric.name == "vllm:num_preemptions")

    def _counted(self) -> dict[str, int]:
        return {metric.labels["what"]: int(metric.value) for metric in self.llm.get_metrics()
                if metric.name == "vllm:kvstore"}

    def _settle(self) -> None:
        """Wait until what was saved is stored or counted as lost: until counts stand still."""
        until = time.monotonic() + WAIT_S
        last: dict[str, int] | None = None
        while time.monotonic() < until:
            # Counts come with a step of the engine, so there has to be one.
            self.generate([[1, 2, 3]], 1)
            counts = self._counted()
            if counts == last and counts.get("save_begun_blocks", 0) == sum(
                    counts.get(name, 0) for name in ("save_blocks", "save_already_blocks", "save_failed_blocks")):
                return
            last = counts
            time.sleep(0.05)
        raise AssertionError(f"saves have not ended: {last}")


def main() -> None:
    request = json.loads(Path(sys.argv[1]).read_text())
    driver = Driver(request)
    answers = [driver.round(each["prompts"], each.get("before", []), each.get("bypass", False))
               for each in request["rounds"]]
    Path(sys.argv[2]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
