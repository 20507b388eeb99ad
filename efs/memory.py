"""A caller's buffer as flat bytes: anything with the buffer protocol, checked before a byte of it is used."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument


def flat_bytes(buffer: Any, name: str, size: int, *, writable: bool = False) -> NDArray[np.uint8]:
    """(size,) uint8 view of the caller's memory. InvalidArgument names the buffer, what is expected and what was given:
    no buffer, not contiguous, read-only where it is to be filled, or of another size."""
    try:
        view = memoryview(buffer)
    except TypeError as error:
        raise InvalidArgument(f"{name} is {type(buffer).__name__}, expected a buffer of {size} bytes") from error
    if not view.c_contiguous:
        raise InvalidArgument(f"{name} is not contiguous, expected {size} bytes in one piece")
    if writable and view.readonly:
        raise InvalidArgument(f"{name} is read-only, expected {size} bytes to write to")
    if view.nbytes != size:
        raise InvalidArgument(f"{name} has {view.nbytes} bytes, expected {size}")
    return np.frombuffer(view, np.uint8) if size else np.empty(0, np.uint8)
