"""In-memory stand-in until the store works; deleted then."""

from __future__ import annotations

from typing import Any

from efs.types import GetReport, PutReport
from kvstore.buffers import flat_bytes
from kvstore.keys import Chain


class MemoryStore:
    def __init__(self) -> None:
        self.blocks: dict[bytes, bytes] = {}

    def match(self, chain: Chain, *, deadline_ms: float | None = None) -> int:
        n = 0
        for key in chain:
            if key not in self.blocks:
                break
            n += 1
        return n

    def get_into(self, chain: Chain, out: Any, *, deadline_ms: float | None = None) -> GetReport:
        layout = chain.layout
        flat = flat_bytes(out, "out", writable=True, size=len(chain) * layout.block_bytes)
        ok = [key in self.blocks for key in chain]
        data = b"".join(self.blocks.get(key, b"\xff" * layout.block_bytes) for key in chain)
        layout.to_segments(data, flat)
        lead = ok.index(False) if False in ok else len(ok)
        return GetReport(lead, ok, 0, 0, 0, 0, 0, sum(ok) * layout.block_bytes, 0.0)

    def put(self, chain: Chain, blocks: Any, *, deadline_ms: float | None = None) -> PutReport:
        size = chain.layout.block_bytes
        flat = flat_bytes(blocks, "blocks", size=len(chain) * size)
        acked = 0
        for i, key in enumerate(chain):
            if key not in self.blocks:
                self.blocks[key] = flat[i * size : (i + 1) * size].tobytes()
                acked += 1
        return PutReport(acked, len(chain) - acked, 0, 0)
