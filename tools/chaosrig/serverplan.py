"""The schedule of a chaos run against servers: a pure function of seed, seconds, and whether there is an etcd.

Episodes and decks are those of `tools/chaosrig/plan.py`. What differs is what is done:

    wire      a proxy in front of a server does half of `WIRE_KINDS`, one after the other (two such episodes in a deck)
    disk      hang_write, slow, full, eio below the I/O seam of a server; full right after a start
    process   stop (SIGSTOP), kill (SIGKILL, started again in the middle)
    down      vanish, rot_payload, rot_entry, swap, replace: done to the directory of a server that was ended or killed
    client    die_in_put, die_in_get: SIGKILL of a client in the middle of a call
    outage    etcd is stopped or killed for longer than every lease
    third     three servers are stopped, killed or lose their directory at once

Without etcd a node is not replaced while the store is used, and etcd has no outage.
"""

from __future__ import annotations

import random
from typing import Final

from efs.limits import ETCD_LEASE_SECONDS, STRIPE_SHARDS
from tools.chaosrig.plan import HOLD_S, Damage, Episode, schedule
from tools.chaosrig.wireproxy import WIRE_KINDS

DISK_KINDS: Final = ("hang_write", "slow", "full", "eio")
DOWN_KINDS: Final = ("vanish", "rot_payload", "rot_entry", "swap", "replace")
CLIENT_KINDS: Final = ("die_in_put", "die_in_get")
ETCD_KINDS: Final = ("replace", "outage")
ALONE: Final = ("swap", "replace", "third")
SERVER_KINDS: Final = (*WIRE_KINDS, *DISK_KINDS, "stop", "kill", *DOWN_KINDS, *CLIENT_KINDS, "outage", "third")
THIRD_KINDS: Final = ("stop", "kill", "vanish")
OF_NO_NODE: Final = (*CLIENT_KINDS, "outage")
EVERY_SERVER_KIND_SECONDS: Final = 240
"""A run this long or longer must have done every kind."""
OUTAGE_S: Final = 1.3 * ETCD_LEASE_SECONDS
PROXIED: Final = (0, 3, 7, 10)
"""Nodes that clients reach through a proxy."""
_HANDS: Final = ("wire a", "wire b")


def kinds_of(etcd: bool) -> tuple[str, ...]:
    """What a run does."""
    return tuple(kind for kind in SERVER_KINDS if etcd or kind not in ETCD_KINDS)


def server_plan(seed: int, seconds: float, etcd: bool) -> tuple[Episode, ...]:
    """As `plan`."""
    source = random.Random(f"chaos/servers/{seed}")
    wire = source.sample(WIRE_KINDS, len(WIRE_KINDS))
    half = len(wire) // 2
    hands = {_HANDS[0]: wire[:half], _HANDS[1]: wire[half:]}
    kinds = (*_HANDS, *(kind for kind in kinds_of(etcd) if kind not in WIRE_KINDS))

    def make(number: int, dealt: tuple[str, ...], source: random.Random, first_deck: bool) -> Episode:
        proxied = source.sample(PROXIED, len(hands))
        others = source.sample([node for node in range(STRIPE_SHARDS) if node not in proxied], 3)
        done: list[str] = []
        damages: list[Damage] = []
        for kind in dealt:
            if kind in hands:
                node = proxied.pop()
                damages += [Damage(each, node, source.random()) for each in hands[kind]]
                done += hands[kind]
                continue
            done.append(kind)
            if kind == "third":
                damages += [Damage(source.choice(THIRD_KINDS), node, source.random()) for node in others]
            elif kind == "swap":
                damages += [Damage(kind, node, source.random()) for node in others[:2]]
            else:
                damages.append(Damage(kind, -1 if kind in OF_NO_NODE else others.pop(), source.random()))
        hold_s = source.uniform(*HOLD_S)
        if "outage" in done:
            hold_s += OUTAGE_S
        return Episode(number, tuple(done), tuple(damages), hold_s, (), source.random() < 0.5, first_deck)

    return schedule(source, seconds, EVERY_SERVER_KIND_SECONDS, kinds, ALONE, make)
