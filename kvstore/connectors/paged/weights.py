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
_CODE: Final = (".py",)
_READ_BYTES: Final = 1 << 20


def files_digest(directory: str, *, code: bool = False) -> str | None:
    """64 hex digits over names and contents of the weights and settings in a directory; None without weights. code:
    over its Python modules too."""
    read = _WEIGHTS + _SETTINGS + (_CODE if code else ())
    names = sorted(name for name in os.listdir(directory) if name.endswith(read))
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


def weights_of(model: str, commit: str | None, *, code: bool = False) -> str | None:
    """Text for a namespace; None when the weights cannot be told. commit: a hub's name of exactly these files. code:
    the engine runs the model's own code, which then counts as the weights do."""
    if os.path.isdir(model):
        digest = files_digest(model, code=code)
        return None if digest is None else f"files:{digest}"
    return None if not commit else f"hub:{model}@{commit}"
