"""Prompts of the demonstration, with characters for tokens."""

from __future__ import annotations

import pytest

from efs.errors import InvalidArgument
from kvstore.demo.conversation import MAX_TURNS, TURNS, next_prompt, source_text, user_additions


def letters(text: str) -> list[int]:
    return [ord(letter) for letter in text]


def words(text: str) -> list[int]:
    return [len(word) for word in text.split()]


def test_each_prompt_begins_with_the_one_before_and_its_answer() -> None:
    added = user_additions(words, 3)
    first = added[0]
    second = next_prompt(first, [1, 2], added[1])
    third = next_prompt(second, [3], added[2])
    assert second[: len(first) + 2] == [*first, 1, 2]
    assert third[: len(second) + 1] == [*second, 3]
    assert third[-len(added[2]) :] == added[2]


def test_turns_are_chat_messages_that_close_the_answer_before() -> None:
    first, second = ("".join(map(chr, added)) for added in user_additions(letters, 2))
    assert first.startswith("<|im_start|>system\n")
    assert second.startswith("<|im_end|>\n<|im_start|>user\n")
    for text, turn in ((first, TURNS[0]), (second, TURNS[1])):
        assert text.endswith(f"{turn.question}<|im_end|>\n<|im_start|>assistant\n")
        assert text.count("<|im_start|>assistant") == 1


@pytest.mark.parametrize("turns", [0, -1, MAX_TURNS + 1])
def test_a_number_of_turns_without_text_is_refused(turns: int) -> None:
    with pytest.raises(InvalidArgument, match=f"turns is {turns}"):
        user_additions(words, turns)


def test_a_file_is_cut_at_a_line_within_the_budget() -> None:
    whole = source_text("queue", 10**9, letters)
    assert "class Queue" in whole
    cut = source_text("queue", 1_000, letters)
    assert whole.startswith(cut)
    assert cut.endswith("\n")
    following = whole[len(cut) :].splitlines(keepends=True)[0]
    assert len(cut) <= 1_000 < len(cut) + len(following)


def test_a_module_without_source_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="_thread"):
        source_text("_thread", 100, letters)
