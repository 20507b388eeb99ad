"""One cluster of real server processes on TCP for all tests of a module that ask for it; each test finds it whole."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Iterator

import pytest

from efs.clusterfs import open_cluster
from efs.groups import GroupedFileSystem
from tests.support.servers import ServedCluster, served_cluster
from tests.support.waiting import came_true

GROUPS = [range(9), [9], [10], [11]]
"""Nodes 9, 10 and 11 have processes of their own, which tests stop and kill."""


@pytest.fixture(scope="module")
def shared_cluster() -> Iterator[ServedCluster]:
    with served_cluster(GROUPS, tcp=True) as cluster:
        yield cluster


@pytest.fixture
def cluster(shared_cluster: ServedCluster) -> Iterator[ServedCluster]:
    shared_cluster.write_file()
    for process in shared_cluster.processes:
        if not process.running:
            process.start()
    yield shared_cluster
    for process in shared_cluster.processes:
        if process.running:
            process.signal(signal.SIGCONT)


@pytest.fixture
async def filesystem(cluster: ServedCluster) -> AsyncIterator[GroupedFileSystem]:
    opened = await open_cluster(cluster.file)
    assert await came_true(lambda: len(opened.groups[0].health.readable()) == 12)
    yield opened
    await opened.close()
