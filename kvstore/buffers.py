"""A caller's memory as flat bytes, without a copy and without knowing the caller's library.

Accepted: whatever has the buffer protocol (bytes, bytearray, memoryview, mmap, array, numpy arrays), numpy arrays of types
that the buffer protocol cannot name (bfloat16) and others through `__array_interface__`, and torch tensors in host memory,
which have neither, by their address (`data_ptr`); torch is not imported for it. Refused, each with one line that names
the argument: memory of another device, memory with gaps, read-only memory where it is to be written, and a wrong size.
The result keeps the owner of the memory alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def flat_bytes(buffer: Any, what: str, *, writable: bool = False, size: int | None = None) -> NDArray[np.uint8]:
    """One-dimensional uint8 view of the same memory; `what` names the argument in errors (InvalidArgument).

    size: the number of bytes it must have, when known.
    """
    raise NotImplementedError
