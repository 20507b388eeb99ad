"""What a connector counts: integers by name, taken as differences, so that several processes' add up.

    hit_tokens               tokens that were promised to the engine instead of being computed
    lost_tokens              those of them whose load failed, so that they were computed after all
    load_bytes, loads        verified bytes delivered; loads that succeeded
    load_ms                  time those loads took, waiting included
    saved_ms, wasted_ms      estimated time to first token that loads spared; that they cost (`savings`)
    load_failed_REASON       loads that failed, and were recomputed: missing, corrupt, unreachable, or the error's name
    match_failed_REASON      questions that failed, and counted as a miss; late: not answered by the deadline
    store_not_opened         attempts to open the store that failed
    save_begun_blocks        blocks that were copied to be stored; later counted as one of the following three
    save_blocks, save_bytes  acknowledged blocks and their bytes
    save_already_blocks      blocks that the store had
    save_failed_blocks       blocks that the store did not acknowledge
    save_dropped_blocks      blocks that were not even tried: the queue was full
    save_failed_REASON       puts that raised
    bypassed_REASON          requests that were left alone: lora, media, asked
"""

from __future__ import annotations

import threading
from collections import Counter


class Counts:
    """Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._new: Counter[str] = Counter()
        self._total: Counter[str] = Counter()

    def add(self, name: str, amount: int = 1) -> None:
        if amount:
            with self._lock:
                self._new[name] += amount
                self._total[name] += amount

    def take(self) -> dict[str, int]:
        """What was added since the last take."""
        with self._lock:
            taken, self._new = dict(self._new), Counter()
        return taken

    @property
    def total(self) -> dict[str, int]:
        """Everything since the beginning."""
        with self._lock:
            return dict(self._total)
