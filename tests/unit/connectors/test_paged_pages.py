"""Pages of an engine's cache as bytes, in all the orders in which engines lay them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch

from efs.errors import InvalidArgument
from kvstore.connectors.paged.pages import GroupPages, group_pages

pytestmark = pytest.mark.engines

PAGES, HEADS, TOKENS, SIZE = 7, 2, 16, 8
SHAPE = (PAGES, HEADS, TOKENS, SIZE)
ITEMS = PAGES * HEADS * TOKENS * SIZE


def filled(seed: int) -> torch.Tensor:
    """A cache whose pages are dense, heads outermost."""
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def grouped(caches: dict[str, torch.Tensor], pages: int = PAGES) -> GroupPages:
    return group_pages(caches, list(caches), pages=pages, block_tokens=TOKENS, kind="test")


def bytes_of(tensor: torch.Tensor) -> np.ndarray[Any, np.dtype[np.uint8]]:
    flat: np.ndarray[Any, np.dtype[np.uint8]] = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return flat


def side_by_side() -> dict[str, torch.Tensor]:
    """Two layers whose pages alternate in one allocation."""
    both = torch.randn((PAGES, 2, HEADS, TOKENS, SIZE), generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    return {"a": both[:, 0], "b": both[:, 1]}


def test_a_block_is_the_pages_of_all_layers_in_order() -> None:
    caches = {"a": filled(1), "b": filled(2)}
    group = grouped(caches)
    assert [segment.name for segment in group.layout.segments] == ["a", "b"]
    assert group.layout.block_bytes == 2 * HEADS * TOKENS * SIZE * 2

    got = group.gather([3, 4, 1]).reshape(3, -1)

    for row, page in zip(got, (3, 4, 1), strict=True):
        expected = np.concatenate([bytes_of(caches["a"][page]), bytes_of(caches["b"][page])])
        np.testing.assert_array_equal(row, expected)


@pytest.mark.parametrize("caches", [{"a": filled(1), "b": filled(2)}, side_by_side(), {"a": filled(4)}])
def test_what_was_gathered_is_scattered_to_other_pages(caches: dict[str, torch.Tensor]) -> None:
    group = grouped(caches)
    before = {name: cache.clone() for name, cache in caches.items()}
    buffer = group.layout.to_segments(group.gather([1, 2, 5]))

    group.scatter([6, 3, 4], buffer)

    for name, cache in caches.items():
        for source, target in ((1, 6), (2, 3), (5, 4)):
            assert torch.equal(cache[target], before[name][source])
        for untouched in (0, 1, 2, 5):
            assert torch.equal(cache[untouched], before[name][untouched])


def test_layers_side_by_side_are_one_segment_and_filled_in_place() -> None:
    group = grouped(side_by_side())
    assert len(group.layout.segments) == 1
    memory = group.direct([2, 3, 4])
    assert memory is not None
    np.testing.assert_array_equal(memory, group.gather([2, 3, 4]))
    memory[:] = 7
    assert (group.gather([2, 3, 4]) == 7).all()
    assert group.direct([2, 4]) is None


def test_layers_in_allocations_of_their_own_cannot_be_filled_in_place() -> None:
    assert grouped({"a": filled(1), "b": filled(2)}).direct([1, 2]) is None


def test_another_order_inside_a_page_is_another_layout() -> None:
    tokens_first = torch.empty((PAGES, TOKENS, HEADS, SIZE), dtype=torch.bfloat16).transpose(1, 2)
    assert tuple(tokens_first.shape) == SHAPE
    digests = {
        grouped({"a": filled(1)}).layout.digest,
        grouped({"a": tokens_first}).layout.digest,
        grouped({"b": filled(1)}).layout.digest,
        grouped({"a": filled(1).to(torch.float16)}).layout.digest,
        grouped({"a": filled(1)[:, :, : TOKENS // 2].contiguous()}).layout.digest,
    }
    assert len(digests) == 5


def test_pages_of_several_kernel_blocks_are_one_row() -> None:
    cache = torch.randn((2 * PAGES, HEADS, TOKENS // 2, SIZE)).to(torch.bfloat16)
    group = grouped({"a": cache})
    np.testing.assert_array_equal(group.gather([3]), bytes_of(cache[6:8]))


def test_padding_behind_a_page_is_not_stored() -> None:
    padded = torch.zeros((PAGES, HEADS * TOKENS * SIZE + 64), dtype=torch.bfloat16)
    cache = torch.as_strided(padded, SHAPE, (padded.stride(0), TOKENS * SIZE, SIZE, 1))
    group = grouped({"a": cache})
    assert group.layout.block_bytes == HEADS * TOKENS * SIZE * 2
    assert group.direct([1, 2]) is None


def test_pages_with_gaps_inside_are_refused() -> None:
    heads_outermost = torch.empty((HEADS, PAGES, TOKENS, SIZE)).transpose(0, 1)
    with pytest.raises(InvalidArgument, match="pages of a have gaps"):
        grouped({"a": heads_outermost})


def test_a_layer_without_one_tensor_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="layer b has no cache"):
        group_pages({"a": filled(1), "b": [filled(1)]}, ["a", "b"], pages=PAGES, block_tokens=TOKENS, kind="test")
