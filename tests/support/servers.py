"""Real `kvstore node serve` processes over the nodes of a cluster, each of which a test can stop, kill and start again.

Several nodes may share a process, so that a cluster of twelve does not need twelve interpreters: `groups` says which
nodes do. Sockets are in a directory with a short name, because a socket's path must be.
"""

from __future__ import annotations

import json
import os
import random
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from efs.cluster import StoreConfig, init_store, read_store_config
from efs.clusterfile import write_cluster
from efs.limits import MIB, STRIPE_SHARDS
from efs.osio import SystemIo
from tests.support.cli import ROOT, command, environment
from tools.etcdprocess import free_port

START_DEADLINE_S = 60.0
END_DEADLINE_S = 30.0
NODE_CAPACITY_BYTES = 48 * MIB
EXTENT_BYTES = 1 * MIB


class ServerProcess:
    """One process that serves some nodes at one address."""

    def __init__(self, paths: Sequence[str], address: str, *more: str) -> None:
        self.paths = list(paths)
        self.address = address
        self._more = more
        self.process: subprocess.Popen[bytes] | None = None
        self.lines: list[dict[str, object]] = []

    def begin(self) -> None:
        """Start it, without waiting."""
        words = command("--json", "node", "serve", *self.paths, "--listen", self.address, *self._more)
        self.process = subprocess.Popen(words, cwd=ROOT, env=environment(), stdout=subprocess.PIPE,
                                        stderr=subprocess.PIPE)

    def await_ready(self) -> None:
        """Wait until it has printed a line for each node."""
        assert self.process is not None
        assert self.process.stdout is not None
        until = time.monotonic() + START_DEADLINE_S
        data = b""
        while data.count(b"\n") < len(self.paths):
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 65_536) if readable else b""
            if not chunk:
                code, err = self.abandon()
                raise AssertionError(f"the server did not start (exit code {code}): {err}")
            data += chunk
        self.lines = [json.loads(line) for line in data.splitlines()]

    def start(self) -> None:
        self.begin()
        self.await_ready()

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.abandon()

    def terminate(self) -> tuple[int, str]:
        """SIGTERM; exit code and standard error."""
        self.signal(signal.SIGTERM)
        return self.abandon(END_DEADLINE_S)

    def abandon(self, wait_s: float = 0.0) -> tuple[int, str]:
        """Wait for its end, then make it end."""
        assert self.process is not None
        try:
            _, err = self.process.communicate(timeout=wait_s or 0.01)
        except subprocess.TimeoutExpired:
            self.process.kill()
            _, err = self.process.communicate()
        return self.process.returncode, err.decode()

    @property
    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None


class ServedCluster:
    """Twelve node directories, cluster.toml, and the processes that serve them."""

    def __init__(self, root: Path, config: StoreConfig, groups: Sequence[Sequence[int]], more: Sequence[str],
                 tcp: bool) -> None:
        self.root = root
        self.config = config
        self.file = str(root / "cluster.toml")
        self.addresses = [f"tcp:127.0.0.1:{free_port()}" if tcp else f"unix:{root}/s{number}"
                          for number in range(len(groups))]
        self.processes = [ServerProcess([config.node_paths[index] for index in group], address, *more)
                          for group, address in zip(groups, self.addresses, strict=True)]
        self.group_of = {index: number for number, group in enumerate(groups) for index in group}

    def of(self, node_index: int) -> ServerProcess:
        """The process that serves a node."""
        return self.processes[self.group_of[node_index]]

    def write_file(self, addresses: dict[int, str] | None = None, *, upkeep_host: str | None = None) -> None:
        """cluster.toml, with some nodes at other addresses."""
        every = {index: self.addresses[number] for index, number in self.group_of.items()} | (addresses or {})
        write_cluster(SystemIo(), str(self.root), self.config.cluster_id, self.config.durability, self.config.node_ids,
                      [every[index] for index in range(STRIPE_SHARDS)], upkeep_host=upkeep_host, token_file=None)

    def start(self) -> None:
        for process in self.processes:
            process.begin()
        for process in self.processes:
            process.await_ready()

    def stop(self) -> None:
        for process in self.processes:
            if process.running:
                process.signal(signal.SIGCONT)
                process.kill()


@contextmanager
def short_directory() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="kv"))
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)


@contextmanager
def served_cluster(groups: Sequence[Sequence[int]], *more: str, tcp: bool = False) -> Iterator[ServedCluster]:
    """A running cluster of twelve small nodes, empty. tcp: every byte goes over the wire; on a Unix socket a client
    reads most of them from the server's slab by itself."""
    with short_directory() as base:
        root = base / "c"
        init_store(SystemIo(), str(root), NODE_CAPACITY_BYTES * STRIPE_SHARDS, node_paths=None, durability="process",
                   extent_bytes=EXTENT_BYTES, source=random.Random(7))
        cluster = ServedCluster(root, read_store_config(SystemIo(), str(root)), groups, more, tcp)
        cluster.write_file()
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
