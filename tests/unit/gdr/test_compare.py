"""Cold against warm on a tiny model: the report says what happened, and says so when it did not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console
from transformers import LlamaForCausalLM

from gdr.compare import Comparison, compare
from gdr.demo import MISMATCH, EngineDemo
from gdr.engine import EngineConfig
from gdr.errors import EngineError
from kvstore.keys import Chain
from tests.support.blockstore import MemoryBlockStore
from tests.support.tinymodel import BLOCK, prompt, tiny_model, tiny_namespace

pytestmark = pytest.mark.engines


@pytest.fixture(scope="module")
def model() -> LlamaForCausalLM:
    return tiny_model()


def run(model: LlamaForCausalLM, store: MemoryBlockStore) -> Comparison:
    return compare(model, store, tiny_namespace(model), prompt(6 * BLOCK + 3), 8, EngineConfig(pages=16))


def test_a_warm_run_that_equals_the_cold_one_is_reported_with_its_times(model: LlamaForCausalLM) -> None:
    found = run(model, MemoryBlockStore())
    assert found.ok
    for warm in (found.warm, found.stream):
        assert (warm.loaded_blocks, warm.prefilled_tokens) == (6, 3)
        assert warm.max_delta_logprob == 0
        assert warm.same_tokens
        assert {span.lane for span in warm.spans} >= {"fetch", "copy", "compute"}
        assert min(warm.fetch_ms, warm.copy_ms, warm.compute_ms, warm.first_token_s) > 0
    document = found.document()
    assert json.loads(json.dumps(document)) == document
    assert document["ok"] is True
    assert "spans" not in document["warm"]


def test_a_block_that_changes_between_the_runs_is_noticed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    store = MemoryBlockStore()

    def damage(verb: str) -> None:
        if verb == "match":
            for block in store.blocks.values():
                block[:] = 0

    store.before = damage
    found = run(model, store)
    assert found.warm.loaded_blocks == 6
    assert found.warm.max_delta_logprob > 0.1
    demo = EngineDemo("tiny", 1, found, tmp_path / "trace.json", None)
    if not found.warm.same_tokens:
        assert demo.exit_code == MISMATCH
        assert not demo.document()["ok"]


def test_a_warm_run_that_loads_less_than_it_must_is_not_ok(model: LlamaForCausalLM) -> None:
    store = MemoryBlockStore()

    def lose(verb: str) -> None:
        if verb == "match" and len(store.blocks) == 6:
            del store.blocks[list(store.blocks)[4]]

    store.before = lose
    found = run(model, store)
    assert found.warm.loaded_blocks == 4
    assert found.warm.same_tokens
    assert not found.ok


def test_a_store_that_takes_no_blocks_ends_the_comparison(model: LlamaForCausalLM) -> None:
    class Full(MemoryBlockStore):
        def put(self, chain: Chain, blocks: object, *, deadline_ms: float | None = None) -> object:  # type: ignore[override]
            raise OSError(28, "injected")

    with pytest.raises(EngineError, match="could not be stored"):
        run(model, Full())


def test_the_screen_shows_cold_warm_and_streamed(model: LlamaForCausalLM, tmp_path: Path) -> None:
    demo = EngineDemo("tiny", 1, run(model, MemoryBlockStore()), tmp_path / "trace.json", None)
    console = Console(width=160, record=True, file=(tmp_path / "out").open("w"))
    console.print(demo.table())
    text = console.export_text()
    for word in ("cold", "warm", "streamed", "first token s", "8 tokens, warm as cold", "trace.json", "not drawn"):
        assert word in text
    assert demo.exit_code == 0
    console.file.close()
