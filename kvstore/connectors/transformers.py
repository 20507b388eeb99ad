"""KV blocks of Hugging Face transformers models (version 5): a `DynamicCache` to the store and back.

Use, with `tokens` the whole input as a list of ints and `model` any decoder whose layers all use full attention:

    store = KVStore.blocking("/var/lib/kvstore")
    ns = namespace_of(store, model, name="my-model")  # hashes the weights: once for each loaded model
    cache = DynamicCache(config=model.config)
    loaded = load(store, ns, tokens, cache)
    for start in range(loaded.tokens, len(tokens), ns.layout.block_tokens):
        chunk = torch.tensor([tokens[start : start + ns.layout.block_tokens]])
        logits = model(chunk, cache=cache, use_cache=True).logits
    save(store, ns, tokens, cache, already=loaded.blocks)
    next_token = int(logits[0, -1].argmax())
    store.close()

(`cache=` was called `past_key_values=` in earlier releases of transformers 5.)

*Layout.* A block is 128 tokens. Layer i is segment i: the keys of the block, then its values, each (heads, tokens,
head size) in row order and in the model's dtype. So a layer of n blocks of a segment-major buffer is one array (n, 2,
heads, tokens, head size), and both directions are two strided copies a layer whose inner stretch is one head's part
of a block (16 KiB at 64 bf16 values a token).

*What may be used.* Only `GetReport.blocks`, the verified leading run, decides what enters the cache; what `match`
promised does not, and bytes of blocks behind that run are never looked at. At least one token of the input is left to
compute, because its logits are needed: an input of exactly n blocks reuses n - 1.

*What may be stored.* Only tokens whose KV is in the cache. The last sampled token has none until the next step, so
100 + 28 tokens are no block yet; counting `cache.get_seq_length()`, not tokens, gets this right.

*Equal bits.* The KV of a token depends in its last bits on how many tokens were computed together. If input is always
computed in chunks that begin at multiples of the block, as above, stored blocks hold exactly the bits that the same
computation would make again, and continuing from them gives the same logits. Blocks of tokens that were decoded one
by one are valid KV too, but recomputing them as a chunk gives other last bits: who wants bit-equal runs saves after
the prefill.

*Limits.* One sequence (batch size 1). Sliding-window, linear-attention and compressed caches are refused, not guessed
at. So are rotary positions that depend on the length of the sequence (`dynamic`, `longrope`), and loaded adapters that
are not merged. The whole KV of the reused prefix is held twice in host memory while it is copied.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any, Protocol

import torch
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from efs.errors import InvalidArgument
from efs.types import GetReport, PutReport
from kvstore.connectors.rope import STATIC_ROPE, length_bound_rope
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout

BLOCK_TOKENS = 128
FORMAT = "transformers-kv"
PUT_PIECE_BYTES = 64 * 1024 * 1024
"""Most block bytes gathered for one `put`: bounds the memory beside the cache."""


class BlockStore(Protocol):
    """What `load` and `save` need of a store; `kvstore.BlockingKVStore` has it."""

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int: ...

    def get_into(self, chain: Chain, out: Any, *, deadline_ms: float | None = None) -> GetReport: ...

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport: ...


class NamespaceSource(Protocol):
    """What `namespace_of` needs of a store."""

    def namespace(self, *, model: str, weights: str, layout: BlockLayout, tenant: str | None = None) -> Namespace: ...


@dataclass(frozen=True, slots=True)
class Loaded:
    """What `load` put into the cache.

    tokens: tokens reused, a multiple of the block; computing goes on behind them. blocks: the same in blocks.
    matched: blocks that were promised, at most what the input may reuse. report: of the fetch, None when there was
    nothing to fetch.
    """

    tokens: int
    blocks: int
    matched: int
    report: GetReport | None


@dataclass(frozen=True, slots=True)
class _Geometry:
    """One layer's part of a block, as `layout_of` wrote it into the layout's format: heads x head size."""

    layers: int
    heads: int
    head_size: int
    tokens: int
    dtype: torch.dtype

    def shape(self, blocks: int) -> tuple[int, int, int, int, int]:
        return blocks, 2, self.heads, self.tokens, self.head_size


def layout_of(config: PreTrainedConfig, dtype: torch.dtype, block_tokens: int = BLOCK_TOKENS) -> BlockLayout:
    """The block of a model: one segment a layer. InvalidArgument for a model whose KV is not plain full attention, or
    whose rotary positions may depend on more than the place of a token."""
    text = config.get_text_config(decoder=True)
    others = set(getattr(text, "layer_types", None) or ()) - {"full_attention"}
    window = getattr(text, "sliding_window", None) if getattr(text, "use_sliding_window", True) else None
    if others or window is not None:
        named = ", ".join(sorted(others)) or f"sliding_window={window}"
        raise InvalidArgument(f"{text.model_type}: only full attention in every layer is supported, not {named}")
    unfit = length_bound_rope(text.to_dict())
    if unfit:
        raise InvalidArgument(
            f"{text.model_type}: rotary positions of type {', '.join(unfit)} may depend on the length of the sequence, "
            f"supported are {', '.join(sorted(STATIC_ROPE))}"
        )
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    head_size = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layer_bytes = 2 * heads * head_size * block_tokens * dtype.itemsize
    return BlockLayout.per_layer(
        [layer_bytes] * text.num_hidden_layers,
        format=f"{FORMAT}/{heads}x{head_size}",
        dtype=str(dtype).removeprefix("torch."),
        block_tokens=block_tokens,
        name=text.model_type,
    )


def weights_digest(model: PreTrainedModel) -> str:
    """64 hex digits over configuration and every tensor of the model: name, type, shape, bytes. Buffers that are not
    saved with a model count too, such as rotary frequencies, which a cast of the model casts as well.

    Reads all weights (about a second a gigabyte). Keep the result, or the namespace, as long as the model is loaded and
    not changed. InvalidArgument for a model with adapters.
    """
    _refuse_adapters(model)
    digest = blake2b(digest_size=32, person=b"kvstore/weights")
    settings = model.config.to_diff_dict()
    for label in ("_name_or_path", "transformers_version", "dtype", "architectures"):
        settings.pop(label, None)
    digest.update(json.dumps(settings, sort_keys=True, default=str).encode())
    tensors = {**dict(model.named_buffers(remove_duplicate=False)), **model.state_dict()}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def _refuse_adapters(model: PreTrainedModel) -> None:
    """InvalidArgument for a model that computes with adapters: which are active, and how strongly, no tensor tells."""
    parts = {part.__module__.partition(".")[0] for module in model.modules() for part in type(module).__mro__}
    if getattr(model, "_hf_peft_config_loaded", False) or "peft" in parts:
        raise InvalidArgument(f"{model.config.model_type}: the model has adapters, merge them into its weights")


def namespace_of(store: NamespaceSource, model: PreTrainedModel, *, name: str, weights: str | None = None,
                 tenant: str | None = None) -> Namespace:
    """The namespace of a model's KV blocks. weights: its `weights_digest` where that is known already."""
    _refuse_adapters(model)
    return store.namespace(
        model=name, weights=weights or weights_digest(model), layout=layout_of(model.config, model.dtype), tenant=tenant
    )


def load(store: BlockStore, ns: Namespace, tokens: Sequence[int], cache: DynamicCache, *, promised: int | None = None,
         salt: str | None = None, device: torch.device | str = "cpu", deadline_ms: float | None = None) -> Loaded:
    """Fill an empty cache with the longest stored prefix of `tokens`; compute on from `Loaded.tokens`.

    A shorter hit than was matched, down to none, is a shorter prefix, not an error. InvalidArgument for a cache that is
    not empty. promised: leading blocks that an earlier match found, where there was one. salt: separates users of one
    namespace; the same one must be given to `save`. device: of the model.
    """
    if cache.get_seq_length() != 0:
        raise InvalidArgument(f"the cache holds {cache.get_seq_length()} tokens, load needs an empty one")
    geometry = _geometry(ns.layout)
    reusable = max(0, len(tokens) - 1) // geometry.tokens
    chain = ns.chain(tokens, salt=salt)[:reusable]
    if promised is not None:
        matched = min(promised, len(chain))
    elif len(chain):
        # Strict: the fetch needs the answers of all nodes anyway, and then finds them in memory.
        matched = store.match(chain, strict=True, deadline_ms=deadline_ms)
    else:
        matched = 0
    if matched == 0:
        return Loaded(0, 0, 0, None)
    out = torch.empty(matched * ns.layout.block_bytes, dtype=torch.uint8)
    report = store.get_into(chain[:matched], out.numpy(), deadline_ms=deadline_ms)
    if report.blocks:
        _fill(cache, geometry, out, matched, report.blocks, device)
    return Loaded(report.blocks * geometry.tokens, report.blocks, matched, report)


def save(store: BlockStore, ns: Namespace, tokens: Sequence[int], cache: DynamicCache, already: int = 0, *,
         salt: str | None = None, deadline_ms: float | None = None) -> PutReport:
    """Store the full blocks of the cache behind the first `already`, which `load` brought.

    tokens: the sequence whose KV the cache holds; it may be longer than the cache (the last sampled token, an input
    not yet computed), never shorter. InvalidArgument names what does not fit together. deadline_ms: of each piece.
    """
    geometry = _geometry(ns.layout)
    computed = cache.get_seq_length()
    if computed > len(tokens):
        raise InvalidArgument(f"the cache holds {computed} tokens, but only {len(tokens)} were given")
    full = computed // geometry.tokens
    if not 0 <= already <= full:
        raise InvalidArgument(f"already is {already}, the cache holds {full} full blocks")
    chain = ns.chain(tokens, salt=salt)
    piece_blocks = max(1, PUT_PIECE_BYTES // ns.layout.block_bytes)
    total = PutReport(acked=0, already=0, failed=0, at_risk=0)
    for start in range(already, full, piece_blocks):
        stop = min(start + piece_blocks, full)
        blocks = _gather(cache, geometry, start, stop)
        done = store.put(chain[start:stop], blocks.numpy(), deadline_ms=deadline_ms)
        total = PutReport(
            total.acked + done.acked, total.already + done.already, total.failed + done.failed,
            total.at_risk + done.at_risk, total.why or done.why,
        )
    return total


def _geometry(layout: BlockLayout) -> _Geometry:
    """Read back what `layout_of` wrote, so that the namespace alone says how its bytes lie."""
    kind, _, sizes = layout.format.partition("/")
    if kind != FORMAT:
        raise InvalidArgument(f"the namespace's layout is {layout.format}, not one of {FORMAT}")
    heads, head_size = (int(size) for size in sizes.split("x"))
    return _Geometry(len(layout.segments), heads, head_size, layout.block_tokens, getattr(torch, layout.dtype))


def _fill(cache: DynamicCache, geometry: _Geometry, out: torch.Tensor, fetched: int, blocks: int,
          device: torch.device | str) -> None:
    """Copy the first `blocks` of a segment-major buffer of `fetched` blocks into the cache."""
    layers = out.view(geometry.dtype).view(geometry.layers, *geometry.shape(fetched))
    for layer in range(geometry.layers):
        # (blocks, 2, heads, tokens, size) -> (2, 1, heads, blocks * tokens, size); the reshape copies.
        both = layers[layer, :blocks].permute(1, 2, 0, 3, 4).reshape(
            2, 1, geometry.heads, blocks * geometry.tokens, geometry.head_size
        )
        cache.update(both[0].to(device), both[1].to(device), layer)


def _gather(cache: DynamicCache, geometry: _Geometry, start: int, stop: int) -> torch.Tensor:
    """Blocks [start, stop) of the cache as flat block-major bytes."""
    blocks = stop - start
    out = torch.empty((blocks, geometry.layers, *geometry.shape(1)[1:]), dtype=geometry.dtype)
    if len(cache.layers) != geometry.layers:
        raise InvalidArgument(f"the cache has {len(cache.layers)} layers, the layout {geometry.layers}")
    tokens = slice(start * geometry.tokens, stop * geometry.tokens)
    for layer, held in enumerate(cache.layers):
        for part, name in enumerate(("keys", "values")):
            rows = _checked(getattr(held, name, None), geometry, layer)[0, :, tokens]
            # (heads, blocks * tokens, size) -> (blocks, heads, tokens, size), a view
            split = rows.view(geometry.heads, blocks, geometry.tokens, geometry.head_size)
            out[:, layer, part].copy_(split.transpose(0, 1))
    return out.view(torch.uint8).reshape(-1)


def _checked(tensor: torch.Tensor | None, geometry: _Geometry, layer: int) -> torch.Tensor:
    """The tensor (1, heads, tokens, head size) of a layer, or InvalidArgument that says how it differs."""
    if tensor is None:
        raise InvalidArgument(f"layer {layer} of the cache holds no keys and values of its own")
    expected = (1, geometry.heads, geometry.head_size)
    found = (tensor.shape[0], tensor.shape[1], tensor.shape[3])
    if found != expected or tensor.dtype != geometry.dtype:
        raise InvalidArgument(
            f"layer {layer} of the cache has (batch, heads, head size) {found} of {tensor.dtype}, "
            f"the layout {expected} of {geometry.dtype}"
        )
    return tensor
