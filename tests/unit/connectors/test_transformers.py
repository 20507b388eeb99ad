"""The connector for transformers with a small random model: what goes into a store and what comes back."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, MistralConfig
from transformers.cache_utils import DynamicLayer

import kvstore.connectors.transformers as connector
from efs.errors import InvalidArgument
from efs.fs import FileSystem
from efs.limits import MIB
from efs.types import GetReport, PutReport
from kvstore.connectors.transformers import BlockStore, layout_of, load, namespace_of, save, weights_digest
from kvstore.keys import Chain, Namespace
from kvstore.store import BlockingKVStore, KVStore

pytestmark = pytest.mark.engines

BLOCK = 16
CAPACITY_BYTES = 64 * MIB
LAYERS, HEADS, HEAD_SIZE = 3, 2, 16


def small_model(dtype: torch.dtype = torch.float32, seed: int = 7) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=HEADS, head_dim=HEAD_SIZE, max_position_embeddings=512, initializer_range=0.3,
    )
    model = LlamaForCausalLM(config)
    torch.nn.Module.to(model, dtype=dtype)
    model.train(False)
    return model


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return small_model()


@pytest.fixture
def store(tmp_path: Path) -> Iterator[BlockingKVStore]:
    root = str(tmp_path / "store")
    FileSystem.init(root, CAPACITY_BYTES)
    with KVStore.blocking(root) as opened:
        yield opened


def space(model: LlamaForCausalLM, block_tokens: int = BLOCK) -> Namespace:
    return Namespace(model="small", weights="w", layout=layout_of(model.config, model.dtype, block_tokens))


def some_tokens(count: int, seed: int = 1) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 97, count)]


def compute(model: LlamaForCausalLM, tokens: list[int], cache: DynamicCache, chunk: int = BLOCK) -> torch.Tensor:
    """Logits behind the last token; computes what the cache lacks, in chunks."""
    with torch.inference_mode():
        for start in range(cache.get_seq_length(), len(tokens), chunk):
            logits = model(torch.tensor([tokens[start : start + chunk]]), cache=cache, use_cache=True).logits
    last: torch.Tensor = logits[0, -1]
    return last


def empty(model: LlamaForCausalLM) -> DynamicCache:
    return DynamicCache(config=model.config)


def held_by(cache: DynamicCache, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, (1, heads, tokens, head size) each."""
    held = cache.layers[layer]
    assert isinstance(held, DynamicLayer)
    assert held.keys is not None
    assert held.values is not None
    return held.keys, held.values


class Altered:
    """A store whose answers a test alters."""

    def __init__(self, store: BlockStore, match: Callable[[Chain], int] | None = None,
                 after_get: Callable[[Chain, Any, GetReport], GetReport] | None = None) -> None:
        self._store = store
        self._match = match
        self._after_get = after_get
        self.puts: list[int] = []

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int:
        return self._match(chain) if self._match else self._store.match(chain, strict=strict, deadline_ms=deadline_ms)

    def get_into(self, chain: Chain, out: Any, *, deadline_ms: float | None = None) -> GetReport:
        report = self._store.get_into(chain, out, deadline_ms=deadline_ms)
        return self._after_get(chain, out, report) if self._after_get else report

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        self.puts.append(len(chain))
        return self._store.put(chain, blocks, deadline_ms=deadline_ms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_resumed_prefill_gives_the_same_bits(store: BlockingKVStore, dtype: torch.dtype) -> None:
    model = small_model(dtype)
    ns, tokens = space(model), some_tokens(5 * BLOCK + 7)
    first, second = empty(model), empty(model)
    expected = compute(model, tokens, first)
    assert save(store, ns, tokens, first) == PutReport(acked=5, already=0, failed=0, at_risk=0)

    loaded = load(store, ns, tokens, second)

    assert (loaded.tokens, loaded.blocks, loaded.matched) == (5 * BLOCK, 5, 5)
    assert loaded.report is not None
    assert loaded.report.bytes == 5 * ns.layout.block_bytes
    for layer in range(LAYERS):
        for old, new in zip(held_by(first, layer), held_by(second, layer), strict=True):
            assert torch.equal(old[:, :, : 5 * BLOCK], new)
            assert new.dtype == dtype
    assert torch.equal(compute(model, tokens, second), expected)


def test_a_block_is_keys_then_values_of_each_layer(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(2 * BLOCK), empty(model)
    compute(model, tokens, cache)
    save(store, ns, tokens, cache)
    out = np.zeros(2 * ns.layout.block_bytes, np.uint8)
    assert store.get_into(ns.chain(tokens), out).blocks == 2

    for layer in range(LAYERS):
        keys, values = held_by(cache, layer)
        parts = ns.layout.segment_view(out, layer).view(np.float32).reshape(2, 2, HEADS, BLOCK, HEAD_SIZE)
        for block in range(2):
            where = slice(block * BLOCK, (block + 1) * BLOCK)
            np.testing.assert_array_equal(parts[block, 0], keys[0, :, where].numpy())
            np.testing.assert_array_equal(parts[block, 1], values[0, :, where].numpy())


def test_smollm2_blocks_have_the_size_of_the_arithmetic() -> None:
    config = LlamaConfig(
        hidden_size=576, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, vocab_size=100)
    layout = layout_of(config, torch.bfloat16)
    assert layout.block_tokens == 128
    assert layout.block_bytes == 30 * 3 * 64 * 2 * 2 * 128 == 2_949_120
    assert [segment.bytes for segment in layout.segments] == [98_304] * 30
    assert layout.dtype == "bfloat16"


@pytest.mark.parametrize(("length", "reused"), [(1, 0), (BLOCK, 0), (BLOCK + 1, 1), (3 * BLOCK, 2), (3 * BLOCK + 1, 3)])
def test_one_token_is_left_to_compute(
    store: BlockingKVStore, model: LlamaForCausalLM, length: int, reused: int
) -> None:
    ns, tokens, cache = space(model), some_tokens(4 * BLOCK), empty(model)
    compute(model, tokens, cache)
    assert save(store, ns, tokens, cache).acked == 4
    resumed = empty(model)
    assert load(store, ns, tokens[:length], resumed).blocks == reused
    assert resumed.get_seq_length() == reused * BLOCK


def test_the_last_sampled_token_has_no_kv(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, cache = space(model, 128), empty(model)
    tokens = some_tokens(100)
    logits = compute(model, tokens, cache)
    for _ in range(28):
        tokens.append(int(logits.argmax()))
        if len(tokens) < 128:
            logits = compute(model, tokens, cache)
    assert len(tokens) == 128
    assert save(store, ns, tokens, cache) == PutReport(0, 0, 0, 0)

    compute(model, tokens, cache)
    assert save(store, ns, tokens, cache).acked == 1


def test_an_input_not_yet_computed_is_not_stored(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(6 * BLOCK), empty(model)
    compute(model, tokens[: 2 * BLOCK + 3], cache)
    assert save(store, ns, tokens, cache).acked == 2
    assert store.match(ns.chain(tokens)) == 2


def test_only_new_blocks_are_put(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens = space(model), some_tokens(5 * BLOCK + 1)
    cache = empty(model)
    compute(model, tokens[: 3 * BLOCK], cache)
    save(store, ns, tokens, cache)
    resumed = empty(model)
    loaded = load(store, ns, tokens, resumed)
    compute(model, tokens, resumed)
    watched = Altered(store)
    assert save(watched, ns, tokens, resumed, loaded.blocks) == PutReport(acked=2, already=0, failed=0, at_risk=0)
    assert watched.puts == [2]
    assert load(store, ns, tokens, empty(model)).blocks == 5


def test_a_long_prefix_is_put_in_pieces(
    store: BlockingKVStore, model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    ns, tokens, cache = space(model), some_tokens(7 * BLOCK + 1), empty(model)
    monkeypatch.setattr(connector, "PUT_PIECE_BYTES", 3 * ns.layout.block_bytes)
    expected = compute(model, tokens, cache)
    watched = Altered(store)
    assert save(watched, ns, tokens, cache).acked == 7
    assert watched.puts == [3, 3, 1]
    resumed = empty(model)
    assert load(store, ns, tokens, resumed).blocks == 7
    assert torch.equal(compute(model, tokens, resumed), expected)


def test_a_miss_leaves_the_cache_empty(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    cache = empty(model)
    loaded = load(store, space(model), some_tokens(3 * BLOCK), cache)
    assert (loaded.tokens, loaded.blocks, loaded.matched, loaded.report) == (0, 0, 0, None)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("stored", [0, 2])
def test_a_promise_that_is_not_kept_becomes_a_shorter_prefix(
    store: BlockingKVStore, model: LlamaForCausalLM, stored: int
) -> None:
    ns, tokens, cache = space(model), some_tokens(5 * BLOCK + 3), empty(model)
    expected = compute(model, tokens, cache)
    if stored:
        short = empty(model)
        compute(model, tokens[: stored * BLOCK], short)
        save(store, ns, tokens, short)

    resumed = empty(model)
    loaded = load(Altered(store, match=len), ns, tokens, resumed)

    assert (loaded.matched, loaded.blocks, loaded.tokens) == (5, stored, stored * BLOCK)
    assert resumed.get_seq_length() == stored * BLOCK
    assert torch.equal(compute(model, tokens, resumed), expected)


def test_bytes_behind_the_verified_run_are_never_used(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(5 * BLOCK + 3), empty(model)
    expected = compute(model, tokens, cache)
    save(store, ns, tokens, cache)

    def spoil_block_two(chain: Chain, out: Any, report: GetReport) -> GetReport:
        assert report.blocks == 5
        for segment in range(LAYERS):
            ns.layout.segment_view(out, segment)[2] = 0xA5
        return GetReport(2, [True, True, False, True, True], 0, 0, 0, 0, 0, 4 * ns.layout.block_bytes, 0.0)

    resumed = empty(model)
    assert load(Altered(store, after_get=spoil_block_two), ns, tokens, resumed).tokens == 2 * BLOCK
    assert resumed.get_seq_length() == 2 * BLOCK
    assert torch.equal(compute(model, tokens, resumed), expected)


def test_a_changed_byte_of_the_cache_changes_the_logits(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(5 * BLOCK + 3), empty(model)
    expected = compute(model, tokens, cache)
    save(store, ns, tokens, cache)
    resumed = empty(model)
    load(store, ns, tokens, resumed)
    held_by(resumed, 0)[1][:, :, BLOCK : 2 * BLOCK] = 0
    assert not torch.equal(compute(model, tokens, resumed), expected)


def test_a_promise_from_elsewhere_is_not_matched_again(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(4 * BLOCK + 1), empty(model)
    compute(model, tokens[: 3 * BLOCK], cache)
    save(store, ns, tokens, cache)

    def never(chain: Chain) -> int:
        raise AssertionError("asked although the answer was given")

    unasked = Altered(store, match=never)
    assert load(unasked, ns, tokens, empty(model), promised=2).blocks == 2
    assert load(unasked, ns, tokens, empty(model), promised=9).blocks == 3
    assert load(unasked, ns, tokens, empty(model), promised=0).report is None


def test_two_lost_directories_cost_nothing_and_three_cost_the_prefix(tmp_path: Path, model: LlamaForCausalLM) -> None:
    root = tmp_path / "store"
    FileSystem.init(str(root), CAPACITY_BYTES)
    ns, tokens, cache = space(model), some_tokens(5 * BLOCK + 3), empty(model)
    expected = compute(model, tokens, cache)
    with KVStore.blocking(str(root)) as opened:
        assert save(opened, ns, tokens, cache).acked == 5
    for gone, blocks in ((("03", "07"), 5), (("11",), 0)):
        for node in gone:
            shutil.rmtree(root / "nodes" / node)
        resumed = empty(model)
        with KVStore.blocking(str(root)) as opened:
            loaded = load(opened, ns, tokens, resumed, promised=5)
        assert loaded.report is not None
        assert loaded.blocks == blocks
        assert torch.equal(compute(model, tokens, resumed), expected)


def test_salts_do_not_meet(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(3 * BLOCK), empty(model)
    compute(model, tokens, cache)
    assert save(store, ns, tokens, cache, salt="a").acked == 3
    assert load(store, ns, tokens, empty(model), salt="b").blocks == 0
    assert load(store, ns, tokens, empty(model)).blocks == 0
    assert load(store, ns, tokens, empty(model), salt="a").blocks == 2


def test_load_needs_an_empty_cache(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    cache = empty(model)
    compute(model, some_tokens(5), cache)
    with pytest.raises(InvalidArgument, match="holds 5 tokens"):
        load(store, space(model), some_tokens(3 * BLOCK), cache)


def test_save_refuses_what_does_not_fit_together(store: BlockingKVStore, model: LlamaForCausalLM) -> None:
    ns, tokens, cache = space(model), some_tokens(3 * BLOCK), empty(model)
    compute(model, tokens, cache)
    with pytest.raises(InvalidArgument, match="holds 48 tokens, but only 47"):
        save(store, ns, tokens[:-1], cache)
    with pytest.raises(InvalidArgument, match="already is 4"):
        save(store, ns, tokens, cache, 4)
    with pytest.raises(InvalidArgument, match=r"torch\.float32.*torch\.bfloat16"):
        save(store, space(small_model(torch.bfloat16)), tokens, cache)
    with pytest.raises(InvalidArgument, match="not one of transformers-kv"):
        save(store, Namespace(model="m", weights="w", layout=ns.layout.opaque(100, BLOCK)), tokens, cache)
    other = LlamaConfig(
        vocab_size=97, hidden_size=64, num_hidden_layers=LAYERS + 1, num_attention_heads=4, num_key_value_heads=2)
    with pytest.raises(InvalidArgument, match="3 layers, the layout 4"):
        save(store, Namespace(model="m", weights="w", layout=layout_of(other, torch.float32, BLOCK)), tokens, cache)
    two = empty(model)
    model(torch.tensor([tokens, tokens]), cache=two, use_cache=True)
    with pytest.raises(InvalidArgument, match=r"\(2, 2, 16\)"):
        save(store, ns, tokens, two)


def test_models_with_other_than_full_attention_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="sliding_window=4096"):
        layout_of(MistralConfig(), torch.bfloat16)
    mixed = LlamaConfig()
    mixed.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(InvalidArgument, match="sliding_attention"):
        layout_of(mixed, torch.bfloat16)


HALF = [1.0] * (HEAD_SIZE // 2)
LONGROPE = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0, "short_factor": HALF, "long_factor": HALF,
            "original_max_position_embeddings": 128}


@pytest.mark.parametrize(("kind", "rope"), [
    ("dynamic", {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}),
    ("longrope", LONGROPE),
    ("unheard-of", {"rope_type": "unheard-of", "rope_theta": 1e4}),
    ("longrope", {"full_attention": LONGROPE, "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}),
])
def test_rotary_positions_that_depend_on_the_length_are_refused(kind: str, rope: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, head_dim=HEAD_SIZE)
    config.rope_parameters = rope
    with pytest.raises(InvalidArgument, match=f"llama: rotary positions of type {kind} may depend on the length"):
        layout_of(config, torch.float32)


@pytest.mark.parametrize("kind", ["linear", "yarn", "llama3"])
def test_static_rotary_positions_are_served(kind: str) -> None:
    scaling = {"rope_type": kind, "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, num_hidden_layers=2, head_dim=HEAD_SIZE)
    config.rope_parameters = scaling
    assert len(layout_of(config, torch.float32).segments) == 2


def test_the_layout_tells_head_counts_of_equal_bytes_apart() -> None:
    few = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2, head_dim=32)
    many = LlamaConfig(hidden_size=64, num_attention_heads=4, num_key_value_heads=4, num_hidden_layers=2, head_dim=16)
    one, other = layout_of(few, torch.float32), layout_of(many, torch.float32)
    assert one.block_bytes == other.block_bytes
    assert one.digest != other.digest


def test_the_weights_digest_sees_one_changed_weight_and_a_changed_setting() -> None:
    model = small_model()
    before = weights_digest(model)
    assert weights_digest(small_model()) == before
    assert weights_digest(small_model(seed=8)) != before
    assert weights_digest(small_model(torch.bfloat16)) != before
    model.config.rms_norm_eps = 1e-5
    assert weights_digest(model) != before
    model.config.rms_norm_eps = LlamaConfig().rms_norm_eps
    assert weights_digest(model) == before
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 5] += 1e-3
    assert weights_digest(model) != before


def test_the_weights_digest_sees_buffers_that_are_not_saved(tmp_path: Path) -> None:
    cast = small_model(torch.bfloat16)
    cast.save_pretrained(tmp_path)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert cast.model.rotary_emb.inv_freq.dtype == torch.bfloat16
    assert loaded.model.rotary_emb.inv_freq.dtype == torch.float32
    assert weights_digest(loaded) != weights_digest(cast)
    assert weights_digest(loaded) == weights_digest(LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))


@pytest.mark.parametrize("injected", [True, False])
def test_models_with_adapters_are_refused_also_with_known_weights(injected: bool) -> None:
    class Adapter(torch.nn.Linear):
        pass

    Adapter.__module__ = "peft.tuners.lora.layer"
    model = small_model()
    known = weights_digest(model)
    if injected:
        model.model.layers[1].mlp.up_proj = Adapter(64, 96, bias=False)
    else:
        model._hf_peft_config_loaded = True
    with pytest.raises(InvalidArgument, match="llama: the model has adapters"):
        weights_digest(model)
    with pytest.raises(InvalidArgument, match="llama: the model has adapters"):
        namespace_of(Source(), model, name="small", weights=known)


class Source:
    """Of namespaces without a store."""

    def namespace(self, *, model: str, weights: str, layout: Any, tenant: str | None = None) -> Namespace:
        return Namespace(model=model, weights=weights, layout=layout)


def test_the_namespace_has_the_digest_of_the_weights_unless_one_is_given(model: LlamaForCausalLM) -> None:
    ns = namespace_of(Source(), model, name="small")
    assert (ns.model, ns.weights) == ("small", weights_digest(model))
    assert ns.layout == layout_of(model.config, torch.float32)
    assert namespace_of(Source(), model, name="small", weights="known").weights == "known"


def test_the_documented_use_runs_as_it_is_written(model: LlamaForCausalLM, tmp_path: Path) -> None:
    shown = re.search(r"\n((?:    .*\n)+)", str(connector.__doc__))
    assert shown is not None
    program = "\n".join(line[4:] for line in shown[1].splitlines())
    assert len(program.splitlines()) == 10
    assert "load(" in program
    assert "save(" in program
    root = str(tmp_path / "store")
    FileSystem.init(root, CAPACITY_BYTES)
    program = program.replace("/var/lib/kvstore", root)
    tokens = some_tokens(300)
    results = []
    for _ in range(2):
        names: dict[str, Any] = {
            "KVStore": KVStore, "namespace_of": namespace_of, "DynamicCache": DynamicCache, "load": load, "save": save,
            "torch": torch, "model": model, "tokens": tokens,
        }
        exec(program, names)
        results.append((names["loaded"].tokens, names["next_token"]))
    assert results == [(0, results[0][1]), (256, results[0][1])]
