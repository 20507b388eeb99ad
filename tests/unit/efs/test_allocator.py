"""Slot states: no slot is given twice, the counters equal a naive recount, and requests stay together."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from efs.allocator import FREE, LIVE, RESERVED, Allocation, Allocator, ClassUse, SlotRange
from efs.errors import CorruptRecord, InvalidArgument
from efs.extent import SLOT_BITS, Geometry, SlotClass, location_of
from efs.limits import EXTENT_BYTES, MIB, MIN_EXTENT_BYTES
from efs.shard import entry_bytes

V41 = SlotClass(11_392, 176)
SMALL = SlotClass(128, entry_bytes(1))
PAGES = SlotClass(4_096, entry_bytes(2))
CLASSES = (V41, SMALL, PAGES)


def locations_of(allocation: Allocation) -> np.ndarray:
    found = [np.arange(part.location, part.location + part.count, dtype=np.int64) for part in allocation.ranges]
    return np.concatenate(found) if found else np.zeros(0, np.int64)


def some(*locations: int) -> np.ndarray:
    return np.array(locations, np.int64)


def filled(slot_class: SlotClass = V41, extents: int = 2, extent_bytes: int = EXTENT_BYTES) -> Allocator:
    """All slots of all extents live."""
    allocator = Allocator(extent_bytes, extents)
    for extent in range(extents):
        geometry = allocator.assign(extent, slot_class)
        allocator.mark_live(np.arange(geometry.slots) + location_of(extent, 0))
    return allocator


def holes(allocator: Allocator, *ranges: tuple[int, int]) -> None:
    for location, count in ranges:
        allocator.release_range(SlotRange(location, count))


# -- Against a naive model


class AllocatorMachine(RuleBasedStateMachine):
    """Any order of calls against a dict of slot states."""

    requests = Bundle("requests")

    @initialize(extents=st.integers(1, 5), megabytes=st.sampled_from([1, 2]))
    def begin(self, extents: int, megabytes: int) -> None:
        self.allocator = Allocator(megabytes * MIB, extents)
        self.classes: dict[int, SlotClass] = {}
        self.used: dict[int, int] = {}

    def slots(self, slot_class: SlotClass) -> int:
        return Geometry(self.allocator.extent_bytes, slot_class).slots

    def in_extent(self, extent: int) -> list[int]:
        return [location for location in self.used if location >> SLOT_BITS == extent]

    @rule(
        target=requests,
        slot_class=st.sampled_from(CLASSES),
        count=st.one_of(st.integers(0, 70), st.integers(0, 3_000)),
        shortest=st.sampled_from([1, 1, 4, 32, 100_000]),
        exclude=st.sets(st.integers(0, 4), max_size=2),
    )
    def allocate(self, slot_class: SlotClass, count: int, shortest: int, exclude: set[int]) -> tuple[int, ...]:
        exclude = {extent for extent in exclude if extent < self.allocator.extents}
        allocation = self.allocator.allocate(slot_class, count, shortest=shortest, exclude=exclude)
        for extent in allocation.fresh:
            assert extent not in self.classes
            self.classes[extent] = slot_class
        locations = locations_of(allocation).tolist()
        assert len(set(locations)) == len(locations) == count - allocation.short
        for location in locations:
            extent, slot = location >> SLOT_BITS, location & ((1 << SLOT_BITS) - 1)
            assert location not in self.used
            assert extent not in exclude
            assert self.classes[extent] == slot_class
            assert slot < self.slots(slot_class)
            self.used[location] = RESERVED
        if allocation.short:
            allowed = set(range(self.allocator.extents)) - exclude
            assert allowed <= set(self.classes)
            if shortest == 1:
                mine = [extent for extent in allowed if self.classes[extent] == slot_class]
                assert all(len(self.in_extent(extent)) == self.slots(slot_class) for extent in mine)
        return tuple(locations)

    @rule(locations=consumes(requests), how=st.randoms(use_true_random=False), target=requests)
    def store(self, locations: tuple[int, ...], how: object) -> tuple[int, ...]:
        mine = [location for location in locations if self.used.get(location) == RESERVED]
        how.shuffle(mine)  # type: ignore[attr-defined]
        self.allocator.mark_live(np.array(mine, np.int64))
        self.used.update(dict.fromkeys(mine, LIVE))
        return locations

    @rule(locations=consumes(requests), keep=st.integers(0, 40), target=requests)
    def drop(self, locations: tuple[int, ...], keep: int) -> tuple[int, ...]:
        mine = [location for location in locations if location in self.used][keep:]
        self.allocator.release(np.array(mine, np.int64))
        for location in mine:
            del self.used[location]
        return locations

    @rule(extent=st.integers(0, 4))
    def take_extent(self, extent: int) -> None:
        if extent >= self.allocator.extents:
            return
        mine = self.in_extent(extent)
        if any(self.used[location] == RESERVED for location in mine):
            assert self.allocator.busy(extent)
            with pytest.raises(InvalidArgument, match="in flight"):
                self.allocator.unassign(extent)
            return
        self.allocator.unassign(extent)
        self.classes.pop(extent, None)
        for location in mine:
            del self.used[location]

    @rule(extent=st.integers(0, 4), slot_class=st.sampled_from(CLASSES))
    def load_extent(self, extent: int, slot_class: SlotClass) -> None:
        """As after an open: an extent is found assigned, and every third slot live."""
        if extent >= self.allocator.extents or extent in self.classes:
            return
        self.allocator.assign(extent, slot_class)
        self.classes[extent] = slot_class
        live = [location_of(extent, slot) for slot in range(0, self.slots(slot_class), 3)]
        self.allocator.mark_live(np.array(live, np.int64))
        self.used.update(dict.fromkeys(live, LIVE))

    @invariant()
    def agrees(self) -> None:
        self.allocator.audit()
        live = [location for location, state in self.used.items() if state == LIVE]
        assert self.allocator.live_slots == len(live)
        assert self.allocator.live_bytes == sum(self.classes[location >> SLOT_BITS].slot_bytes for location in live)
        assert self.allocator.extents_used == len(self.classes)
        assert self.allocator.use() == tuple(self.expected_use())
        assert self.allocator.classes() == tuple(sorted(set(self.classes.values())))
        for extent in range(self.allocator.extents):
            slot_class = self.classes.get(extent)
            geometry = self.allocator.geometry(extent)
            assert (None if geometry is None else geometry.slot_class) == slot_class
            row = np.zeros(0 if slot_class is None else self.slots(slot_class), np.uint8)
            for location in self.in_extent(extent):
                row[location & ((1 << SLOT_BITS) - 1)] = self.used[location]
            assert (self.allocator.row(extent) == row).all()
            assert self.allocator.busy(extent) == bool((row == RESERVED).any())
            assert self.allocator.busy_extents[extent] == self.allocator.busy(extent)
            assert self.allocator.live_counts[extent] == np.count_nonzero(row == LIVE)

    def expected_use(self) -> Iterable[ClassUse]:
        for slot_class in sorted(set(self.classes.values())):
            mine = [extent for extent, found in self.classes.items() if found == slot_class]
            states = [self.used[location] for extent in mine for location in self.in_extent(extent)]
            live, reserved = states.count(LIVE), states.count(RESERVED)
            free = len(mine) * self.slots(slot_class) - live - reserved
            assert self.allocator.free_slots(slot_class) == free
            yield ClassUse(slot_class, len(mine), live, reserved, free, live * slot_class.slot_bytes)


TestAllocatorAgainstModel = AllocatorMachine.TestCase
TestAllocatorAgainstModel.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)


# -- Placement


def test_a_put_on_an_empty_node_is_one_range_from_a_fresh_extent() -> None:
    allocator = Allocator(EXTENT_BYTES, 3)
    assert allocator.allocate(V41, 757) == Allocation((SlotRange(0, 757),), (0,), 0)


def test_the_next_large_put_starts_on_a_chunk_border_and_a_small_one_fills_the_gap_before_it() -> None:
    allocator = Allocator(EXTENT_BYTES, 3)
    allocator.allocate(V41, 757)
    assert allocator.allocate(V41, 757).ranges == (SlotRange(768, 757),)
    assert allocator.allocate(V41, 8).ranges == (SlotRange(757, 8),)
    assert allocator.allocate(V41, 4).ranges == (SlotRange(1_525, 4),)
    assert allocator.allocate(V41, 3).ranges == (SlotRange(765, 3),)


def test_a_put_goes_into_the_smallest_gap_that_holds_it_whole() -> None:
    allocator = filled()
    holes(allocator, (64, 320), (640, 64), (1_024, 128), (location_of(1, 0), 200))
    assert allocator.allocate(V41, 60).ranges == (SlotRange(location_of(1, 0), 60),)
    assert allocator.allocate(V41, 128).ranges == (SlotRange(location_of(1, 64), 128),)
    assert allocator.allocate(V41, 64).ranges == (SlotRange(640, 64),)
    assert allocator.allocate(V41, 320).ranges == (SlotRange(64, 320),)


def test_a_gap_without_a_chunk_border_is_used_before_a_request_is_split() -> None:
    allocator = filled()
    holes(allocator, (70, 50))
    assert allocator.allocate(V41, 50).ranges == (SlotRange(70, 50),)


def test_a_put_that_no_gap_holds_takes_the_longest_gaps_first() -> None:
    allocator = filled()
    holes(allocator, (0, 32), (320, 96), (640, 64), (1_000, 5))
    allocation = allocator.allocate(V41, 180)
    assert allocation == Allocation((SlotRange(320, 96), SlotRange(640, 64), SlotRange(0, 20)), (), 0)


def test_a_free_extent_is_opened_before_a_put_is_cut_into_crumbs() -> None:
    allocator = filled(extents=3)
    allocator.unassign(1)
    holes(allocator, *[(slot, 3) for slot in range(0, 400, 10)])
    assert allocator.allocate(V41, 64) == Allocation((SlotRange(location_of(1, 0), 64),), (1,), 0)


def test_crumbs_are_used_when_there_is_nothing_else_and_short_is_told() -> None:
    allocator = filled()
    holes(allocator, (10, 3), (20, 5), (location_of(1, 9), 4))
    allocation = allocator.allocate(V41, 14)
    assert allocation == Allocation((SlotRange(20, 5), SlotRange(10, 3), SlotRange(location_of(1, 9), 4)), (), 2)


def test_crumbs_below_the_shortest_wanted_serve_only_what_they_hold_whole() -> None:
    allocator = filled()
    holes(allocator, (10, 3), (20, 5))
    assert allocator.allocate(V41, 8, shortest=4) == Allocation((SlotRange(20, 5), SlotRange(10, 3)), (), 0)
    holes(allocator, (10, 3), (20, 5))
    assert allocator.allocate(V41, 9, shortest=4) == Allocation((SlotRange(20, 5),), (), 4)


def test_a_shortest_gap_beyond_an_extent_does_not_open_all_extents() -> None:
    allocator = Allocator(EXTENT_BYTES, 3)
    assert allocator.allocate(V41, 10_000, shortest=100_000).fresh == (0, 1)


def test_excluded_extents_are_left_alone() -> None:
    allocator = Allocator(EXTENT_BYTES, 3)
    allocator.assign(0, V41)
    assert allocator.allocate(V41, 5, exclude=(0, 1)) == Allocation((SlotRange(location_of(2, 0), 5),), (2,), 0)
    assert allocator.allocate(V41, 5, exclude=(0, 1, 2)) == Allocation((), (), 5)


def test_a_put_larger_than_an_extent_spans_several() -> None:
    allocator = Allocator(EXTENT_BYTES, 3)
    slots = allocator.geometry_for(V41).slots
    allocation = allocator.allocate(V41, 2 * slots + 10)
    assert [part.count for part in allocation.ranges] == [slots, slots, 10]
    assert allocation.fresh == (0, 1, 2)


def test_churned_space_still_gives_runs_of_chunks() -> None:
    """Chunks evicted two at a time and refilled by puts of 64 stay whole."""
    allocator = filled()
    random = np.random.default_rng(7)
    for _ in range(500):
        first = int(random.integers(0, 90)) * 64 + location_of(int(random.integers(0, 2)), 0)
        allocator.release_range(SlotRange(first, 64))
        allocation = allocator.allocate(V41, 64)
        assert allocation.ranges == (SlotRange(first, 64),)
        allocator.mark_live(locations_of(allocation))
    allocator.audit()


# -- States


def test_only_legal_transitions_are_made_and_an_illegal_one_changes_nothing() -> None:
    allocator = Allocator(EXTENT_BYTES, 2)
    allocator.allocate(V41, 4)
    allocator.mark_live(some(0, 1))
    before = allocator.row(0).copy()
    for wrong in (some(2, 1), some(3, 3), some(2, 5_792), some(location_of(1, 0)), some(-1), some(location_of(2, 0))):
        with pytest.raises(InvalidArgument):
            allocator.mark_live(wrong)
    for wrong in (some(0, 4), some(2, 2), some(location_of(1, 0)), some(-1)):
        with pytest.raises(InvalidArgument):
            allocator.release(wrong)
    assert (allocator.row(0) == before).all()
    assert before[:5].tolist() == [LIVE, LIVE, RESERVED, RESERVED, FREE]
    allocator.audit()


def test_states_of_locations_that_do_not_exist_are_free() -> None:
    allocator = filled(extents=1)
    found = allocator.states(some(0, 5_791, 5_792, -1, location_of(1, 0), location_of(77, 3)))
    assert found.tolist() == [LIVE, LIVE, FREE, FREE, FREE, FREE]


def test_rows_cannot_be_written_from_outside() -> None:
    allocator = filled(extents=1)
    for array in (allocator.row(0), allocator.live_counts):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_live_slots_are_listed_by_extent_and_by_chunk() -> None:
    allocator = Allocator(EXTENT_BYTES, 2)
    allocator.assign(1, V41)
    allocator.mark_live(some(*(location_of(1, slot) for slot in (0, 31, 32, 40, 63, 64))))
    assert allocator.live_slots_of(1).tolist() == [0, 31, 32, 40, 63, 64]
    assert (allocator.live_locations(1, 1) - location_of(1, 0)).tolist() == [32, 40, 63]
    assert len(allocator.live_locations(1, 180)) == 0
    for extent, chunk in ((1, 181), (1, -1), (0, 0)):
        with pytest.raises(InvalidArgument):
            allocator.live_locations(extent, chunk)


def test_a_class_with_more_slots_does_not_disturb_the_states_of_others() -> None:
    allocator = Allocator(MIN_EXTENT_BYTES, 3)
    first = locations_of(allocator.allocate(PAGES, 20))
    allocator.mark_live(first[::2])
    second = locations_of(allocator.allocate(SMALL, 700))
    assert allocator.states(first).tolist() == [LIVE, RESERVED] * 10
    assert (allocator.states(second) == RESERVED).all()
    allocator.audit()


def test_an_audit_finds_a_counter_that_is_wrong() -> None:
    allocator = filled(extents=1)
    allocator._states[0, 7] = FREE
    with pytest.raises(CorruptRecord, match="extent 0"):
        allocator.audit()


def test_wrong_calls_are_refused() -> None:
    allocator = Allocator(MIN_EXTENT_BYTES, 2)
    with pytest.raises(InvalidArgument, match="does not fit"):
        allocator.allocate(SlotClass(MIN_EXTENT_BYTES, 144), 1)
    allocator.assign(0, SMALL)
    with pytest.raises(InvalidArgument, match="in use"):
        allocator.assign(0, SMALL)
    for extent in (-1, 2):
        with pytest.raises(InvalidArgument, match="the node has 2"):
            allocator.geometry(extent)
    for extent_bytes, extents in ((MIN_EXTENT_BYTES - 1, 2), (MIN_EXTENT_BYTES, 0)):
        with pytest.raises(InvalidArgument):
            Allocator(extent_bytes, extents)
