"""Every order that a swap-in must keep: with the rule the bytes are right, without it the same scenario shows wrong
ones.

Each scenario runs twice on a fake device that executes streams in the worst order: once with the product's class, once
with a subclass that breaks exactly one rule. A scenario that could not tell the two apart would fail.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import torch

from gdr.device import Event, Stream
from gdr.swapin import Gate, SwapIn, Transfer
from tests.support.fakedevice import FakeDevice
from tests.support.swaprig import SEGMENTS, WAIT_MS, SwapRig, same

# -- 1: an event is waited for only when it is known to have been recorded
# ------------------------------------------------


class EagerGate(Gate):
    """Waits for an event that exists from the start, whether or not it was recorded."""

    def __init__(self, device: FakeDevice, scatter: Stream, blocks: int) -> None:
        super().__init__()
        self.device, self.scatter, self.assumed = device, scatter, blocks
        self.event = device.unrecorded_event()

    def open(self, blocks: int, event: Event | None) -> None:
        self.device.record_into(self.event, self.scatter)  # type: ignore[arg-type]
        super().open(blocks, event)

    def wait(self, stream: Stream, wait_ms: float) -> int:
        stream.wait(self.event)
        return self.assumed


class HeldSwapIn(SwapIn):
    """Starts to work when `go` is set."""

    go: threading.Event

    def _handle(self, job: object) -> None:
        assert self.go.wait(20)
        super()._handle(job)  # type: ignore[arg-type]


class WaitsForUnrecorded(HeldSwapIn):
    def new_gate(self, segment: int) -> Gate:
        return EagerGate(self._device, self._scatter, 3)  # type: ignore[arg-type]


@pytest.mark.parametrize(("kind", "right"), [(HeldSwapIn, True), (WaitsForUnrecorded, False)])
def test_the_host_knows_that_an_event_was_recorded_before_a_stream_waits_for_it(
    kind: type[HeldSwapIn], right: bool
) -> None:
    kind.go = threading.Event()
    rig = SwapRig(swap_in=kind, order=("compute",))
    transfer, expected, target = rig.begin(3, seed=1)
    transfer.settle_rest(3)
    seen: list[torch.Tensor] = []

    def forward() -> None:
        for segment in range(len(SEGMENTS)):
            assert transfer.gates[segment].wait(rig.compute, WAIT_MS) == 3
            rig.read_later(target, segment, seen)

    reader = threading.Thread(target=forward)
    reader.start()
    if not right:
        reader.join(20)  # The broken gate lets the whole pass through while nothing was copied yet.
        assert not reader.is_alive()
    kind.go.set()
    reader.join(20)
    assert transfer.wait_finished(WAIT_MS)
    rig.device.run_all()
    assert same(seen, expected) is right
    rig.close()


# -- 2: gates and events are fresh for each request and segment
# ------------------------------------------------------------


class ReusesGates(SwapIn):
    """One gate for each segment, for all requests."""

    def new_gate(self, segment: int) -> Gate:
        gates: dict[int, Gate] = self.__dict__.setdefault("gates", {})
        return gates.setdefault(segment, Gate())


@pytest.mark.parametrize(("kind", "right"), [(SwapIn, True), (ReusesGates, False)])
def test_the_second_request_waits_for_its_own_copies_and_not_for_those_of_the_first(
    kind: type[SwapIn], right: bool
) -> None:
    rig = SwapRig(swap_in=kind, order=("compute",))
    seen: list[torch.Tensor] = []
    expected: list[torch.Tensor] = []
    for seed in (1, 2):
        transfer, expected, target = rig.begin(3, seed=seed)
        transfer.settle_rest(3)
        assert transfer.wait_finished(WAIT_MS)
        seen = []
        for segment in range(len(SEGMENTS)):
            assert transfer.gates[segment].wait(rig.compute, WAIT_MS) == 3
            rig.read_later(target, segment, seen)
        rig.device.run_all()
        rig.pages.drop(target.pages, [rig.compute.record()])
        rig.device.run_all()
    assert same(seen, expected) is right
    rig.close()


# -- 3: the swap stream waits for the last compute that used the pages
# -----------------------------------------------------


class IgnoresPageUsers(SwapIn):
    def _wait_for_page_users(self, transfer: Transfer) -> None:
        return None


@pytest.mark.parametrize(("kind", "right"), [(SwapIn, True), (IgnoresPageUsers, False)])
def test_pages_are_overwritten_only_after_the_compute_that_still_reads_them(kind: type[SwapIn], right: bool) -> None:
    rig = SwapRig(swap_in=kind, pages=3, order=("copy", "scatter"))
    first, expected, target = rig.begin(3, seed=1)
    first.settle_rest(3)
    seen: list[torch.Tensor] = []
    for segment in range(len(SEGMENTS)):
        first.gates[segment].wait(rig.compute, WAIT_MS)
        rig.read_later(target, segment, seen)
    assert first.wait_finished(WAIT_MS)
    rig.device.hold("compute")
    rig.device.run_all()  # The copies are done, the compute that reads them is slow.
    rig.pages.drop(target.pages, [rig.compute.record()])
    second, _, again = rig.begin(3, seed=2)
    assert {page.index for page in again.pages} == {page.index for page in target.pages}
    second.settle_rest(3)
    assert second.wait_finished(WAIT_MS)
    rig.device.run_all()
    rig.device.release("compute")
    rig.device.run_all()
    assert same(seen, expected) is right
    rig.close()


# -- 4: a staging buffer is written only after the scatter that reads it
# -----------------------------------------------------


class IgnoresStaging(SwapIn):
    def _wait_for_staging(self, slot: int) -> None:
        return None


@pytest.mark.parametrize(("kind", "right"), [(SwapIn, True), (IgnoresStaging, False)])
def test_a_staging_buffer_is_filled_again_only_after_its_scatter(kind: type[SwapIn], right: bool) -> None:
    rig = SwapRig(swap_in=kind, order=("copy", "scatter"))
    transfer, expected, target = rig.begin(4, seed=1)
    transfer.settle_rest(4)
    assert transfer.wait_finished(WAIT_MS)
    rig.device.run_all()
    assert rig.device.ran["copy_in"] == 4 * len(SEGMENTS)
    assert same(rig.now(target, 4), expected) is right
    rig.close()


# -- 5: a piece is scattered only after its copy
# -----------------------------------------------------------------------------


class IgnoresCopies(SwapIn):
    def _wait_for_copy(self, copied: Event) -> None:
        return None


@pytest.mark.parametrize(("kind", "right"), [(SwapIn, True), (IgnoresCopies, False)])
def test_a_piece_is_scattered_only_after_its_copy(kind: type[SwapIn], right: bool) -> None:
    rig = SwapRig(swap_in=kind, order=("scatter", "copy"))
    transfer, expected, target = rig.begin(3, seed=1)
    transfer.settle_rest(3)
    assert transfer.wait_finished(WAIT_MS)
    rig.device.run_all()
    assert same(rig.now(target, 3), expected) is right
    rig.close()


# -- 6: the host region is used again only after the copies out of it
# -----------------------------------------------------


class ReleasesRegionEarly(SwapIn):
    def _region_fences(self) -> Sequence[Event]:
        return ()


@pytest.mark.parametrize(("kind", "right"), [(SwapIn, True), (ReleasesRegionEarly, False)])
def test_a_host_region_is_fetched_into_again_only_after_its_copies(kind: type[SwapIn], right: bool) -> None:
    rig = SwapRig(swap_in=kind)
    transfer, expected, target = rig.begin(3, seed=1)
    transfer.settle_rest(3)
    assert transfer.wait_finished(WAIT_MS)
    early = rig.pool.lease(0)  # The next fetch, while no copy has run yet.
    assert (early is None) is right
    if early is not None:
        rig.fill(early, 3, seed=2)
        early.release()
    rig.device.run_all()
    assert same(rig.now(target, 3), expected) is right
    rig.close()


# -- 7: whoever gets the pages waits for the swap-in that still writes them
# --------------------------------------------------


class DropsPagesWithoutFence(SwapIn):
    def _page_fences(self, transfer: Transfer) -> Sequence[Event]:
        return ()


@pytest.mark.parametrize(("kind", "right"), [(SwapIn, True), (DropsPagesWithoutFence, False)])
def test_pages_of_an_aborted_load_are_computed_into_only_after_its_last_copy(kind: type[SwapIn], right: bool) -> None:
    rig = SwapRig(swap_in=kind, pages=3, order=("compute",))
    transfer, _, target = rig.begin(3, seed=1)
    transfer.settle(0, 3)
    bystander = rig.device.new_stream("bystander")
    assert transfer.gates[0].wait(bystander, WAIT_MS) == 3  # It is under way: its copies are enqueued.
    transfer.abort()
    rig.pages.drop(target.pages)
    transfer.settle_rest(0)
    assert transfer.wait_finished(WAIT_MS)
    again = rig.allocate(3)
    for fence in again.fences:
        rig.compute.wait(fence)
    rows = [page.index for page in again.pages]
    rig.device.compute(lambda: rig.pages.storage[0].index_fill_(0, torch.tensor(rows), 0x5A))
    rig.device.run_all()
    assert bool((rig.pages.storage[0] == 0x5A).all()) is right
    rig.close()
