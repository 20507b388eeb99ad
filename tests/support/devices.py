"""The device that the engine's scenarios run on: the fake one for a model on the CPU, a real one on a GPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from transformers import PreTrainedModel

from gdr.cuda import CudaDevice
from gdr.device import Rows, Stream
from gdr.errors import DeviceError
from tests.support.fakedevice import FakeDevice


class RefusingCudaDevice(CudaDevice):
    """A CUDA device that refuses numbered calls, as the fake device does."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self._refuse: dict[str, Collection[int]] = {}

    def refuse(self, kind: str, numbers: Collection[int]) -> None:
        self._refuse[kind] = frozenset(numbers)

    def copy_in(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._count("copy_in")
        super().copy_in(target, source, stream)

    def copy_out(self, target: torch.Tensor, source: torch.Tensor, stream: Stream) -> None:
        self._count("copy_out")
        super().copy_out(target, source, stream)

    def scatter(self, pages: torch.Tensor, rows: Rows, source: torch.Tensor, stream: Stream) -> None:
        self._count("scatter")
        super().scatter(pages, rows, source, stream)

    def gather(self, target: torch.Tensor, pages: torch.Tensor, rows: Rows, stream: Stream) -> None:
        self._count("gather")
        super().gather(target, pages, rows, stream)

    def rows(self, numbers: Sequence[int], stream: Stream) -> Rows:
        self._count("rows")
        return super().rows(numbers, stream)

    def _count(self, kind: str) -> None:
        number = self.calls[kind]
        self.calls[kind] += 1
        if number in self._refuse.get(kind, ()):
            self.refused[kind] += 1
            raise DeviceError(f"{self.name}: {kind} number {number} refused on purpose")


def suite_device(model: PreTrainedModel) -> FakeDevice | RefusingCudaDevice:
    """A new device for a test with this model."""
    return RefusingCudaDevice() if model.device.type == "cuda" else FakeDevice()
