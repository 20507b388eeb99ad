"""The store: its root directory, its twelve nodes, who owns it, and which of the nodes are there.

    store.toml      below; written last, so a root in which `init` was interrupted is no store
    tenants.toml    the tenants file, 0600 (`kvstore/tenants.py`)
    lock            flock of the owner, holds its process id
    tombstones      tenant tags that were purged (`efs/tombstones.py`)
    counters        what the client counts (`efs/metrics.py`)
    upkeep          how far long work has come, and which nodes are not up to date (`efs/progress.py`)
    nodes/00 … 11   node directories, unless they were given places of their own

store.toml, format version 1:

    format_version = 1
    cluster_id = "32 hex digits"
    capacity_bytes = raw bytes of all nodes together
    durability = "process" or "power"
    extent_bytes = bytes of an extent
    group = 1                       only of a store that is a further EC group of a cluster: its number

    [[node]]                        twelve times, in the order of their index
    path = "nodes/00"               below the root, or absolute
    id = "32 hex digits"

A node is opened in its place only: another cluster id, index or node id in its node.toml means that the directory was
moved, swapped, cloned or belongs to another store, and the whole store is refused. So are a node of another format
version, a node that another process owns, and failures that lie with this process or its rights (files, memory,
permissions): they would turn a working store into a degraded one. A node whose directory is absent or damaged is
left out, listed with the reason, and never made anew: an empty directory under a mount point is an unmounted disk.

What was taken is given back when opening fails, in the opposite order.
"""

from __future__ import annotations

import errno
import json
import os
import random
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final, Literal

from efs.errors import (
    CorruptRecord,
    EfsError,
    FormatUnsupported,
    IdentityMismatch,
    InvalidArgument,
    Locked,
    OpenFailed,
    StoreExists,
    StoreNotFound,
)
from efs.limits import FORMAT_VERSION, STRIPE_SHARDS
from efs.nodedir import (
    NODE_FILE,
    NodePlace,
    create_directory,
    discard_parts,
    machine_boot_id,
    parse_toml,
    plan_node,
    read_config,
)
from efs.osio import Io, read_file, remove_empty_directory, replace_file, sync_directory

STORE_FILE: Final = "store.toml"
NODES_DIRECTORY: Final = "nodes"
Durability = Literal["process", "power"]
DURABILITIES: Final[tuple[Durability, ...]] = ("process", "power")
MOST_FILE_BYTES: Final = 1 << 20
OWN_FAULTS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""Failures to open a node that say nothing about the node."""


@dataclass(frozen=True, slots=True)
class StoreConfig:
    """What store.toml says. `node_paths` are absolute, or relative to where the root is looked for."""

    cluster_id: str
    capacity_bytes: int
    durability: Durability
    extent_bytes: int
    node_paths: tuple[str, ...]
    node_ids: tuple[str, ...]
    group: int = 0

    def place(self, node_index: int) -> NodePlace:
        """Where one of its nodes must be."""
        return NodePlace(self.cluster_id, self.group, node_index)


# -- Making a store -------------------------------------------------------------------------------------------------


def init_store(io: Io, root: str, capacity_bytes: int, *, node_paths: Sequence[str] | None, durability: str,
               extent_bytes: int | None, index_bytes: int | None = None, source: random.Random | None = None,
               group_of: tuple[str, int] | None = None,
               device_of: Callable[[str], int] = lambda path: os.stat(path).st_dev,
               finish: Callable[[StoreConfig], None] = lambda config: None) -> list[str]:
    """Make a store and return warnings. Everything is checked before anything is made; what was made is removed again
    when it fails.

    group_of: make a further group of a cluster, of this id and with this number. finish: makes what else belongs to the
    store, or fails and leaves nothing of it.

    InvalidArgument for a wrong setting, StoreExists for a place that is not empty, OpenFailed names the path.
    """
    chosen = next((known for known in DURABILITIES if known == durability), None)
    if chosen is None:
        raise InvalidArgument(f"durability is {durability!r}, must be process or power")
    plan = plan_node(capacity_bytes // STRIPE_SHARDS, extent_bytes, index_bytes)
    source = source or random.SystemRandom()
    paths, written = _places(root, node_paths)
    for path in [root, *paths]:
        _require_empty(io, path)
    cluster_id, *node_ids = (f"{source.getrandbits(128):032x}" for _ in range(1 + STRIPE_SHARDS))
    group = 0
    if group_of is not None:
        cluster_id, group = group_of
    config = StoreConfig(cluster_id, capacity_bytes, chosen, plan.extent_bytes, written, tuple(node_ids), group)
    boot_id = machine_boot_id()
    making = _Making(io, root)
    try:
        making.directories([root] if node_paths is not None else [root, os.path.join(root, NODES_DIRECTORY)])
        for index, (path, node_id) in enumerate(zip(paths, node_ids, strict=True)):
            making.node(path, partial(create_directory, io, path, config.place(index), node_id, plan, boot_id))
        making.written = True
        replace_file(io, root, STORE_FILE, _render(config))
        sync_directory(io, os.path.dirname(os.path.abspath(root)))
        finish(config)
        return device_warnings([device_of(path) for path in paths])
    except OSError as error:
        making.undo()
        raise OpenFailed(root, error) from error
    except (EfsError, KeyboardInterrupt):
        making.undo()
        raise


class _Making:
    """What the making of one store has made so far."""

    def __init__(self, io: Io, root: str) -> None:
        self._io = io
        self._root = root
        self._made: list[str] = []
        self._nodes: list[str] = []
        self.written = False
        """Whether a store.toml in the root would be this one's."""

    def directories(self, paths: Sequence[str]) -> None:
        """Make these, and whatever is missing above the first."""
        make_directories(self._io, paths[0], self._made)
        for path in paths[1:]:
            self._io.mkdir(path)
            self._made.append(path)

    def node(self, path: str, make: Callable[[], object]) -> None:
        """Make the parts of a node directory, and itself when it is missing."""
        if not os.path.lexists(path):
            try:
                self._io.mkdir(path)
            except OSError as error:
                raise OpenFailed(path, error) from error
            self._made.append(path)
        self._nodes.append(path)
        try:
            make()
        except (InvalidArgument, StoreExists):
            self._nodes.pop()  # What is there is somebody else's.
            raise

    def undo(self) -> None:
        """Remove what was made, as far as that works; what somebody else put there stays."""
        if self.written:
            with suppress(OSError):
                self._io.unlink(os.path.join(self._root, STORE_FILE))
        for path in self._nodes:
            with suppress(OSError):
                discard_parts(self._io, path)
        for path in reversed(self._made):
            with suppress(OSError):
                remove_empty_directory(path)


def _places(root: str, node_paths: Sequence[str] | None) -> tuple[list[str], tuple[str, ...]]:
    """The node directories, and how store.toml names them."""
    if node_paths is None:
        written = tuple(os.path.join(NODES_DIRECTORY, f"{index:02d}") for index in range(STRIPE_SHARDS))
        return [os.path.join(root, name) for name in written], written
    if len(node_paths) != STRIPE_SHARDS:
        raise InvalidArgument(f"{len(node_paths)} node directories given, must be {STRIPE_SHARDS}")
    paths = [os.path.abspath(path) for path in node_paths]
    real = [os.path.realpath(path) for path in [root, *paths]]
    for at, path in enumerate(real):
        if not path.isprintable():
            raise InvalidArgument(f"the path {path!r} has characters that store.toml cannot hold")
        for other in real[at + 1 :]:
            if other == path or (at > 0 and os.path.commonpath((path, other)) in (path, other)):
                raise InvalidArgument(f"{path} and {other} cannot both be directories of the store")
    return paths, tuple(paths)


def _require_empty(io: Io, path: str) -> None:
    try:
        if os.path.lexists(path) and (os.path.islink(path) or not os.path.isdir(path) or io.listdir(path)):
            raise StoreExists(path)
    except OSError as error:
        raise OpenFailed(path, error) from error


def make_directories(io: Io, path: str, made: list[str] | None = None) -> None:
    """A directory and whatever is missing above it, noted in `made`. OpenFailed names the one that cannot be made."""
    missing = []
    path = os.path.abspath(path)
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for directory in reversed(missing):
        try:
            io.mkdir(directory)
        except OSError as error:
            raise OpenFailed(directory, error) from error
        if made is not None:
            made.append(directory)


def device_warnings(devices: Sequence[int]) -> list[str]:
    """What a shared device costs, for each device that holds several nodes."""
    warnings = []
    for device in dict.fromkeys(devices):
        nodes = [index for index, other in enumerate(devices) if other == device]
        if len(nodes) == len(devices):
            warnings.append("all nodes share one device: the store does not survive its loss")
        elif len(nodes) > 2:
            named = ", ".join(map(str, nodes))
            warnings.append(f"nodes {named} share one device: the store does not survive its loss")
        elif len(nodes) == 2:
            warnings.append(f"nodes {nodes[0]} and {nodes[1]} share one device: its loss leaves no other node to lose")
    return warnings


# -- store.toml -----------------------------------------------------------------------------------------------------


def _render(config: StoreConfig) -> bytes:
    lines = [
        f"format_version = {FORMAT_VERSION}",
        f'cluster_id = "{config.cluster_id}"',
        f"capacity_bytes = {config.capacity_bytes}",
        f'durability = "{config.durability}"',
        f"extent_bytes = {config.extent_bytes}",
    ]
    if config.group:
        lines.append(f"group = {config.group}")
    for path, node_id in zip(config.node_paths, config.node_ids, strict=True):
        lines += ["", "[[node]]", f"path = {json.dumps(path, ensure_ascii=False)}", f'id = "{node_id}"']
    return ("\n".join(lines) + "\n").encode()


def write_store_config(io: Io, root: str, config: StoreConfig) -> None:
    """Replace store.toml. Paths below the root are written relative to it. OpenFailed names the file."""
    inside = root.rstrip(os.sep) + os.sep
    paths = tuple(path.removeprefix(inside) for path in config.node_paths)
    try:
        replace_file(io, root, STORE_FILE, _render(replace(config, node_paths=paths)))
    except OSError as error:
        raise OpenFailed(os.path.join(root, STORE_FILE), error) from error


def read_store_config(io: Io, root: str) -> StoreConfig:
    """The settings of a store, its node paths joined to the root. StoreNotFound when there is none; OpenFailed,
    FormatUnsupported or CorruptRecord, naming the file, when it cannot be used."""
    file = os.path.join(root, STORE_FILE)
    try:
        data = read_file(io, file, MOST_FILE_BYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        why = "no store.toml in it" if os.path.isdir(root) else "there is no such directory"
        raise StoreNotFound(root, why) from error
    except OSError as error:
        raise OpenFailed(file, error) from error
    values = parse_toml(file, data)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatUnsupported(file, version, FORMAT_VERSION)
    return _parse(file, root, values)


def _parse(file: str, root: str, values: dict[str, object]) -> StoreConfig:
    def field(table: dict[str, object], name: str, kind: type) -> object:
        value = table.get(name)
        if type(value) is not kind:
            raise CorruptRecord(f"{file}: {name} is {value!r}")
        return value

    listed = field(values, "node", list)
    assert isinstance(listed, list)
    if len(listed) != STRIPE_SHARDS or not all(isinstance(table, dict) for table in listed):
        raise CorruptRecord(f"{file}: {len(listed)} nodes, expected {STRIPE_SHARDS}")
    durability = next((known for known in DURABILITIES if known == values.get("durability")), None)
    if durability is None:
        raise CorruptRecord(f"{file}: durability is {values.get('durability')!r}")
    capacity, extent = field(values, "capacity_bytes", int), field(values, "extent_bytes", int)
    assert isinstance(capacity, int)
    assert isinstance(extent, int)
    group = field(values, "group", int) if "group" in values else 0
    assert isinstance(group, int)
    return StoreConfig(
        str(field(values, "cluster_id", str)), capacity, durability, extent,
        tuple(os.path.join(root, str(field(table, "path", str))) for table in listed),
        tuple(str(field(table, "id", str)) for table in listed),
        group,
    )


# -- Opening nodes --------------------------------------------------------------------------------------------------


def absent_because(path: str) -> str | None:
    """Why there is no node at a path, None when there is one."""
    if not os.path.isdir(path):
        return f"{path} is not there"
    if not os.path.lexists(os.path.join(path, NODE_FILE)):
        return f"{path} holds no {NODE_FILE}"
    return None


def check_node_id(io: Io, path: str, expected: str) -> None:
    """IdentityMismatch when a node directory in the right place is not the one that the store was made with."""
    found = read_config(io, path).node_id
    if found != expected:
        raise IdentityMismatch(path, "node id", found, expected)


def tolerable(error: EfsError) -> bool:
    """Whether a store may be opened without the node that failed like this."""
    if isinstance(error, Locked | IdentityMismatch | FormatUnsupported | InvalidArgument):
        return False
    cause = error.__cause__
    return not (isinstance(cause, OSError) and cause.errno in OWN_FAULTS)
