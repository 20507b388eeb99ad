"""The benchmark of node servers: the reference work over sockets, twelve real `kvstore node serve` processes behind it.

Everything runs on this machine, so the servers' work counts as well as the client's: on two cores it is the time of
thirteen processes. Units, checks and the reference work are those of `kvstore/benchwork.py`. Cases:

- fetch over Unix sockets and over TCP on the loopback, all nodes there; over Unix sockets also by a client that maps
  the slabs.
- fetch with one server stopped (SIGSTOP) once that was noticed, and the very first fetch of a client that was connected
  before the stop: each time another client, in milliseconds.
- fetch with two servers killed (SIGKILL), once that was noticed.
- put of new blocks, into slabs that are in the page cache.
- The bytes of a fetch over bare sockets, without a store (`kvstore/benchwire.py`): the floor of the cases on TCP.

A case in which no block was rebuilt although servers were stopped or killed fails the benchmark.
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from efs.cluster import read_store_config
from efs.clusterfile import write_cluster
from efs.fs import FileSystem
from efs.limits import STRIPE_SHARDS
from efs.osio import SystemIo
from kvstore.benchwire import timed_bare_sockets
from kvstore.benchwork import (
    BenchFailed,
    BenchReport,
    Plan,
    Progress,
    Row,
    Steps,
    Times,
    Work,
    fetch,
    make_work,
    opened,
    run_cases,
    store_reference,
    timed_fetches,
    timed_puts,
)

FETCH_TARGET: Final = 2.4
LOST_TARGET: Final = 3.0
FIRST_TARGET_MS: Final = 250.0
PUT_TARGET: Final = 14.0
STOPPED: Final = 3
KILLED: Final = (3, 7)
END_S: Final = 10.0


def run_served_bench(plan: Plan, progress: Progress = lambda share: None) -> BenchReport:
    """Run everything. BenchFailed when a run did not do its work."""
    return run_cases(_all_cases, plan, Steps(7, lambda _: None, progress))


async def _all_cases(plan: Plan, steps: Steps) -> list[Row]:
    work = make_work(plan)
    rows: list[Row] = []
    steps.begin("bare sockets")
    rows.append(timed_bare_sockets(plan, work).row("bytes of a fetch over bare TCP", None))
    steps.begin("servers on TCP")
    with _served(plan.directory / "tcp", plan, "tcp:127.0.0.1:0") as servers:
        await store_reference(servers.file, work)
        rows.append(await _healthy("TCP", servers, plan, work))
    steps.begin("servers on Unix sockets")
    with _served(plan.directory / "unix", plan, "unix") as servers:
        await store_reference(servers.file, work)
        rows.append(await _healthy("Unix sockets", servers, plan, work))
        rows.append(await _healthy("Unix sockets, mapped", servers, plan, work, "mapped"))
        steps.begin("put to servers")
        rows.append((await timed_puts(servers.file, str(servers.root), plan, work)).row("put to servers", PUT_TARGET))
        steps.begin("one server stopped")
        rows.append(await _stopped(servers, plan, work))
        steps.begin("one server stopped, first fetches")
        rows.append(await _first_fetches(servers, plan, work))
        steps.begin("two servers killed")
        rows.append(await _killed(servers, plan, work))
    return rows


async def _healthy(over: str, servers: _Servers, plan: Plan, work: Work, backend: str = "preadv") -> Row:
    async with opened(servers.file, backend) as store:
        times = await timed_fetches(store, plan, work)
    return _row(times, f"fetch over {over}, healthy", FETCH_TARGET)


async def _stopped(servers: _Servers, plan: Plan, work: Work) -> Row:
    async with opened(servers.file) as store:
        await timed_fetches(store, plan, work)
        with servers.stopped(STOPPED):
            times = await timed_fetches(store, plan, work)
    return _row(_rebuilt(times), "fetch, one server stopped", LOST_TARGET)


async def _first_fetches(servers: _Servers, plan: Plan, work: Work) -> Row:
    times = Times()
    for _ in range(plan.runs):
        async with opened(servers.file) as store:
            with servers.stopped(STOPPED):
                await fetch(store, work, times)
    took = statistics.median(_rebuilt(times).work)
    notes = {"runs": float(len(times.work)), "fastest_ms": min(times.work), "slowest_ms": max(times.work)}
    return Row("very first fetch, one server stopped", took, "ms", FIRST_TARGET_MS, took,
               statistics.median(times.memcpy), notes)


async def _killed(servers: _Servers, plan: Plan, work: Work) -> Row:
    async with opened(servers.file) as store:
        await fetch(store, work, Times())
        for node_index in KILLED:
            servers.kill(node_index)
        times = await timed_fetches(store, plan, work)
    return _row(_rebuilt(times), "fetch, two servers killed", LOST_TARGET)


def _rebuilt(times: Times) -> Times:
    if not times.rebuilt:
        raise BenchFailed("servers were away, and no block was rebuilt")
    return times


def _row(times: Times, case: str, target: float) -> Row:
    return times.row(case, target, rebuilt=times.rebuilt / len(times.work), hedged=times.hedged / len(times.work))


# -- Servers --------------------------------------------------------------------------------------------------------


class _Servers:
    """One process for each node of a cluster. file: its cluster.toml."""

    def __init__(self, root: Path, file: str, processes: Sequence[subprocess.Popen[str]]) -> None:
        self.root = root
        self.file = file
        self._processes = processes

    @contextlib.contextmanager
    def stopped(self, node_index: int) -> Iterator[None]:
        """Stop a server for a while."""
        self._processes[node_index].send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._processes[node_index].send_signal(signal.SIGCONT)

    def kill(self, node_index: int) -> None:
        self._processes[node_index].kill()
        self._processes[node_index].wait()


@contextlib.contextmanager
def _served(root: Path, plan: Plan, listen: str) -> Iterator[_Servers]:
    """A new cluster and its running servers; `listen` is what each listens at, "unix" for a socket of its own."""
    io = SystemIo()
    FileSystem.init(str(root), plan.fresh_bytes)
    store = read_store_config(io, str(root))
    wanted = [f"unix:{root / f'socket-{index}'}" if listen == "unix" else listen for index in range(STRIPE_SHARDS)]
    processes = [_start(path, address) for path, address in zip(store.node_paths, wanted, strict=True)]
    try:
        addresses = [_address_of(process) for process in processes]
        file = write_cluster(io, str(root), store.cluster_id, store.durability, store.node_ids, addresses,
                             upkeep_host=None, token_file=None)
        yield _Servers(root, file, processes)
    finally:
        _end(processes)


def _start(path: str, address: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", "from kvstore.cli import main; main()"]
    words = [*command, "--json", "node", "serve", path, "--listen", address]
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _address_of(process: subprocess.Popen[str]) -> str:
    """Where a server listens, once it does."""
    assert process.stdout is not None
    assert process.stderr is not None
    line = process.stdout.readline()
    if not line:
        raise BenchFailed(f"a server did not start: {process.stderr.read().strip()}")
    address: str = json.loads(line)["addresses"][0]
    return address


def _end(processes: Sequence[subprocess.Popen[str]]) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
            process.terminate()
    until = time.monotonic() + END_S
    for process in processes:
        try:
            process.wait(max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
