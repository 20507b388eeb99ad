"""The schedule of a chaos run: a pure function of seed and seconds.

A run is a sequence of *episodes*, one after the other. An episode damages nodes in one to three ways, holds that for a
while beside all the work that goes on, takes the damage away, and is over when the store is whole again. So no more
nodes are damaged at any moment than one episode damages: at most two, except in a `third` episode, where three are
out of reach and misses are legal.

Kinds come in *decks*: each deck holds every kind once, shuffled. Swaps, replacements and third failures have an episode
for themselves; of the others two neighbours share one, on two nodes. A run of EVERY_KIND_SECONDS or more finishes its
first deck whatever time it takes; after that a run begins no episode once its seconds have passed. The seed decides
kinds, nodes, moments and durations, the seconds only how many episodes there are; when exactly the processes are hit
depends on the machine.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from efs.limits import STRIPE_SHARDS

LIVE_KINDS: Final = ("hang_read", "hang_write", "slow", "full", "eio")
"""Done below the owner's I/O seam while it runs."""
ALONE: Final = ("swap", "replace", "third")
KINDS: Final = (*LIVE_KINDS, "rot_payload", "rot_entry", "vanish", "kill", *ALONE)
EVERY_KIND_SECONDS: Final = 120
"""A run this long or longer must have done every kind."""
HOLD_S: Final = (2.0, 4.5)
EPISODE_OVERHEAD_S: Final = 5.0
"""For taking damage away and a quiet look; only for guessing how many episodes fit."""
THIRD_KINDS: Final = ("hang_read", "eio", "vanish")
"""What three nodes may suffer at once: it ends, and then everything is there again."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One kind of damage to one node, -1 where it is to none. `choice` in [0, 1) settles details, such as which bytes
    rot."""

    kind: str
    node: int
    choice: float


@dataclass(frozen=True, slots=True)
class Episode:
    """number: from 0. kills: moments in the hold, as shares of it, at which the owner is killed. clean_stop: whether
    the owner is closed, not killed, where damage needs it down. first_deck: it is done whatever time it takes."""

    number: int
    kinds: tuple[str, ...]
    damages: tuple[Damage, ...]
    hold_s: float
    kills: tuple[float, ...]
    clean_stop: bool
    first_deck: bool

    @property
    def nodes(self) -> tuple[int, ...]:
        """The damaged nodes, ascending."""
        return tuple(sorted({damage.node for damage in self.damages if damage.node >= 0}))

    def line(self) -> str:
        """For a person."""
        of_nodes = [damage for damage in self.damages if damage.node >= 0]
        what = ", ".join(f"{damage.kind} node {damage.node}" for damage in of_nodes) or "no node"
        kills = f", {len(self.kills)} kills" if self.kills else ""
        return f"episode {self.number}: {' + '.join(self.kinds)}: {what}, {self.hold_s:.1f} s{kills}"


def plan(seed: int, seconds: float) -> tuple[Episode, ...]:
    """The episodes of a run, as many as could fit its seconds, at least one deck from EVERY_KIND_SECONDS on."""
    return schedule(random.Random(f"chaos/{seed}"), seconds, EVERY_KIND_SECONDS, KINDS, ALONE, _episode)


def schedule(source: random.Random, seconds: float, whole_from: float, kinds: Sequence[str], alone: Collection[str],
             make: Callable[[int, tuple[str, ...], random.Random, bool], Episode]) -> tuple[Episode, ...]:
    """Episodes from decks of kinds. whole_from: a run of so many seconds finishes its first deck. alone: kinds that
    have an episode for themselves. make: one from number, kinds, source of random numbers, and first deck."""
    episodes: list[Episode] = []
    guessed_s = 0.0
    for deck, shuffled in enumerate(_decks(source, kinds)):
        whole = deck == 0 and seconds >= whole_from
        for together in _together(shuffled, alone):
            if guessed_s >= seconds and not whole:
                return tuple(episodes)
            episode = make(len(episodes), together, source, whole)
            episodes.append(episode)
            guessed_s += episode.hold_s + EPISODE_OVERHEAD_S
    raise AssertionError("decks never end")


def _decks(source: random.Random, kinds: Sequence[str]) -> Iterator[list[str]]:
    while True:
        deck = list(kinds)
        source.shuffle(deck)
        yield deck


def _together(deck: list[str], alone: Collection[str]) -> Iterator[tuple[str, ...]]:
    """Kinds that share an episode, in the order of the deck."""
    waiting: str | None = None
    for kind in deck:
        if kind in alone:
            yield (kind,)
        elif waiting is None:
            waiting = kind
        else:
            yield waiting, kind
            waiting = None
    if waiting is not None:
        yield (waiting,)


def _episode(number: int, kinds: tuple[str, ...], source: random.Random, first_deck: bool) -> Episode:
    nodes = source.sample(range(STRIPE_SHARDS), 3)
    damages = []
    for kind, node in zip(kinds, nodes, strict=False):
        if kind == "third":
            damages += [Damage(source.choice(THIRD_KINDS), each, source.random()) for each in nodes]
        elif kind != "kill":
            damages.append(Damage(kind, node, source.random()))
    hold_s = source.uniform(*HOLD_S)
    kills = tuple(sorted(source.uniform(0.1, 0.9) for _ in range(source.randint(1, 3)))) if "kill" in kinds else ()
    return Episode(number, kinds, tuple(damages), hold_s, kills, source.random() < 0.3, first_deck)
