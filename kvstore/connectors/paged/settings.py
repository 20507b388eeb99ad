"""Settings of a connector in an engine's process. Pure.

They come from the engine's own configuration (vLLM: kv_connector_extra_config), as one mapping. Names that
`kvstore.config` knows (store, get_deadline_ms, match_deadline_ms, put_deadline_ms, capacity, extent_bytes, bypass) mean
what they mean there, and come from the environment or a file too. The others:

    start              yes/no, default no     start servers for `store`, a directory, where they do not run; make it too
    min_tokens         default 0              shorter gains are not worth a load: compute them
    weights            text                   says which weights these are; default: a digest of the model's files
    tenant             text                   name in the store's tenants file; default: none
    piece_bytes        size, default 32MiB    most bytes of one get or put; bounds the memory of a load
    save_queue_bytes   size, default 256MiB   most bytes waiting to be stored; blocks beyond it are dropped and counted
    drain_ms           default 5000           how long the end of a process waits for what is still to be stored

An unknown name or a wrong value is an error when the engine starts, never later.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from efs.limits import MAX_DEADLINE_MS, MIB
from kvstore.config import Config, SettingError, parse_size, shown

_OF_THE_STORE: Final = frozenset({
    "store", "get_deadline_ms", "match_deadline_ms", "put_deadline_ms", "capacity", "extent_bytes", "bypass",
})
_OWN: Final = frozenset({
    "start", "min_tokens", "weights", "tenant", "piece_bytes", "save_queue_bytes", "drain_ms",
})
PIECE_BYTES: Final = 32 * MIB
SAVE_QUEUE_BYTES: Final = 256 * MIB
DRAIN_MS: Final = 5_000


@dataclass(frozen=True, slots=True)
class PagedSettings:
    """See the module docstring. `config.store` is a cluster.toml or, with `start`, the directory of a local set."""

    config: Config
    start: bool = False
    min_tokens: int = 0
    weights: str | None = None
    tenant: str | None = None
    piece_bytes: int = PIECE_BYTES
    save_queue_bytes: int = SAVE_QUEUE_BYTES
    drain_ms: int = DRAIN_MS

    @property
    def store(self) -> str:
        assert self.config.store is not None
        return self.config.store


def read_settings(given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> PagedSettings:
    """SettingError names what is wrong. environ: os.environ when None."""
    unknown = sorted(set(given) - _OF_THE_STORE - _OWN)
    if unknown:
        raise SettingError(f"unknown connector setting {unknown[0]!r}")
    config = Config.load(environ=environ, arguments={name: given[name] for name in _OF_THE_STORE & set(given)})
    if config.store is None:
        raise SettingError("store is not set: give the path of a cluster.toml, or of a directory with start")
    settings = PagedSettings(
        config,
        start=_yes_no(given, "start"),
        min_tokens=_whole(given, "min_tokens", 0, 1 << 31),
        weights=_text(given, "weights"),
        tenant=_text(given, "tenant"),
        piece_bytes=_size(given, "piece_bytes", PIECE_BYTES),
        save_queue_bytes=_size(given, "save_queue_bytes", SAVE_QUEUE_BYTES),
        drain_ms=_whole(given, "drain_ms", DRAIN_MS, MAX_DEADLINE_MS),
    )
    if not settings.start and not config.store.endswith(".toml"):
        raise SettingError(f"store is {config.store}: an engine has several processes, so this must be a cluster.toml, "
                           "or a directory together with start")
    return settings


def _yes_no(given: Mapping[str, object], name: str) -> bool:
    value = given.get(name, False)
    if not isinstance(value, bool):
        raise SettingError(f"{name} is {shown(value)}, must be true or false")
    return value


def _whole(given: Mapping[str, object], name: str, default: int, most: int) -> int:
    value = given.get(name, default)
    if type(value) is not int or not 0 <= value <= most:
        raise SettingError(f"{name} is {shown(value)}, must be an integer of 0 to {most}")
    return value


def _text(given: Mapping[str, object], name: str) -> str | None:
    value = given.get(name)
    if value is not None and (not isinstance(value, str) or not value):
        raise SettingError(f"{name} is {shown(value)}, must be a non-empty text")
    return value


def _size(given: Mapping[str, object], name: str, default: int) -> int:
    value = given.get(name, default)
    if not isinstance(value, (int, str)) or isinstance(value, bool):
        raise SettingError(f"{name} is {shown(value)}, must be a size such as 10MB or 10MiB")
    return parse_size(value, name)
