"""A caller's memory as flat bytes, without a copy and without knowing the caller's library.

Accepted: whatever has the buffer protocol (bytes, bytearray, memoryview, mmap, array, numpy arrays), numpy arrays of
types that the buffer protocol cannot name (bfloat16) and others through `__array_interface__`, and torch tensors in
host memory, which have neither, by their address (`data_ptr`); torch is not imported for it. Refused, each with one
line that names the argument: memory of another device, memory with gaps, read-only memory where it is to be written,
and a wrong size. The result keeps the owner of the memory alive.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from efs.errors import InvalidArgument


def flat_bytes(buffer: Any, what: str, *, writable: bool = False, size: int | None = None) -> NDArray[np.uint8]:
    """One-dimensional uint8 view of the same memory; `what` names the argument in errors (InvalidArgument).

    size: the number of bytes it must have, when known.
    """
    flat = _from_buffer(buffer, what)
    if flat is None:
        flat = _from_array_interface(buffer, what)
    if flat is None:
        flat = _from_tensor(buffer, what)
    if flat is None:
        raise InvalidArgument(f"{what} is {_kind(buffer)}, must be a buffer, a numpy array or a CPU tensor")
    if writable and not flat.flags.writeable:
        raise InvalidArgument(f"{what} is read-only, must be writable")
    if size is not None and flat.size != size:
        raise InvalidArgument(f"{what} has {flat.size} bytes, must have {size}")
    return flat


class _Memory:
    """An address range that numpy can look at; holds its owner."""

    __slots__ = ("__array_interface__", "owner")

    def __init__(self, address: int, size: int, owner: Any) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (size,), "typestr": "|u1", "version": 3}


def _from_buffer(buffer: Any, what: str) -> NDArray[np.uint8] | None:
    """By the buffer protocol; None when the object has none, or one that cannot say its element type."""
    try:
        view = memoryview(buffer)
    except (TypeError, ValueError, BufferError):
        return None
    if not view.c_contiguous:
        raise InvalidArgument(f"{what} is not contiguous")
    if view.nbytes == 0:
        return _empty(view.readonly)
    if "O" in view.format and np.asarray(view).dtype.hasobject:
        raise InvalidArgument(f"{what} is an array of Python objects, must hold plain bytes")
    return np.frombuffer(view, dtype=np.uint8)


def _from_array_interface(buffer: Any, what: str) -> NDArray[np.uint8] | None:
    """By numpy's array interface, which also describes arrays of types that the buffer protocol does not know."""
    if not hasattr(buffer, "__array_interface__"):
        return None
    array = np.asarray(buffer)
    if array.dtype.hasobject:
        raise InvalidArgument(f"{what} is an array of Python objects, must hold plain bytes")
    if not array.flags.c_contiguous:
        raise InvalidArgument(f"{what} is not contiguous")
    if array.size == 0:
        return _empty(not array.flags.writeable)
    return array.reshape(-1).view(np.uint8)


def _from_tensor(buffer: Any, what: str) -> NDArray[np.uint8] | None:
    """By a tensor's own word on its device, order and address."""
    if not all(hasattr(buffer, name) for name in ("device", "data_ptr", "is_contiguous", "nbytes")):
        return None
    if getattr(buffer.device, "type", None) != "cpu":
        raise InvalidArgument(f"{what} is on device {buffer.device}, must be in host memory")
    if not buffer.is_contiguous():
        raise InvalidArgument(f"{what} is not contiguous")
    if buffer.nbytes == 0:
        return _empty(readonly=False)
    return np.asarray(_Memory(buffer.data_ptr(), buffer.nbytes, buffer))


def _empty(readonly: bool) -> NDArray[np.uint8]:
    """numpy refuses to look at no bytes, so an empty buffer is replaced by an empty array."""
    empty = np.empty(0, dtype=np.uint8)
    empty.flags.writeable = not readonly
    return empty


def _kind(buffer: Any) -> str:
    if hasattr(buffer, "__cuda_array_interface__"):
        return "in the memory of a CUDA device"
    return f"of type {type(buffer).__name__}"
