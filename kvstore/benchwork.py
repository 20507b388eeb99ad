"""What benchmarks have in common: the reference work, a timed fetch of it, and what a benchmark reports.

Reference work: 757 blocks of 113,920 bytes (V41_FLASH, 86.2 MB) into a pre-touched memfd. Each run times a memcpy of
the same bytes into the same memory right before the work, overwrites the destination, and after it every block must be
ok and every byte equal to what was stored; a run that misses a block fails the benchmark instead of becoming fast.

As memory is touched before it is landed in, the pages of slabs are in the page cache before they are put to, as in a
store in use. A virtual machine that has to get its memory from the host first would be measured otherwise: for a put
that costs from nothing to twice the put itself, as it happens.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import mmap
import os
import platform
import statistics
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
from numpy.typing import NDArray

from efs.cluster import read_store_config
from efs.errors import EfsError
from efs.limits import GIB, MAX_DEADLINE_MS, MIB
from efs.nodedir import slab_path
from efs.osio import SystemIo
from kvstore.config import Config
from kvstore.keys import Chain, Namespace
from kvstore.layout import V41_FLASH
from kvstore.store import KVStore

Bytes = NDArray[np.uint8]
Remark = Callable[[str], None]
Progress = Callable[[float], None]

REFERENCE_BLOCKS: Final = 757
REFERENCE_TOKENS: Final = 100_000


class BenchFailed(EfsError):
    """A run did not do the work that was to be timed; its times mean nothing."""


@dataclass(frozen=True, slots=True)
class Plan:
    """directory: an empty place for the stores. fresh_bytes, aged_bytes: raw capacities; the aged one is what is
    churned."""

    directory: Path
    blocks: int = REFERENCE_BLOCKS
    tokens: int = REFERENCE_TOKENS
    runs: int = 9
    seed: int = 1
    fresh_bytes: int = 4 * GIB
    aged_bytes: int = 768 * MIB
    cold: bool = True


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `value` is in `unit`: "x memcpy", "share", "ms" or "bytes"; smaller is better. target: None where
    there is none. milliseconds and memcpy_ms: medians, None where nothing was timed. notes: what the runs reported."""

    case: str
    value: float
    unit: str
    target: float | None
    milliseconds: float | None
    memcpy_ms: float | None
    notes: dict[str, float]

    @property
    def met(self) -> bool | None:
        return None if self.target is None else self.value <= self.target


@dataclass(frozen=True, slots=True)
class BenchReport:
    """All rows of one benchmark, and the machine that they were taken on."""

    rows: tuple[Row, ...]
    plan: Plan
    machine: dict[str, str]

    @property
    def missed(self) -> list[Row]:
        return [row for row in self.rows if row.met is False]

    def document(self) -> dict[str, object]:
        """For JSON."""
        plan = {**asdict(self.plan), "directory": str(self.plan.directory)}
        return {"plan": plan, "machine": self.machine, "rows": [{**asdict(row), "met": row.met} for row in self.rows]}


@dataclass(frozen=True, slots=True)
class Work:
    """The reference work: what is stored, where it lands, what must be there afterwards."""

    chain: Chain
    namespace: Namespace
    tokens: NDArray[np.uint32]
    block_major: Bytes
    expected: Bytes
    landing: Bytes


@dataclass(slots=True)
class Steps:
    """Where the benchmark is."""

    total: int
    remark: Remark
    progress: Progress
    done: int = 0
    now: str = ""

    def begin(self, what: str) -> None:
        self.now = what
        self.remark(what)
        self.progress(self.done / self.total)
        self.done += 1


def make_work(plan: Plan) -> Work:
    """The work of a plan, from its seed."""
    generator = np.random.default_rng(plan.seed)
    namespace = Namespace("deepseek-v4.1-flash", "benchmark", V41_FLASH)
    tokens = generator.integers(0, 129_280, plan.tokens, np.uint32)
    chain = namespace.chain(tokens)[: plan.blocks]
    if len(chain) != plan.blocks:
        raise BenchFailed(f"{plan.tokens} tokens make {len(chain)} blocks, {plan.blocks} are wanted")
    size = plan.blocks * V41_FLASH.block_bytes
    block_major = generator.integers(0, 256, size, np.uint8)
    fd = os.memfd_create("kvstore-bench", os.MFD_CLOEXEC)
    try:
        os.ftruncate(fd, size)
        landing: Bytes = np.frombuffer(mmap.mmap(fd, size), np.uint8)
    finally:
        os.close(fd)
    landing.fill(0)
    return Work(chain, namespace, tokens, block_major, V41_FLASH.to_segments(block_major), landing)


@contextlib.asynccontextmanager
async def opened(url: str, backend: str = "preadv") -> AsyncIterator[KVStore]:
    """A store, with the longest deadlines: what is measured is how long work takes."""
    config = Config(
        mapped=backend == "mapped",
        get_deadline_ms=MAX_DEADLINE_MS,
        put_deadline_ms=MAX_DEADLINE_MS,
        match_deadline_ms=MAX_DEADLINE_MS,
    )
    async with await KVStore.open(url, config=config) as store:
        yield store


async def store_reference(url: str, work: Work) -> None:
    """Put the reference work; BenchFailed unless it is stored whole."""
    async with opened(url) as store:
        report = await store.put(work.chain, work.block_major)
    if report.acked + report.already != len(work.chain) or report.at_risk:
        raise BenchFailed(f"the reference work was not stored whole: {report}")


@dataclass(slots=True)
class Times:
    """Times of the runs of one case, in ms, and sums of what their reports said."""

    work: list[float] = field(default_factory=list)
    memcpy: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    rebuilt: int = 0
    hedged: int = 0

    def row(self, case: str, target: float | None, **notes: float) -> Row:
        took, memcpy = statistics.median(self.work), statistics.median(self.memcpy)
        notes |= {"runs": len(self.work), "fastest_ms": min(self.work), "slowest_ms": max(self.work)}
        return Row(case, took / memcpy, "x memcpy", target, took, memcpy, notes)


def copy_ms(work: Work) -> float:
    """Milliseconds of copying the expected bytes into the landing; leaves other bytes there."""
    started = time.perf_counter()
    np.copyto(work.landing, work.expected)
    took = time.perf_counter() - started
    work.landing.fill(0x5A)
    return took * 1000


async def fetch(store: KVStore, work: Work, times: Times) -> None:
    """One timed fetch; BenchFailed unless every block is ok and every byte right."""
    first: list[float] = []

    def on_segment(segment: int, blocks: int) -> None:
        if segment == 0:
            first.append(time.perf_counter())

    times.memcpy.append(copy_ms(work))
    started = time.perf_counter()
    report = await store.get_into(work.chain, work.landing, on_segment=on_segment)
    ended = time.perf_counter()
    if report.blocks != len(work.chain) or not all(report.ok) or report.corrupt:
        raise BenchFailed(
            f"a fetch missed blocks: {report.blocks} of {len(work.chain)} ok, {report.corrupt} corrupt, "
            f"{report.missing} missing, {report.raced} raced"
        )
    if not _equal(work.landing, work.expected):
        raise BenchFailed("a fetch delivered bytes that were not stored")
    times.work.append((ended - started) * 1000)
    times.first.append((first[0] - started) / (ended - started))
    times.rebuilt += report.rebuilt
    times.hedged += report.hedged


def _equal(left: Bytes, right: Bytes) -> bool:
    """Compare in pieces, because comparing whole arrays makes a third one of their size."""
    return all(np.array_equal(left[at : at + MIB], right[at : at + MIB]) for at in range(0, len(left), MIB))


async def timed_fetches(store: KVStore, plan: Plan, work: Work) -> Times:
    """Fetches by a store that was just opened; the first of them warms caches, maps and lag estimates, and is not
    counted."""
    await fetch(store, work, Times())
    times = Times()
    for _ in range(plan.runs):
        await fetch(store, work, times)
    return times


def cache_slabs(root: str) -> None:
    """Read the slabs of a store whole, so that the page cache holds their pages, also those of holes."""
    buffer = bytearray(MIB)
    for path in read_store_config(SystemIo(), root).node_paths:
        with open(slab_path(path), "rb", buffering=0) as slab:
            while slab.readinto(buffer):
                pass


async def timed_puts(url: str, root: str, plan: Plan, work: Work) -> Times:
    """Puts of as many blocks as the work has, with new keys each time, to the store with its files in `root`, whose
    slabs are in the page cache. BenchFailed unless all are stored whole."""
    cache_slabs(root)
    times = Times()
    generator = np.random.default_rng(plan.seed + 1)
    async with opened(url) as store:
        for run in range(-1, plan.runs):
            chain = work.namespace.chain(generator.integers(0, 129_280, plan.blocks * 128, np.uint32))
            copied = copy_ms(work)
            started = time.perf_counter()
            report = await store.put(chain, work.block_major)
            took = time.perf_counter() - started
            if report.acked != plan.blocks or report.at_risk:
                raise BenchFailed(f"a put did not store all blocks twelve times: {report}")
            if run >= 0:
                times.memcpy.append(copied)
                times.work.append(took * 1000)
    return times


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Stores are opened without some of their nodes on purpose: no word about it."""
    log = logging.getLogger("efs")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def run_cases(cases: Callable[[Plan, Steps], Coroutine[None, None, list[Row]]], plan: Plan,
              steps: Steps) -> BenchReport:
    """Run the cases of a benchmark; BenchFailed names the step in which a run did not do its work."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner, quiet():
        try:
            rows = runner.run(cases(plan, steps))
        except BenchFailed as error:
            raise BenchFailed(f"{steps.now}: {error}") from error
    return BenchReport(tuple(rows), plan, machine())


def machine() -> dict[str, str]:
    """What the times were taken on."""
    model = "unknown"
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    return {
        "cpu": model,
        "cores": str(os.cpu_count()),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }
