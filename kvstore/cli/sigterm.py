"""SIGTERM for commands that have something to put away before they end."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs inside as an error would, with exit code 143; a second one ends the process at once."""
    before = signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(number: int, frame: object) -> None:
    signal.signal(number, signal.SIG_DFL)
    raise SystemExit(128 + number)
