"""The map of hot keys: exact for what it knows, bounded, and never wrong about what it forgot."""

from __future__ import annotations

import random

import numpy as np
import pytest

from efs.contract import ABSENT
from efs.hotmap import SEVERAL, HotMap
from tests.support.records import make_keys

KEYS = make_keys(1_000, 1)


def test_known_keys_are_located_and_unknown_ones_are_not_guessed() -> None:
    hot = HotMap()
    for place, key in enumerate(KEYS[:10]):
        hot.set(key, (place,))
    hot.set(KEYS[10], ())
    hot.set(KEYS[11], (7, 9))
    located = hot.locate(KEYS[:12])
    assert located is not None
    assert located.dtype == np.int64
    assert located.tolist() == [*range(10), ABSENT, SEVERAL]
    assert hot.locate(KEYS[:13]) is None
    assert hot.unknown([KEYS[12], KEYS[0], KEYS[12], KEYS[10]]) == [KEYS[12]]
    assert hot.locations(KEYS[11]) == (7, 9)
    assert hot.locations(KEYS[10]) == ()
    assert hot.locations(KEYS[12]) is None


def test_no_keys_are_located_as_none_of_them() -> None:
    located = HotMap().locate([])
    assert located is not None
    assert located.shape == (0,)


def test_records_come_and_go_under_a_known_key() -> None:
    hot = HotMap()
    hot.set(KEYS[0], ())
    hot.add(KEYS[0], 5)
    assert hot.locations(KEYS[0]) == (5,)
    hot.add(KEYS[0], 6)
    hot.add(KEYS[0], 7)
    assert hot.locations(KEYS[0]) == (5, 6, 7)
    hot.remove(KEYS[0], 6)
    hot.remove(KEYS[0], 5)
    assert hot.locations(KEYS[0]) == (7,)
    located = hot.locate(KEYS[:1])
    assert located is not None
    assert located.tolist() == [7]
    hot.remove(KEYS[0], 7)
    assert hot.locations(KEYS[0]) == ()


def test_many_records_come_at_once_under_known_and_unknown_keys() -> None:
    hot = HotMap()
    for key in KEYS[:4]:
        hot.set(key, ())
    hot.add_all(KEYS[:4], [10, 11, 12, 13])
    assert [hot.locations(key) for key in KEYS[:4]] == [(10,), (11,), (12,), (13,)]
    hot.set(KEYS[4], ())
    hot.add_all([KEYS[4], KEYS[0], KEYS[5], KEYS[4]], [20, 21, 22, 23])
    assert [hot.locations(KEYS[row]) for row in (4, 0, 5)] == [(20, 23), (10, 21), None]


def test_forgotten_records_leave_no_location_behind() -> None:
    hot = HotMap(most_keys=8)
    for place, key in enumerate(KEYS[:6]):
        hot.set(key, (place,))
    hot.set(KEYS[6], (6, 60))
    hot.forget_all(KEYS[:7], [0, 1, 2, 3, 4, 99, 6])
    assert [hot.locations(key) for key in KEYS[2:7]] == [None, None, None, (5,), (60,)]


def test_changes_of_an_unknown_key_leave_it_unknown() -> None:
    hot = HotMap()
    hot.add(KEYS[0], 5)
    hot.remove(KEYS[1], 5)
    assert hot.locations(KEYS[0]) is hot.locations(KEYS[1]) is None
    hot.set(KEYS[2], (3,))
    hot.forget(KEYS[2])
    assert hot.locations(KEYS[2]) is None


def test_memory_is_bounded_and_keys_in_use_stay() -> None:
    hot = HotMap(most_keys=100)
    used = KEYS[:20]
    for key in used:
        hot.set(key, (1,))
    for place, key in enumerate(KEYS[20:]):
        hot.set(key, (place, place + 1) if place % 3 == 0 else (place,))
        assert hot.locate(used) is not None
        assert len(hot) <= 100
    assert len(hot._several) <= 100
    assert hot.locations(KEYS[21]) is None


def test_asking_never_makes_the_map_forget() -> None:
    hot = HotMap(most_keys=20)
    for place, key in enumerate(KEYS[:20]):
        hot.set(key, (place,))
    assert hot.unknown(KEYS[:20]) == []
    for _ in range(3):
        assert [hot.locations(key) for key in KEYS[:20]] == [(place,) for place in range(20)]
        located = hot.locate(KEYS[:20])
        assert located is not None
        assert located.tolist() == list(range(20))
    assert len(hot) == 20


def test_a_flood_of_absent_keys_does_not_push_out_what_is_stored() -> None:
    hot = HotMap(most_keys=100)
    for key in KEYS[:30]:
        hot.set(key, (1,))
    for key in KEYS[30:]:
        hot.set(key, ())
    assert hot.locate(KEYS[:30]) is not None
    assert len(hot._young_absent) + len(hot._old_absent) <= 100 // 8 + 1


@pytest.mark.parametrize("seed", range(5))
def test_it_never_contradicts_a_dict_that_is_told_the_same(seed: int) -> None:
    source = random.Random(seed)
    hot = HotMap(most_keys=40)
    truth: dict[bytes, tuple[int, ...]] = {}
    keys = KEYS[:80]
    for step in range(5_000):
        key = source.choice(keys)
        before = truth.get(key, ())
        action = source.randrange(4)
        if action == 0:
            truth[key] = (*before, step)
            hot.add(key, step)
        elif action == 1 and before:
            gone = source.choice(before)
            truth[key] = tuple(place for place in before if place != gone)
            hot.remove(key, gone)
        elif action == 2:
            hot.set(key, before)
            assert hot.locations(key) == before
        found = hot.locations(source.choice(keys)) if action == 3 else None
        asked = source.sample(keys, 6)
        located = hot.locate(asked)
        if located is not None:
            for one, place in zip(asked, located.tolist(), strict=True):
                versions = truth.get(one, ())
                expected = {0: ABSENT, 1: versions[0] if versions else None}.get(len(versions), SEVERAL)
                assert place == expected
                assert hot.locations(one) == versions
        assert found is None or isinstance(found, tuple)
