"""Which engines are served, by vLLM's own descriptions of their caches. Starts no engine."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")
with warnings.catch_warnings():
    # vLLM's own, and its libraries': not for us to mend.
    warnings.simplefilter("ignore")
    pytest.importorskip("vllm.v1.kv_cache_interface", exc_type=ImportError)
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import (
        ChunkedLocalAttentionSpec,
        FullAttentionSpec,
        MambaSpec,
        MLAAttentionSpec,
        SlidingWindowSpec,
    )

    from kvstore.connectors.vllm import KVStoreConnector
    from kvstore.connectors.vllm.identity import fingerprint, group_of, parallel_of, unsupported

import torch

from efs.errors import InvalidArgument
from kvstore.connectors.paged.hits import Group

pytestmark = pytest.mark.engines

SIZES: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 32, "dtype": torch.bfloat16}


def config(**changes: Any) -> Any:
    parallel = SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1)
    made = SimpleNamespace(
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor"), speculative_config=None,
        parallel_config=parallel, load_config=SimpleNamespace(load_format="auto"),
    )
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def caches(*specs: Any) -> Any:
    return SimpleNamespace(kv_cache_groups=[
        SimpleNamespace(kv_cache_spec=spec, enable_kv_transfer=True, host_resident=False) for spec in specs
    ])


def test_full_attention_windows_and_compressed_caches_are_served() -> None:
    full, window = FullAttentionSpec(**SIZES), SlidingWindowSpec(**SIZES, sliding_window=40)
    assert group_of(full) == Group(16)
    assert group_of(window) == Group(16, 40)
    assert group_of(MLAAttentionSpec(**SIZES)) == Group(16)
    assert unsupported(config(), caches(full, window)) is None


@pytest.mark.parametrize("spec", [
    ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32),
    MambaSpec(block_size=16, shapes=((4, 4),), dtypes=(torch.float32,)),
    SlidingWindowSpec(**SIZES, sliding_window=40, extra_retained_tokens=2),
    FullAttentionSpec(**SIZES, non_causal=True),
])
def test_other_caches_are_left_alone(spec: Any) -> None:
    reason = unsupported(config(), caches(FullAttentionSpec(**SIZES), spec))
    assert reason == f"KV group 1 is of kind {type(spec).__name__}"


@pytest.mark.parametrize(("changes", "reason"), [
    ({"speculative_config": object()}, "speculative decoding"),
    ({"cache_config": SimpleNamespace(prefix_caching_hash_algo="xxhash")}, "blocks are named by xxhash"),
    ({"parallel_config": SimpleNamespace(decode_context_parallel_size=2, prefill_context_parallel_size=1)},
     "context parallelism"),
])
def test_engines_that_could_be_told_wrong_bytes_are_left_alone(changes: dict[str, Any], reason: str) -> None:
    found = unsupported(config(**changes), caches(FullAttentionSpec(**SIZES)))
    assert found is not None
    assert found.startswith(reason)


FACTS: dict[str, Any] = {"prefix_caching_hash_algo": "sha256_cbor", "cache_dtype": "auto", "dtype": torch.bfloat16,
                         "quantization": None, "load_format": "auto", "layers": 3, "_name_or_path": "/models/a"}


def named(**changes: Any) -> str:
    facts = FACTS | changes
    cache = SimpleNamespace(**{name: facts.pop(name) for name in ("prefix_caching_hash_algo", "cache_dtype")})
    model = SimpleNamespace(**{name: facts.pop(name) for name in ("dtype", "quantization")})
    load = SimpleNamespace(load_format=facts.pop("load_format"))
    model.hf_config = SimpleNamespace(to_dict=lambda: facts)
    return fingerprint(SimpleNamespace(model_config=model, cache_config=cache, load_config=load))


@pytest.mark.parametrize("changes", [
    {"prefix_caching_hash_algo": "sha256"}, {"cache_dtype": "fp8"}, {"dtype": torch.float16}, {"quantization": "awq"},
    {"layers": 4}, {"rope_theta": 1e6}, {"load_format": "pt"},
])
def test_an_engine_that_computes_other_bytes_has_another_name(changes: dict[str, Any]) -> None:
    assert named(**changes) != named()


def test_where_the_same_model_lies_is_not_in_its_name() -> None:
    assert named(_name_or_path="/elsewhere/a") == named()


def test_each_rank_of_each_stage_has_a_place_of_its_own() -> None:
    ranks = [
        parallel_of(SimpleNamespace(parallel_config=SimpleNamespace(
            rank=rank, tensor_parallel_size=2, pipeline_parallel_size=3)))
        for rank in range(6)
    ]
    assert ranks == [(0, 2, 0, 3), (1, 2, 0, 3), (0, 2, 1, 3), (1, 2, 1, 3), (0, 2, 2, 3), (1, 2, 2, 3)]


def test_an_engine_that_ends_requests_when_a_load_fails_is_refused() -> None:
    transfer = SimpleNamespace(kv_load_failure_policy="fail", kv_connector_extra_config={"store": "a.toml"})
    with pytest.raises(InvalidArgument, match='must be "recompute"'):
        KVStoreConnector(config(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER, caches())


def test_a_connector_that_is_switched_off_does_nothing() -> None:
    transfer = SimpleNamespace(kv_load_failure_policy="recompute",
                               kv_connector_extra_config={"store": "a.toml", "bypass": True})
    made = KVStoreConnector(config(kv_transfer_config=transfer), KVConnectorRole.SCHEDULER,
                            caches(FullAttentionSpec(**SIZES)))
    assert made.get_num_new_matched_tokens(SimpleNamespace(), 0) == (0, False)
    assert made.get_handshake_metadata() is None
    made.register_kv_caches({})
    assert made.request_finished_all_groups(SimpleNamespace(request_id="r"), ([],)) == (False, None)
    made.shutdown()
