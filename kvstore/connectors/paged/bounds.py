"""Bounds on the memory of a connector's transfers: what waits to be stored, and a buffer for each loading thread."""

from __future__ import annotations

import threading

import numpy as np
from numpy.typing import NDArray


class WaitingBytes:
    """Bytes that wait to be stored, at most so many. Safe to use from several threads."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._bytes = 0
        self._lock = threading.Lock()

    def reserve(self, blocks: int, block_bytes: int) -> int:
        """How many of these blocks may wait, counted as waiting."""
        with self._lock:
            room = max(0, min(blocks, (self._most - self._bytes) // block_bytes))
            self._bytes += room * block_bytes
        return room

    def release(self, size: int) -> None:
        """They wait no longer."""
        with self._lock:
            self._bytes -= size

    @property
    def bytes(self) -> int:
        with self._lock:
            return self._bytes


class PieceBuffer:
    """Memory of at least one piece for each thread that asks, touched once."""

    def __init__(self, piece_bytes: int) -> None:
        self._piece_bytes = piece_bytes
        self._held = threading.local()

    def of(self, size: int) -> NDArray[np.uint8]:
        """This thread's own memory, until it asks again."""
        held: NDArray[np.uint8] | None = getattr(self._held, "memory", None)
        if held is None or held.size < size:
            held = np.zeros(max(size, self._piece_bytes), np.uint8)
            self._held.memory = held
        return held[:size]
