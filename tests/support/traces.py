"""The two real request traces that come with the tests. Their origin: tests/data/traces/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

TRACES = Path(__file__).parents[1] / "data" / "traces"


@dataclass(frozen=True, slots=True)
class TraceFile:
    """A trace, and how many tokens one of its hash ids stands for."""

    name: str
    id_tokens: int

    @property
    def path(self) -> Path:
        return TRACES / f"{self.name}.jsonl.xz"


SYNTHETIC = TraceFile("mooncake_synthetic_trace", 512)
AGENT = TraceFile("lmcache_agent_miniswe_blk128", 128)
