"""On a CUDA device: the same scenarios as on the fake one, races behind slow kernels, bandwidth, what is hidden.

Skipped where there is none. What needs no GPU to be meaningful runs on the CPU too, with fewer rounds.
"""

from __future__ import annotations

import ctypes
import itertools
import statistics
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from gdr.compare import compare
from gdr.cuda import CudaDevice, CudaStream, loaded_runtime
from gdr.device import CpuDevice, Device
from gdr.engine import EngineConfig
from gdr.pages import PagePool
from gdr.pinned import PinnedPool
from gdr.swapin import SwapIn
from gdr.timeline import Timeline
from kvstore.layout import V41_FLASH
from tests.support.blockstore import MemoryBlockStore
from tests.support.tinymodel import BLOCK, prompt, tiny_model, tiny_namespace
from tests.unit.gdr import test_engine as engine_suite
from tests.unit.gdr import test_scheduler as scheduler_suite

WAIT_MS = 60_000.0
SEGMENTS = (22_784, 22_784, 45_568)
HOST_TO_DEVICE = 1
"""cudaMemcpyHostToDevice."""


@pytest.fixture(scope="module")
def cuda_model() -> LlamaForCausalLM:
    model = tiny_model()
    torch.nn.Module.to(model, device="cuda")
    return model


# -- the engine's scenarios --------------------------------------------------------------------------------------------


@pytest.mark.cuda
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [BLOCK + 1, 2 * BLOCK, 9 * BLOCK + 5])
def test_a_warm_run_gives_the_same_bits(cuda_model: LlamaForCausalLM, length: int, stream: bool) -> None:
    engine_suite.test_a_warm_run_computes_only_the_rest_and_gives_the_same_bits(
        cuda_model, MemoryBlockStore(), length, "cuda", stream
    )


@pytest.mark.cuda
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("segment", "block"), engine_suite.PLACES)
def test_failures_of_read_copy_and_scatter(
    cuda_model: LlamaForCausalLM, segment: int, block: int, stream: bool
) -> None:
    engine_suite.test_a_read_that_fails_at_any_segment_and_block_is_recomputed_from_there(
        cuda_model, MemoryBlockStore(), segment, block, stream
    )
    for kind in ("copy_in", "scatter"):
        engine_suite.test_a_copy_or_scatter_refused_at_any_segment_and_block_is_recomputed_from_there(
            cuda_model, MemoryBlockStore(), kind, segment, block, stream
        )


@pytest.mark.cuda
@pytest.mark.parametrize("block", [0, 3, 5])
def test_late_failures_and_the_negative_control(cuda_model: LlamaForCausalLM, block: int) -> None:
    engine_suite.test_a_block_found_bad_after_every_layer_ran_abandons_the_whole_pass(
        cuda_model, MemoryBlockStore(), block
    )
    engine_suite.test_negative_control_a_zeroed_block_changes_the_logits(cuda_model, MemoryBlockStore(), block % 5)


@pytest.mark.cuda
@pytest.mark.parametrize(("stream", "write_back"), list(itertools.product([False, True], repeat=2)))
def test_preemption(cuda_model: LlamaForCausalLM, stream: bool, write_back: bool) -> None:
    scheduler_suite.test_two_sequences_on_a_pool_for_one_and_a_half_give_the_tokens_of_lone_runs(
        cuda_model, stream, write_back
    )


@pytest.mark.cuda
@pytest.mark.parametrize("stream", [False, True])
def test_aborts_in_every_phase(cuda_model: LlamaForCausalLM, stream: bool) -> None:
    for verb in ("match", "get", "segment", "put"):
        scheduler_suite.test_an_abort_while_the_store_works_ends_the_sequence_and_leaves_nothing(
            cuda_model, verb, stream
        )
    for when, layer in itertools.product(("prefill", "later chunk", "decode"), range(3)):
        scheduler_suite.test_an_abort_in_any_layer_of_a_pass_ends_the_sequence_and_leaves_nothing(
            cuda_model, when, layer, stream
        )
    for kind in ("copy_in", "scatter"):
        scheduler_suite.test_an_abort_while_blocks_are_copied_ends_the_sequence_and_leaves_nothing(cuda_model, kind)


# -- races -------------------------------------------------------------------------------------------------------------


def pattern(request: int, blocks: int) -> list[int]:
    """The byte that fills each block of a request."""
    return [(31 * request + 7 * block) % 251 + 1 for block in range(blocks)]


def swap_in_behind_slow_kernels(device: Device, requests: int, slow: Callable[[], None]) -> int:
    """Requests on the same pages, each read by a kernel behind a slow one while the next is on its way; wrong reads."""
    blocks = 6
    pages = PagePool(device, SEGMENTS, 2 * blocks)
    pool = PinnedPool(device, blocks * sum(SEGMENTS), 2)
    swap_in = SwapIn(device, pages, staging_bytes=2 * max(SEGMENTS))
    stream = device.compute_stream()
    wrong = torch.zeros((), dtype=torch.int64, device=device.torch_device)
    for request in range(requests):
        lease = pool.lease(WAIT_MS)
        target = pages.allocate(blocks)
        assert lease is not None
        assert target is not None
        values = torch.tensor(pattern(request, blocks), dtype=torch.uint8)
        region, offset = lease.bytes(blocks * sum(SEGMENTS)), 0
        for size in SEGMENTS:
            region[offset : offset + blocks * size].view(blocks, size)[:] = values[:, None]
            offset += blocks * size
        transfer = swap_in.begin(lease, blocks, target)
        transfer.settle_rest(blocks)
        rows = device.integers([page.index for page in target.pages], stream)
        expected = device.integers(pattern(request, blocks), stream).to(torch.uint8)[:, None]
        for segment, size in enumerate(SEGMENTS):
            assert transfer.gates[segment].wait(stream, WAIT_MS) == blocks
            slow()
            wrong += (pages.storage[segment].index_select(0, rows)[:, :size] != expected).sum()
        pages.drop(target.pages, [stream.record()])
    found = int(wrong)
    assert swap_in.close()
    assert pages.free == 2 * blocks
    assert pool.close()
    return found


def test_fifty_swap_ins_on_the_cpu_read_nothing_wrong() -> None:
    assert swap_in_behind_slow_kernels(CpuDevice(staged=True), 50, lambda: None) == 0


@pytest.mark.cuda
def test_a_thousand_swap_ins_behind_slow_kernels_read_nothing_wrong() -> None:
    sleep: Any = torch.cuda._sleep
    assert swap_in_behind_slow_kernels(CudaDevice(), 1_000, lambda: sleep(500_000)) == 0


# -- speed -------------------------------------------------------------------------------------------------------------


class BandwidthRig:
    """The reference work, 757 blocks of V4.1, four times over: 345 MB in one page-locked region."""

    def __init__(self) -> None:
        self.device = CudaDevice()
        self.blocks = 4 * 757
        self.bytes = self.blocks * V41_FLASH.block_bytes
        self.pages = PagePool(self.device, V41_FLASH.shape.segment_bytes, self.blocks, align_bytes=1152)
        self.pool = PinnedPool(self.device, self.bytes, 1)
        assert self.pool.wait_prepared(WAIT_MS)
        assert self.pool.locked_regions == 1, self.pool.lock_errors
        self.stream = self.device.new_stream("plain")

    def timed(self, work: Callable[[CudaStream], None]) -> float:
        """Milliseconds on the device."""
        start = self.stream.record(timed=True)
        work(self.stream)  # type: ignore[arg-type]
        stop = self.stream.record(timed=True)
        stop.synchronize()
        return self.device.elapsed_ms(start, stop)

    def plain(self, source: torch.Tensor, target: torch.Tensor) -> float:
        return self.timed(lambda stream: self.device.copy_in(target, source, stream))

    def swap_in(self) -> float:
        """Milliseconds from the start of the first copy to the end of the last scatter."""
        timeline = Timeline(self.device)
        swap_in = SwapIn(self.device, self.pages, timeline=timeline)
        lease, target = self.pool.lease(WAIT_MS), self.pages.allocate(self.blocks)
        assert lease is not None
        assert target is not None
        transfer = swap_in.begin(lease, self.blocks, target)
        transfer.settle_rest(self.blocks)
        assert transfer.wait_finished(WAIT_MS)
        assert transfer.last_event is not None
        transfer.last_event.synchronize()
        spans = timeline.spans()
        assert swap_in.close()
        self.pages.drop(target.pages)
        return max(span.stop_ms for span in spans) - min(span.start_ms for span in spans)

    def two_dimensional(self, source: torch.Tensor, run_pages: int) -> float:
        """The same bytes by cudaMemcpy2DAsync, one call for each run of `run_pages` consecutive pages of a segment."""
        runtime = loaded_runtime()
        assert runtime is not None
        copy = runtime.cudaMemcpy2DAsync
        copy.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t,
                         ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p]

        def work(stream: CudaStream) -> None:
            offset = 0
            for segment, size in enumerate(V41_FLASH.shape.segment_bytes):
                pages, stride = self.pages.storage[segment], self.pages.storage[segment].stride(0)
                for first in range(0, self.blocks, run_pages):
                    count = min(run_pages, self.blocks - first)
                    to, since = pages.data_ptr() + first * stride, source.data_ptr() + offset + first * size
                    code = copy(to, stride, since, size, size, count, HOST_TO_DEVICE, stream.stream.cuda_stream)
                    assert code == 0
                offset += self.blocks * size

        return self.timed(work)


@pytest.mark.cuda
def test_the_bandwidth_of_a_swap_in_is_that_of_a_plain_copy_and_page_runs_are_compared() -> None:
    rig = BandwidthRig()
    lease = rig.pool.lease(WAIT_MS)
    assert lease is not None
    source = lease.bytes(rig.bytes)
    lease.release()  # Nobody else uses the pool; the view stays valid as long as it is open.
    target = rig.device.allocate((rig.bytes,))
    plain, swapped = [], []
    runs: dict[int, list[float]] = {1: [], 16: [], 64: []}
    for _ in range(7):
        plain.append(rig.plain(source, target))
        swapped.append(rig.swap_in())
        for run_pages, times in runs.items():
            times.append(rig.two_dimensional(source, run_pages))
    reference = statistics.median(plain)
    share = reference / statistics.median(swapped)
    print(f"plain {rig.bytes / reference / 1e6:.1f} GB/s, swap-in {share:.0%} of it; cudaMemcpy2DAsync by runs of "
          + ", ".join(f"{pages} pages {reference / statistics.median(times):.0%}" for pages, times in runs.items()))
    assert share >= 0.9


@pytest.mark.cuda
def test_copies_are_hidden_under_compute() -> None:
    model = tiny_model(layers=12, dtype=torch.bfloat16)
    torch.nn.Module.to(model, device="cuda")
    tokens = prompt(60 * BLOCK + 9)
    found = compare(model, MemoryBlockStore(), tiny_namespace(model), tokens, 8, EngineConfig(pages=80))
    print(f"hidden: {found.warm.hidden_share:.0%} of {found.warm.copy_ms:.2f} ms; "
          f"streamed {found.stream.hidden_share:.0%}")
    assert found.ok
    assert found.warm.copy_ms > 0
