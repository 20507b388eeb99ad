"""The file that a command writes where somebody asks for it.

A regular file, or none, is replaced when the new one is complete: written beside it, then renamed. Links are followed.
The old file's owner and mode are kept. What is no regular file (a device, a FIFO) is opened and written to.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import BinaryIO, Final

PRIVATE: Final = 0o600
"""Mode of a new file that holds KV: what a prompt was can be read from it."""
BY_UMASK: Final = 0o666


@contextmanager
def output_file(name: str, mode: int) -> Iterator[BinaryIO]:
    """A file to write, complete under its name at the end; after an error nothing is changed there.

    mode: of a file that is new, before the umask. OSError names what cannot be written, before anything is.
    """
    old = require_file(name)
    if old is not None and not stat.S_ISREG(old.st_mode):
        with open(name, "wb", opener=_as_it_is) as special:
            yield special
        return
    target = os.path.realpath(name)
    partial = f"{target}.{os.getpid()}.partial"
    fd = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as made:
            if old is not None:
                _as_before(fd, old)
            yield made
        os.replace(partial, target)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(partial)
        raise


def require_file(name: str) -> os.stat_result | None:
    """What stands at the name, behind links; None when nothing does. IsADirectoryError for a directory."""
    try:
        found = os.stat(name)
    except FileNotFoundError:
        if not os.path.basename(name):
            raise
        return None
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    return found


def _as_it_is(name: str, flags: int) -> int:
    """Open what exists: nothing is made and nothing cut short."""
    return os.open(name, flags & ~(os.O_CREAT | os.O_TRUNC))


def _as_before(fd: int, old: os.stat_result) -> None:
    """The owner and the mode of the old file; where the owner cannot be kept, nobody else's rights are."""
    mode = stat.S_IMODE(old.st_mode) & 0o777
    try:
        os.fchown(fd, old.st_uid, old.st_gid)
    except OSError:
        mode &= 0o700
    os.fchmod(fd, mode)
