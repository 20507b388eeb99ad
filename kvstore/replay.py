"""A request trace through a real store with real eviction, beside what exact models make of the same trace.

Each request does what an engine does: match its chain, fetch the blocks that are promised, compute the rest (here:
make its bytes up) and put it. A *hit* is a block whose verified bytes came back, and counts only if they are the bytes
that were put: a block's payload follows from its number, so a wrong byte ends the replay as a defect. Requests follow
each other without pause, one at a time; memory holds one request's blocks.

*Time.* Wall time, which stamps and ages are made of, follows the trace: it is START plus the request's timestamp, and
stands still in between. Monotonic time, which deadlines are made of, is the machine's. A trace that is busier than
stamps are fine (a store that turns over in a few of them can tell uses apart by their depth only) can have its time
*stretched* by a factor, which is a part of the result.

*Ratios* are of all tokens of all prompts and of all full blocks. The first request of a prefix always misses, so an
infinite cache is the ceiling of every other, and Belady's choice the ceiling at this capacity.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.clock import SystemClock
from efs.cluster import read_store_config
from efs.errors import EfsError, InvalidArgument
from efs.fs import FileSystem
from efs.limits import MAX_DEADLINE_MS
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE
from efs.osio import SystemIo
from kvstore import cachemodels
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from kvstore.replayplan import StorePlan
from kvstore.store import KVStore
from kvstore.traces import BLOCK_TOKENS, Request, TraceError, read_trace

Bytes = NDArray[np.uint8]
Progress = Callable[[int], None]

START: Final = 1_800_000_000
"""Wall time of the trace's time 0."""


class ReplayFailed(EfsError):
    """The store gave back bytes that were not put; no figure of this replay means anything."""

    exit_code = 8


@dataclass(frozen=True, slots=True)
class Workload:
    """A trace in memory. blocks: the full blocks of each request."""

    name: str
    requests: tuple[Request, ...]
    blocks: tuple[tuple[int, ...], ...]
    input_tokens: int
    asked_blocks: int
    unique_blocks: int

    @classmethod
    def load(cls, path: Path, requests: int | None = None) -> Workload:
        """The first `requests` requests of a trace file, all when None. TraceError when they have no full block."""
        read = tuple(islice(read_trace(path), requests))
        blocks = tuple(request.blocks for request in read)
        unique = len({block for asked in blocks for block in asked})
        if not unique:
            raise TraceError(f"{path}: no request has a full block of {BLOCK_TOKENS} tokens")
        return cls(path.name.split(".")[0], read, blocks, sum(request.input_tokens for request in read),
                   sum(map(len, blocks)), unique)

    @property
    def seconds(self) -> float:
        """From the first request to the last, by the trace's clock."""
        return (self.requests[-1].timestamp_ms - self.requests[0].timestamp_ms) / 1000

    def token_ratio(self, hit_blocks: int) -> float:
        return hit_blocks * BLOCK_TOKENS / self.input_tokens

    def block_ratio(self, hit_blocks: int) -> float:
        return hit_blocks / self.asked_blocks


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """Result of one capacity. Ratios of tokens and of blocks: of the store, and of the models at `capacity_blocks`.

    slots: of each node. stretch: of the trace's time. failed: blocks that the store did not take. undelivered: that
    `match` promised and the fetch did not bring. evicted: records, of all nodes. seconds: that the replay took.
    """

    trace: str
    capacity: str
    capacity_blocks: int
    capacity_bytes: int
    block_bytes: int
    slots: int
    stretch: float
    requests: int
    input_tokens: int
    asked_blocks: int
    unique_blocks: int
    token_hit_ratio: float
    block_hit_ratio: float
    infinite_token_hit_ratio: float
    infinite_block_hit_ratio: float
    lru_token_hit_ratio: float
    lru_block_hit_ratio: float
    belady_token_hit_ratio: float
    belady_block_hit_ratio: float
    acked: int
    already: int
    failed: int
    undelivered: int
    evicted: int
    seconds: float

    @property
    def points_below_lru(self) -> float:
        """Hit ratio by token, in points of a hundred; below zero when the store did better."""
        return 100 * (self.lru_token_hit_ratio - self.token_hit_ratio)

    def document(self) -> dict[str, str | int | float]:
        """Everything, for JSON."""
        return {**asdict(self), "points_below_lru": self.points_below_lru}


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    undelivered: int = 0
    acked: int = 0
    already: int = 0
    failed: int = 0


class TraceClock:
    """Wall time that follows a trace; see the module docstring."""

    def __init__(self, stretch: float) -> None:
        self._machine = SystemClock()
        self._stretch = stretch
        self._wall = float(START)

    def monotonic(self) -> float:
        return self._machine.monotonic()

    def wall(self) -> float:
        return self._wall

    def follow(self, trace_seconds: float) -> None:
        """It is now so many seconds after the trace's start; never goes back."""
        self._wall = max(self._wall, START + trace_seconds * self._stretch)


async def replay(workload: Workload, plan: StorePlan, directory: Path, *, capacity: str, stretch: float = 1.0,
                 progress: Progress = lambda _: None) -> ReplayReport:
    """Run a trace through a new store in `directory`, which is made. stretch: factor of the trace's time.

    progress(requests done) is called after each request. ReplayFailed for a wrong byte; InvalidArgument for a stretch
    that is not above 0; whatever making and opening a store raises.
    """
    if not 0 < stretch < math.inf:
        raise InvalidArgument(f"stretch is {stretch}, must be above 0")
    clock = TraceClock(stretch)
    began = clock.monotonic()
    root = str(directory)
    FileSystem.init(root, plan.capacity_bytes, extent_bytes=plan.extent_bytes, index_bytes=plan.index_bytes)
    store = KVStore(await FileSystem.open(root, clock=clock), root)
    try:
        counts = await _run(workload, store, clock, plan.block_bytes, progress)
    finally:
        await store.close()
    return _report(workload, plan, capacity, stretch, counts, _evicted(root), clock.monotonic() - began)


async def _run(workload: Workload, store: KVStore, clock: TraceClock, block_bytes: int, progress: Progress) -> _Counts:
    layout = BlockLayout.opaque(block_bytes, BLOCK_TOKENS)
    namespace = store.namespace(model="replay", weights="none", layout=layout)
    out = np.zeros(max(map(len, workload.blocks)) * block_bytes, np.uint8)
    first_ms = workload.requests[0].timestamp_ms
    counts = _Counts()
    for number, (request, blocks) in enumerate(zip(workload.requests, workload.blocks, strict=True), start=1):
        clock.follow((request.timestamp_ms - first_ms) / 1000)
        if blocks:
            await _serve(store, namespace, request, blocks, out, counts)
        progress(number)
    return counts


async def _serve(store: KVStore, namespace: Namespace, request: Request, blocks: Sequence[int], out: Bytes,
                 counts: _Counts) -> None:
    """One request."""
    size = namespace.layout.block_bytes
    chain = namespace.chain(request.tokens())
    promised = await store.match(chain, deadline_ms=MAX_DEADLINE_MS)
    hits = 0
    if promised:
        got = await store.get_into(chain[:promised], out[: promised * size], deadline_ms=MAX_DEADLINE_MS)
        hits = got.blocks
        expected = payload(blocks[:hits], size)
        if not np.array_equal(out[: hits * size].reshape(hits, size), expected):
            raise ReplayFailed(f"wrong bytes were delivered as verified, in blocks {blocks[0]} to {blocks[hits - 1]}")
    counts.hits += hits
    counts.undelivered += promised - hits
    if hits < len(blocks):
        put = await store.put(chain[hits:], payload(blocks[hits:], size), deadline_ms=MAX_DEADLINE_MS)
        counts.acked += put.acked
        counts.already += put.already
        counts.failed += put.failed


def payload(blocks: Sequence[int], block_bytes: int) -> Bytes:
    """(n, block_bytes) bytes of these blocks, different for each number; block_bytes is a multiple of 8."""
    numbers = np.asarray(blocks, np.uint64)[:, None] * np.uint64(0x9E37_79B9_7F4A_7C15)
    words = np.bitwise_xor(numbers, np.arange(block_bytes // 8, dtype=np.uint64) * np.uint64(0xBF58_476D_1CE4_E5B9))
    words ^= words >> np.uint64(29)
    found: Bytes = words.view(np.uint8)
    return found


def _evicted(root: str) -> int:
    """Records that the nodes of a closed store have evicted."""
    evicted = 0
    for path in read_store_config(SystemIo(), root).node_paths:
        counters = CounterFile.open(os.path.join(path, COUNTERS_FILE), writable=False)
        evicted += counters.get("node_evicted")
        counters.close()
    return evicted


def _report(workload: Workload, plan: StorePlan, capacity: str, stretch: float, counts: _Counts, evicted: int,
            seconds: float) -> ReplayReport:
    token, block = workload.token_ratio, workload.block_ratio
    infinite = sum(cachemodels.infinite(workload.blocks))
    lru = sum(cachemodels.lru(workload.blocks, plan.blocks))
    belady = sum(cachemodels.belady(workload.blocks, plan.blocks))
    return ReplayReport(
        trace=workload.name,
        capacity=capacity,
        capacity_blocks=plan.blocks,
        capacity_bytes=plan.capacity_bytes,
        block_bytes=plan.block_bytes,
        slots=plan.slots,
        stretch=stretch,
        requests=len(workload.requests),
        input_tokens=workload.input_tokens,
        asked_blocks=workload.asked_blocks,
        unique_blocks=workload.unique_blocks,
        token_hit_ratio=token(counts.hits),
        block_hit_ratio=block(counts.hits),
        infinite_token_hit_ratio=token(infinite),
        infinite_block_hit_ratio=block(infinite),
        lru_token_hit_ratio=token(lru),
        lru_block_hit_ratio=block(lru),
        belady_token_hit_ratio=token(belady),
        belady_block_hit_ratio=block(belady),
        acked=counts.acked,
        already=counts.already,
        failed=counts.failed,
        undelivered=counts.undelivered,
        evicted=evicted,
        seconds=seconds,
    )
