"""How long an engine takes to compute prompts, seen from where it schedules.

A measurement of a request begins with the step that begins to compute what is left of its prompt, and ends when its
first token is known; it is told as (tokens, seconds). A request that is aborted or preempted before that measures
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol


class ComputedRequest(Protocol):
    """What is read of a request of the engine."""

    num_computed_tokens: int
    num_prompt_tokens: int

    @property
    def num_output_tokens(self) -> int: ...


@dataclass(frozen=True, slots=True)
class _Prefill:
    """The rest of a prompt is being computed: from which token on, since when."""

    request: ComputedRequest
    first: int
    since: float


class Prefills:
    """See the module docstring. Used by the engine's thread."""

    def __init__(self, computed: Callable[[int, float], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._computed = computed
        self._clock = clock
        self._begun: dict[str, _Prefill] = {}

    def step(self, requests: Mapping[str, ComputedRequest]) -> None:
        """A step is to compute tokens of these requests."""
        for request_id in list(self._begun):
            self._look(request_id)
        now = self._clock()
        for request_id, request in requests.items():
            if (request_id not in self._begun and request.num_computed_tokens < request.num_prompt_tokens
                    and not request.num_output_tokens):
                self._begun[request_id] = _Prefill(request, request.num_computed_tokens, now)

    def _look(self, request_id: str) -> None:
        prefill = self._begun.get(request_id)
        if prefill is None:
            return
        if prefill.request.num_output_tokens:
            del self._begun[request_id]
            self._computed(prefill.request.num_prompt_tokens - prefill.first, self._clock() - prefill.since)
        elif prefill.request.num_computed_tokens < prefill.first:
            # Preempted: it begins anew.
            del self._begun[request_id]

    def ended(self, request_id: str) -> None:
        """The request has finished or was aborted."""
        self._look(request_id)
        self._begun.pop(request_id, None)
