"""Replacing a node: an empty directory takes the place of one that is lost, and is filled from the other eleven.

Steps, each of them durable before the next one begins, so that a kill anywhere is continued by the next call:

1. The root notes which node is being made, under which new id, and that it is syncing (`efs/progress.py`).
2. Where the root is that of a cluster with a cluster.toml, that names the new id, at the address of the old one. Then
   store.toml does, and, if it moved, the new path. From here on the old directory is refused wherever it turns up, and
   until the new one is complete the store opens without the node.
3. The directory is made (`efs/nodedir.py`), also where that was interrupted before.
4. The note that it is being made goes; the one that it is syncing stays.
5. The store is opened and the node synced (`efs/upkeep.py`), from the key that was reached, until it joins. If that is
   interrupted, any later owner goes on with it in the background.

Only a directory is taken that is absent, or empty, or in which the making of a node was interrupted. A node that is
there and belongs to the store is never replaced in its place: move it away first. The sizes of the new node are those
of the others.

A cluster.toml that names another node in the place than store.toml does is not written over, and neither is a later
group replaced in whose root there is none: its cluster is described elsewhere. That a map in etcd describes the
cluster, nothing in the root says.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace

from efs.cluster import STORE_FILE, StoreConfig, absent_because, read_store_config, write_store_config
from efs.clusterfile import CLUSTER_FILE, ClusterConfig, read_cluster, replace_node
from efs.dirlock import locked_directory
from efs.errors import IdentityMismatch, InvalidArgument, OpenFailed, StoreExists, StoreNotFound
from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.nodedir import (
    NODE_FILE,
    NodeConfig,
    NodePlace,
    NodePlan,
    OwnerLock,
    create_directory,
    machine_boot_id,
    read_config,
    require_unused,
)
from efs.osio import Io
from efs.progress import Progress, read_progress, write_progress


@dataclass(frozen=True, slots=True)
class Prepared:
    """A node that is ready to be synced. resumed: it had been replaced before and was not up to date yet."""

    node_index: int
    path: str
    node_id: str
    resumed: bool


def prepare_node(io: Io, root: str, node_index: int, path: str | None = None,
                 source: random.Random | None = None) -> Prepared:
    """Steps 1 to 4 for a store that nobody owns.

    path: of the new directory, None for the old place. InvalidArgument for a node or path that cannot be meant, when
    the node is there and in use, or when fewer than ten others are there to rebuild from; StoreExists for a directory
    that is not empty; Locked when somebody owns the store; OpenFailed names what could not be written.
    """
    if not 0 <= node_index < STRIPE_SHARDS:
        raise InvalidArgument(f"no node has index {node_index}, must be 0 to {STRIPE_SHARDS - 1}")
    root = os.path.abspath(root)
    lock = OwnerLock.take(io, root)
    try:
        return _prepare(io, root, node_index, path, source or random.SystemRandom())
    finally:
        lock.release()


def _prepare(io: Io, root: str, index: int, path: str | None, source: random.Random) -> Prepared:
    config, progress = read_store_config(io, root), read_progress(io, root)
    place = os.path.abspath(config.node_paths[index] if path is None else path)
    _check_path(config, index, place)
    same = place == os.path.abspath(config.node_paths[index])
    noted = progress.making.get(index)
    making = noted if same else None
    if absent_because(place) is None:
        found = read_config(io, place)
        ours = found.place == config.place(index) and found.node_id == config.node_ids[index]
        if not (ours and same):
            raise StoreExists(place)
        if index not in progress.syncing:
            raise InvalidArgument(f"node {index} is at {place} and in use: move the directory away to replace it")
        _note_made(io, root, progress, index)
        return Prepared(index, place, found.node_id, True)
    require_unused(io, place, NODE_FILE)
    plan = _plan_of_others(io, config, index)
    # A noted id that store.toml does not name yet is that of no directory, so it is good for any.
    unused = noted if same or noted != config.node_ids[index] else None
    node_id = unused if unused is not None else f"{source.getrandbits(128):032x}"
    described = _described(io, root, config, index, node_id)
    progress = replace(progress, syncing={**progress.syncing, index: None}, making={**progress.making, index: node_id})
    write_progress(io, root, progress)
    if described is not None:
        _describe(io, root, described, STRIPE_SHARDS * config.group + index, node_id)
    _name_in_root(io, root, config.place(index), place, node_id)
    _make(io, place, config.place(index), node_id, plan)
    _note_made(io, root, progress, index)
    return Prepared(index, place, node_id, making is not None)


def note_in_root(io: Io, root: str, place: NodePlace, path: str, node_id: str) -> None:
    """Have the store.toml of a root of a cluster's nodes name the one that was put into a place, as the cluster's map
    does, so that with the servers stopped the root is a store like any other. Nothing is done where the root is not on
    this machine, or the place not in its group. OpenFailed names what could not be written; InvalidArgument when
    somebody else is changing it just now."""
    if os.path.lexists(os.path.join(root, STORE_FILE)):
        _name_in_root(io, root, place, path, node_id)


def require_root_of(io: Io, root: str, place: NodePlace) -> None:
    """InvalidArgument unless this is the root of the group of a place. Else as `read_store_config`."""
    config = read_store_config(io, root)
    if (config.cluster_id, config.group) != (place.cluster_id, place.group):
        raise InvalidArgument(f"{root} is group {config.group} of cluster {config.cluster_id}, the node is of group "
                              f"{place.group} of {place.cluster_id}")


def _name_in_root(io: Io, root: str, place: NodePlace, path: str, node_id: str) -> None:
    """Unless the place is not in the root's group. Nobody else changes store.toml meanwhile."""
    busy = InvalidArgument(f"{root}: somebody else is changing it just now: give the command again")
    with locked_directory(io, root, lambda error: OpenFailed(root, error), busy):
        config = read_store_config(io, root)
        if (config.cluster_id, config.group) == (place.cluster_id, place.group):
            write_store_config(io, root, _with_node(config, place.node_index, path, node_id))


def _described(io: Io, root: str, config: StoreConfig, index: int, node_id: str) -> ClusterConfig | None:
    """What the root's cluster.toml says; None for a store that has none. InvalidArgument unless it is to name the new
    node, or does already."""
    path, number = os.path.join(root, CLUSTER_FILE), STRIPE_SHARDS * config.group + index
    try:
        found = read_cluster(io, path)
    except StoreNotFound:
        if config.group == 0:
            return None
        raise InvalidArgument(f"{root} is group {config.group} of a cluster that is described elsewhere: use "
                              f"`kvstore cluster replace-node {number}`") from None
    named = found.node_ids[number : number + 1] if found.cluster_id == config.cluster_id else ()
    if not set(named) & {config.node_ids[index], node_id}:
        raise InvalidArgument(f"{path} does not name node {config.node_ids[index]} in place {number}, as store.toml "
                              "does: nothing was replaced")
    return found


def _describe(io: Io, root: str, described: ClusterConfig, number: int, node_id: str) -> None:
    if described.node_ids[number] != node_id:
        replace_node(io, os.path.join(root, CLUSTER_FILE), described, number, node_id)


def _check_path(config: StoreConfig, index: int, place: str) -> None:
    if not place.isprintable():
        raise InvalidArgument(f"the path {place!r} has characters that store.toml cannot hold")
    real = os.path.realpath(place)
    for other, path in enumerate(config.node_paths):
        there = os.path.realpath(path)
        if other != index and os.path.commonpath((there, real)) in (there, real):
            raise InvalidArgument(f"{place} cannot be node {index}: node {other} is at {path}")


def _plan_of_others(io: Io, config: StoreConfig, index: int) -> NodePlan:
    """The sizes of the nodes that are there. InvalidArgument when they are too few to rebuild from."""
    found: list[NodeConfig] = []
    for other, path in enumerate(config.node_paths):
        if other != index and absent_because(path) is None:
            found.append(read_config(io, path))
            if found[-1].node_id != config.node_ids[other]:
                raise IdentityMismatch(path, "node id", found[-1].node_id, config.node_ids[other])
    if len(found) < DATA_SHARDS:
        raise InvalidArgument(f"only {len(found)} other nodes are there, {DATA_SHARDS} are needed to rebuild one")
    return found[0].plan


def _with_node(config: StoreConfig, index: int, path: str, node_id: str) -> StoreConfig:
    paths, ids = list(config.node_paths), list(config.node_ids)
    paths[index], ids[index] = path, node_id
    return replace(config, node_paths=tuple(paths), node_ids=tuple(ids))


def _make(io: Io, place: str, where: NodePlace, node_id: str, plan: NodePlan) -> None:
    if not os.path.isdir(os.path.dirname(place)):
        raise OpenFailed(place, FileNotFoundError(2, "the directory above it is not there"))
    create_directory(io, place, where, node_id, plan, machine_boot_id())


def _note_made(io: Io, root: str, progress: Progress, index: int) -> None:
    if index in progress.making:
        left = {other: node_id for other, node_id in progress.making.items() if other != index}
        write_progress(io, root, replace(progress, making=left))
