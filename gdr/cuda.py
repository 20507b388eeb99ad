"""The CUDA device behind the seam of `gdr.device`, on torch's streams and events.

- Every stream of `new_stream` is its own non-blocking CUDA stream; `compute_stream` is torch's current stream of the
  calling thread. Both are bound to one device index, so any thread may use them without `set_device`.
- Copies are `Tensor.copy_(non_blocking=True)` under the stream: one cudaMemcpyAsync for contiguous tensors. It is
  asynchronous only for page-locked host memory; the caller keeps the source unchanged until an event behind it is done.
- Tensors that live on several streams (staging, pages) are allocated once and freed after a synchronisation, so the
  caching allocator never hands out their memory early. Index tensors are made and used on one stream.
- Page locks are cudaHostRegister through torch's own runtime binding, return code checked. A refused registration
  leaves the error in the runtime's thread-local state, where torch would find it at its next kernel start, so it is
  taken out with cudaGetLastError of the runtime library that is already loaded.
- Scatter and gather index whole rows as the widest integers that payload, stride and address allow: a byte at a time
  would keep the memory system at a fraction of its speed.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Final

import torch

from gdr.device import Event, Rows, Stream, of_type
from gdr.errors import DeviceError

REGISTER_PORTABLE: Final = 1
"""cudaHostRegisterPortable: page-locked for every context of the process."""
_CUDA: Final[Any] = torch.cuda
"""For the functions that torch has not typed."""
_WORDS: Final = ((8, torch.int64), (4, torch.int32), (2, torch.int16))


class CudaEvent:
    """A torch event that was recorded."""

    __slots__ = ("__weakref__", "event")

    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def synchronize(self) -> None:
        self.event.synchronize()


class CudaStream:
    """A torch stream."""

    __slots__ = ("stream",)

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def record(self, *, timed: bool = False) -> Event:
        event = _CUDA.Event(enable_timing=timed)
        event.record(self.stream)
        return CudaEvent(event)

    def wait(self, event: Event) -> None:
        self.stream.wait_event(of_type(event, CudaEvent).event)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def activate(self) -> AbstractContextManager[object]:
        return torch.cuda.stream(self.stream)


class CudaDevice:
    """One CUDA device. DeviceError when there is none."""

    staged = True

    def __init__(self, torch_device: torch.device | None = None) -> None:
        if not torch.cuda.is_available():
            raise DeviceError("there is no CUDA device")
        index = torch_device.index if torch_device is not None and torch_device.index is not None else None
        self.torch_device = torch.device("cuda", torch.cuda.current_device() if index is None else index)
        self.name = f"cuda:{self.torch_device.index}"

    def compute_stream(self) -> Stream:
        return CudaStream(torch.cuda.current_stream(self.torch_device))

    def new_stream(self, name: str) -> Stream:
        return CudaStream(_CUDA.Stream(self.torch_device))

    def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        made = torch.zeros(tuple(shape), dtype=torch.uint8, device=self.torch_device)
        # The zeros are written on the current stream; other streams must not overtake them.
        torch.cuda.current_stream(self.torch_device).synchronize()
        return made

    def integers(self, numbers: Sequence[int], stream: Stream) -> torch.Tensor:
        # From pageable memory torch would wait for the stream, and with it for whatever slow kernel stands in it.
        with stream.activate():
            pinned = torch.tensor(list(numbers), dtype=torch.int64).pin_memory()
            return pinned.to(self.torch_device, non_blocking=True)

    def rows(self, numbers: Sequence[int], stream: Stream) -> Rows:
        return Rows(tuple(numbers), self.integers(numbers, stream))

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._copy(target, source, stream)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._copy(target, source, stream)

    def _copy(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        try:
            with stream.activate():
                target.copy_(source, non_blocking=True)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: copy of {source.nbytes} bytes refused: {_first_line(error)}") from error

    def scatter(self, pages: torch.Tensor, rows: Rows, source: torch.Tensor, stream: Stream) -> None:
        wide_pages, wide_source = as_words(pages[:, : source.shape[1]], source)
        try:
            with stream.activate():
                wide_pages.index_copy_(0, _index(rows), wide_source)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: scatter of {source.nbytes} bytes refused: {_first_line(error)}") from error

    def gather(self, target: torch.Tensor, pages: torch.Tensor, rows: Rows, stream: Stream) -> None:
        wide_pages, wide_target = as_words(pages[:, : target.shape[1]], target)
        try:
            with stream.activate():
                torch.index_select(wide_pages, 0, _index(rows), out=wide_target)
        except RuntimeError as error:
            raise DeviceError(f"{self.name}: gather of {target.nbytes} bytes refused: {_first_line(error)}") from error

    def register(self, address: int, size: int) -> None:
        with torch.cuda.device(self.torch_device):
            code = int(_CUDA.cudart().cudaHostRegister(address, size, REGISTER_PORTABLE))
        if code != 0:
            _forget_last_error()
            raise DeviceError(f"{self.name}: cudaHostRegister of {size} bytes refused: {_error_name(code)}")

    def unregister(self, address: int) -> None:
        with torch.cuda.device(self.torch_device):
            code = int(_CUDA.cudart().cudaHostUnregister(address))
        if code != 0:
            _forget_last_error()
            raise DeviceError(f"{self.name}: cudaHostUnregister refused: {_error_name(code)}")

    def elapsed_ms(self, start: Event, stop: Event) -> float:
        return float(of_type(start, CudaEvent).event.elapsed_time(of_type(stop, CudaEvent).event))


def as_words(pages: torch.Tensor, dense: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same bytes of both tensors as the widest integers that sizes, strides and addresses of both allow."""
    measures = [pages.shape[1], pages.stride(0), dense.stride(0), pages.data_ptr(), dense.data_ptr()]
    for width, dtype in _WORDS:
        if all(measure % width == 0 for measure in measures):
            return pages.view(dtype), dense.view(dtype)
    return pages, dense


def _index(rows: Rows) -> torch.Tensor:
    if rows.on_device is None:
        raise DeviceError("rows were prepared for another device")
    return rows.on_device


def _first_line(error: BaseException) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _error_name(code: int) -> str:
    runtime = _CUDA.cudart()
    return f"{runtime.cudaGetErrorString(runtime.cudaError(code))} ({code})"


def loaded_runtime() -> ctypes.CDLL | None:
    """The CUDA runtime library that torch has loaded into this process; None when it is not a library of its own."""
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        for line in maps:
            path = line.rstrip("\n").partition("/")[2]
            if path.rpartition("/")[2].startswith("libcudart"):
                return ctypes.CDLL("/" + path)
    return None


def _forget_last_error() -> None:
    runtime = loaded_runtime()
    if runtime is not None:
        runtime.cudaGetLastError()
