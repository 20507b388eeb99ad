"""The listings of the nodes of a group as one: what sweep and repair walk. Pure but for `fill`.

Each node lists its records by key. Pages go into a `Merge`, *stretches* of keys come out that no listed node can add
to: of a key in a stretch every record of every listed node was in the listing, unless a page ended inside the key. A
listing takes minutes and decides nothing; it only says which keys are worth a look-up of the moment. Memory: one page
of each node.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from efs.ask import all_of
from efs.clock import Clock, Deadline
from efs.contract import Node
from efs.limits import DATA_SHARDS, DIGEST_BYTES, KEY_BYTES, MAX_READ_ATTEMPTS, SWEEP_CALL_MS
from efs.pace import Pace
from efs.placement import node_of_shard, placement_group, rotation_of
from efs.types import DropItem, ListedRecord, ListPage


@dataclass(slots=True)
class _Stream:
    """One node's listing: records that were not taken yet, and behind which key nothing is known (None: at the end)."""

    waiting: deque[ListedRecord] = field(default_factory=deque)
    after: bytes | None = None
    begun: bool = False

    @property
    def ended(self) -> bool:
        return self.begun and self.after is None

    @property
    def bound(self) -> bytes:
        """Keys below this one are complete; of this one more may follow. Not when ended."""
        return b"" if self.after is None else self.after[:KEY_BYTES]

    @property
    def stuck(self) -> bool:
        """Whether nothing complete is waiting and more can be had."""
        return not self.ended and (not self.waiting or self.waiting[0].key >= self.bound)


@dataclass(frozen=True, slots=True)
class Stretch:
    """All records of the listed nodes in a range of keys, ascending on each node."""

    records: Mapping[int, Sequence[ListedRecord]]

    @property
    def count(self) -> int:
        return sum(map(len, self.records.values()))

    def suspected(self, unknown: int) -> list[bytes]:
        """Keys of which a version may be hollow or losing, ascending, when so many nodes are not listed."""
        shards: Counter[bytes] = Counter()
        for listed in self.records.values():
            shards.update([record.key + record.digest for record in listed])
        versions = Counter(name[:KEY_BYTES] for name in shards)
        weak = {name[:KEY_BYTES] for name, count in shards.items() if count + unknown < DATA_SHARDS}
        return sorted(weak.union(key for key, count in versions.items() if count > 1))

    def incomplete(self, unlisted: int) -> list[bytes]:
        """Keys of which a version could be readable and is not on every listed node, when so many nodes are not listed;
        and those with a record in a place that is not its own. Ascending."""
        shards: Counter[bytes] = Counter()
        misplaced: set[bytes] = set()
        rotations: dict[bytes, int] = {}
        for index, listed in self.records.items():
            for record in listed:
                rotation = rotations.get(record.key)
                if rotation is None:
                    rotation = rotations[record.key] = rotation_of(placement_group(record.key))
                if node_of_shard(record.shard, rotation) == index:
                    shards[record.key + record.digest] += 1
                else:
                    misplaced.add(record.key)
        listed_nodes = len(self.records)
        return sorted(misplaced.union(name[:KEY_BYTES] for name, count in shards.items()
                                      if count < listed_nodes and count + unlisted >= DATA_SHARDS))

    def tagged(self, tags: Collection[bytes]) -> dict[int, list[DropItem]]:
        """Records of these tenants by node."""
        found = {index: [DropItem(record.key, record.digest, record.generation) for record in listed
                         if record.tenant_tag in tags] for index, listed in self.records.items()}
        return {index: items for index, items in found.items() if items}


class Merge:
    """The listings of several nodes as one. Pages go in, stretches of keys come out that no listed node can add to."""

    def __init__(self, nodes: Iterable[int], after: bytes | None) -> None:
        """`after`: a key; only what stands behind it is taken."""
        self._streams = {index: _Stream() for index in nodes}
        self._start = None if after is None else after + b"\xff" * DIGEST_BYTES
        self.done = after
        """Everything up to this key has come out."""

    @property
    def listed(self) -> tuple[int, ...]:
        """Nodes whose listing is complete so far."""
        return tuple(self._streams)

    @property
    def ended(self) -> bool:
        return all(stream.ended and not stream.waiting for stream in self._streams.values())

    def wanted(self) -> dict[int, bytes | None]:
        """Nodes whose next page is needed, with the `after` to ask it with."""
        return {index: stream.after if stream.begun else self._start for index, stream in self._streams.items()
                if stream.stuck}

    def add(self, node_index: int, page: ListPage) -> None:
        """The page that `wanted` asked for."""
        stream = self._streams[node_index]
        stream.begun = True
        stream.after = page.after
        stream.waiting.extend(page.records)

    def lose(self, node_index: int) -> None:
        """The node cannot be listed further: it is missing from the next stretch on."""
        del self._streams[node_index]

    def take(self) -> Stretch:
        """All complete keys; more of a key may follow where a page ends in it."""
        bound = min((stream.bound for stream in self._streams.values() if not stream.ended), default=None)
        taken: dict[int, list[ListedRecord]] = {}
        for index, stream in self._streams.items():
            records = taken[index] = []
            while stream.waiting and (bound is None or stream.waiting[0].key < bound):
                records.append(stream.waiting.popleft())
        self.done = max([records[-1].key for records in taken.values() if records], default=self.done)
        return Stretch(taken)


async def fill(merge: Merge, nodes: Sequence[Node | None], clock: Clock, pace: Pace, page_records: int) -> None:
    """Get the pages that are needed; nodes that fail twice are missing from here on."""
    for attempt in range(MAX_READ_ATTEMPTS):
        wanted = {index: (node, after) for index, after in merge.wanted().items() if (node := nodes[index]) is not None}
        deadline = Deadline.after_ms(clock, SWEEP_CALL_MS)
        calls = {index: node.list(after, page_records, deadline) for index, (node, after) in wanted.items()}
        pages, _ = await all_of(calls, deadline, len(calls))
        for index, page in pages.items():
            merge.add(index, page)
        if len(pages) == len(calls):
            return
        if attempt + 1 < MAX_READ_ATTEMPTS:
            await pace.step()
    for index in wanted.keys() - pages.keys():
        merge.lose(index)
