"""Is a finding of fsck true? Which damage can have caused which finding, and when. Pure.

A *window* is a time in which one kind of damage may show: from the moment before it is done until an episode has found
the store whole again. A finding is true when a kind that can cause it (`CAUSES`) has a window, on the finding's node if
the kind is of one node, that meets the run. Findings that nothing here can cause are false at any time.

A finding about a block has a longer memory. What a failed put or a kill left of a block is hollow or at risk until a
sweep takes it after the grace, or eviction does, and an fsck beside an owner does not judge what is younger: so damage
explains block findings until BLOCK_MEMORY_S after its window.

A rotten table entry does not tell its key. Where it is evicted before anybody read it, its index entry is found by the
next opening of the node: until then fsck names it as an index entry without data, and says the truth.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

from efs.findings import Kind
from efs.limits import HOLLOW_GRACE_MS
from tools.chaosrig.plan import KINDS

BLOCK_MEMORY_S: Final = 3 * HOLLOW_GRACE_MS / 1000
DOWN: Final = "down"
"""The owner was not running, or died: steps of a writer may be half done."""
ANY_NODE: Final = frozenset({DOWN, "kill", "swap"})
"""Kinds that are not of one node."""
HALF_DONE: Final = frozenset({DOWN, "kill", "hang_write", "slow", "full", "eio", "rot_entry", "vanish", "replace"})
GONE: Final = frozenset({"vanish", "replace", "swap"})
CAUSES: Final[Mapping[str, frozenset[str]]] = {
    Kind.NODE_ABSENT: GONE,
    Kind.NODE_UNREADABLE: GONE,
    Kind.READ_ERROR: GONE,
    Kind.WRONG_IDENTITY: GONE,
    Kind.INDEX_LOST: frozenset({"replace", "swap", "vanish"}),
    Kind.SLAB_LOST: frozenset({"replace", "swap", "vanish"}),
    Kind.EXTENT_DAMAGED: frozenset({"replace"}),
    Kind.BAD_ENTRY: HALF_DONE,
    Kind.INDEX_WITHOUT_DATA: HALF_DONE,
    Kind.DATA_WITHOUT_INDEX: HALF_DONE,
    Kind.ORPHAN_SLOT: HALF_DONE,
    Kind.BAD_CHECKSUM: HALF_DONE | {"rot_payload"},
    Kind.AT_RISK_BLOCK: frozenset(KINDS) | {DOWN},
    Kind.UNREADABLE_BLOCK: frozenset(KINDS) | {DOWN},
    Kind.HOLLOW_STRIPE: frozenset(KINDS) | {DOWN},
}
OF_BLOCKS: Final = frozenset({Kind.AT_RISK_BLOCK, Kind.UNREADABLE_BLOCK, Kind.HOLLOW_STRIPE})


@dataclass(slots=True)
class Window:
    """node: -1 for kinds that are not of one. ended: None while it is open. By the monotonic clock."""

    kind: str
    node: int
    began: float
    ended: float | None = None

    def meets(self, began: float, ended: float, memory_s: float) -> bool:
        return self.began <= ended and (self.ended is None or self.ended + memory_s >= began)


def is_true(finding: Mapping[str, Any], windows: Iterable[Window], began: float, ended: float) -> bool:
    """Whether something explains a finding of a run between two moments."""
    kind = finding["kind"]
    causes = CAUSES.get(kind, frozenset())
    windows = tuple(windows)
    openings = [window.ended for window in windows if window.kind == DOWN and window.ended is not None]

    def memory_s(window: Window) -> float:
        if kind == Kind.INDEX_WITHOUT_DATA and window.kind == "rot_entry" and window.ended is not None:
            later = [opened - window.ended for opened in openings if opened > window.ended]
            return min(later, default=inf)
        return BLOCK_MEMORY_S if kind in OF_BLOCKS else 0.0

    return any(
        window.kind in causes
        and (finding["node"] is None or window.kind in ANY_NODE or window.node == finding["node"])
        and window.meets(began, ended, memory_s(window))
        for window in windows
    )


def disturbed(windows: Iterable[Window], began: float, ended: float) -> bool:
    """Whether a run may have been unable to do its work."""
    return any(window.kind in GONE | {DOWN, "kill"} and window.meets(began, ended, 0.0) for window in windows)
