"""Making a store, reading its settings, and which nodes it can do without."""

from __future__ import annotations

import errno
import os
import random
import stat
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from efs.cluster import (
    absent_because,
    check_node_id,
    device_warnings,
    init_store,
    read_store_config,
    tolerable,
)
from efs.clusterfile import read_cluster
from efs.errors import (
    CorruptRecord,
    FormatUnsupported,
    IdentityMismatch,
    InvalidArgument,
    Locked,
    OpenFailed,
    StoreExists,
    StoreNotFound,
)
from efs.limits import MIB
from efs.nodedir import parse_toml, read_config
from efs.osio import SystemIo
from tests.support.faultio import FaultIo

CAPACITY = 12 * 8 * MIB
EXTENT = MIB


def make(root: Path, node_paths: Sequence[str] | None = None, *, capacity: int = CAPACITY,
         durability: str = "process", io: FaultIo | None = None) -> list[str]:
    return init_store(io or SystemIo(), str(root), capacity, node_paths=node_paths, durability=durability,
                      extent_bytes=EXTENT, source=random.Random(5))


def tree(path: Path) -> list[str]:
    return sorted(str(found.relative_to(path)) for found in path.rglob("*"))


def test_a_store_is_made_with_twelve_nodes_that_know_their_place(tmp_path: Path) -> None:
    root = tmp_path / "store"
    assert make(root) == ["all nodes share one device: the store does not survive its loss"]
    config = read_store_config(SystemIo(), str(root))
    assert (config.capacity_bytes, config.durability, config.extent_bytes) == (CAPACITY, "process", EXTENT)
    assert config.node_paths == tuple(str(root / "nodes" / f"{index:02d}") for index in range(12))
    assert len({config.cluster_id, *config.node_ids}) == 13
    for index, (path, node_id) in enumerate(zip(config.node_paths, config.node_ids, strict=True)):
        node = read_config(SystemIo(), path)
        assert (node.place.cluster_id, node.place.node_index, node.node_id) == (config.cluster_id, index, node_id)
        assert node.plan.capacity_bytes == CAPACITY // 12


def test_only_the_owner_may_look(tmp_path: Path) -> None:
    make(tmp_path / "store")
    found = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
    assert len(found) > 50
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path


def test_missing_directories_above_the_root_are_made(tmp_path: Path) -> None:
    make(tmp_path / "a" / "b" / "store")
    assert read_store_config(SystemIo(), str(tmp_path / "a" / "b" / "store")).node_paths


def test_twelve_paths_are_used_in_their_order(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"disk{index}") for index in range(12)]
    make(tmp_path / "store", paths[::-1])
    config = read_store_config(SystemIo(), str(tmp_path / "store"))
    assert list(config.node_paths) == paths[::-1]
    assert read_config(SystemIo(), paths[11]).place.node_index == 0
    assert not (tmp_path / "store" / "nodes").exists()


def test_a_relative_root_is_found_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make(Path("store"))
    os.rename(tmp_path / "store", tmp_path / "moved")
    assert os.path.isdir(read_store_config(SystemIo(), str(tmp_path / "moved")).node_paths[0])


@pytest.mark.parametrize("place", ["store", "disk3"])
def test_a_place_that_is_not_empty_is_refused_and_nothing_is_changed(tmp_path: Path, place: str) -> None:
    paths = [str(tmp_path / f"disk{index}") for index in range(12)]
    (tmp_path / place).mkdir()
    (tmp_path / place / "precious").write_text("x")
    before = tree(tmp_path)
    with pytest.raises(StoreExists, match=place):
        make(tmp_path / "store", paths)
    assert tree(tmp_path) == before


def test_a_file_or_a_link_in_the_place_of_the_root_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    for name in ("file", "link"):
        with pytest.raises(StoreExists, match=name):
            make(tmp_path / name)


def test_wrong_settings_are_refused_and_nothing_is_changed(tmp_path: Path) -> None:
    root = tmp_path / "store"
    with pytest.raises(InvalidArgument, match="smallest capacity"):
        make(root, capacity=12 * MIB)
    with pytest.raises(InvalidArgument, match="'never'"):
        make(root, durability="never")
    with pytest.raises(InvalidArgument, match="11 node directories"):
        make(root, [str(tmp_path / f"disk{index}") for index in range(11)])
    assert not tree(tmp_path)


@pytest.mark.parametrize("clash", ["{0}/disk3", "{0}/disk3/inner", "{0}/x/../disk3", "{0}/store"])
def test_directories_that_are_or_hold_one_another_are_refused(tmp_path: Path, clash: str) -> None:
    paths = [str(tmp_path / f"disk{index}") for index in range(11)] + [clash.format(tmp_path)]
    with pytest.raises(InvalidArgument, match="cannot both be"):
        make(tmp_path / "store", paths)
    assert not tree(tmp_path)


def test_a_path_that_the_file_cannot_hold_is_refused(tmp_path: Path) -> None:
    paths = [str(tmp_path / f"disk{index}") for index in range(11)] + [str(tmp_path / "disk\n12")]
    with pytest.raises(InvalidArgument, match="characters"):
        make(tmp_path / "store", paths)


def test_an_unusual_path_is_kept(tmp_path: Path) -> None:
    paths = [str(tmp_path / f'dïsk "{index}" \\ #') for index in range(12)]
    make(tmp_path / "store", paths)
    assert list(read_store_config(SystemIo(), str(tmp_path / "store")).node_paths) == paths


def test_warnings_say_what_a_shared_device_costs() -> None:
    assert device_warnings(range(12)) == []
    assert device_warnings([7] * 12) == ["all nodes share one device: the store does not survive its loss"]
    assert device_warnings([1, 1, 2, 2, 2, *range(3, 10)]) == [
        "nodes 0 and 1 share one device: its loss leaves no other node to lose",
        "nodes 2, 3, 4 share one device: the store does not survive its loss",
    ]


def test_an_init_that_fails_anywhere_names_the_path_and_leaves_no_store(tmp_path: Path) -> None:
    counting = FaultIo()
    make(tmp_path / "whole", io=counting)
    names = sorted({operation.name for operation in counting.log} - {"close", "size", "listdir"})
    assert {"open", "mkdir", "truncate", "rename", "fsync"} <= set(names)
    unmade = 0
    for at, name in enumerate(names):
        total = counting.names().count(name)
        for skip in {0, total // 2, total - 1}:
            root = tmp_path / f"{at}-{skip}"
            io = FaultIo()
            io.fail(name, errno.ENOSPC, skip=skip)
            with pytest.raises(OpenFailed, match=os.strerror(errno.ENOSPC)):
                make(root, io=io)
            io.verify()
            unmade += 1
            assert not root.exists()
            make(root)
    assert unmade > len(names)


def test_an_init_that_fails_leaves_directories_that_were_there_and_what_is_not_its_own(tmp_path: Path) -> None:
    there = [tmp_path / "store", *(tmp_path / f"disk{index}" for index in range(6))]
    for path in there:
        path.mkdir()
    nodes = [str(tmp_path / f"disk{index}") for index in range(11)] + [str(tmp_path / "none" / "disk11")]
    with pytest.raises(OpenFailed, match="disk11"):
        make(tmp_path / "store", nodes)
    assert tree(tmp_path) == sorted(path.name for path in there)


def test_there_is_no_store_where_none_was_made(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match=r"no store\.toml"):
        read_store_config(SystemIo(), str(tmp_path))
    with pytest.raises(StoreNotFound, match="no such directory"):
        read_store_config(SystemIo(), str(tmp_path / "nowhere"))


@pytest.mark.parametrize(("old", "new", "error", "named"), [
    ("format_version = 1", "format_version = 2", FormatUnsupported, "2"),
    ("format_version = 1", "", FormatUnsupported, "None"),
    ("capacity_bytes = ", "capacity_bytes = -x", CorruptRecord, r"store\.toml"),
    ('durability = "process"', 'durability = "maybe"', CorruptRecord, "maybe"),
    ("[[node]]", "[[knot]]", CorruptRecord, "node is None"),
    ('path = "nodes/07"', "path = 7", CorruptRecord, "path is 7"),
])
def test_a_damaged_store_file_is_refused_by_name(tmp_path: Path, old: str, new: str, error: type[Exception],
                                                 named: str) -> None:
    root = tmp_path / "store"
    make(root)
    file = root / "store.toml"
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(error, match=named):
        read_store_config(SystemIo(), str(root))


def test_a_store_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    make(tmp_path / "store")
    io = FaultIo()
    io.fail("preadv", errno.EIO, path="store.toml")
    with pytest.raises(OpenFailed, match=r"store\.toml"):
        read_store_config(io, str(tmp_path / "store"))
    io.verify()


def test_an_absent_or_empty_directory_is_no_node(tmp_path: Path) -> None:
    make(tmp_path / "store")
    path = tmp_path / "store" / "nodes" / "03"
    assert absent_because(str(path)) is None
    os.rename(path, tmp_path / "elsewhere")
    assert "is not there" in (absent_because(str(path)) or "")
    path.mkdir()
    assert "holds no node.toml" in (absent_because(str(path)) or "")


def test_another_node_in_the_right_place_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "store")
    config = read_store_config(SystemIo(), str(tmp_path / "store"))
    check_node_id(SystemIo(), config.node_paths[3], config.node_ids[3])
    with pytest.raises(IdentityMismatch, match=f"node id is {config.node_ids[3]}, expected {config.node_ids[4]}"):
        check_node_id(SystemIo(), config.node_paths[3], config.node_ids[4])


def caused(code: int) -> OpenFailed:
    cause = OSError(code, os.strerror(code))
    error = OpenFailed("/disk/3", cause)
    error.__cause__ = cause
    return error


def test_a_store_opens_without_a_damaged_node_but_not_over_its_own_faults() -> None:
    assert all(tolerable(caused(code)) for code in (errno.EIO, errno.ENOENT, errno.ENXIO, errno.ESTALE))
    assert tolerable(CorruptRecord("/disk/3/node.toml: broken"))
    assert not any(tolerable(caused(code)) for code in (errno.EACCES, errno.EMFILE, errno.ENOMEM, errno.EROFS))
    assert not tolerable(Locked("/disk/3", 17))
    assert not tolerable(IdentityMismatch("/disk/3", "node index", 4, 3))
    assert not tolerable(FormatUnsupported("/disk/3", 2, 1))


@pytest.mark.parametrize("read", [read_store_config, read_config,
                                  lambda io, root: read_cluster(io, f"{root}/cluster.toml")])
def test_a_description_that_is_no_text_is_named(tmp_path: Path, read: Callable[[SystemIo, str], object]) -> None:
    for name in ("store.toml", "node.toml", "cluster.toml"):
        (tmp_path / name).write_bytes(b"\xc2\x00")
    with pytest.raises(CorruptRecord, match=r"\.toml: is no text$"):
        read(SystemIo(), str(tmp_path))


@pytest.mark.parametrize("value", ["[" * 5000 + "]" * 5000, "9" * 5000], ids=["nesting", "number"])
def test_a_description_with_values_without_bounds_is_refused(value: str) -> None:
    with pytest.raises(CorruptRecord, match=r"^store\.toml: has a number or a nesting out of all bounds$"):
        parse_toml("store.toml", f"a = {value}".encode())
