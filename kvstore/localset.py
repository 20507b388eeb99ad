"""Servers for a store on this machine: started when somebody needs them, shared by everybody, and left running.

`start` makes ROOT a store for node servers unless it is one, and sees to it that every node is served at its Unix
socket, in PROCESSES processes of neighbouring nodes each: the loss of any one of them is survived. It may be called
by any number of processes at once, and again at any time: a lock file beside ROOT lets one at a time look, and
whatever already answers is left as it is. The servers are in sessions of their own, are nobody's children, and outlive
who started them, also when that is killed together with all its children, as some engines end; they write to
ROOT/servers.log. `stop` ends them cleanly: the processes that listen at the nodes' sockets, and nobody else who may be
at work on the directories.
"""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from efs.cluster import read_store_config
from efs.clusterfile import CLUSTER_FILE, ClusterConfig, read_cluster
from efs.errors import EfsError, InvalidArgument
from efs.limits import STRIPE_SHARDS
from efs.osio import SystemIo

PROCESSES: Final = 6
"""Two nodes each: with one process gone ten nodes are left, which is enough for every read."""
START_WAIT_S: Final = 60.0
STOP_WAIT_S: Final = 30.0
_POLL_S: Final = 0.02
_LOG_FILE: Final = "servers.log"
_CREDENTIALS: Final = struct.Struct("3i")
"""pid, uid and gid of who listens at a Unix socket."""

assert STRIPE_SHARDS % PROCESSES == 0


class ServersNotStarted(EfsError):
    """Servers of a local set did not come up, or did not end; the message says where to look."""

    retryable = True


def start(root: str, capacity: int | None, *, environ: Mapping[str, str] | None = None,
          wait_s: float = START_WAIT_S) -> str:
    """Path of ROOT's cluster.toml, all nodes of which answered. capacity: bytes of a new store, needed when there is
    none.

    ServersNotStarted, InvalidArgument (no store, and no capacity for one), and what `kvstore cluster init` refuses.
    """
    root = os.path.abspath(root)
    until = time.monotonic() + wait_s
    file = os.path.join(root, CLUSTER_FILE)
    with _only_one(root, until):
        if not os.path.exists(file):
            _make(root, capacity, environ)
        config = read_cluster(SystemIo(), file)
        begun = [_serve(root, config, nodes, environ) for nodes in _groups() if not _answer(config, nodes)]
        while not _answer(config, range(STRIPE_SHARDS)):
            if any(_has_ended(pid) for pid in begun) or time.monotonic() > until:
                raise ServersNotStarted(f"not every node of {root} is served: see {os.path.join(root, _LOG_FILE)}")
            time.sleep(_POLL_S)
    return file


def stop(root: str, *, wait_s: float = STOP_WAIT_S) -> int:
    """End the servers of ROOT's nodes; how many processes that were."""
    root = os.path.abspath(root)
    until = time.monotonic() + wait_s
    config = read_cluster(SystemIo(), os.path.join(root, CLUSTER_FILE))
    with _only_one(root, until), ExitStack() as opened:
        listeners = [_listener(path) for path in _sockets(config, range(STRIPE_SHARDS))]
        pids = {pid for pid in listeners if pid is not None}
        if 0 in pids:
            raise InvalidArgument(f"servers of {root} run where their process ids cannot be seen: end them there")
        servers = [server for pid in pids if (server := _process(pid)) is not None]
        for server in servers:
            opened.callback(os.close, server)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(server, signal.SIGTERM)
        for server in servers:
            if not select.select([server], [], [], max(0.0, until - time.monotonic()))[0]:
                raise ServersNotStarted(f"servers of {root} have not ended after {wait_s:g} s")
    return len(servers)


def _groups() -> list[range]:
    size = STRIPE_SHARDS // PROCESSES
    return [range(first, first + size) for first in range(0, STRIPE_SHARDS, size)]


def _command(*words: str) -> list[str]:
    return [sys.executable, "-c", "from kvstore.cli import main; main()", *words]


def _make(root: str, capacity: int | None, environ: Mapping[str, str] | None) -> None:
    if capacity is None:
        raise InvalidArgument(f"there is no store at {root}, and no capacity is given to make one")
    os.makedirs(os.path.dirname(root), exist_ok=True)
    done = subprocess.run(_command("cluster", "init", root, "--listen", "unix", "--capacity", str(capacity)),
                          env=_without_settings(environ), capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise ServersNotStarted((done.stderr.strip().splitlines() or ["kvstore cluster init failed"])[-1])


def _serve(root: str, config: ClusterConfig, nodes: Sequence[int], environ: Mapping[str, str] | None) -> int:
    """The process id of a new server, which a shell that has ended by now has started."""
    paths = read_store_config(SystemIo(), root).node_paths
    words = ["node", "serve", *(os.path.join(root, paths[index]) for index in nodes), "--durability", config.durability]
    for index in nodes:
        words += ["--listen", str(config.endpoints[index])]
    log = os.open(os.path.join(root, _LOG_FILE), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        done = subprocess.run(["/bin/sh", "-c", '"$@" >&2 & echo $!', "sh", *_command(*words)], check=True,
                              stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log,
                              env=_without_settings(environ), start_new_session=True)
    finally:
        os.close(log)
    return int(done.stdout)


def _has_ended(pid: int) -> bool:
    """Also of a process that nobody has collected."""
    process = _process(pid)
    if process is None:
        return True
    try:
        return bool(select.select([process], [], [], 0)[0])
    finally:
        os.close(process)


def _process(pid: int) -> int | None:
    """A descriptor of a process; None when there is none of this number."""
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


def _without_settings(environ: Mapping[str, str] | None) -> dict[str, str]:
    """The environment of servers: settings of a client are not theirs."""
    variables = os.environ if environ is None else environ
    return {name: value for name, value in variables.items() if not name.startswith("KVSTORE_")}


def _answer(config: ClusterConfig, nodes: Sequence[int]) -> bool:
    """Whether somebody accepts connections for each of these nodes."""
    return all(_listener(path) is not None for path in _sockets(config, nodes))


def _sockets(config: ClusterConfig, nodes: Sequence[int]) -> list[str]:
    """Where these nodes are to listen. InvalidArgument for one that is not on this machine."""
    paths = [config.endpoints[index].path for index in nodes]
    for index, path in zip(nodes, paths, strict=True):
        if path is None:
            raise InvalidArgument(f"node {index} is not at a Unix socket: start and stop its server by yourself")
    return [path for path in paths if path is not None]


def _listener(path: str) -> int | None:
    """The process that listens at a socket, 0 where it cannot be seen from here; None when nobody accepts connections
    there."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(path)
        except OSError:
            return None
        pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(pid)


@contextmanager
def _only_one(root: str, until: float) -> Iterator[None]:
    """Hold ROOT.lock, which is left behind: who removes such a file lets two in."""
    os.makedirs(os.path.dirname(root), exist_ok=True)
    fd = os.open(f"{root}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise ServersNotStarted(f"somebody else is starting servers of {root} and has not ended") from None
                time.sleep(_POLL_S)
        yield
    finally:
        os.close(fd)
