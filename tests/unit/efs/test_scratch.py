"""Private memory that is used again."""

from __future__ import annotations

from efs.scratch import Scratch


def test_a_buffer_that_was_given_back_is_used_again_for_the_same_size_only() -> None:
    scratch = Scratch(100)
    buffer = scratch.take(40)
    scratch.give(buffer)
    assert scratch.take(41) is not buffer
    assert scratch.take(40) is buffer
    assert scratch.take(40) is not buffer


def test_no_more_is_kept_than_was_said() -> None:
    scratch = Scratch(100)
    buffers = [scratch.take(40) for _ in range(3)]
    for buffer in buffers:
        scratch.give(buffer)
    again = [scratch.take(40) for _ in range(3)]
    assert sum(any(one is other for other in buffers) for one in again) == 2


def test_a_size_that_nobody_wants_any_more_makes_room_for_one_that_is_wanted() -> None:
    scratch = Scratch(100)
    old, new = [scratch.take(45), scratch.take(45)], scratch.take(60)
    for buffer in old:
        scratch.give(buffer)
    scratch.give(new)
    assert scratch.take(60) is new
    assert all(scratch.take(45) is not buffer for buffer in old)


def test_a_buffer_larger_than_everything_is_not_kept() -> None:
    scratch = Scratch(100)
    buffer = scratch.take(101)
    scratch.give(buffer)
    assert scratch.take(101) is not buffer
