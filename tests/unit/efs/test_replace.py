"""What a cluster's root notes of a node that was replaced in the cluster's map."""

from __future__ import annotations

from pathlib import Path

import pytest

from efs.cluster import StoreConfig, init_store, read_store_config
from efs.limits import MIB, STRIPE_SHARDS
from efs.nodedir import NodePlace
from efs.osio import SystemIo
from efs.replace import note_in_root

IO = SystemIo()
NEW = "f" * 32


@pytest.fixture
def store(tmp_path: Path) -> tuple[str, StoreConfig]:
    root = str(tmp_path / "store")
    init_store(IO, root, STRIPE_SHARDS * 8 * MIB, node_paths=None, durability="process", extent_bytes=1 * MIB)
    return root, read_store_config(IO, root)


def test_the_root_names_the_new_node_and_all_others_as_before(store: tuple[str, StoreConfig]) -> None:
    root, before = store
    for _ in range(2):  # An interrupted command is given again.
        note_in_root(IO, root, NodePlace(before.cluster_id, 0, 7), "/elsewhere/07", NEW)
    after = read_store_config(IO, root)
    assert (after.node_ids[7], after.node_paths[7]) == (NEW, "/elsewhere/07")
    for other in set(range(STRIPE_SHARDS)) - {7}:
        assert (after.node_ids[other], after.node_paths[other]) == (before.node_ids[other], before.node_paths[other])


@pytest.mark.parametrize(("cluster_id", "group"), [("e" * 32, 0), (None, 1)])
def test_the_root_of_another_cluster_or_group_is_left_alone(store: tuple[str, StoreConfig], cluster_id: str | None,
                                                            group: int) -> None:
    root, before = store
    note_in_root(IO, root, NodePlace(cluster_id or before.cluster_id, group, 7), "/elsewhere/07", NEW)
    assert read_store_config(IO, root) == before


def test_a_root_on_another_machine_is_not_made_here(tmp_path: Path) -> None:
    note_in_root(IO, str(tmp_path / "nowhere"), NodePlace("e" * 32, 0, 7), "/elsewhere/07", NEW)
    assert list(tmp_path.iterdir()) == []
