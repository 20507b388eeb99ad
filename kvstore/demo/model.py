"""The demonstration's model: from a quantised GGUF file to bfloat16 weights in a cache, once, and back from there.

A converted model is a directory of the cache named after the BLAKE2b of the GGUF file and the version of this
conversion:

    config.json, generation_config.json, model.safetensors   as `save_pretrained` writes them
    tokenizer.json                                           of the `tokenizers` library
    manifest.json                                            "tokenizer": BLAKE2b of that file, "weights": digest

It is written beside its place under a temporary name and renamed when complete, so a reader sees all of it or nothing;
of two processes that convert at once the second finds the place taken and throws its own copy away. `weights` is
`kvstore.connectors.transformers.weights_digest` of the converted model. `prepare` loads what it found or made and
computes that digest again, so a damaged cache is noticed and made anew.

The tensors are read with the `gguf` package itself. Loading a GGUF file through transformers needs a further package
(accelerate) and yields a model that refuses `save_pretrained`; a fresh model with a copied state dict does neither.
In a GGUF file of a llama the rows of query and key projections are ordered for interleaved rotary embedding: for each
head, row 2 i + j holds what transformers has in row j · (head size / 2) + i.

Everything is computed in bfloat16, weights and KV alike, with torch's fused attention: the bits of the KV are then
the bits of the computation, and a process that continues from stored blocks continues from exactly the same numbers.
Number of threads and chunk borders are equal in all processes, because either may change the last bits of a result.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any, Final

import gguf
import numpy as np
import torch
from safetensors import SafetensorError
from tokenizers import Tokenizer
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from efs.errors import EfsError
from kvstore.connectors.transformers import weights_digest

CONVERSION_VERSION: Final = 1
DTYPE: Final = torch.bfloat16
ATTENTION: Final = "sdpa"
_FILES: Final = ("config.json", "model.safetensors", "tokenizer.json", "manifest.json")
_OUTER_NAMES: Final = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER_NAMES: Final = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class UnreadableModel(EfsError):
    """The model file is not what this conversion understands; the message names what is different."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A converted model in the cache. converted: it was made by this call and not found."""

    directory: Path
    weights: str
    converted: bool


def prepare(gguf_file: Path, cache_root: Path) -> Prepared:
    """Find the converted model in the cache, or make it there."""
    place = cache_root / f"{gguf_file.stem}-{_file_digest(gguf_file)[:16]}-{CONVERSION_VERSION}"
    weights = verified_weights(place)
    if weights is not None:
        return Prepared(place, weights, converted=False)
    if place.exists():
        shutil.rmtree(place)
    cache_root.mkdir(parents=True, exist_ok=True, mode=0o700)
    making = Path(tempfile.mkdtemp(prefix=f".{place.name}-", dir=cache_root))
    try:
        convert(gguf_file, making)
        _move_into_place(making, place)
    finally:
        shutil.rmtree(making, ignore_errors=True)
    weights = verified_weights(place)
    if weights is None:
        raise UnreadableModel(f"{place}: the converted model does not read back as it was written")
    return Prepared(place, weights, converted=True)


def verified_weights(place: Path) -> str | None:
    """The weights digest of a complete and undamaged converted model, else None."""
    if not all((place / name).is_file() for name in _FILES):
        return None  # Asked for a directory without them, transformers would look for the model on the network.
    try:
        manifest = json.loads((place / "manifest.json").read_bytes())
        if manifest["tokenizer"] != _file_digest(place / "tokenizer.json"):
            return None
        weights = weights_digest(load_model(place))
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError):
        return None  # What a missing or damaged file makes the various readers raise.
    return weights if weights == manifest["weights"] else None


def load_model(place: Path) -> LlamaForCausalLM:
    """The converted model, ready to run."""
    model: LlamaForCausalLM = LlamaForCausalLM.from_pretrained(
        place, dtype=DTYPE, attn_implementation=ATTENTION, local_files_only=True, use_safetensors=True
    )
    model.train(False)
    return model


def load_tokenizer(place: Path) -> Tokenizer:
    return Tokenizer.from_file(str(place / "tokenizer.json"))


def convert(gguf_file: Path, into: Path) -> None:
    """Write the converted model into a directory; its manifest last."""
    reader = gguf.GGUFReader(gguf_file)
    model = LlamaForCausalLM(config_of(reader))
    torch.nn.Module.to(model, dtype=DTYPE)
    missing, unexpected = model.load_state_dict(state_of(reader, model.config), strict=False)
    left = sorted(set(missing) - ({"lm_head.weight"} if model.config.tie_word_embeddings else set()))
    if left or unexpected:
        raise UnreadableModel(f"{gguf_file}: tensors missing: {left}, not understood: {sorted(unexpected)}")
    model.tie_weights()
    model.save_pretrained(into)
    tokenizer = AutoTokenizer.from_pretrained(str(gguf_file.parent), gguf_file=gguf_file.name, local_files_only=True)
    tokenizer.backend_tokenizer.save(str(into / "tokenizer.json"))
    manifest = {"tokenizer": _file_digest(into / "tokenizer.json"), "weights": weights_digest(load_model(into))}
    (into / "manifest.json").write_text(json.dumps(manifest))


def config_of(reader: gguf.GGUFReader) -> LlamaConfig:
    """The model's configuration from the file's metadata."""

    def field(name: str) -> Any:
        found = reader.fields.get(name)
        if found is None:
            raise UnreadableModel(f"the model file has no field {name}")
        return found.contents()

    if field("general.architecture") != "llama":
        raise UnreadableModel(f"the model file holds a {field('general.architecture')} model, not a llama")
    return LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=field("llama.attention.layer_norm_rms_epsilon"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=all(tensor.name != "output.weight" for tensor in reader.tensors),
    )


def state_of(reader: gguf.GGUFReader, config: LlamaConfig) -> dict[str, torch.Tensor]:
    """All tensors of the file, dequantised, under the names and in the order of rows of transformers."""
    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        values = np.array(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        part = tensor.name.split(".")
        if part[0] == "blk" and len(part) == 4 and part[2] in _LAYER_NAMES:
            if part[2] in ("attn_q", "attn_k"):
                heads = config.num_attention_heads if part[2] == "attn_q" else config.num_key_value_heads
                assert heads is not None
                values = rows_of_halves(values, heads)
            name = f"model.layers.{part[1]}.{_LAYER_NAMES[part[2]]}.{part[3]}"
        elif part[0] in _OUTER_NAMES and len(part) == 2:
            name = f"{_OUTER_NAMES[part[0]]}.{part[1]}"
        else:
            raise UnreadableModel(f"the model file holds a tensor {tensor.name} that is not of a llama")
        state[name] = torch.from_numpy(values).to(DTYPE)
    return state


def rows_of_halves(values: np.ndarray[Any, np.dtype[np.float32]], heads: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Reorder each head's rows from interleaved pairs to two halves (module docstring)."""
    rows, columns = values.shape
    return np.ascontiguousarray(values.reshape(heads, -1, 2, columns).swapaxes(1, 2).reshape(rows, columns))


def _move_into_place(making: Path, place: Path) -> None:
    for path in sorted(making.iterdir()):
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        making.rename(place)
    except OSError:
        if not place.is_dir():
            raise
        # Another process was first; what it made is verified like anything found.


def _file_digest(path: Path) -> str:
    digest = blake2b(digest_size=32)
    with path.open("rb") as file:
        while piece := file.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()
