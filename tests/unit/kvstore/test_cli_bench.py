"""The benchmark on a small scale: it measures what it says, and fails where a run did not do its work."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from efs.fs import FileSystem
from efs.limits import MIB
from kvstore import bench, benchwork
from kvstore.bench import mean_slots_per_range, run_bench
from kvstore.benchserved import run_served_bench
from kvstore.benchwork import (
    BenchFailed,
    BenchReport,
    Plan,
    Row,
    Work,
    make_work,
    opened,
    store_reference,
    timed_fetches,
)
from kvstore.layout import V41_FLASH
from tests.support.cli import ROOT, environment, run
from tests.support.laidstore import flip, lay_store, make_blocks

SMALL = {"blocks": 16, "tokens": 16 * 128 + 100, "runs": 2, "fresh_bytes": 240 * MIB, "aged_bytes": 72 * MIB}
CASES = (
    *(
        f"fetch {age}, {backend}, {gone}"
        for age in ("fresh", "aged")
        for backend in ("mapped", "preadv")
        for gone in ("healthy", "one node gone", "two nodes gone")
    ),
    "first segment, mapped",
    "first segment, preadv",
    "fetch cold, mapped, healthy",
    "fetch cold, preadv, healthy",
    "hash 2148 tokens and match",
    "put of new blocks",
    "memory beside the destination, mapped",
    "memory beside the destination, preadv",
)


def small_plan(directory: Path) -> Plan:
    return Plan(directory, **SMALL)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> BenchReport:
    """One whole run, small, for all tests that only look at its result."""
    return run_bench(small_plan(tmp_path_factory.mktemp("bench")))


def row(report: BenchReport, case: str) -> Row:
    (found,) = [row for row in report.rows if row.case == case]
    return found


def test_every_case_is_measured_once(report: BenchReport) -> None:
    assert sorted(row.case for row in report.rows) == sorted(CASES)


def test_every_time_stands_beside_a_memcpy_of_the_same_run(report: BenchReport) -> None:
    timed = [row for row in report.rows if row.unit == "x memcpy"]
    assert len(timed) == 16
    for found in timed:
        assert found.milliseconds is not None
        assert found.memcpy_ms is not None
        assert found.value == pytest.approx(found.milliseconds / found.memcpy_ms)
        assert found.notes["runs"] == 2


def test_lost_nodes_were_really_lost_and_healthy_runs_rebuilt_nothing(report: BenchReport) -> None:
    # On a loaded machine a late node costs a rebuild in one case or another, but not in all of them.
    healthy = [row(report, f"fetch {age}, {backend}, healthy") for age in ("fresh", "aged")
               for backend in ("mapped", "preadv")]
    assert min(found.notes["rebuilt"] for found in healthy) == 0
    for age in ("fresh", "aged"):
        for backend in ("mapped", "preadv"):
            for gone in ("one node gone", "two nodes gone"):
                assert row(report, f"fetch {age}, {backend}, {gone}").notes["rebuilt"] > 0


@pytest.mark.timeout(400)
def test_node_servers_are_measured_stopped_and_killed(tmp_path: Path) -> None:
    report = run_served_bench(replace(small_plan(tmp_path), runs=1))
    assert [(found.case, found.unit, found.target) for found in report.rows] == [
        ("bytes of a fetch over bare TCP", "x memcpy", None),
        ("fetch over TCP, healthy", "x memcpy", 2.4),
        ("fetch over Unix sockets, healthy", "x memcpy", 2.4),
        ("fetch over Unix sockets, mapped, healthy", "x memcpy", 2.4),
        ("put to servers", "x memcpy", 14.0),
        ("fetch, one server stopped", "x memcpy", 3.0),
        ("very first fetch, one server stopped", "ms", 250.0),
        ("fetch, two servers killed", "x memcpy", 3.0),
    ]
    assert all(found.value > 0 for found in report.rows)


def test_targets_are_those_of_the_benchmark_page(report: BenchReport) -> None:
    targets = {found.case: found.target for found in report.rows if found.target is not None}
    assert targets == {
        "fetch fresh, mapped, healthy": 1.7,
        "fetch fresh, preadv, healthy": 2.1,
        "fetch aged, mapped, healthy": 2.1,
        "fetch aged, preadv, healthy": 2.7,
        "fetch fresh, mapped, one node gone": 2.0,
        "fetch fresh, preadv, one node gone": 2.5,
        "fetch fresh, mapped, two nodes gone": 2.0,
        "fetch fresh, preadv, two nodes gone": 2.5,
        "first segment, mapped": 0.35,
        "first segment, preadv": 0.35,
        "hash 2148 tokens and match": 0.5,
        "put of new blocks": 10.0,
        "memory beside the destination, mapped": 64 * MIB,
        "memory beside the destination, preadv": 64 * MIB,
    }


def test_an_aged_store_is_more_torn_than_a_fresh_one(report: BenchReport) -> None:
    fresh = row(report, "fetch fresh, mapped, healthy").notes["slots_per_range"]
    aged = row(report, "fetch aged, mapped, healthy").notes["slots_per_range"]
    assert 1 <= aged <= fresh <= 16


def test_the_report_is_json_and_its_table_names_every_case(
    report: BenchReport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvstore.cli.bench_cmd.run_bench", lambda plan, progress: report)
    document = run("bench", "--json").document()
    assert [found["case"] for found in document["rows"]] == [found.case for found in report.rows]
    assert document["plan"]["blocks"] == 16
    text = run("bench").out
    assert all(case in text for case in CASES)
    missed = replace(report, rows=(*report.rows, Row("slow", 9.0, "x memcpy", 1.0, 9.0, 1.0, {})))
    met = replace(report, rows=())
    for shown, code in ((missed, 1), (met, 0)):
        monkeypatch.setattr("kvstore.cli.bench_cmd.run_bench", lambda plan, progress, shown=shown: shown)
        assert run("bench", "--strict", "--json").code == code
        assert run("bench", "--json").code == 0


# -- Runs that must fail --------------------------------------------------------------------------------------------


def test_a_store_that_evicted_nothing_or_was_written_too_little_is_not_aged() -> None:
    bench.require_aged(300, 100, [1] * 12)
    with pytest.raises(BenchFailed, match="0 records evicted"):
        bench.require_aged(300, 100, [5] * 11 + [0])
    with pytest.raises(BenchFailed, match="299 bytes written"):
        bench.require_aged(299, 100, [1] * 12)


def test_ageing_writes_three_times_the_capacity(report: BenchReport) -> None:
    root = str(report.plan.directory / "aged")
    written = run("status", "--json", store=root).document()["counters"]["node_put_records"]
    assert written * V41_FLASH.shape.slot_bytes >= 3 * report.plan.aged_bytes
    assert min(bench.evicted_records(root)) > 0


async def fetch_all(root: str, backend: str, plan: Plan, work: Work) -> None:
    async with opened(root, backend) as store:
        await timed_fetches(store, plan, work)


@pytest.mark.parametrize("lost", [(0, 1, 2)])
def test_a_fetch_that_misses_blocks_fails_the_benchmark(tmp_path: Path, lost: tuple[int, ...]) -> None:
    plan = small_plan(tmp_path)
    root, work = str(tmp_path / "fresh"), make_work(plan)
    FileSystem.init(root, plan.fresh_bytes)
    asyncio.run(store_reference(root, work))
    with bench._without(root, lost), pytest.raises(BenchFailed, match="missed blocks"):
        asyncio.run(fetch_all(root, "preadv", plan, work))


def test_a_fetch_of_other_bytes_fails_the_benchmark(tmp_path: Path) -> None:
    plan = small_plan(tmp_path)
    root, work = str(tmp_path / "fresh"), make_work(plan)
    FileSystem.init(root, plan.fresh_bytes)
    asyncio.run(store_reference(root, work))
    work.expected[-1] ^= 1
    with pytest.raises(BenchFailed, match="not stored"):
        asyncio.run(fetch_all(root, "mapped", plan, work))


def test_a_benchmark_that_fails_is_exit_code_8_and_leaves_no_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(plan: Plan, progress: object) -> BenchReport:
        (plan.directory / "half").mkdir()
        raise BenchFailed("a fetch missed blocks")

    monkeypatch.setattr("kvstore.cli.bench_cmd.run_bench", fail)
    done = run("bench", "--directory", str(tmp_path))
    assert done.code == 8
    assert "missed blocks" in done.error_line
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--runs", "0"), "--runs"),
        (("--blocks", "5"), "--blocks"),
        (("--aged-capacity", "5X"), "--aged-capacity"),
        (("--directory", "/nowhere/at/all"), "/nowhere/at/all"),
    ],
)
def test_a_wrong_benchmark_is_refused(words: tuple[str, ...], named: str) -> None:
    done = run("bench", *words)
    assert done.code == 2
    assert named in done.error_line


# -- Measures -------------------------------------------------------------------------------------------------------


def test_slots_per_range_counts_contiguous_ranges_of_runs(tmp_path: Path) -> None:
    """Keys of one placement group are one run; its records lie in order, except one that is elsewhere."""
    blocks = make_blocks(seed=1, count=40)
    store = lay_store(str(tmp_path / "store"), blocks)
    keys = [block.key for block in blocks]
    assert mean_slots_per_range(store.root, keys) == 1.0, "random keys: each is a run of its own"
    assert mean_slots_per_range(store.root, [bytes(32)]) == 0.0


def test_the_page_cache_can_be_dropped_and_is_noticed(tmp_path: Path) -> None:
    store = lay_store(str(tmp_path / "store"), make_blocks(seed=1, count=400))
    before = bench.resident_share(store.root)
    bench.drop_page_cache(store.root)
    assert before > 0.5, "fresh extents are allocated whole and written in part"
    assert bench.resident_share(store.root) < 0.1


def test_comparing_finds_a_difference_anywhere() -> None:
    left = np.zeros(3 * MIB + 5, np.uint8)
    assert benchwork._equal(left, left.copy())
    for at in (0, MIB, 3 * MIB + 4):
        right = left.copy()
        right[at] = flip(b"\0")[0]
        assert not benchwork._equal(left, right)


def test_the_script_is_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "tools/bench.py", "--help"],
        cwd=ROOT,
        env=environment(),
        timeout=60,
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode().split() == run("bench", "--help").out.split()
