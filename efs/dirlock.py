"""Nobody else changes a file of a directory meanwhile: a lock on the directory itself, so that no lock file is left."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from efs.errors import EfsError
from efs.osio import Io


@contextmanager
def locked_directory(io: Io, directory: str, failed: Callable[[OSError], EfsError], busy: EfsError) -> Iterator[None]:
    """`busy` is raised when somebody else has the lock, `failed(error)` when it cannot be had."""
    try:
        fd = io.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise failed(error) from error
    try:
        try:
            io.lock(fd)
        except BlockingIOError as error:
            raise busy from error
        except OSError as error:
            raise failed(error) from error
        try:
            yield
        finally:
            io.unlock(fd)
    finally:
        io.close(fd)
