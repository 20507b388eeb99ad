"""Breaking a store on purpose: a copy of its whole state, node directories removed, single bytes turned over.

For stores that this demonstration made and that no process has open. Positions of bytes come from the store's own
read-only view of a node, so a flip hits the payload of exactly the shard that was meant, and says so when it cannot.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from efs.errors import EfsError
from efs.extent import extent_of
from efs.storeview import StoreView
from kvstore.demo.sparse import copy_sparse


class NothingToDamage(EfsError):
    """The shard to be damaged is not where it should be."""


def node_path(root: Path, node: int) -> Path:
    return root / "nodes" / f"{node:02d}"


def remove_nodes(root: Path, nodes: tuple[int, ...]) -> None:
    """Delete node directories, as a disk that is gone would."""
    for node in nodes:
        shutil.rmtree(node_path(root, node))


def replace_store(root: Path, whole: Path) -> None:
    """Make the store at `root` equal to the copy at `whole`."""
    if root.exists():
        shutil.rmtree(root)
    copy_store(whole, root)


def copy_store(source: Path, target: Path) -> None:
    """Copy a closed store. Holes of its sparse files stay holes."""
    shutil.copytree(source, target, symlinks=True, copy_function=copy_sparse)


def flip_shard(root: Path, node: int, key: bytes, shard: int) -> None:
    """Turn over one bit in the middle of a shard's payload on disk. NothingToDamage when the node does not hold it."""
    with StoreView.open(str(root)) as store:
        views = [view for view in store.views if view.node_index == node]
        for view in views:
            for held in view.versions([key]):
                entry = view.entry(held.location)
                geometry = view.geometry(extent_of(held.location))
                if entry is not None and geometry is not None and entry.header.shard == shard:
                    middle = geometry.slot_position(held.location) + entry.header.shape.shard_bytes // 2
                    flip_byte(Path(view.slab.path), middle)
                    return
    raise NothingToDamage(f"node {node} of {root} does not hold shard {shard} of {key.hex()}")


def flip_byte(path: Path, position: int) -> None:
    """Turn over one bit of one byte of a file."""
    with path.open("r+b", buffering=0) as file:
        file.seek(position)
        before = file.read(1)
        if len(before) != 1:
            raise NothingToDamage(f"{path} has no byte {position}")
        file.seek(position)
        file.write(bytes([before[0] ^ 0x10]))


def disk_bytes(root: Path) -> int:
    """Bytes that a directory occupies, as du counts them."""
    return sum(path.lstat().st_blocks * 512 for path in (root, *root.rglob("*")))
