"""Which weights an engine has loaded, as text for a namespace: the bytes of a model's files, or a hub's revision of
them.

Names and times of files say nothing: a model that is trained further in place keeps them. So every file of a local
model is read once when the engine starts (about a second for a gigabyte); where that is too long, the operator names
the weights by a setting and answers for it.
"""

from __future__ import annotations

import os
from hashlib import blake2b
from typing import Final

_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".npz")
_SETTINGS: Final = (".json",)
_READ_BYTES: Final = 1 << 20


def files_digest(directory: str) -> str | None:
    """64 hex digits over names and contents of the weights and settings in a directory; None without weights."""
    names = sorted(name for name in os.listdir(directory) if name.endswith(_WEIGHTS + _SETTINGS))
    if not any(name.endswith(_WEIGHTS) for name in names):
        return None
    digest = blake2b(digest_size=32, person=b"kvstore/files")
    for name in names:
        path = os.path.join(directory, name)
        with open(path, "rb") as file:
            digest.update(f"{len(name.encode())} {name} {os.fstat(file.fileno()).st_size} ".encode())
            while piece := file.read(_READ_BYTES):
                digest.update(piece)
    return digest.hexdigest()


def weights_of(model: str, commit: str | None) -> str | None:
    """Text for a namespace; None when the weights cannot be told. commit: a hub's name of exactly these files."""
    if os.path.isdir(model):
        digest = files_digest(model)
        return None if digest is None else f"files:{digest}"
    return None if not commit else f"hub:{model}@{commit}"
