"""The pages of an engine's KV cache as rows of bytes, and their way to and from the store's buffers.

An engine's cache of a layer is a tensor whose first dimension counts pages. A page must be one dense stretch of
memory (in whatever order its inner dimensions lie); then it is a row of a (pages, bytes) matrix of bytes, with the
distance of the engine's choice between rows. `layer_rows` makes that matrix without a copy and says how the bytes of
a row are to be read: the sizes of the inner dimensions as they lie in memory, named by their position in the tensor.
That text is part of the layout's format, so pages of another order, or of another size, are another layout with other
keys.

A block of a group is the row of its page in every layer of the group, in the order of the layers. Where those rows
stand side by side in memory, the whole block is one row, and the layout has one segment; blocks then come straight
into the pages where neighbouring pages touch. Else each layer is a segment and blocks go through a buffer.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from efs.errors import InvalidArgument
from kvstore.layout import BlockLayout, Segment

FORMAT: Final = "paged"


@dataclass(frozen=True, slots=True)
class LayerRows:
    """rows: (pages, page bytes) uint8, rows dense, on the cache's device. order: how a row is to be read."""

    name: str
    rows: torch.Tensor
    order: str
    dtype: str


def layer_rows(name: str, cache: torch.Tensor, pages: int) -> LayerRows:
    """A layer's cache as rows. InvalidArgument when a page is not one dense stretch of memory."""
    if cache.shape[0] != pages:
        # An attention kernel with smaller blocks than the engine's: several of them are a page.
        if cache.shape[0] % pages:
            raise InvalidArgument(f"the cache of {name} has {cache.shape[0]} blocks, no multiple of {pages} pages")
        cache = cache.view(pages, -1, *cache.shape[1:])
    inner = [(cache.stride(at), at, cache.shape[at]) for at in range(1, cache.dim()) if cache.shape[at] > 1]
    inner.sort(reverse=True)
    expected = 1
    for stride, _, size in reversed(inner):
        if stride != expected:
            raise InvalidArgument(f"pages of {name} have gaps: shape {tuple(cache.shape)}, strides {cache.stride()}")
        expected *= size
    page_bytes = expected * cache.element_size()
    if pages > 1 and cache.stride(0) * cache.element_size() < page_bytes:
        raise InvalidArgument(f"pages of {name} overlap: shape {tuple(cache.shape)}, strides {cache.stride()}")
    memory = torch.empty(0, dtype=torch.uint8, device=cache.device).set_(cache.untyped_storage())
    rows = torch.as_strided(memory, (pages, page_bytes), (cache.stride(0) * cache.element_size(), 1),
                            cache.storage_offset() * cache.element_size())
    order = ",".join(f"{at}:{size}" for _, at, size in inner)
    return LayerRows(name, rows, order, str(cache.dtype).removeprefix("torch."))


class GroupPages:
    """Pages of the layers of one KV group. Loads of different sequences may run at once: their pages differ."""

    def __init__(self, layers: Sequence[LayerRows], block_tokens: int, kind: str) -> None:
        """kind: what the engine calls these caches; part of the layout."""
        orders = {(layer.order, layer.dtype) for layer in layers}
        text = ";".join(f"{order}/{dtype}" for order, dtype in sorted(orders))
        if len(orders) > 1:
            text += "|" + ";".join(layer.order for layer in layers)
        dtype = "+".join(sorted({layer.dtype for layer in layers}))
        whole = _side_by_side(layers)
        if whole is not None:
            self._rows = [whole]
            segments = [Segment("+".join(layer.name for layer in layers), whole.shape[1])]
        else:
            self._rows = [layer.rows for layer in layers]
            segments = [Segment(layer.name, layer.rows.shape[1]) for layer in layers]
        self.layout = BlockLayout(f"{FORMAT}/{kind}/{text}", dtype, block_tokens, tuple(segments), name=kind)

    def direct(self, pages: Sequence[int]) -> NDArray[np.uint8] | None:
        """The memory of these pages as one flat buffer in block order; None where it is none, or not the host's."""
        rows = self._rows[0]
        if len(self._rows) > 1 or rows.device.type != "cpu" or rows.stride(0) != rows.shape[1]:
            return None
        if any(page != pages[0] + at for at, page in enumerate(pages)):
            return None
        flat: NDArray[np.uint8] = rows[pages[0] : pages[0] + len(pages)].reshape(-1).numpy()
        return flat

    def gather(self, pages: Sequence[int]) -> NDArray[np.uint8]:
        """Copy of pages, block-major, in memory of its own. Ordered after what the current stream has computed."""
        out = np.empty((len(pages), self.layout.block_bytes), np.uint8)
        target = torch.from_numpy(out)
        offset = 0
        # Engines allocate their caches in inference mode; elsewhere such tensors must not be written.
        with torch.inference_mode():
            for rows in self._rows:
                size = rows.shape[1]
                for at, first, count in _stretches(pages):
                    target[at : at + count, offset : offset + size].copy_(rows[first : first + count])
                offset += size
        return out.reshape(-1)

    def scatter(self, pages: Sequence[int], buffer: NDArray[np.uint8]) -> None:
        """Fill pages from a segment-major buffer of as many blocks; the copies have ended when it returns."""
        with torch.inference_mode():
            for segment, rows in enumerate(self._rows):
                source = torch.from_numpy(self.layout.segment_view(buffer, segment))
                for at, first, count in _stretches(pages):
                    rows[first : first + count].copy_(source[at : at + count])
        if self._rows[0].device.type != "cpu":
            torch.cuda.synchronize(self._rows[0].device)


def group_pages(caches: Mapping[str, Any], layers: Sequence[str], *, pages: int, block_tokens: int,
                kind: str) -> GroupPages:
    """The pages of the named layers. InvalidArgument names a layer that has none, or none that can be used."""
    rows = []
    for name in layers:
        cache = caches.get(name)
        if not isinstance(cache, torch.Tensor):
            raise InvalidArgument(f"layer {name} has no cache that is one tensor")
        rows.append(layer_rows(name, cache, pages))
    return GroupPages(rows, block_tokens, kind)


def _side_by_side(layers: Sequence[LayerRows]) -> torch.Tensor | None:
    """All layers' rows as one matrix, where each layer's row begins where the one before it ends."""
    first = layers[0].rows
    end = first.data_ptr()
    for layer in layers:
        if layer.rows.data_ptr() != end or layer.rows.stride(0) != first.stride(0):
            return None
        end += layer.rows.shape[1]
    width = end - first.data_ptr()
    if first.shape[0] > 1 and width > first.stride(0):
        return None
    memory = torch.empty(0, dtype=torch.uint8, device=first.device).set_(first.untyped_storage())
    return torch.as_strided(memory, (first.shape[0], width), (first.stride(0), 1), first.storage_offset())


def _stretches(pages: Sequence[int]) -> list[tuple[int, int, int]]:
    """(position, first page, count) of each stretch of pages that follow one another."""
    found: list[tuple[int, int, int]] = []
    for at, page in enumerate(pages):
        if found and found[-1][1] + found[-1][2] == page:
            found[-1] = (found[-1][0], found[-1][1], found[-1][2] + 1)
        else:
            found.append((at, page, 1))
    return found
