"""One torch thread, tests of a CUDA device only where there is one, and none at all without torch and transformers."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

collect_ignore_glob = [] if find_spec("torch") and find_spec("transformers") else ["test_*.py"]


@pytest.fixture(autouse=True, scope="package")
def one_torch_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_runtest_setup(item: pytest.Item) -> None:
    import torch

    if item.get_closest_marker("cuda") is not None and not torch.cuda.is_available():
        pytest.skip("there is no CUDA device")
