"""The engine on a real store in twelve directories: hits, rebuilt blocks, blocks that are lost at any segment,
restarts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from efs.fs import FileSystem
from efs.types import GetReport
from gdr.device import CpuDevice
from gdr.engine import Engine, EngineConfig
from gdr.errors import Aborted
from gdr.pinned import RegionState
from kvstore.demo.damage import NothingToDamage, copy_store, flip_shard, remove_nodes
from kvstore.store import BlockingKVStore, KVStore
from tests.support.tinymodel import BLOCK, prompt, tiny_model, tiny_namespace
from tests.support.waiting import eventually

pytestmark = [pytest.mark.engines, pytest.mark.usefixtures("patient")]
NEW = 64
ATTEMPTS = 8
BLOCKS = 6
PAGES = 16
TOKENS = prompt(BLOCKS * BLOCK + 5)
CAPACITY = 64 * 1024 * 1024


class Seen:
    """A store that remembers what it answered."""

    def __init__(self, store: BlockingKVStore) -> None:
        self._store = store
        self.match = store.match
        self.put = store.put
        self.gets: list[GetReport] = []

    def get_into(self, *arguments: object, **named: object) -> GetReport:
        report = self._store.get_into(*arguments, **named)  # type: ignore[arg-type]
        self.gets.append(report)
        return report


@dataclass(frozen=True, slots=True)
class Cold:
    """A store that holds the prompt's blocks, and what the cold run made: tokens and the logits behind the prompt."""

    root: Path
    tokens: list[int]
    logits: torch.Tensor


@dataclass(frozen=True, slots=True)
class Warm:
    """What a warm run made, and how. fits: blocks that fit a host region."""

    gets: list[GetReport]
    tokens: list[int]
    logits: torch.Tensor
    loaded: int
    fits: int
    counters: dict[str, int]


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


@pytest.fixture(scope="module")
def cold(model: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Cold:
    root = tmp_path_factory.mktemp("cold") / "store"
    FileSystem.init(str(root), CAPACITY)
    with KVStore.blocking(str(root)) as store, Engine(
        model, store, tiny_namespace(model), EngineConfig(pages=PAGES)
    ) as engine:
        sequence = engine.prefill(TOKENS)
        assert sequence.loaded_blocks == 0
        assert sequence.prefilled_tokens == len(TOKENS)
        logits = sequence.logits
        assert engine.flush()
        assert engine.counters.get("write_back_acked") == BLOCKS
    # Without write-back, so that the store keeps the prompt's blocks alone.
    config = EngineConfig(pages=PAGES, load=False, write_back=False)
    with KVStore.blocking(str(root)) as store, Engine(model, store, tiny_namespace(model), config) as engine:
        sequence = engine.prefill(TOKENS)
        assert sequence.prefilled_tokens == len(TOKENS)
        tokens = engine.decode(sequence, NEW)
    assert logits is not None
    return Cold(root, tokens, logits)


@pytest.fixture
def root(cold: Cold, tmp_path: Path) -> Path:
    """A copy of the store of the cold run, to be damaged."""
    place = tmp_path / "store"
    copy_store(cold.root, place)
    return place


def run_warm(model: LlamaForCausalLM, root: Path, *, stream: bool = False, staged: bool = False,
             chunk_tokens: int = BLOCK, region_blocks: int = 0) -> Warm:
    """A warm run in an engine and a store of its own; everything must be free at its end."""
    config = EngineConfig(pages=PAGES, stream=stream, write_back=False, staging_bytes=1, chunk_tokens=chunk_tokens,
                          region_blocks=region_blocks)
    with KVStore.blocking(str(root)) as store:
        seen = Seen(store)
        with Engine(model, seen, tiny_namespace(model), config, device=CpuDevice(staged=staged)) as engine:
            sequence = engine.prefill(TOKENS)
            logits = sequence.logits
            assert logits is not None
            assert sequence.prefilled_tokens == len(TOKENS) - sequence.loaded_blocks * BLOCK
            assert sequence.loaded_blocks == engine.counters.get("loaded_blocks")
            new = engine.decode(sequence, NEW)
            engine.finish(sequence)
            assert engine.pages.free == engine.pages.pages
            assert engine.host_pool.counts()[RegionState.FREE] == engine.config.host_regions
            fits = engine.host_pool.region_bytes // engine.namespace.layout.block_bytes
    return Warm(seen.gets, new, logits, sequence.loaded_blocks, fits, engine.counters.snapshot())


def run_undisturbed(model: LlamaForCausalLM, cold: Cold, root: Path, prepare: Callable[[], None] = lambda: None, *,
                    missing: int = 0, stream: bool = False, staged: bool = False) -> Warm:
    """A warm run in which no node was late, so that its report is exact: on a busy machine one may be, which is a case
    of its own and as legal as a node that is gone. `missing`: shards that are missing on purpose."""
    for _ in range(ATTEMPTS):
        shutil.rmtree(root)
        copy_store(cold.root, root)
        prepare()
        warm = run_warm(model, root, stream=stream, staged=staged)
        assert_same(warm, cold)
        if warm.gets[0].missing <= missing:
            return warm
    raise AssertionError(f"in {ATTEMPTS} runs some node was late each time")


def assert_same(warm: Warm, cold: Cold) -> None:
    assert torch.equal(warm.logits, cold.logits)
    assert warm.tokens == cold.tokens


def damage(root: Path, block: int, shards: tuple[int, ...], model: LlamaForCausalLM) -> None:
    """Flip a bit in these shards of one block, on whatever nodes hold them."""
    key = tiny_namespace(model).chain(TOKENS)[block]
    for shard in shards:
        for node in range(12):
            try:
                flip_shard(root, node, key, shard)
                break
            except NothingToDamage:
                continue
        else:
            raise AssertionError(f"shard {shard} of block {block} is nowhere")


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_another_life_of_store_and_engine_gives_the_same_64_tokens_and_bits(
    model: LlamaForCausalLM, cold: Cold, root: Path, stream: bool, staged: bool
) -> None:
    warm = run_undisturbed(model, cold, root, stream=stream, staged=staged)
    (report,) = warm.gets
    assert (report.blocks, report.rebuilt, report.corrupt, warm.loaded) == (BLOCKS, 0, 0, BLOCKS)
    assert warm.counters["abandoned_passes"] == 0


@pytest.mark.parametrize("blocks", [1, 2, BLOCKS - 1])
@pytest.mark.parametrize("chunk", [BLOCK, 4 * BLOCK])
def test_any_prefix_length_and_chunk_gives_the_same_tokens(
    model: LlamaForCausalLM, cold: Cold, root: Path, blocks: int, chunk: int
) -> None:
    warm = run_warm(model, root, chunk_tokens=chunk, region_blocks=blocks)
    (report,) = warm.gets
    assert blocks <= warm.loaded == report.blocks == min(warm.fits, BLOCKS)
    assert torch.allclose(warm.logits, cold.logits, atol=1e-3)
    assert warm.tokens == cold.tokens


def test_two_lost_nodes_cost_a_rebuild_and_nothing_else(model: LlamaForCausalLM, cold: Cold, root: Path) -> None:
    # With two nodes of eleven gone a late one would be a miss: then the run is no test of a rebuild.
    warm = run_undisturbed(model, cold, root, lambda: remove_nodes(root, (3, 4)), missing=2 * BLOCKS)
    (report,) = warm.gets
    assert (report.blocks, warm.loaded) == (BLOCKS, BLOCKS)
    assert report.rebuilt > 0


def test_three_lost_nodes_are_a_clean_miss(model: LlamaForCausalLM, cold: Cold, root: Path) -> None:
    remove_nodes(root, (0, 5, 9))
    warm = run_warm(model, root)
    assert warm.loaded == 0
    assert_same(warm, cold)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("block", [0, 3, 5])
@pytest.mark.parametrize("shards", [(0, 1, 2), (4, 5, 6), (7, 8, 9)])
def test_a_block_whose_shards_rotted_beyond_repair_ends_the_prefix_there(
    model: LlamaForCausalLM, cold: Cold, root: Path, shards: tuple[int, ...], block: int, stream: bool
) -> None:
    # Data shards 0-2 lie in the first layer's segment, 7-9 in the last one's.
    warm = run_undisturbed(model, cold, root, lambda: damage(root, block, shards, model), stream=stream)
    (report,) = warm.gets
    assert report.corrupt >= 2  # It need not look at the third to know that ten are not to be had.
    assert report.blocks == warm.loaded == block


@pytest.mark.parametrize("block", [0, 3, 5])
def test_a_block_with_two_rotten_shards_is_rebuilt_and_loaded(
    model: LlamaForCausalLM, cold: Cold, root: Path, block: int
) -> None:
    warm = run_undisturbed(model, cold, root, lambda: damage(root, block, (2, 7), model))
    (report,) = warm.gets
    assert (report.corrupt, report.rebuilt, report.blocks, warm.loaded) == (2, 1, BLOCKS, BLOCKS)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("segment", [0, 1, 2])
def test_an_abort_while_the_store_fetches_leaves_nothing_held(
    model: LlamaForCausalLM, root: Path, segment: int, stream: bool
) -> None:
    class Aborting(Seen):
        def get_into(self, *arguments: object, **named: object) -> GetReport:
            passed_on = named.pop("on_segment")

            def on_segment(index: int, leading: int) -> None:
                if index == segment:
                    aborts.append(index)
                    sequence.abort()
                passed_on(index, leading)  # type: ignore[operator]

            return super().get_into(*arguments, on_segment=on_segment, **named)

    aborts: list[int] = []
    config = EngineConfig(pages=PAGES, stream=stream, write_back=False)
    with KVStore.blocking(str(root)) as store, Engine(
        model, Aborting(store), tiny_namespace(model), config
    ) as engine:
        sequence = engine.sequence(TOKENS)
        with pytest.raises(Aborted):
            engine.prefill(sequence)
        assert aborts == [segment]
        assert eventually(lambda: engine.pages.free == PAGES)
        assert eventually(lambda: engine.host_pool.counts()[RegionState.FREE] == engine.config.host_regions)
        assert engine.prefill(TOKENS[: 2 * BLOCK]).loaded_blocks in (0, 1)  # The store and the engine go on.


def test_a_conversation_goes_on_from_blocks_that_decoding_made(model: LlamaForCausalLM, tmp_path: Path) -> None:
    root = tmp_path / "store"
    FileSystem.init(str(root), CAPACITY)
    with KVStore.blocking(str(root)) as store:
        with Engine(model, store, tiny_namespace(model), EngineConfig(pages=PAGES)) as engine:
            first = engine.prefill(TOKENS)
            engine.decode(first, 3 * BLOCK)
            engine.finish(first)
            assert engine.flush()
            stored = (len(TOKENS) + 3 * BLOCK - 1) // BLOCK
            assert engine.counters.get("write_back_acked") == stored
        with Engine(model, store, tiny_namespace(model), EngineConfig(pages=PAGES)) as engine:
            turn = engine.prefill([*first.tokens, *prompt(BLOCK, seed=9)])
            assert turn.loaded_blocks == stored
            assert turn.prefilled_tokens == len(turn.tokens) - stored * BLOCK
            engine.finish(turn)
