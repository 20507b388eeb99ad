"""Private memory that is used again: fresh pages cost ten times what a copy into warm ones does."""

from __future__ import annotations


class Scratch:
    """Buffers by exact size; keeps at most `most_bytes` of them between uses, those of other sizes than were asked for
    lately the shortest. A buffer that somebody still holds (a hung thread) is simply not given back."""

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
        """Nobody refers to a buffer of `take` any more."""
        size = len(buffer)
        mine = self._free.pop(size, [])
        self._free[size] = mine
        while self._kept + size > self._most and len(self._free) > 1:
            self._drop_oldest()
        if self._kept + size <= self._most:
            self._kept += size
            mine.append(buffer)

    def _drop_oldest(self) -> None:
        """Drop the buffers of the size that was given back longest ago."""
        size = next(iter(self._free))
        self._kept -= size * len(self._free.pop(size))
