"""The outcome of a demonstration on a terminal, in a pipe and as JSON."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from tests.demo.records import report, step

WRONG = ("corrupt shards: 1, must be 2",)


def shown(what: object, terminal: bool, width: int = 120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, force_terminal=terminal, color_system=None, highlight=False).print(what)
    return out.getvalue()


def test_one_wrong_step_makes_the_whole_wrong() -> None:
    assert report(step(), step()).exit_code == 0
    failed = report(step(), step(differences=WRONG))
    assert not failed.ok
    assert failed.exit_code == 1
    assert failed.document()["ok"] is False
    assert failed.document()["steps"][1]["differences"] == list(WRONG)


def test_a_demonstration_without_steps_is_not_a_success() -> None:
    assert report().exit_code == 1


@pytest.mark.parametrize("terminal", [True, False])
def test_a_wrong_step_is_named_with_what_is_wrong(terminal: bool) -> None:
    text = shown(report(step("turn 2"), step("2 gone", WRONG)).table(), terminal)
    assert "2 gone: corrupt shards: 1, must be 2" in text
    assert "WRONG" in text
    assert "1 of 2 steps came out wrong" in text
    assert "exactly as it must" not in text


def test_a_pipe_gets_plain_text() -> None:
    text = shown(report(step()).table(), terminal=False)
    assert not set(text) & set("╭╮╰╯│─┃━")
    assert "every step came out exactly as it must" in text


def test_a_terminal_gets_a_frame() -> None:
    assert "╭" in shown(report(step()).table(), terminal=True)


def test_text_of_the_model_is_not_taken_for_markup() -> None:
    assert "What is [it]?" in shown(report(step()).table(), terminal=False)


def test_the_row_has_the_numbers_of_the_step() -> None:
    text = shown(report(step("turn 2: resumed")).table(), terminal=False, width=160)
    row = next(line for line in text.splitlines() if line.startswith("turn 2: resumed"))
    assert row.split()[3:] == ["3", "0", "0", "16/400", "0.0", "0.10", "0.2", "2.0", "1.7", "same", "✓"]


@pytest.mark.parametrize("width", [80, 100, 160])
@pytest.mark.parametrize("terminal", [True, False])
def test_every_row_fits_the_width_without_being_cut(width: int, terminal: bool) -> None:
    text = shown(report(step("nodes 03, 06, 10 deleted")).table(), terminal, width)
    assert "nodes 03, 06, 10 deleted" in text
    assert "✓" in text
    assert "…" not in text.split("a process each")[1]
    assert max(map(len, text.splitlines())) <= width


def test_the_document_is_json_and_says_what_was_expected_and_found() -> None:
    document = json.loads(json.dumps(report(step()).document()))
    assert document["block"] == {"bytes": 1000, "tokens": 128, "segments": 2}
    only = document["steps"][0]
    assert only["expected"]["blocks"] == only["found"]["get"]["blocks"] == 3
    assert only["found"]["get"]["ok"] == 3
    assert only["found"]["keys"] == 3
    assert only["saved_seconds"] == 1.7
