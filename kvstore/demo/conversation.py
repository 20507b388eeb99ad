"""The text of the demonstration: a coding assistant reads source files of the Python standard library, turn by turn.

Everything is made of tokens, not of text that is encoded anew each turn: the prompt of a turn is the prompt before,
the answer's tokens as they were sampled, and the tokens added by the user. So each prompt begins with exactly the one
before it. The chat format is the model's own (its template is in the GGUF file): <|im_start|>role, newline, text,
<|im_end|>, newline.

Files are cut at a line to a budget of tokens, so that the sizes hold for any Python version.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from efs.errors import InvalidArgument

Encode = Callable[[str], list[int]]
"""Text to token ids, without any special token added."""


@dataclass(frozen=True, slots=True)
class UserTurn:
    """What the user shows and asks: a module of the standard library, most tokens of it, a question."""

    module: str
    budget_tokens: int
    question: str


SYSTEM: Final = "You are a helpful coding assistant. Answer from the files."
TURNS: Final = (
    UserTurn("queue", 2_720, "Which classes are defined in queue.py?"),
    UserTurn("bisect", 400, "What does insort_right do?"),
    UserTurn("fnmatch", 400, "What does fnmatch do with a file name and a pattern?"),
    UserTurn("sched", 400, "What is the class scheduler for?"),
    UserTurn("linecache", 400, "What does getline return?"),
    UserTurn("reprlib", 400, "What does recursive_repr do?"),
)
MAX_TURNS: Final = len(TURNS)


def user_additions(encode: Encode, turns: int) -> list[list[int]]:
    """Tokens added by the user in each turn: [0] is the first prompt, [i] follows answer i - 1."""
    if not 1 <= turns <= MAX_TURNS:
        raise InvalidArgument(f"turns is {turns}, must be 1 to {MAX_TURNS}")
    added = []
    for number, turn in enumerate(TURNS[:turns]):
        before = f"<|im_start|>system\n{SYSTEM}<|im_end|>\n" if number == 0 else "<|im_end|>\n"
        shown = source_text(turn.module, turn.budget_tokens, encode)
        asked = f"{turn.question}\n\n{turn.module}.py:\n{shown}\n{turn.question}"
        added.append(encode(f"{before}<|im_start|>user\n{asked}<|im_end|>\n<|im_start|>assistant\n"))
    return added


def next_prompt(prompt: Sequence[int], answer: Sequence[int], added: Sequence[int]) -> list[int]:
    """The prompt of the next turn."""
    return [*prompt, *answer, *added]


def source_text(module: str, budget_tokens: int, encode: Encode) -> str:
    """The first lines of a module's source, as many as fit the budget; line by line, so a little below it."""
    spec = find_spec(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        raise InvalidArgument(f"the source of the standard library's module {module} is not installed")
    lines = []
    for line in Path(spec.origin).read_text(encoding="utf-8").splitlines(keepends=True):
        budget_tokens -= len(encode(line))
        if budget_tokens < 0:
            break
        lines.append(line)
    return "".join(lines)
