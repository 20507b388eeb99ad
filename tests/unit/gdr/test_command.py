"""`kvstore engine demo`, the demonstration itself left out."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from gdr import cli
from tests.support.cli import run


@pytest.mark.parametrize(
    "words", [("--store", "/a/store", "engine", "demo"), ("engine", "demo", "--store", "/a/store")])
def test_a_store_may_be_named_before_and_behind_the_command(
        words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str | None] = []

    class Report:
        exit_code = 0

        def document(self) -> dict[str, int]:
            return {}

    def demo(*, store: str | None, **_: Any) -> Report:
        asked.append(store)
        return Report()

    module = ModuleType("gdr.demo")
    module.__dict__["run"] = demo
    monkeypatch.setitem(sys.modules, "gdr.demo", module)
    monkeypatch.setattr(cli, "require_extras", lambda: None)
    assert run("--json", *words).code == 0
    assert asked == ["/a/store"]
