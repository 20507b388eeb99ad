"""How large a store to make for a replay, and how to read `--capacity`. Pure.

A block has one slot on each of the twelve nodes, and a node collects when more than WATERMARK_HIGH of its slots are
live. So a store keeps floor(WATERMARK_HIGH · slots of a node) blocks. That is what a percentage of the trace's unique
blocks asks for, and what the exact models get as their capacity. After a collection the store holds 4 % less.

*From blocks to bytes.* A small store must still be cut like a large one, or it would evict in other steps: a large
store has many extents, and the chunk (the slots that a put fills together) is a tiny share of a node. So the plan asks
for FEWEST_EXTENTS to MOST_EXTENTS extents a node, and for chunks of at most 1/CHUNK_SHARE of its slots. Extents have at
least MIN_EXTENT_BYTES: a store of few blocks gets large slots, one of many small ones (128 bytes, in chunks of 32 slots
like those of a V4.1 block). Of all plans that are off by one block or TOLERANCE at most the one that takes the least
space is chosen. The index gets room for every slot: with slots this small its usual share of the capacity would be full
before the slots are.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

from efs.errors import InvalidArgument
from efs.extent import Geometry, SlotClass
from efs.index import ENTRY_BYTES
from efs.limits import (
    DATA_SHARDS,
    MIN_EXTENT_BYTES,
    MIN_EXTENTS_PER_NODE,
    MIN_INDEX_BUDGET_BYTES,
    PAGE_BYTES,
    RESERVE_BYTES,
    STRIPE_SHARDS,
    WATERMARK_HIGH,
)
from efs.nodedir import node_bytes, plan_node
from efs.shape import BlockShape
from kvstore.config import parse_size

MOST_EXTENTS: Final = 16
FEWEST_EXTENTS: Final = MIN_EXTENTS_PER_NODE
CHUNK_SHARE: Final = 128
TOLERANCE: Final = 0.005
SLOT_SIZES: Final = tuple(128 << step for step in range(11))
DEFAULT_BLOCK_BYTES: Final = DATA_SHARDS * SLOT_SIZES[0]
"""Of a store whose capacity is given in bytes."""
_PERCENT: Final = re.compile(r"(\d{1,3}(?:\.\d{1,6})?) ?%")


@dataclass(frozen=True, slots=True)
class StorePlan:
    """A store to be made. blocks: what it is to keep; what it keeps (`kept_blocks`) is as close as slots allow.
    slots: of each node. capacity_bytes: raw, of all nodes."""

    blocks: int
    slots: int
    block_bytes: int
    extent_bytes: int
    index_bytes: int
    capacity_bytes: int


def plan_store(capacity: str, unique_blocks: int, block_bytes: int | None = None) -> StorePlan:
    """The store that a `--capacity` means: a size with a unit, or a percentage of the trace's unique blocks.

    InvalidArgument for what is neither, for a percentage outside (0, 100], and for a store that would be too small;
    block_bytes goes with a size only.
    """
    match = _PERCENT.fullmatch(capacity.strip())
    if match is None:
        return plan_for_bytes(parse_size(capacity, "capacity"), block_bytes or DEFAULT_BLOCK_BYTES)
    if block_bytes is not None:
        raise InvalidArgument(f"capacity {capacity} chooses the bytes of a block itself; give them with a size only")
    share = float(match[1]) / 100
    if not 0 < share <= 1:
        raise InvalidArgument(f"capacity is {capacity}, must be above 0 % and at most 100 %")
    blocks = int(unique_blocks * share)
    if blocks < 1:
        raise InvalidArgument(f"capacity {capacity} of {unique_blocks} unique blocks is less than one block")
    return plan_for_blocks(blocks)


def plan_for_blocks(blocks: int) -> StorePlan:
    """The smallest store that keeps `blocks` blocks, within TOLERANCE if that is possible."""
    plans = [plan for extents in range(FEWEST_EXTENTS, MOST_EXTENTS + 1) for slot_bytes in SLOT_SIZES
             if (plan := _cut(blocks, extents, slot_bytes)) is not None]

    def off(plan: StorePlan) -> int:
        return abs(kept_blocks(plan.slots) - blocks)

    if not plans:
        raise InvalidArgument(f"no store is small enough to keep only {blocks} blocks")
    allowed = max(min(map(off, plans)), 1, TOLERANCE * blocks)
    return min((plan for plan in plans if off(plan) <= allowed), key=lambda plan: plan.capacity_bytes)


def _cut(blocks: int, extents: int, slot_bytes: int) -> StorePlan | None:
    """A store of so many extents with such slots that keeps about `blocks`; None where extents would be too small or
    chunks too large."""
    block_bytes = DATA_SHARDS * slot_bytes
    slot_class = _class_of(block_bytes)
    each = slot_bytes + slot_class.entry_bytes
    per_extent = blocks / WATERMARK_HIGH / extents
    extent_bytes = max(MIN_EXTENT_BYTES, PAGE_BYTES + _pages(per_extent * each))
    chunk = Geometry(extent_bytes, slot_class).chunk_slots
    wanted = max(1, round(per_extent / chunk)) * chunk
    while Geometry(extent_bytes, slot_class).slots < wanted:
        extent_bytes += PAGE_BYTES
    slots = extents * Geometry(extent_bytes, slot_class).slots
    if slots > extents * wanted or chunk > max(1, slots // CHUNK_SHARE):
        return None
    index_bytes = max(MIN_INDEX_BUDGET_BYTES, _pages(slots * ENTRY_BYTES))
    capacity = STRIPE_SHARDS * node_bytes(extents, extent_bytes, index_bytes)
    return StorePlan(blocks, slots, block_bytes, extent_bytes, index_bytes, capacity)


def plan_for_bytes(capacity_bytes: int, block_bytes: int) -> StorePlan:
    """A store of this raw capacity, its extents as any store would have them, with an index for all its slots."""
    slot_class = _class_of(block_bytes)
    node = capacity_bytes // STRIPE_SHARDS
    each = slot_class.slot_bytes + slot_class.entry_bytes
    # Slots take `each` of what is left beside the index, so there are never more than this has entries for.
    index_bytes = _pages(max(0, node - RESERVE_BYTES) * ENTRY_BYTES / (each + ENTRY_BYTES))
    plan = plan_node(node, None, max(MIN_INDEX_BUDGET_BYTES, index_bytes))
    slots = plan.extents * Geometry(plan.extent_bytes, slot_class).slots
    return StorePlan(kept_blocks(slots), slots, block_bytes, plan.extent_bytes, plan.index_bytes, capacity_bytes)


def kept_blocks(slots: int) -> int:
    """Blocks that nodes of so many slots keep before they collect."""
    return math.floor(WATERMARK_HIGH * slots)


def _class_of(block_bytes: int) -> SlotClass:
    return SlotClass.of(BlockShape(block_bytes, (block_bytes,)))


def _pages(size: float) -> int:
    return math.ceil(size / PAGE_BYTES) * PAGE_BYTES
