"""The whole demonstration with a very small model: real processes, a real store, real damage."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("gguf")

from efs.clock import SystemClock
from efs.errors import InvalidArgument
from efs.fs import FileSystem
from efs.limits import MIB
from kvstore.demo import conduct
from kvstore.demo.conduct import NOT_OURS, Conductor, DemoFailed, run
from kvstore.demo.messages import PrepareRequest, PrepareResult, RunRequest, RunResult
from kvstore.demo.report import DemoReport
from kvstore.demo.steps import Expected
from tests.demo.smallgguf import small_llama, write_gguf

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "small.gguf"
    write_gguf(path, small_llama())
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


def conductor(place: Path, gguf_file: Path, cache: Path, salt: str | None = None) -> Conductor:
    return Conductor(place, gguf_file, cache, print, SystemClock(), salt, threads=1)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_conversation_survives_what_ten_of_twelve_shards_can_survive(
    tmp_path: Path, gguf_file: Path, cache: Path
) -> None:
    report = conductor(tmp_path, gguf_file, cache).conduct(None, 2, None)

    assert [line for step in report.steps for line in step.differences] == []
    assert report.exit_code == 0
    first, second, control, two_gone, flipped, mended, three_gone = report.steps
    blocks = second.found.prompt_tokens // report.block_tokens
    assert first.found.get is None
    assert first.found.put is not None
    assert first.found.put.acked == first.found.prompt_tokens // report.block_tokens > 15
    assert second.found.matched_blocks == first.found.put.acked
    for step in (control, two_gone, flipped, mended):
        assert step.found.get is not None
        assert step.found.get.blocks == blocks
        assert step.found.prefilled_tokens < report.block_tokens
    assert two_gone.found.get is not None
    assert two_gone.found.get.rebuilt > 0
    assert flipped.found.get is not None
    assert flipped.found.get.corrupt == 2
    assert flipped.found.get.rebuilt >= 2  # More where a node was late.
    assert mended.found.get is not None
    assert mended.found.get.corrupt == 0
    assert (flipped.found.mended, mended.found.mended) == (2, 0)
    assert three_gone.found.get is not None
    assert len(three_gone.found.get.ok) == blocks
    assert three_gone.found.prefilled_tokens == three_gone.found.prompt_tokens
    assert control.found.answer != second.found.answer
    same_logits = {step.found.logits for step in report.steps if step is not first and step is not control}
    assert len(same_logits) == 1
    pids = [step.pid for step in report.steps]
    assert len(set(pids)) == len(pids)
    assert os.getpid() not in pids


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_store_of_somebody_else_is_used_but_not_damaged(tmp_path: Path, gguf_file: Path, cache: Path) -> None:
    root = tmp_path / "theirs"
    FileSystem.init(str(root), 512 * MIB)
    place = tmp_path / "place"
    place.mkdir()

    report = conductor(place, gguf_file, cache, "mine").conduct(str(root), 1, None)

    assert [line for step in report.steps for line in step.differences] == []
    assert report.exit_code == 0
    assert report.left_out == NOT_OURS
    assert [step.title.split()[0] for step in report.steps] == ["turn", "control:"]
    assert report.store_bytes is None
    assert sorted(path.name for path in (root / "nodes").iterdir()) == [f"{node:02d}" for node in range(12)]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_worker_that_dies_ends_the_demonstration_with_its_last_line(
    tmp_path: Path, gguf_file: Path, cache: Path
) -> None:
    request = PrepareRequest(str(tmp_path / "absent.gguf"), str(cache))
    with pytest.raises(DemoFailed, match=r"process 1 \(prepare\) ended with 1: .*absent\.gguf") as caught:
        conductor(tmp_path, gguf_file, cache).process("prepare", request, PrepareResult)
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_step_that_comes_out_wrong_is_reported_as_wrong(tmp_path: Path, gguf_file: Path, cache: Path) -> None:
    mine = conductor(tmp_path, gguf_file, cache)
    prepared = mine.process("prepare", PrepareRequest(str(gguf_file), str(cache)), PrepareResult)
    request = RunRequest(
        model=prepared.directory, weights=prepared.weights, threads=1, prompt=list(range(3, 200)), additions=[],
        answer_tokens=4)
    turn = mine.process("converse", request, RunResult).turns[0]
    assert turn.prefilled_tokens == 197
    assert len(turn.answer) == 4

    mine.step("right", request, Expected(0, 0, 0, 197), turn, 1)
    mine.step("too few", request, Expected(0, 0, 0, 196), turn, 1)

    assert [step.differences for step in mine.steps] == [(), ("tokens prefilled: 197, must be 196",)]


def test_a_directory_that_is_not_empty_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("dear")
    with pytest.raises(InvalidArgument, match="is not empty"):
        run(workdir=str(tmp_path))
    assert (tmp_path / "mine").read_text() == "dear"


@pytest.mark.parametrize("turns", [0, 7])
def test_a_number_of_turns_that_has_no_text_is_refused(tmp_path: Path, turns: int) -> None:
    with pytest.raises(InvalidArgument, match=f"turns is {turns}"):
        run(workdir=str(tmp_path / "work"), turns=turns)
    assert not (tmp_path / "work").exists()


@pytest.mark.parametrize("keep", [True, False])
def test_the_working_directory_stays_only_when_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    seen = []

    def conduct_nothing(self: Conductor, store: str | None, turns: int, kept: str | None) -> DemoReport:
        seen.append((store, self.salt, kept))
        (self.place / "work").write_text("done")
        raise DemoFailed("stopped here")

    monkeypatch.setattr(conduct.Conductor, "conduct", conduct_nothing)
    work = tmp_path / "work"
    for store, salted in ((None, False), ("/their/store", True)):
        with pytest.raises(DemoFailed, match="stopped here"):
            run(workdir=str(work / str(salted)), keep=keep, store=store, rng=random.Random(5))
        assert (work / str(salted) / "work").exists() == keep
        assert seen[-1][0] == store
        assert (seen[-1][1] is not None) == salted
        assert (seen[-1][2] is not None) == keep
