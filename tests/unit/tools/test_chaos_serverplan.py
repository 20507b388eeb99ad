"""The schedule against servers: a function of its seed, two nodes damaged at most, every kind in the first deck."""

from __future__ import annotations

from collections import Counter

import pytest

from tools.chaosrig.plan import ALONE as EMBEDDED_ALONE
from tools.chaosrig.plan import KINDS
from tools.chaosrig.serverconduct import SERVER_EVIDENCE
from tools.chaosrig.serverplan import (
    CLIENT_KINDS,
    ETCD_KINDS,
    EVERY_SERVER_KIND_SECONDS,
    OF_NO_NODE,
    OUTAGE_S,
    PROXIED,
    SERVER_KINDS,
    kinds_of,
    server_plan,
)
from tools.chaosrig.wireproxy import WIRE_KINDS


def test_a_seed_gives_the_same_schedule_every_time_and_a_longer_run_begins_as_a_shorter_one() -> None:
    assert server_plan(7, 600, True) == server_plan(7, 600, True)
    assert server_plan(7, 600, True) != server_plan(8, 600, True)
    short = server_plan(7, 600, False)
    assert server_plan(7, 3600, False)[: len(short)] == short


@pytest.mark.parametrize("etcd", [True, False])
@pytest.mark.parametrize("seed", range(20))
def test_every_kind_is_in_the_first_deck(seed: int, etcd: bool) -> None:
    episodes = server_plan(seed, EVERY_SERVER_KIND_SECONDS, etcd)
    first = Counter(kind for episode in episodes if episode.first_deck for kind in episode.kinds)
    assert first == Counter(kinds_of(etcd))
    assert etcd or not set(ETCD_KINDS) & {kind for episode in episodes for kind in episode.kinds}


@pytest.mark.parametrize("seed", range(20))
def test_no_more_than_two_nodes_are_damaged_at_once_except_in_a_third_failure(seed: int) -> None:
    for episode in server_plan(seed, 1800, True):
        assert len(episode.nodes) == 3 if "third" in episode.kinds else len(episode.nodes) <= 2
        assert len(episode.kinds) == 1 or not {"swap", "replace", "third"} & set(episode.kinds)
        for damage in episode.damages:
            assert (damage.node < 0) is (damage.kind in OF_NO_NODE)
            assert damage.kind not in WIRE_KINDS or damage.node in PROXIED
        of_others = {damage.node for damage in episode.damages if damage.kind not in WIRE_KINDS}
        assert not of_others & {damage.node for damage in episode.damages if damage.kind in WIRE_KINDS}
        assert "outage" not in episode.kinds or episode.hold_s > OUTAGE_S


def test_what_raises_no_counter_is_said() -> None:
    assert set(SERVER_KINDS) - set(SERVER_EVIDENCE) == {*CLIENT_KINDS, "outage"}
    assert set(EMBEDDED_ALONE) <= set(SERVER_KINDS)
    assert {"rot_payload", "rot_entry", "vanish", "swap", "replace", "third"} <= set(SERVER_KINDS) & set(KINDS)
