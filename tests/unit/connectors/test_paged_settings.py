"""Settings of a connector, and the digest of a model's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from efs.limits import MIB
from kvstore.config import SettingError
from kvstore.connectors.paged.settings import PIECE_BYTES, read_settings
from kvstore.connectors.paged.weights import files_digest, weights_of


def test_settings_of_the_store_come_from_the_environment_too() -> None:
    settings = read_settings({"store": "a.toml", "get_deadline_ms": 700, "save_queue_bytes": "8MiB"},
                             environ={"KVSTORE_MATCH_DEADLINE_MS": "90", "KVSTORE_BYPASS": "yes"})
    assert settings.store == "a.toml"
    assert settings.config.get_deadline_ms == 700
    assert settings.config.match_deadline_ms == 90
    assert settings.config.bypass
    assert settings.save_queue_bytes == 8 * MIB
    assert settings.piece_bytes == PIECE_BYTES


@pytest.mark.parametrize(("given", "what"), [
    ({}, "store is not set"),
    ({"store": "a.toml", "stroe": 1}, "'stroe'"),
    ({"store": "/var/lib/kv"}, "must be a cluster.toml"),
    ({"store": "/var/lib/kv", "start": "yes"}, "start is 'yes'"),
    ({"store": "a.toml", "min_tokens": -1}, "min_tokens is -1"),
    ({"store": "a.toml", "min_tokens": 1 << 20_000}, "min_tokens is a number of 20001 bits"),
    ({"store": "a.toml", "piece_bytes": "9" * 5000}, "piece_bytes is '999"),
    ({"store": "a.toml", "min_tokens": True}, "min_tokens is True"),
    ({"store": "a.toml", "piece_bytes": "10G"}, "piece_bytes is '10G'"),
    ({"store": "a.toml", "piece_bytes": 1.5}, "piece_bytes is 1.5"),
    ({"store": "a.toml", "weights": ""}, "weights is ''"),
    ({"store": "a.toml", "get_deadline_ms": 0}, "get_deadline_ms"),
])
def test_a_wrong_setting_is_named(given: dict[str, object], what: str) -> None:
    with pytest.raises(SettingError, match=what):
        read_settings(given, environ={})


def test_every_byte_and_name_of_a_model_is_in_its_digest(tmp_path: Path) -> None:
    def digest(**files: bytes) -> str | None:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, data in files.items():
            (tmp_path / name.replace("_", ".")).write_bytes(data)
        return files_digest(str(tmp_path))

    first = digest(config_json=b"{}", model_safetensors=b"abc")
    assert first is not None
    assert first == digest(config_json=b"{}", model_safetensors=b"abc", README_md=b"text")
    assert first != digest(config_json=b"{}", model_safetensors=b"abd")
    assert first != digest(config_json=b"{ }", model_safetensors=b"abc")
    assert first != digest(config_json=b"{}", other_safetensors=b"abc")
    assert first != digest(config_json=b"{}a", model_safetensors=b"bc")
    assert digest(config_json=b"{}") is None


def test_weights_are_files_or_a_hubs_commit_or_unknown(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"abc")
    assert weights_of(str(tmp_path), None) == f"files:{files_digest(str(tmp_path))}"
    assert weights_of("someone/model", "abc123") == "hub:someone/model@abc123"
    assert weights_of("someone/model", None) is None
