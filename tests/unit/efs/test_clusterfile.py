"""cluster.toml: what is written is read again, files of before there were spares too; of two changes at once one is
refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from efs.clusterfile import (
    ClusterConfig,
    Spare,
    add_group,
    add_spare,
    place_spare,
    read_cluster,
    remove_spare,
    set_drain,
    write_cluster,
)
from efs.endpoint import parse_endpoint
from efs.errors import CorruptRecord, InvalidArgument
from efs.limits import MAX_CLUSTER_SPARES
from efs.osio import SystemIo
from tests.support.faultio import FaultIo

IO = SystemIo()
IDS = tuple(f"{index:032x}" for index in range(12))
SPARES = ("a" * 32, "b" * 32)
ADDRESS = "tcp:10.0.0.9:7400"


@pytest.fixture
def file(tmp_path: Path) -> str:
    return write_cluster(IO, str(tmp_path), "c" * 32, "process", IDS, [f"unix:s{index}" for index in range(12)],
                         upkeep_host=None, token_file=None)


@pytest.fixture
def held(file: str) -> ClusterConfig:
    """With two spares."""
    for spare in SPARES:
        add_spare(IO, file, read_cluster(IO, file), spare, ADDRESS)
    return read_cluster(IO, file)


def test_a_file_without_spares_is_as_it_was_before_there_were_any(file: str) -> None:
    text = Path(file).read_text()
    assert "spare" not in text
    assert "incarnation" not in text
    found = read_cluster(IO, file)
    assert (found.spares, found.incarnations) == ((), (1,) * 12)


def test_spares_are_read_as_they_were_written_and_are_nothing_to_clients(file: str, held: ClusterConfig) -> None:
    assert held.spares == tuple(Spare(spare, parse_endpoint(ADDRESS)) for spare in SPARES)
    assert (held.version, held.node_ids) == (1, IDS)
    left = remove_spare(IO, file, held, SPARES[0])
    assert left == read_cluster(IO, file)
    assert ([spare.node_id for spare in left.spares], left.version) == ([SPARES[1]], 1)


def test_a_spare_that_gets_a_place_leaves_the_list_in_the_same_write(file: str, held: ClusterConfig) -> None:
    drained = set_drain(IO, file, held, 7, True)
    changed = place_spare(IO, file, drained, 7, SPARES[0])
    assert changed == read_cluster(IO, file)
    assert (changed.node_ids[7], str(changed.endpoints[7]), changed.incarnations[7]) == (SPARES[0], ADDRESS, 2)
    assert ([spare.node_id for spare in changed.spares], changed.version) == ([SPARES[1]], 3)
    assert changed.draining == frozenset()
    again = place_spare(IO, file, changed, 7, SPARES[1])
    assert (again.node_ids[7], again.incarnations[7], again.spares, again.version) == (SPARES[1], 3, (), 4)


CHANGES: dict[str, Callable[[str, ClusterConfig], object]] = {
    "another place": lambda file, held: place_spare(IO, file, held, 3, SPARES[0]),
    "the same place": lambda file, held: place_spare(IO, file, held, 7, SPARES[0]),
    "another spare": lambda file, held: place_spare(IO, file, held, 3, SPARES[1]),
    "removal": lambda file, held: remove_spare(IO, file, held, SPARES[0]),
    "addition": lambda file, held: add_spare(IO, file, held, "d" * 32, ADDRESS),
    "drain": lambda file, held: set_drain(IO, file, held, 3, True),
    "group": lambda file, held: add_group(IO, file, held, [f"{index:032x}" for index in range(20, 32)],
                                          [ADDRESS] * 12, 5.0),
}


@pytest.mark.parametrize("second", CHANGES)
def test_of_two_changes_thought_out_at_once_one_is_refused(file: str, held: ClusterConfig, second: str) -> None:
    first = place_spare(IO, file, held, 7, SPARES[0])
    with pytest.raises(InvalidArgument, match="somebody else has changed it just now; nothing was written"):
        CHANGES[second](file, held)
    assert read_cluster(IO, file) == first


def test_a_file_that_is_being_changed_is_left_alone(file: str, held: ClusterConfig) -> None:
    """The other command comes between the reading and the writing of the first."""
    refused: list[str] = []

    class Meanwhile(FaultIo):
        def rename(self, old: str, new: str) -> None:
            with pytest.raises(InvalidArgument, match="somebody else is changing it just now") as caught:
                place_spare(IO, file, held, 3, SPARES[0])
            refused.append(str(caught.value))
            super().rename(old, new)

    first = place_spare(Meanwhile(), file, held, 7, SPARES[0])
    assert len(refused) == 1
    assert read_cluster(IO, file) == first
    assert place_spare(IO, file, first, 3, SPARES[1]).spares == ()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda file, held: place_spare(IO, file, held, 12, SPARES[0]), "no node has index 12"),
        (lambda file, held: place_spare(IO, file, held, -1, SPARES[0]), "no node has index -1"),
        (lambda file, held: place_spare(IO, file, held, 7, "d" * 32), f"no spare {'d' * 32}"),
        (lambda file, held: remove_spare(IO, file, held, IDS[3]), f"no spare {IDS[3]}"),
        (lambda file, held: add_spare(IO, file, held, IDS[3], ADDRESS), "named twice, or is a node too"),
        (lambda file, held: add_spare(IO, file, held, SPARES[0], ADDRESS), "named twice"),
        (lambda file, held: add_spare(IO, file, held, "A" * 32, ADDRESS), "hex digits"),
        (lambda file, held: add_spare(IO, file, held, "d" * 32, "http:x"), "must be unix:PATH"),
    ],
)
def test_a_change_that_cannot_be_is_refused_and_nothing_is_written(
    file: str, held: ClusterConfig, change: Callable[[str, ClusterConfig], object], why: str
) -> None:
    before = Path(file).read_bytes()
    with pytest.raises(InvalidArgument, match=why):
        change(file, held)
    assert Path(file).read_bytes() == before


def test_there_are_only_so_many_spares(file: str) -> None:
    for number in range(MAX_CLUSTER_SPARES):
        add_spare(IO, file, read_cluster(IO, file), f"{100 + number:032x}", ADDRESS)
    with pytest.raises(InvalidArgument, match=f"at most {MAX_CLUSTER_SPARES}"):
        add_spare(IO, file, read_cluster(IO, file), "d" * 32, ADDRESS)


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        (SPARES[1], IDS[3], "named twice, or is a node too"),
        (SPARES[1], SPARES[0], "named twice"),
        (SPARES[1], "short", "hex digits"),
        (ADDRESS, "ftp:x", "must be unix:PATH"),
        ("[[spare]]", "[[sparr]]", "sparr"),
        ('id = "' + SPARES[1] + '"', "", "id"),
        ('id = "' + SPARES[1] + '"', 'id = "' + SPARES[1] + '"\ndrain = true', "drain"),
        ('id = "' + IDS[3] + '"', 'id = "' + IDS[3] + '"\nincarnation = 0', "an incarnation is 0"),
    ],
)
def test_a_file_whose_spares_cannot_be_is_refused_in_one_line(file: str, held: ClusterConfig, old: str, new: str,
                                                              why: str) -> None:
    assert held.spares
    text = Path(file).read_text()
    assert old in text
    Path(file).write_text(text.replace(old, new, 1))
    with pytest.raises(CorruptRecord, match=why) as caught:
        read_cluster(IO, file)
    assert str(caught.value).startswith(file)
    assert "\n" not in str(caught.value)
