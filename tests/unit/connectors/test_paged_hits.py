"""How long a stored prefix is that an engine can go on from."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvstore.connectors.paged.hits import MOST_LOOKS, Group, find_hit

FULL = Group(16)
WINDOW = Group(16, window_tokens=40)


class Presence:
    """Stored blocks of each group."""

    def __init__(self, *groups: set[int]) -> None:
        self.groups = groups
        self.asked = 0

    def leading(self, group: int, start: int, stop: int) -> int:
        self.asked += 1
        present = 0
        while start + present < stop and start + present in self.groups[group]:
            present += 1
        return present


def test_a_group_of_full_attention_needs_every_block() -> None:
    assert find_hit([FULL], 160, 16, Presence({0, 1, 2, 4, 5}).leading) == 48


def test_the_limit_is_cut_to_whole_blocks() -> None:
    assert find_hit([FULL], 159, 16, Presence(set(range(10))).leading) == 144
    assert find_hit([FULL], 15, 16, Presence({0}).leading) == 0


def test_a_window_needs_only_the_blocks_that_the_next_token_sees() -> None:
    assert list(WINDOW.needed(160)) == [7, 8, 9]
    assert find_hit([FULL, WINDOW], 160, 16, Presence(set(range(10)), {7, 8, 9}).leading) == 160


def test_a_hole_in_the_last_window_gives_a_shorter_prefix() -> None:
    assert find_hit([FULL, WINDOW], 160, 16, Presence(set(range(10)), {4, 5, 6, 7, 9}).leading) == 128


def test_all_windows_must_agree_on_one_length() -> None:
    other = Group(16, window_tokens=17)
    stored = Presence(set(range(10)), {2, 3, 4, 5, 6}, {9, 4})
    assert find_hit([FULL, WINDOW, other], 160, 16, stored.leading) == 80


def test_a_window_without_blocks_ends_after_a_bounded_number_of_questions() -> None:
    stored = Presence(set(range(1000)), set(range(0, 1000, 2)))
    assert find_hit([FULL, WINDOW], 16_000, 16, stored.leading) == 0
    assert stored.asked <= MOST_LOOKS + 1


def test_groups_with_other_blocks_meet_at_common_borders() -> None:
    assert find_hit([FULL, Group(32)], 160, 32, Presence(set(range(9)), set(range(5))).leading) == 128


@given(st.sets(st.integers(0, 12)), st.sets(st.integers(0, 12)), st.integers(0, 208))
def test_a_hit_is_the_longest_prefix_whose_blocks_are_all_there(full: set[int], window: set[int], limit: int) -> None:
    found = find_hit([FULL, WINDOW], limit, 16, Presence(full, window).leading)
    usable = [
        blocks * 16 for blocks in range(limit // 16 + 1)
        if set(FULL.needed(blocks * 16)) <= full and set(WINDOW.needed(blocks * 16)) <= window
    ]
    assert found == max(usable)
