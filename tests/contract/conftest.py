"""A fresh node of each kind, on a clock that the test moves."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from efs.contract import Node
from tests.contract.factories import FACTORIES
from tests.support.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture(params=FACTORIES)
async def node(request: pytest.FixtureRequest, tmp_path: Path, clock: FakeClock) -> AsyncIterator[Node]:
    async with FACTORIES[request.param](tmp_path, clock) as made:
        yield made
