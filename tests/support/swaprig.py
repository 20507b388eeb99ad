"""A swap-in on a fake device with everything around it, and the bytes that must arrive."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from gdr.pages import Allocation, PagePool
from gdr.pinned import Lease, PinnedPool
from gdr.swapin import SwapIn, Transfer
from tests.support.fakedevice import FakeDevice

SEGMENTS = (48, 40, 32)
BLOCK = sum(SEGMENTS)
WAIT_MS = 20_000.0


class SwapRig:
    """Device, pages, host pool and swap-in. `swap_in` may be a subclass that breaks a rule."""

    def __init__(self, *, swap_in: type[SwapIn] = SwapIn, pages: int = 4, regions: int = 1, piece_blocks: int = 1,
                 order: Sequence[str] | random.Random = (), deferred_compute: bool = True, staged: bool = True,
                 steps_a_question: int = 0) -> None:
        self.device = FakeDevice(order=order, deferred_compute=deferred_compute, staged=staged,
                                 steps_a_question=steps_a_question)
        self.pages = PagePool(self.device, SEGMENTS, pages)
        self.pool = PinnedPool(self.device, max(4096, pages * BLOCK), regions)
        self.swap_in = swap_in(self.device, self.pages, staging_bytes=piece_blocks * max(SEGMENTS))
        self.compute = self.device.compute_stream()

    def lease(self) -> Lease:
        lease = self.pool.lease(0)
        assert lease is not None
        return lease

    def allocate(self, count: int) -> Allocation:
        target = self.pages.allocate(count)
        assert target is not None
        return target

    def fill(self, lease: Lease, blocks: int, seed: int) -> list[torch.Tensor]:
        """Random bytes as a fetch would leave them; per segment what must be in the pages, (blocks, payload)."""
        generator = torch.Generator().manual_seed(seed)
        data = torch.randint(0, 256, (blocks * BLOCK,), dtype=torch.uint8, generator=generator)
        lease.bytes(blocks * BLOCK).copy_(data)
        return split(data, blocks)

    def begin(self, blocks: int, seed: int, target: Allocation | None = None) -> tuple[Transfer, list[torch.Tensor],
    Allocation]:
        """A transfer whose bytes are in its region, nothing settled yet."""
        target = target or self.allocate(blocks)
        lease = self.lease()
        expected = self.fill(lease, blocks, seed)
        return self.swap_in.begin(lease, blocks, target), expected, target

    def read_later(self, target: Allocation, segment: int, into: list[torch.Tensor]) -> None:
        """A kernel on the compute stream that reads the pages of one segment when it runs."""
        rows = [page.index for page in target.pages]

        def kernel() -> None:
            into.append(self.pages.storage[segment][rows, : SEGMENTS[segment]].clone())

        self.device.compute(kernel)

    def now(self, target: Allocation, blocks: int) -> list[torch.Tensor]:
        """What is in the first `blocks` pages at this moment, per segment."""
        rows = [page.index for page in target.pages[:blocks]]
        return [self.pages.storage[segment][rows, :size].clone() for segment, size in enumerate(SEGMENTS)]

    def close(self) -> None:
        self.device.run_all()
        assert self.swap_in.close()
        assert self.device.pending() == 0
        self.pool.close()


def split(data: torch.Tensor, blocks: int) -> list[torch.Tensor]:
    """Segment-major bytes as one (blocks, payload) tensor a segment."""
    parts, offset = [], 0
    for size in SEGMENTS:
        parts.append(data[offset : offset + blocks * size].view(blocks, size).clone())
        offset += blocks * size
    return parts


def same(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


