"""From an exception to one line and an exit code.

A person who typed a command sees what is wrong and with what, never a traceback. What the filesystem and the store
raise on purpose carries its own exit code; a file that is not there is the request's fault (2), any other refusal of
the operating system is not (8); everything else is a defect of this program and says so (8).
"""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading

from typer import Abort, TyperException

from efs.errors import EfsError

NOT_ALL = 1
REPAIRED = 1
"""Of fsck and scrub: damage was found and mended."""
WRONG_REQUEST = 2
DAMAGE = 4
COULD_NOT_RUN = 8
INTERRUPTED = 130
BROKEN_PIPE = 141

_WRONG_PATH = frozenset({errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENAMETOOLONG, errno.EEXIST})


class UsageMistake(EfsError):
    """The command line asks for something that does not exist or cannot be meant; the message names it."""

    exit_code = WRONG_REQUEST


class ChangedMeanwhile(EfsError):
    """What a command looks at was changed while it did. Run it again."""

    retryable = True


def one_line(text: str) -> str:
    """The text without line breaks, tabs and other control characters, so that it stays one line on any terminal."""
    return " ".join("".join(c if c.isprintable() else " " for c in text).split())


def describe(error: BaseException) -> tuple[str, int]:
    """The line for a person and the exit code of an error."""
    if isinstance(error, EfsError):
        return one_line(str(error)), error.exit_code
    if isinstance(error, TyperException):
        context = getattr(error, "ctx", None)
        hint = f" (see '{context.command_path} --help')" if context is not None else ""
        return one_line(error.format_message() + hint), error.exit_code
    if isinstance(error, (KeyboardInterrupt, Abort)):
        return "interrupted", INTERRUPTED
    if isinstance(error, MemoryError):
        return "out of memory", COULD_NOT_RUN
    if isinstance(error, OSError):
        return _describe_os_error(error)
    kind = type(error).__name__
    return one_line(
        f"internal error, please report it: {kind}: {error} (kvstore --traceback … shows where)"
    ), COULD_NOT_RUN


def _describe_os_error(error: OSError) -> tuple[str, int]:
    reason = error.strerror or str(error) or type(error).__name__
    code = WRONG_REQUEST if error.errno in _WRONG_PATH and error.filename is not None else COULD_NOT_RUN
    if error.filename is None:
        return one_line(reason), code
    name = os.fsdecode(error.filename) if isinstance(error.filename, (str, bytes, os.PathLike)) else error.filename
    return one_line(f"{name}: {reason}"), code


def report(error: BaseException) -> int:
    """Write the line to standard error and return the exit code."""
    line, code = describe(error)
    print(f"kvstore: {line}", file=sys.stderr)
    return code


class OneLine(logging.Formatter):
    """A log record as one line; a traceback that hangs on it is reduced to its last line."""

    def format(self, record: logging.LogRecord) -> str:
        line = f"kvstore: {record.levelname.lower()}: {record.getMessage()}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f": {type(record.exc_info[1]).__name__}: {record.exc_info[1]}"
        return one_line(line)


def keep_tracebacks_away() -> None:
    """For the process entry: log records, and threads that die, end as one line on standard error too."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLine())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    threading.excepthook = _thread_died
    sys.unraisablehook = _unraisable


def _thread_died(args: threading.ExceptHookArgs) -> None:
    name = args.thread.name if args.thread is not None else "a thread"
    logging.getLogger("kvstore").error("%s ended: %s: %s", name, args.exc_type.__name__, args.exc_value)


def _unraisable(args: sys.UnraisableHookArgs) -> None:
    logging.getLogger("kvstore").warning("ignored: %s: %s", args.exc_type.__name__, args.exc_value)
