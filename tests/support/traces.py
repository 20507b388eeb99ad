"""Real request traces as chains of 128-token blocks. The files and their origin: tests/data/traces/README.md."""

from __future__ import annotations

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

TRACES = Path(__file__).parents[1] / "data" / "traces"
BLOCK_TOKENS = 128


@dataclass(frozen=True, slots=True)
class TraceFormat:
    """A trace file and how many tokens one of its block ids stands for."""

    name: str
    id_tokens: int

    @property
    def path(self) -> Path:
        return TRACES / f"{self.name}.jsonl.xz"


SYNTHETIC = TraceFormat("mooncake_synthetic_trace", 512)
AGENT = TraceFormat("lmcache_agent_miniswe_blk128", 128)


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `blocks`: ids of its full 128-token blocks; equal ids at equal places are equal prefixes."""

    timestamp_ms: int
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...]
    session: str | None

    def tokens(self) -> NDArray[np.uint32]:
        """Token ids of the full blocks, different for each block id."""
        ids = np.asarray(self.blocks, dtype=np.uint32)[:, None] * np.uint32(BLOCK_TOKENS)
        tokens: NDArray[np.uint32] = np.add(ids, np.arange(BLOCK_TOKENS, dtype=np.uint32), dtype=np.uint32)
        return tokens.reshape(-1)


def read_trace(trace: TraceFormat) -> Iterator[Request]:
    """The requests of a trace in the order of their arrival."""
    parts = trace.id_tokens // BLOCK_TOKENS
    with lzma.open(trace.path, "rt", encoding="ascii") as lines:
        for line in lines:
            row = json.loads(line)
            blocks = [block * parts + part for block in row["hash_ids"] for part in range(parts)]
            full = row["input_length"] // BLOCK_TOKENS
            yield Request(row["timestamp"], row["input_length"], row["output_length"], tuple(blocks[:full]),
                          row.get("session"))
