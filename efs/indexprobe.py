"""Which indexes can be read to their end, found out in a process of its own.

LMDB follows page numbers inside its memory map without asking whether the file has such a page, so one flipped bit
there can end the reading process by SIGBUS. A checker that dies of what it should report is no use: before
`efs/fsck.py` reads an index, a child walks all of it. What the child survives, the checker survives, because it
touches no other pages.

The child writes a line when it begins an index and one when it is through; where it dies, the index that it had begun
last is the culprit, and another child goes on behind it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from efs.errors import EfsError
from efs.index import Index
from efs.osio import SystemIo


def unreadable_indexes(paths: Sequence[str]) -> dict[int, str]:
    """Why an index cannot be read to its end, by its place in `paths`; those that can are not in it."""
    found: dict[int, str] = {}
    start = 0
    while start < len(paths):
        words = [sys.executable, "-c", "from efs.indexprobe import walk; walk()", *paths[start:]]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        child = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment, check=False)
        lines = child.stdout.decode("utf-8", "replace").splitlines()
        through = [line for line in lines if line != "begin"]
        found |= {start + at: why for at, why in enumerate(through) if why != "ok"}
        start += len(through)
        if start < len(paths):
            found[start] = f"{paths[start]}: reading it ended a process {_how(child.returncode)}"
            start += 1
    return found


def walk() -> None:
    """The child: read every entry of every index that the command line names."""
    for path in sys.argv[1:]:
        sys.stdout.write("begin\n")
        sys.stdout.flush()
        try:
            index = Index.open_read_only(SystemIo(), path)
            for _ in index.scan():
                pass
            index.close()
            line = "ok"
        except EfsError as error:
            line = " ".join(str(error).split())
        sys.stdout.write(line + "\n")
        sys.stdout.flush()


def _how(code: int) -> str:
    if code >= 0:
        return f"with exit code {code}"
    try:
        return f"by {signal.Signals(-code).name}"
    except ValueError:
        return f"by signal {-code}"
