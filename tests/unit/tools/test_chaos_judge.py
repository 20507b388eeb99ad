"""Which findings of an fsck beside the damage are true, and what a run as a whole must show."""

from __future__ import annotations

from typing import Any

import pytest

from efs.findings import Kind
from tools.chaosrig.judge import BLOCK_MEMORY_S, CAUSES, DOWN, Window, disturbed, is_true
from tools.chaosrig.plan import KINDS
from tools.chaosrig.report import EVIDENCE, Seen, evidence, leaked_bytes, run_violations


def finding(kind: str, node: int | None = None) -> dict[str, Any]:
    return {"kind": kind, "node": node, "key": None, "digest": None, "location": None, "detail": ""}


def test_a_finding_is_true_while_something_explains_it_and_false_before_and_after() -> None:
    windows = [Window("rot_entry", 3, began=10.0, ended=20.0)]
    assert is_true(finding(Kind.BAD_ENTRY, 3), windows, 15.0, 16.0)
    assert is_true(finding(Kind.BAD_ENTRY, 3), windows, 5.0, 11.0)
    assert not is_true(finding(Kind.BAD_ENTRY, 3), windows, 5.0, 9.0)
    assert not is_true(finding(Kind.BAD_ENTRY, 3), windows, 21.0, 22.0)


def test_a_finding_on_a_node_that_nothing_was_done_to_is_false() -> None:
    assert not is_true(finding(Kind.BAD_ENTRY, 4), [Window("rot_entry", 3, 10.0)], 15.0, 16.0)
    assert is_true(finding(Kind.BAD_ENTRY, 4), [Window(DOWN, -1, 10.0)], 15.0, 16.0)


def test_findings_of_blocks_outlive_their_damage_for_the_grace() -> None:
    windows = [Window("full", 3, began=10.0, ended=20.0)]
    assert is_true(finding(Kind.HOLLOW_STRIPE), windows, 100.0, 101.0)
    assert not is_true(finding(Kind.HOLLOW_STRIPE), windows, 21.0 + BLOCK_MEMORY_S, 22.0 + BLOCK_MEMORY_S)


def test_the_index_entry_of_a_rotten_record_stands_until_the_next_opening() -> None:
    rotten, late = [Window("rot_entry", 3, began=10.0, ended=20.0)], finding(Kind.INDEX_WITHOUT_DATA, 3)
    assert is_true(late, rotten, 400.0, 401.0)
    assert not is_true(finding(Kind.INDEX_WITHOUT_DATA, 4), rotten, 400.0, 401.0)
    assert not is_true(finding(Kind.DATA_WITHOUT_INDEX, 3), rotten, 400.0, 401.0)
    reopened = [*rotten, Window(DOWN, -1, began=5.0, ended=9.0), Window(DOWN, -1, began=100.0, ended=110.0)]
    assert is_true(late, reopened, 60.0, 61.0)
    assert not is_true(late, reopened, 400.0, 401.0)


@pytest.mark.parametrize("kind", [Kind.ACCOUNTING_DRIFT, Kind.OVER_LIMIT, Kind.WRONG_PLACE, Kind.INCONSISTENT_STRIPE])
def test_findings_that_no_damage_can_cause_are_always_false(kind: Kind) -> None:
    windows = [Window(damage, 3, 0.0) for damage in (*KINDS, DOWN)]
    assert not is_true(finding(kind, 3), windows, 1.0, 2.0)


def test_every_finding_that_is_explained_exists_and_so_does_every_cause() -> None:
    assert set(CAUSES) <= {kind.value for kind in Kind}
    assert set().union(*CAUSES.values()) <= {*KINDS, DOWN}


def test_only_what_takes_directories_or_the_owner_away_excuses_an_fsck_that_could_not_run() -> None:
    assert disturbed([Window("swap", 3, 0.0)], 1.0, 2.0)
    assert not disturbed([Window("rot_payload", 3, 0.0)], 1.0, 2.0)
    assert not disturbed([Window("vanish", 3, 0.0, 0.5)], 1.0, 2.0)


# -- The run as a whole


def totals(**changed: int) -> dict[str, int]:
    names = ("hit_blocks", "guarded_hits", "claims_tested", "missed_blocks", "fsck_runs_in_quiet", "evicted_records",
             "cancelled_reads")
    return {**dict.fromkeys(names, 1), "leaked_bytes": 0, **changed}


def test_a_kind_that_never_struck_fails_a_run_of_two_minutes() -> None:
    kinds = [Seen(kind, episodes=1, struck=1) for kind in KINDS]
    assert run_violations(kinds, totals(), True) == []
    kinds[0].struck = 0
    assert run_violations(kinds, totals(), True) == [f"{KINDS[0]} was never injected"]
    kinds[0].episodes = 0
    assert run_violations(kinds, totals(), False) == []


def test_a_kind_that_was_planned_and_never_struck_fails_any_run() -> None:
    kinds = [Seen("kill", episodes=1, struck=1), Seen("eio", episodes=1)]
    assert run_violations(kinds, totals(), False) == ["eio was never injected"]


def test_a_run_without_hits_fails() -> None:
    assert run_violations([Seen("eio", 1, 1)], totals(hit_blocks=0), False) == ["there were no hit blocks"]


def test_a_run_in_which_nothing_was_injected_fails() -> None:
    assert run_violations([Seen(kind) for kind in KINDS], totals(), False) == ["nothing was injected at all"]


def test_damage_that_no_counter_shows_fails_a_run() -> None:
    assert evidence("eio", {"node_io_errors": 3, "get_calls": 9}) == {"node_io_errors": 3}
    assert evidence("eio", {"get_calls": 9}) == {}
    assert set(EVIDENCE) == set(KINDS) - {"swap", "kill"}
    assert run_violations([Seen("eio", 2, 2, unseen=1)], totals(), False) == [
        "eio: no counter showed it in 1 of 2 episodes"]


def test_a_leaked_slot_is_caught() -> None:
    sums = {"records": 24, "index_entries": 24, "readable": 2, "live_bytes": 24 * 4096}
    nodes = [{"live_bytes": 2 * 4096} for _ in range(12)]
    assert leaked_bytes(sums, nodes) == 0
    assert leaked_bytes({**sums, "index_entries": 23}, nodes) == 4096, "a slot that no index entry names"
    assert leaked_bytes({**sums, "readable": 1}, nodes) == 12 * 4096, "slots that no readable block needs"
    assert leaked_bytes(sums, [*nodes[1:], {"live_bytes": 4096}]) == 4096, "a node that counts otherwise"
    assert run_violations([Seen("eio", 1, 1)], totals(leaked_bytes=4096), False) == ["4096 bytes leaked"]
