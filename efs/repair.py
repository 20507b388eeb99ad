"""Repair: giving versions that can still be read the shards that they lack. One at a time for an EC group.

*What.* A version of which ten or eleven nodes hold a shard, and of each key only the one that has won or would win:
most shards, of several the smallest digest (`efs/sweep.py`). With fewer than ten nothing can be done: the sweep removes
it. Records in a place that is not theirs are dropped on the way: they stand where the right one belongs.

*How.* The listings of the nodes are merged (`efs/listing.py`); keys of which a version is not on every listed node are
looked up on every node once more, together, and that view decides. Missing shards are then rebuilt in batches
(`efs/rebuild.py`). A node that answers the look-up and lacks a version gets it, a node that cannot be asked is left
alone: what it holds is not known.

*Repair never fights eviction.* A rebuilt record has the stamp of its sources, and a node refuses one that is as cold as
what it has lately given up. So a cold stripe that lost shards to eviction stays as it is and dies.

*Beside writers* a version that is younger than `grace_ms` is left alone: its put may be about to store what is missing.
Nothing bad would come of storing it twice, since a node holds a version once.

*Interrupted* anywhere, a repair leaves whole records or none. It goes on behind the key that it has reached, and a
second run finds nothing left to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from efs.ask import all_of, tables_of
from efs.clock import Clock, Deadline
from efs.codec import Codec
from efs.contract import ABSENT, Node, NodeTable
from efs.errors import InvalidArgument
from efs.health import Health
from efs.limits import (
    DATA_SHARDS,
    KEY_BYTES,
    REPAIR_BATCH_BLOCKS,
    REPAIR_BATCH_BYTES,
    REPAIR_CALL_MS,
    STRIPE_SHARDS,
    SWEEP_KEYS_AT_ONCE,
    SWEEP_PAGE_RECORDS,
)
from efs.listing import Merge, Stretch, fill
from efs.metrics import CounterFile
from efs.pace import Pace
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.rebuild import Batch, Rebuilt, Stripe
from efs.stripe import records_of
from efs.types import DropItem, ListedRecord

Listed = dict[bytes, list[ListedRecord]]
"""Records by key ‖ digest."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What one repair did.

    records: listed. found: versions that lacked shards and could be read. rebuilt: shards that were stored. cold:
    shards that a node refused as too cold. corrupt: sources that turned out damaged and were dropped by their node.
    misplaced: records that were dropped because another shard belongs where they stood. failed: shards that are still
    missing for any other reason. young: versions that were left to their put. unplaced: shards that are missing on
    nodes that answer and take nothing new. missing: nodes that were not, or not to the end, listed. hopeless,
    inconsistent: (key, digest) of versions of which ten sound shards were not to be had, or did not make the block of
    their headers. resume: the key (hex digits) behind which the next run should begin, None when this one came to the
    end.
    """

    records: int
    found: int
    rebuilt: int
    cold: int
    corrupt: int
    misplaced: int
    failed: int
    young: int
    unplaced: int
    missing: tuple[int, ...]
    hopeless: tuple[tuple[bytes, bytes], ...]
    inconsistent: tuple[tuple[bytes, bytes], ...]
    resume: str | None
    seconds: float


@dataclass(slots=True)
class _Tally:
    """Running sums; the names are those of the report and, behind `repair_`, of the counters."""

    records: int = 0
    found: int = 0
    rebuilt: int = 0
    cold: int = 0
    corrupt: int = 0
    misplaced: int = 0
    failed: int = 0


@dataclass(slots=True)
class Holding:
    """What the nodes hold of one key. versions: by digest, by node, (location, generation) of records in their place.
    misplaced: by node, the others."""

    versions: dict[bytes, dict[int, tuple[int, int]]] = field(default_factory=dict)
    misplaced: dict[int, list[DropItem]] = field(default_factory=dict)


# -- The decision: pure ----------------------------------------------------------------------------------------------


def best_of(versions: Mapping[bytes, Mapping[int, object]]) -> bytes | None:
    """The version of a key that is worth repairing: most shards, of equals the smallest digest; None below ten."""
    best = min(versions, key=lambda digest: (-len(versions[digest]), digest), default=None)
    return best if best is not None and len(versions[best]) >= DATA_SHARDS else None


def holdings_of(keys: Sequence[bytes], tables: Mapping[int, NodeTable]) -> list[Holding]:
    """The tables of several nodes, key by key."""
    holdings = [Holding() for _ in keys]
    rotations = [rotation_of(placement_group(key)) for key in keys]
    for index, table in tables.items():
        held = [(row, table.digest[row].tobytes(), location, int(table.generation[row]), int(table.shard[row]))
                for row, location in enumerate(table.location.tolist()) if location != ABSENT]
        held += [(row.row, row.digest, row.location, row.generation, row.shard) for row in table.extra]
        for row, digest, location, generation, shard in held:
            if shard == shard_of_node(index, rotations[row]):
                holdings[row].versions.setdefault(digest, {})[index] = (location, generation)
            else:
                item = DropItem(keys[row], digest, generation)
                holdings[row].misplaced.setdefault(index, []).append(item)
    return holdings


def batches_of(stripes: Iterable[Stripe]) -> Iterator[tuple[int, list[Stripe]]]:
    """Rotation and stripes of batches: runs together and in chain order, so that they become neighbours again."""
    kinds: dict[tuple[int, int, int], list[Stripe]] = {}
    for stripe in stripes:
        rotation = rotation_of(placement_group(stripe.key))
        kinds.setdefault((rotation, stripe.block_bytes, stripe.segments), []).append(stripe)
    for (rotation, block_bytes, _), alike in sorted(kinds.items()):
        alike.sort(key=lambda stripe: (placement_group(stripe.key), stripe.depth, stripe.key))
        size = max(1, min(REPAIR_BATCH_BLOCKS, REPAIR_BATCH_BYTES // block_bytes))
        for start in range(0, len(alike), size):
            yield rotation, alike[start : start + size]


# -- The repair ------------------------------------------------------------------------------------------------------


class Repair:
    """Repairs the nodes of a group. `nodes[i]` is None where node i could not be opened."""

    def __init__(self, nodes: Sequence[Node | None], health: Health, codec: Codec, counters: CounterFile, clock: Clock,
                 pace: Pace, *, grace_ms: int = 0) -> None:
        """grace_ms: versions with a younger record are left alone; 0 when no put can be running."""
        self._nodes = tuple(nodes)
        self._health = health
        self._codec = codec
        self._counters = counters
        self._clock = clock
        self._pace = pace
        self._grace_ms = grace_ms
        self._tally = _Tally()
        self._young = self._unplaced = 0
        self._hopeless: list[tuple[bytes, bytes]] = []
        self._inconsistent: list[tuple[bytes, bytes]] = []
        self.reached: bytes | None = None
        """Everything up to this key is done, while `run` runs."""

    async def run(self, *, after: bytes | None = None, max_seconds: float | None = None) -> RepairReport:
        """Repair the keys behind `after`, for about `max_seconds`. Never raises for a node's sake."""
        if after is not None and len(after) != KEY_BYTES:
            raise InvalidArgument(f"a key has {len(after)} bytes, expected {KEY_BYTES}")
        started = self._begin()
        merge = Merge([index for index in self._health.readable() if self._nodes[index] is not None], after)
        while not merge.ended:
            await self._pace.step()
            await fill(merge, self._nodes, self._clock, self._pace, SWEEP_PAGE_RECORDS)
            stretch = merge.take()
            await self._work_off(stretch, STRIPE_SHARDS - len(merge.listed))
            self.reached = merge.done
            late = max_seconds is not None and self._clock.monotonic() - started >= max_seconds
            if late and merge.done is not None:
                break
        missing = tuple(index for index in range(STRIPE_SHARDS) if index not in merge.listed)
        resume = None if merge.ended or merge.done is None else merge.done.hex()
        return self._end(started, missing, resume)

    async def run_keys(self, keys: Sequence[bytes]) -> RepairReport:
        """Repair these keys only."""
        started = self._begin()
        nodes = {index: node for index in self._health.readable() if (node := self._nodes[index]) is not None}
        for start in range(0, len(keys), SWEEP_KEYS_AT_ONCE):
            listed: Listed = {}
            part = sorted(set(keys[start : start + SWEEP_KEYS_AT_ONCE]))
            for key in part:
                deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
                for records in (await records_of(nodes, key, deadline, len(nodes))).values():
                    _list_records(listed, records)
            await self._judge(part, listed)
        return self._end(started, tuple(index for index in range(STRIPE_SHARDS) if index not in nodes), None)

    def _begin(self) -> float:
        self._tally = _Tally()
        self._young = self._unplaced = 0
        self._hopeless, self._inconsistent = [], []
        return self._clock.monotonic()

    def _end(self, started: float, missing: tuple[int, ...], resume: str | None) -> RepairReport:
        tally = self._tally
        self._counters.add("repair_runs")
        for part in fields(_Tally):
            self._counters.add(f"repair_{part.name}", getattr(tally, part.name))
        return RepairReport(tally.records, tally.found, tally.rebuilt, tally.cold, tally.corrupt, tally.misplaced,
                            tally.failed, self._young, self._unplaced, missing, tuple(self._hopeless),
                            tuple(self._inconsistent), resume, self._clock.monotonic() - started)

    async def _work_off(self, stretch: Stretch, unlisted: int) -> None:
        self._tally.records += stretch.count
        suspected = stretch.incomplete(unlisted)
        wanted = set(suspected)
        listed: Listed = {}
        for records in stretch.records.values():
            _list_records(listed, [record for record in records if record.key in wanted])
        for start in range(0, len(suspected), SWEEP_KEYS_AT_ONCE):
            await self._judge(suspected[start : start + SWEEP_KEYS_AT_ONCE], listed)

    async def _judge(self, keys: Sequence[bytes], listed: Listed) -> None:
        """Look suspected keys up on all nodes and rebuild what is missing."""
        deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
        asks = {index: (node, keys) for index in self._health.readable() if (node := self._nodes[index]) is not None}
        tables, _ = await tables_of(asks, self._health, deadline, len(asks))
        holdings = holdings_of(keys, tables)
        await self._drop_misplaced(holdings)
        stripes = [stripe for key, holding in zip(keys, holdings, strict=True)
                   if (stripe := self._stripe(key, holding, listed, frozenset(tables))) is not None]
        self._tally.found += len(stripes)
        for rotation, part in batches_of(stripes):
            await self._pace.step()
            self._note(await Batch(self._nodes, self._codec, self._clock, rotation, part).run())

    def _stripe(self, key: bytes, holding: Holding, listed: Listed, asked: frozenset[int]) -> Stripe | None:
        """The version of a key that is to be made whole, unless there is nothing to do. asked: nodes that answered."""
        digest = best_of(holding.versions)
        records = listed.get(key + digest) if digest is not None else None
        if digest is None or not records:
            return None
        held = holding.versions[digest]
        lacking = (asked - held.keys()).intersection(self._health.writable())
        self._unplaced += len(asked - held.keys() - lacking)
        if not lacking:
            return None
        if self._grace_ms and self._clock.wall() * 1000 - max(one.arrival_ms for one in records) < self._grace_ms:
            self._young += 1
            return None
        one = records[0]
        return Stripe(key, digest, held, lacking, one.block_bytes, one.segments, one.depth,
                      max(record.stamp for record in records))

    async def _drop_misplaced(self, holdings: Sequence[Holding]) -> None:
        drops: dict[int, list[DropItem]] = {}
        for holding in holdings:
            for index, items in holding.misplaced.items():
                drops.setdefault(index, []).extend(items)
        deadline = Deadline.after_ms(self._clock, REPAIR_CALL_MS)
        calls = {index: node.drop(items, deadline) for index, items in drops.items()
                 if (node := self._nodes[index]) is not None}
        dropped, _ = await all_of(calls, deadline, len(calls))
        self._tally.misplaced += sum(dropped.values())

    def _note(self, rebuilt: Rebuilt) -> None:
        tally = self._tally
        tally.rebuilt += rebuilt.stored
        tally.cold += rebuilt.cold
        tally.corrupt += rebuilt.corrupt
        tally.failed += rebuilt.failed
        self._hopeless += rebuilt.hopeless
        self._inconsistent += rebuilt.inconsistent


def _list_records(listed: Listed, records: Iterable[ListedRecord]) -> None:
    for record in records:
        listed.setdefault(record.key + record.digest, []).append(record)
