"""What the disk is still owed: index entries and table entries of records that are gone from memory already, entries
whose rewrite failed. Belongs to the loop's thread.

Every job of the writer thread takes some of it along (`efs/nodestate.py`). A node to which nothing comes would keep the
rest on its disk until it closes, where fsck sees index entries of slots that hold other records by now. So `run`, a
background task, pays with jobs of its own whatever is owed for PAY_EVERY_MS. A disk that fails is tried again after as
long.
"""

from __future__ import annotations

import asyncio
import logging

from efs.clock import Deadline
from efs.errors import EfsError
from efs.limits import MAX_DEADLINE_MS, PAY_EVERY_MS
from efs.nodeguard import Guard
from efs.nodestate import NodeState
from efs.nodewriter import NodeWriter
from efs.writejob import WriteJob

_LOG = logging.getLogger(__name__)


class Debts:
    """Of one node."""

    def __init__(self, state: NodeState, guard: Guard, writer: NodeWriter) -> None:
        self._state = state
        self._guard = guard
        self._writer = writer

    async def run(self) -> None:
        """Pay from time to time, for ever."""
        while True:
            await asyncio.sleep(PAY_EVERY_MS / 1000)
            if self._guard.read_only is None and not self._guard.index_lost:
                try:
                    await self.pay(Deadline.after_ms(self._guard.clock, MAX_DEADLINE_MS))
                except (EfsError, OSError) as error:
                    _LOG.info("node %d: what its disk is owed stays owed: %s", self._guard.node_index, error)

    async def pay(self, deadline: Deadline) -> None:
        """Have nothing owed. What a node cannot write, because it hangs, fails or is read-only, is raised."""
        while self._state.owes:
            self._guard.require_writable()
            await self._guard.result(self._writer.submit(WriteJob(), lambda _: None), deadline)
