"""The benchmark: prefix hits of DeepSeek-V4.1-Flash blocks, in units of memcpy taken in the same run.

Reference work: 757 blocks of 113,920 bytes (V41_FLASH, 86.2 MB) into a pre-touched memfd. Times of this class of
machine move by a factor of two within minutes, so nothing is quoted in milliseconds alone: each run times a memcpy of
the same bytes into the same memory right before the work, and a case's result is the median of the work over the
median of memcpy. The destination is overwritten before every run, and after it every block must be ok and every byte
equal to what was stored; a case that misses a block fails the benchmark instead of becoming fast.

Cases:

- fetch: slabs read by preadv or through maps; a store that was just filled (fresh) or churned through three times its
  capacity (aged); all nodes there, one or two directories gone. The first segment's time comes from the same runs.
- cold: the same with the page cache of the slabs and indexes dropped before every run, the store opened anew.
- match: hashing 100,000 tokens and matching 757 blocks.
- put: 757 blocks with new keys, into slabs that are in the page cache.
- memory: the most that a first fetch holds beside its destination, as tracemalloc counts, and as the process's peak.

Ageing: sessions that grow by turns, several at a time, old ones read again, until the records written are three times
the raw capacity. It counts only if nodes evicted records; the reference work is put last. How torn the result is stands
beside the times: mean slots per contiguous range, where a fresh store has whole runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from efs.extent import ranges_of
from efs.fs import FileSystem
from efs.limits import MIB, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, index_path, slab_path
from efs.placement import runs as runs_of
from efs.storeview import StoreView
from kvstore.benchwork import (
    BenchFailed,
    BenchReport,
    Bytes,
    Plan,
    Progress,
    Remark,
    Row,
    Steps,
    Times,
    Work,
    copy_ms,
    fetch,
    make_work,
    opened,
    run_cases,
    store_reference,
    timed_fetches,
    timed_puts,
)
from kvstore.keys import Chain
from kvstore.layout import V41_FLASH

CHURN: Final = 3.0
"""Raw bytes written while ageing, in units of the capacity."""
MEMORY_TARGET: Final = 64 * MIB
FIRST_SEGMENT_TARGET: Final = 0.35
FETCH_TARGETS: Final = {
    ("fresh", 0, "mapped"): 1.7,
    ("fresh", 0, "preadv"): 2.1,
    ("aged", 0, "mapped"): 2.1,
    ("aged", 0, "preadv"): 2.7,
    ("fresh", 1, "mapped"): 2.0,
    ("fresh", 1, "preadv"): 2.5,
    ("fresh", 2, "mapped"): 2.0,
    ("fresh", 2, "preadv"): 2.5,
}
MATCH_TARGET: Final = 0.5
PUT_TARGET: Final = 10.0
LOST_NODES: Final = (3, 7)
RECORD_BYTES: Final = STRIPE_SHARDS * V41_FLASH.shape.slot_bytes
"""Slots that one block takes on all nodes."""


def run_bench(plan: Plan, remark: Remark = lambda text: None, progress: Progress = lambda share: None) -> BenchReport:
    """Run everything. BenchFailed when a run did not do its work."""
    return run_cases(_all_cases, plan, Steps(13 + (2 if plan.cold else 0), remark, progress))


async def _all_cases(plan: Plan, steps: Steps) -> list[Row]:
    work = make_work(plan)
    rows: list[Row] = []
    fresh, aged = str(plan.directory / "fresh"), str(plan.directory / "aged")
    steps.begin("fill a fresh store")
    FileSystem.init(fresh, plan.fresh_bytes)
    await store_reference(fresh, work)
    rows += await _fetch_cases(fresh, "fresh", plan, work, steps)
    if plan.cold:
        for backend in ("mapped", "preadv"):
            steps.begin(f"fetch, cold, {backend}")
            rows.append(await _cold_case(fresh, backend, plan, work))
    steps.begin("match")
    rows.append(await _match_case(fresh, plan, work))
    steps.begin("put")
    rows.append((await timed_puts(fresh, fresh, plan, work)).row("put of new blocks", PUT_TARGET))
    steps.begin("memory")
    rows += [await _memory_case(fresh, backend, work) for backend in ("mapped", "preadv")]
    steps.begin(f"age a store: write {CHURN} times its capacity")
    FileSystem.init(aged, plan.aged_bytes)
    await _age(aged, plan, work)
    await store_reference(aged, work)
    rows += await _fetch_cases(aged, "aged", plan, work, steps)
    return rows


# -- Cases ----------------------------------------------------------------------------------------------------------


async def _fetch_cases(root: str, age: str, plan: Plan, work: Work, steps: Steps) -> list[Row]:
    rows = []
    slots = mean_slots_per_range(root, work.chain)
    for lost in range(len(LOST_NODES) + 1):
        for backend in ("mapped", "preadv"):
            steps.begin(f"fetch, {age}, {backend}, {_gone(lost)}")
            with _without(root, LOST_NODES[:lost]):
                async with opened(root, backend) as store:
                    times = await timed_fetches(store, plan, work)
            if lost and not times.rebuilt:
                raise BenchFailed(f"{_gone(lost)}, and no block was rebuilt")
            case = f"fetch {age}, {backend}, {_gone(lost)}"
            rows.append(
                times.row(
                    case,
                    FETCH_TARGETS.get((age, lost, backend)),
                    slots_per_range=slots,
                    rebuilt=times.rebuilt / len(times.work),
                    hedged=times.hedged / len(times.work),
                )
            )
            if age == "fresh" and not lost:
                rows.append(
                    Row(
                        f"first segment, {backend}",
                        statistics.median(times.first),
                        "share",
                        FIRST_SEGMENT_TARGET,
                        None,
                        None,
                        {},
                    )
                )
    return rows


def _gone(lost: int) -> str:
    return ("healthy", "one node gone", "two nodes gone")[lost]


async def _cold_case(root: str, backend: str, plan: Plan, work: Work) -> Row:
    """Opening, which reads a little itself, is not timed; it comes before the cache is dropped where nothing is
    mapped."""
    times, resident = Times(), []
    for _ in range(plan.runs):
        drop_page_cache(root)
        async with opened(root, backend) as store:
            resident.append(resident_share(root))
            await fetch(store, work, times)
    return times.row(f"fetch cold, {backend}, healthy", None, resident_share=max(resident))


async def _match_case(root: str, plan: Plan, work: Work) -> Row:
    times = Times()
    async with opened(root) as store:
        for run in range(-1, plan.runs):
            copied = copy_ms(work)
            started = time.perf_counter()
            chain = work.namespace.chain(work.tokens)
            found = await store.match(chain[: plan.blocks])
            took = time.perf_counter() - started
            if found != plan.blocks:
                raise BenchFailed(f"match found {found} of {plan.blocks} blocks")
            if run >= 0:
                times.memcpy.append(copied)
                times.work.append(took * 1000)
    return times.row(f"hash {len(work.tokens)} tokens and match", MATCH_TARGET)


async def _memory_case(root: str, backend: str, work: Work) -> Row:
    """The first fetch of a store that was just opened, two nodes gone, so that everything it keeps is counted."""
    with _without(root, LOST_NODES):
        async with opened(root, backend) as store:
            before = _reset_peak()
            await fetch(store, work, Times())
            grown = max(0, _status("VmHWM") - before)
        async with opened(root, backend) as store:
            tracemalloc.start()
            try:
                await fetch(store, work, Times())
                traced = tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()
    # Pages of a map are the page cache's own and count as resident, so the process's peak says nothing there.
    value = traced if backend == "mapped" else max(traced, grown)
    return Row(
        f"memory beside the destination, {backend}",
        value,
        "bytes",
        MEMORY_TARGET,
        None,
        None,
        {"traced_bytes": traced, "resident_growth_bytes": grown},
    )


def _reset_peak() -> int:
    """Make the peak of resident memory the present value where the kernel allows it; returns the peak in bytes."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    return _status("VmHWM")


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise BenchFailed(f"the kernel does not tell {name}")


# -- Ageing ---------------------------------------------------------------------------------------------------------


async def _age(root: str, plan: Plan, work: Work) -> None:
    """Write CHURN times the capacity as sessions that grow by turns; BenchFailed unless records were evicted by it."""
    source = random.Random(plan.seed)
    written, wanted = 0, CHURN * plan.aged_bytes
    sessions: list[tuple[Chain, int]] = []
    async with opened(root) as store:
        while written < wanted:
            if len(sessions) < 8:
                tokens = np.frombuffer(source.randbytes(4 * 128 * 512), np.uint32) & 0xFFFF
                sessions.append((work.namespace.chain(tokens), 0))
            place = source.randrange(len(sessions))
            chain, held = sessions[place]
            if held and source.random() < 0.25:
                await store.get_into(
                    chain[: min(held, plan.blocks)], work.landing[: min(held, plan.blocks) * V41_FLASH.block_bytes]
                )
            turn = min(source.choice((1, 3, 8, 24, 64)), len(chain) - held, plan.blocks)
            report = await store.put(chain[held : held + turn], work.block_major[: turn * V41_FLASH.block_bytes])
            if report.acked + report.already != turn:
                raise BenchFailed(f"a put while ageing failed: {report}")
            written += report.acked * RECORD_BYTES
            sessions[place] = (chain, held + turn)
            if held + turn == len(chain) or source.random() < 0.05:
                sessions.pop(place)
    require_aged(written, plan.aged_bytes, evicted_records(root))


def require_aged(written: int, capacity: int, evicted: Sequence[int]) -> None:
    """BenchFailed unless CHURN times the capacity was written and every node evicted records."""
    if written < CHURN * capacity or not min(evicted):
        raise BenchFailed(
            f"not aged: {written} bytes written for a capacity of {capacity}, "
            f"{min(evicted)} records evicted on some node"
        )


def evicted_records(root: str) -> list[int]:
    """Records that each node has evicted since it was made."""
    found = []
    for path in _node_paths(root):
        counters = CounterFile.open(os.path.join(path, COUNTERS_FILE), writable=False)
        found.append(counters.get("node_evicted"))
        counters.close()
    return found


def mean_slots_per_range(root: str, chain: Sequence[bytes]) -> float:
    """Mean length of the contiguous ranges in which nodes hold the runs of a chain. The store must be closed."""
    keys = list(chain)
    slots = ranges = 0
    with StoreView.open(root) as view:
        for node in view.views:
            places = {entry.index_key[:32]: entry.location for entry in node.versions(keys)}
            for start, stop in runs_of(keys):
                held = [places[key] for key in keys[start:stop] if key in places]
                slots += len(held)
                ranges += len(ranges_of(np.array(held, np.int64)))
    return slots / ranges if ranges else 0.0


# -- Files ----------------------------------------------------------------------------------------------------------


def _node_paths(root: str) -> tuple[str, ...]:
    with StoreView.open(root) as view:
        return view.config.node_paths


@contextlib.contextmanager
def _without(root: str, lost: Sequence[int]) -> Iterator[None]:
    """Take node directories away for a while. The store must be closed before and after."""
    paths = [_node_paths(root)[index] for index in lost]
    for path in paths:
        os.rename(path, path + ".away")
    try:
        yield
    finally:
        for path in paths:
            os.rename(path + ".away", path)


def _data_files(root: str) -> list[str]:
    return [
        file for path in _node_paths(root) for file in (slab_path(path), os.path.join(index_path(path), "data.mdb"))
    ]


def drop_page_cache(root: str) -> None:
    """Drop what the page cache holds of a closed store's slabs and indexes."""
    for file in _data_files(root):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)  # Dirty pages cannot be dropped.
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def resident_share(root: str) -> float:
    """Share of the slabs' allocated pages that the page cache holds. Asks mincore, which reads nothing ahead."""
    libc = ctypes.CDLL(None, use_errno=True)
    resident = allocated = 0
    for file in (slab_path(path) for path in _node_paths(root)):
        fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
        try:
            found = os.fstat(fd)
            pages: Bytes = np.frombuffer(mmap.mmap(fd, found.st_size, prot=mmap.PROT_READ), np.uint8)
        finally:
            os.close(fd)
        held = np.zeros(-(-found.st_size // mmap.PAGESIZE), np.uint8)
        address, vector = ctypes.c_void_p(pages.ctypes.data), held.ctypes.data_as(ctypes.c_void_p)
        if libc.mincore(address, ctypes.c_size_t(found.st_size), vector):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), file)
        resident += int(np.count_nonzero(held & 1))
        allocated += found.st_blocks * 512 // mmap.PAGESIZE
    return resident / allocated if allocated else 0.0


