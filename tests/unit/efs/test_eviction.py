"""What goes first on a node, from memory: the order equals a naive sort, and no class keeps space that others need."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from efs.allocator import LIVE, Allocator
from efs.eviction import SAMPLED_SLOTS, Eviction, Queue, choose, slot_share
from efs.extent import Geometry, SlotClass, location_of
from efs.gc import order_key
from efs.limits import DEPTH_UNKNOWN, EXTENT_BYTES, MIB
from efs.shard import entry_bytes
from efs.stamps import Stamps

V41 = SlotClass(11_392, 176)
PAGES = SlotClass(4_096, entry_bytes(2))
Locations = NDArray[np.int64]


@dataclass(slots=True)
class FullNode:
    """Allocator, stamps and eviction as a node drives them; order keys as the test computes them on the side."""

    extents: int
    extent_bytes: int = EXTENT_BYTES
    allocator: Allocator = field(init=False)
    stamps: Stamps = field(init=False)
    eviction: Eviction = field(init=False)
    depths: dict[int, int] = field(default_factory=dict)
    ties: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = Allocator(self.extent_bytes, self.extents)
        self.stamps = Stamps(self.extents, 0)
        self.eviction = Eviction(self.allocator, self.stamps)

    def slots(self, slot_class: SlotClass) -> int:
        return Geometry(self.extent_bytes, slot_class).slots

    def put(self, slot_class: SlotClass, count: int, stamp: int, first_depth: int | None = 0) -> Locations:
        allocation = self.allocator.allocate(slot_class, count)
        assert not allocation.short
        for extent in allocation.fresh:
            self.stamps.attach(extent, self.allocator.geometry_for(slot_class))
        ranges = [np.arange(part.location, part.location + part.count) for part in allocation.ranges]
        locations = np.concatenate(ranges)
        depths = np.arange(count, dtype=np.uint32) + np.uint32(first_depth or 0)
        if first_depth is None:
            depths[:] = DEPTH_UNKNOWN
        ties = np.random.default_rng(int(locations[0])).integers(0, 2**32, count, np.uint32)
        self.allocator.mark_live(locations)
        self.stamps.set(locations, stamp)
        self.eviction.note(locations, depths, ties)
        self.depths.update(zip(locations.tolist(), depths.tolist(), strict=True))
        self.ties.update(zip(locations.tolist(), ties.tolist(), strict=True))
        return locations

    def drop(self, locations: Locations) -> None:
        self.allocator.release(np.sort(locations))

    def take(self, extent: int) -> int:
        """Take an extent from its class; returns how many records that cost."""
        lost = len(self.allocator.live_slots_of(extent))
        self.allocator.unassign(extent)
        self.stamps.detach(extent)
        return lost

    def key_of(self, location: int) -> int:
        stamp = int(self.stamps.get(np.array([location]))[0])
        return order_key(stamp, self.depths[location], self.ties[location])

    def order(self, extents: Sequence[int]) -> list[int]:
        """Live locations as the specification orders them, by sorting everything."""
        live = [location_of(extent, slot) for extent in extents
                for slot in np.flatnonzero(self.allocator.row(extent) == LIVE).tolist()]
        return sorted(live, key=lambda location: (self.key_of(location), location))

    def choose(self, count: int, extents: Sequence[int] | None = None, window_share: float = 0.0) -> Queue:
        every = range(self.extents) if extents is None else extents
        return choose(self.eviction.snapshot(every), count, by_count=True, window_share=window_share)


@pytest.fixture
def node() -> FullNode:
    """Two V4.1 extents, full: chains of 64 blocks, each used once in a minute of its own."""
    made = FullNode(2)
    minutes = list(range(1_000, 1_000 + 2 * 5_792 // 64))
    random.Random(5).shuffle(minutes)
    left = 2 * made.slots(V41)
    for minute in minutes:
        left -= len(made.put(V41, min(64, left), minute))
    assert left == 0
    return made


# -- Records ---------------------------------------------------------------------------------------------------------


def test_victims_are_the_head_of_a_full_sort(node: FullNode) -> None:
    victims = node.eviction.peek(node.choose(1_000), 1_000)
    assert victims.locations.tolist() == node.order(range(2))[:1_000]
    assert victims.keys == [node.key_of(location) for location in victims.locations.tolist()]


def test_choosing_changes_nothing(node: FullNode) -> None:
    before = [node.allocator.row(extent).copy() for extent in range(2)]
    node.choose(1_000)
    assert all((node.allocator.row(extent) == before[extent]).all() for extent in range(2))
    node.allocator.audit()


def test_only_the_named_extents_are_looked_at(node: FullNode) -> None:
    assert node.eviction.peek(node.choose(50, [1]), 50).locations.tolist() == node.order([1])[:50]


def test_a_record_used_since_it_was_chosen_is_spared(node: FullNode) -> None:
    queue = node.choose(10)
    used = queue.locations[[0, 3, 4]]
    node.stamps.touch(used, 9_999)
    victims = node.eviction.peek(queue, 10)
    assert victims.locations.tolist() == [place for place in queue.locations.tolist() if place not in used.tolist()]


def test_a_record_that_went_away_is_passed_and_so_is_one_that_came_into_its_slot(node: FullNode) -> None:
    queue = node.choose(6)
    node.drop(queue.locations[:3])
    came = node.put(V41, 1, 9_000)
    assert came[0] in queue.locations[:3]
    assert node.eviction.peek(queue, 2).locations.tolist() == queue.locations[3:5].tolist()
    assert queue.passed > 0


def test_looking_at_victims_does_not_take_them(node: FullNode) -> None:
    queue = node.choose(6)
    assert node.eviction.peek(queue, 4).locations.tolist() == node.eviction.peek(queue, 4).locations.tolist()
    assert len(node.eviction.peek(queue, 100).keys) == 6


def test_slots_in_flight_are_no_victims() -> None:
    node = FullNode(1)
    node.put(V41, 64, 10)
    (reserved,) = node.allocator.allocate(V41, 32).ranges
    assert len(node.eviction.peek(node.choose(200), 200).keys) == 64
    node.allocator.release_range(reserved)


def test_a_cold_record_in_a_slot_that_was_hot_is_cold() -> None:
    """A repaired record brings an old stamp along into space that hot records left."""
    node = FullNode(1)
    hot = node.put(V41, 32, 9_000)
    node.put(V41, 100, 1_000)
    node.drop(hot)
    repaired = node.put(V41, 32, 5)
    assert sorted(node.eviction.peek(node.choose(32), 32).locations.tolist()) == repaired.tolist()


def test_an_empty_node_has_no_victims() -> None:
    node = FullNode(2)
    assert len(node.choose(10).locations) == 0
    assert node.eviction.extent_to_take(V41, None, ()) is None


def test_bytes_are_counted_as_shares_of_extents(node: FullNode) -> None:
    share = slot_share(node.allocator.geometry_for(V41))
    assert EXTENT_BYTES * 0.999 <= share * node.slots(V41) <= EXTENT_BYTES
    queue = choose(node.eviction.snapshot(range(2)), 10 * share - 1, by_count=False, window_share=0)
    assert len(queue.locations) == 10


def test_whole_chunks_are_preferred_inside_the_window() -> None:
    """Two chains written in turns of one block, so that plain order would leave holes everywhere."""
    node = FullNode(1)
    chunk = Geometry(EXTENT_BYTES, V41).chunk_slots
    first = np.concatenate([node.put(V41, 1, 10 + turn % 2, first_depth=turn) for turn in range(2 * chunk)])
    second = node.put(V41, chunk, 12)
    node.stamps.set(second, 10)
    plain = node.choose(chunk)
    assert not set(plain.locations.tolist()) <= set(second.tolist())
    windowed = node.choose(chunk, window_share=1.0)
    chunks = {place // chunk for place in windowed.locations.tolist()}
    assert len(chunks) == 1
    assert len(first) == 2 * chunk


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_victims_equal_the_head_of_a_full_sort_whatever_happened(data: st.DataObject) -> None:
    node = FullNode(3, 256 * 1024)
    for _ in range(data.draw(st.integers(1, 12))):
        slot_class = data.draw(st.sampled_from([V41, PAGES]))
        depth = data.draw(st.none() | st.integers(0, 3))
        stamp = data.draw(st.integers(1, 4))
        usable = node.allocator.free_slots(slot_class)
        usable += int(node.allocator.free_extents.sum()) * node.slots(slot_class)
        if usable:
            placed = node.put(slot_class, data.draw(st.integers(1, min(usable, 30))), stamp, depth)
            if data.draw(st.booleans()):
                node.drop(placed[:: data.draw(st.integers(1, 3))])
            else:
                node.stamps.touch(placed[::2], data.draw(st.integers(1, 5)))
    count = data.draw(st.integers(1, 60))
    assert node.eviction.peek(node.choose(count), count).locations.tolist() == node.order(range(3))[:count]


# -- Extents ---------------------------------------------------------------------------------------------------------


def mixed(v41_minute: int, pages_minutes: tuple[int, int]) -> FullNode:
    """A full node: one extent of V4.1 shards, two of pages."""
    node = FullNode(3)
    node.put(V41, node.slots(V41), v41_minute)
    for minute in pages_minutes:
        node.put(PAGES, node.slots(PAGES), minute)
    return node


def test_a_new_class_on_a_full_node_takes_the_coldest_extent() -> None:
    """Fault 61."""
    new = SlotClass(64, entry_bytes(1))
    assert mixed(10, (30, 20)).eviction.extent_to_take(new, None, ()) == 0
    assert mixed(40, (30, 20)).eviction.extent_to_take(new, None, ()) == 2
    assert mixed(40, (30, 20)).eviction.extent_to_take(new, None, (2,)) == 1


def test_a_class_whose_coldest_record_is_colder_evicts_its_own() -> None:
    assert mixed(10, (30, 20)).eviction.extent_to_take(V41, 10, ()) is None
    assert mixed(10, (30, 20)).eviction.extent_to_take(V41, 20, ()) is None


def test_a_class_takes_an_extent_that_is_colder_than_its_coldest_record() -> None:
    assert mixed(40, (30, 20)).eviction.extent_to_take(V41, 40, ()) == 2
    assert mixed(40, (30, 20)).eviction.extent_to_take(PAGES, 20, ()) is None


def test_an_extent_is_as_warm_as_three_quarters_of_its_records() -> None:
    node = mixed(40, (30, 20))
    pages = node.allocator.live_slots_of(2) + location_of(2, 0)
    node.stamps.touch(pages[: len(pages) // 5], 99)
    assert node.eviction.extent_to_take(V41, 40, ()) == 2, "a few hot records do not keep an extent"
    node.stamps.touch(pages[: len(pages) // 3], 99)
    assert node.eviction.warmth(2) == 99
    assert node.eviction.extent_to_take(V41, 40, ()) == 1


def test_the_warmth_of_a_large_extent_is_taken_from_a_sample_and_of_a_nearly_empty_one_from_all() -> None:
    node = FullNode(1)
    every = node.put(PAGES, node.slots(PAGES), 7)
    assert len(every) > 4 * SAMPLED_SLOTS
    assert node.eviction.warmth(0) == 7
    node.drop(np.delete(every, 12_345 % len(every)))
    assert node.eviction.warmth(0) == 7


@pytest.mark.parametrize("empty", [1, 2])
def test_an_extent_without_records_is_colder_than_any(empty: int) -> None:
    node = mixed(1, (30, 20))
    node.drop(node.allocator.live_slots_of(empty) + location_of(empty, 0))
    assert node.eviction.warmth(empty) == -1
    assert node.eviction.extent_to_take(V41, 1, ()) == empty


def test_an_extent_with_a_slot_in_flight_is_not_taken() -> None:
    node = mixed(40, (30, 20))
    freed = node.allocator.live_slots_of(2)[:1] + location_of(2, 0)
    node.drop(freed)
    assert node.allocator.allocate(PAGES, 1).ranges[0].location == freed[0]
    assert node.eviction.extent_to_take(V41, 40, ()) == 1


def test_no_class_holds_cold_extents_for_ever_while_another_one_churns() -> None:
    """Fault 61: pages were used once, V4.1 shards come all the time; in the end nearly all space is theirs. One page
    extent that is used all the time stays."""
    node = FullNode(8, 4 * MIB)
    node.put(V41, node.slots(V41), 1_000)
    for _ in range(7):
        node.put(PAGES, node.slots(PAGES), 1_000)
    minute = 1_000
    kept = int(node.allocator.extents_of(PAGES)[0])
    wanted = 100
    for _ in range(60):
        minute += 1
        node.stamps.touch(node.allocator.live_slots_of(kept) + location_of(kept, 0), minute)
        if node.allocator.free_slots(V41) >= wanted or node.allocator.free_extents.any():
            node.put(V41, wanted, minute)
            continue
        mine = node.allocator.extents_of(V41).tolist()
        coldest = node.eviction.peek(node.choose(wanted, mine), wanted)
        taken = node.eviction.extent_to_take(V41, coldest.keys[0] >> 64, ())
        if taken is not None:
            node.take(taken)
        else:
            node.drop(coldest.locations)
        node.put(V41, wanted, minute)
    assert node.allocator.extents_of(PAGES).tolist() == [kept]
    assert len(node.allocator.extents_of(V41)) == 7
