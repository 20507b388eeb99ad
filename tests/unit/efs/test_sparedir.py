"""The directory of a spare: no node to anybody before it has a place, and the node of that place from then on."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from efs.clock import SystemClock
from efs.cluster import absent_because
from efs.dirlock import locked_directory
from efs.errors import CorruptRecord, FormatUnsupported, InvalidArgument, OpenFailed, StoreExists
from efs.limits import MIB
from efs.node import DirectoryNode
from efs.nodedir import NODE_FILE, NodeConfig, NodePlace, create_directory, plan_node, read_config
from efs.osio import Io, SystemIo
from efs.sparedir import SPARE_FILE, SpareConfig, create_spare, is_spare, read_spare, settle
from tests.support.faultio import FaultIo

IO = SystemIo()
PLAN = plan_node(8 * MIB, 1 * MIB)
PLACE = NodePlace("c" * 32, 1, 7)
SPARE = SpareConfig("c" * 32, "d" * 32, PLAN)


@pytest.fixture
def path(tmp_path: Path) -> str:
    made = str(tmp_path / "spare")
    assert create_spare(IO, made, "c" * 32, "d" * 32, PLAN, "boot-1") == SPARE
    return made


def names(path: str) -> set[str]:
    return set(os.listdir(path))


def test_a_spare_is_all_of_a_node_but_its_place(path: str, tmp_path: Path) -> None:
    assert read_spare(IO, path) == SPARE
    assert is_spare(path)
    assert "holds no node.toml" in str(absent_because(path))
    with pytest.raises(OpenFailed, match=NODE_FILE):
        read_config(IO, path)
    create_directory(IO, str(tmp_path / "node"), PLACE, "d" * 32, PLAN, "boot-1")
    assert names(path) ^ names(str(tmp_path / "node")) == {SPARE_FILE, NODE_FILE}
    assert not is_spare(str(tmp_path / "node"))
    assert os.stat(os.path.join(path, SPARE_FILE)).st_mode & 0o777 == 0o600


async def test_it_is_the_node_of_its_place_from_then_on(path: str, tmp_path: Path) -> None:
    for _ in range(2):  # The second time changes nothing.
        settle(IO, path, SPARE, PLACE)
        assert read_config(IO, path) == NodeConfig(PLACE, "d" * 32, PLAN)
        assert not is_spare(path)
        assert SPARE_FILE not in names(path)
    node = await DirectoryNode.open(path, PLACE, IO, SystemClock())
    await node.close()
    with pytest.raises(OpenFailed, match=SPARE_FILE):
        read_spare(IO, path)


@pytest.mark.parametrize("fault", ["pwrite", "fsync", "rename", "unlink"])
def test_a_failure_on_the_way_leaves_a_spare_or_the_node_and_the_next_try_goes_on(path: str, fault: str) -> None:
    io = FaultIo()
    io.fail(fault, errno.ENOSPC, path=SPARE_FILE if fault == "unlink" else NODE_FILE)
    with pytest.raises(OpenFailed, match="spare"):
        settle(io, path, SPARE, PLACE)
    io.verify()
    if fault == "unlink":
        assert {NODE_FILE, SPARE_FILE} <= names(path)
        assert not is_spare(path)
        assert read_config(IO, path).place == PLACE
    else:
        assert is_spare(path)
        assert read_spare(IO, path) == SPARE
    settle(io, path, SPARE, PLACE)
    assert read_config(IO, path).place == PLACE
    assert SPARE_FILE not in names(path)


async def test_a_directory_that_was_a_node_before_is_no_spare(path: str) -> None:
    kept = Path(path, SPARE_FILE).read_bytes()
    settle(IO, path, SPARE, PLACE)
    node = await DirectoryNode.open(path, PLACE, IO, SystemClock())
    await node.close()
    Path(path, SPARE_FILE).write_bytes(kept)
    os.unlink(os.path.join(path, NODE_FILE))
    assert is_spare(path)
    with pytest.raises(InvalidArgument, match="was in use as a node and can be no spare"):
        read_spare(IO, path)


def test_a_place_that_is_not_empty_is_refused(path: str) -> None:
    before = names(path)
    with pytest.raises(StoreExists):
        create_spare(IO, path, "c" * 32, "e" * 32, PLAN, "boot-1")
    assert names(path) == before
    assert read_spare(IO, path) == SPARE


def make_node(io: Io, path: str) -> None:
    create_directory(io, path, PLACE, "d" * 32, PLAN, "boot-1")


def make_spare(io: Io, path: str) -> None:
    create_spare(io, path, "c" * 32, "d" * 32, PLAN, "boot-1")


@pytest.mark.parametrize("make", [make_node, make_spare])
def test_a_making_that_was_interrupted_anywhere_goes_on(tmp_path: Path, make: Callable[[Io, str], None]) -> None:
    whole = str(tmp_path / "whole")
    counted = FaultIo()
    make(counted, whole)
    kinds = tuple({operation.name for operation in counted.log} - {"close", "unlock"})
    interrupted = 0
    for at in range(sum(operation.name in kinds for operation in counted.log)):
        path = str(tmp_path / str(at))
        io = FaultIo()
        io.fail(kinds, errno.EIO, skip=at, times=None)
        with pytest.raises(OpenFailed):
            make(io, path)
        if not os.path.isdir(path) or not {NODE_FILE, SPARE_FILE} & names(path):
            interrupted += 1
            make(IO, path)
        assert names(path) == names(whole)
    assert interrupted > 10


@pytest.mark.parametrize("there", [{"stamps", "boot"}, {"node.toml.new", "boot", "lock"}, {"spare.toml.new"},
                                   {"node.toml.new", "notes"}])
def test_what_no_interrupted_making_leaves_is_not_removed(tmp_path: Path, there: set[str]) -> None:
    for name in there:
        (tmp_path / name).write_bytes(b"?")
    with pytest.raises(StoreExists):
        make_node(IO, str(tmp_path))
    assert names(str(tmp_path)) == there


def test_two_do_not_make_a_node_in_one_directory_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "a")
    os.mkdir(path)
    busy = InvalidArgument("busy")
    with (locked_directory(IO, path, lambda error: OpenFailed(path, error), busy),
          pytest.raises(InvalidArgument, match="somebody else is making a node there")):
        make_node(IO, path)
    assert names(path) == set()


@pytest.mark.parametrize(
    ("old", "new", "error", "why"),
    [
        ("format_version = 1", "format_version = 2", FormatUnsupported, "format version 2"),
        ("d" * 32, "D" * 32, CorruptRecord, "node id"),
        ("c" * 32, "short", CorruptRecord, "cluster id"),
        ("extent_bytes = ", "extent_bytes = 1", CorruptRecord, "extent"),
        ("extents = ", "extends = ", CorruptRecord, "extents is None"),
        ("capacity_bytes = ", "capacity_bytes = -", CorruptRecord, "capacity_bytes is -"),
        ("format_version", "format version", CorruptRecord, SPARE_FILE),
    ],
)
def test_a_file_that_says_something_else_is_refused(path: str, old: str, new: str, error: type[Exception],
                                                    why: str) -> None:
    file = Path(path, SPARE_FILE)
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new))
    with pytest.raises(error, match=why) as caught:
        read_spare(IO, path)
    assert str(file) in str(caught.value)
