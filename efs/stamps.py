"""Access stamps: the minute in which each slot was last used, a uint32 for every slot of every assigned extent.

In memory the stamps are authoritative while a process owns the node; on disk they are best effort: one file for each
extent, `stamps/` + the extent index as eight hex digits, rewritten in place some time after a change. Losing any of
it makes records look older than they are and nothing else.

File, little-endian:

    offset  bytes  field
    0       4      magic b"EFST"
    4       2      format version, 1
    6       2      zero
    8       4      extent index
    12      4      slot bytes
    16      4      entry bytes
    20      4      slot count n
    24      8      xxh3_64 of bytes [0, 24) and [32, 32 + 4 n)
    32      4 n    stamps

A file that is short, damaged, of another extent or of another class counts as zeros. Files are written only while their
sum stays within a budget given by the node, so that stamps never push it over its hard limit.

`Stamps` is pure; `write_stamps` and `read_stamps` do the I/O on a node's thread from a private copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.extent import Geometry
from efs.osio import Io

STAMP_MAGIC: Final = b"EFST"
STAMP_HEADER_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class StampFile:
    """A private copy of one extent's stamps, ready to be written."""

    extent: int
    geometry: Geometry
    stamps: NDArray[np.uint32]


def stamp_file_bytes(slots: int) -> int:
    """Bytes that a stamp file occupies: its length rounded up to a page."""
    raise NotImplementedError


class Stamps:
    """Stamps of all extents of a node."""

    def __init__(self, extents: int, budget_bytes: int) -> None:
        raise NotImplementedError

    def attach(self, extent: int, geometry: Geometry, stamps: NDArray[np.uint32] | None = None) -> None:
        """Begin an extent of a class, with the stamps of its file or zeros. Attached again, it begins anew."""
        raise NotImplementedError

    def detach(self, extent: int) -> None:
        raise NotImplementedError

    def touch(self, locations: NDArray[np.int64], stamp: int) -> int:
        """Raise the stamps of these slots to `stamp` where they are below it; returns how many changed. Negative
        locations are skipped. The caller clamps `stamp` to its clock."""
        raise NotImplementedError

    def set(self, locations: NDArray[np.int64], stamps: int | NDArray[np.uint32]) -> None:
        """Set stamps of slots that got a new record, up or down."""
        raise NotImplementedError

    def get(self, locations: NDArray[np.int64]) -> NDArray[np.uint32]:
        raise NotImplementedError

    def row(self, extent: int) -> NDArray[np.uint32]:
        """(slots,) read-only view of an extent's stamps."""
        raise NotImplementedError

    @property
    def dirty(self) -> bool:
        raise NotImplementedError

    def take_dirty(self) -> list[StampFile]:
        """Copies of the extents that changed since the last call and fit the budget; they count as clean from here on."""
        raise NotImplementedError

    def put_back(self, extents: Sequence[int]) -> None:
        """Count extents as changed again, after their write failed."""
        raise NotImplementedError


def write_stamps(io: Io, directory: str, files: Sequence[StampFile]) -> list[int]:
    """Write stamp files in place; returns the extents whose write failed. Never raises OSError."""
    raise NotImplementedError


def read_stamps(io: Io, directory: str, extent: int, geometry: Geometry) -> NDArray[np.uint32]:
    """(slots,) stamps of an extent from its file, zeros when it is absent, unreadable or damaged."""
    raise NotImplementedError
