"""How long a stored prefix is that an engine can go on from. Pure, but for the questions it asks.

A prefix of n tokens (a multiple of `align`, which every group's block divides) can be loaded when each group has what
the token at position n may see: a group of full attention all blocks before it, a group with a sliding window of w
tokens those that hold a token of [n - w + 1, n). A prefix counts only where every rank of the engine has it; whoever
answers the questions sees to that.

First the full groups bound n. Then the windows are looked at from the right: a block that is missing ends every prefix
whose window holds it, so the next candidate ends where the missing block begins. Each look costs one question; after
MOST_LOOKS without an agreement nothing is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

MOST_LOOKS: Final = 16
"""Windows looked at before a prefix is given up: holes in windows are rare, and each look is a question to the
store."""

Leading = Callable[[int, int, int], int]
"""(group, start, stop): how many leading blocks of [start, stop) of the sequence are stored, on every rank."""


@dataclass(frozen=True, slots=True)
class Group:
    """Layers with one block table. window_tokens: what a token sees at most, itself included; None sees everything."""

    block_tokens: int
    window_tokens: int | None = None

    def needed(self, tokens: int) -> range:
        """Blocks that must be there to go on behind `tokens` tokens, a multiple of the block."""
        first = 0 if self.window_tokens is None else max(0, tokens - self.window_tokens + 1) // self.block_tokens
        return range(first, tokens // self.block_tokens)


def find_hit(groups: Sequence[Group], limit_tokens: int, align: int, leading: Leading) -> int:
    """The longest stored prefix of at most `limit_tokens`, in tokens; a multiple of `align`."""
    tokens = limit_tokens - limit_tokens % align
    for index, group in enumerate(groups):
        if group.window_tokens is None and tokens:
            blocks = leading(index, 0, tokens // group.block_tokens)
            tokens = _aligned(blocks * group.block_tokens, align)
    looks = 0
    while tokens:
        bound = tokens
        for index, group in enumerate(groups):
            if group.window_tokens is None:
                continue
            if looks == MOST_LOOKS:
                return 0
            looks += 1
            needed = group.needed(bound)
            present = leading(index, needed.start, needed.stop)
            if present < len(needed):
                bound = _aligned((needed.start + present) * group.block_tokens, align)
                break
        if bound == tokens:
            return tokens
        tokens = bound
    return 0


def _aligned(tokens: int, align: int) -> int:
    return tokens - tokens % align
