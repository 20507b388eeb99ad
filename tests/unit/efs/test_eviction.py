"""What goes first when a node is full: the order equals a naive sort, no class keeps space that others need more."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efs.allocator import LIVE, RESERVED, Allocator, SlotRange
from efs.errors import InvalidArgument
from efs.eviction import ORDER_CHUNKS, Eviction
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry, SlotClass, location_of
from efs.limits import DEPTH_UNKNOWN, EXTENT_BYTES, MIB
from efs.shard import entry_bytes
from efs.stamps import Stamps

V41 = SlotClass(11_392, 176)
BIG = SlotClass(96 * 1024 + 64, entry_bytes(3))
PAGES = SlotClass(4_096, entry_bytes(2))


@dataclass(slots=True)
class FullNode:
    """Allocator, stamps and eviction as a node drives them; keys and depths kept on the side."""

    extents: int
    extent_bytes: int = EXTENT_BYTES
    allocator: Allocator = field(init=False)
    stamps: Stamps = field(init=False)
    eviction: Eviction = field(init=False)
    depths: dict[int, int] = field(default_factory=dict)
    keys: dict[int, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.allocator = Allocator(self.extent_bytes, self.extents)
        self.stamps = Stamps(self.extents, 0)
        self.eviction = Eviction(self.allocator, self.stamps)

    def slots(self, slot_class: SlotClass) -> int:
        return Geometry(self.extent_bytes, slot_class).slots

    def put(
        self, slot_class: SlotClass, count: int, stamp: int, first_depth: int | None = 0, seed: int = 0
    ) -> np.ndarray:
        allocation = self.allocator.allocate(slot_class, count)
        assert not allocation.short
        for extent in allocation.fresh:
            self.stamps.attach(extent, self.allocator.geometry_for(slot_class))
        ranges = [np.arange(part.location, part.location + part.count) for part in allocation.ranges]
        locations = np.concatenate(ranges)
        depths = np.arange(count, dtype=np.uint32) + np.uint32(first_depth or 0)
        if first_depth is None:
            depths[:] = DEPTH_UNKNOWN
        source = random.Random(f"{seed} {locations[0]}")
        keys = [source.randbytes(32) for _ in range(count)]
        self.allocator.mark_live(locations)
        self.stamps.set(locations, stamp)
        self.eviction.note(locations, depths, np.frombuffer(b"".join(keys), np.uint64).reshape(count, 4))
        self.depths.update(zip(locations.tolist(), depths.tolist(), strict=True))
        self.keys.update(zip(locations.tolist(), keys, strict=True))
        return locations

    def drop(self, locations: np.ndarray) -> None:
        self.allocator.release(locations)

    def chunk_order(self, slot_class: SlotClass) -> list[tuple[int, int]]:
        """(extent, chunk) as the specification orders them, by sorting everything."""
        ranked = []
        for extent in self.allocator.extents_of(slot_class).tolist():
            geometry = self.allocator.geometry_for(slot_class)
            states, stamps = self.allocator.row(extent).tolist(), self.stamps.row(extent).tolist()
            for chunk in range(geometry.chunks):
                slots = range(chunk * geometry.chunk_slots, (chunk + 1) * geometry.chunk_slots)
                live = [slot for slot in slots if states[slot] == LIVE]
                if live and not any(states[slot] == RESERVED for slot in slots):
                    depth = min(self.depths[location_of(extent, slot)] for slot in live)
                    key = min(self.keys[location_of(extent, slot)][:8] for slot in live)
                    ranked.append((max(stamps[slot] for slot in live), -depth, key, extent, chunk))
        return [(extent, chunk) for *_, extent, chunk in sorted(ranked)]

    def chunks_of(self, locations: np.ndarray, slot_class: SlotClass) -> list[tuple[int, int]]:
        chunk_slots = self.allocator.geometry_for(slot_class).chunk_slots
        pairs = [(int(place) >> SLOT_BITS, (int(place) & SLOT_MASK) // chunk_slots) for place in locations]
        return list(dict.fromkeys(pairs))


@pytest.fixture
def node() -> FullNode:
    """Two V4.1 extents, full: chains of 64 blocks, each used once in a minute of its own."""
    made = FullNode(2)
    minutes = list(range(1_000, 1_000 + 2 * 5_792 // 32))
    random.Random(5).shuffle(minutes)
    for minute in minutes:
        made.put(V41, 32, minute)
    return made


def test_the_coldest_chunks_go_first(node: FullNode) -> None:
    victims = node.eviction.victims(V41, 100)
    assert victims.extent is None
    assert len(victims.locations) == 128
    assert sorted(set(node.stamps.get(victims.locations).tolist())) == [1_000, 1_001, 1_002, 1_003]
    assert node.chunks_of(victims.locations, V41) == node.chunk_order(V41)[:4]


def test_choosing_changes_nothing(node: FullNode) -> None:
    before = [node.allocator.row(extent).copy() for extent in range(2)]
    node.eviction.victims(V41, 1_000)
    assert all((node.allocator.row(extent) == before[extent]).all() for extent in range(2))
    node.allocator.audit()


def test_a_chunk_used_since_the_order_was_made_is_spared(node: FullNode) -> None:
    node.drop(node.eviction.victims(V41, 32).locations)
    second = node.chunk_order(V41)[0]
    node.stamps.touch(node.allocator.live_locations(*second)[7:8], 9_999)
    victims = node.eviction.victims(V41, 64)
    assert second not in node.chunks_of(victims.locations, V41)
    assert sorted(set(node.stamps.get(victims.locations).tolist())) == [1_002, 1_003]


def test_a_cold_record_in_a_slot_that_was_hot_is_cold() -> None:
    """A repaired record brings an old stamp along into space that hot records left."""
    node = FullNode(1)
    hot = node.put(V41, 32, 9_000)
    node.put(V41, 5_760, 1_000)
    node.drop(hot)
    cold = node.put(V41, 8, 500)
    assert set(cold.tolist()) <= set(hot.tolist())
    assert node.eviction.victims(V41, 1).locations.tolist() == cold.tolist()


def test_one_hot_slot_keeps_its_chunk(node: FullNode) -> None:
    coldest = node.chunk_order(V41)[0]
    node.stamps.touch(node.allocator.live_locations(*coldest)[31:], 9_999)
    assert coldest not in node.chunks_of(node.eviction.victims(V41, 5_792).locations, V41)


def test_a_chunk_that_was_emptied_or_refilled_is_not_taken_again(node: FullNode) -> None:
    first = node.eviction.victims(V41, 32).locations
    node.drop(first)
    second = node.allocator.live_locations(*node.chunk_order(V41)[0])
    node.drop(second)
    node.put(V41, 32, 5_000)
    node.put(V41, 32, 5_001)
    victims = node.eviction.victims(V41, 5_792 * 2 - 64).locations
    assert not set(victims.tolist()) & set(first.tolist())
    assert not set(victims.tolist()) & set(second.tolist())


def test_many_small_evictions_follow_the_order(node: FullNode) -> None:
    """Victims are dropped and their space refilled with hotter records, several times over."""
    minute = 10_000
    for _ in range(60):
        expected = node.chunk_order(V41)[:1]
        victims = node.eviction.victims(V41, 32)
        assert node.chunks_of(victims.locations, V41) == expected
        node.drop(victims.locations)
        minute += 1
        node.put(V41, len(victims.locations), minute)
    node.allocator.audit()


def test_all_chunks_go_in_order_although_only_some_are_ordered_at_a_time() -> None:
    """More chunks than one computation orders, some of them used after it was made."""
    node = FullNode(6)
    source = random.Random(9)
    total = 6 * 181
    assert total > ORDER_CHUNKS
    for _ in range(total):
        node.put(V41, 32, source.randint(1_000, 1_200))
    taken: list[tuple[int, int]] = []
    while len(taken) < total:
        expected = node.chunk_order(V41)
        victims = node.eviction.victims(V41, 32 * source.randint(16, 31)).locations
        chunks = node.chunks_of(victims, V41)
        assert chunks
        assert chunks == expected[: len(chunks)]
        taken += chunks
        node.drop(victims)
        for extent, chunk in source.sample(node.chunk_order(V41), min(20, total - len(taken))):
            node.stamps.touch(node.allocator.live_locations(extent, chunk)[:1], source.randint(1_000, 1_300))
    assert len(set(taken)) == total


def test_the_tail_of_a_chain_goes_before_its_head() -> None:
    node = FullNode(1)
    chain = node.put(V41, 5_792, 1_000)
    victims = node.eviction.victims(V41, 64).locations
    assert victims.tolist() == [*chain[-32:].tolist(), *chain[-64:-32].tolist()]


def test_unknown_depth_counts_as_deepest() -> None:
    node = FullNode(1)
    node.put(V41, 3_200, 1_000, first_depth=100_000)
    unknown = node.put(V41, 32, 1_000, first_depth=None)
    node.put(V41, 2_560, 1_000)
    assert node.eviction.victims(V41, 1).locations.tolist() == unknown.tolist()


def test_equal_stamps_and_depths_go_by_key_also_where_one_order_ends_and_the_next_begins() -> None:
    node = FullNode(6)
    heads = [node.put(V41, 32, 1_000, seed=seed) for seed in range(6 * 181)]
    assert len(heads) > ORDER_CHUNKS
    expected = sorted(heads, key=lambda head: min(node.keys[int(place)][:8] for place in head))
    found: list[int] = []
    while len(found) < 32 * len(heads):
        victims = node.eviction.victims(V41, 1_000).locations
        found += victims.tolist()
        node.drop(victims)
    assert found == np.concatenate(expected).tolist()


def test_depth_of_a_refilled_chunk_is_that_of_its_new_records() -> None:
    node = FullNode(1)
    node.put(V41, 5_792, 1_000, first_depth=10)
    node.drop(np.arange(32))
    refilled = node.put(V41, 32, 1_000, first_depth=50_000)
    assert refilled.tolist() == list(range(32))
    assert node.eviction.victims(V41, 1).locations.tolist() == refilled.tolist()


def test_slots_in_flight_and_excluded_extents_are_never_chosen(node: FullNode) -> None:
    coldest = node.chunk_order(V41)[0]
    node.drop(node.allocator.live_locations(*coldest)[:4])
    node.allocator.allocate(V41, 2)
    everything = node.eviction.victims(V41, 5_792 * 2).locations
    assert coldest not in node.chunks_of(everything, V41)
    assert len(everything) == 2 * 5_792 - 32
    one_extent = node.eviction.victims(V41, 5_792 * 2, exclude=[1]).locations
    assert len(one_extent) > 0
    assert set((one_extent >> SLOT_BITS).tolist()) == {0}
    assert len(node.eviction.victims(V41, 1, exclude=[0, 1]).locations) == 0


def test_an_empty_node_has_no_victims() -> None:
    victims = FullNode(2).eviction.victims(V41, 10)
    assert (len(victims.locations), victims.extent) == (0, None)


def test_records_found_at_start_are_evicted_by_stamp_and_their_depth_counts_once_it_is_told() -> None:
    node = FullNode(2)
    for extent in range(2):
        geometry = node.allocator.assign(extent, V41)
        node.stamps.attach(extent, geometry)
        found = np.arange(96) + location_of(extent, 0)
        node.allocator.mark_live(found)
        node.stamps.set(found, np.repeat(np.array([7, 5, 5], np.uint32) + np.uint32(extent), 32))
    keys = np.zeros((32, 4), np.uint64)
    node.eviction.note(np.arange(32, 64), np.arange(32, dtype=np.uint32), keys)
    found = node.eviction.victims(V41, 32 * 6).locations
    assert node.chunks_of(found, V41) == [(0, 2), (0, 1), (1, 1), (1, 2), (0, 0), (1, 0)]


def test_records_that_went_in_flight_and_came_back_are_victims_again(node: FullNode) -> None:
    coldest = node.chunk_order(V41)[0]
    node.drop(node.allocator.live_locations(*coldest)[:4])
    taken = node.allocator.allocate(V41, 4).ranges[0]
    assert coldest not in node.chunks_of(node.eviction.victims(V41, 64).locations, V41)
    node.allocator.release_range(taken)
    assert node.chunks_of(node.eviction.victims(V41, 1).locations, V41) == [coldest]


def test_records_of_several_classes_are_not_noted_together() -> None:
    node = FullNode(2)
    places = np.concatenate((node.put(V41, 1, 5), node.put(PAGES, 1, 5)))
    with pytest.raises(InvalidArgument, match="several classes"):
        node.eviction.note(places, np.zeros(2, np.uint32), np.zeros((2, 4), np.uint64))


def test_an_extent_taken_over_by_another_class_keeps_nothing_of_the_old_one() -> None:
    node = FullNode(1)
    node.put(PAGES, node.slots(PAGES), 900)
    victims = node.eviction.victims(V41, 1)
    node.drop(victims.locations)
    node.allocator.unassign(0)
    node.put(V41, 64, 300, first_depth=7)
    found = node.eviction.victims(V41, 10_000).locations
    assert node.chunks_of(found, V41) == [(0, 1), (0, 0)]
    assert len(node.eviction.victims(PAGES, 10_000).locations) == 64


# -- Between classes


def mixed(v41_minute: int, pages_minutes: tuple[int, int]) -> FullNode:
    node = FullNode(3)
    node.put(V41, 5_792, v41_minute)
    for minute in pages_minutes:
        node.put(PAGES, node.slots(PAGES), minute)
    return node


def test_a_new_class_on_a_full_node_gets_the_coldest_extent() -> None:
    node = mixed(300, (200, 100))
    victims = node.eviction.victims(BIG, 1)
    assert victims.extent == 2
    assert victims.locations.tolist() == (node.allocator.live_slots_of(2) + location_of(2, 0)).tolist()
    node.drop(victims.locations)
    node.allocator.unassign(2)
    assert node.allocator.allocate(BIG, 10).fresh == (2,)


def test_a_class_gives_up_its_own_chunks_when_all_others_are_hotter() -> None:
    victims = mixed(300, (400, 500)).eviction.victims(V41, 32)
    assert (victims.extent, len(victims.locations)) == (None, 32)


def test_a_class_whose_records_are_all_hotter_takes_the_coldest_extent_of_another() -> None:
    assert mixed(300, (400, 299)).eviction.victims(V41, 32).extent == 2
    assert mixed(300, (299, 298)).eviction.victims(V41, 32).extent == 2
    assert mixed(300, (300, 300)).eviction.victims(V41, 32).extent is None


def test_an_extent_is_as_hot_as_its_hottest_record() -> None:
    node = mixed(300, (400, 100))
    node.stamps.touch(np.array([location_of(2, 77)]), 301)
    assert node.eviction.victims(V41, 32).extent is None


def test_chunks_that_were_spared_for_an_extent_are_still_in_order() -> None:
    node = mixed(300, (400, 299))
    victims = node.eviction.victims(V41, 64)
    node.drop(victims.locations)
    node.allocator.unassign(2)
    node.stamps.detach(2)
    expected = node.chunk_order(V41)[:2]
    assert node.chunks_of(node.eviction.victims(V41, 64).locations, V41) == expected


@pytest.mark.parametrize("empty", [1, 2])
def test_an_empty_extent_of_another_class_is_taken_before_any_record_is_dropped(empty: int) -> None:
    node = mixed(300, (400, 500))
    node.drop(node.allocator.live_slots_of(empty) + location_of(empty, 0))
    victims = node.eviction.victims(V41, 32)
    assert (victims.extent, len(victims.locations)) == (empty, 0)


def test_an_extent_with_a_slot_in_flight_or_excluded_is_not_taken() -> None:
    node = mixed(300, (200, 100))
    node.drop(np.array([location_of(2, 0)]))
    assert node.allocator.allocate(PAGES, 1).ranges == (SlotRange(location_of(2, 0), 1),)
    assert node.eviction.victims(BIG, 1).extent == 1
    assert node.eviction.victims(BIG, 1, exclude=[1]).extent == 0


def test_no_class_holds_cold_extents_for_ever_while_another_one_churns() -> None:
    """A class that writes all the time takes over what nobody uses, extent by extent, and leaves what is used."""
    node = FullNode(4)
    node.put(PAGES, 3 * node.slots(PAGES), 1_000)
    minute = 1_001
    for _ in range(30):
        minute += 1
        node.stamps.touch(np.array([location_of(1, 5)]), minute)
        while node.allocator.free_slots(V41) < 2_000 and node.allocator.extents_used == 4:
            victims = node.eviction.victims(V41, 2_000)
            assert len(victims.locations)
            node.drop(victims.locations)
            if victims.extent is not None:
                node.allocator.unassign(victims.extent)
        node.put(V41, 2_000, minute)
    assert node.allocator.extents_of(V41).tolist() == [0, 2, 3]
    assert node.allocator.extents_of(PAGES).tolist() == [1]
    node.allocator.audit()


def test_a_chunk_that_was_used_after_another_one_was_written_goes_after_it() -> None:
    """Also where the order held all chunks there were when it was made."""
    node = FullNode(3, 2 * MIB)
    old = node.put(V41, 17, 100)
    evicted = node.eviction.victims(V41, 1)
    node.drop(evicted.locations)
    new = node.put(V41, 1, 102)
    node.stamps.touch(old[:1], 103)
    assert node.eviction.victims(V41, 1).locations.tolist() == new.tolist()


# -- Against a naive model


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_victims_equal_the_head_of_a_full_sort(data: st.DataObject) -> None:
    node = FullNode(3, 2 * MIB)
    held: list[np.ndarray] = []
    for step in range(data.draw(st.integers(1, 12))):
        action = data.draw(st.sampled_from(["put", "touch", "drop", "evict", "evict"]))
        if action == "put":
            count = data.draw(st.integers(1, 60))
            if node.allocator.free_slots(V41) >= count or node.allocator.extents_used < 3:
                held.append(node.put(V41, count, 100 + step, data.draw(st.sampled_from([0, 5, None])), step))
        elif held and action == "touch":
            places = data.draw(st.sampled_from(held))
            node.stamps.touch(places[: data.draw(st.integers(1, 60))], 100 + step)
        elif held and action == "drop":
            places = data.draw(st.sampled_from(held))
            live = places[node.allocator.states(places) == LIVE][:: data.draw(st.integers(1, 3))]
            for extent, chunk in node.chunks_of(live, V41):
                node.drop(node.allocator.live_locations(extent, chunk))
        elif action == "evict":
            wanted = data.draw(st.integers(1, 100))
            order = node.chunk_order(V41)
            found = node.eviction.victims(V41, wanted).locations
            chunks = node.chunks_of(found, V41)
            assert chunks == order[: len(chunks)]
            assert len(found) >= wanted or len(chunks) == len(order)
            sizes = [len(node.allocator.live_locations(*chunk)) for chunk in chunks]
            assert sum(sizes) == len(found)
            assert sum(sizes[:-1]) < wanted
            node.drop(found)
    node.allocator.audit()
