"""The device seam on the CPU, and the parts of the CUDA device that need no CUDA."""

from __future__ import annotations

import random

import pytest
import torch

from gdr.cuda import CudaDevice, as_words, loaded_runtime
from gdr.device import CpuDevice, Rows, device_for, gather_by_copies, of_type, scatter_by_copies
from gdr.errors import DeviceError, InvalidEngineArgument
from tests.support.clock import FakeClock
from tests.support.fakedevice import FakeDevice


def test_a_scatter_and_a_gather_are_each_others_inverse_and_equal_an_indexed_copy() -> None:
    rng = random.Random(7)
    for payload, stride in ((96, 96), (96, 128), (1, 5)):
        pages = torch.randint(0, 256, (40, stride), dtype=torch.uint8)
        before = pages.clone()
        rows = Rows(tuple(rng.sample(range(40), 17)))
        source = torch.randint(0, 256, (17, payload), dtype=torch.uint8)
        expected = before.clone()
        expected[list(rows.numbers), :payload] = source
        scatter_by_copies(pages, rows, source)
        assert torch.equal(pages, expected)
        back = torch.zeros_like(source)
        gather_by_copies(back, pages, rows)
        assert torch.equal(back, source)


def test_rows_are_sliced_with_their_tensor() -> None:
    rows = Rows((5, 6, 9, 1), torch.tensor([5, 6, 9, 1]))
    part = rows.slice(1, 3)
    assert part.numbers == (6, 9)
    assert part.on_device is not None
    assert part.on_device.tolist() == [6, 9]


def test_elapsed_time_on_the_cpu_is_the_clocks() -> None:
    clock = FakeClock()
    device = CpuDevice(clock=clock)
    stream = device.compute_stream()
    start = stream.record()
    clock.advance(0.25)
    assert device.elapsed_ms(start, stream.record()) == pytest.approx(250)


def test_events_of_another_device_are_refused() -> None:
    with pytest.raises(InvalidEngineArgument, match="belongs to another device"):
        CpuDevice().elapsed_ms(FakeDevice().unrecorded_event(), CpuDevice().compute_stream().record())
    assert of_type(3, int) == 3


def test_the_device_is_that_of_the_weights() -> None:
    assert device_for(torch.device("cpu")).name == "cpu"
    with pytest.raises(InvalidEngineArgument, match="no swap-in for device meta"):
        device_for(torch.device("meta"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_cuda_the_cuda_device_says_so() -> None:
    with pytest.raises(DeviceError, match="there is no CUDA device"):
        CudaDevice()
    assert loaded_runtime() is None


@pytest.mark.parametrize(
    ("payload", "stride", "offset", "dtype"),
    [(96, 128, 0, torch.int64), (96, 100, 0, torch.int32), (98, 98, 0, torch.int16), (97, 128, 0, torch.uint8),
     (96, 128, 4, torch.int32), (96, 128, 1, torch.uint8)],
)
def test_rows_are_moved_as_the_widest_words_that_sizes_strides_and_addresses_allow(
    payload: int, stride: int, offset: int, dtype: torch.dtype
) -> None:
    pages = torch.zeros(4, stride, dtype=torch.uint8)[:, :payload]
    dense = torch.arange(3 * payload + offset, dtype=torch.uint8)[offset:].view(3, payload)
    wide_pages, wide_dense = as_words(pages, dense)
    assert wide_pages.dtype == wide_dense.dtype == dtype
    assert wide_pages.data_ptr() == pages.data_ptr()
    wide_pages.index_copy_(0, torch.tensor([2, 0, 3]), wide_dense)
    assert torch.equal(pages[[2, 0, 3]], dense)
    assert int(pages[1].sum()) == 0


def test_the_fake_device_runs_a_wait_for_an_unrecorded_event_as_no_wait_and_a_recorded_one_as_a_wait() -> None:
    device = FakeDevice(order=("late",), deferred_compute=True)
    early, late = device.new_stream("early"), device.new_stream("late")
    done: list[str] = []
    unrecorded = device.unrecorded_event()
    late.wait(unrecorded)
    device._put("compute", late, lambda: done.append("late without"))
    device._put("compute", early, lambda: done.append("early"))
    device.record_into(unrecorded, early)
    late.wait(unrecorded)
    device._put("compute", late, lambda: done.append("late with"))
    device.run_all()
    assert done == ["late without", "early", "late with"]


def test_the_fake_device_keeps_held_streams_and_those_that_wait_for_them() -> None:
    device = FakeDevice(deferred_compute=True)
    one, two = device.new_stream("one"), device.new_stream("two")
    device.hold("two")
    device._put("compute", two, lambda: None)
    one.wait(two.record())
    device.run_all()
    assert device.pending() == 3
    device.release("two")
    device.run_all()
    assert device.pending() == 0
