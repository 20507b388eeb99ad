"""The sizes of the store of a chaos run: so small that it turns over again and again."""

from __future__ import annotations

from typing import Final

from efs.extent import Geometry, SlotClass
from efs.limits import KIB, MIB, STRIPE_SHARDS, WATERMARK_LOW
from tools.chaosrig.model import LAYOUT

EXTENT_BYTES: Final = 256 * KIB
EXTENTS: Final = 8
NODE_BYTES: Final = EXTENTS * EXTENT_BYTES + 1 * MIB + 512 * KIB + 256 * KIB
"""Eight extents, the least index, the reserve, and stamps: about 450 blocks."""
CAPACITY_BYTES: Final = STRIPE_SHARDS * NODE_BYTES
UNEVICTABLE_BLOCKS: Final = int(
    EXTENTS * Geometry(EXTENT_BYTES, SlotClass.of(LAYOUT.shape)).slots * WATERMARK_LOW / 2)
