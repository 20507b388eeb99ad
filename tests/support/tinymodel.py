"""A decoder small enough for hundreds of runs in a test: real transformers code, random weights from a seed."""

from __future__ import annotations

import random

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from kvstore.connectors.transformers import layout_of
from kvstore.keys import Namespace

BLOCK = 16
VOCABULARY = 211


def tiny_model(layers: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0) -> LlamaForCausalLM:
    """Grouped-query attention, rotary positions, weights large enough that tokens depend on their context."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=4096,
            initializer_range=0.6, tie_word_embeddings=False,
        ))
    model.train(False)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


def tiny_namespace(model: LlamaForCausalLM) -> Namespace:
    return Namespace("tiny", "seed-0", layout_of(model.config, model.dtype, BLOCK))


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


def reference(model: LlamaForCausalLM, tokens: list[int], new: int, chunk: int = BLOCK) -> list[int]:
    """Greedy tokens without any of our code: transformers' own cache, the same chunks."""
    cache = DynamicCache(config=model.config)
    made: list[int] = []
    with torch.inference_mode():
        for start in range(0, len(tokens), chunk):
            ids = torch.tensor([tokens[start : start + chunk]])
            logits = model(input_ids=ids, cache=cache, use_cache=True).logits[0, -1]
        for _ in range(new):
            made.append(int(logits.argmax()))
            if len(made) < new:
                logits = model(input_ids=torch.tensor([made[-1:]]), cache=cache, use_cache=True).logits[0, -1]
    return made
