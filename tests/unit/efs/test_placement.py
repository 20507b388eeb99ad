"""Placement is pinned: the tables may never change, so their golden values stand here."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.errors import InvalidArgument
from efs.placement import (
    MAX_EC_GROUPS,
    ec_group_table,
    node_of_shard,
    placement_group,
    rotation_of,
    runs,
    shard_of_node,
    spare_shard_of,
)

GROUP_IDS = ["east-1", "west-1", "nord-ü"]
GOLDEN_ROTATIONS = [9, 7, 6, 5, 3, 2, 6, 8, 6, 6, 8, 10, 1, 1, 6, 7, 8, 7, 2, 10, 0, 8, 7, 4]
GOLDEN_SPARES = [11, 10, 10, 10, 11, 11, 11, 11, 10, 10, 10, 11, 11, 10, 10, 10, 11, 10, 11, 11, 11, 10, 11, 11]
GOLDEN_SHA256 = {
    "rotations": "9ad1713d6ff30c6e76fee74ccce6fb65c60e3f67d0a6583200e6ef083e71d237",
    "spares": "dfd24f76e779abaf4fc4be09e43d0c04ecb953c2fb56048e7a95cb10f586c979",
    "owners": "91e9cacf4274c998b94a115658288329fcdca4017e4cea1800bc9b931b6dc1a3",
}
PRINT_TABLES = """
import hashlib
from efs.placement import ec_group_table, rotation_of, spare_shard_of
print(hashlib.sha256(bytes(map(rotation_of, range(65536)))).hexdigest())
print(hashlib.sha256(bytes(map(spare_shard_of, range(65536)))).hexdigest())
print(hashlib.sha256(ec_group_table(["east-1", "west-1", "nord-\\u00fc"]).astype("<u2").tobytes()).hexdigest())
"""


def key_in(group: int, rest: bytes = bytes(30)) -> bytes:
    return group.to_bytes(2, "big") + rest


def test_golden_rotations_and_spares() -> None:
    assert [rotation_of(group) for group in range(24)] == GOLDEN_ROTATIONS
    assert [spare_shard_of(group) for group in range(24)] == GOLDEN_SPARES
    assert (rotation_of(0xABCD), spare_shard_of(0xABCD)) == (8, 11)
    assert (rotation_of(0xFFFF), spare_shard_of(0xFFFF)) == (2, 11)


def test_golden_owners() -> None:
    owners = [GROUP_IDS[owner] for owner in ec_group_table(GROUP_IDS)[:8]]
    assert owners == ["west-1", "east-1", "west-1", "nord-ü", "nord-ü", "nord-ü", "nord-ü", "nord-ü"]


@pytest.mark.parametrize("hash_seed", ["0", "1", "4294967295", "random"])
def test_tables_are_the_same_in_any_process_with_any_hash_seed(hash_seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
    done = subprocess.run(
        [sys.executable, "-c", PRINT_TABLES], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == list(GOLDEN_SHA256.values())


def test_tables_follow_the_documented_arithmetic() -> None:
    """The same in Python integers."""
    word = (1 << 64) - 1

    def mix(x: int) -> int:
        x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & word
        x = (x ^ (x >> 27)) * 0x94D049BB133111EB & word
        return x ^ (x >> 31)

    def score(group_id: str, group: int) -> int:
        seed = hashlib.blake2b(group_id.encode(), digest_size=8, person=b"efs/ec-group/1").digest()
        return mix(int.from_bytes(seed, "little") ^ mix(group + 0x6B762D6F776E6572))

    owners = ec_group_table(GROUP_IDS)
    for group in (*range(0, 65_536, 97), 65_535):
        turn = mix(group + 0x6B762D726F746174)
        assert rotation_of(group) == turn % 12
        assert spare_shard_of(group) == 10 + turn // 12 % 2
        assert GROUP_IDS[owners[group]] == max(GROUP_IDS, key=lambda name: score(name, group))


def test_placement_group_is_the_first_two_bytes_big_endian() -> None:
    assert placement_group(key_in(0x0102, b"\xff" * 30)) == 0x0102
    assert placement_group(b"\xff" * 32) == 0xFFFF


@pytest.mark.parametrize("length", [0, 1, 2, 31, 33])
def test_a_key_of_another_length_is_refused(length: int) -> None:
    with pytest.raises(InvalidArgument, match=f"{length} bytes, must have 32"):
        placement_group(bytes(length))
    with pytest.raises(InvalidArgument, match=f"key 1 has {length} bytes, must have 32"):
        runs([bytes(32), bytes(length)])


@pytest.mark.parametrize("group", [-1, 65_536])
def test_a_placement_group_out_of_range_is_refused(group: int) -> None:
    for ask in (rotation_of, spare_shard_of):
        with pytest.raises(InvalidArgument, match=f"placement group {group} is outside"):
            ask(group)


def test_shards_and_nodes_are_a_one_to_one_mapping_for_every_rotation() -> None:
    for rotation in range(12):
        nodes = [node_of_shard(shard, rotation) for shard in range(12)]
        assert sorted(nodes) == list(range(12))
        assert nodes[0] == rotation
        assert [shard_of_node(node, rotation) for node in nodes] == list(range(12))


def test_rotations_spares_and_left_out_nodes_are_balanced() -> None:
    groups = range(65_536)
    rotations = np.array([rotation_of(group) for group in groups])
    spares = np.array([spare_shard_of(group) for group in groups])
    for counts in (
        np.bincount(rotations, minlength=12),
        np.bincount(spares - 10, minlength=2),
        np.bincount((spares + rotations) % 12, minlength=12),
        np.bincount((spares - 10) * 12 + rotations, minlength=24),
    ):
        assert counts.min() > 0.93 * counts.mean()
        assert counts.max() < 1.07 * counts.mean()


@pytest.mark.parametrize("count", [2, 3, 10, 100])
def test_ec_groups_are_balanced_and_each_has_every_rotation_equally(count: int) -> None:
    owners = ec_group_table([f"group-{index}" for index in range(count)])
    sizes = np.bincount(owners, minlength=count)
    # Five standard deviations of a fair draw.
    assert np.abs(sizes - sizes.mean()).max() < 5 * np.sqrt(sizes.mean())
    rotations = np.array([rotation_of(group) for group in range(65_536)])
    for index in range(count):
        turns = np.bincount(rotations[owners == index], minlength=12)
        assert np.abs(turns - turns.mean()).max() < 5 * np.sqrt(turns.mean())


@pytest.mark.parametrize("count", [1, 2, 5, 20])
def test_adding_a_group_moves_its_fair_share_and_only_to_itself(count: int) -> None:
    before = [f"g{index}" for index in range(count)]
    after = ["new", *before]
    old, new = ec_group_table(before), ec_group_table(after)
    moved = np.array([before[owner] for owner in old]) != np.array([after[owner] for owner in new])
    assert (new[moved] == 0).all()
    assert moved.mean() == pytest.approx(1 / (count + 1), rel=0.1)


def test_the_order_of_ids_does_not_matter() -> None:
    ids = ["a", "b", "c", "d"]
    expected = [ids[owner] for owner in ec_group_table(ids)]
    for order in itertools.permutations(ids):
        assert [order[owner] for owner in ec_group_table(order)] == expected


def test_of_equal_scores_the_first_id_wins_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.placement._seed", lambda group_id: 7)
    assert set(ec_group_table(["b", "a", "c"])) == {1}
    assert set(ec_group_table(["c", "b", "a"])) == {2}


def test_one_group_owns_everything() -> None:
    table = ec_group_table(["only"])
    assert table.dtype == np.uint16
    assert table.shape == (65_536,)
    assert not table.any()
    assert not table.flags.writeable


@pytest.mark.parametrize("ids", [[], ["a", "a"], ["a", ""], [f"g{index}" for index in range(MAX_EC_GROUPS + 1)]])
def test_bad_group_lists_are_refused(ids: list[str]) -> None:
    with pytest.raises(InvalidArgument):
        ec_group_table(ids)


def test_runs_of_a_chain() -> None:
    keys = [key_in(7, bytes([index]) * 30) for index in range(4)] + [key_in(9)] * 2 + [key_in(7)]
    assert runs(keys) == [(0, 4), (4, 6), (6, 7)]
    assert runs([]) == []
    assert runs([key_in(3)]) == [(0, 1)]


def test_runs_do_not_look_beyond_the_group() -> None:
    assert runs([key_in(1, b"\x00" * 30), key_in(1, b"\xff" * 30)]) == [(0, 2)]
    assert runs([b"\x00\x01" + bytes(30), b"\x01\x00" + bytes(30)]) == [(0, 1), (1, 2)]


@given(st.lists(st.integers(0, 3), max_size=40))
def test_runs_are_the_maximal_stretches(groups: list[int]) -> None:
    found = runs([key_in(group) for group in groups])
    expected, position = [], 0
    for _, stretch in itertools.groupby(groups):
        length = len(list(stretch))
        expected.append((position, position + length))
        position += length
    assert found == expected
