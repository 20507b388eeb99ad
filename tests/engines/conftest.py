"""A store for the engines of a test, models for those of a session, and a budget of time for all of them.

Engines take half a minute to start, and minutes on a busy machine. Where BUDGET is set to a number of seconds, a test
that may not end within it is skipped, with a line that says so, rather than ended half way.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from kvstore.localset import stop
from tests.support.servers import short_directory

BUDGET: Final = "ENGINE_TESTS_BUDGET_S"
ONE_TEST_S: Final = 420
"""A test of two or three engines on two busy cores."""
BEGUN: Final = time.monotonic()


@pytest.fixture
def root() -> Iterator[Path]:
    budget_s = os.environ.get(BUDGET)
    if budget_s is not None and time.monotonic() - BEGUN + ONE_TEST_S > float(budget_s):
        pytest.skip(f"the budget of {budget_s} s for tests with engines is nearly spent")
    with short_directory() as path:
        yield path
        if (path / "kv" / "cluster.toml").exists():
            stop(str(path / "kv"))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")
