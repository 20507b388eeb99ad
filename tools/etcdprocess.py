"""A real etcd on loopback, for who tests or shows a cluster: one member, which can be stopped, killed and started.

The program is the one on PATH, or the one that `make etcd` has unpacked.
"""

from __future__ import annotations

import asyncio
import importlib.util
import random
import shutil
import signal
import socket
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from efs.clustermap import EtcdUrl
from efs.errors import EtcdUnavailable, StoreNotFound
from efs.etcd import EtcdStore

START_DEADLINE_S: Final = 60.0
UNPACKED: Final = Path(__file__).resolve().parents[1] / ".venv" / "etcd" / "usr" / "bin" / "etcd"
NAME: Final = "c"
LOWEST_PORT: Final = 10_000


class EtcdNotStarted(Exception):
    """It did not answer; the message is its log."""


def find_etcd() -> str | None:
    """Where the program is; None when it, or the client library, is not there."""
    if importlib.util.find_spec("aetcd") is None:
        return None
    return shutil.which("etcd") or (str(UNPACKED) if UNPACKED.exists() else None)


def free_port() -> int:
    """A TCP port of loopback at which nobody listens now. It is none of those that the system gives to connections: one
    of them could take it while whoever listens there is started again."""
    with open("/proc/sys/net/ipv4/ip_local_port_range", encoding="ascii") as file:
        given_from = int(file.read().split()[0])
    source = random.SystemRandom()
    while True:
        port = source.randrange(LOWEST_PORT, max(given_from, LOWEST_PORT + 1_000))
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class EtcdProcess:
    """One etcd member, whose data outlive its process."""

    def __init__(self, program: str, directory: Path) -> None:
        self._program = program
        self._directory = directory
        self._peer_port = free_port()
        self.url = EtcdUrl("127.0.0.1", free_port(), NAME)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until it answers."""
        client, peer = f"http://127.0.0.1:{self.url.port}", f"http://127.0.0.1:{self._peer_port}"
        words = [self._program, "--name", "one", "--data-dir", str(self._directory / "data"),
                 "--listen-client-urls", client, "--advertise-client-urls", client,
                 "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"]
        with (self._directory / "log").open("ab") as log:
            self._process = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
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
                    if time.monotonic() > until or not self.running:
                        raise EtcdNotStarted((self._directory / "log").read_text()) from error
                await asyncio.sleep(0.05)
        finally:
            await store.close()

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, stopped or not, and wait until it is gone. Nothing when it does not run."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None
