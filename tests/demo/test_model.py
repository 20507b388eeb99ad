"""Conversion of a GGUF file and the cache of converted models, with a model of a few kilobytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

import torch

import kvstore.demo.model as demo_model
from kvstore.connectors.transformers import weights_digest
from kvstore.demo.model import UnreadableModel, load_model, load_tokenizer, prepare, verified_weights
from tests.demo.smallgguf import small_llama, write_gguf

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]


@pytest.fixture
def gguf_file(tmp_path: Path) -> Path:
    path = tmp_path / "small.gguf"
    write_gguf(path, small_llama())
    return path


def test_the_converted_model_computes_what_the_original_computes(gguf_file: Path, tmp_path: Path) -> None:
    small_llama().save_pretrained(tmp_path / "original")
    original = load_model(tmp_path / "original")
    made = prepare(gguf_file, tmp_path / "cache")
    assert made.converted
    converted = load_model(made.directory)
    assert converted.dtype == torch.bfloat16
    tokens = torch.tensor([[5, 9, 200, 33, 77, 12, 12, 90]])
    with torch.inference_mode():
        same = torch.equal(converted(tokens).logits, original(tokens).logits)
    assert same
    state = converted.state_dict()
    for name, tensor in original.state_dict().items():
        assert torch.equal(state[name], tensor), name


def test_the_tokenizer_comes_from_the_same_file(gguf_file: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(prepare(gguf_file, tmp_path / "cache").directory)
    ids = tokenizer.encode("<|im_start|>a the b<|im_end|>", add_special_tokens=False).ids
    assert ids[0] == 1
    assert ids[-1] == 2
    assert "Ġthe" in [tokenizer.id_to_token(token) for token in ids]
    assert tokenizer.decode(ids) == "a the b"


def test_the_second_time_it_is_found(gguf_file: Path, tmp_path: Path) -> None:
    first = prepare(gguf_file, tmp_path / "cache")
    second = prepare(gguf_file, tmp_path / "cache")
    assert (first.converted, second.converted) == (True, False)
    assert (first.directory, first.weights) == (second.directory, second.weights)
    assert first.weights == weights_digest(load_model(first.directory))
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [first.directory.name]


def test_another_file_is_another_model(gguf_file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "small.gguf"
    other.parent.mkdir()
    write_gguf(other, small_llama(seed=4))
    one, two = prepare(gguf_file, tmp_path / "cache"), prepare(other, tmp_path / "cache")
    assert one.directory != two.directory
    assert one.weights != two.weights


@pytest.mark.parametrize(
    "name", ["manifest.json", "model.safetensors", "tokenizer.json", "config.json"])
@pytest.mark.parametrize("damage", ["removed", "cut", "flipped"])
def test_a_damaged_cache_is_noticed_and_made_anew(gguf_file: Path, tmp_path: Path, name: str, damage: str) -> None:
    made = prepare(gguf_file, tmp_path / "cache")
    path = made.directory / name
    data = path.read_bytes()
    if damage == "removed":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(data[: len(data) // 2])
    else:
        # In the last digit of a number, a weight, or a name: never only in white space.
        place = next(place for place in range(len(data) * 2 // 3, len(data)) if chr(data[place]).isalnum())
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    assert verified_weights(made.directory) is None
    again = prepare(gguf_file, tmp_path / "cache")
    assert again.converted
    assert again.weights == made.weights
    assert verified_weights(again.directory) == made.weights


def test_of_two_that_convert_at_once_the_second_uses_what_the_first_made(
    gguf_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert = demo_model.convert

    def slow_convert(source: Path, into: Path) -> None:
        convert(source, into)
        monkeypatch.setattr(demo_model, "convert", convert)
        other = prepare(source, tmp_path / "cache")
        (other.directory / "mark").write_text("first")

    monkeypatch.setattr(demo_model, "convert", slow_convert)
    made = prepare(gguf_file, tmp_path / "cache")
    assert (made.directory / "mark").read_text() == "first"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, small_llama(), without="blk.1.attn_k.weight")
    with pytest.raises(UnreadableModel, match=r"model\.layers\.1\.self_attn\.k_proj\.weight"):
        prepare(path, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_tensor_that_is_not_of_a_llama_is_named(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    write_gguf(path, small_llama(), extra="blk.0.attn_sinks.weight")
    with pytest.raises(UnreadableModel, match=r"blk\.0\.attn_sinks\.weight"):
        prepare(path, tmp_path / "cache")


def test_the_manifest_is_what_the_module_says(gguf_file: Path, tmp_path: Path) -> None:
    made = prepare(gguf_file, tmp_path / "cache")
    assert set(json.loads((made.directory / "manifest.json").read_text())) == {"tokenizer", "weights"}
