"""Ten thousand loads with failures and aborts: every byte that a pass read was right, and every region, page and event
is back.

Device order, failures, aborts and lengths come from one seed, which is printed. Three loads are under way at any time,
on pages and regions for fewer than all of them, half of them streamed.
"""

from __future__ import annotations

import gc
import random
import threading
from collections import Counter, deque

import numpy as np
import pytest
import torch

from gdr.counters import Counters
from gdr.errors import Aborted
from gdr.pages import Allocation
from gdr.pinned import RegionState
from gdr.prefix import PrefixLoad, PrefixLoader, PrefixShortened
from gdr.swapin import SwapIn
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout
from tests.support.blockstore import MemoryBlockStore
from tests.support.swaprig import SEGMENTS, SwapRig
from tests.support.waiting import eventually

pytestmark = pytest.mark.usefixtures("patient")

SEED = 20_240_607
LOADS = 10_000
PROMPTS = 8
BLOCKS = 5
LAYOUT = BlockLayout.per_layer(SEGMENTS, format="test", dtype="uint8", block_tokens=2)


class Request:
    """One load with its pages."""

    def __init__(self, chain: Chain, target: Allocation) -> None:
        self.chain = chain
        self.target = target
        self.aborted = threading.Event()
        self.load: PrefixLoad | None = None
        self.ended = False

    def take_load(self, load: PrefixLoad) -> None:
        self.load = load

    def abort(self) -> None:
        self.aborted.set()
        if self.load is not None:
            self.load.abort()


class Loads:
    """The engine's part of a load, without a model: wait for each segment, then read it on the compute stream."""

    def __init__(self, seed: int, swap_in: type[SwapIn] = SwapIn) -> None:
        self.rng = random.Random(seed)
        self.rig = SwapRig(swap_in=swap_in, order=random.Random(seed), pages=14, regions=2, piece_blocks=2,
                           steps_a_question=3)
        self.rig.device.refuse_share(random.Random(seed + 1), 0.001, ("copy_in", "scatter"))
        self.store = MemoryBlockStore()
        self.store.before = self.disturb
        namespace = Namespace("test", "weights", LAYOUT)
        self.chains = [namespace.chain(range(1000 * i, 1000 * i + 2 * BLOCKS)) for i in range(PROMPTS)]
        data = np.random.default_rng(seed)
        for chain in self.chains:
            self.store.put(chain, data.integers(0, 256, len(chain) * LAYOUT.block_bytes, dtype=np.uint8))
        self.counters = Counters()
        self.loader = PrefixLoader(self.store, self.rig.pool, self.rig.swap_in, block_bytes=LAYOUT.block_bytes,
                                   counters=self.counters, pool_wait_ms=20_000)
        self.outcomes: Counter[str] = Counter()
        self.wrong = 0
        self.active: Request | None = None
        self._rng_lock = threading.Lock()

    def chance(self, share: float) -> bool:
        with self._rng_lock:
            return self.rng.random() < share

    def disturb(self, verb: str) -> None:
        """Failures and aborts from inside the store."""
        if verb == "put":
            return
        if self.chance(0.003):
            self.outcomes["injected store failure"] += 1
            raise OSError(5, "injected")
        if verb == "segment" and self.chance(0.001) and self.active is not None:
            self.outcomes["injected abort"] += 1
            self.active.abort()

    def expected(self, chain: Chain, segment: int, blocks: int) -> torch.Tensor:
        offset, size = LAYOUT.shape.segment_offsets[segment], SEGMENTS[segment]
        rows = [self.store.blocks[key][offset : offset + size] for key in chain.keys[:blocks]]
        return torch.from_numpy(np.stack(rows))

    def read(self, request: Request, segment: int, blocks: int) -> None:
        """The kernel of a layer: when it runs, the pages must hold the stored bytes."""
        rows = [page.index for page in request.target.pages[:blocks]]
        expected = self.expected(request.chain, segment, blocks)
        pages = self.rig.pages.storage[segment]

        def kernel() -> None:
            self.outcomes["segments read"] += 1
            if not torch.equal(pages[rows, : SEGMENTS[segment]], expected):
                self.wrong += 1

        self.rig.device.compute(kernel)

    def overwrite(self, request: Request, blocks: int) -> None:
        """The kernel that computes what was not loaded."""
        rows = torch.tensor([page.index for page in request.target.pages[blocks:]])
        if len(rows):
            self.rig.device.compute(lambda: self.rig.pages.storage[0].index_fill_(0, rows, 0x11))

    def run_pass(self, request: Request) -> str:
        load = request.load
        assert load is not None
        while True:
            try:
                for segment in range(len(SEGMENTS)):
                    if self.chance(0.005):
                        self.outcomes["injected abort"] += 1
                        request.abort()
                    load.wait_segment(segment, self.rig.compute)
                    if load.assumed:
                        self.read(request, segment, load.assumed)
                    self.overwrite(request, load.assumed)
                load.confirm(self.rig.compute)
                return "whole" if load.assumed == len(request.chain) else "shortened" if load.assumed else "nothing"
            except PrefixShortened:
                self.outcomes["abandoned passes"] += 1
                load.settled(self.rig.compute)

    def begin(self) -> Request | None:
        chain = self.chains[self.rng.randrange(PROMPTS)][: self.rng.randint(1, BLOCKS)]
        target = self.rig.pages.allocate(len(chain))
        if target is None:
            return None
        for fence in target.fences:
            self.rig.compute.wait(fence)
        request = self.active = Request(chain, target)
        try:
            request.load = self.loader.load(chain, target, request.aborted, stream=self.chance(0.5),
                                            started=request.take_load)
        except Aborted:
            self.outcomes["aborted"] += 1
            self.end(request)
        return request

    def end(self, request: Request) -> None:
        request.ended = True
        if request.load is not None:
            request.load.abort()
        self.rig.pages.drop(request.target.pages, [self.rig.compute.record()])

    def run(self, loads: int) -> None:
        under_way: deque[Request] = deque()
        for _ in range(loads):
            request = self.begin()
            while request is None:  # No room: the device or the swap-in thread has to catch up.
                self.rig.device.run_all()
                if under_way:
                    self.finish(under_way.popleft())
                request = self.begin()
            if not request.ended:
                under_way.append(request)
            if len(under_way) >= 3 or self.chance(0.3):
                self.rig.device.run_all()
            while len(under_way) >= 3:
                self.finish(under_way.popleft())
        while under_way:
            self.finish(under_way.popleft())

    def finish(self, request: Request) -> None:
        self.active = request
        try:
            self.outcomes[self.run_pass(request)] += 1
        except Aborted:
            self.outcomes["aborted"] += 1
        self.end(request)


@pytest.mark.parametrize("count", [500, pytest.param(LOADS, marks=pytest.mark.slow)])
def test_many_loads_with_failures_and_aborts_lose_nothing_and_read_nothing_wrong(
    count: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("CRITICAL")
    print(f"seed {SEED}")
    loads = Loads(SEED)
    loads.run(count)
    rig, outcomes = loads.rig, loads.outcomes
    assert loads.loader.close()

    def everything_back() -> bool:
        rig.device.run_all()
        return rig.pool.counts()[RegionState.FREE] == 2 and rig.pages.free == 14 and rig.device.pending() == 0

    assert eventually(everything_back)
    print(dict(outcomes), dict(rig.device.refused))
    assert loads.wrong == 0
    assert sum(outcomes[kind] for kind in ("whole", "shortened", "nothing", "aborted")) == count
    assert outcomes["aborted"] >= count // 100
    assert outcomes["injected store failure"] + sum(rig.device.refused.values()) >= count // 100
    assert outcomes["abandoned passes"] > 0
    assert outcomes["whole"] > count // 2
    assert outcomes["segments read"] > count
    assert rig.pages.pending_fences() == 0
    assert rig.swap_in.close()
    loads.active = None
    rig.swap_in._scattered = [None, None]
    gc.collect()
    assert rig.device.live_events() == 0
    assert rig.pool.close()


class IgnoresStaging(SwapIn):
    def _wait_for_staging(self, slot: int) -> None:
        return None


class ReleasesRegionEarly(SwapIn):
    def _region_fences(self) -> tuple[()]:
        return ()


@pytest.mark.parametrize("kind", [IgnoresStaging, ReleasesRegionEarly])
def test_the_same_loads_show_a_broken_order(kind: type[SwapIn], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("CRITICAL")
    loads = Loads(SEED, swap_in=kind)
    loads.run(300)
    loads.rig.device.run_all()
    assert loads.wrong > 0
    assert loads.loader.close()
    assert loads.rig.swap_in.close()
