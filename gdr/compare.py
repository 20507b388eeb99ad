"""Cold against warm: the same prompt without and with its stored prefix, in time and in every token.

    cold     no look-up; computes the whole prompt and writes its blocks back
    warm     a new engine: matches, fetches, swaps in under the forward pass, computes the rest
    stream   the same with stream=True: enters the forward pass on the store's promise

Both are then fed the cold run's greedy tokens one by one (teacher forcing). `same_tokens` says that the warm run would
have chosen each of them itself; `max_delta_logprob` is the largest difference of any token's log probability in any of
these steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from gdr.device import Device
from gdr.engine import Engine, EngineConfig
from gdr.errors import EngineError
from gdr.limits import CLOSE_WAIT_MS
from gdr.prefix import BlockStore
from gdr.sequence import Sequence as EngineSequence
from gdr.timeline import Span, busy_ms, hidden_share
from kvstore.keys import Namespace


@dataclass(frozen=True, slots=True)
class WarmRun:
    """A run with a prefix hit against the cold one. Times in seconds; *_ms are sums over the timeline's lanes."""

    first_token_s: float
    loaded_blocks: int
    prefilled_tokens: int
    same_tokens: bool
    max_delta_logprob: float
    fetch_ms: float
    copy_ms: float
    compute_ms: float
    hidden_share: float
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """All runs on one prompt. wanted_blocks: blocks that a warm run must load."""

    device: str
    prompt_tokens: int
    block_bytes: int
    wanted_blocks: int
    cold_first_token_s: float
    tokens: tuple[int, ...]
    warm: WarmRun
    stream: WarmRun

    @property
    def ok(self) -> bool:
        return all(run.same_tokens and run.loaded_blocks == self.wanted_blocks for run in (self.warm, self.stream))

    def document(self) -> dict[str, Any]:
        """Everything but the spans, as JSON values."""
        document = asdict(self)
        document["tokens"] = list(self.tokens)
        for name in ("warm", "stream"):
            del document[name]["spans"]
        return {"ok": self.ok, **document}


def compare(model: PreTrainedModel, store: BlockStore, namespace: Namespace, prompt: Sequence[int], new_tokens: int,
            config: EngineConfig | None = None, *, device: Device | None = None) -> Comparison:
    """Run all three; the store must not hold the prompt's blocks yet. EngineError when they could not be stored."""
    base = config or EngineConfig()
    with Engine(model, store, namespace, replace(base, load=False), device=device) as engine:
        _warm_up(engine)
        sequence = engine.prefill(prompt)
        seconds = sequence.prefill_s or 0.0
        if not engine.flush() or engine.counters.get("write_back_errors"):
            raise EngineError("the prompt's blocks could not be stored")
        logprobs, tokens = _teacher_forced(engine, sequence, new_tokens, None)
        engine.finish(sequence)
        name, block_bytes = engine.device.name, namespace.layout.block_bytes
    configs = [replace(base, write_back=False, stream=stream) for stream in (False, True)]
    runs = [_warm_run(model, store, namespace, prompt, used, device, logprobs, tokens) for used in configs]
    wanted = (len(prompt) - 1) // namespace.layout.block_tokens
    return Comparison(name, len(prompt), block_bytes, wanted, seconds, tuple(tokens), *runs)


def _warm_run(model: PreTrainedModel, store: BlockStore, namespace: Namespace, prompt: Sequence[int],
              config: EngineConfig, device: Device | None, cold: torch.Tensor, tokens: list[int]) -> WarmRun:
    with Engine(model, store, namespace, config, device=device, timeline=True) as engine:
        _warm_up(engine)
        assert engine.timeline is not None
        engine.timeline.restart()
        sequence = engine.prefill(prompt)
        prefilled = engine.timeline.now()
        logprobs, chosen = _teacher_forced(engine, sequence, len(tokens), tokens)
        engine.finish(sequence)
        # Only now: a streamed pass can end before the fetch that fed it has returned and is on the timeline.
        spans = tuple(span for span in engine.timeline.spans() if span.start_ms < prefilled)
    return WarmRun(
        first_token_s=sequence.prefill_s or 0.0,
        loaded_blocks=sequence.loaded_blocks,
        prefilled_tokens=sequence.prefilled_tokens,
        same_tokens=chosen == tokens,
        max_delta_logprob=float((logprobs - cold).abs().max()),
        fetch_ms=busy_ms(spans, "fetch"),
        copy_ms=busy_ms(spans, "copy"),
        compute_ms=busy_ms(spans, "compute"),
        hidden_share=hidden_share(spans, "copy", "compute"),
        spans=spans,
    )


def _warm_up(engine: Engine) -> None:
    """One-time costs of libraries and memory are not what is measured."""
    engine.host_pool.wait_prepared(CLOSE_WAIT_MS)
    # Below one block, so that it neither loads nor stores anything.
    sequence = engine.prefill([0] * (engine.block_tokens - 1))
    engine.finish(sequence)


def _teacher_forced(engine: Engine, sequence: EngineSequence, count: int,
                    tokens: list[int] | None) -> tuple[torch.Tensor, list[int]]:
    """Log probabilities (count, vocabulary) of `count` steps and the likeliest tokens; feeds `tokens`, or those."""
    rows, chosen = [], []
    for step in range(count):
        engine.step(sequence, None if tokens is None else tokens[step])
        assert sequence.logits is not None
        rows.append(sequence.logits.float().log_softmax(-1).cpu())
        chosen.append(int(sequence.logits.argmax()))
    return torch.stack(rows), chosen
