"""What names an engine's blocks: engines that compute other KV have other names, others share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from efs.errors import InvalidArgument
from kvstore.connectors.paged.settings import read_settings
from tests.support.fakevllm import connectors

pytestmark = pytest.mark.engines

LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.fixture(scope="module")
def identity() -> Iterator[Any]:
    with connectors() as package:
        yield package.connector.__dict__["fingerprint"].__globals__


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "modeling.py").write_text("one")
    return str(tmp_path)


def engine(model: str = "someone/model", load_format: str = "auto", rope: dict[str, Any] | None = None,
           model_type: str = "phi3", **more: Any) -> SimpleNamespace:
    settings = {"model_type": model_type, "text_config": {"rope_parameters": rope or {"rope_type": "yarn"}}}
    hf = SimpleNamespace(to_dict=lambda: dict(settings), _commit_hash=None)
    given: dict[str, Any] = {"max_model_len": 4096, **more}
    return SimpleNamespace(
        model_config=SimpleNamespace(hf_config=hf, dtype="bf16", quantization=None, model=model, **given),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256_cbor", cache_dtype="auto"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        load_config=SimpleNamespace(load_format=load_format), speculative_config=None,
    )


def settings(**given: str) -> Any:
    return read_settings({"store": "x.toml", **given}, environ={})


@pytest.mark.parametrize("alike", [
    {"rope": LONGROPE}, {"rope": {"rope_type": "dynamic"}}, {"rope": {"full_attention": {"type": "unheard-of"}}},
    {"model_type": "llama4"},
])
def test_the_longest_sequence_is_in_the_name_where_kv_depends_on_it(identity: Any, alike: dict[str, Any]) -> None:
    name = identity["fingerprint"]
    assert name(engine(**alike)) == name(engine(**alike))
    assert name(engine(**alike, max_model_len=32768)) != name(engine(**alike))


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_other_models_share_between_lengths(identity: Any, kind: str) -> None:
    short, long = (engine(rope={"rope_type": kind}, max_model_len=length) for length in (4096, 32768))
    assert identity["fingerprint"](short) == identity["fingerprint"](long)


def test_settings_of_quantisation_and_the_load_format_are_in_the_name(identity: Any) -> None:
    name = identity["fingerprint"]
    assert name(engine(quantization_config=None)) == name(engine())
    ignoring = [engine(quantization_config={"ignore": ignored}) for ignored in ([], ["re:.*k_proj"])]
    assert len({name(each) for each in [engine(), *ignoring]}) == 3
    assert name(engine(load_format="pt")) != name(engine())


def test_weights_that_are_made_up_are_never_served(identity: Any) -> None:
    groups = SimpleNamespace(kv_cache_groups=[])
    assert identity["unsupported"](engine(), groups) is None
    assert "dummy" in identity["unsupported"](engine(load_format="dummy"), groups)


def test_load_formats_that_do_not_load_the_named_weights_need_a_name(identity: Any, model: str) -> None:
    name = identity["weights_name"]
    for load_format in ("auto", "safetensors", "pt"):
        assert name(engine(model, load_format), settings()).startswith("files:")
    for load_format in ("sharded_state", "tensorizer", "ipc_cache", "unheard-of", "dummy"):
        with pytest.raises(InvalidArgument, match=f"load_format {load_format} loads cannot be told"):
            name(engine(model, load_format), settings())
    assert name(engine(model, "tensorizer"), settings(weights="mine")) == "mine"


def test_a_models_own_code_counts_where_it_is_run(identity: Any, model: str) -> None:
    name = identity["weights_name"]
    without, trusting = engine(model), engine(model, trust_remote_code=True)
    before = [name(each, settings()) for each in (without, trusting)]
    Path(model, "modeling.py").write_text("two")
    after = [name(each, settings()) for each in (without, trusting)]
    assert after[0] == before[0]
    assert after[1] != before[1]
