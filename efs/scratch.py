"""Private memory that is used again: fresh pages cost ten times what a copy into warm ones does."""

from __future__ import annotations


class Scratch:
    """Buffers by exact size; keeps at most `most_bytes` of them between uses. A buffer that somebody still holds (a
    hung thread) is simply not given back."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._kept = 0
        self._free: dict[int, list[bytearray]] = {}

    def take(self, size: int) -> bytearray:
        """A buffer of `size` bytes with undefined content."""
        free = self._free.get(size)
        if free:
            self._kept -= size
            return free.pop()
        return bytearray(size)

    def give(self, buffer: bytearray) -> None:
        if self._kept + len(buffer) <= self._most:
            self._kept += len(buffer)
            self._free.setdefault(len(buffer), []).append(buffer)
