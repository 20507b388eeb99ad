"""The two transfers of a connector: whatever happens is counted, and what a store says about it is not raised.

Everything that fails here is recomputed by the engine or missed later, so the caller needs to know which blocks are
there and nothing else; people need to know why, and find it under the names of `counts`.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.errors import EfsError
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.link import LazyStore, reason_of
from kvstore.keys import Chain

_LOG: Final = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Fetched:
    """ok: for each block, whether its bytes are there and verified. reason: why not all of them are; None when all
    are."""

    ok: Sequence[bool]
    reason: str | None = None

    @property
    def leading(self) -> int:
        """Blocks before the first one that is not there."""
        return next((at for at, there in enumerate(self.ok) if not there), len(self.ok))


def fetch(link: LazyStore, chain: Chain, target: NDArray[np.uint8], counts: Counts) -> Fetched:
    """Blocks into `target`, in the order of `KVStore.get_into`; bytes of those that are not ok are undefined."""
    store = link.get()
    if store is None:
        return _nothing(chain, "unreachable", counts)
    try:
        report = store.get_into(chain, target)
    except EfsError as error:
        _LOG.warning("the KV store failed: %s", error)
        return _nothing(chain, reason_of(error), counts)
    counts.add("load_bytes", report.bytes)
    if all(report.ok):
        return Fetched(report.ok)
    reason = "corrupt" if report.corrupt else "missing"
    counts.add(f"load_failed_{reason}")
    return Fetched(report.ok, reason)


def _nothing(chain: Chain, reason: str, counts: Counts) -> Fetched:
    counts.add(f"load_failed_{reason}")
    return Fetched([False] * len(chain), reason)


def put(link: LazyStore, chain: Chain, blocks: NDArray[np.uint8], counts: Counts) -> int:
    """How many of these blocks the store has now."""
    try:
        store = link.get()
        if store is None:
            counts.add("save_failed_unreachable")
            counts.add("save_failed_blocks", len(chain))
            return 0
        report = store.put(chain, blocks)
    except Exception as error:
        _LOG.warning("blocks were not stored: %r", error)
        counts.add(f"save_failed_{reason_of(error)}")
        counts.add("save_failed_blocks", len(chain))
        return 0
    counts.add("save_blocks", report.acked)
    counts.add("save_bytes", report.acked * chain.layout.block_bytes)
    counts.add("save_already_blocks", report.already)
    counts.add("save_failed_blocks", report.failed)
    if report.failed:
        _LOG.info("%d of %d blocks were not stored: %s", report.failed, len(chain), report.why)
    return report.acked + report.already
