"""Reading blocks: the entry to what the design calls the hot path. `efs.fetch.Fetch` is one call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from efs.clock import Clock, Deadline
from efs.codec import Codec
from efs.contract import Node
from efs.fetch import Fetch, OnSegment
from efs.metrics import CounterFile
from efs.shape import BlockShape
from efs.target import Part
from efs.types import GetReport, PutItem
from efs.unitread import CorruptShard, ReadContext


class Reader:
    """Fetches blocks from twelve nodes. `nodes[i]` is None where a node is not there at all.

    `report` is called on the loop's thread for each shard found corrupt; it must not block.
    """

    def __init__(self, nodes: Sequence[Node | None], codec: Codec, counters: CounterFile, clock: Clock,
                 report: Callable[[CorruptShard], None]) -> None:
        self.context = ReadContext(nodes, codec, counters, clock, report)

    async def get_into(self, keys: Sequence[bytes], shape: BlockShape, out: memoryview, on_segment: OnSegment | None,
                       deadline: Deadline, part: Part | None = None,
                       described: dict[int, PutItem] | None = None) -> GetReport:
        """Fetch the blocks of `keys` segment-major into `out`, a flat writable byte view of exactly their size; or of
        the size of all blocks of which these are a `part`.

        described: filled with what is known of blocks by their headers, by their place in the call. Such a fetch is
        not counted as one of a user's.

        Returns by the deadline with what was verified until then. Nothing writes to `out` after the return, whether by
        result, exception or cancellation. Bytes of blocks that are not ok are undefined.
        """
        fetch = Fetch(self.context, keys, shape, out, on_segment, deadline, part, described)
        try:
            return await fetch.run()
        finally:
            fetch.abandon()
