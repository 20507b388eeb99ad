"""Named counts of what an engine did, degraded events above all. One set an engine, safe from any thread."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Final

NAMES: Final = (
    # prefix hits
    "match_failed", "matched_blocks", "fetch_failed", "fetched_blocks", "loaded_blocks", "short_fetches",
    "host_pool_exhausted",
    # the way to the device
    "copies", "copied_bytes", "copy_failures", "swap_ins", "swap_ins_shortened", "swap_ins_aborted", "swap_in_stalled",
    # forward passes
    "prefilled_tokens", "decoded_tokens", "replayed_tokens", "abandoned_passes",
    "preemptions", "aborts",
    # write-back
    "write_back_blocks", "write_back_acked", "write_back_already", "write_back_failed", "write_back_dropped",
    "write_back_errors",
)


class Counters:
    """Counts by name; a name that is not in NAMES is refused with KeyError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter(dict.fromkeys(NAMES, 0))

    def add(self, name: str, count: int = 1) -> None:
        with self._lock:
            if name not in self._counts:
                raise KeyError(name)
            self._counts[name] += count

    def get(self, name: str) -> int:
        with self._lock:
            if name not in self._counts:
                raise KeyError(name)
            return self._counts[name]

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)
