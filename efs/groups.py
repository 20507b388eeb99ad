"""One filesystem over the EC groups of a cluster: every call goes to the groups that own its keys, side by side.

Each group is a whole `efs.fs.FileSystem` of twelve nodes with its own health, reader, writer and upkeep; here calls are
split by owner (`efs/ownership.py`) and what came of them is put together (`efs/joined.py`). A group of which more than
two nodes are gone is misses of its own blocks and failed puts of these, and nothing else.

*Reads while groups are new.* A key whose owner has changed within the retention time may still be where it was. Before
a fetch the present owner is asked for such keys, by metadata and until it is certain; those that it has not are fetched
from the owner before it. That costs one look-up, and the fetch itself stays one pass whose segments fire as they come.
`match` asks in the same order. A put goes to the present owner alone, so what is put again moves. What a fetch has
delivered from an earlier owner is moved in the background (`efs/moving.py`).

*Puts.* A group's blocks are copied out of the caller's buffer where they do not stand in one piece, at most
STAGING_PIECE_BYTES at a time for all groups together: a group's writer takes one block-major array. Each write says by
which version of the map it is made; where nodes know of a later one and refuse it, the map is read again, once a put,
and the put made again. Reads are verified by what they find and never refused.

The nodes of all groups are numbered through (`efs.joined.numbered`). With one group every call is passed on as it is.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from efs.background import Background
from efs.batch import require_keys
from efs.clock import Clock, Deadline
from efs.errors import InvalidArgument, StoreClosed
from efs.fs import FileSystem, OnSegment
from efs.joined import (
    Rows,
    SegmentJoin,
    joined_get,
    joined_purge,
    joined_put,
    joined_repair,
    joined_scrub,
    joined_sweep,
    numbered,
)
from efs.limits import (
    HOLLOW_GRACE_MS,
    INFO_DEADLINE_MS,
    LOCATE_MS,
    LOCATE_SHARE,
    STAGING_PIECE_BYTES,
    STRIPE_SHARDS,
)
from efs.link import MapHeld
from efs.memory import flat_bytes
from efs.metrics import CounterFile
from efs.moving import Mover
from efs.nodedir import OwnerLock
from efs.ownership import Owners, Ownership
from efs.pace import Traffic
from efs.purge import PurgeReport
from efs.quota import Quotas
from efs.repair import RepairReport
from efs.scrub import ScrubReport
from efs.shape import BlockShape
from efs.stripe import ShardReport
from efs.sweep import SweepReport
from efs.target import Part
from efs.types import GetReport, NodeInfo, PutItem, PutReport
from efs.writer import check_items

T = TypeVar("T")

Flags = NDArray[np.bool_]
Renew = Callable[[int, Deadline], Awaitable[bool]]


class GroupedFileSystem:
    """The verbs of `FileSystem`, over one or more of them. `groups[g]` is group g."""

    def __init__(self, groups: Sequence[FileSystem], ownership: Ownership, *, counters: CounterFile, clock: Clock,
                 quotas: Quotas, lock: OwnerLock | None = None, root: str | None = None,
                 map_held: MapHeld | None = None, renew: Renew | None = None, move: bool = True) -> None:
        """Over groups that are open; all of them count in `counters` and have `quotas`. Must run on the loop.

        map_held: by which version of the map the nodes are written to. renew: asked after a put by a version that
        failed in part; whether a later one is in use now, because that one turned out outdated. move: bring blocks that
        fetches find at an earlier owner to the present one, in the background."""
        if len(groups) != ownership.groups:
            raise InvalidArgument(f"{len(groups)} groups are open, {ownership.groups} own keys")
        self.groups = tuple(groups)
        self.root = root
        self.counters = counters
        self.quotas = quotas
        self.upkeep = GroupedUpkeep(self)
        self._ownership = ownership
        self._clock = clock
        self._lock = lock
        self._map_held = map_held or MapHeld()
        self._renew = renew
        self._background = Background()
        self._closed = False
        self._traffic = Traffic()
        self._mover = Mover(lambda: self.groups, self._owners_now, self._put_renewed, counters, clock, self._traffic)
        self._move = move
        if move:
            self._background.start("move", self._mover.run)

    # -- blocks -------------------------------------------------------------------------------------------------

    async def get_into(self, keys: Sequence[bytes], shape: BlockShape, out: Any, *, on_segment: OnSegment | None = None,
                       deadline_ms: float) -> GetReport:
        """`FileSystem.get_into`. Blocks of a group that cannot be read are misses."""
        if len(self.groups) == 1 or not keys:
            return await self.groups[0].get_into(keys, shape, out, on_segment=on_segment, deadline_ms=deadline_ms)
        deadline, began = self._begin(keys, deadline_ms), self._clock.monotonic()
        target = flat_bytes(out, "out", len(keys) * shape.block_bytes, writable=True)
        owners = self._ownership.owners(keys, self._clock.wall())
        with self._traffic.call():
            holders = await self._holders(keys, owners, deadline)
            report = await self._fetch(keys, shape, target, _split(holders), on_segment, deadline, began)
        if self._move and len(owners) > 1:
            rows = np.flatnonzero((holders != owners[0]) & np.array(report.ok))
            self._mover.offer(_chosen(keys, rows), holders[rows], shape)
        return report

    async def _fetch(self, keys: Sequence[bytes], shape: BlockShape, target: NDArray[np.uint8],
                     parts: Sequence[tuple[int, Rows]], on_segment: OnSegment | None, deadline: Deadline,
                     began: float) -> GetReport:
        """Fetch blocks from the groups that have them."""
        if len(parts) == 1:
            group = self.groups[parts[0][0]]
            return await group.get_into(keys, shape, target, on_segment=on_segment, deadline_ms=_left_ms(deadline))
        every = [rows for _, rows in parts]
        join = SegmentJoin(len(keys), len(shape.segment_bytes), every, on_segment) if on_segment is not None else None
        reports = await _together([
            self.groups[group].get_part(_chosen(keys, rows), shape, target, Part(len(keys), rows),
                                        on_segment=None if join is None else join.of(at),
                                        deadline_ms=_left_ms(deadline))
            for at, (group, rows) in enumerate(parts)])
        return joined_get(len(keys), list(zip(every, reports, strict=True)), self._clock.monotonic() - began)

    async def put(self, items: Sequence[PutItem], shape: BlockShape, blocks: Any, *, deadline_ms: float) -> PutReport:
        """`FileSystem.put`, to the present owners. A quota refuses the new blocks of a tenant group by group."""
        self._require_open()
        deadline = Deadline.after_ms(self._clock, deadline_ms)
        with self._traffic.call():
            return await self._put_renewed(items, shape, blocks, deadline)

    async def _put_renewed(self, items: Sequence[PutItem], shape: BlockShape, blocks: Any,
                           deadline: Deadline) -> PutReport:
        """A put, made again where it was by an outdated map and a later one could be read."""
        version = self._map_held.version
        report = await self._put_all(items, shape, blocks, deadline)
        if not report.failed or self._renew is None or not await self._renew(version, deadline):
            return report
        again = await self._put_all(items, shape, blocks, deadline)
        return replace(again, acked=report.acked + again.acked, already=max(0, again.already - report.acked))

    async def _put_all(self, items: Sequence[PutItem], shape: BlockShape, blocks: Any,
                       deadline: Deadline) -> PutReport:
        if len(self.groups) == 1 or not items:
            return await self.groups[0].put(items, shape, blocks, deadline_ms=_left_ms(deadline))
        check_items(items)
        source = flat_bytes(blocks, "blocks", len(items) * shape.block_bytes).reshape(len(items), shape.block_bytes)
        parts = _split(self._owners_now([item.key for item in items]))
        most = max(1, STAGING_PIECE_BYTES // shape.block_bytes // max(1, len(parts)))

        async def one(group: int, rows: Rows) -> PutReport:
            if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
                return await self._put(group, items, rows, shape, source[rows[0] : rows[-1] + 1], deadline)
            return joined_put([await self._put(group, items, some, shape, source[some], deadline)
                               for some in (rows[at : at + most] for at in range(0, len(rows), most))])

        return joined_put(await _together([one(group, rows) for group, rows in parts]))

    async def _put(self, group: int, items: Sequence[PutItem], rows: Rows, shape: BlockShape,
                   blocks: NDArray[np.uint8], deadline: Deadline) -> PutReport:
        report = await self.groups[group].put([items[row] for row in rows.tolist()], shape, blocks,
                                              deadline_ms=_left_ms(deadline))
        return report if report.why is None else replace(report, why=f"group {group}: {report.why}")

    async def match(self, keys: Sequence[bytes], *, strict: bool = False, deadline_ms: float) -> int:
        """How many leading keys are present, by metadata alone: a promise that the fetch may correct."""
        if len(self.groups) == 1 or not keys:
            return await self.groups[0].match(keys, strict=strict, deadline_ms=deadline_ms)
        deadline = self._begin(keys, deadline_ms)
        with self._traffic.call():
            return await self._match(keys, strict, deadline)

    async def _match(self, keys: Sequence[bytes], strict: bool, deadline: Deadline) -> int:
        owners = self._ownership.owners(keys, self._clock.wall())
        if not _moved(owners).any():
            parts = _split(owners[0])
            found = await _together([
                self.groups[group].match(_chosen(keys, rows), strict=strict, deadline_ms=_left_ms(deadline))
                for group, rows in parts])
            return min((int(rows[count]) for (_, rows), count in zip(parts, found, strict=True) if count < len(rows)),
                       default=len(keys))
        present = np.zeros(len(keys), np.bool_)
        wanted = np.ones(len(keys), np.bool_)
        for level, asked in enumerate(owners):
            fresh = wanted & ~present if not level else wanted & ~present & (asked != owners[level - 1])
            present |= await self._present(keys, asked, fresh, strict, deadline)
            # Behind a key that nobody else may have nothing counts.
            later = np.zeros(len(keys), np.bool_) if level + 1 == len(owners) else _moved(owners[level:])
            hopeless = ~present & ~later
            wanted[_first(hopeless) :] = False
        return _first(~present)

    async def drop(self, keys: Sequence[bytes], *, deadline_ms: float) -> int:
        """`FileSystem.drop`, at the owners of today and of the retention time: a block is removed when it is from each
        group that held some of it, and one group that refuses is enough for its error."""
        deadline = self._begin(keys, deadline_ms)
        if not keys:
            return 0
        await self._mover.forget(keys, deadline)
        owners = self._ownership.owners(keys, self._clock.wall())
        calls = [self.groups[group].drop_keys(_chosen(keys, rows), deadline_ms=_left_ms(deadline))
                 for level, asked in enumerate(owners)
                 for group, rows in _split(asked, None if not level else asked != owners[level - 1])]
        removed: dict[bytes, bool] = {}
        for found in await _together(calls):
            removed.update((key, gone and removed.get(key, True)) for key, gone in found.items())
        return sum(removed.values())

    async def look_up_all(self, key: bytes, *, deadline_ms: float) -> tuple[ShardReport, ...]:
        """`FileSystem.look_up_all`, at all owners that are asked for the key."""
        deadline = self._begin([key], deadline_ms)
        groups = list(dict.fromkeys(int(owner[0]) for owner in self._ownership.owners([key], self._clock.wall())))
        found = await _together([self.groups[group].look_up_all(key, deadline_ms=_left_ms(deadline))
                                 for group in groups])
        return tuple(replace(report, node_index=numbered(group, report.node_index))
                     for group, reports in zip(groups, found, strict=True) for report in reports)

    # -- where keys are -----------------------------------------------------------------------------------------

    def _owners_now(self, keys: Sequence[bytes]) -> Owners:
        """(n,) the present owner of each key."""
        return self._ownership.owners(keys, self._clock.wall())[0]

    async def _holders(self, keys: Sequence[bytes], owners: Sequence[Owners],
                       deadline: Deadline) -> NDArray[np.intp]:
        """(n,) the group from which to fetch each key, of those that own it or have."""
        holder = owners[0].astype(np.intp)
        unsure = _moved(owners)
        if not unsure.any():
            return holder
        asking = Deadline.after_ms(self._clock, max(1.0, min(LOCATE_MS, LOCATE_SHARE * deadline.left() * 1000)))
        for level, asked in enumerate(owners[:-1]):
            ask = unsure & _moved(owners[level:])
            if level:
                ask &= asked != owners[level - 1]
            unsure &= ~await self._present(keys, asked, ask, True, asking)
            holder[unsure] = owners[level + 1][unsure]
        self.counters.add("previous_owner_blocks", int((holder != owners[0]).sum()))
        return holder

    async def _present(self, keys: Sequence[bytes], owners: Owners, ask: Flags, strict: bool,
                       deadline: Deadline) -> Flags:
        """(n,) which of the keys that are asked for their owners have."""
        parts = _split(owners, ask)
        found = await _together([
            self.groups[group].present(_chosen(keys, rows), strict=strict, deadline_ms=_left_ms(deadline))
            for group, rows in parts])
        present = np.zeros(len(keys), np.bool_)
        for (_, rows), flags in zip(parts, found, strict=True):
            present[rows] = flags
        return present

    # -- space and tenants ----------------------------------------------------------------------------------------

    async def collect(self, *, deadline_ms: float) -> dict[int, int]:
        """`FileSystem.collect` of all groups, by number of the node."""
        evicted = await _together([group.collect(deadline_ms=deadline_ms) for group in self.groups])
        return {numbered(group, index): count for group, counts in enumerate(evicted)
                for index, count in counts.items()}

    async def sweep(self, *, after: bytes | None = None, max_seconds: float | None = None,
                    purged: Collection[bytes] = ()) -> SweepReport:
        """`FileSystem.sweep` of all groups, side by side."""
        return joined_sweep(await _together([group.sweep(after=after, max_seconds=max_seconds, purged=purged)
                                             for group in self.groups]))

    async def purge(self, tags: Collection[bytes]) -> PurgeReport:
        """`FileSystem.purge` of all groups."""
        return joined_purge(await _together([group.purge(tags) for group in self.groups]))

    @property
    def purged(self) -> frozenset[bytes]:
        """The tenant tags that were purged."""
        return frozenset[bytes]().union(*(group.purged for group in self.groups))

    @property
    def purging(self) -> dict[bytes, frozenset[int]]:
        """Those of them of which some node may still hold records, and the numbers of these nodes."""
        pending: dict[bytes, frozenset[int]] = {}
        for number, group in enumerate(self.groups):
            for tag, nodes in group.purging.items():
                pending[tag] = pending.get(tag, frozenset()) | {numbered(number, index) for index in nodes}
        return pending

    async def tenant_bytes(self, *, deadline_ms: float = INFO_DEADLINE_MS) -> tuple[dict[bytes, int], tuple[int, ...]]:
        """`FileSystem.tenant_bytes`, the sum over all groups."""
        total: Counter[bytes] = Counter()
        silent: list[int] = []
        answers = await _together([group.tenant_bytes(deadline_ms=deadline_ms) for group in self.groups])
        for number, (held, missing) in enumerate(answers):
            total.update(held)
            silent += [numbered(number, index) for index in missing]
        return dict(total), tuple(silent)

    # -- nodes and groups -------------------------------------------------------------------------------------------

    async def nodes(self) -> list[NodeInfo]:
        """The nodes of all groups, by number."""
        answers = await _together([group.nodes() for group in self.groups])
        return [replace(info, node_index=numbered(number, info.node_index))
                for number, infos in enumerate(answers) for info in infos]

    @property
    def problems(self) -> Mapping[int, str]:
        """Why nodes were left out, by number."""
        return {numbered(number, index): why for number, group in enumerate(self.groups)
                for index, why in group.problems.items()}

    def note_replaced(self, number: int, node_id: str, path: str) -> None:
        """`FileSystem.note_replaced` of a node by its number."""
        group, index = divmod(number, STRIPE_SHARDS)
        self.groups[group].note_replaced(index, node_id, path)

    def drain(self, draining: Collection[int]) -> None:
        """`FileSystem.drain` of nodes by their numbers."""
        for number, group in enumerate(self.groups):
            group.drain([node % STRIPE_SHARDS for node in draining if node // STRIPE_SHARDS == number])

    def extend(self, groups: Sequence[FileSystem], ownership: Ownership) -> None:
        """Groups that were added to the cluster, and who owns what from now on."""
        self._require_open()
        assert len(self.groups) + len(groups) == ownership.groups
        self.groups = (*self.groups, *groups)
        self._ownership = ownership

    def attend(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `work()` run in the background until the filesystem is closed."""
        self._require_open()
        self._background.start(name, work)

    async def close(self) -> None:
        """`FileSystem.close` of all groups. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._background.close()
            await _together([group.close() for group in self.groups])
        finally:
            self.counters.close()
            if self._lock is not None:
                self._lock.release()

    # -- inside -------------------------------------------------------------------------------------------------

    def _require_open(self) -> None:
        if self._closed:
            raise StoreClosed("the store is closed")

    def _begin(self, keys: Sequence[bytes], deadline_ms: float) -> Deadline:
        """The checks that every call on keys begins with."""
        self._require_open()
        require_keys(keys)
        return Deadline.after_ms(self._clock, deadline_ms)


AnyFileSystem = FileSystem | GroupedFileSystem
"""A store of a directory, or a cluster."""


class GroupedUpkeep:
    """What `efs.upkeep.Upkeep` does on demand, for all groups side by side."""

    def __init__(self, filesystem: GroupedFileSystem) -> None:
        self._filesystem = filesystem

    @property
    def _groups(self) -> Sequence[FileSystem]:
        return self._filesystem.groups

    async def repair(self, *, after: bytes | None = None, max_seconds: float | None = None, grace_ms: int = 0,
                     per_second: int | None = None) -> RepairReport:
        return joined_repair(await _together([
            group.upkeep.repair(after=after, max_seconds=max_seconds, grace_ms=grace_ms, per_second=per_second)
            for group in self._groups]))

    async def scrub(self, *, max_seconds: float | None = None, per_second: int | None = None,
                    from_start: bool = False) -> ScrubReport:
        """per_second: of each group."""
        return joined_scrub(await _together([
            group.upkeep.scrub(max_seconds=max_seconds, per_second=per_second, from_start=from_start)
            for group in self._groups]))

    async def sweep(self, *, grace_ms: int = HOLLOW_GRACE_MS) -> SweepReport:
        return joined_sweep(await _together([group.upkeep.sweep(grace_ms=grace_ms) for group in self._groups]))

    async def sync(self, *, per_second: int | None = None) -> RepairReport | None:
        reports = await _together([group.upkeep.sync(per_second=per_second) for group in self._groups])
        done = [report for report in reports if report is not None]
        return joined_repair(done) if done else None

    @property
    def syncing(self) -> tuple[int, ...]:
        return tuple(numbered(number, index) for number, group in enumerate(self._groups)
                     for index in group.upkeep.syncing)

    @property
    def share_done(self) -> float:
        return sum(group.upkeep.share_done for group in self._groups) / len(self._groups)


def _moved(owners: Sequence[Owners]) -> Flags:
    """(n,) which keys have had another owner than the first one of these."""
    moved = np.zeros(len(owners[0]), np.bool_)
    for earlier in owners[1:]:
        moved |= earlier != owners[0]
    return moved


def _split(owners: NDArray[Any], chosen: Flags | None = None) -> list[tuple[int, Rows]]:
    """(group, its rows) of all rows, or of the chosen ones."""
    rows = np.arange(len(owners)) if chosen is None else np.flatnonzero(chosen)
    return [(int(group), rows[owners[rows] == group]) for group in np.unique(owners[rows])]


def _chosen(keys: Sequence[bytes], rows: Rows) -> list[bytes]:
    return [keys[row] for row in rows.tolist()]


def _first(flags: Flags) -> int:
    """The index of the first True, the length where there is none."""
    return int(flags.argmax()) if flags.any() else len(flags)


def _left_ms(deadline: Deadline) -> float:
    """What is left of a deadline, for a call that refuses none at all."""
    return max(0.001, deadline.left() * 1000)


async def _together(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results of all calls. When one raises, or this is cancelled, none of them runs any more at the end."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    if not tasks:
        return []
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        failed = [task for task in tasks if task in done and task.exception() is not None]
        return [task.result() for task in failed or tasks]
    finally:
        await _ended(tasks)


async def _ended(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Cancel tasks and wait until all have ended. A cancellation that comes meanwhile is raised then."""
    cancelled: asyncio.CancelledError | None = None
    for task in tasks:
        task.cancel()
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
