"""What a server has of a directory that is in no place yet: a spare, waiting to be given one.

Clients ask for a spare with the index NO_PLACE; then they may ask what it is, and operators may give it its place.
Whoever asks for it as a node of a place is told that it has none yet, and tries again. It is given one place, by an
operator who has written that into the map of the cluster first, and it never takes another: not from a second
operator, nor after a restart, because the place stands in its node.toml before anybody is served.

Once it has a place the server goes on with a node, under the same id. Connections that were made to the spare are
still to the spare, and good for nothing else.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Final

from efs.clock import Deadline
from efs.errors import InvalidArgument, NodeUnavailable
from efs.limits import CLOSE_MS
from efs.messages import decode_place_given, encode_info
from efs.metrics import CounterFile
from efs.nodedir import NodePlace
from efs.sparedir import SpareConfig
from efs.types import NO_PLACE, SpareInfo
from efs.wire import Kind

_LOG: Final = logging.getLogger(__name__)


class ServedSpare:
    """See the module docstring. Belongs to the running loop."""

    def __init__(self, config: SpareConfig, directory: str, durability: str,
                 become: Callable[[ServedSpare, NodePlace], Awaitable[None]]) -> None:
        """become: have the server go on with a node of this place. After it failed it is called again."""
        self.config = config
        self.directory = directory
        self.durability = durability
        self.counters = CounterFile.in_memory()
        self._become = become
        self._place: NodePlace | None = None
        self._becoming: asyncio.Future[None] | None = None

    @property
    def node_index(self) -> int:
        return NO_PLACE

    @property
    def node_id(self) -> str:
        return self.config.node_id

    @property
    def cluster_id(self) -> str:
        return self.config.cluster_id

    def work(self, kind: Kind, metadata: bytes) -> Callable[[Deadline], Awaitable[bytes]]:
        """What a request asks for, its metadata decoded; all that only nodes are asked for is refused. WireError when
        they cannot be."""
        if kind is Kind.TAKE_PLACE:
            return partial(self._taken, *decode_place_given(metadata))
        return self._told if kind is Kind.INFO else self._refused

    async def _taken(self, group: int, node_index: int, deadline: Deadline) -> bytes:
        await self.take(group, node_index)
        return b""

    async def _told(self, deadline: Deadline) -> bytes:
        return encode_info(SpareInfo(self.node_id, self.directory, self.config.plan.capacity_bytes))

    async def _refused(self, deadline: Deadline) -> bytes:
        raise NodeUnavailable(self.node_index, "it is in no place and holds nothing")

    async def take(self, group: int, node_index: int) -> None:
        """Be the node of this place from now on; once more is nothing new. InvalidArgument when it was given another.
        It goes on in the background when the caller gives up."""
        place = NodePlace(self.cluster_id, group, node_index)
        if self._place not in (None, place):
            raise InvalidArgument(f"the spare {self.node_id} was given another place already: {self._place}")
        self._place = place
        if self._becoming is None or (self._becoming.done() and self._becoming.exception() is not None):
            self._becoming = asyncio.ensure_future(self._become(self, place))
            self._becoming.add_done_callback(_note_failure)
        await asyncio.shield(self._becoming)

    async def close(self) -> None:
        """Wait for what is under way, but not for ever, and end it."""
        if self._becoming is not None:
            await asyncio.wait((self._becoming,), timeout=CLOSE_MS / 1000)
            self._becoming.cancel()


def _note_failure(becoming: asyncio.Future[None]) -> None:
    """Whoever asked may have gone away."""
    if not becoming.cancelled() and (error := becoming.exception()) is not None:
        _LOG.error("a spare could not be opened as a node: %s", error)
