"""The engine side: KV blocks from host memory into device pages, layer by layer, under a forward pass.

Names are loaded on first use, so that naming this package's command costs no import of torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gdr.engine import Engine, EngineConfig
    from gdr.errors import (
        Aborted,
        DeviceError,
        EngineClosed,
        EngineError,
        InvalidEngineArgument,
        PagesExhausted,
        RequestTooLarge,
    )
    from gdr.scheduler import run_all
    from gdr.sequence import Phase, Sequence

__all__ = [
    "Aborted",
    "DeviceError",
    "Engine",
    "EngineClosed",
    "EngineConfig",
    "EngineError",
    "InvalidEngineArgument",
    "PagesExhausted",
    "Phase",
    "RequestTooLarge",
    "Sequence",
    "run_all",
]

_HOMES = {"Engine": "engine", "EngineConfig": "engine", "run_all": "scheduler", "Phase": "sequence",
          "Sequence": "sequence"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'gdr' has no attribute {name!r}")
    return getattr(import_module(f"gdr.{_HOMES.get(name, 'errors')}"), name)
