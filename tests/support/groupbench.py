"""Several EC groups of memory twins under one `GroupedFileSystem`, to which more can be added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from efs.clock import SystemClock
from efs.codec import Codec
from efs.fs import FileSystem
from efs.groups import GroupedFileSystem, Renew
from efs.metrics import CounterFile
from efs.ownership import Ownership, owner_table
from efs.placement import placement_group
from efs.quota import Quotas
from tests.support.blocks import Blocks
from tests.support.memorynode import MemoryNode

RETENTION_SECONDS = 3_600


class MovedWall:
    """The system's clocks, with a wall that tests move."""

    def __init__(self) -> None:
        self._system = SystemClock()
        self.ahead = 0.0

    def monotonic(self) -> float:
        return self._system.monotonic()

    def wall(self) -> float:
        return self._system.wall() + self.ahead


@dataclass(slots=True)
class GroupBench:
    """See the module docstring. `twins[g][i]` is node i of group g."""

    clock: MovedWall
    counters: CounterFile
    quotas: Quotas
    twins: list[list[MemoryNode]]
    ownership: Ownership
    filesystem: GroupedFileSystem = field(init=False)

    def open_group(self, capacity_records: int | None = None) -> FileSystem:
        twins = [MemoryNode(index, self.clock, capacity_records=capacity_records) for index in range(12)]
        self.twins.append(twins)
        self.quotas.extend(twins)
        return FileSystem(twins, codec=Codec(), counters=self.counters, clock=self.clock, quotas=self.quotas)

    def add_group(self, capacity_records: int | None = None) -> None:
        """As an operator does, now."""
        added_at = (*self.ownership.added_at, int(self.clock.wall()))
        self.ownership = Ownership(added_at, RETENTION_SECONDS)
        self.filesystem.extend([self.open_group(capacity_records)], self.ownership)

    def lose(self, group: int, nodes: Sequence[int]) -> None:
        for index in nodes:
            self.twins[group][index].down = "it is switched off"

    def holders(self, key: bytes) -> list[int]:
        """The groups of which any node has a record of a key."""
        return [group for group, twins in enumerate(self.twins) if any(key in twin.records for twin in twins)]

    def owner(self, key: bytes) -> int:
        return int(owner_table(self.ownership.groups)[placement_group(key)])

    def rows(self, blocks: Blocks, group: int) -> list[int]:
        """The blocks that a group owns."""
        return [at for at, key in enumerate(blocks.keys) if self.owner(key) == group]


def make_groups(groups: int, *, move: bool = False, renew: Renew | None = None) -> GroupBench:
    """So many groups, added long ago. Must run on the loop. move, renew: as in `GroupedFileSystem`."""
    clock = MovedWall()
    bench = GroupBench(clock, CounterFile.in_memory(), Quotas((), clock), [],
                       Ownership((0,) * groups, RETENTION_SECONDS))
    opened = [bench.open_group() for _ in range(groups)]
    bench.filesystem = GroupedFileSystem(opened, bench.ownership, counters=bench.counters, clock=clock,
                                         quotas=bench.quotas, renew=renew, move=move)
    return bench
