"""Where crash images are made."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

MEMORY = Path("/dev/shm")


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory in memory where there is one: thousands of small stores are made, synced and removed in it."""
    path = Path(tempfile.mkdtemp(prefix="crash-images-", dir=MEMORY if os.access(MEMORY, os.W_OK) else None))
    yield path
    shutil.rmtree(path)
