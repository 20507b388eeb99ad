"""A store of blocks in a dictionary, with the three verbs that an engine uses, for tests of the engine's side.

It behaves as the real one where it matters: segments settle in order with counts that never grow, bytes of blocks that
are not delivered are garbage (0xEE, so that using them shows), `match` is a promise that a fetch may not keep, put
answers `already` for what it has. Faults are set by tests:

- `lost`: keys that `match` still promises and a fetch does not find.
- `fail_read`: (segment, block) from which on a fetch delivers nothing: block and those behind it, from this segment on.
- `fail_late`: a block that is found bad after all segments were settled; only the report says so.
- `before`: called with "match", "get", "segment", "put" before each; may raise, block, or abort somebody.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efs.types import GetReport, PutReport
from kvstore.buffers import flat_bytes
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout

GARBAGE = 0xEE


class MemoryBlockStore:
    """See the module's docstring. Safe from several threads."""

    def __init__(self) -> None:
        self.blocks: dict[bytes, NDArray[np.uint8]] = {}
        self.lost: set[bytes] = set()
        self.fail_read: tuple[int, int] | None = None
        self.fail_late: int | None = None
        self.before: Callable[[str], None] = lambda verb: None
        self.gets: list[GetReport] = []
        self.puts: list[PutReport] = []
        self.faults = 0
        self._lock = threading.RLock()

    def close(self) -> None:
        """Nothing is held."""

    def namespace(self, *, model: str, weights: str, layout: BlockLayout, tenant: str | None = None) -> Namespace:
        return Namespace(model, weights, layout, tenant=tenant)

    def match(self, chain: Chain, *, strict: bool = False, deadline_ms: float | None = None) -> int:
        self.before("match")
        with self._lock:
            return _leading([key in self.blocks for key in chain])

    def get_into(self, chain: Chain, out: Any, *, on_segment: Callable[[int, int], None] | None = None,
                 deadline_ms: float | None = None) -> GetReport:
        self.before("get")
        layout, count = chain.layout, len(chain)
        flat = flat_bytes(out, "out", writable=True, size=count * layout.block_bytes)
        ok = [key in self.blocks and key not in self.lost for key in chain]
        leading = _leading(ok)
        if leading < count:
            self.faults += 1
        for segment, (offset, size) in enumerate(
            zip(layout.shape.segment_offsets, layout.shape.segment_bytes, strict=True)
        ):
            if self.fail_read is not None and self.fail_read[0] == segment and self.fail_read[1] < leading:
                leading = self.fail_read[1]
                self.faults += 1
            view = layout.segment_view(flat, segment)
            view[leading:] = GARBAGE
            for row, key in enumerate(chain.keys[:leading]):
                view[row] = self.blocks[key][offset : offset + size]
            self.before("segment")
            if on_segment is not None:
                on_segment(segment, leading)
        if self.fail_late is not None and self.fail_late < leading:
            leading = self.fail_late
            self.faults += 1
            for segment in range(len(layout.segments)):
                layout.segment_view(flat, segment)[leading:] = GARBAGE
        report = GetReport(leading, [position < leading for position in range(count)], 0, 0, 0, count - leading, 0,
                           leading * layout.block_bytes, 0.0)
        with self._lock:
            self.gets.append(report)
        return report

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        self.before("put")
        rows = flat_bytes(blocks, "blocks", size=len(chain) * chain.layout.block_bytes).reshape(len(chain), -1)
        with self._lock:
            new = [key for key in chain if key not in self.blocks]
            for row, key in enumerate(chain):
                if key in new:
                    self.blocks[key] = rows[row].copy()
                self.lost.discard(key)
            report = PutReport(len(new), len(chain) - len(new), 0, 0)
            self.puts.append(report)
        return report


def _leading(flags: list[bool]) -> int:
    return flags.index(False) if False in flags else len(flags)
