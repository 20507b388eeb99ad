"""Which nodes to ask and which to leave alone, as this process has seen them.

- *offline*: its directory is absent, or it could not be opened.
- *syncing*: it is there but has not got everything yet (`efs/joining.py`); as offline for readers and writers.
- *read-only*: its disk refused to make data durable; it answers reads until it is checked and opened again. Or an
  operator is draining it: it answers reads and gets nothing new.
- *suspect*: it hangs or it failed; left alone for a back-off that doubles with each failure in a row, then tried again.
- *serving*: none of these.

A node that hangs says so itself (`suspect`), because only it sees how old its oldest operation is; failures are noted
by those who met them. A failure that a caller's own deadline caused is not noted: a short deadline must not be able
to take nodes out of service for everybody else.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum

from efs.clock import Clock
from efs.contract import Node
from efs.errors import EfsError, NodeReadOnly, NodeUnavailable
from efs.joining import JoiningNode
from efs.limits import MAX_PROBE_BACKOFF_MS, PROBE_BACKOFF_MS, STRIPE_SHARDS


class NodeState(StrEnum):
    """See the module docstring."""

    SERVING = "serving"
    SUSPECT = "suspect"
    READ_ONLY = "read-only"
    SYNCING = "syncing"
    OFFLINE = "offline"


class Health:
    """States of the twelve nodes of a group; `nodes[i]` is None where node i could not be opened. draining: nodes that
    an operator drains, looked at anew each time."""

    def __init__(self, nodes: Sequence[Node | None], clock: Clock, draining: Collection[int] = ()) -> None:
        self._draining = draining
        self._nodes = tuple(nodes)
        self._clock = clock
        self._failures = [0] * STRIPE_SHARDS
        self._retry_at = [0.0] * STRIPE_SHARDS
        self._read_only = [False] * STRIPE_SHARDS

    def state(self, node_index: int) -> NodeState:
        node = self._nodes[node_index]
        if node is None:
            return NodeState.OFFLINE
        if isinstance(node, JoiningNode) and node.syncing:
            return NodeState.SYNCING
        if node.suspect or self._clock.monotonic() < self._retry_at[node_index]:
            return NodeState.SUSPECT
        if self._read_only[node_index] or node_index in self._draining:
            return NodeState.READ_ONLY
        return NodeState.SERVING

    def readable(self) -> list[int]:
        """Indices of the nodes that are worth asking now."""
        return [index for index in range(STRIPE_SHARDS)
                if self.state(index) in (NodeState.SERVING, NodeState.READ_ONLY)]

    def writable(self) -> list[int]:
        """Indices of the nodes that are worth writing to now."""
        return [index for index in range(STRIPE_SHARDS) if self.state(index) is NodeState.SERVING]

    def note_failure(self, node_index: int, error: EfsError) -> None:
        """A node refused or failed before the caller's deadline. Errors about the request itself change nothing."""
        if isinstance(error, NodeReadOnly):
            self._read_only[node_index] = True
        elif isinstance(error, NodeUnavailable) and self._clock.monotonic() >= self._retry_at[node_index]:
            # Calls that were under way together fail together: that is one failure.
            backoff = min(PROBE_BACKOFF_MS * 2.0 ** min(self._failures[node_index], 16), MAX_PROBE_BACKOFF_MS)
            self._failures[node_index] += 1
            self._retry_at[node_index] = self._clock.monotonic() + backoff / 1000

    def note_replaced(self, node_index: int) -> None:
        """Another node is in the place, or the same one elsewhere: what was seen of the old one says nothing."""
        self._read_only[node_index] = False
        self.note_answer(node_index)

    def note_answer(self, node_index: int) -> None:
        """A node did what it was asked."""
        self._failures[node_index] = 0
        self._retry_at[node_index] = 0.0
