"""Write-back: what is stored is what was computed, whatever happens to the sequence meanwhile; the bounds hold."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from efs.types import PutReport
from gdr.counters import Counters
from gdr.pages import Allocation, Page, PagePool
from gdr.pinned import Lease
from gdr.writeback import WriteBack
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout
from tests.support.blockstore import MemoryBlockStore
from tests.support.fakedevice import FakeDevice

LAYOUT = BlockLayout.per_layer([64, 32, 48], format="test", dtype="uint8", block_tokens=4)
NAMESPACE = Namespace("test", "weights", LAYOUT)
WAIT_MS = 20_000.0


class Rig:
    """A page pool, a store and a write-back on a device whose compute is deferred."""

    def __init__(self, *, kind: type[WriteBack] = WriteBack, staged: bool = True, pages: int = 4,
                 queue_jobs: int = 8) -> None:
        self.device = FakeDevice(order=("write-back", "compute"), staged=staged, deferred_compute=True)
        self.pages = PagePool(self.device, LAYOUT.shape.segment_bytes, pages, align_bytes=40)
        self.store = MemoryBlockStore()
        self.counters = Counters()
        self.write_back = kind(self.device, self.pages, self.store, counters=self.counters, piece_blocks=2,
                               queue_jobs=queue_jobs)
        self.compute = self.device.compute_stream()

    def allocate(self, count: int) -> Allocation:
        target = self.pages.allocate(count)
        assert target is not None
        return target

    def compute_into(self, pages: tuple[Page, ...], seed: int) -> list[bytes]:
        """Enqueue a kernel that writes random KV; the blocks that must be stored."""
        generator = torch.Generator().manual_seed(seed)
        blocks = [torch.randint(0, 256, (LAYOUT.block_bytes,), dtype=torch.uint8, generator=generator) for _ in pages]

        def kernel() -> None:
            for page, block in zip(pages, blocks, strict=True):
                for segment, (offset, size) in enumerate(
                    zip(LAYOUT.shape.segment_offsets, LAYOUT.shape.segment_bytes, strict=True)
                ):
                    self.pages.storage[segment][page.index, :size] = block[offset : offset + size]

        self.device.compute(kernel)
        return [block.numpy().tobytes() for block in blocks]

    def stored(self, chain: Chain) -> list[bytes | None]:
        return [block.tobytes() if (block := self.store.blocks.get(key)) is not None else None for key in chain]


def chain_of(blocks: int, seed: int = 0) -> Chain:
    return NAMESPACE.chain(np.arange(seed, seed + blocks * LAYOUT.block_tokens, dtype=np.uint32))


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    assert made.write_back.close()


@pytest.mark.parametrize("staged", [True, False])
def test_blocks_are_stored_block_major_as_they_were_computed(staged: bool) -> None:
    rig = Rig(staged=staged, pages=5)
    target, chain = rig.allocate(5), chain_of(5)
    expected = rig.compute_into(target.pages, seed=1)
    assert rig.write_back.submit(chain, target.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert rig.stored(chain) == expected
    assert rig.counters.get("write_back_acked") == 5
    rig.pages.drop(target.pages)
    assert rig.pages.free == 5
    assert rig.write_back.close()


class IgnoresCompute(WriteBack):
    def _wait_for_compute(self, written: object) -> None:
        return None


@pytest.mark.parametrize(("kind", "right"), [(WriteBack, True), (IgnoresCompute, False)])
def test_pages_are_read_only_after_the_compute_that_wrote_them(kind: type[WriteBack], right: bool) -> None:
    rig = Rig(kind=kind)
    target, chain = rig.allocate(3), chain_of(3)
    expected = rig.compute_into(target.pages, seed=1)
    assert rig.write_back.submit(chain, target.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert (rig.stored(chain) == expected) is right
    assert rig.write_back.close()


class HeldWriteBack(WriteBack):
    """Copies when `go` is set."""

    go: threading.Event

    def _copy_out(self, lease: Lease, pages: tuple[Page, ...]) -> None:
        assert self.go.wait(20)
        super()._copy_out(lease, pages)


class HoldsNothing(HeldWriteBack):
    def _hold(self, pages: tuple[Page, ...]) -> None:
        return None

    def _let_go(self, pages: tuple[Page, ...]) -> None:
        return None


@pytest.mark.parametrize(("kind", "right"), [(HeldWriteBack, True), (HoldsNothing, False)])
def test_preemption_between_enqueue_and_copy_does_not_let_another_sequence_into_the_pages(
    kind: type[HeldWriteBack], right: bool
) -> None:
    kind.go = threading.Event()
    rig = Rig(kind=kind, pages=2)
    target, chain = rig.allocate(2), chain_of(2)
    expected = rig.compute_into(target.pages, seed=1)
    written = rig.compute.record()
    assert rig.write_back.submit(chain, target.pages, written)
    rig.pages.drop(target.pages, [written])  # The owner is preempted before anything was copied.
    other = rig.pages.allocate(2)
    assert (other is None) is right
    if other is not None:
        rig.compute_into(other.pages, seed=2)
        rig.compute.synchronize()
    kind.go.set()
    assert rig.write_back.flush(WAIT_MS)
    assert (rig.stored(chain) == expected) is right
    if right:
        assert rig.pages.free == 2
    assert rig.write_back.close()


def test_a_full_queue_drops_the_new_blocks_and_counts_them() -> None:
    HeldWriteBack.go = threading.Event()
    rig = Rig(kind=HeldWriteBack, queue_jobs=1)
    target = rig.allocate(1)
    written = rig.compute.record()
    submitted = [rig.write_back.submit(chain_of(1, seed), target.pages, written) for seed in range(0, 40, 4)]
    assert submitted[0]
    assert not submitted[-1]
    assert rig.counters.get("write_back_dropped") == submitted.count(False)
    HeldWriteBack.go.set()
    assert rig.write_back.flush(WAIT_MS)
    assert len(rig.store.blocks) == submitted.count(True)
    rig.pages.drop(target.pages)
    assert rig.pages.free == 4
    assert rig.write_back.close()


@pytest.mark.parametrize("kind", ["rows", "gather", "copy_out"])
@pytest.mark.parametrize("number", [0, 1])
def test_a_refused_copy_costs_the_blocks_behind_it_and_leaves_nothing_held(rig: Rig, kind: str, number: int) -> None:
    target, chain = rig.allocate(4), chain_of(4)
    expected = rig.compute_into(target.pages, seed=1)
    # Two pieces of two blocks: one call of `rows` a piece, three of the others.
    rig.device.refuse(kind, {number if kind == "rows" else 3 * number + 1})
    assert rig.write_back.submit(chain, target.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert rig.device.refused[kind] == 1
    assert rig.stored(chain) == expected[: 2 * number] + [None] * (4 - 2 * number)
    assert rig.counters.get("write_back_errors") == 1
    rig.pages.drop(target.pages)
    assert rig.pages.free == 4
    rig.compute_into(target.pages, seed=2)
    again = rig.allocate(4)
    expected = rig.compute_into(again.pages, seed=3)
    assert rig.write_back.submit(chain_of(4, seed=99), again.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert rig.stored(chain_of(4, seed=99)) == expected


def test_a_store_that_refuses_costs_the_blocks_and_not_the_thread(rig: Rig) -> None:
    target, chain = rig.allocate(3), chain_of(3)
    expected = rig.compute_into(target.pages, seed=1)

    def fail(verb: str) -> None:
        raise OSError(28, "injected")

    rig.store.before = fail
    assert rig.write_back.submit(chain, target.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert rig.counters.get("write_back_errors") == 1
    assert rig.stored(chain) == [None] * 3
    rig.store.before = lambda verb: None
    assert rig.write_back.submit(chain, target.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert rig.stored(chain) == expected


def test_blocks_that_were_not_acknowledged_are_counted(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    target, chain = rig.allocate(2), chain_of(2)
    monkeypatch.setattr(rig.store, "put", lambda chain, blocks: PutReport(1, 0, 1, 0))
    assert rig.write_back.submit(chain, target.pages, rig.compute.record())
    assert rig.write_back.flush(WAIT_MS)
    assert rig.counters.get("write_back_failed") == 1
    assert rig.counters.get("write_back_errors") == 1
