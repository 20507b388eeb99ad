"""`kvstore demo` hands its options on and shows what came out; the demonstration itself has tests of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import kvstore.demo
from kvstore.demo import MissingExtra
from tests.support.cli import run


@dataclass
class FakeReport:
    exit_code: int = 0

    def document(self) -> dict[str, Any]:
        return {"ok": self.exit_code == 0}

    def table(self) -> str:
        return "the table"


@dataclass
class FakeRun:
    """Stands for `kvstore.demo.run`: remembers what it was asked."""

    report: FakeReport = field(default_factory=FakeReport)
    asked: list[dict[str, Any]] = field(default_factory=list)

    def __call__(self, *, remark: Callable[[str], None], **options: Any) -> FakeReport:
        self.asked.append(options)
        remark("on the way")
        return self.report


@pytest.fixture
def demonstration(monkeypatch: pytest.MonkeyPatch) -> FakeRun:
    fake = FakeRun()
    monkeypatch.setattr(kvstore.demo, "run", fake)
    return fake


def test_options_reach_the_demonstration(demonstration: FakeRun, tmp_path: Path) -> None:
    assert run("demo", store="/an/environment/store").code == 0
    assert run("demo", "--workdir", str(tmp_path), "--keep", "--turns", "2", "--store", str(tmp_path)).code == 0
    assert run("--store", f"file://{tmp_path}", "demo").code == 0
    nothing = {"workdir": None, "keep": False, "store": None, "turns": 3}
    assert demonstration.asked == [
        nothing,
        {"workdir": str(tmp_path), "keep": True, "store": str(tmp_path), "turns": 2},
        {**nothing, "store": str(tmp_path)},
    ]


def test_the_result_is_a_table_or_json_and_remarks_go_to_standard_error(demonstration: FakeRun) -> None:
    text = run("demo")
    assert (text.out, text.err) == ("the table\n", "on the way\n")
    document = run("demo", "--json")
    assert (document.document(), document.err) == ({"ok": True}, "")


def test_a_mismatch_is_the_demonstrations_own_exit_code(demonstration: FakeRun) -> None:
    demonstration.report.exit_code = 4
    assert run("demo").code == 4


def test_missing_packages_are_one_line_that_says_how_to_get_them(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(**options: Any) -> None:
        raise MissingExtra(["transformers"])

    monkeypatch.setattr(kvstore.demo, "run", missing)
    done = run("demo")
    assert done.code == 2
    assert "pip install" in done.error_line


def test_a_store_of_another_kind_is_refused(demonstration: FakeRun) -> None:
    done = run("demo", "--store", "etcd://127.0.0.1/x")
    assert done.code == 2
    assert "etcd" in done.error_line
    assert demonstration.asked == []
