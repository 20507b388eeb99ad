"""Who an engine is, as far as its KV blocks are concerned: what goes into their names, and which engines are served.

*What is in a namespace.* vLLM's version and hash function (they make the block hashes), the model's configuration as
vLLM runs it, dtype, quantisation and its settings, the weights and how they are loaded, max_model_len where positions
depend on it, tensor- and pipeline-parallel rank and size, the KV group, and of each
page the layers, the order of dimensions and the element type. Also the attention backend and the kind of processor:
some backends choose the order of bytes inside a page by what the processor can do (on CPUs by AMX), and no shape
tells.

*What is not served.* Models whose cache is not made of full-attention and sliding-window groups (state space, cross
attention, chunked attention), speculative decoding, context parallelism, hashes that can collide or differ between
processes, weights that are made up or cannot be told: the connector says so once and does nothing; the engine runs as
without it.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from typing import Any, Final

import torch
from vllm import __version__ as vllm_version
from vllm.platforms import current_platform
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)

from efs.errors import InvalidArgument
from kvstore.connectors.paged.hits import Group
from kvstore.connectors.paged.settings import PagedSettings
from kvstore.connectors.paged.weights import weights_of
from kvstore.connectors.rope import length_bound_rope
from kvstore.localset import start
from kvstore.store import BlockingKVStore
from kvstore.tenants import Tenant, find_tenant

REPRODUCIBLE_HASHES: Final = ("sha256", "sha256_cbor")
NAMED_WEIGHTS: Final = frozenset({
    "auto", "hf", "safetensors", "fastsafetensors", "instanttensor", "runai_streamer", "mistral", "pt", "npcache",
})
"""Values of load_format with which the weights are those in the model's files, as a digest or a commit names them."""
_BY_LENGTH: Final = frozenset({"llama4", "llama4_text"})
"""Models in which vLLM switches attention scaling on by max_model_len, and off by a setting of generation."""
RESET: Final = "vLLM reset it, which may mean other weights than blocks are named by; a restart uses it again"
_PASSING: Final = ("_name_or_path", "transformers_version", "_commit_hash")


def unsupported(vllm_config: Any, kv_cache_config: Any) -> str | None:
    """Why this engine is not served; None when it is."""
    cache, parallel = vllm_config.cache_config, vllm_config.parallel_config
    if cache.prefix_caching_hash_algo not in REPRODUCIBLE_HASHES:
        return f"blocks are named by {cache.prefix_caching_hash_algo}, must be {' or '.join(REPRODUCIBLE_HASHES)}"
    if _load_format(vllm_config) == "dummy":
        return "load_format dummy: the weights are made up"
    if vllm_config.speculative_config is not None:
        return "speculative decoding"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism"
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        if not group.enable_kv_transfer or group.host_resident or group_of(group.kv_cache_spec) is None:
            return f"KV group {index} is of kind {type(group.kv_cache_spec).__name__}"
    return None


def group_of(spec: Any) -> Group | None:
    """What must be known of a KV group; None for one that is not served. Exact types: a subclass may mean anything."""
    if isinstance(spec, UniformTypeKVCacheSpecs):
        groups = {group_of(inner) for inner in spec.kv_cache_specs.values()}
        return groups.pop() if len(groups) == 1 else None
    if type(spec) in (FullAttentionSpec, MLAAttentionSpec):
        return None if spec.non_causal or spec.tokens_per_state != 1 else Group(spec.block_size)
    if type(spec) is SlidingWindowSpec and not spec.extra_retained_tokens and spec.tokens_per_state == 1:
        return Group(spec.block_size, spec.sliding_window)
    return None


def kind_of(config: Any, layers: Sequence[str]) -> str:
    """Who wrote the inside of these layers' pages, and on what kind of processor."""
    context = config.compilation_config.static_forward_context
    missing = [name for name in layers if name not in context]
    if missing:
        raise InvalidArgument(f"layer {missing[0]} is not known to the engine")
    backends = sorted({context[name].get_attn_backend().get_name() for name in layers})
    if current_platform.is_cpu():
        amx = "+amx" if torch.cpu._is_amx_tile_supported() else ""
        device = f"{platform.machine()}-{torch.backends.cpu.get_cpu_capability()}{amx}"
    else:
        device = current_platform.get_device_name()
    return f"vllm {'+'.join(backends)} {device}"


def fingerprint(config: Any) -> str:
    """All of an engine's configuration that changes KV bytes or block hashes, apart from weights and pages."""
    model = config.model_config
    settings = {name: value for name, value in model.hf_config.to_dict().items() if name not in _PASSING}
    facts = {
        "vllm": vllm_version,
        "hashes": config.cache_config.prefix_caching_hash_algo,
        "dtype": str(model.dtype),
        "cache_dtype": str(config.cache_config.cache_dtype),
        "quantization": str(model.quantization),
        "quantization_config": getattr(model, "quantization_config", None),
        "load_format": _load_format(config),
        "code_revision": getattr(model, "code_revision", None),
        "length": _length(model, settings),
        "architecture": settings,
    }
    text = json.dumps(facts, sort_keys=True, default=str)
    return f"vllm/{blake2b(text.encode(), digest_size=32, person=b'kvstore/vllm').hexdigest()}"


def _length(model: Any, settings: Mapping[str, Any]) -> list[Any] | None:
    """What KV depends on where it depends on the longest sequence that the engine takes; None elsewhere."""
    scaled = str(settings.get("model_type")) in _BY_LENGTH
    if not scaled and not length_bound_rope(settings):
        return None
    return [model.max_model_len, getattr(model, "override_generation_config", None) if scaled else None]


def _load_format(config: Any) -> str:
    return str(config.load_config.load_format).lower()


def parallel_of(config: Any) -> tuple[int, int, int, int]:
    parallel = config.parallel_config
    size = parallel.tensor_parallel_size
    stage, rank = divmod(parallel.rank, size)
    return rank, size, stage % parallel.pipeline_parallel_size, parallel.pipeline_parallel_size


def weights_name(config: Any, settings: PagedSettings) -> str:
    """Text that says which weights the engine has loaded. InvalidArgument when that cannot be told."""
    model = config.model_config
    if settings.weights:
        return settings.weights
    if _load_format(config) not in NAMED_WEIGHTS:
        raise InvalidArgument(f"which weights load_format {_load_format(config)} loads cannot be told: set weights")
    commit = getattr(model.hf_config, "_commit_hash", None)
    weights = weights_of(model.model, commit, code=bool(getattr(model, "trust_remote_code", False)))
    if weights is None:
        raise InvalidArgument(f"which weights {model.model} has cannot be told: set weights")
    return weights


def tenant_of(settings: PagedSettings) -> Tenant | None:
    """The tenant whose blocks these are; None where none is named."""
    if settings.tenant is None:
        return None
    root = settings.store if settings.start else settings.store.rpartition("/")[0] or "."
    return find_tenant(root, settings.tenant)


def opener(settings: PagedSettings) -> Callable[[], BlockingKVStore]:
    """Opens the store; starts its servers before, where that is asked for."""

    def opened() -> BlockingKVStore:
        file = start(settings.store, settings.config.capacity) if settings.start else settings.store
        return BlockingKVStore(file, config=settings.config)

    return opened
