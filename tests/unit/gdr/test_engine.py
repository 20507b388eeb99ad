"""The engine on a tiny real model: warm equals cold, and whatever is lost on the way is recomputed, never wrong."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from gdr.counters import Counters
from gdr.device import CpuDevice, Device
from gdr.engine import Engine, EngineConfig
from gdr.errors import EngineClosed, InvalidEngineArgument, PagesExhausted, RequestTooLarge
from gdr.pinned import RegionState
from gdr.sequence import Phase
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from tests.support.blockstore import MemoryBlockStore
from tests.support.devices import RefusingCudaDevice, suite_device
from tests.support.fakedevice import FakeDevice
from tests.support.tinymodel import BLOCK, prompt, reference, tiny_model, tiny_namespace
from tests.support.waiting import eventually

pytestmark = pytest.mark.engines
NEW = 24
PLACES = list(itertools.product((0, 1, 2), (0, 3, 5)))
"""First, middle and last segment; first, middle and last block of six."""
DEVICES: dict[str, Callable[[], Device]] = {
    "cpu": CpuDevice, "cpu-staged": lambda: CpuDevice(staged=True), "fake": FakeDevice, "cuda": RefusingCudaDevice
}


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture
def store() -> MemoryBlockStore:
    return MemoryBlockStore()


def make_engine(model: LlamaForCausalLM, store: MemoryBlockStore, *, device: Device | None = None, stream: bool = False,
                pages: int = 32, kind: type[Engine] = Engine, **settings: float) -> Engine:
    config = EngineConfig(pages=pages, staging_bytes=1, stream=stream, **settings)  # type: ignore[arg-type]
    return kind(model, store, tiny_namespace(model), config, device=device or suite_device(model))


def all_free(engine: Engine) -> bool:
    """Whether nothing is held once the threads are idle and the device has run what it was given."""
    assert engine.flush()

    def free() -> bool:
        if isinstance(engine.device, FakeDevice):
            engine.device.run_all()
        regions = engine.host_pool.counts()[RegionState.FREE]
        held = engine.pages.pages - engine.pages.free + engine.pages.pending_fences()
        return regions == engine.config.host_regions and held == 0

    return eventually(free)


def fill_store(model: LlamaForCausalLM, store: MemoryBlockStore, tokens: list[int]) -> list[int]:
    """Prefill without a hit and write back; greedy tokens of the cold run."""
    with make_engine(model, store) as engine:
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 0
        assert sequence.prefilled_tokens == len(tokens)
        assert engine.flush()
        assert len(store.blocks) == len(tokens) // BLOCK
        new = engine.decode(sequence, NEW)
        engine.finish(sequence)
        assert all_free(engine)
    # Blocks that decoding added have other last bits than a prefill of the same tokens; these tests want prompts alone.
    kept = {key: store.blocks[key] for key in tiny_namespace(model).chain(tokens)}
    store.blocks.clear()
    store.blocks.update(kept)
    store.gets.clear()
    store.puts.clear()
    return new


@pytest.mark.parametrize("length", [1, BLOCK - 1, BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 7])
def test_a_cold_run_gives_the_tokens_of_transformers_own_cache(
    model: LlamaForCausalLM, store: MemoryBlockStore, length: int
) -> None:
    tokens = prompt(length)
    with make_engine(model, store) as engine:
        sequence = engine.prefill(tokens)
        assert engine.decode(sequence, NEW) == reference(model, tokens, NEW)
        engine.finish(sequence)
        assert all_free(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("device", ["cpu", "cpu-staged", "fake"])
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, 9 * BLOCK + 5])
def test_a_warm_run_computes_only_the_rest_and_gives_the_same_bits(
    model: LlamaForCausalLM, store: MemoryBlockStore, length: int, device: str, stream: bool
) -> None:
    tokens = prompt(length)
    cold_logits = []
    with make_engine(model, store) as engine:
        sequence = engine.prefill(tokens)
        assert engine.flush()
        cold_logits.append(sequence.logits)
        cold = engine.decode(sequence, NEW)
        engine.finish(sequence)
    with make_engine(model, store, device=DEVICES[device](), stream=stream) as engine:
        sequence = engine.prefill(tokens)
        blocks = (length - 1) // BLOCK
        assert sequence.loaded_blocks == blocks == store.gets[-1].blocks
        assert sequence.prefilled_tokens == length - blocks * BLOCK
        assert sequence.logits is not None
        assert torch.equal(sequence.logits, cold_logits[0])  # type: ignore[arg-type]
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        assert all_free(engine)


def test_chunks_of_several_blocks_give_the_same_tokens(model: LlamaForCausalLM, store: MemoryBlockStore) -> None:
    tokens = prompt(11 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    with make_engine(model, store, chunk_tokens=4 * BLOCK) as engine:
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 11
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
    del store.blocks[tiny_namespace(model).chain(tokens)[5]]
    with make_engine(model, store, chunk_tokens=4 * BLOCK) as engine:
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 5
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)


@pytest.mark.parametrize("block", [0, 2, 4])
def test_negative_control_a_zeroed_block_changes_the_logits(
    model: LlamaForCausalLM, store: MemoryBlockStore, block: int
) -> None:
    tokens = prompt(5 * BLOCK + 3)
    with make_engine(model, store) as engine:
        cold = engine.prefill(tokens).logits
        assert engine.flush()
    store.blocks[tiny_namespace(model).chain(tokens)[block]][:] = 0
    with make_engine(model, store) as engine:
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 5
        assert sequence.logits is not None
        assert cold is not None
        assert not torch.allclose(sequence.logits, cold, atol=1e-3)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("segment", "block"), PLACES)
def test_a_read_that_fails_at_any_segment_and_block_is_recomputed_from_there(
    model: LlamaForCausalLM, store: MemoryBlockStore, segment: int, block: int, stream: bool
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    store.fail_read = (segment, block)
    with make_engine(model, store, stream=stream) as engine:
        sequence = engine.prefill(tokens)
        assert store.faults == 1
        assert sequence.loaded_blocks == engine.counters.get("loaded_blocks") == block
        assert sequence.prefilled_tokens == len(tokens) - block * BLOCK
        assert engine.counters.get("short_fetches") == 1
        assert engine.counters.get("abandoned_passes") == (1 if stream else 0)
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        assert all_free(engine)


@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_block_found_bad_after_every_layer_ran_abandons_the_whole_pass(
    model: LlamaForCausalLM, store: MemoryBlockStore, block: int
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    store.fail_late = block
    with make_engine(model, store, stream=True) as engine:
        sequence = engine.prefill(tokens)
        assert store.faults == 1
        assert sequence.loaded_blocks == engine.counters.get("loaded_blocks") == block
        assert engine.counters.get("abandoned_passes") == 1
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        assert all_free(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("kind", ["copy_in", "scatter"])
@pytest.mark.parametrize(("segment", "block"), PLACES)
def test_a_copy_or_scatter_refused_at_any_segment_and_block_is_recomputed_from_there(
    model: LlamaForCausalLM, store: MemoryBlockStore, kind: str, segment: int, block: int, stream: bool
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    device = suite_device(model)
    device.refuse(kind, {segment * 6 + block})  # Staging is one block, so each block of each segment is one call.
    with make_engine(model, store, device=device, stream=stream) as engine:
        sequence = engine.prefill(tokens)
        assert device.refused[kind] == 1
        assert sequence.loaded_blocks == engine.counters.get("loaded_blocks") == block
        assert engine.counters.get("copy_failures") == engine.counters.get("swap_ins_shortened") == 1
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        assert all_free(engine)


@pytest.mark.parametrize("verb", ["match", "get", "segment"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_fails_costs_the_hit_and_nothing_else(
    model: LlamaForCausalLM, store: MemoryBlockStore, verb: str, stream: bool
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    failures: list[str] = []

    def fail(called: str) -> None:
        if called == verb:
            failures.append(called)
            raise OSError(5, "injected")

    store.before = fail
    with make_engine(model, store, stream=stream) as engine:
        sequence = engine.prefill(tokens)
        assert failures
        assert sequence.loaded_blocks == 0
        assert engine.counters.get("match_failed" if verb == "match" else "fetch_failed") == 1
        store.before = lambda _verb: None
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        assert all_free(engine)


def test_a_promise_that_storage_cannot_keep_is_corrected_and_the_hole_is_healed(
    model: LlamaForCausalLM, store: MemoryBlockStore
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    keys = tiny_namespace(model).chain(tokens)
    store.lost.add(keys[2])
    with make_engine(model, store) as engine:
        sequence = engine.prefill(tokens)
        assert engine.counters.get("matched_blocks") == 6
        assert sequence.loaded_blocks == 2
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        assert engine.flush()
    assert not store.lost
    del store.blocks[keys[4]]
    with make_engine(model, store) as engine:
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 4
        assert engine.flush()
        assert (store.puts[-1].acked, store.puts[-1].already) == (1, 1)
        engine.finish(sequence)


def test_the_last_sampled_token_has_no_kv_so_100_and_28_tokens_are_no_full_block_of_128() -> None:
    model = tiny_model(layers=1)
    store = MemoryBlockStore()
    namespace = Namespace("tiny", "seed-0", BlockLayout.per_layer(
        [2 * 2 * 8 * 128 * 4], format="transformers-kv/2x8", dtype="float32", block_tokens=128))
    with Engine(model, store, namespace, EngineConfig(pages=4)) as engine:
        sequence = engine.prefill(prompt(100))
        engine.decode(sequence, 28)
        assert len(sequence.tokens) == 128
        assert sequence.kv_length == 127
        assert engine.flush()
        assert len(store.blocks) == 0
        engine.decode(sequence, 1)
        assert sequence.kv_length == 128
        assert engine.flush()
        assert len(store.blocks) == 1
        engine.finish(sequence)


def test_a_prompt_of_whole_blocks_reuses_all_but_the_last(model: LlamaForCausalLM, store: MemoryBlockStore) -> None:
    tokens = prompt(3 * BLOCK)
    fill_store(model, store, tokens)
    with make_engine(model, store) as engine:
        assert engine.prefill(tokens).loaded_blocks == 2
        assert engine.prefill(tokens[:BLOCK]).loaded_blocks == 0
        assert engine.prefill(tokens[: BLOCK - 1]).loaded_blocks == 0


def test_an_exhausted_host_pool_is_waited_for_within_a_bound_then_recomputed(
    model: LlamaForCausalLM, store: MemoryBlockStore
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    with make_engine(model, store, host_regions=1, host_pool_wait_ms=5.0) as engine:
        held = engine.host_pool.lease(0)
        assert held is not None
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 0
        assert engine.counters.get("host_pool_exhausted") == 1
        assert not store.gets
        assert engine.decode(sequence, NEW) == cold
        engine.finish(sequence)
        held.release()
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 6
        engine.finish(sequence)
        assert all_free(engine)


def test_a_region_smaller_than_the_hit_loads_what_fits(model: LlamaForCausalLM, store: MemoryBlockStore) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    with make_engine(model, store, region_blocks=2) as engine:
        fits = engine.host_pool.region_bytes // engine.namespace.layout.block_bytes
        assert fits < 6
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == fits
        assert engine.decode(sequence, NEW) == cold


def test_a_page_stride_larger_than_the_payload_changes_nothing(
    model: LlamaForCausalLM, store: MemoryBlockStore
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    cold = fill_store(model, store, tokens)
    with make_engine(model, store, page_align_bytes=1152) as engine:
        assert engine.pages.storage[0].shape[1] == 2304
        sequence = engine.prefill(tokens)
        assert sequence.loaded_blocks == 6
        assert engine.decode(sequence, NEW) == cold


def test_calls_that_cannot_be_meant_are_refused_in_one_line(model: LlamaForCausalLM, store: MemoryBlockStore) -> None:
    with make_engine(model, store, pages=4) as engine:
        with pytest.raises(RequestTooLarge, match="65 tokens need 5 pages, the pool has 4"):
            engine.prefill(prompt(4 * BLOCK + 1))
        with pytest.raises(InvalidEngineArgument, match="at least one token"):
            engine.prefill([])
        first = engine.prefill(prompt(3 * BLOCK))
        with pytest.raises(PagesExhausted, match="2 pages needed, 1 free"):
            engine.prefill(prompt(2 * BLOCK))
        engine.decode(first, BLOCK + 1)
        with pytest.raises(RequestTooLarge):
            engine.step(first)
        engine.finish(first)
        assert first.phase is Phase.FINISHED
        with pytest.raises(InvalidEngineArgument, match="the sequence is finished"):
            engine.step(first)
        assert all_free(engine)
    with pytest.raises(EngineClosed):
        engine.prefill(prompt(1))
    with pytest.raises(InvalidEngineArgument, match="chunk_tokens is 17"):
        make_engine(model, store, chunk_tokens=17)
    with pytest.raises(InvalidEngineArgument, match=r"the model is torch\.float32"):
        Engine(model, store, tiny_namespace(tiny_model(dtype=torch.bfloat16)))
    with pytest.raises(InvalidEngineArgument, match="is no layout of"):
        Engine(model, store, Namespace("m", "w", BlockLayout.opaque(4096)))


def test_closing_takes_the_hooks_off_the_model(model: LlamaForCausalLM, store: MemoryBlockStore) -> None:
    layer = model.model.layers[0]
    before = len(layer._forward_pre_hooks), len(layer._forward_hooks)
    engine = make_engine(model, store)
    assert len(layer._forward_pre_hooks) == before[0] + 1
    engine.close()
    engine.close()
    assert (len(layer._forward_pre_hooks), len(layer._forward_hooks)) == before


def test_an_engine_that_cannot_be_made_leaves_the_model_as_it_was(model: LlamaForCausalLM) -> None:
    class NoMemory(CpuDevice):
        def allocate(self, shape: object) -> torch.Tensor:
            raise MemoryError("injected")

    layer = model.model.layers[0]
    before = len(layer._forward_pre_hooks)
    with pytest.raises(MemoryError):
        make_engine(model, MemoryBlockStore(), device=NoMemory())
    assert len(layer._forward_pre_hooks) == before
    with pytest.raises(InvalidEngineArgument, match="the model has 2 layers, the layout 3"):
        Engine(tiny_model(layers=2), MemoryBlockStore(), tiny_namespace(model))


def test_closing_writes_back_what_was_submitted(model: LlamaForCausalLM, store: MemoryBlockStore) -> None:
    arrived = threading.Event()

    def slow(verb: str) -> None:
        if verb == "put":
            arrived.wait(0.05)

    store.before = slow
    with make_engine(model, store) as engine:
        engine.finish(engine.prefill(prompt(20 * BLOCK)))
    assert len(store.blocks) == 20


def test_a_count_that_does_not_exist_cannot_be_raised_or_read() -> None:
    counters = Counters()
    counters.add("copies", 2)
    assert counters.get("copies") == counters.snapshot()["copies"] == 2
    with pytest.raises(KeyError):
        counters.add("copys")
    with pytest.raises(KeyError):
        counters.get("copys")
