"""The three standard streams of the process, as whoever started it left them: any may be closed, and standard output
may know fewer characters than there are.

The number of a closed stream would be given to the next file that is opened, a slab say, and what is meant for the
stream would be written there; so it is held by /dev/null.
"""

from __future__ import annotations

import io
import os
import sys

from efs.errors import EfsError


class OutputClosed(EfsError):
    """There is no standard output, so the command has nowhere to put its results."""


def keep_streams() -> None:
    """Hold the numbers of closed streams. What is meant for a closed standard error is lost. A character that standard
    output does not have is written as an escape."""
    while (held := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(held, True)
    os.close(held)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def require_output() -> None:
    """OutputClosed without a standard output."""
    if sys.stdout is None:
        raise OutputClosed("standard output is closed")


def knows_unicode() -> bool:
    """Whether standard output takes every character as it is."""
    return (sys.stdout.encoding or "").lower().replace("-", "").replace("_", "") == "utf8"
