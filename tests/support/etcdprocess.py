"""A real etcd on loopback in a temporary directory, which a test can stop, kill and start again.

The program is the one on PATH, or the one that `make test` has unpacked; without either, tests of etcd are skipped.
"""

from __future__ import annotations

import asyncio
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from efs.clustermap import ClusterMap, EtcdUrl, MapPlace
from efs.errors import EtcdUnavailable, StoreNotFound
from efs.etcd import EtcdStore
from efs.limits import STRIPE_SHARDS
from tests.support.cli import ROOT
from tests.support.servers import NODE_CAPACITY_BYTES, ServedCluster, short_directory

START_DEADLINE_S = 60.0
UNPACKED = ROOT / ".venv" / "etcd" / "usr" / "bin" / "etcd"
NAME = "c"


def etcd_program() -> str:
    """Where etcd is; skips the test when there is none."""
    pytest.importorskip("aetcd")
    found = shutil.which("etcd") or (str(UNPACKED) if UNPACKED.exists() else None)
    if found is None:
        pytest.skip("there is no etcd: install Debian's etcd-server, or run `make etcd` where apt-get works")
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class EtcdProcess:
    """One etcd member, whose data outlive its process."""

    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self._peer_port = _free_port()
        self.url = EtcdUrl("127.0.0.1", _free_port(), NAME)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        client, peer = f"http://127.0.0.1:{self.url.port}", f"http://127.0.0.1:{self._peer_port}"
        words = [self._program, "--name", "one", "--data-dir", str(self._directory / "data"),
                 "--listen-client-urls", client, "--advertise-client-urls", client,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log)
        asyncio.run(self._answers())

    async def _answers(self) -> None:
        store, until = EtcdStore(self.url), time.monotonic() + START_DEADLINE_S
        try:
            while True:
                try:
                    await store.read()
                    return
                except StoreNotFound:
                    return
                except EtcdUnavailable as error:
                    if time.monotonic() > until:
                        raise AssertionError(f"etcd did not start: {(self._directory / 'log').read_text()}") from error
                await asyncio.sleep(0.05)
        finally:
            await store.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        self.signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None


@contextmanager
def etcd_process() -> Iterator[EtcdProcess]:
    program = etcd_program()
    with short_directory() as directory:
        process = EtcdProcess(program, directory)
        try:
            process.start()
            yield process
        finally:
            if process.running:
                process.kill()


def map_of(cluster: ServedCluster, *, upkeep_host: str | None = None) -> ClusterMap:
    """The first version of the map of a cluster of server processes."""
    places = tuple(MapPlace(cluster.config.node_ids[index], cluster.addresses[cluster.group_of[index]], 1)
                   for index in range(STRIPE_SHARDS))
    return ClusterMap(1, cluster.config.cluster_id, cluster.config.durability, str(cluster.root), NODE_CAPACITY_BYTES,
                      cluster.config.extent_bytes, places, upkeep_host)
