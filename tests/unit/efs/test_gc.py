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
from efs.gc import NOTHING, Horizon, Records, Selection, Watermarks, order_key, select
from efs.limits import DEPTH_UNKNOWN, EVICTION_WINDOW_SHARE, HORIZON_MINUTES


@dataclass(frozen=True, slots=True)
class Block:
    """One record as a test thinks of it."""

    stamp: int
    depth: int
    key: bytes
    digest: bytes = bytes(16)
    slot_bytes: int = 64

    def order(self) -> tuple[bytes, bytes]:
        return order_key(self.stamp, self.depth, self.key), self.digest


def key_of(number: int) -> bytes:
    # The low byte first, so that an order by words instead of bytes would show.
    return number.to_bytes(4, "little") + bytes(28)


def node_with(blocks: list[Block], chunks: list[int] | None = None) -> Records:
    return Records(
        stamp=np.array([block.stamp for block in blocks], np.uint32),
        depth=np.array([block.depth for block in blocks], np.uint32),
        key=np.frombuffer(b"".join(block.key for block in blocks), "<u8").reshape(-1, 4),
        digest=np.frombuffer(b"".join(block.digest for block in blocks), "<u8").reshape(-1, 2),
        chunk=np.array(chunks if chunks is not None else range(len(blocks)), np.int64),
        slot_bytes=np.array([block.slot_bytes for block in blocks], np.int64),
    )


def chosen(blocks: list[Block], selection: Selection) -> list[Block]:
    return [blocks[row] for row in selection.rows.tolist()]


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
    return st.lists(block, min_size=1, max_size=max_size, unique_by=lambda made: (made.key, made.digest))


# -- The order -------------------------------------------------------------------------------------------------------


@given(blocks=blocks_of(), share=st.floats(0.01, 1.2))
def test_without_a_window_the_victims_are_exactly_those_of_lru(blocks: list[Block], share: float) -> None:
    free_bytes = math.ceil(share * sum(block.slot_bytes for block in blocks))
    selection = select(node_with(blocks), free_bytes, window_share=0)
    expected = plain_order(blocks, free_bytes)
    assert chosen(blocks, selection) == expected
    assert selection.highest == expected[-1].order()[0]


def test_the_order_is_stamp_then_deeper_then_key_then_digest() -> None:
    blocks = [
        Block(7, DEPTH_UNKNOWN, key_of(9)),
        Block(7, 5, key_of(9)),
        Block(7, 4, b"\x00\x02" + bytes(30)),
        Block(7, 4, b"\x01\x01" + bytes(30)),
        Block(7, 4, b"\x01\x01" + bytes(30), digest=b"\x00\x01" + bytes(14)),
        Block(7, 4, b"\x01\x01" + bytes(30), digest=b"\x01\x00" + bytes(14)),
        Block(7, 0, bytes(32)),
        Block(8, DEPTH_UNKNOWN, bytes(32)),
    ]
    shuffled = blocks[:]
    random.Random(3).shuffle(shuffled)
    assert shuffled != blocks
    assert chosen(shuffled, select(node_with(shuffled), 64 * len(blocks))) == blocks


@given(
    one=st.tuples(st.integers(0, 9), st.integers(0, 9) | st.just(DEPTH_UNKNOWN), st.binary(min_size=32, max_size=32)),
    other=st.tuples(st.integers(0, 9), st.integers(0, 9) | st.just(DEPTH_UNKNOWN), st.binary(min_size=32, max_size=32)),
)
def test_order_keys_compare_like_the_order(one: tuple[int, int, bytes], other: tuple[int, int, bytes]) -> None:
    def by_definition(record: tuple[int, int, bytes]) -> tuple[int, int, bytes]:
        return record[0], -record[1], record[2]

    assert (order_key(*one) < order_key(*other)) == (by_definition(one) < by_definition(other))
    assert len(order_key(*one)) == 40


def test_an_order_key_of_a_short_key_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="31 bytes, must have 32"):
        order_key(1, 1, bytes(31))


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
        evicted = set(select(node_with(blocks), 64 * source.randrange(1, 240), window_share=0).rows.tolist())
        for chain in range(6):
            left = [row % 40 for row in range(chain * 40, chain * 40 + 40) if row not in evicted]
            assert left == list(range(len(left))), (seed, round_number, chain)


def test_a_head_used_at_second_0_and_with_its_tail_at_second_59_outlives_the_tail() -> None:
    first, second = stamp_of(0), stamp_of(59)
    assert first == second
    blocks = [Block(second, depth, key_of(depth)) for depth in range(20)]
    assert [block.depth for block in chosen(blocks, select(node_with(blocks), 64 * 10))] == list(range(19, 9, -1))


def test_no_record_is_exempt_and_a_look_up_pins_nothing() -> None:
    """Fault 36: the hottest record goes too when everything must, and used records go in the order of their minutes."""
    blocks = [Block(minute, 0, key_of(minute)) for minute in (5, 2**32 - 1, 1)]
    assert sorted(select(node_with(blocks), 10**9).rows.tolist()) == [0, 1, 2]
    used = [Block(10 if number == 0 else 1, 0, key_of(number)) for number in range(5)]
    assert 0 not in select(node_with(used), 64 * 4).rows
    later = [Block(10 if number == 0 else 11, 0, key_of(number)) for number in range(5)]
    assert select(node_with(later), 64).rows.tolist() == [0]


def test_nothing_to_free_selects_nothing() -> None:
    for selection in (select(node_with([Block(1, 1, bytes(32))]), 0), select(node_with([]), 100)):
        assert len(selection.rows) == 0
        assert selection.highest == NOTHING


def test_arrays_of_different_lengths_are_refused() -> None:
    good = node_with([Block(1, 1, bytes(32))] * 2)
    with pytest.raises(InvalidArgument, match="arrays of 2 records"):
        Records(good.stamp, good.depth[:1], good.key, good.digest, good.chunk, good.slot_bytes)


# -- The window ------------------------------------------------------------------------------------------------------


@given(blocks=blocks_of(), seed=st.integers(0, 99), share=st.floats(0.01, 1.0), window_share=st.floats(0, 0.5))
def test_no_record_outside_the_window_is_evicted_early_or_kept(
    blocks: list[Block], seed: int, share: float, window_share: float
) -> None:
    free_bytes = math.ceil(share * sum(block.slot_bytes for block in blocks))
    chunks = [random.Random(seed).randrange(1 + len(blocks) // 3) for _ in blocks]
    victims = chosen(blocks, select(node_with(blocks, chunks), free_bytes, window_share))
    ranked = sorted(blocks, key=Block.order)
    plain, window = len(plain_order(blocks, free_bytes)), math.floor(window_share * len(blocks))
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
    exact = chosen(blocks, select(node_with(blocks), free_bytes, 0))
    assert chosen(other, select(node_with(other, spread), free_bytes, 0)) == exact
    window_share = 0.2
    one = set(chosen(blocks, select(node_with(blocks), free_bytes, window_share)))
    two = set(chosen(other, select(node_with(other, spread), free_bytes, window_share)))
    ranked = sorted(blocks, key=Block.order)
    window = math.floor(window_share * len(blocks))
    assert one ^ two <= set(ranked[max(0, len(exact) - window) : len(exact) + window])


def test_whole_chunks_are_freed_where_plain_order_would_leave_holes() -> None:
    # In the order: A B A B A B A B | A..., four slots to free. Plain order takes two of each chunk.
    blocks = [Block(1, 100 - number, key_of(number)) for number in range(40)]
    chunks = [0, 1, 0, 1, 0, 1, 0, 1, *range(2, 34)]
    plain = select(node_with(blocks, chunks), 4 * 64, window_share=0)
    assert [chunks[row] for row in plain.rows] == [0, 1, 0, 1]
    better = select(node_with(blocks, chunks), 4 * 64, window_share=0.1)
    assert [chunks[row] for row in better.rows] == [0, 0, 0, 0]
    assert better.highest == blocks[6].order()[0]


def test_a_chunk_with_one_record_beyond_the_window_is_not_preferred() -> None:
    blocks = [Block(1, 100 - number, key_of(number)) for number in range(40)]
    chunks = [0, 1, 0, 1, 0, 1, 0, 1, *[0] * 32]
    selection = select(node_with(blocks, chunks), 4 * 64, window_share=0.1)
    assert [chunks[row] for row in selection.rows] == [1, 1, 1, 1]


def test_a_chunk_larger_than_what_is_needed_is_not_taken_whole() -> None:
    blocks = [Block(1, 100 - number, key_of(number)) for number in range(40)]
    selection = select(node_with(blocks, [0] * 4 + [1] * 36), 3 * 64, window_share=0.1)
    assert selection.rows.tolist() == [0, 1, 2]


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
        records = Records(stamp, depth, key, np.zeros((n, 2), np.uint64), chunk, np.full(n, 11_392))
        rows = select(records, 11_392 * n // 20).rows
        assert len(rows) == n // 20
        kept = np.ones(n, np.bool_)
        kept[rows] = False
        holders += kept
        whole_with_window += whole_chunks(chunk, rows)
        whole_without += whole_chunks(chunk, select(records, 11_392 * n // 20, 0).rows)
    broken = np.count_nonzero((holders > 0) & (holders < 10))
    assert broken <= 0.01 * n
    assert np.count_nonzero(holders == 0) >= (1 / 20 - EVICTION_WINDOW_SHARE) * n
    print(f"seed {seed}: {broken} broken stripes, whole chunks {whole_without} -> {whole_with_window}")
    assert whole_with_window > whole_without


def whole_chunks(chunk: NDArray[np.int64], rows: NDArray[np.int64]) -> int:
    gone = np.bincount(chunk[rows], minlength=chunk.max() + 1)
    return int(np.count_nonzero(gone == np.bincount(chunk)))


def test_a_bad_window_is_refused() -> None:
    for share in (-0.1, 1.1, math.nan):
        with pytest.raises(InvalidArgument, match="window_share is"):
            select(node_with([Block(1, 1, bytes(32))]), 1, share)


# -- Watermarks ------------------------------------------------------------------------------------------------------


def test_a_node_above_the_high_mark_frees_down_to_the_low_mark() -> None:
    marks = Watermarks()
    assert marks.bytes_to_free(920, 1000) == 0
    assert marks.bytes_to_free(921, 1000) == 41
    assert marks.bytes_to_free(1000, 1000) == 120
    assert not marks.refuses_puts(970, 1000)
    assert marks.refuses_puts(971, 1000)


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
    assert not marks.refuses_puts(live - free, smallest)
    if free:
        assert live - free == math.floor(low * smallest)


@pytest.mark.parametrize(
    ("low", "high", "reject"),
    [(0.9, 0.9, 0.97), (0.95, 0.92, 0.97), (0.88, 0.97, 0.97), (0, 0.9, 0.95), (0.8, 0.9, 1.01), (math.nan, 0.9, 0.95)],
)
def test_marks_that_do_not_rise_are_refused(low: float, high: float, reject: float) -> None:
    with pytest.raises(InvalidArgument, match="watermarks low"):
        Watermarks(low, high, reject)


# -- The horizon -----------------------------------------------------------------------------------------------------


def test_repair_of_a_record_at_or_below_the_horizon_is_too_cold() -> None:
    blocks = [Block(stamp, 3, key_of(stamp)) for stamp in (10, 20, 30, 40)]
    selection = select(node_with(blocks), 2 * 64)
    horizon = Horizon().note(selection.highest, minute=100)
    verdicts = [horizon.too_cold(block.order()[0], minute=100) for block in blocks]
    assert verdicts == [True, True, False, False]


def test_a_node_that_evicted_nothing_refuses_nothing() -> None:
    assert Horizon().at(100) == NOTHING
    assert not Horizon().too_cold(order_key(0, DEPTH_UNKNOWN, bytes(32)), 100)


def test_the_horizon_is_the_highest_of_several_evictions() -> None:
    low, high = order_key(1, 0, bytes(32)), order_key(2, 0, bytes(32))
    assert Horizon().note(high, 100).note(low, 101).at(102) == high
    assert Horizon().note(low, 100).note(high, 101).at(102) == high


def test_the_horizon_is_remembered_for_one_to_two_periods() -> None:
    high = order_key(2, 0, bytes(32))
    start = 50 * HORIZON_MINUTES
    for evicted_at in (start, start + HORIZON_MINUTES - 1):
        horizon = Horizon().note(high, evicted_at)
        assert horizon.at(evicted_at + HORIZON_MINUTES) == high
        assert horizon.at(start + 2 * HORIZON_MINUTES - 1) == high
        assert horizon.at(start + 2 * HORIZON_MINUTES) == NOTHING
    later = order_key(1, 0, bytes(32))
    moved = Horizon().note(high, start).note(later, start + HORIZON_MINUTES)
    assert moved.at(start + HORIZON_MINUTES) == high
    assert moved.at(start + 2 * HORIZON_MINUTES) == later
    assert moved.note(later, start + 9 * HORIZON_MINUTES).at(start + 9 * HORIZON_MINUTES) == later


def test_a_wall_clock_that_is_set_back_does_not_lose_the_horizon() -> None:
    high = order_key(2, 0, bytes(32))
    assert Horizon().note(high, 500 * HORIZON_MINUTES).at(3) == high
