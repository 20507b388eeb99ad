"""Who owns a key, and who owned it before: by the map's groups, their times and the clock alone."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from efs.errors import InvalidArgument
from efs.limits import GROUP_RETENTION_SECONDS, MAX_CLUSTER_GROUPS
from efs.ownership import Ownership, owner_table
from efs.placement import ec_group_table

NOW = 1_800_000_000
KEYS = [group.to_bytes(2, "big") + bytes(30) for group in range(65_536)]


def test_owners_are_pinned() -> None:
    """Golden: an owner that changes loses every stored block of a cluster."""
    table = owner_table(3)
    assert table[:12].tolist() == [2, 2, 0, 2, 1, 1, 1, 0, 2, 0, 1, 0]
    assert hashlib.sha256(table.astype("<u2").tobytes()).hexdigest()[:32] == "f93b60f405029e28077f41c4437fdd3a"
    assert table.tolist() == ec_group_table(["0", "1", "2"]).tolist()


def test_an_added_group_takes_its_share_and_moves_nothing_else() -> None:
    for groups in range(1, 6):
        before, after = owner_table(groups), owner_table(groups + 1)
        moved = before != after
        assert (after[moved] == groups).all()
        assert abs(moved.mean() - 1 / (groups + 1)) < 0.01


def test_earlier_owners_are_asked_for_the_retention_time_and_no_longer() -> None:
    ownership = Ownership((0, NOW), 100)
    during = ownership.owners(KEYS, NOW + 99.9)
    assert [owners.tolist() for owners in during] == [owner_table(2).tolist(), owner_table(1).tolist()]
    assert [owners.tolist() for owners in ownership.owners(KEYS, NOW + 100)] == [owner_table(2).tolist()]
    # A clock that is behind the one of who added the group asks too.
    assert len(ownership.owners(KEYS, NOW - 60)) == 2


def test_of_several_groups_added_shortly_one_after_the_other_all_earlier_owners_are_asked_the_latest_first() -> None:
    ownership = Ownership((0, NOW, NOW + 50, NOW + 50), 100)
    assert [int(owners.max()) for owners in ownership.owners(KEYS, NOW + 60)] == [3, 2, 1, 0]
    assert [int(owners.max()) for owners in ownership.owners(KEYS, NOW + 120)] == [3, 2, 1]
    assert [int(owners.max()) for owners in ownership.owners(KEYS, NOW + 150)] == [3]


def test_without_retention_nobody_is_asked_but_the_owner() -> None:
    assert len(Ownership((0, NOW), 0).owners(KEYS[:5], NOW)) == 1
    assert np.array_equal(Ownership().owners(KEYS, NOW)[0], np.zeros(65_536))
    assert Ownership().retention_seconds == GROUP_RETENTION_SECONDS


@pytest.mark.parametrize(
    ("added_at", "retention_seconds", "why"),
    [
        ((), 1, "0 groups"),
        ((0,) * (MAX_CLUSTER_GROUPS + 1), 1, "must be 1 to"),
        ((0, 5, 4), 1, "added before the one in front of it"),
        ((-1,), 1, "added before"),
        ((0,), -1, "retention_seconds is -1"),
        ((0,), 1 << 40, "retention_seconds"),
    ],
)
def test_what_can_be_no_history_is_refused(added_at: tuple[int, ...], retention_seconds: int, why: str) -> None:
    with pytest.raises(InvalidArgument, match=why):
        Ownership(added_at, retention_seconds)
