"""Copies of sparse files, and single bits turned over."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from efs.fs import FileSystem
from kvstore import BlockLayout, KVStore, Namespace
from kvstore.demo.damage import (
    NothingToDamage,
    copy_store,
    disk_bytes,
    flip_byte,
    flip_shard,
    node_path,
    remove_nodes,
    replace_store,
)
from kvstore.demo.steps import flips

pytestmark = pytest.mark.usefixtures("patient")

MIB = 1 << 20


def sparse_file(path: Path, size: int, *written: tuple[int, bytes]) -> None:
    with path.open("wb") as file:
        file.truncate(size)
        for position, data in written:
            file.seek(position)
            file.write(data)


@pytest.mark.parametrize(
    "written",
    [(), ((0, b"head"),), ((5 * MIB, b"x" * 9_000),), ((0, b"a" * MIB), (9 * MIB, os.urandom(MIB)))],
    ids=["only a hole", "data first", "data in the middle", "data at both ends"],
)
def test_a_copy_has_the_same_bytes_and_the_same_holes(tmp_path: Path, written: tuple[tuple[int, bytes], ...]) -> None:
    source = tmp_path / "store"
    (source / "nodes" / "00").mkdir(parents=True)
    sparse_file(source / "nodes" / "00" / "slab", 10 * MIB, *written)
    (source / "store.toml").write_text("x = 1\n")
    (source / "store.toml").chmod(0o600)

    copy_store(source, tmp_path / "copy")

    assert (tmp_path / "copy/nodes/00/slab").read_bytes() == (source / "nodes/00/slab").read_bytes()
    assert (tmp_path / "copy/store.toml").stat().st_mode & 0o777 == 0o600
    assert disk_bytes(tmp_path / "copy") <= disk_bytes(source) + 64 * 1024
    assert disk_bytes(tmp_path / "copy") < 10 * MIB


def test_replacing_brings_back_what_was_removed(tmp_path: Path) -> None:
    root, whole = tmp_path / "store", tmp_path / "whole"
    for node in range(12):
        node_path(root, node).mkdir(parents=True)
        (node_path(root, node) / "slab").write_bytes(bytes([node]))
    copy_store(root, whole)
    remove_nodes(root, (2, 11))
    assert not node_path(root, 2).exists()
    assert node_path(root, 3).exists()
    (root / "new").write_text("later")
    replace_store(root, whole)
    assert (node_path(root, 11) / "slab").read_bytes() == b"\x0b"
    assert not (root / "new").exists()


def test_a_flip_changes_one_bit_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    before = bytes(range(256))
    path.write_bytes(before)
    flip_byte(path, 77)
    after = path.read_bytes()
    assert [position for position in range(256) if before[position] != after[position]] == [77]
    assert (before[77] ^ after[77]).bit_count() == 1


def test_a_flip_behind_the_end_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "slab"
    path.write_bytes(b"abc")
    with pytest.raises(NothingToDamage, match="no byte 3"):
        flip_byte(path, 3)


def test_a_flipped_shard_is_found_corrupt_by_the_next_fetch(tmp_path: Path) -> None:
    root = tmp_path / "store"
    FileSystem.init(str(root), 64 * MIB)
    layout = BlockLayout.per_layer([5_000, 7_000], format="test", dtype="bytes", block_tokens=4)
    chain = Namespace(model="m", weights="w", layout=layout).chain(list(range(20)))
    blocks = os.urandom(len(chain) * layout.block_bytes)
    with KVStore.blocking(str(root)) as store:
        assert store.put(chain, blocks).acked == 5

    for flip in flips(chain.keys):
        flip_shard(root, flip.node, chain[flip.block], flip.shard)

    out = bytearray(len(blocks))
    with KVStore.blocking(str(root)) as store:
        report = store.get_into(chain, out)
    assert (report.blocks, report.corrupt, report.rebuilt) == (5, 2, 2)
    assert layout.from_segments(out).tobytes() == blocks


def test_a_shard_that_is_not_there_cannot_be_damaged(tmp_path: Path) -> None:
    root = tmp_path / "store"
    FileSystem.init(str(root), 64 * MIB)
    layout = BlockLayout.opaque(12_000, 4)
    chain = Namespace(model="m", weights="w", layout=layout).chain(list(range(8)))
    with KVStore.blocking(str(root)) as store:
        store.put(chain[:1], bytes(layout.block_bytes))
    here = flips(chain.keys)[0]
    with pytest.raises(NothingToDamage, match=f"does not hold shard {here.shard + 1}"):
        flip_shard(root, here.node, chain[0], here.shard + 1)
    with pytest.raises(NothingToDamage, match="does not hold shard"):
        flip_shard(root, here.node, chain[1], here.shard)
