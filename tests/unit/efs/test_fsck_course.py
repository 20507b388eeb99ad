"""The course of a check: beside an owner, stopped and gone on, refused."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from efs.errors import InvalidArgument, StoreNotFound
from efs.findings import Finding, Kind
from efs.fsck import RECHECK_MS, RECHECK_PAUSE_MS, Options
from efs.limits import MIB
from efs.nodedir import OwnerLock
from efs.osio import SystemIo
from efs.storeview import LOCKS_FILE, StoreView
from tests.support.clock import FakeClock
from tests.support.fsckrun import check, of_block, record
from tests.support.laidstore import LONG_AGO_MS, LaidStore, lay_store, make_blocks

BLOCKS = make_blocks(seed=7, count=600)
"""More than one extent and more than half a page of the merge; laid down anew for each test."""


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), BLOCKS)


# -- Beside an owner ------------------------------------------------------------------------------------------------


@pytest.fixture
def owned(store: LaidStore) -> Iterator[LaidStore]:
    lock = OwnerLock.take(SystemIo(), store.root)
    yield store
    lock.release()


def test_beside_an_owner_a_suspicion_that_goes_away_is_not_reported(owned: LaidStore) -> None:
    """The slot is between its table entry and its index entry when it is first looked at."""
    pauses: list[float] = []
    owned.clear_entry(4, 10)

    def finish_the_put(seconds: float) -> None:
        pauses.append(seconds)
        owned.write_entry(4, owned.location(10), BLOCKS[10].headers[4], owned.generation(10))

    found, sums = check(owned, pause=finish_the_put)
    assert found == []
    assert sums.beside_owner
    assert pauses == [RECHECK_PAUSE_MS / 1000]


def test_an_owner_whose_lock_slips_through_a_look_at_all_locks_is_still_an_owner(
    owned: LaidStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's list is read in pages, and others that lock and unlock meanwhile move what is still to come."""
    looks: list[str] = []
    read_text = Path.read_text

    def slipping(path: Path, *args: Any, **options: Any) -> str:
        text = read_text(path, *args, **options)
        if str(path) != LOCKS_FILE:
            return text
        looks.append(text)
        return text if len(looks) % 3 == 0 else ""

    monkeypatch.setattr(Path, "read_text", slipping)
    with StoreView.open(owned.root) as view:
        looks.clear()
        assert view.owner() == os.getpid()
        assert len(looks) == 3
        monkeypatch.setattr("efs.storeview.LOCKS_FILE", "/nowhere")
        assert view.owner() is None


def test_beside_an_owner_damage_that_stays_is_reported_after_the_last_look(owned: LaidStore) -> None:
    pauses: list[float] = []
    owned.clear_entry(4, 10)
    found, _ = check(owned, pause=pauses.append)
    assert found == [record(Kind.INDEX_WITHOUT_DATA, owned, 4, 10)]
    assert len(pauses) == RECHECK_MS // RECHECK_PAUSE_MS


def test_beside_an_owner_a_stripe_that_is_still_being_written_is_not_judged(owned: LaidStore) -> None:
    for node in range(5):
        owned.drop(node, 10)
    clock = FakeClock(wall=LONG_AGO_MS / 1000 + 60)
    found, sums = check(owned, clock=clock, pause=lambda seconds: None)
    assert found == []
    assert sums.young == 600
    clock = FakeClock(wall=LONG_AGO_MS / 1000 + 600)
    assert check(owned, clock=clock, pause=lambda seconds: None)[0] == [of_block(Kind.HOLLOW_STRIPE, owned, 10)]


def test_beside_an_owner_sums_are_not_compared(owned: LaidStore) -> None:
    Path(owned.node_path(2), "ballast").write_bytes(bytes(7 * MIB))
    assert check(owned)[0] == []


# -- Stopping and going on ------------------------------------------------------------------------------------------


class TickingClock(FakeClock):
    """Each reading takes a second."""

    def monotonic(self) -> float:
        self.advance(1.0)
        return super().monotonic()


def test_a_run_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    store = lay_store(str(tmp_path / "store"), make_blocks(seed=3, count=2_500))
    for block in range(0, 2_500, 100):
        store.drop(4, block)
    whole, sums = check(store)
    assert len(whole) == 25
    assert sums.complete
    parts: list[Finding] = []
    resume, rounds = None, 0
    while rounds == 0 or resume is not None:
        found, sums = check(store, Options(max_duration_s=0.5, resume=resume), clock=TickingClock())
        parts += found
        assert not sums.complete
        resume, rounds = sums.resume, rounds + 1
    assert rounds == 4
    assert parts == whole


@pytest.mark.parametrize("resume", ["", "xyz", "00", "g" * 64])
def test_a_wrong_resume_point_is_refused_with_its_text(resume: str) -> None:
    with pytest.raises(InvalidArgument, match=repr(resume)):
        Options(resume=resume)


@pytest.mark.parametrize("duration", [0.0, -1.0, float("nan")])
def test_a_wrong_duration_is_refused(duration: float) -> None:
    with pytest.raises(InvalidArgument, match="max duration"):
        Options(max_duration_s=duration)


def test_a_directory_that_is_no_store_cannot_be_checked(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match=str(tmp_path)), StoreView.open(str(tmp_path)):
        pass
