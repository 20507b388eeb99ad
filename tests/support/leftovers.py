"""What a program that was ended has left running."""

from __future__ import annotations

import os
from pathlib import Path


def processes_naming(directory: Path) -> list[int]:
    """The processes in whose command line a directory is named."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue  # It has ended.
        if bytes(directory) in words:
            found.append(int(pid))
    return found
