"""A transformers cache whose memory is pages: what a model's attention sees of the page pool.

One cache a sequence (batch size 1). `update` of a layer writes the new keys and values behind the `length` tokens that
the cache holds and returns all of them, gathered from the pages of the block table into one contiguous tensor per
layer: the model's own attention runs on it unchanged, on any device. The gather reads what is in the pages, loaded or
computed alike, so that warm and cold runs see the same operations on the same bytes.

`length` moves when a pass over all layers has ended (`advance`), not before: a pass that is abandoned leaves it, and
what the pass wrote lies behind it, in pages of this sequence alone, and is overwritten by the next one.

The caller provides pages for every token before it runs a pass, and makes its stream wait for what is loaded into them.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from gdr.errors import InvalidEngineArgument
from gdr.formats import KvFormat
from gdr.pages import Page, PagePool


class PagedLayer(CacheLayerMixin):
    """One layer's keys and values in the pages of the cache that owns it."""

    is_sliding = False
    supports_early_init = False

    def __init__(self, owner: PagedCache, kv: torch.Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._owner = owner
        self._kv = kv
        self.is_initialized = True

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        return None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values (1, heads, new tokens, head size) in; those of all tokens up to here out."""
        start, new = self._owner.length, key_states.shape[2]
        self._write(start, key_states[0], value_states[0])
        both = self._read(start + new)
        return both[0].unsqueeze(0), both[1].unsqueeze(0)

    def _write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        tokens, stop = self._kv.shape[3], start + keys.shape[1]
        position = start
        while position < stop:
            page = self._owner.table[position // tokens].index
            offset = position % tokens
            count = min(tokens - offset, stop - position)
            at = position - start
            self._kv[page, 0, :, offset : offset + count].copy_(keys[:, at : at + count])
            self._kv[page, 1, :, offset : offset + count].copy_(values[:, at : at + count])
            position += count

    def _read(self, length: int) -> torch.Tensor:
        """(2, heads, length, head size). One concatenation: 18 times faster than an indexed gather on a CPU."""
        tokens = self._kv.shape[3]
        parts = [self._kv[page.index] for page in self._owner.table[: -(-length // tokens)]]
        if length % tokens:
            parts[-1] = parts[-1][:, :, : length % tokens]
        return torch.cat(parts, dim=2)

    def get_seq_length(self) -> int:
        return self._owner.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.length + query_length, 0

    def get_max_length(self) -> int:
        return -1


class PagedCache(Cache):
    """The cache of one sequence; `table` is its block table, shared with the owner of the sequence."""

    def __init__(self, pool: PagePool, kv_format: KvFormat, table: list[Page]) -> None:
        self.table = table
        self.length = 0
        self._tokens = kv_format.tokens
        super().__init__(layers=[PagedLayer(self, kv_format.view(storage)) for storage in pool.storage])

    def advance(self, tokens: int) -> None:
        """A pass over all layers has ended: its `tokens` tokens are part of the cache now."""
        if self.length + tokens > len(self.table) * self._tokens:
            raise InvalidEngineArgument(f"{self.length + tokens} tokens do not fit {len(self.table)} pages")
        self.length += tokens

    def rewind(self, length: int) -> None:
        """Hold the first `length` tokens from here on: those of a loaded prefix, or none."""
        self.length = length
