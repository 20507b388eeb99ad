"""What a cluster's root notes of a node that was replaced in the cluster's map, and what its cluster.toml says of one
that was replaced in the root."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from efs.cluster import StoreConfig, init_store, read_store_config
from efs.clusterfile import CLUSTER_FILE, ClusterConfig, read_cluster, replace_node, set_drain, write_cluster
from efs.dirlock import locked_directory
from efs.errors import InvalidArgument, OpenFailed
from efs.limits import MIB, STRIPE_SHARDS
from efs.nodedir import NodePlace
from efs.osio import SystemIo
from efs.replace import note_in_root, prepare_node

IO = SystemIo()
NODE = 7
NEW = "f" * 32


@pytest.fixture
def store(tmp_path: Path) -> tuple[str, StoreConfig]:
    root = str(tmp_path / "store")
    init_store(IO, root, STRIPE_SHARDS * 8 * MIB, node_paths=None, durability="process", extent_bytes=1 * MIB)
    return root, read_store_config(IO, root)


def later_root(tmp_path: Path) -> str:
    """The root of group 1 of a cluster."""
    root = str(tmp_path / "more")
    init_store(IO, root, STRIPE_SHARDS * 8 * MIB, node_paths=None, durability="process", extent_bytes=1 * MIB,
               group_of=("c" * 32, 1))
    return root


def test_the_root_names_the_new_node_and_all_others_as_before(store: tuple[str, StoreConfig]) -> None:
    root, before = store
    for _ in range(2):  # An interrupted command is given again.
        note_in_root(IO, root, NodePlace(before.cluster_id, 0, 7), "/elsewhere/07", NEW)
    after = read_store_config(IO, root)
    assert (after.node_ids[7], after.node_paths[7]) == (NEW, "/elsewhere/07")
    for other in set(range(STRIPE_SHARDS)) - {7}:
        assert (after.node_ids[other], after.node_paths[other]) == (before.node_ids[other], before.node_paths[other])


def test_the_root_of_a_later_group_names_its_new_node(tmp_path: Path) -> None:
    root, cluster_id = later_root(tmp_path), "c" * 32
    note_in_root(IO, root, NodePlace(cluster_id, 0, 7), "/elsewhere/07", NEW)
    assert NEW not in read_store_config(IO, root).node_ids
    note_in_root(IO, root, NodePlace(cluster_id, 1, 7), "/elsewhere/07", NEW)
    assert read_store_config(IO, root).node_ids[7] == NEW


def test_a_root_that_somebody_else_is_changing_is_not_written(store: tuple[str, StoreConfig]) -> None:
    root, before = store
    place = NodePlace(before.cluster_id, 0, 7)
    with (locked_directory(IO, root, lambda error: OpenFailed(root, error), InvalidArgument("busy")),
          pytest.raises(InvalidArgument, match="give the command again")):
        note_in_root(IO, root, place, "/elsewhere/07", NEW)
    assert read_store_config(IO, root) == before


@pytest.mark.parametrize(("cluster_id", "group"), [("e" * 32, 0), (None, 1)])
def test_the_root_of_another_cluster_or_group_is_left_alone(store: tuple[str, StoreConfig], cluster_id: str | None,
                                                            group: int) -> None:
    root, before = store
    note_in_root(IO, root, NodePlace(cluster_id or before.cluster_id, group, 7), "/elsewhere/07", NEW)
    assert read_store_config(IO, root) == before


def test_a_root_on_another_machine_is_not_made_here(tmp_path: Path) -> None:
    note_in_root(IO, str(tmp_path / "nowhere"), NodePlace("e" * 32, 0, 7), "/elsewhere/07", NEW)
    assert list(tmp_path.iterdir()) == []


# -- cluster.toml ----------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process is gone."""


class DyingIo(SystemIo):
    """Is killed before the file of this name is replaced."""

    def __init__(self, name: str) -> None:
        self._name = name

    def rename(self, source: str, target: str) -> None:
        if os.path.basename(target) == self._name:
            raise Killed
        super().rename(source, target)


def described(root: str, store: StoreConfig) -> ClusterConfig:
    """The root's cluster.toml, made, with the node drained; the node's directory is lost."""
    addresses = [f"unix:s{index}" for index in range(STRIPE_SHARDS)]
    path = write_cluster(IO, root, store.cluster_id, store.durability, store.node_ids, addresses, upkeep_host=None,
                         token_file=None)
    shutil.rmtree(os.path.join(root, store.node_paths[NODE]))
    return set_drain(IO, path, read_cluster(IO, path), NODE, True)


def test_the_clusters_file_names_the_node_that_was_replaced_in_its_root(store: tuple[str, StoreConfig]) -> None:
    root, config = store
    before = described(root, config)
    node_id = prepare_node(IO, root, NODE).node_id
    after = read_cluster(IO, os.path.join(root, CLUSTER_FILE))
    assert after.node_ids == read_store_config(IO, root).node_ids
    assert (after.node_ids[NODE], after.endpoints) == (node_id, before.endpoints)
    assert (after.version, after.incarnations[NODE], after.draining) == (before.version + 1, 2, frozenset())


@pytest.mark.parametrize("name", ["upkeep", CLUSTER_FILE, "store.toml", "node.toml"])
@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_replacement_that_was_killed_goes_on_and_both_files_agree(store: tuple[str, StoreConfig], tmp_path: Path,
                                                                    name: str, elsewhere: bool) -> None:
    root, config = store
    before = described(root, config)
    path = str(tmp_path / "new") if elsewhere else None
    with pytest.raises(Killed):
        prepare_node(DyingIo(name), root, NODE, path)
    prepared = prepare_node(IO, root, NODE, path)
    after = read_cluster(IO, os.path.join(root, CLUSTER_FILE))
    assert after.node_ids == read_store_config(IO, root).node_ids
    assert (after.node_ids[NODE], after.version) == (prepared.node_id, before.version + 1)


def test_a_clusters_file_that_names_another_node_is_not_written_over(store: tuple[str, StoreConfig]) -> None:
    root, config = store
    path = os.path.join(root, CLUSTER_FILE)
    named = replace_node(IO, path, described(root, config), NODE, NEW)
    with pytest.raises(InvalidArgument, match="in place 7"):
        prepare_node(IO, root, NODE)
    assert read_cluster(IO, path) == named
    assert read_store_config(IO, root) == config
    assert not os.path.exists(os.path.join(root, config.node_paths[NODE]))


def test_a_node_of_a_later_group_is_not_replaced_behind_the_clusters_back(tmp_path: Path) -> None:
    root = later_root(tmp_path)
    before = read_store_config(IO, root)
    shutil.rmtree(os.path.join(root, before.node_paths[NODE]))
    with pytest.raises(InvalidArgument, match="cluster replace-node 19"):
        prepare_node(IO, root, NODE)
    assert read_store_config(IO, root) == before
