"""`kvstore replay`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvstore.cli import replay_cmd
from tests.support.cli import ROOT, environment, run

RATIOS = (
    "token_hit_ratio",
    "block_hit_ratio",
    "infinite_token_hit_ratio",
    "lru_token_hit_ratio",
    "belady_token_hit_ratio",
)
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Twelve prompts of 10 blocks in turn, asked for twice each."""
    path = tmp_path / "turns.jsonl"
    with path.open("w") as lines:
        for number in [*range(12), *range(12)]:
            ids = [100 * number + block for block in range(10)]
            lines.write(json.dumps({"timestamp": 1000 * number, "input_length": 1280, "hash_ids": ids}) + "\n")
    return path


def places(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if path.name.startswith("kvstore-replay-")]


def test_one_capacity_is_one_json_object_with_all_ratios(trace: Path, tmp_path: Path) -> None:
    shown = run("replay", str(trace), "--capacity", "100%", "--directory", str(tmp_path), "--json")
    assert shown.code == 0
    document = json.loads(shown.out)
    assert [document[name] for name in RATIOS] == [0.5] * 5
    assert (document["capacity"], document["capacity_blocks"], document["unique_blocks"]) == ("100%", 120, 120)
    assert (document["trace"], document["requests"], document["acked"]) == ("turns", 24, 120)
    assert places(tmp_path) == []


def test_several_capacities_are_an_array_and_only_the_first_requests_can_be_taken(trace: Path) -> None:
    shown = run("replay", str(trace), "--capacity", "100%", "--capacity", "32MiB", "--requests", "13", "--json",
                "--block-bytes", "10KiB", "--stretch", "3")
    assert shown.code == 2
    assert "give them with a size only" in shown.err
    shown = run("replay", str(trace), "--capacity", "100%", "--capacity", "32MiB", "--requests", "13", "--json",
                "--stretch", "3")
    first, second = json.loads(shown.out)
    assert first["token_hit_ratio"] == second["token_hit_ratio"] == pytest.approx(1 / 13)
    assert (first["stretch"], second["capacity"], second["capacity_bytes"]) == (3.0, "32MiB", 32 << 20)
    assert second["capacity_blocks"] > 1_000


def test_the_table_names_store_and_models_and_the_plot_is_a_picture(trace: Path, tmp_path: Path) -> None:
    picture = tmp_path / "picture"
    (tmp_path / "replay.png").symlink_to(picture)
    shown = run("replay", str(trace), "--requests", "14", "--capacity", "100%", "--plot", str(tmp_path / "replay.png"))
    assert shown.code == 0, shown.err
    assert "turns: 14 requests, 120 unique blocks in 140 asked for" in shown.out
    for heading in ("this store", "exact LRU", "Belady", "infinite"):
        assert heading in shown.out
    assert shown.out.split("\n")[2].split()[-1] == "0.143"
    assert picture.read_bytes().startswith(PNG)


def test_strict_tells_a_store_that_is_off_exact_lru(trace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ("replay", str(trace), "--requests", "2", "--capacity", "100%")
    assert run(*words, "--strict").code == 0
    monkeypatch.setattr(replay_cmd, "POINTS_ALLOWED", -1.0)
    assert run(*words).code == 0
    assert run(*words, "--strict").code == 1


def test_a_plot_without_matplotlib_says_what_to_install_before_anything_runs(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    shown = run("replay", str(trace), "--plot", str(tmp_path / "replay.png"))
    assert shown.code == 2
    assert shown.out == ""
    assert "--plot needs matplotlib, which is not installed" in shown.err
    assert "in a clone, pip install '.[plot]'" in shown.err


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("nothing.jsonl",), "nothing.jsonl: No such file"),
        (("TRACE", "--capacity", "0%"), "capacity is 0%"),
        (("TRACE", "--capacity", "lots"), "capacity is 'lots'"),
        (("TRACE", "--plot", "replay.jpg"), "--plot replay.jpg: must end in .png"),
        (("TRACE", "--plot", "no/such/replay.png"), "no/such is not a directory"),
        (("TRACE", "--directory", "no/such"), "no/such: not a directory"),
        (("TRACE", "--requests", "0"), "--requests"),
        (("TRACE", "--stretch", "0"), "stretch is 0"),
        (("TRACE", "--capacity", "32MiB", "--block-bytes", "0"), "--block-bytes is '0'"),
    ],
)
def test_a_wrong_request_is_one_line_that_names_it(trace: Path, words: tuple[str, ...], named: str) -> None:
    shown = run("replay", *(str(trace) if word == "TRACE" else word for word in words))
    assert shown.code == 2
    assert named in shown.err
    assert len(shown.err.strip().split("\n")) == 1


def test_a_plot_that_names_a_directory_is_refused_before_anything_runs(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "d.png").mkdir()
    shown = run("replay", str(trace), "--plot", str(tmp_path / "d.png"))
    assert (shown.code, shown.out) == (2, "")
    assert shown.error_line == f"{tmp_path / 'd.png'}: Is a directory"


def test_the_script_of_a_checkout_is_the_same_command(trace: Path) -> None:
    script = str(ROOT / "tools" / "replay_trace.py")
    words = [sys.executable, script, str(trace), "--requests", "2", "--capacity", "100%", "--json"]
    done = subprocess.run(words, env=environment(), capture_output=True, timeout=60, check=True)
    assert json.loads(done.stdout)["requests"] == 2
