"""A local set of servers: made once, started by whoever comes, left to others, ended cleanly."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from efs.errors import InvalidArgument, StoreNotFound
from efs.limits import MIB, STRIPE_SHARDS
from efs.nodedir import OwnerLock, written_pid
from efs.osio import SystemIo
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from kvstore.localset import PROCESSES, ServersNotStarted, start, stop
from kvstore.store import KVStore
from tests.support.servers import short_directory
from tests.support.waiting import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CAPACITY = 12 * 8 * MIB
LAYOUT = BlockLayout.opaque(4096, 16)


@pytest.fixture
def root() -> Iterator[str]:
    with short_directory() as base:
        root = str(base / "kv")
        yield root
        if os.path.exists(f"{root}/store.toml"):
            stop(root)


def pids(root: str) -> list[int | None]:
    return [written_pid(SystemIo(), str(node)) for node in sorted((Path(root) / "nodes").iterdir())]


def test_whoever_comes_first_starts_the_servers_and_all_others_use_them(root: str) -> None:
    with ThreadPoolExecutor(3) as pool:
        files = set(pool.map(lambda _: start(root, CAPACITY), range(3)))
    assert files == {f"{root}/cluster.toml"}
    served_by = pids(root)
    assert len(served_by) == STRIPE_SHARDS
    assert len(set(served_by)) == PROCESSES

    chain = Namespace("m", "w", LAYOUT).chain(range(160))
    with KVStore.blocking(files.pop()) as store:
        assert store.put(chain, bytes(len(chain) * LAYOUT.block_bytes)).acked == 10
    lost = served_by[0]
    assert lost is not None
    os.kill(lost, signal.SIGKILL)
    assert eventually(lambda: not os.path.exists(f"/proc/{lost}/exe"))
    with KVStore.blocking(f"{root}/cluster.toml") as store:
        assert store.match(chain, strict=True, deadline_ms=30_000) == 10

    start(root, None)
    again = pids(root)
    assert [new == old for new, old in zip(again, served_by, strict=True)] == [False] * 2 + [True] * 10

    assert stop(root) == PROCESSES
    assert stop(root) == 0
    assert start(root, None) == f"{root}/cluster.toml"
    with KVStore.blocking(f"{root}/cluster.toml") as store:
        out = bytearray(len(chain) * LAYOUT.block_bytes)
        assert store.get_into(chain, out, deadline_ms=30_000).blocks == 10


def test_a_store_is_not_made_without_a_capacity(root: str) -> None:
    with pytest.raises(InvalidArgument, match="no capacity is given"):
        start(root, None)


def test_stopping_what_is_not_there_makes_nothing(root: str) -> None:
    with pytest.raises(StoreNotFound):
        stop(f"{root}/absent")
    assert not os.path.exists(root)


def test_servers_are_nobodys_children_so_that_killing_an_engine_with_its_children_leaves_them(root: str) -> None:
    start(root, CAPACITY)
    started = set(pids(root))
    assert len(started) == PROCESSES
    for pid in started:
        parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        assert parent != os.getpid()
        assert os.getsid(pid or 0) != os.getsid(0)


def test_a_server_that_cannot_start_is_told_at_once(root: str) -> None:
    start(root, CAPACITY)
    stop(root)
    for node in (Path(root) / "nodes").iterdir():
        (node / "node.toml").write_text("nonsense")
    with pytest.raises(ServersNotStarted, match=r"servers\.log"):
        start(root, None)


def test_who_is_at_work_on_a_directory_and_serves_nothing_is_left_alone(root: str) -> None:
    start(root, CAPACITY)
    assert stop(root) == PROCESSES
    told: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: told.append(number))
    lock = OwnerLock.take(SystemIo(), f"{root}/nodes/03")
    try:
        assert stop(root) == 0
        assert told == []
    finally:
        lock.release()
        signal.signal(signal.SIGTERM, before)
