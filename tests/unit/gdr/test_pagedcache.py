"""The paged cache: both ways to gather, growth over pages, and what a pass leaves when it is abandoned."""

from __future__ import annotations

import random

import pytest
import torch

from gdr.device import CpuDevice
from gdr.errors import InvalidEngineArgument
from gdr.formats import KvFormat
from gdr.pagedcache import PagedCache, concatenated, indexed
from gdr.pages import PagePool
from kvstore.layout import BlockLayout

FORMAT = KvFormat(layers=2, heads=2, head_size=4, tokens=8, dtype=torch.float32)


def make_cache(pages: int, align_bytes: int = 1) -> tuple[PagePool, PagedCache]:
    pool = PagePool(CpuDevice(), (FORMAT.layer_bytes,) * FORMAT.layers, 16, align_bytes=align_bytes)
    everything = pool.allocate(16)
    assert everything is not None
    table = list(everything.pages)
    random.Random(3).shuffle(table)
    return pool, PagedCache(CpuDevice(), pool, FORMAT, table[:pages])


def new_kv(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (1, FORMAT.heads, tokens, FORMAT.head_size)
    return torch.randn(shape), torch.randn(shape)


@pytest.mark.parametrize("length", [1, 7, 8, 9, 24, 30])
def test_an_index_gathers_what_a_concatenation_gathers(length: int) -> None:
    kv = torch.randn(16, 2, FORMAT.heads, FORMAT.tokens, FORMAT.head_size)
    pages = [11, 3, 4, 15][: -(-length // FORMAT.tokens)]
    joined = concatenated(kv, pages, length)
    assert joined.shape == (2, FORMAT.heads, length, FORMAT.head_size)
    assert joined.is_contiguous()
    assert torch.equal(joined, indexed(kv, torch.tensor(pages), length))


@pytest.mark.parametrize("align_bytes", [1, 96])
def test_tokens_written_in_any_steps_come_back_in_order(align_bytes: int) -> None:
    _, cache = make_cache(5, align_bytes)
    rng = random.Random(1)
    seen: list[list[torch.Tensor]] = [[], []]
    while cache.length < 38:
        step = min(rng.choice([1, 3, 8, 13]), 38 - cache.length)
        for layer in range(FORMAT.layers):
            keys, values = new_kv(step)
            seen[layer].append(torch.stack([keys[0], values[0]]))
            got_keys, got_values = cache.update(keys, values, layer)
            expected = torch.cat(seen[layer], dim=2)
            assert torch.equal(torch.stack([got_keys[0], got_values[0]]), expected)
        cache.advance(step)
    assert cache.get_seq_length() == 38
    assert cache.get_mask_sizes(4, 0) == (42, 0)
    with pytest.raises(InvalidEngineArgument, match="41 tokens do not fit 5 pages"):
        cache.advance(3)


def test_a_pass_that_is_abandoned_is_overwritten_by_the_next() -> None:
    _, cache = make_cache(2)
    kept = new_kv(8)
    for layer in range(FORMAT.layers):
        cache.update(*kept, layer)
    cache.advance(8)
    cache.update(*new_kv(5), 0)  # Layer 1 is never reached.
    assert cache.get_seq_length() == 8
    cache.rewind(0)
    again = new_kv(8)
    for layer in range(FORMAT.layers):
        keys, values = cache.update(*again, layer)
        assert torch.equal(keys, again[0])
        assert torch.equal(values, again[1])


def test_a_layout_of_another_maker_or_of_wrong_sizes_is_refused() -> None:
    assert KvFormat.of(BlockLayout.per_layer(
        [FORMAT.layer_bytes] * 2, format="transformers-kv/2x4", dtype="float32", block_tokens=8)) == FORMAT
    for layout in (
        BlockLayout.opaque(512),
        BlockLayout.per_layer([512], format="transformers-kv/2xy", dtype="float32", block_tokens=8),
        BlockLayout.per_layer([512], format="transformers-kv/2x4", dtype="float31", block_tokens=8),
        BlockLayout.per_layer([512, 511], format="transformers-kv/2x4", dtype="float32", block_tokens=8),
    ):
        with pytest.raises(InvalidEngineArgument, match="layout "):
            KvFormat.of(layout)
