"""Several sequences on few pages: preemption, aborts in every phase, and nothing held at the end."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from transformers import LlamaForCausalLM

from gdr.device import Stream
from gdr.engine import Engine, EngineConfig
from gdr.errors import Aborted, InvalidEngineArgument, PagesExhausted
from gdr.pinned import RegionState
from gdr.prefix import PrefixLoad
from gdr.scheduler import run_all
from gdr.sequence import Phase, Sequence
from gdr.swapin import Transfer
from tests.support.blockstore import MemoryBlockStore
from tests.support.devices import suite_device
from tests.support.fakedevice import FakeDevice
from tests.support.tinymodel import BLOCK, prompt, reference, tiny_model, tiny_namespace
from tests.support.waiting import eventually

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


def make_engine(model: LlamaForCausalLM, store: MemoryBlockStore, pages: int, *, stream: bool = False,
                write_back: bool = True) -> Engine:
    config = EngineConfig(pages=pages, staging_bytes=1, stream=stream, write_back=write_back)
    return Engine(model, store, tiny_namespace(model), config, device=suite_device(model))


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


@pytest.mark.parametrize("write_back", [True, False])
@pytest.mark.parametrize("stream", [False, True])
def test_two_sequences_on_a_pool_for_one_and_a_half_give_the_tokens_of_lone_runs(
    model: LlamaForCausalLM, stream: bool, write_back: bool
) -> None:
    new = 3 * BLOCK
    prompts = [prompt(3 * BLOCK + 5, seed=1), prompt(3 * BLOCK + 5, seed=2)]
    alone = [reference(model, tokens, new) for tokens in prompts]
    store = MemoryBlockStore()
    with make_engine(model, store, pages=10, stream=stream, write_back=write_back) as engine:
        assert 6 * BLOCK < 3 * BLOCK + 5 + new < 7 * BLOCK  # Each ends with 7 pages; the pool has 10.
        sequences = [engine.sequence(tokens) for tokens in prompts]
        run_all(engine, sequences, new)
        assert [sequence.generated for sequence in sequences] == alone
        assert all(sequence.phase is Phase.FINISHED for sequence in sequences)
        assert engine.counters.get("preemptions") > 0
        assert engine.counters.get("preemptions") == sum(sequence.preemptions for sequence in sequences)
        if write_back:
            assert engine.counters.get("loaded_blocks") > 0  # The preempted one came back by a hit, ...
            assert engine.counters.get("replayed_tokens") < new  # ... and computed little of it again.
        else:
            assert engine.counters.get("loaded_blocks") == 0
            assert engine.counters.get("replayed_tokens") > 0
        assert all_free(engine)


def test_many_sequences_on_few_pages_all_end_with_the_tokens_of_lone_runs(model: LlamaForCausalLM) -> None:
    prompts = [prompt(BLOCK + 3 * seed, seed) for seed in range(6)]
    alone = [reference(model, tokens, 20) for tokens in prompts]
    with make_engine(model, MemoryBlockStore(), pages=5) as engine:
        sequences = [engine.sequence(tokens) for tokens in prompts]
        run_all(engine, sequences, 20)
        assert [sequence.generated for sequence in sequences] == alone
        assert engine.counters.get("preemptions") > 0
        assert all_free(engine)


def test_a_preempted_sequence_goes_on_where_it_was_by_hand(model: LlamaForCausalLM) -> None:
    tokens = prompt(2 * BLOCK + 9)
    expected = reference(model, tokens, 40)
    with make_engine(model, MemoryBlockStore(), pages=6) as engine:
        sequence = engine.prefill(tokens)
        for step in range(40):
            if step in (0, 1, 7, 8, 30):
                engine.preempt(sequence)
                assert sequence.phase is Phase.WAITING
                assert engine.flush()
                assert engine.pages.free == 6
                with pytest.raises(InvalidEngineArgument, match="the sequence is waiting"):
                    engine.step(sequence)
                engine.prefill(sequence)
            engine.step(sequence)
        assert sequence.generated == expected
        assert sequence.preemptions == 5
        assert sequence.loaded_blocks > 0
        engine.finish(sequence)
        assert all_free(engine)


class ConfirmsOnTheHostOnly(PrefixLoad):
    """Knows that the copies were enqueued, and does not make the stream wait for them."""

    def _wait_finished(self, transfer: Transfer, stream: Stream) -> None:
        assert transfer.wait_finished(self._wait_ms)


@pytest.mark.parametrize(("kind", "right"), [(PrefixLoad, True), (ConfirmsOnTheHostOnly, False)])
def test_a_sequence_that_was_loaded_whole_and_computes_nothing_waits_for_its_copies_all_the_same(
    model: LlamaForCausalLM, monkeypatch: pytest.MonkeyPatch, kind: type[PrefixLoad], right: bool
) -> None:
    tokens = prompt(2 * BLOCK + BLOCK // 2)
    expected = reference(model, tokens, 20)
    monkeypatch.setattr("gdr.prefix.PrefixLoad", kind)
    with make_engine(model, MemoryBlockStore(), pages=6) as engine:
        sequence = engine.prefill(tokens)
        while sequence.kv_length < 3 * BLOCK:
            engine.step(sequence)
        engine.preempt(sequence)
        assert engine.flush()
        for storage in engine.pages.storage:
            storage.fill_(0xA5)
        engine.prefill(sequence)
        assert (sequence.loaded_blocks, sequence.prefilled_tokens) == (3, 0)
        while len(sequence.generated) < 20:
            engine.step(sequence)
        assert (sequence.generated == expected) is right
        engine.finish(sequence)
        assert all_free(engine)


def test_a_sequence_that_does_not_fit_beside_foreign_pages_says_so(model: LlamaForCausalLM) -> None:
    with make_engine(model, MemoryBlockStore(), pages=4) as engine:
        foreign = engine.pages.allocate(2)
        assert foreign is not None
        sequence = engine.sequence(prompt(3 * BLOCK))
        with pytest.raises(PagesExhausted, match="3 pages needed, 2 free"):
            run_all(engine, [sequence], 4)
        engine.pages.drop(foreign.pages)
        run_all(engine, [sequence], 4)
        assert len(sequence.generated) == 4
        assert all_free(engine)


# -- aborts ------------------------------------------------------------------------------------------------------------


def filled_store(model: LlamaForCausalLM, tokens: list[int]) -> MemoryBlockStore:
    store = MemoryBlockStore()
    with make_engine(model, store, pages=12) as engine:
        engine.finish(engine.prefill(tokens))
        assert engine.flush()
    assert len(store.blocks) == len(tokens) // BLOCK
    return store


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("verb", ["match", "get", "segment", "put"])
def test_an_abort_while_the_store_works_ends_the_sequence_and_leaves_nothing(
    model: LlamaForCausalLM, verb: str, stream: bool
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    store = filled_store(model, tokens[: 4 * BLOCK])
    with make_engine(model, store, pages=12, stream=stream) as engine:
        sequence = engine.sequence(tokens)
        aborts: list[str] = []

        def abort(called: str) -> None:
            if called == verb and not aborts:
                aborts.append(called)
                engine.abort(sequence)

        store.before = abort
        run_all(engine, [sequence], 3 * BLOCK)
        assert aborts == [verb]
        assert sequence.phase is Phase.ABORTED
        assert engine.counters.get("aborts") == 1
        assert all_free(engine)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("layer", [0, 1, 2])
@pytest.mark.parametrize("when", ["prefill", "later chunk", "decode"])
def test_an_abort_in_any_layer_of_a_pass_ends_the_sequence_and_leaves_nothing(
    model: LlamaForCausalLM, when: str, layer: int, stream: bool
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    store = filled_store(model, tokens[: 4 * BLOCK])
    with make_engine(model, store, pages=12, stream=stream) as engine:
        sequence = engine.sequence(tokens)
        due = {"prefill": 0, "later chunk": 4 * BLOCK + BLOCK, "decode": len(tokens)}[when]
        aborts: list[int] = []

        def abort(_module: torch.nn.Module, _args: object) -> None:
            if sequence.kv_length >= due and not aborts:
                aborts.append(sequence.kv_length)
                engine.abort(sequence)

        hook = model.model.layers[layer].register_forward_pre_hook(abort, prepend=True)
        try:
            run_all(engine, [sequence], BLOCK)
        finally:
            hook.remove()
        assert aborts
        assert sequence.phase is Phase.ABORTED
        assert all_free(engine)


@pytest.mark.parametrize("kind", ["copy_in", "scatter"])
def test_an_abort_while_blocks_are_copied_ends_the_sequence_and_leaves_nothing(
    model: LlamaForCausalLM, kind: str
) -> None:
    tokens = prompt(6 * BLOCK + 3)
    store = filled_store(model, tokens)
    with make_engine(model, store, pages=12) as engine:
        sequence = engine.sequence(tokens)
        device = engine.device
        original = getattr(device, kind)
        aborts: list[int] = []

        def abort(*arguments: object) -> None:
            original(*arguments)
            aborts.append(1)
            if len(aborts) == 8:
                engine.abort(sequence)

        setattr(device, kind, abort)
        run_all(engine, [sequence], BLOCK)
        assert len(aborts) >= 8
        assert sequence.phase is Phase.ABORTED
        assert all_free(engine)


def test_an_abort_of_a_waiting_and_of_a_running_sequence_between_calls(model: LlamaForCausalLM) -> None:
    with make_engine(model, MemoryBlockStore(), pages=12) as engine:
        waiting, running, kept = (engine.sequence(prompt(2 * BLOCK, seed)) for seed in range(3))
        engine.abort(waiting)
        with pytest.raises(Aborted):
            engine.prefill(waiting)
        assert waiting.phase is Phase.ABORTED
        engine.prefill(running)
        engine.step(running)
        engine.abort(running)
        with pytest.raises(Aborted):
            engine.step(running)
        assert running.phase is Phase.ABORTED
        run_all(engine, [kept], 4)
        assert kept.phase is Phase.FINISHED
        assert all_free(engine)


def test_an_abort_wakes_a_pass_that_waits_for_a_segment(model: LlamaForCausalLM) -> None:
    tokens = prompt(6 * BLOCK + 3)
    store = filled_store(model, tokens)
    arrived, go = threading.Event(), threading.Event()

    def hang(verb: str) -> None:
        if verb == "segment":
            arrived.set()
            assert go.wait(20)

    store.before = hang
    with make_engine(model, store, pages=12, stream=True) as engine:
        sequence = engine.sequence(tokens)
        outcome: list[object] = []
        runner = threading.Thread(target=lambda: outcome.append(caught(lambda: engine.prefill(sequence))))
        runner.start()
        assert arrived.wait(20)
        engine.abort(sequence)
        runner.join(20)
        assert isinstance(outcome[0], Aborted)
        # The fetch is still in the store: its region stays leased and its pages held until it returns.
        assert engine.host_pool.counts()[RegionState.LEASED] == 1
        assert engine.pages.free == 12 - 6
        go.set()
        assert engine._loader.close()
        assert engine.swap_in.close()
        assert all_free(engine)


def test_a_fetch_that_never_ends_costs_its_pages_until_then_and_the_prefix_is_recomputed(
    model: LlamaForCausalLM,
) -> None:
    tokens = prompt(3 * BLOCK + 3)
    expected = reference(model, tokens, 8)
    store = filled_store(model, tokens)
    go = threading.Event()

    def hang(verb: str) -> None:
        if verb == "segment":
            assert go.wait(20)

    store.before = hang
    config = EngineConfig(pages=8, stream=True, swap_in_wait_ms=20.0, staging_bytes=1)
    with Engine(model, store, tiny_namespace(model), config, device=suite_device(model)) as engine:
        sequence = engine.prefill(tokens)
        assert engine.counters.get("swap_in_stalled") == 1
        assert sequence.loaded_blocks == 0
        assert engine.pages.free == 8 - 4 - 3
        assert engine.decode(sequence, 8) == expected
        engine.finish(sequence)
        go.set()
        assert engine._loader.close()
        assert engine.swap_in.close()
        assert all_free(engine)


def caught(call: Callable[[], Sequence]) -> object:
    try:
        return call()
    except Aborted as error:
        return error
