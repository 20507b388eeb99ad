"""repair, scrub, node replace and fsck --repair on the command line (faults 11, 29, 57)."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest

from efs.fs import FileSystem
from efs.osio import SystemIo
from efs.replace import prepare_node
from tests.support.cli import run, run_process
from tests.support.laidstore import LaidStore, flip, lay_store, make_blocks

pytestmark = pytest.mark.usefixtures("patient")

BLOCKS = make_blocks(seed=3, count=12)


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), BLOCKS)


def contents(store: LaidStore) -> dict[str, bytes]:
    """All files that a command could change."""
    return {str(path): path.read_bytes() for path in Path(store.root).rglob("*")
            if path.is_file() and path.name not in ("lock.mdb", "lock")}


# -- fsck ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("words", [("--repair",), ("--yes",), ("--deep", "--repair"), ("--deep",), ()])
def test_fsck_changes_nothing_unless_asked_twice(store: LaidStore, words: tuple[str, ...]) -> None:
    """Fault 57."""
    store.edit_slab(4, store.slot_offset(3), flip)
    store.drop(5, 7)
    before = contents(store)
    shown = run("fsck", *words, store=store.root)
    assert shown.code == (2 if {"--repair", "--yes"} & set(words) else 4)
    if shown.code == 2:
        assert "both --repair and --yes" in shown.error_line
    assert contents(store) == before


def test_fsck_repairs_and_a_second_run_is_a_no_op(store: LaidStore) -> None:
    store.edit_slab(4, store.slot_offset(3), flip)
    store.drop(5, 7)
    shown = run("fsck", "--deep", "--repair", "--yes", "--json", store=store.root)
    document = shown.document()
    assert shown.code == 1
    assert {finding["kind"] for finding in document["findings"]} == {"bad_checksum", "at_risk_block"}
    assert document["mended"]["rebuilt"] == 2
    assert document["left"] == []
    assert (document["clean"], document["clean_now"]) == (False, True)
    before = contents(store)
    again = run("fsck", "--deep", "--repair", "--yes", store=store.root)
    assert again.code == 0
    assert "found    nothing" in again.out
    assert contents(store) == before


def test_fsck_says_what_is_left(store: LaidStore) -> None:
    store.drop(5, 7)
    shutil.rmtree(store.node_path(2))
    shown = run("fsck", "--repair", "--yes", store=store.root)
    assert shown.code == 4
    assert shown.out.count("node_absent") == 4, "once in each of two lists and sums"
    assert "1 shards rebuilt" in shown.out


def test_fsck_with_repair_in_pieces(store: LaidStore) -> None:
    """A check that stops early repairs what it has found, and says where to go on."""
    store.drop(5, 7)
    shown = run("fsck", "--repair", "--yes", "--max-duration", "60", "--json", store=store.root)
    assert (shown.code, shown.document()["sums_now"]["resume"]) == (1, None)


def test_repairing_beside_an_owner_is_refused_with_its_pid(store: LaidStore) -> None:
    store.drop(5, 7)

    async def beside() -> None:
        filesystem = await FileSystem.open(store.root, maintain=False)
        try:
            for words in (("fsck", "--repair", "--yes"), ("repair",), ("scrub",), ("node", "replace", "5", "--yes")):
                shown = await asyncio.to_thread(run_process, *words, store=store.root)
                assert shown.code == 8, words
                assert str(os.getpid()) in shown.error_line
        finally:
            await filesystem.close()

    asyncio.run(beside())


# -- repair and scrub ------------------------------------------------------------------------------------------------


def test_repair_gives_back_what_is_missing(store: LaidStore) -> None:
    for block in range(5):
        store.drop(block, block)
    shown = run("repair", "--json", store=store.root)
    document = shown.document()
    assert shown.code == 0
    assert (document["found"], document["rebuilt"], document["resume"], document["syncing"]) == (5, 5, None, [])
    assert run("fsck", "--deep", store=store.root).code == 0
    again = run("repair", store=store.root)
    assert again.code == 0
    assert "repaired   0 shards of 0 blocks" in again.out


def test_repair_says_what_it_cannot_repair(store: LaidStore) -> None:
    for node in (1, 2):
        store.edit_slab(node, store.slot_offset(4), flip)
    store.drop(3, 4)
    shown = run("repair", store=store.root)
    assert shown.code == 4
    assert "1 blocks damaged beyond repair" in shown.out


def test_repair_without_a_node_says_so_and_is_not_done(store: LaidStore, tmp_path: Path) -> None:
    store.drop(3, 4)
    os.rename(store.node_path(5), tmp_path / "away")
    shown = run("repair", "--json", store=store.root)
    document = shown.document()
    assert shown.code == 1
    assert (document["rebuilt"], document["missing"]) == (1, [5])
    again = run("repair", store=store.root)
    assert again.code == 1
    assert "nodes 5 that are away" in again.out


def test_a_repair_that_was_stopped_is_not_done(store: LaidStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.repair.SWEEP_PAGE_RECORDS", 2)
    shown = run("repair", "--max-duration", "0.000001", "--json", store=store.root)
    assert shown.code == 1
    assert run("repair", "--resume", shown.document()["resume"], store=store.root).code == 0


def test_scrub_without_a_node_says_so_and_is_not_content(store: LaidStore, tmp_path: Path) -> None:
    os.rename(store.node_path(5), tmp_path / "away")
    shown = run("scrub", store=store.root)
    assert shown.code == 1
    assert "nodes 5, which were not looked at" in shown.out


def test_a_wrong_resume_point_is_refused(store: LaidStore) -> None:
    assert run("repair", "--resume", "abc", store=store.root).code == 2
    assert run("repair", "--max-duration", "-1", store=store.root).code == 2
    assert run("scrub", "--max-duration", "0", store=store.root).code == 2
    assert "1048576" in run("scrub", "--rate", "10kB", store=store.root).error_line


def test_scrub_finds_mends_and_is_then_content(store: LaidStore) -> None:
    """Fault 11."""
    store.edit_slab(4, store.slot_offset(3), flip)
    shown = run("scrub", "--json", store=store.root)
    document = shown.document()
    assert shown.code == 1
    assert (document["records"], document["unsound"], document["rebuilt"], document["finished"]) == (144, 1, 1, True)
    assert run("fsck", "--deep", store=store.root).code == 0
    assert run("scrub", "--rate", "100MB", store=store.root).code == 0


def test_a_scrub_that_was_stopped_goes_on(store: LaidStore) -> None:
    shown = run("scrub", "--max-duration", "0.000001", "--json", store=store.root)
    first = shown.document()
    assert (shown.code, first["finished"]) == (1, False)
    assert first["cursor"] != {"node": 0, "after": None}
    second = run("scrub", "--json", store=store.root).document()
    assert second["finished"]
    assert first["records"] + second["records"] == 144
    assert run("scrub", "--from-start", "--json", store=store.root).document()["records"] == 144


def test_damage_beyond_mending_leaves_exit_code_4(store: LaidStore) -> None:
    for node in (1, 2, 3):
        store.edit_slab(node, store.slot_offset(4), flip)
    shown = run("scrub", store=store.root)
    assert shown.code == 4
    assert "3 that were not sound" in shown.out


# -- node replace and status -----------------------------------------------------------------------------------------


def test_a_node_is_replaced_only_with_yes(store: LaidStore) -> None:
    """Fault 57."""
    shutil.rmtree(store.node_path(7))
    shown = run("node", "replace", "7", store=store.root)
    assert shown.code == 2
    assert "--yes" in shown.error_line
    assert not os.path.exists(store.node_path(7))


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_node_is_replaced_and_filled(store: LaidStore, tmp_path: Path, elsewhere: bool) -> None:
    """Fault 29."""
    shutil.rmtree(store.node_path(7))
    words = ("--path", str(tmp_path / "new")) if elsewhere else ()
    shown = run("node", "replace", "7", "--yes", "--json", *words, store=store.root)
    document = shown.document()
    assert shown.code == 0
    assert (document["rebuilt"], document["complete"], document["resumed"]) == (12, True, False)
    assert document["path"] == (str(tmp_path / "new") if elsewhere else store.node_path(7))
    assert run("fsck", "--deep", store=store.root).code == 0
    again = run("node", "replace", "7", "--yes", *words, store=store.root)
    assert again.code == 2
    assert "in use" in again.error_line


def test_a_node_that_does_not_exist_is_named(store: LaidStore) -> None:
    assert "12" in run("node", "replace", "12", "--yes", store=store.root).error_line
    assert run("node", "replace", "x", "--yes", store=store.root).code == 2
    assert run("node", store=store.root).code == 2


def test_status_shows_a_node_that_is_not_up_to_date(store: LaidStore) -> None:
    shutil.rmtree(store.node_path(7))
    prepare_node(SystemIo(), store.root, 7)
    states = [node["state"] for node in run("status", "--json", store=store.root).document()["nodes"]]
    assert states == ["closed"] * 7 + ["syncing"] + ["closed"] * 4
    assert run("repair", store=store.root).code == 0, "it brings the node up to date first"
    states = [node["state"] for node in run("status", "--json", store=store.root).document()["nodes"]]
    assert states == ["closed"] * 12
    assert run("fsck", "--deep", store=store.root).code == 0
