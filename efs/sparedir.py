"""The directory of a spare: everything of an empty node but its place in a group.

    spare.toml      cluster id, node id and sizes, as node.toml has them, without a group and an index
    all else        as in the directory of a node that was never opened (`efs/nodedir.py`)

A spare becomes a node when node.toml is written into its directory; then spare.toml goes. Where both are there, a kill
between the two left them, and it is a node: who has node.toml has a place, for good. Before that it is none, to
whoever looks for nodes, and nothing was ever stored in it. Its node id stays the same.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Final

from efs.errors import CorruptRecord, InvalidArgument, OpenFailed
from efs.nodedir import (
    NODE_FILE,
    NodeConfig,
    NodePlace,
    NodePlan,
    prepare_directory,
    read_boot,
    read_identity,
    render_config,
    render_identity,
    require_id,
)
from efs.osio import Io, replace_file, sync_directory

SPARE_FILE: Final = "spare.toml"


@dataclass(frozen=True, slots=True)
class SpareConfig:
    """What spare.toml says. `node_id` is 32 hex digits."""

    cluster_id: str
    node_id: str
    plan: NodePlan


def is_spare(path: str) -> bool:
    """Whether a directory is that of a spare, and of no node yet."""
    return os.path.lexists(os.path.join(path, SPARE_FILE)) and not os.path.lexists(os.path.join(path, NODE_FILE))


def create_spare(io: Io, path: str, cluster_id: str, node_id: str, plan: NodePlan, boot_id: str) -> SpareConfig:
    """Make a spare in a new or empty directory, or one in which that was interrupted. Errors as
    `efs.nodedir.create_directory`."""
    require_id("cluster id", cluster_id)
    prepare_directory(io, path, node_id, plan, boot_id, SPARE_FILE, render_identity(cluster_id, node_id, (), plan))
    return SpareConfig(cluster_id, node_id, plan)


def read_spare(io: Io, path: str) -> SpareConfig:
    """Identity and sizes of a spare. Errors as `efs.nodedir.read_config`; InvalidArgument for a directory that has been
    a node before, because it may hold something."""
    found = read_identity(io, path, SPARE_FILE)
    try:
        require_id("cluster id", found.text("cluster_id"))
    except InvalidArgument as error:
        raise CorruptRecord(f"{found.file}: {error}") from error
    boot = read_boot(io, path)
    if boot is None or boot.boots > 0:
        raise InvalidArgument(f"{path} was in use as a node and can be no spare: make an empty one")
    return SpareConfig(found.text("cluster_id"), found.node_id(), found.plan())


def settle(io: Io, path: str, spare: SpareConfig, place: NodePlace) -> None:
    """Make a spare the node of a place, durably; once more does nothing else. OpenFailed names the path."""
    try:
        replace_file(io, path, NODE_FILE, render_config(NodeConfig(place, spare.node_id, spare.plan)))
        if os.path.lexists(os.path.join(path, SPARE_FILE)):
            io.unlink(os.path.join(path, SPARE_FILE))
            sync_directory(io, path)
    except OSError as error:
        raise OpenFailed(path, error) from error
