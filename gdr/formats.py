"""How a page's bytes are the keys and values of a layer. Today: the blocks of `kvstore.connectors.transformers`.

Segment i is layer i: (2, heads, tokens, head size) in row order and in the model's dtype, keys before values.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from gdr.errors import InvalidEngineArgument
from kvstore.connectors.transformers import FORMAT
from kvstore.layout import BlockLayout


@dataclass(frozen=True, slots=True)
class KvFormat:
    """Shape and type of one layer's part of a block."""

    layers: int
    heads: int
    head_size: int
    tokens: int
    dtype: torch.dtype

    @classmethod
    def of(cls, layout: BlockLayout) -> KvFormat:
        """InvalidEngineArgument for a layout that is not made by `kvstore.connectors.transformers.layout_of`."""
        kind, _, sizes = layout.format.partition("/")
        dtype = getattr(torch, layout.dtype, None)
        heads, _, head_size = sizes.partition("x")
        if kind != FORMAT or not isinstance(dtype, torch.dtype) or not (heads.isdigit() and head_size.isdigit()):
            raise InvalidEngineArgument(f"layout {layout.format} of {layout.dtype} is no layout of {FORMAT}")
        made = cls(len(layout.segments), int(heads), int(head_size), layout.block_tokens, dtype)
        if any(segment.bytes != made.layer_bytes for segment in layout.segments):
            raise InvalidEngineArgument(f"layout {layout.format}: a segment is not {made.layer_bytes} bytes")
        return made

    @property
    def layer_bytes(self) -> int:
        return 2 * self.heads * self.tokens * self.head_size * self.dtype.itemsize

    def segment_of(self, layer: int) -> int:
        """The segment that a layer reads: it must be in its pages before the layer runs."""
        return layer

    def view(self, storage: torch.Tensor) -> torch.Tensor:
        """(pages, stride) uint8 as (pages, 2, heads, tokens, head size) of the model's dtype, the same memory."""
        payload = storage[:, : self.layer_bytes].view(self.dtype)
        return payload.view(-1, 2, self.heads, self.tokens, self.head_size)
