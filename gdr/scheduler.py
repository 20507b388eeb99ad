"""Several sequences on one engine: who runs, who waits, who is preempted.

Sequences begin in the order given, as soon as their pages fit, and take turns of one token. When a running one needs a
page and there is none, the one that began last gives all its pages back and waits at the front; it may be the same. So
the oldest always advances, and every sequence that fits the pool alone ends. An aborted sequence ends where it is
found.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Sequences

from gdr.engine import Engine
from gdr.errors import Aborted, PagesExhausted
from gdr.sequence import Phase, Sequence


def run_all(engine: Engine, sequences: Sequences[Sequence], new_tokens: int,
            stop_tokens: frozenset[int] = frozenset()) -> None:
    """Generate up to `new_tokens` greedy tokens for each sequence; afterwards all are FINISHED or ABORTED.

    PagesExhausted when pages are held by somebody else and stay so.
    """
    waiting = deque(sequences)
    running: list[Sequence] = []
    try:
        while waiting or running:
            _admit(engine, waiting, running)
            for sequence in list(running):
                if sequence in running:
                    _advance(engine, sequence, running, waiting)
                if _done(sequence, new_tokens, stop_tokens):
                    if sequence in running:
                        running.remove(sequence)
                    engine.finish(sequence)
    finally:
        for sequence in running:
            engine.finish(sequence)


def _admit(engine: Engine, waiting: deque[Sequence], running: list[Sequence]) -> None:
    """Begin as many waiting sequences as there is room for; with nobody running, pages held by write-backs are waited
    for."""
    while waiting:
        try:
            engine.prefill(waiting[0])
        except Aborted:
            waiting.popleft()
            continue
        except PagesExhausted:
            if running:
                return
            engine.flush()
            if not engine.pages_fit(waiting[0]):
                raise
            continue
        running.append(waiting.popleft())


def _advance(engine: Engine, sequence: Sequence, running: list[Sequence], waiting: deque[Sequence]) -> None:
    """One token for a running sequence, preempting the youngest ones until there is a page."""
    while True:
        try:
            engine.step(sequence)
            return
        except Aborted:
            running.remove(sequence)
            return
        except PagesExhausted:
            youngest = running.pop()
            engine.preempt(youngest)
            waiting.appendleft(youngest)
            if youngest is sequence:
                return


def _done(sequence: Sequence, new_tokens: int, stop_tokens: frozenset[int]) -> bool:
    if sequence.phase is not Phase.RUNNING:
        return False
    new = sequence.generated
    return len(new) >= new_tokens or bool(new and new[-1] in stop_tokens)
