"""The order of eviction, the window for whole chunks, watermarks and the horizon (faults 33, 34, 36)."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from efs.clock import stamp_of
from efs.errors import InvalidArgument
from efs.gc import (
    NOTHING,
    Admission,
    Horizon,
    Records,
    Watermarks,
    admit,
    bar,
    enough,
    order_key,
    order_keys,
    ranks_of,
    select,
    ties_of,
)
from efs.limits import DEPTH_UNKNOWN, EVICTION_WINDOW_SHARE, HORIZON_MINUTES


@dataclass(frozen=True, slots=True)
class Block:
    """One record as a test thinks of it."""

    stamp: int
    depth: int
    key: bytes
    digest: bytes = bytes(16)
    slot_bytes: int = 64

    def order(self) -> int:
        """By the definition: stamp, depth from the deepest up, three bytes of the key, one of the digest."""
        tie = int.from_bytes(self.key[:3] + self.digest[:1], "big")
        return (self.stamp * 2**32 + 2**32 - 1 - self.depth) * 2**32 + tie


def key_of(number: int) -> bytes:
    # The low byte first, so that an order by words instead of bytes would show.
    return number.to_bytes(4, "little") + bytes(28)


def node_with(blocks: list[Block], chunks: list[int] | None = None) -> Records:
    keys = np.frombuffer(b"".join(block.key for block in blocks), "<u8").reshape(-1, 4)
    digests = np.frombuffer(b"".join(block.digest for block in blocks), "<u8").reshape(-1, 2)
    stamps = np.array([block.stamp for block in blocks], np.uint32)
    chunk = np.array(chunks if chunks is not None else range(len(blocks)), np.int64)
    return Records(
        rank=ranks_of(stamps, np.array([block.depth for block in blocks], np.uint32)),
        tie=ties_of(keys, digests),
        chunk=chunk,
        chunk_live=np.bincount(chunk)[chunk] if blocks else chunk,
        size=np.array([block.slot_bytes for block in blocks], np.int64),
    )


def chosen(blocks: list[Block], rows: NDArray[np.int64]) -> list[Block]:
    return [blocks[row] for row in rows.tolist()]


def plain_order(blocks: list[Block], free_bytes: int) -> list[Block]:
    """What exact LRU would evict, by the definition."""
    victims: list[Block] = []
    for block in sorted(blocks, key=Block.order):
        if sum(victim.slot_bytes for victim in victims) >= free_bytes:
            break
        victims.append(block)
    return victims


def blocks_of(max_size: int = 60) -> st.SearchStrategy[list[Block]]:
    block = st.builds(
        Block,
        stamp=st.integers(0, 3) | st.just(2**32 - 1),
        depth=st.integers(0, 4) | st.just(DEPTH_UNKNOWN),
        key=st.integers(0, 2**32 - 1).map(key_of),
        digest=st.integers(0, 3).map(lambda number: number.to_bytes(16, "little")),
        slot_bytes=st.sampled_from([64, 128, 11_392]),
    )
    return st.lists(block, min_size=1, max_size=max_size, unique_by=Block.order)


# -- The order -------------------------------------------------------------------------------------------------------


@given(blocks=blocks_of(), share=st.floats(0.01, 1.2))
def test_without_a_window_the_victims_are_exactly_those_of_lru(blocks: list[Block], share: float) -> None:
    free_bytes = math.ceil(share * sum(block.slot_bytes for block in blocks))
    assert chosen(blocks, select(node_with(blocks), free_bytes)) == plain_order(blocks, free_bytes)


def test_the_order_is_stamp_then_deeper_then_key_then_digest() -> None:
    blocks = [
        Block(7, DEPTH_UNKNOWN, key_of(9)),
        Block(7, 5, key_of(9)),
        Block(7, 4, b"\x00\x02\x01" + bytes(29)),
        Block(7, 4, b"\x01\x01\x00" + bytes(29)),
        Block(7, 4, b"\x01\x01\x01" + bytes(29), digest=b"\x00" + bytes(15)),
        Block(7, 4, b"\x01\x01\x01" + bytes(29), digest=b"\x01" + bytes(15)),
        Block(7, 0, bytes(32)),
        Block(8, DEPTH_UNKNOWN, bytes(32)),
    ]
    shuffled = blocks[:]
    random.Random(3).shuffle(shuffled)
    assert shuffled != blocks
    assert chosen(shuffled, select(node_with(shuffled), 64 * len(blocks))) == blocks


@given(blocks=blocks_of())
def test_order_keys_are_the_order(blocks: list[Block]) -> None:
    records = node_with(blocks)
    assert order_keys(records.rank, records.tie) == [block.order() for block in blocks]
    one = blocks[0]
    assert order_key(one.stamp, one.depth, int(records.tie[0])) == one.order() < 2**96


def test_of_equal_order_keys_the_lower_slot_goes_first() -> None:
    blocks = [Block(1, 1, b"same" + bytes([number] * 28)) for number in range(5)]
    assert select(node_with(blocks), 64 * 3).tolist() == [0, 1, 2]


def test_the_tail_of_a_chain_goes_before_its_head_however_prefixes_were_used() -> None:
    """Fault 33: uses of prefixes at any second; what is left of every chain is always a prefix."""
    seed = 20_261
    source = random.Random(seed)
    for round_number in range(50):
        stamps = {(chain, depth): 0 for chain in range(6) for depth in range(40)}
        seconds = 0.0
        for _ in range(60):
            seconds += source.choice([0.0, 1.0, 59.0, 61.0, 600.0])
            chain = source.randrange(6)
            for depth in range(source.randrange(1, 41)):
                stamps[chain, depth] = stamp_of(seconds)
        blocks = [Block(stamp, depth, key_of(chain * 1000 + depth)) for (chain, depth), stamp in stamps.items()]
        evicted = set(select(node_with(blocks), 64 * source.randrange(1, 240)).tolist())
        for chain in range(6):
            left = [row % 40 for row in range(chain * 40, chain * 40 + 40) if row not in evicted]
            assert left == list(range(len(left))), (seed, round_number, chain)


def test_a_head_used_at_second_0_and_with_its_tail_at_second_59_outlives_the_tail() -> None:
    stamps = {depth: stamp_of(0) for depth in range(10)} | {depth: stamp_of(59) for depth in range(20)}
    blocks = [Block(stamp, depth, key_of(depth)) for depth, stamp in stamps.items()]
    assert [block.depth for block in chosen(blocks, select(node_with(blocks), 64 * 10))] == list(range(19, 9, -1))


def test_no_record_is_exempt_and_a_look_up_pins_nothing() -> None:
    """Fault 36: the hottest record goes too when everything must, and used records go in the order of their stamps."""
    blocks = [Block(minute, 0, key_of(minute)) for minute in (5, 2**32 - 1, 1)]
    assert sorted(select(node_with(blocks), 10**9).tolist()) == [0, 1, 2]
    used = [Block(10 if number == 0 else 1, 0, key_of(number)) for number in range(5)]
    assert 0 not in select(node_with(used), 64 * 4)
    later = [Block(10 if number == 0 else 11, 0, key_of(number)) for number in range(5)]
    assert select(node_with(later), 64).tolist() == [0]


def test_nothing_to_free_selects_nothing() -> None:
    for rows in (select(node_with([Block(1, 1, bytes(32))]), 0), select(node_with([]), 100)):
        assert len(rows) == 0


def test_arrays_of_different_lengths_are_refused() -> None:
    good = node_with([Block(1, 1, bytes(32))] * 2)
    with pytest.raises(InvalidArgument, match="arrays of 2 records"):
        Records(good.rank, good.tie[:1], good.chunk, good.chunk_live, good.size)


# -- The window ------------------------------------------------------------------------------------------------------


@given(blocks=blocks_of(), seed=st.integers(0, 99), share=st.floats(0.01, 1.0), window=st.integers(0, 30))
def test_no_record_outside_the_window_is_evicted_early_or_kept(
    blocks: list[Block], seed: int, share: float, window: int
) -> None:
    free_bytes = math.ceil(share * sum(block.slot_bytes for block in blocks))
    chunks = [random.Random(seed).randrange(1 + len(blocks) // 3) for _ in blocks]
    victims = chosen(blocks, select(node_with(blocks, chunks), free_bytes, window))
    ranked = sorted(blocks, key=Block.order)
    plain = len(plain_order(blocks, free_bytes))
    assert set(ranked[: max(0, plain - window)]) <= set(victims) <= set(ranked[: plain + window])
    assert victims == sorted(victims, key=Block.order), "coldest first"
    freed = sum(block.slot_bytes for block in victims)
    assert free_bytes <= freed < free_bytes + 11_392


@given(blocks=blocks_of(), seed=st.integers(0, 99), share=st.floats(0.01, 1.0))
def test_nodes_with_the_same_records_in_different_slots_agree_up_to_the_window(
    blocks: list[Block], seed: int, share: float
) -> None:
    source = random.Random(seed)
    other = blocks[:]
    source.shuffle(other)
    free_bytes = math.ceil(share * sum(block.slot_bytes for block in blocks))
    spread = [source.randrange(8) for _ in blocks]
    exact = chosen(blocks, select(node_with(blocks), free_bytes))
    assert chosen(other, select(node_with(other, spread), free_bytes)) == exact
    window = len(blocks) // 5
    one = set(chosen(blocks, select(node_with(blocks), free_bytes, window)))
    two = set(chosen(other, select(node_with(other, spread), free_bytes, window)))
    ranked = sorted(blocks, key=Block.order)
    assert one ^ two <= set(ranked[max(0, len(exact) - window) : len(exact) + window])


def test_whole_chunks_are_freed_where_plain_order_would_leave_holes() -> None:
    # In the order: A B A B A B A B | A..., four slots to free. Plain order takes two of each chunk.
    blocks = [Block(1, 100 - number, key_of(number)) for number in range(40)]
    chunks = [0, 1, 0, 1, 0, 1, 0, 1, *range(2, 34)]
    plain = select(node_with(blocks, chunks), 4 * 64)
    assert [chunks[row] for row in plain] == [0, 1, 0, 1]
    better = select(node_with(blocks, chunks), 4 * 64, window=4)
    assert [chunks[row] for row in better] == [0, 0, 0, 0]


def test_a_chunk_with_one_record_beyond_the_window_is_not_preferred() -> None:
    blocks = [Block(1, 100 - number, key_of(number)) for number in range(40)]
    chunks = [0, 1, 0, 1, 0, 1, 0, 1, *[0] * 32]
    selection = select(node_with(blocks, chunks), 4 * 64, window=4)
    assert [chunks[row] for row in selection] == [1, 1, 1, 1]


def test_a_chunk_larger_than_what_is_needed_is_not_taken_whole() -> None:
    blocks = [Block(1, 100 - number, key_of(number)) for number in range(40)]
    selection = select(node_with(blocks, [0] * 4 + [1] * 36), 3 * 64, window=4)
    assert selection.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", range(3))
def test_twelve_nodes_that_collect_alone_leave_at_most_one_percent_of_broken_stripes(seed: int) -> None:
    """Fault 34: the same chains in other slots on each node, 5 % of the blocks to free."""
    source = np.random.default_rng(seed)
    chains, length, slots = 100, 64, 8
    n = chains * length
    stamp = source.integers(100, 140, chains).astype(np.uint32).repeat(length)
    depth = np.tile(np.arange(length, dtype=np.uint32), chains)
    key = source.integers(0, 2**63, (n, 4)).astype(np.uint64)
    holders = np.zeros(n, np.int64)
    whole_with_window, whole_without = 0, 0
    for _ in range(12):
        # Neighbours in a chain share a chunk, except 5 % that lie where there was room.
        slot = np.arange(n)
        stray = source.choice(n, n // 20, replace=False)
        slot[stray] = slot[source.permutation(stray)]
        chunk = source.permutation(n // slots)[slot // slots]
        ties = ties_of(key, np.zeros((n, 2), np.uint64))
        records = Records(ranks_of(stamp, depth), ties, chunk, np.full(n, slots), np.full(n, 11_392))
        rows = select(records, 11_392 * n // 20, int(EVICTION_WINDOW_SHARE * n))
        assert len(rows) == n // 20
        kept = np.ones(n, np.bool_)
        kept[rows] = False
        holders += kept
        whole_with_window += whole_chunks(chunk, rows)
        whole_without += whole_chunks(chunk, select(records, 11_392 * n // 20))
    broken = np.count_nonzero((holders > 0) & (holders < 10))
    assert broken <= 0.01 * n
    assert np.count_nonzero(holders == 0) >= (1 / 20 - EVICTION_WINDOW_SHARE) * n
    print(f"seed {seed}: {broken} broken stripes, whole chunks {whole_without} -> {whole_with_window}")
    assert whole_with_window > whole_without


def whole_chunks(chunk: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    gone = np.bincount(chunk[rows], minlength=chunk.max() + 1)
    return int(np.count_nonzero(gone == np.bincount(chunk)))


def test_a_bad_window_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="window is -1"):
        select(node_with([Block(1, 1, bytes(32))]), 1, -1)


def test_records_that_are_hotter_than_all_that_matter_may_be_left_out() -> None:
    blocks = [Block(number // 3, 100 - number % 7, key_of(number)) for number in range(60)]
    chunks = [number // 4 for number in range(60)]
    whole = node_with(blocks, chunks)
    needed = enough(10 * 64, 5, 64)
    kept = np.sort(np.lexsort((whole.tie, whole.rank))[:needed])
    part = Records(whole.rank[kept], whole.tie[kept], whole.chunk[kept], whole.chunk_live[kept], whole.size[kept])
    assert kept[select(part, 10 * 64, 5)].tolist() == select(whole, 10 * 64, 5).tolist()


# -- Watermarks ------------------------------------------------------------------------------------------------------


def test_a_node_above_the_high_mark_frees_down_to_the_low_mark() -> None:
    marks = Watermarks()
    assert marks.bytes_to_free(920, 1000) == 0
    assert marks.bytes_to_free(921, 1000) == 41
    assert marks.bytes_to_free(1000, 1000) == 120
    assert marks.bytes_above_reject(970, 1000) == 0
    assert marks.bytes_above_reject(975, 1000) == 5


def test_marks_refer_to_the_smallest_node_so_a_larger_one_frees_as_much() -> None:
    assert Watermarks().bytes_to_free(950, 1000) == 70
    assert Watermarks().bytes_to_free(950, 800) == 950 - 704


@given(
    live=st.integers(0, 10**12), smallest=st.integers(1, 10**12),
    low=st.floats(0.01, 0.9), step=st.floats(0.001, 0.04),
)
def test_after_freeing_nothing_more_is_to_be_freed(live: int, smallest: int, low: float, step: float) -> None:
    marks = Watermarks(low, low + step, low + 2 * step)
    free = marks.bytes_to_free(live, smallest)
    assert 0 <= free <= live
    assert marks.bytes_to_free(live - free, smallest) == 0
    assert marks.bytes_above_reject(live - free, smallest) == 0
    if free:
        assert live - free == math.floor(low * smallest)


@pytest.mark.parametrize(
    ("low", "high", "reject"),
    [(0.9, 0.9, 0.97), (0.95, 0.92, 0.97), (0.88, 0.97, 0.97), (0, 0.9, 0.95), (0.8, 0.9, 1.01), (math.nan, 0.9, 0.95)],
)
def test_marks_that_do_not_rise_are_refused(low: float, high: float, reject: float) -> None:
    with pytest.raises(InvalidArgument, match="watermarks low"):
        Watermarks(low, high, reject)


# -- What comes in ---------------------------------------------------------------------------------------------------


def test_a_put_that_fits_evicts_nothing_and_refuses_nothing() -> None:
    assert admit([5, 1, 3], [2, 4], short=0) == Admission((0, 1, 2), 0)


def test_hotter_newcomers_push_out_the_coldest() -> None:
    assert admit([50, 60], [1, 2, 3], short=2) == Admission((0, 1), 2)


def test_newcomers_that_are_colder_than_everything_stay_out() -> None:
    assert admit([5, 60, 4], [10, 20], short=2) == Admission((1,), 0)
    assert admit([5, 60, 4], [10, 20], short=3) == Admission((1,), 1)


def test_when_there_is_too_little_to_evict_the_coldest_newcomers_stay_out() -> None:
    assert admit([7, 5, 6], [1], short=3) == Admission((0,), 1)
    assert admit([7, 5, 6], [], short=9) == Admission((), 0)


def test_more_is_evicted_at_once_only_below_what_comes() -> None:
    assert admit([50], [1, 2, 3, 60, 61], short=1, at_once=4) == Admission((0,), 3)
    assert admit([50], [1, 2, 3, 60, 61], short=0, at_once=4) == Admission((0,), 3)
    assert admit([50], [1, 2, 3, 60, 61], short=1, at_once=0) == Admission((0,), 1)


@given(st.lists(st.integers(0, 30), max_size=8), st.lists(st.integers(0, 30), max_size=8), st.integers(0, 20))
def test_what_is_left_is_the_hottest_of_both(newcomers: list[int], held: list[int], short: int) -> None:
    held.sort()
    outcome = admit(newcomers, held, short)
    left = sorted([newcomers[row] for row in outcome.rows] + held[outcome.evicted :])
    gone = len(newcomers) - len(outcome.rows) + outcome.evicted
    assert gone <= short
    assert not outcome.rows or gone == min(short, len(newcomers) + len(held))
    assert left == sorted(newcomers + held)[gone:]


def test_the_tail_of_a_prompt_that_is_too_long_does_not_push_out_its_head() -> None:
    """A cache of 8 records with the first 6 blocks of a prompt, just used; its next 10 blocks come."""
    held = sorted(order_key(9, depth, 0) for depth in range(6))
    old = [order_key(1, 0, 0), order_key(2, 0, 0)]
    coming = [order_key(9, depth, 0) for depth in range(6, 16)]
    bars = [bar(key, most_records=8) for key in coming]
    assert admit(coming, old + held, short=10, bars=bars) == Admission((0, 1), 2)


def test_a_newcomer_counts_as_the_hottest_of_its_stamp_unless_its_prompt_does_not_fit() -> None:
    hottest, later = order_key(9, 0, 2**32 - 1), order_key(10, DEPTH_UNKNOWN, 0)
    for depth in (0, 7, DEPTH_UNKNOWN):
        assert hottest < bar(order_key(9, depth, 5), most_records=8) <= later
    assert bar(order_key(9, 8, 5), most_records=8) == order_key(9, 8, 5)


def test_a_burst_of_puts_in_one_stamp_replaces_what_came_before_and_of_itself_the_deepest_stays_out() -> None:
    held = sorted(order_key(9, depth, 0) for depth in range(4))
    coming = [order_key(9, depth, 1) for depth in range(6)]
    bars = [bar(key, most_records=100) for key in coming]
    assert admit(coming, held, short=4, bars=bars) == Admission((0, 1, 2, 3, 4, 5), 4)
    assert admit(coming, held, short=6, bars=bars) == Admission((0, 1, 2, 3), 4)
    assert admit(coming, held, short=2, bars=bars, at_once=4).evicted == 2, "no more of its stamp than it must"


# -- The horizon -----------------------------------------------------------------------------------------------------


def test_repair_of_a_record_at_or_below_the_horizon_is_too_cold() -> None:
    blocks = [Block(stamp, 3, key_of(stamp)) for stamp in (10, 20, 30, 40)]
    evicted = chosen(blocks, select(node_with(blocks), 2 * 64))
    horizon = Horizon().note(max(block.order() for block in evicted), minute=100)
    assert [horizon.too_cold(block.order(), minute=100) for block in blocks] == [True, True, False, False]


def test_a_node_that_evicted_nothing_refuses_nothing() -> None:
    assert Horizon().at(100) == NOTHING
    assert not Horizon().too_cold(order_key(0, DEPTH_UNKNOWN, 0), 100)


def test_the_horizon_is_the_highest_of_several_evictions() -> None:
    low, high = order_key(1, 0, 0), order_key(2, 0, 0)
    assert Horizon().note(high, 100).note(low, 101).at(102) == high
    assert Horizon().note(low, 100).note(high, 101).at(102) == high


def test_the_horizon_is_remembered_for_one_to_two_periods() -> None:
    high = order_key(2, 0, 0)
    start = 50 * HORIZON_MINUTES
    for evicted_at in (start, start + HORIZON_MINUTES - 1):
        horizon = Horizon().note(high, evicted_at)
        assert horizon.at(evicted_at + HORIZON_MINUTES) == high
        assert horizon.at(start + 2 * HORIZON_MINUTES - 1) == high
        assert horizon.at(start + 2 * HORIZON_MINUTES) == NOTHING
    later = order_key(1, 0, 0)
    moved = Horizon().note(high, start).note(later, start + HORIZON_MINUTES)
    assert moved.at(start + HORIZON_MINUTES) == high
    assert moved.at(start + 2 * HORIZON_MINUTES) == later
    assert moved.note(later, start + 9 * HORIZON_MINUTES).at(start + 9 * HORIZON_MINUTES) == later


def test_a_wall_clock_that_is_set_back_does_not_lose_the_horizon() -> None:
    high = order_key(2, 0, 0)
    assert Horizon().note(high, 500 * HORIZON_MINUTES).at(3) == high
