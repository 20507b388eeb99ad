"""A GGUF file of a very small llama with random weights, written with the gguf package: input for the conversion."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROPE_BASE = 10_000.0
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# The 256 bytes as printable letters, in the way of GPT-2 tokenizers: printable Latin-1 stands for itself.
_OWN = [*range(33, 127), *range(161, 173), *range(174, 256)]
_LETTERS = [chr(byte) for byte in _OWN] + [chr(256 + number) for number in range(256 - len(_OWN))]
MERGES = ("Ġ t", "h e", "Ġt he")
TOKENS = (*SPECIAL, *_LETTERS, *(merge.replace(" ", "") for merge in MERGES))

_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}


def small_llama(seed: int = 3) -> LlamaForCausalLM:
    """2 layers, 4 heads of 16, 2 KV heads; weights in float32 that bfloat16 holds exactly, large enough that the
    next token depends on the whole input."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENS), hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, rms_norm_eps=2.0**-17, initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE}, tie_word_embeddings=True,
        bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.to(torch.bfloat16))
    model.train(False)
    return model


def write_gguf(path: Path, model: LlamaForCausalLM, without: str | None = None, extra: str | None = None) -> None:
    """Write the model in float32. without: leave out one tensor; extra: add one of this name."""
    config = model.config
    assert config.num_key_value_heads is not None
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name("small")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(ROPE_BASE)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(list(TOKENS))
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(list(MERGES))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    for name, values in gguf_tensors(model).items():
        if name != without:
            writer.add_tensor(name, values)
    if extra is not None:
        writer.add_tensor(extra, np.zeros((2, 2), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(model: LlamaForCausalLM) -> dict[str, np.ndarray]:
    """Tensors under the names and in the row order of a GGUF file: queries and keys interleaved, head by head."""
    config = model.config
    tensors = {}
    for name, tensor in model.state_dict().items():
        values = tensor.float().numpy()
        if name == "lm_head.weight":
            continue
        if not name.startswith("model.layers."):
            short = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
            tensors[short] = values
            continue
        layer, _, rest = name.removeprefix("model.layers.").partition(".")
        kind = _NAMES[rest.removesuffix(".weight")]
        if kind in ("attn_q", "attn_k"):
            heads = config.num_attention_heads if kind == "attn_q" else config.num_key_value_heads
            assert heads is not None
            values = interleaved(values, heads)
        tensors[f"blk.{layer}.{kind}.weight"] = values
    return tensors


def interleaved(values: np.ndarray, heads: int) -> np.ndarray:
    """For each head, row 2 i + j from row j * half + i, as a loop: it shares nothing with the product."""
    out = np.empty_like(values)
    size = values.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            for j in range(2):
                out[head * size + 2 * i + j] = values[head * size + j * (size // 2) + i]
    return out
