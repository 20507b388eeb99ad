"""Models for engine tests: small ones with random weights from a seed, and the demonstration's own; as files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, GptOssConfig, GptOssForCausalLM, LlamaConfig
from transformers import LlamaForCausalLM as Llama

from kvstore.demo.model import prepare
from kvstore.demo.source import cache_root, gguf_path

VOCABULARY = 512
SEED = 11


def model_at(name: str, root: Path) -> Path:
    """The directory of a model; made there unless it is already."""
    if name == "smollm2":
        return prepare(gguf_path(), cache_root()).directory
    place = root / name
    if not (place / "config.json").exists():
        torch.manual_seed(SEED)
        model = _MODELS[name]()
        torch.nn.Module.to(model, dtype=torch.bfloat16)
        model.save_pretrained(place)
    return place


def _llama() -> Any:
    return Llama(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.2,
        tie_word_embeddings=False,
    ))


def _gptoss() -> Any:
    return GptOssForCausalLM(GptOssConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, max_position_embeddings=4096, initializer_range=0.2, num_local_experts=4,
        num_experts_per_tok=2, sliding_window=128,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
    ))


def _deepseek() -> Any:
    config = DeepseekV3Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, moe_intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, n_shared_experts=1, n_routed_experts=4, num_experts_per_tok=2,
        n_group=1, topk_group=1, kv_lora_rank=512, q_lora_rank=64, qk_rope_head_dim=64, qk_nope_head_dim=128,
        v_head_dim=128, first_k_dense_replace=1, max_position_embeddings=4096, initializer_range=0.1,
        tie_word_embeddings=False,
    )
    # transformers knows one way to choose experts and does not name it; vLLM reads these names.
    config.update({"topk_method": "noaux_tc", "scoring_func": "sigmoid"})
    return DeepseekV3ForCausalLM(config)


_MODELS = {"llama": _llama, "gptoss": _gptoss, "deepseek": _deepseek}
