"""A vLLM that has names and no code: enough to import the connectors where vLLM is not installed.

Every module below `vllm` exists and has whatever is asked of it, each an empty class, apart from what stands here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace
from typing import Any, Final

VERSION: Final = "0.32.0"
CONNECTORS: Final = "kvstore.connectors.vllm"
FAKED: Final = ("vllm", "prometheus_client")


class ConnectorBase:
    """vLLM's base class of a connector."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        self._vllm_config = vllm_config
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self._kv_cache_config = kv_cache_config


class Offloading(ConnectorBase):
    """vLLM's OffloadingConnector; `resets` counts those that reached it."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.resets = 0

    def reset_cache(self) -> bool:
        self.resets += 1
        return True

    def on_new_request(self, request: Any) -> None:
        """vLLM tells its tiers."""


class Tier:
    """vLLM's base class of a tier."""

    def __init__(self, offloading_spec: Any, primary_kv_view: Any, tier_type: str, backpressure_detector: Any) -> None:
        self._offloading_spec = offloading_spec
        self._primary_kv_view = primary_kv_view


class JobResult:
    """vLLM's answer of a tier."""

    def __init__(self, number: int, success: bool, **more: Any) -> None:
        self.number = number
        self.ok = success


KNOWN: Final[dict[str, Any]] = {
    "KVConnectorBase_V1": ConnectorBase, "OffloadingConnector": Offloading, "SecondaryTierManager": Tier,
    "Medium": SimpleNamespace(STORAGE="storage"),
    "LookupResult": SimpleNamespace(MISS="miss", HIT="hit", RETRY="retry"),
    "JobResult": JobResult,
}


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = KNOWN.get(name) or type(name, (), {})
        setattr(self, name, value)
        return value


class _Finder(MetaPathFinder, Loader):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
                  ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in FAKED:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        module.__dict__["__version__"] = VERSION


@contextmanager
def connectors() -> Iterator[ModuleType]:
    """The package `kvstore.connectors.vllm` on this vLLM; what was imported before is back afterwards."""
    kept = {name: sys.modules.pop(name) for name in list(sys.modules) if _concerned(name)}
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield import_module(CONNECTORS)
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if _concerned(name)]:
            del sys.modules[name]
        sys.modules.update(kept)


def _concerned(name: str) -> bool:
    return name.partition(".")[0] in FAKED or name == CONNECTORS or name.startswith(f"{CONNECTORS}.")
