"""What counts as a buffer, and what is said of everything else."""

from __future__ import annotations

import gc
import mmap
from array import array
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from efs.errors import InvalidArgument
from kvstore.buffers import flat_bytes


@pytest.mark.parametrize(
    "buffer",
    [
        bytearray(12),
        memoryview(bytearray(12)),
        array("I", [0, 0, 0]),
        np.zeros((3, 2), dtype="<u2"),
        np.zeros(3, dtype=">f4"),
        np.zeros(20, dtype=np.uint8)[4:16],
        np.zeros(1, dtype=[("a", "u4"), ("b", "u8")]),
    ],
    ids=["bytearray", "memoryview", "array", "2-D", "big-endian", "sliced", "structured"],
)
def test_a_writable_buffer_is_seen_in_place(buffer: Any) -> None:
    flat = flat_bytes(buffer, "out", writable=True, size=12)
    flat[:] = 7
    assert memoryview(buffer).tobytes() == b"\x07" * 12


def test_an_array_whose_type_has_no_buffer_format_is_seen_in_place() -> None:
    times = np.zeros((2, 2), dtype="M8[s]")
    with pytest.raises(ValueError, match="cannot include dtype"):
        memoryview(times.data)
    flat_bytes(times, "out", writable=True, size=32)[:] = 1
    assert times.tobytes() == b"\x01" * 32


def test_a_map_is_seen_in_place() -> None:
    with mmap.mmap(-1, 4096) as region:
        flat = flat_bytes(region, "out", writable=True, size=4096)
        flat[0] = 9
        assert region[0] == 9
        del flat


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "uint8"])
def test_a_cpu_tensor_is_seen_in_place_and_kept_alive(dtype: str) -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.zeros(3, 4, dtype=getattr(torch, dtype))
    flat = flat_bytes(tensor, "out", writable=True, size=tensor.nbytes)
    flat[:] = 60
    expected = tensor.clone()
    assert bool((expected == tensor).all())
    assert expected.flatten()[0] != 0
    del tensor
    gc.collect()
    assert set(flat.tolist()) == {60}
    assert flat_bytes(torch.zeros(0), "out", writable=True).size == 0


def test_tensors_that_cannot_be_used_are_refused_in_one_line() -> None:
    torch = pytest.importorskip("torch")
    with pytest.raises(InvalidArgument, match=r"^out is not contiguous$"):
        flat_bytes(torch.zeros(4, 4).T, "out")
    with pytest.raises(InvalidArgument, match=r"^out is on device meta, must be in host memory$"):
        flat_bytes(torch.zeros(4, device="meta"), "out")


def test_memory_of_a_cuda_device_is_refused_in_one_line() -> None:
    with pytest.raises(InvalidArgument, match=r"^blocks is in the memory of a CUDA device, must be"):
        flat_bytes(SimpleNamespace(__cuda_array_interface__={}), "blocks")


@pytest.mark.parametrize("buffer", [b"", bytearray(), np.zeros((0, 3)), np.zeros((0, 3), dtype="M8[s]")])
def test_an_empty_buffer_has_no_bytes(buffer: Any) -> None:
    assert flat_bytes(buffer, "blocks", size=0).size == 0


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (bytes(8), "out is read-only, must be writable"),
        (memoryview(bytes(8)), "out is read-only, must be writable"),
        (bytearray(7), "out has 7 bytes, must have 8"),
        (np.zeros(16, dtype=np.uint8)[::2], "out is not contiguous"),
        (np.zeros((2, 4), dtype="M8[s]").T, "out is not contiguous"),
        (memoryview(bytearray(16))[::2], "out is not contiguous"),
        (np.array([None]), "out is an array of Python objects, must hold plain bytes"),
        ("12345678", "out is of type str, must be a buffer, a numpy array or a CPU tensor"),
        ([0] * 8, "out is of type list, must be a buffer, a numpy array or a CPU tensor"),
        (None, "out is of type NoneType, must be a buffer, a numpy array or a CPU tensor"),
    ],
)
def test_what_cannot_be_filled_is_refused_in_one_line(buffer: Any, message: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        flat_bytes(buffer, "out", writable=True, size=8)
    assert str(caught.value) == message
