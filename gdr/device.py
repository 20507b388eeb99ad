"""One seam for CUDA and CPU: streams, events, copies, page locks. Everything else here is written against it.

Memory. *Host* memory is a flat uint8 tensor over a region of `gdr.pinned`. *Device* memory is a uint8 tensor on
`torch_device`. On the CPU both are the same memory.

Order. Operations on one stream run in the order of the calls; between streams only events order them. `record` always
makes a *fresh* event, so a never-recorded event cannot be waited on by mistake (on CUDA such a wait is a no-op and
orders nothing), and an event never means an earlier request. A call returns when the operation is enqueued: sources
and targets of a copy belong to the device until an event recorded after it is done. On the CPU device every operation
is finished when its call returns, in the calling thread; an event is done at once.

`staged` says how a swap-in should go: True, through staging buffers on the device (large copies, then a scatter);
False, straight from host memory into the pages, because the device reads host memory at full speed.

`scatter` and `gather` move payloads between rows of a page tensor (pages, stride) and a dense tensor (count, payload):
row `rows[i]` of the pages and row i of the dense tensor; the bytes of a page behind the payload are not touched.
`Rows` are page numbers prepared once for a device by `rows()`.

Errors are DeviceError, raised by the call. `elapsed_ms` needs events recorded with timed=True that are done.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol, TypeVar

import torch

from efs.clock import Clock, SystemClock
from gdr.errors import InvalidEngineArgument


class Event(Protocol):
    """A point in a stream that was recorded."""

    def done(self) -> bool:
        """Whether everything before it in its stream has run; never blocks."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until `done`."""
        ...


class Stream(Protocol):
    """A queue of device operations."""

    def record(self, *, timed: bool = False) -> Event:
        """A fresh event behind everything enqueued so far."""
        ...

    def wait(self, event: Event) -> None:
        """Whatever is enqueued after this call runs after `event`. Does not block the calling thread on CUDA."""
        ...

    def synchronize(self) -> None:
        """Block the calling thread until the stream is empty."""
        ...

    def activate(self) -> AbstractContextManager[object]:
        """While entered, torch operations of the calling thread go to this stream."""
        ...


@dataclass(frozen=True, slots=True)
class Rows:
    """Page numbers, in order; `on_device` is the same as an int64 tensor where the device indexes with one."""

    numbers: tuple[int, ...]
    on_device: torch.Tensor | None = None

    def slice(self, start: int, stop: int) -> Rows:
        part = None if self.on_device is None else self.on_device[start:stop]
        return Rows(self.numbers[start:stop], part)


class Device(Protocol):
    """What a swap-in needs of a machine."""

    @property
    def name(self) -> str: ...

    @property
    def torch_device(self) -> torch.device: ...

    @property
    def staged(self) -> bool: ...

    def compute_stream(self) -> Stream:
        """The stream that the calling thread's torch operations go to."""
        ...

    def new_stream(self, name: str) -> Stream: ...

    def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        """Zeroed uint8 device memory."""
        ...

    def integers(self, numbers: Sequence[int], stream: Stream) -> torch.Tensor:
        """int64 (count,) for use on `stream`; does not block the calling thread behind what is enqueued there."""
        ...

    def rows(self, numbers: Sequence[int], stream: Stream) -> Rows:
        """Page numbers for use by scatter and gather on `stream`."""
        ...

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Host to device, both contiguous and of one size."""
        ...

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        """Device to host, both contiguous and of one size."""
        ...

    def scatter(self, pages: torch.Tensor, rows: Rows, source: torch.Tensor, stream: Stream) -> None: ...

    def gather(self, target: torch.Tensor, pages: torch.Tensor, rows: Rows, stream: Stream) -> None: ...

    def register(self, address: int, size: int) -> None:
        """Page-lock host memory for this device, where that exists; DeviceError when it is refused."""
        ...

    def unregister(self, address: int) -> None:
        """Undo `register`; must come before the memory is unmapped."""
        ...

    def elapsed_ms(self, start: Event, stop: Event) -> float: ...


def consecutive(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Ranges [start, stop) of positions in which the numbers go up by one: such rows are one strided copy."""
    start = 0
    for position in range(1, len(numbers) + 1):
        if position == len(numbers) or numbers[position] != numbers[position - 1] + 1:
            yield start, position
            start = position


class CpuEvent:
    """Done when it was made; remembers the time."""

    __slots__ = ("__weakref__", "at")

    def __init__(self, at: float) -> None:
        self.at = at

    def done(self) -> bool:
        return True

    def synchronize(self) -> None:
        return None


class CpuStream:
    """Operations run in the calling thread, so the order between streams is the order of the calls."""

    __slots__ = ("_clock",)

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def record(self, *, timed: bool = False) -> Event:
        return CpuEvent(self._clock.monotonic())

    def wait(self, event: Event) -> None:
        return None

    def synchronize(self) -> None:
        return None

    def activate(self) -> AbstractContextManager[object]:
        return nullcontext()


class CpuDevice:
    """Host memory as the device. staged=True takes the way of a GPU, for tests and comparison."""

    torch_device = torch.device("cpu")
    name = "cpu"

    def __init__(self, *, staged: bool = False, clock: Clock | None = None) -> None:
        self.staged = staged
        self._clock = clock or SystemClock()

    def compute_stream(self) -> Stream:
        return CpuStream(self._clock)

    def new_stream(self, name: str) -> Stream:
        return CpuStream(self._clock)

    def allocate(self, shape: Sequence[int]) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=torch.uint8)

    def integers(self, numbers: Sequence[int], stream: Stream) -> torch.Tensor:
        return torch.tensor(list(numbers), dtype=torch.int64)

    def rows(self, numbers: Sequence[int], stream: Stream) -> Rows:
        return Rows(tuple(numbers))

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.numpy()[...] = source.numpy()

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        target.numpy()[...] = source.numpy()

    def scatter(self, pages: torch.Tensor, rows: Rows, source: torch.Tensor, stream: Stream) -> None:
        scatter_by_copies(pages, rows, source)

    def gather(self, target: torch.Tensor, pages: torch.Tensor, rows: Rows, stream: Stream) -> None:
        gather_by_copies(target, pages, rows)

    def register(self, address: int, size: int) -> None:
        return None

    def unregister(self, address: int) -> None:
        return None

    def elapsed_ms(self, start: Event, stop: Event) -> float:
        return (of_type(stop, CpuEvent).at - of_type(start, CpuEvent).at) * 1000


def scatter_by_copies(pages: torch.Tensor, rows: Rows, source: torch.Tensor) -> None:
    """Dense rows into pages, one copy for each run of consecutive pages: 4 to 10 times faster on a CPU than an index.

    The copies are numpy's, in the calling thread and without the interpreter lock. torch's would share each out to a
    team of threads, which the forward pass needs, and on a busy machine takes ten times as long.
    """
    target, dense = pages.numpy(), source.numpy()
    for start, stop in consecutive(rows.numbers):
        first = rows.numbers[start]
        target[first : first + stop - start, : dense.shape[1]] = dense[start:stop]


def gather_by_copies(target: torch.Tensor, pages: torch.Tensor, rows: Rows) -> None:
    """Pages into dense rows, the way back of `scatter_by_copies`."""
    dense, source = target.numpy(), pages.numpy()
    for start, stop in consecutive(rows.numbers):
        first = rows.numbers[start]
        dense[start:stop] = source[first : first + stop - start, : dense.shape[1]]


Kind = TypeVar("Kind")


def of_type(value: object, kind: type[Kind]) -> Kind:
    """The value, known to be of the device's own type; mixing devices is refused."""
    if not isinstance(value, kind):
        raise InvalidEngineArgument(f"{type(value).__name__} belongs to another device, expected {kind.__name__}")
    return value


def device_for(torch_device: torch.device) -> Device:
    """The device on which a model's weights are: CUDA or CPU."""
    if torch_device.type == "cpu":
        return CpuDevice()
    if torch_device.type == "cuda":
        from gdr.cuda import CudaDevice

        return CudaDevice(torch_device)
    raise InvalidEngineArgument(f"no swap-in for device {torch_device}, must be cpu or cuda")
