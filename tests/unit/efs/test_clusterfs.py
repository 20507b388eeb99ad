"""A client of a cluster, without its servers: what it makes, and what it leaves where that fails."""

from __future__ import annotations

import asyncio
import socket
from pathlib import Path

import pytest

from efs.clock import SystemClock
from efs.clusterfile import ClusterConfig
from efs.clusterfs import _Client
from efs.endpoint import parse_endpoint
from efs.errors import OpenFailed
from efs.osio import SystemIo
from efs.ownership import Ownership
from efs.progress import PROGRESS_FILE


def config_of(groups: int, root: Path) -> ClusterConfig:
    """Nobody listens at any of its addresses."""
    numbers = range(12 * groups)
    return ClusterConfig("c" * 32, "process", tuple(f"{number:032x}" for number in numbers),
                         tuple(parse_endpoint(f"unix:{root}/n{number}") for number in numbers),
                         upkeep_host=socket.gethostname(), version=groups,
                         ownership=Ownership(tuple(range(groups))))


@pytest.mark.parametrize("opening", [False, True])
async def test_of_several_groups_of_which_one_cannot_be_opened_nothing_is_left(tmp_path: Path, opening: bool) -> None:
    before = asyncio.all_tasks()
    first, third = config_of(1, tmp_path), config_of(3, tmp_path)
    reading = third if opening else first

    async def read() -> ClusterConfig:
        return reading

    async def opened() -> _Client:
        return await _Client.open(read, str(tmp_path), 0, SystemIo(), SystemClock(), "background", False, False)

    # Where the progress of group 2 is noted stands something else.
    other = tmp_path / "group-02" / PROGRESS_FILE
    other.mkdir(parents=True)
    if opening:
        with pytest.raises(OpenFailed, match=PROGRESS_FILE):
            await opened()
        assert asyncio.all_tasks() == before
        other.rmdir()
        client = await opened()
    else:
        client = await opened()
        running, nodes = asyncio.all_tasks(), client._quotas._nodes
        for _ in range(2):
            with pytest.raises(OpenFailed, match=PROGRESS_FILE):
                await client.follow(third)
            assert asyncio.all_tasks() == running
            assert (client._quotas._nodes, len(client.filesystem.groups)) == (nodes, 1)
        other.rmdir()
        await client.follow(third)
    assert (len(client.filesystem.groups), len(client._quotas._nodes)) == (3, 36)
    assert {task.get_name() for task in asyncio.all_tasks()} >= {"mend", "sweep", "move"}
    await client.filesystem.close()
    assert asyncio.all_tasks() == before
