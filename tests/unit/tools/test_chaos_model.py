"""The oracle of chaos runs: fabricated histories with a wrong byte, a lost block and a late call are caught, sound ones
are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tools.chaosrig.model import (
    CHURN_DEPTHS,
    CHURN_FIRST,
    FRESH_FIRST,
    FRESH_KEPT,
    HOT_BLOCKS,
    LAG_TURNS,
    LAYOUT,
    Block,
    Ledger,
    Model,
    Universe,
    lateness_ms,
    replay,
    stalled,
)

HOT: Block = (0, 3)
CHURN: Block = (CHURN_FIRST + 5, 12)
UNEVICTABLE = 50


def a_model() -> Model:
    return Model(Universe(seed=9), UNEVICTABLE)


def put(model: Model, block: Block, *, version: int = 0, acknowledged: bool = True, at_risk: bool = False) -> None:
    model.intend([block], version)
    model.put([block], acknowledged, at_risk)


def churn(model: Model, blocks: int) -> None:
    """Put so many different ones."""
    for at in range(blocks):
        put(model, (CHURN_FIRST + at // len(CHURN_DEPTHS), CHURN_DEPTHS[at % len(CHURN_DEPTHS)]))


# -- Wrong bytes


def test_one_wrong_byte_anywhere_is_caught() -> None:
    model = a_model()
    put(model, HOT)
    right = model.universe.payload(HOT, 0)
    assert model.version_of(HOT, right) == 0
    for place in (0, LAYOUT.block_bytes // 2, LAYOUT.block_bytes - 1):
        wrong = bytearray(right)
        wrong[place] ^= 1
        assert model.version_of(HOT, bytes(wrong)) is None


def test_the_bytes_of_another_block_version_or_run_are_wrong() -> None:
    model = a_model()
    put(model, CHURN, version=1)
    assert model.version_of(CHURN, model.universe.payload(CHURN, 1)) == 1
    assert model.version_of(CHURN, model.universe.payload(CHURN, 2)) is None, "a version that nobody began to put"
    assert model.version_of(CHURN, model.universe.payload((CHURN[0], CHURN[1] + 1), 1)) is None
    assert model.version_of(CHURN, Universe(seed=10).payload(CHURN, 1)) is None


def test_bytes_of_a_put_that_was_not_acknowledged_may_be_read() -> None:
    model = a_model()
    put(model, CHURN, acknowledged=False)
    assert model.version_of(CHURN, model.universe.payload(CHURN, 0)) == 0


def test_a_mixture_of_two_versions_is_wrong() -> None:
    model = a_model()
    for version in (0, 1):
        put(model, CHURN, version=version)
    one, other = (model.universe.payload(CHURN, version) for version in (0, 1))
    half = LAYOUT.block_bytes // 2
    assert model.version_of(CHURN, one[:half] + other[half:]) is None


# -- Lost blocks


@pytest.mark.parametrize(("at_risk", "damaged", "must"), [
    (False, 0, True), (False, 2, True), (False, 3, False), (True, 1, True), (True, 2, False),
])
def test_the_loss_of_an_acknowledged_block_is_caught_as_far_as_the_guarantee_goes(at_risk: bool, damaged: int,
                                                                                  must: bool) -> None:
    model = a_model()
    put(model, HOT, at_risk=at_risk)
    assert model.must_hit(HOT, damaged) is must


def test_a_block_at_risk_is_held_to_two_nodes_once_it_was_seen_whole() -> None:
    model = a_model()
    put(model, HOT, at_risk=True)
    model.found_whole([HOT])
    assert model.must_hit(HOT, 2)


def test_what_was_not_acknowledged_or_is_not_guarded_may_be_a_miss() -> None:
    model = a_model()
    put(model, HOT, acknowledged=False)
    put(model, CHURN)
    assert not model.must_hit(HOT, 0)
    assert not model.must_hit(CHURN, 0)


def test_a_block_may_be_evicted_once_enough_others_were_used_since_and_not_before() -> None:
    model = a_model()
    put(model, HOT)
    churn(model, UNEVICTABLE - 1)
    assert model.must_hit(HOT, 0), "it counts itself"
    churn(model, UNEVICTABLE - 1)
    assert model.must_hit(HOT, 0), "the same ones again fill no cache"
    churn(model, UNEVICTABLE)
    assert not model.must_hit(HOT, 0)
    model.hit({HOT: 0}, model.uses)
    assert model.must_hit(HOT, 0)
    churn(model, UNEVICTABLE + 1)
    assert not model.must_hit(HOT, 0)


def test_a_hit_on_what_may_be_evicted_says_nothing_of_the_eleventh_shard_until_it_is_seen_whole() -> None:
    model = a_model()
    put(model, HOT)
    churn(model, UNEVICTABLE - 1)
    model.hit({HOT: 0}, model.uses)
    assert model.must_hit(HOT, 2)
    model.opened(closed=False)
    churn(model, UNEVICTABLE)
    model.hit({HOT: 0}, model.uses)
    assert model.must_hit(HOT, 0)
    assert not model.must_hit(HOT, 1)
    model.found_whole([HOT])
    assert model.must_hit(HOT, 2)


def test_what_others_read_while_a_read_runs_is_hotter_than_what_it_reads() -> None:
    model = a_model()
    churn(model, UNEVICTABLE)
    put(model, HOT)
    begun = model.uses
    model.hit({(CHURN_FIRST + at // 32, CHURN_DEPTHS[at % 32]): 0 for at in range(UNEVICTABLE)}, begun)
    model.hit({HOT: 0}, begun)
    assert not model.must_hit(HOT, 0)


def test_only_the_latest_fresh_blocks_are_guarded() -> None:
    model = a_model()
    for number in range(2 * FRESH_KEPT):
        put(model, (FRESH_FIRST + number, 0))
    assert model.must_hit((FRESH_FIRST + 2 * FRESH_KEPT - 1, 0), 0)
    assert len(model.claims) == FRESH_KEPT


# -- Deadlines


def test_a_late_call_is_caught_and_what_the_machine_was_late_is_allowed() -> None:
    assert lateness_ms(599.0, 500.0, 0.0, 0.0) == 0
    assert lateness_ms(650.0, 500.0, 0.0, 0.0) == 50
    assert lateness_ms(650.0, 500.0, 60.0, 0.0) == 0, "the loop was late behind the deadline"
    assert lateness_ms(650.0, 500.0, 0.0, 20.0) == 0, "every turn of a thread took 20 ms"
    assert lateness_ms(650.0, 500.0, 0.0, 1.0) == 50 - LAG_TURNS
    assert lateness_ms(9_000.0, 500.0, 0.0, 500.0) > 6_000, "even where the machine is slow a hang is one"


def test_a_loop_that_is_held_up_alone_is_caught() -> None:
    assert stalled(loop_held_ms=3_000.0, thread_lag_ms=20.0)
    assert not stalled(loop_held_ms=3_000.0, thread_lag_ms=2_500.0)
    assert not stalled(loop_held_ms=3_000.0, thread_lag_ms=400.0), "it needed several turns"
    assert stalled(loop_held_ms=30_000.0, thread_lag_ms=400.0)


# -- The journal


def line(**fields: Any) -> str:
    return json.dumps(fields)


def test_what_a_killed_process_was_told_is_claimed_by_the_next_one() -> None:
    model = a_model()
    told = replay([
        line(t="open", n=0),
        line(t="intent", b=[HOT], v=0), line(t="put", b=[HOT], acknowledged=True, at_risk=False),
        line(t="intent", b=[CHURN], v=2),
        line(t="sums", sums={"reads": 3}, most={"loop_held_ms": 40}),
        line(t="sums", sums={"reads": 5}, most={"loop_held_ms": 10}),
        line(t="open", n=1),
        line(t="sums", sums={"reads": 2}, most={}),
        line(t="violation", what="something"),
        '{"t":"inte',
    ], model)
    assert model.must_hit(HOT, 2)
    assert model.version_of(CHURN, model.universe.payload(CHURN, 2)) == 2, "the kill may have come after the last byte"
    assert (told.sums["reads"], told.most["loop_held_ms"]) == (7, 40)
    assert (told.incarnations, told.cut_puts) == (2, 1)
    assert told.violations == ["something"]


@pytest.mark.parametrize("closed", [True, False])
def test_after_a_kill_only_what_was_put_lately_is_sure_to_be_there(closed: bool) -> None:
    others = [line(t="intent", b=[(CHURN_FIRST, depth), (CHURN_FIRST + 1, depth)], v=0) for depth in CHURN_DEPTHS]
    ending = [line(t="closed")] if closed else []
    model = a_model()
    replay([
        line(t="open", n=0),
        line(t="intent", b=[HOT], v=0), line(t="put", b=[HOT], acknowledged=True, at_risk=False),
        *others,
        line(t="hit", b=[HOT], v=[0], begun=len(others) * 2 + 1),
        line(t="intent", b=[(0, 1)], v=0), line(t="put", b=[(0, 1)], acknowledged=True, at_risk=False),
        *ending,
        line(t="open", n=1),
    ], model)
    assert model.must_hit((0, 1), 2)
    assert model.must_hit(HOT, 0) is closed, "the kill took the access time of the last read along"


def test_a_journal_reads_back_as_it_was_written(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    for number in range(2):
        journal = Ledger(path, a_model())
        journal.write(t="open", n=number)
        journal.write(t="intent", b=[(0, depth) for depth in range(HOT_BLOCKS)], v=0)
        journal.write(t="put", b=[(0, depth) for depth in range(HOT_BLOCKS)], acknowledged=True, at_risk=True)
        journal.write(t="hit", b=[HOT], v=[0], begun=3)
        journal.write(t="forget", b=[(0, 7)])
        journal.close()
    model = a_model()
    told = replay(Path(path).read_text().splitlines(), model)
    assert told.incarnations == 2
    assert model.must_hit(HOT, 1)
    assert not model.must_hit(HOT, 2)
    assert not model.must_hit((0, 7), 0)


def test_processes_that_write_one_journal_have_one_model(tmp_path: Path) -> None:
    path = str(tmp_path / "journal")
    one, other = (Ledger(path, a_model(), who) for who in (1, 2))
    for ledger in (one, other):
        ledger.write(t="open", owns=False)
    one.write(t="intent", b=[HOT], v=0)
    other.write(t="intent", b=[HOT], v=0)
    one.write(t="put", b=[HOT], acknowledged=True, at_risk=False)
    assert not other.model.must_hit(HOT, 2), "it has not looked yet"
    other.follow()
    assert other.model.must_hit(HOT, 2)
    other.write(t="intent", b=[(CHURN_FIRST, depth) for depth in CHURN_DEPTHS], v=1)
    one.follow()
    assert (one.model.uses, one.model.versions) == (other.model.uses, other.model.versions)
    one.write(t="sums", sums={"reads": 3}, most={})
    other.write(t="sums", sums={"reads": 4}, most={})
    told = replay(Path(path).read_text().splitlines(), a_model())
    assert (told.sums["reads"], told.incarnations, told.cut_puts) == (7, 2, 2)
    for ledger in (one, other):
        ledger.close()


def test_a_line_that_a_kill_cut_short_costs_no_other_process_its_own(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    path.write_text('\n{"t":"inte')
    other = Ledger(str(path), a_model(), 2)
    other.write(t="intent", b=[HOT], v=0)
    other.write(t="put", b=[HOT], acknowledged=True, at_risk=False)
    assert other.model.must_hit(HOT, 2)
    other.close()
