"""Damage to node directories from outside the process that owns them: bytes that rot, directories that go and come."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Final

from efs.cluster import read_store_config
from efs.index import IndexEntry
from efs.limits import STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, NodePlace, slab_path
from efs.nodeview import NodeView
from efs.osio import SystemIo
from tools.chaosrig.model import HOT_CHAINS, LAYOUT, Universe

ROTTEN_HOT: Final = 4
ROTTEN_OTHERS: Final = 6
FLIP: Final = 0x5A


def node_path(root: str, node: int) -> str:
    """Where a node belongs."""
    return os.path.join(root, "nodes", f"{node:02d}")


def rot(root: str, node: int, universe: Universe, choice: float, *, payload: bool) -> int:
    """Flip a byte of some records of a node, in the payload or in the table entry, of hot blocks and of others. Returns
    how many bytes were flipped."""
    config = read_store_config(SystemIo(), root)
    view = NodeView.open(SystemIo(), node_path(root, node), NodePlace(config.cluster_id, 0, node))
    try:
        hot = [key for number in range(HOT_CHAINS) for key in universe.chain(number).keys]
        entries = _some(view.versions(hot), ROTTEN_HOT, choice) + _some(view.page(None, 1024), ROTTEN_OTHERS, choice)
        locations = sorted({entry.location for entry in entries})
        return sum(_flip(view, location, choice, payload) for location in locations)
    finally:
        view.close()


def _some(entries: list[IndexEntry], count: int, choice: float) -> list[IndexEntry]:
    """Some of them, evenly spread."""
    if not entries:
        return []
    start, step = int(choice * len(entries)), max(1, len(entries) // count)
    return [entries[(start + at * step) % len(entries)] for at in range(min(count, len(entries)))]


def _flip(view: NodeView, location: int, choice: float, payload: bool) -> bool:
    """False when the slot is no slot any more."""
    geometry = view.geometry(location >> 20)
    if geometry is None:
        return False
    if payload:
        position, size = geometry.slot_position(location), LAYOUT.shape.shard_bytes
    else:
        position, size = geometry.entry_position(location), geometry.slot_class.entry_bytes
    position += int(choice * size)
    fd = os.open(slab_path(view.path), os.O_RDWR | os.O_CLOEXEC)
    try:
        os.pwrite(fd, bytes([os.pread(fd, 1, position)[0] ^ FLIP]), position)
    finally:
        os.close(fd)
    return True


def swap(root: str, one: int, other: int) -> None:
    """Exchange two node directories; done twice they are back."""
    aside = os.path.join(root, "nodes", "aside")
    os.rename(node_path(root, one), aside)
    os.rename(node_path(root, other), node_path(root, one))
    os.rename(aside, node_path(root, other))


def counters(root: str) -> Mapping[str, Mapping[str, int]]:
    """The counters of the store and of each node that is there, by directory."""
    found: dict[str, Mapping[str, int]] = {}
    for directory in (root, *(node_path(root, node) for node in range(STRIPE_SHARDS))):
        path = os.path.join(directory, COUNTERS_FILE)
        if os.path.exists(path):
            file = CounterFile.open(path, writable=False)
            found[directory] = file.snapshot()
            file.close()
    return found


def raised(before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """By how much each counter grew, over all directories that were there before and after."""
    grown: dict[str, int] = {}
    for directory, names in after.items():
        for name, value in names.items():
            grown[name] = grown.get(name, 0) + max(0, value - before.get(directory, {}).get(name, 0))
    return {name: value for name, value in grown.items() if value}
