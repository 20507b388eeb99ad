"""A sequence as the engine knows it: its tokens, how much of it has KV, its pages, and where it stands.

Positions are tokens from 0. `kv_length` tokens, always the leading ones, have KV in the pages; a sampled token has
none until the next step. `reached` tokens must have KV before the next step: the prompt, later whatever had it when
the sequence was preempted. `loaded_blocks` leading blocks came from the store in the latest prefill, and
`prefilled_tokens` were computed by it. `written_blocks` leading blocks are in the store or on their way there.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence as Tokens
from enum import Enum

import torch

from gdr.pagedcache import PagedCache
from gdr.pages import Page
from gdr.prefix import PrefixLoad


class Phase(Enum):
    """Where a sequence stands. Only RUNNING ones have pages between calls."""

    WAITING = "waiting"
    LOADING = "loading"
    PREFILLING = "prefilling"
    RUNNING = "running"
    FINISHED = "finished"
    ABORTED = "aborted"


class Sequence:
    """One request; made by the engine. `tokens` and the counts are for reading."""

    def __init__(self, tokens: Tokens[int]) -> None:
        self.tokens: list[int] = [int(token) for token in tokens]
        self.prompt_length = len(self.tokens)
        self.reached = self.prompt_length
        self.phase = Phase.WAITING
        self.kv_length = 0
        self.loaded_blocks = 0
        self.written_blocks = 0
        self.prefilled_tokens = 0
        self.preemptions = 0
        self.prefill_s: float | None = None
        self.logits: torch.Tensor | None = None
        self.aborted = threading.Event()
        self.pages: list[Page] = []
        self.cache: PagedCache | None = None
        self.load: PrefixLoad | None = None

    @property
    def generated(self) -> list[int]:
        """Tokens behind the prompt."""
        return self.tokens[self.prompt_length :]

    def abort(self) -> None:
        """Ask for the end, from any thread; the engine's next look at the sequence ends it."""
        self.aborted.set()
        load = self.load
        if load is not None:
            load.abort()

    def take_load(self, load: PrefixLoad) -> None:
        """The load that is about to begin; aborted at once when the sequence was."""
        self.load = load
        if self.aborted.is_set():
            load.abort()
