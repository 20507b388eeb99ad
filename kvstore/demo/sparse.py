"""Sparse files, by the ranges of them that hold data: copied with their holes, and read into the page cache."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Final

PIECE_BYTES: Final = 4 * 1024 * 1024


def data_ranges(file: FileIO) -> Iterator[tuple[int, int]]:
    """(start, stop) of each stretch that is not a hole, in order. Moves the file's position."""
    size = file.seek(0, os.SEEK_END)
    position = 0
    while position < size:
        try:
            start = file.seek(position, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return  # A hole up to the end.
        position = file.seek(start, os.SEEK_HOLE)
        yield start, position


def copy_sparse(source: str, target: str) -> str:
    """Copy a file, its mode and times; holes stay holes. Usable as `copy_function` of shutil."""
    with open(source, "rb", buffering=0) as reader, open(target, "wb", buffering=0) as writer:
        writer.truncate(reader.seek(0, os.SEEK_END))
        for start, stop in data_ranges(reader):
            for position, data in _pieces(reader, start, stop):
                writer.seek(position)
                while data:
                    data = data[writer.write(data) :]
    shutil.copystat(source, target)
    return target


def read_through(root: Path) -> int:
    """Read all data of all files below a directory once, so that it is in the page cache; returns its bytes."""
    done = 0
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        with path.open("rb", buffering=0) as reader:
            for start, stop in data_ranges(reader):
                done += sum(len(data) for _, data in _pieces(reader, start, stop))
    return done


def _pieces(reader: FileIO, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(position, bytes) of a range; OSError EIO when the file ends before it does."""
    while start < stop:
        reader.seek(start)
        data = reader.read(min(PIECE_BYTES, stop - start))
        if not data:
            raise OSError(errno.EIO, "a file ended while it was read")
        yield start, data
        start += len(data)
