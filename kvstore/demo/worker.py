"""One process of the demonstration: `python -m kvstore.demo.worker prepare|converse REQUEST.json RESULT.json`.

Every turn of the demonstration is a process of its own, so nothing but the store can carry KV from one to the next.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache, LlamaForCausalLM
from transformers.cache_utils import DynamicLayer
from transformers.utils import logging as transformers_logging

from efs.clock import Clock, SystemClock
from efs.errors import InvalidArgument
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE
from efs.types import PutReport
from kvstore.connectors.transformers import Loaded, layout_of, load, save
from kvstore.demo.conversation import next_prompt
from kvstore.demo.messages import (
    PrepareRequest,
    PrepareResult,
    RunRequest,
    RunResult,
    TurnResult,
    read_message,
    write_message,
)
from kvstore.demo.model import load_model, prepare
from kvstore.demo.source import MODEL_NAME
from kvstore.demo.sparse import read_through
from kvstore.keys import Namespace
from kvstore.store import BlockingKVStore, KVStore, cluster_of, store_root

DEADLINE_MS = 30_000.0
"""Generous: a demonstration should come out the same on a slow disk."""
MEND_SECONDS = 20.0


class TokenCounter:
    """Counts the tokens that really enter a model, by a hook on its embedding."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.tokens = 0
        model.get_input_embeddings().register_forward_pre_hook(self._count)

    def _count(self, _module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        self.tokens += inputs[0].numel()


@dataclass(frozen=True, slots=True)
class Engine:
    """A loaded model and what is fixed for the process."""

    model: LlamaForCausalLM
    counter: TokenCounter
    ns: Namespace
    clock: Clock
    cache_argument: str

    @classmethod
    def start(cls, request: RunRequest, clock: Clock) -> Engine:
        """Load the model and run one block through it, so that one-time costs of libraries are not timed as prefill."""
        torch.set_num_threads(request.threads)
        model = load_model(Path(request.model))
        layout = layout_of(model.config, model.dtype)
        ns = Namespace(model=MODEL_NAME, weights=request.weights, layout=layout)
        # Renamed within transformers 5; the old name is deprecated in later releases.
        named = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        engine = cls(model, TokenCounter(model), ns, clock, named)
        warm_up = engine.empty_cache()
        engine.forward([0] * layout.block_tokens, warm_up)
        engine.forward([0], warm_up)
        engine.counter.tokens = 0
        return engine

    def empty_cache(self) -> DynamicCache:
        return DynamicCache(config=self.model.config)

    def forward(self, tokens: Sequence[int], cache: DynamicCache) -> torch.Tensor:
        """Logits (vocabulary,) behind the last token; the cache grows by the tokens."""
        extra: dict[str, Any] = {self.cache_argument: cache}
        with torch.inference_mode():
            output = self.model(torch.tensor([list(tokens)]), use_cache=True, logits_to_keep=1, **extra)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def prefill(self, tokens: Sequence[int], start: int, cache: DynamicCache) -> torch.Tensor:
        """Compute tokens from `start`, a multiple of the block, in blocks; at least one token."""
        size = self.ns.layout.block_tokens
        logits = torch.empty(0)
        for position in range(start, len(tokens), size):
            logits = self.forward(tokens[position : position + size], cache)
        return logits

    def decode(self, logits: torch.Tensor, cache: DynamicCache, most: int) -> list[int]:
        """The most probable tokens, one by one, up to `most` or the end of the answer (which is not among them)."""
        answer: list[int] = []
        while True:
            token = int(logits.argmax())
            if token == self.model.config.eos_token_id:
                return answer
            answer.append(token)
            if len(answer) == most:
                return answer
            logits = self.forward([token], cache)


def converse(request: RunRequest, clock: Clock) -> RunResult:
    """All turns of a request."""
    engine = Engine.start(request, clock)
    layout = engine.ns.layout
    turns: list[TurnResult] = []
    prompt = request.prompt
    with KVStore.blocking(request.store) if request.store is not None else nullcontext() as store:
        for added in [None, *request.additions]:
            if added is not None:
                prompt = next_prompt(prompt, turns[-1].answer, added)
            turns.append(_turn(engine, store, request, prompt))
    return RunResult(os.getpid(), layout.block_bytes, layout.block_tokens, len(layout.segments), turns)


def _turn(engine: Engine, store: BlockingKVStore | None, request: RunRequest, prompt: list[int]) -> TurnResult:
    clock, cache = engine.clock, engine.empty_cache()
    if request.warm and request.store is not None:
        read_through(Path(store_root(request.store)))
    mended_before = mended_shards(request.store)
    started = clock.monotonic()
    loaded = Loaded(0, 0, 0, None)
    if store is not None:
        loaded = load(
            store, engine.ns, prompt, cache, promised=request.promised, salt=request.salt, deadline_ms=DEADLINE_MS)
    load_seconds = clock.monotonic() - started
    if request.zero_block is not None and request.zero_block < loaded.blocks:  # Else the report shows what is missing.
        zero_block(cache, request.zero_block, engine.ns.layout.block_tokens)

    counted = engine.counter.tokens
    started = clock.monotonic()
    logits = engine.prefill(prompt, loaded.tokens, cache)
    prefill_seconds = clock.monotonic() - started
    prefilled = engine.counter.tokens - counted

    started = clock.monotonic()
    put: PutReport | None = None
    if store is not None and request.save:
        # Before decoding: see "Equal bits" in the connector.
        put = save(store, engine.ns, prompt, cache, loaded.blocks, salt=request.salt, deadline_ms=DEADLINE_MS)
    put_seconds = clock.monotonic() - started
    corrupt = loaded.report.corrupt if loaded.report is not None else 0
    mended = wait_for_mending(request.store, mended_before, corrupt, clock)
    return TurnResult(
        prompt_tokens=len(prompt), matched_blocks=loaded.matched, load_seconds=load_seconds, get=loaded.report,
        prefilled_tokens=prefilled, prefill_seconds=prefill_seconds, put=put, put_seconds=put_seconds,
        mended=mended,
        logits=blake2b(logits.contiguous().view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest(),
        answer=engine.decode(logits, cache, request.answer_tokens),
        keys=[key.hex() for key in engine.ns.chain(prompt, salt=request.salt)],
    )


def mended_shards(store: str | None) -> int:
    """The store's counter of shards put right, from its file; 0 without a store, and for a cluster whose counters are
    in the memory of its clients."""
    if store is None:
        return 0
    cluster = cluster_of(store)
    path = os.path.join(store_root(store) if cluster is None else os.path.dirname(cluster), COUNTERS_FILE)
    if cluster is not None and not os.path.lexists(path):
        return 0
    counters = CounterFile.open(path, writable=False)
    try:
        return counters.get("node_mended")
    finally:
        counters.close()


def wait_for_mending(store: str | None, before: int, wanted: int, clock: Clock) -> int:
    """Wait, but not for ever, until the store has mended as many shards as the fetch found corrupt; returns how many it
    has. Mending runs beside the answer and would be cut short by the end of this process."""
    give_up = clock.monotonic() + MEND_SECONDS
    while (mended := mended_shards(store) - before) < wanted and clock.monotonic() < give_up:
        time.sleep(0.01)
    return mended


def zero_block(cache: DynamicCache, block: int, block_tokens: int) -> None:
    """Overwrite one block of a cache with zeros, all layers, keys and values."""
    where = slice(block * block_tokens, (block + 1) * block_tokens)
    for layer in cache.layers:
        assert isinstance(layer, DynamicLayer)
        assert layer.keys is not None
        assert layer.values is not None
        layer.keys[:, :, where] = 0
        layer.values[:, :, where] = 0


def main(argv: Sequence[str]) -> None:
    task, request_path, result_path = argv
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    clock = SystemClock()
    if task == "prepare":
        started = clock.monotonic()
        wanted = read_message(Path(request_path), PrepareRequest)
        made = prepare(Path(wanted.gguf_file), Path(wanted.cache_root))
        result: object = PrepareResult(
            str(made.directory), made.weights, made.converted, clock.monotonic() - started
        )
    elif task == "converse":
        result = converse(read_message(Path(request_path), RunRequest), clock)
    else:
        raise InvalidArgument(f"no task {task}")
    write_message(Path(result_path), result)


if __name__ == "__main__":
    main(sys.argv[1:])
