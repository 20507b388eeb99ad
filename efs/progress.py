"""How far long work on a store has come, and which nodes are not up to date: the file `upkeep` in the store's root.

JSON, replaced as a whole (`efs.osio.replace_file`), so that it is always one that was written:

    format_version   1
    scrub            {"node": 0–11, "after": hex digits or null}: where the next scrub goes on
    syncing          {"3": hex digits or null, …}: nodes that missed changes, and the key up to which they were synced
    making           {"3": "node id"}: nodes whose directory is being made

The file is a note for the next owner. A node is noted in it before the first change that it misses. One that is lost or
damaged is read as empty, with a warning: a node that missed changes is then counted at once. It still holds no wrong
byte, because a version is named by its digest; it may lack shards, which the next repair finds.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from efs.errors import OpenFailed
from efs.limits import STRIPE_SHARDS
from efs.osio import Io, read_file, replace_file

PROGRESS_FILE: Final = "upkeep"
MOST_FILE_BYTES: Final = 64 * 1024
VERSION: Final = 1

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in the listings of the nodes one after the other: behind `after` on `node`."""

    node: int = 0
    after: bytes | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """See the module docstring. `syncing` and `making` by node index."""

    scrub: Cursor = field(default_factory=Cursor)
    syncing: Mapping[int, bytes | None] = field(default_factory=dict)
    making: Mapping[int, str] = field(default_factory=dict)


def read_progress(io: Io, root: str) -> Progress:
    """What is noted; empty where nothing is. OpenFailed when the file is there and the system does not give it."""
    path = os.path.join(root, PROGRESS_FILE)
    try:
        data = read_file(io, path, MOST_FILE_BYTES)
    except FileNotFoundError:
        return Progress()
    except OSError as error:
        raise OpenFailed(path, error) from error
    try:
        return _parse(json.loads(data))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        _LOG.warning("%s cannot be read and counts as empty: %s", path, error)
        return Progress()


def write_progress(io: Io, root: str, progress: Progress) -> None:
    """Replace what is noted, durably. OpenFailed names the path."""
    values = {
        "format_version": VERSION,
        "scrub": {"node": progress.scrub.node, "after": _hex(progress.scrub.after)},
        "syncing": {str(index): _hex(after) for index, after in sorted(progress.syncing.items())},
        "making": {str(index): node_id for index, node_id in sorted(progress.making.items())},
    }
    try:
        replace_file(io, root, PROGRESS_FILE, json.dumps(values).encode() + b"\n")
    except OSError as error:
        raise OpenFailed(os.path.join(root, PROGRESS_FILE), error) from error


def _parse(values: Any) -> Progress:
    if values["format_version"] != VERSION:
        raise ValueError(f"format version {values['format_version']!r}")
    cursor = Cursor(_node(values["scrub"]["node"]), _bytes(values["scrub"]["after"]))
    syncing = {_node(int(index)): _bytes(after) for index, after in values["syncing"].items()}
    return Progress(cursor, syncing, {_node(int(index)): str(made) for index, made in values["making"].items()})


def _node(index: int) -> int:
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < STRIPE_SHARDS:
        raise ValueError(f"no node has index {index!r}")
    return index


def _hex(value: bytes | None) -> str | None:
    return None if value is None else value.hex()


def _bytes(text: str | None) -> bytes | None:
    return None if text is None else bytes.fromhex(text)
