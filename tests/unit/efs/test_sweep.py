"""The sweep: what it removes, what it must leave alone, and what happens beside live writers (faults 34, 39, 47)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Collection, Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.clock import Deadline
from efs.errors import InvalidArgument, NodeUnavailable
from efs.limits import HOLLOW_GRACE_MS, KEY_BYTES, MAX_DEADLINE_MS, STRIPE_SHARDS, YIELD_MS
from efs.listing import Merge, Stretch
from efs.pace import Pace, Traffic
from efs.survey import Version
from efs.sweep import HOLLOW, LOSING, Sweep, SweepReport, condemned, winner_of
from efs.types import DropItem, ListedRecord, ListPage, PutReport
from tests.support.bench import Bench, make_bench
from tests.support.blocks import make_blocks, readable
from tests.support.clock import FakeClock
from tests.support.gatednode import Gate
from tests.support.records import Records, make_keys, make_records

GRACE_S = HOLLOW_GRACE_MS / 1000
ALL = range(STRIPE_SHARDS)
PAGE = 16


def small_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.sweep.SWEEP_PAGE_RECORDS", PAGE)


def old_enough(clock: FakeClock) -> None:
    clock.advance(GRACE_S + 1)


def sweep_of(bench: Bench, *, purged: Collection[bytes] = (), grace_ms: int = HOLLOW_GRACE_MS,
             traffic: Traffic | None = None) -> Sweep:
    nodes = [bench.health._nodes[index] for index in ALL]
    return Sweep(nodes, bench.health, bench.counters, bench.clock, Pace(traffic or Traffic(), None), purged=purged,
                 grace_ms=grace_ms)


async def plant(bench: Bench, keys: Sequence[bytes], seed: int, nodes: Collection[int],
                tag: bytes = bytes(8)) -> bytes:
    """A version of each key on these nodes; returns the first one's digest."""
    deadline = Deadline.after_ms(bench.clock, 10_000)
    for index in nodes:
        records = make_records(len(keys), index, seed=seed, keys=keys, tenant_tag=tag)
        assert (await bench.twins[index].put(records.batch(), deadline)).stored.all()
    return records.digests[0]


def holders(bench: Bench, key: bytes, digest: bytes) -> set[int]:
    return {twin.node_index for twin in bench.twins if digest in twin.records.get(key, {})}


def versions_of(places: Mapping[bytes, Collection[int]], untrusted: Collection[int] = ()) -> dict[bytes, Version]:
    return {digest: Version(dict.fromkeys(nodes, 7), {index for index in nodes if index not in untrusted})
            for digest, nodes in places.items() if nodes}


# -- Hollow stripes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shards", range(1, 13))
async def test_a_stripe_of_fewer_than_ten_shards_goes_and_any_other_stays(shards: int) -> None:
    """Fault 34: dead space is 0 after a sweep."""
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(5, seed=shards)
    digest = await plant(bench, keys, 1, random.Random(shards).sample(ALL, shards))
    old_enough(clock)
    report = await sweep_of(bench).run()
    assert report.records == 5 * shards
    assert report.missing == ()
    if shards < 10:
        assert (report.hollow, report.dropped, report.spared) == (5, 5 * shards, 0)
        assert all(not twin.slots for twin in bench.twins)
    else:
        assert (report.hollow, report.dropped) == (0, 0)
        assert len(holders(bench, keys[0], digest)) == shards
    assert (await sweep_of(bench).run()).dropped == 0, "a second sweep is a no-op"


async def test_a_hollow_stripe_stays_until_the_grace_is_over() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(1, seed=3)
    digest = await plant(bench, keys, 1, range(9))
    clock.advance(GRACE_S - 1)
    report = await sweep_of(bench).run()
    assert (report.hollow, report.dropped, report.spared) == (1, 0, 9)
    assert len(holders(bench, keys[0], digest)) == 9
    clock.advance(2)
    assert (await sweep_of(bench).run()).dropped == 9


async def test_a_look_up_does_not_renew_what_is_hollow() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(1, seed=4)
    await plant(bench, keys, 1, range(5))
    old_enough(clock)
    for twin in bench.twins:
        table = twin.look_up_now(keys)
        assert table is not None
        twin.touch(keys, None, 2**31)
    assert (await sweep_of(bench).run()).dropped == 5


async def test_each_node_judges_age_by_its_own_clock() -> None:
    """A node whose clock is off by an hour neither loses a fresh record nor keeps an old one."""
    clock = FakeClock()
    bench = make_bench(clock)
    for twin, hours in zip(bench.twins, (-5, -1, 0, 1, 48, *[0] * 7), strict=True):
        own = FakeClock(wall=clock.wall() + hours * 3600, monotonic=hours * 10 + 1_000)
        twin.__init__(twin.node_index, own)  # type: ignore[misc]
    old, fresh = make_keys(2, seed=5, run=1)
    await plant_with_own_clocks(bench, old)
    advance_all(bench, clock, GRACE_S + 1)
    await plant_with_own_clocks(bench, fresh)
    report = await sweep_of(bench).run()
    assert (report.hollow, report.dropped, report.spared) == (2, 5, 5)
    assert all(list(twin.records) == [fresh] for twin in bench.twins[:5])


async def plant_with_own_clocks(bench: Bench, key: bytes) -> None:
    await plant(bench, [key], 1, range(5))


def advance_all(bench: Bench, clock: FakeClock, seconds: float) -> None:
    clock.advance(seconds)
    for twin in bench.twins:
        own = twin._clock
        assert isinstance(own, FakeClock)
        if own is not clock:
            own.advance(seconds)


async def test_a_wall_clock_that_is_set_forward_ages_nothing_that_just_arrived() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(1, seed=6)
    await plant(bench, keys, 1, range(5))
    clock.set_wall(clock.wall() + 86_400)
    for _ in range(3):
        clock.advance(GRACE_S / 4)
        assert (await sweep_of(bench).run()).dropped == 0
    clock.advance(3 * GRACE_S)
    assert (await sweep_of(bench).run()).dropped == 5


# -- Live writers ----------------------------------------------------------------------------------------------------


async def stored_on(bench: Bench, key: bytes, count: int) -> None:
    for _ in range(10_000):
        if bench.records(key) >= count:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{bench.records(key)} records, waited for {count}")


async def half_put(bench: Bench) -> tuple[asyncio.Task[PutReport], Gate, bytes]:
    """A put that has reached five nodes and hangs before the other seven."""
    blocks = make_blocks(1, seed=9)
    gate = Gate()
    for node in bench.nodes[5:]:
        node.put_gate = gate
    put = asyncio.create_task(bench.put(blocks, deadline_ms=MAX_DEADLINE_MS))
    await stored_on(bench, blocks.keys[0], 5)
    assert gate.held == 7
    return put, gate, blocks.keys[0]


async def test_a_live_writers_stripe_is_not_taken_for_hollow() -> None:
    """Fault 34: five of twelve stored, swept, then acknowledged: the block reads, with any two nodes gone."""
    clock = FakeClock()
    bench = make_bench(clock)
    put, gate, key = await half_put(bench)
    clock.advance(MAX_DEADLINE_MS / 1000 - 1)
    report = await sweep_of(bench).run()
    assert (report.hollow, report.dropped, report.spared) == (1, 0, 5), "the sweep saw the stripe and spared it"
    gate.release()
    assert await put == PutReport(1, 0, 0, 0)
    assert bench.records(key) == 12
    assert len(readable(bench.twins, key)) == 1


async def test_without_the_grace_the_same_sweep_loses_an_acknowledged_block() -> None:
    """The control of the test above: what it asserts depends on the grace."""
    bench = make_bench(FakeClock())
    put, gate, key = await half_put(bench)
    assert (await sweep_of(bench, grace_ms=0).run()).dropped == 5
    gate.release()
    assert await put == PutReport(1, 0, 0, 0)
    assert readable(bench.twins, key) == {}


async def test_a_put_that_finds_shards_of_an_old_hollow_stripe_keeps_them() -> None:
    """The generation of a record that a put finds stays the same, so comparing it would not be enough: the sweep has
    looked at the old stripe when a put renews it, and drops afterwards."""
    clock = FakeClock()
    bench = make_bench(clock)
    blocks = make_blocks(1, seed=10)
    refused = NodeUnavailable(0, "for this test")
    for node in bench.nodes[4:]:
        node.refusals.append(refused)
    assert (await bench.put(blocks)).failed == 1
    key = blocks.keys[0]
    assert bench.records(key) == 4
    old_enough(clock)
    (digest,) = bench.twins[0].records[key]
    seen = {index: DropItem(key, digest, bench.twins[index].records[key][digest].generation, HOLLOW_GRACE_MS)
            for index in range(4)}
    assert await bench.put(blocks) == PutReport(1, 0, 0, 0)
    assert all(bench.twins[index].records[key][digest].generation == seen[index].generation for index in range(4))
    for index, item in seen.items():
        assert await bench.twins[index].drop([item], Deadline.after_ms(clock, 1_000)) == 0
    assert bench.records(key) == 12


# -- Losing versions ---------------------------------------------------------------------------------------------------


async def test_the_version_with_most_shards_wins_and_the_others_go() -> None:
    """Fault 39: first complete version wins; what lost is removed everywhere."""
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(3, seed=7)
    winner = await plant(bench, keys, 1, ALL)
    loser = await plant(bench, keys, 2, range(11))
    third = await plant(bench, keys, 3, range(6, 12))
    old_enough(clock)
    report = await sweep_of(bench).run()
    assert (report.losing, report.hollow, report.dropped) == (3, 3, 3 * (11 + 6))
    assert holders(bench, keys[0], winner) == set(ALL)
    assert holders(bench, keys[0], loser) == holders(bench, keys[0], third) == set()


async def test_of_two_complete_versions_the_smaller_digest_wins() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    (key,) = make_keys(1, seed=8)
    digests = [await plant(bench, [key], seed, ALL) for seed in (1, 2, 3)]
    old_enough(clock)
    assert (await sweep_of(bench).run()).losing == 2
    assert [len(holders(bench, key, digest)) for digest in sorted(digests)] == [12, 0, 0]


async def test_nothing_readable_goes_while_no_version_has_won() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    (key,) = make_keys(1, seed=9)
    first = await plant(bench, [key], 1, range(10))
    second = await plant(bench, [key], 2, range(2, 12))
    old_enough(clock)
    report = await sweep_of(bench).run()
    assert (report.losing, report.hollow, report.dropped) == (0, 0, 0)
    assert len(holders(bench, key, first)) == len(holders(bench, key, second)) == 10


async def test_a_fresh_losing_version_is_spared() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    (key,) = make_keys(1, seed=11)
    await plant(bench, [key], 1, ALL)
    old_enough(clock)
    loser = await plant(bench, [key], 2, range(10))
    assert (await sweep_of(bench).run()).spared == 10
    assert len(holders(bench, key, loser)) == 10


async def test_a_version_that_is_not_trusted_does_not_win() -> None:
    """Fault 60: after power loss its payload may be zeros; the other one may be all there is."""
    clock = FakeClock()
    bench = make_bench(clock)
    (key,) = make_keys(1, seed=12)
    doubtful = await plant(bench, [key], 1, ALL)
    sound = await plant(bench, [key], 2, range(10))
    for index in (0, 1):
        bench.twins[index].records[key][doubtful].trusted = False
    old_enough(clock)
    assert (await sweep_of(bench).run()).dropped == 0
    assert len(holders(bench, key, sound)) == 10


PLACES = st.dictionaries(st.binary(min_size=1, max_size=1), st.sets(st.integers(0, 11)), max_size=4)


@given(PLACES, st.sets(st.integers(0, 11)), st.randoms(use_true_random=False))
def test_six_nodes_dropping_one_version_while_six_drop_the_other_is_impossible(
    places: dict[bytes, set[int]], missing: set[int], source: random.Random
) -> None:
    """Fault 39. Whichever nodes two sweeps see, whichever drops of the first are carried out: no version that could be
    read is condemned unless another one stays complete, and the second sweep condemns nothing that the first kept."""
    complete = versions_of(places)
    seen = versions_of({digest: nodes - missing for digest, nodes in places.items()})
    for versions, unknown in ((complete, 0), (seen, len(missing))):
        doomed = condemned(versions, unknown)
        could_be_read = {digest for digest, nodes in places.items() if len(nodes) >= 10}
        if could_be_read & doomed.keys():
            kept = winner_of(complete)
            assert kept is not None
            assert kept not in doomed
            assert len(places[kept]) >= 11
            assert unknown == 0
    first = condemned(complete, 0)
    dropped = {digest: {index for index in nodes if digest not in first or source.random() < 0.5}
               for digest, nodes in places.items()}
    again = condemned(versions_of(dropped), 0)
    assert {digest for digest in again if digest not in first} == set()
    assert first.keys() - {digest for digest, nodes in dropped.items() if not nodes} <= again.keys() | {
        digest for digest in first if not dropped.get(digest)}


async def test_two_sweeps_at_once_over_two_complete_versions_leave_one_whole() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(64, seed=13)
    first, second = await plant(bench, keys, 1, ALL), await plant(bench, keys, 2, ALL)
    old_enough(clock)
    one, other = await asyncio.gather(sweep_of(bench).run(), sweep_of(bench).run())
    assert one.dropped + other.dropped == 64 * 12
    for key in keys:
        assert sorted(len(versions) for versions in (holders(bench, key, digest) for digest in twin_digests(bench, key))
                      ) == [12]
    assert holders(bench, keys[0], min(first, second)) == set(ALL)


def twin_digests(bench: Bench, key: bytes) -> set[bytes]:
    return {digest for twin in bench.twins for digest in twin.records.get(key, {})}


# -- Missing nodes -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("absent", "goes"), [(1, 8), (2, 7), (3, 6)])
async def test_with_nodes_missing_only_what_they_could_not_complete_goes(absent: int, goes: int) -> None:
    clock = FakeClock()
    gone = list(range(12 - absent, 12))
    bench = make_bench(clock, absent=gone)
    hopeless, possible = make_keys(2, seed=absent, run=1)
    await plant(bench, [hopeless], 1, range(goes))
    kept = await plant(bench, [possible], 1, range(goes + 1))
    old_enough(clock)
    report = await sweep_of(bench).run()
    assert report.missing == tuple(gone)
    assert (report.hollow, report.dropped) == (1, goes)
    assert bench.records(hopeless) == 0
    assert len(holders(bench, possible, kept)) == goes + 1


async def test_with_a_node_missing_no_losing_version_goes() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    (key,) = make_keys(1, seed=14)
    await plant(bench, [key], 1, ALL)
    loser = await plant(bench, [key], 2, range(11))
    old_enough(clock)
    bench.twins[3].down = "unplugged"
    assert (await sweep_of(bench).run()).dropped == 0
    assert len(holders(bench, key, loser)) == 11


async def test_a_node_that_fails_in_the_middle_of_its_listing_counts_as_missing_from_there_on(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    small_pages(monkeypatch)
    whole, hollow = (sorted(make_keys(3 * PAGE, seed=seed, run=1)) for seed in (15, 16))
    await plant(bench, whole, 1, ALL)
    await plant(bench, hollow, 1, set(range(10)) - {4})
    old_enough(clock)
    twin, listed = bench.twins[4], 0

    async def fails_later(after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        nonlocal listed
        listed += 1
        if listed > 1:
            twin.down = "its disk fails"
        return await type(twin).list(twin, after, limit, deadline)

    twin.list = fails_later  # type: ignore[method-assign]
    report = await sweep_of(bench).run()
    assert report.missing == (4,)
    left = [key for key in hollow if bench.records(key)]
    expected = [key for key in hollow if key > whole[PAGE - 1]]
    assert left == expected, "nine shards and one unknown: node 4 could have made ten"
    assert 0 < len(expected) < len(hollow)
    assert report.dropped == 9 * (len(hollow) - len(expected))


async def test_a_node_that_fails_between_listing_and_look_up_spares_what_it_might_hold() -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    keys = make_keys(1, seed=16)
    await plant(bench, keys, 1, range(9))
    old_enough(clock)
    sweep = sweep_of(bench)
    for twin in bench.twins:
        twin.warm = False

    async def refuses(keys: Sequence[bytes], deadline: Deadline) -> None:
        raise NodeUnavailable(11, "gone since")

    bench.twins[11].look_up = refuses  # type: ignore[method-assign,assignment]
    report = await sweep.run()
    assert report.missing == ()
    assert report.dropped == 0
    assert bench.records(keys[0]) == 9


# -- Purged tenants ----------------------------------------------------------------------------------------------------


async def test_records_of_a_purged_tenant_go_at_once_from_every_node_that_lists_them() -> None:
    """Fault 47: also what a returning node brings back, however many shards there are and however young they are."""
    bench = make_bench(FakeClock(), absent=[11])
    whole, part, other = make_keys(3, seed=17, run=1)
    tag = b"tenant-1"
    await plant(bench, [whole], 1, range(11), tag)
    await plant(bench, [part], 1, range(2, 4), tag)
    await plant(bench, [other], 1, range(11), b"tenant-2")
    report = await sweep_of(bench, purged=[tag]).run()
    assert (report.purged, report.dropped) == (13, 13)
    assert (bench.records(whole), bench.records(part), bench.records(other)) == (0, 0, 11)


# -- Going through the listings ----------------------------------------------------------------------------------------


def listed(key: bytes, digest: bytes = bytes(16)) -> ListedRecord:
    return ListedRecord(key, digest, 0, 1, 0, 100, 0, bytes(8), 0, 0, 1)


@given(
    st.lists(st.sets(st.tuples(st.integers(0, 40), st.integers(0, 2))), min_size=1, max_size=4),
    st.integers(1, 5), st.integers(0, 41) | st.none(),
)
def test_merging_pages_of_any_size_gives_every_record_once_and_whole_keys(
    nodes: list[set[tuple[int, int]]], size: int, start: int | None
) -> None:
    after = None if start is None else start.to_bytes(KEY_BYTES, "big")
    every = [sorted((key.to_bytes(KEY_BYTES, "big"), bytes([digest]) * 16) for key, digest in names)
             for names in nodes]
    merge = Merge(range(len(nodes)), after)
    found: list[list[tuple[bytes, bytes]]] = [[] for _ in nodes]
    last_key = after or b""
    for _ in range(1_000):
        if merge.ended:
            break
        for index, behind in merge.wanted().items():
            rest = [name for name in every[index] if behind is None or name[0] + name[1] > behind]
            page = tuple(listed(*name) for name in rest[:size])
            merge.add(index, ListPage(page, rest[size - 1][0] + rest[size - 1][1] if len(rest) > size else None))
        stretch = merge.take()
        keys = {record.key for records in stretch.records.values() for record in records}
        assert not keys or min(keys) > last_key, "no key comes out in two parts"
        last_key = max(keys, default=last_key)
        for index, records in stretch.records.items():
            found[index] += [(record.key, record.digest) for record in records]
    assert merge.ended
    assert found == [[name for name in names if after is None or name[0] > after] for names in every]


def test_a_page_without_records_is_not_the_end() -> None:
    merge = Merge([0], None)
    behind = bytes(31) + b"\x05" + bytes(16)
    merge.add(0, ListPage((), behind))
    assert not merge.ended
    assert merge.take().count == 0
    assert merge.wanted() == {0: behind}


def test_only_weak_or_several_versions_are_suspected() -> None:
    whole, weak, double = (number.to_bytes(KEY_BYTES, "big") for number in (1, 2, 3))
    records = {index: [listed(whole), *([listed(weak)] if index < 9 else []), listed(double),
                       *([listed(double, b"x" * 16)] if index < 10 else [])] for index in ALL}
    assert Stretch(records).suspected(0) == [weak, double]
    assert Stretch(records).suspected(1) == [double]


async def test_a_sweep_that_is_cut_short_goes_on_where_it_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = FakeClock()
    bench = make_bench(clock)
    small_pages(monkeypatch)
    keys = sorted(make_keys(4 * PAGE, seed=18, run=1))
    await plant(bench, keys, 1, range(3))
    old_enough(clock)
    reports: list[SweepReport] = []
    after: bytes | None = None
    while not reports or after is not None:
        reports.append(await sweep_of(bench).run(after=after, max_seconds=0))
        resume = reports[-1].resume
        after = None if resume is None else bytes.fromhex(resume)
        assert after is None or all(not bench.records(key) for key in keys if key <= after)
    assert len(reports) >= 4
    assert sum(report.records for report in reports) == 3 * len(keys)
    assert sum(report.dropped for report in reports) == 3 * len(keys)
    assert bench.counts("sweep_runs", "sweep_dropped") == (1, 3 * len(keys))


async def test_a_wrong_place_to_go_on_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="a key has 3 bytes"):
        await sweep_of(make_bench(FakeClock())).run(after=b"abc")


async def test_a_sweep_waits_while_a_call_is_running_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = make_bench(FakeClock())
    await plant(bench, make_keys(1, seed=19), 1, range(3))
    traffic = Traffic()
    with traffic.call():
        sweep = asyncio.create_task(sweep_of(bench, traffic=traffic).run())
        await asyncio.sleep(3 * YIELD_MS / 1000)
        assert not sweep.done()
    assert (await sweep).records == 3
    monkeypatch.setattr("efs.pace.YIELD_AT_MOST_MS", YIELD_MS)
    with traffic.call():
        assert (await sweep_of(bench, traffic=traffic).run()).records == 3


def test_why_a_version_is_condemned() -> None:
    whole = versions_of({b"a": range(12), b"b": range(11), b"c": range(9)})
    assert condemned(whole, 0) == {b"b": LOSING, b"c": HOLLOW}
    assert condemned(whole, 1) == {}
    assert condemned(versions_of({b"a": range(12), b"b": range(8)}), 1) == {b"b": HOLLOW}
    assert condemned({}, 0) == {}


def test_records_for_planting_are_the_same_version_on_every_node() -> None:
    keys = make_keys(2, seed=1)
    made: list[Records] = [make_records(2, index, seed=4, keys=keys) for index in ALL]
    assert len({records.digests for records in made}) == 1
