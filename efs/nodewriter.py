"""Changing a node: put, drop, rewriting entries. Belongs to the loop's thread; the writer thread does the jobs.

*Exact answers.* What a put may store depends on what the node holds, so it is decided in one go, without awaiting, on
an answer that is exact at that moment (`exact`): every version of the keys, with the tables of all of them pinned. New
records are announced in `state.coming` in the same go; another put of the same version waits for the first.

*Giving up.* A caller whose deadline passes or who is cancelled leaves its job running; the result is applied all the
same. Before its job was submitted, a put gives back all that it reserved.

*Full nodes.* Of the new records those get in for which `efs/placer.py` finds slots; `efs.gc.admit` says which.

*Sweeps.* A drop can ask for an age (`DropItem.older_than_ms`). A record whose arrival a put is renewing counts as just
arrived from the moment in which the put has found it, also while the renewal is on its way.

*Purged tenants.* A record whose tenant tag is buried is not taken in, and one whose job was under way when its tag was
buried goes as soon as the job has ended, before anybody can find it (`efs/burial.py`).

*Failures.* A job that fails leaves its slots free, and what it was to delete is owed. No space (ENOSPC, EDQUOT) is
NodeFull and passes; a failed sync makes the node read-only; a full index first evicts and tries once more.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from efs.batch import BatchFields, check_batch
from efs.clock import Deadline, stamp_of
from efs.contract import ABSENT, PURGED, TOO_COLD, PutBatch, PutOutcome
from efs.errors import NodeFull, NodeReadOnly
from efs.extent import SLOT_BITS, SLOT_MASK, SlotClass, ranges_of
from efs.gc import ranks_of, ties_of
from efs.index import IndexFull
from efs.limits import DELETE_BATCH, KEY_BYTES, MAX_VERSIONS_PER_KEY
from efs.lookups import Lookups
from efs.nodeguard import Guard
from efs.nodestate import Locations, NodeState
from efs.placer import Newcomers, Placement, Placer
from efs.shard import LOCAL_BYTES, entry_headers
from efs.tables import Table
from efs.types import DropItem
from efs.writejob import NO_SPACE, Entries, Format, Formats, JobFailed, Records, Slots, SyncFailed, WriteJob, run_job

R = TypeVar("R")
Checker = Callable[[Sequence[bytes], Deadline], Awaitable[Any]]
NO_SLOT = "no free slot and nothing to evict"
TOO_MANY_VERSIONS = f"a key has {MAX_VERSIONS_PER_KEY} versions already"


@dataclass(frozen=True, slots=True)
class Version:
    """One record that is held."""

    location: int
    generation: int
    trusted: bool


@dataclass(slots=True)
class Exact:
    """What is held of some keys: exact until the holder awaits. Tables of all of it stay pinned until `release`.

    versions: by key ‖ digest. counts: number of versions by key, for keys that have any.
    """

    versions: dict[bytes, Version] = field(default_factory=dict)
    counts: dict[bytes, int] = field(default_factory=dict)
    pinned: dict[int, Table] = field(default_factory=dict)

    def release(self) -> None:
        for table in self.pinned.values():
            table.pins -= 1
        self.pinned.clear()


@dataclass(slots=True)
class Choice:
    """What a put does with each row. known: versions whose arrival is renewed, by row. new: rows to store. same_as:
    rows that name the record of an earlier row. doubtful: index keys of untrusted versions. awaited: puts of the
    same."""

    known: dict[int, Version] = field(default_factory=dict)
    new: list[int] = field(default_factory=list)
    same_as: dict[int, int] = field(default_factory=dict)
    doubtful: list[bytes] = field(default_factory=list)
    awaited: set[asyncio.Future[None]] = field(default_factory=set)
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Kept:
    """Rows of a batch that were stored, and why others were not."""

    rows: tuple[int, ...] = ()
    why: str | None = None


class NodeWriter:
    """The writing side of one node. `durable`: jobs are synced (power mode). `check` verifies records by index key."""

    def __init__(self, state: NodeState, guard: Guard, lookups: Lookups, placer: Placer, durable: bool,
                 check: Checker) -> None:
        self._state = state
        self._guard = guard
        self._lookups = lookups
        self._placer = placer
        self._durable = durable
        self._formats = Formats()
        self._check = check

    # -- put

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        """See the contract."""
        self._guard.require_writable()
        checked = check_batch(batch, self._guard.node_index)
        slot_class = SlotClass(batch.payload.shape[1], LOCAL_BYTES + batch.headers.shape[1])
        self._state.allocator.geometry_for(slot_class)
        try:
            return await self._put_once(batch, checked, slot_class, deadline)
        except IndexFull:
            await self._make_index_room(len(batch.keys), deadline)
        try:
            return await self._put_once(batch, checked, slot_class, deadline)
        except IndexFull as error:
            raise self._full(str(error)) from error

    async def _put_once(self, batch: PutBatch, checked: BatchFields, slot_class: SlotClass,
                        deadline: Deadline) -> PutOutcome:
        exact, choice = await self._choose(checked, deadline)
        renewal: asyncio.Future[int] | None = None
        names = [checked.index_keys[row] for row in choice.new]
        try:
            if choice.known:
                self._use([version.location for version in choice.known.values()], batch.stamp)
                renewal = self._renew({checked.index_keys[row]: found for row, found in choice.known.items()})
            done = self._announce(names)
        finally:
            exact.release()
        kept = await self._store(batch, checked, choice.new, slot_class, done, deadline) if names else Kept()
        if renewal is not None:
            await self._guard.result(renewal, deadline)
            self._state.counters.add("node_put_known", len(choice.known))
        stored = np.zeros(len(batch.keys), np.bool_)
        stored[[*choice.known, *kept.rows]] = True
        for row, first in choice.same_as.items():
            stored[row] = stored[first]
        why = kept.why or choice.why
        buried = self._buried(checked.fields["tenant_tag"])
        if buried.any():
            self._state.counters.add("node_put_purged", int(buried.sum()))
            stored[buried], why = False, PURGED
        if kept.why is not None and not stored.any() and not batch.repair:
            raise self._full(kept.why)
        return PutOutcome(stored, why)

    async def _choose(self, checked: BatchFields, deadline: Deadline) -> tuple[Exact, Choice]:
        """Decide what happens to each row. Nothing is awaited between the decision and the return."""
        keys = [name[:KEY_BYTES] for name in checked.index_keys]
        while True:
            exact = await self.exact(keys, deadline)
            choice = self._split(checked, exact)
            if not choice.awaited and not choice.doubtful:
                return exact, choice
            exact.release()
            if deadline.passed():
                raise self._guard.unavailable("no answer by the deadline")
            if choice.awaited:
                await asyncio.wait(choice.awaited, timeout=deadline.left())
            else:
                await self._check(choice.doubtful, deadline)

    def _split(self, checked: BatchFields, exact: Exact) -> Choice:
        choice, index_keys = Choice(), checked.index_keys
        refused = set(np.flatnonzero(self._buried(checked.fields["tenant_tag"])).tolist())
        if not exact.versions and not self._state.coming and not refused:
            keys = {name[:KEY_BYTES] for name in index_keys}
            if len(keys) == len(index_keys):
                choice.new = list(range(len(index_keys)))
                return choice
        counts = dict(exact.counts)
        first: dict[bytes, int] = {}
        coming = self._state.coming
        busy = {name[:KEY_BYTES]: done for name, done in coming.items()}
        for row, name in enumerate(index_keys):
            if row in refused:
                continue
            earlier = first.setdefault(name, row)
            version = exact.versions.get(name)
            key = name[:KEY_BYTES]
            if earlier != row:
                choice.same_as[row] = earlier
            elif version is not None and version.trusted:
                choice.known[row] = version
            elif version is not None:
                choice.doubtful.append(name)
            elif key in busy:
                choice.awaited.add(busy[key])
            elif counts.get(key, 0) >= MAX_VERSIONS_PER_KEY:
                choice.why = TOO_MANY_VERSIONS
            else:
                counts[key] = counts.get(key, 0) + 1
                choice.new.append(row)
        return choice

    async def _store(self, batch: PutBatch, checked: BatchFields, rows: Sequence[int], slot_class: SlotClass,
                     done: asyncio.Future[None], deadline: Deadline) -> Kept:
        """Store rows of a batch that were announced, as far as they get in."""
        announced = [checked.index_keys[row] for row in rows]
        stamp = min(batch.stamp, stamp_of(self._guard.clock.wall()))
        try:
            newcomers = _newcomers(slot_class, checked, rows, stamp, batch.repair)
            placement = await self._placer.place(newcomers, deadline)
            placed = [rows[at] for at in placement.rows[: placement.count]]
            names = [checked.index_keys[row] for row in placed]
            job = self._put_job(batch, placed, names, slot_class, placement)
            reserved = list(placement.ranges)
            future = self.submit_placed(job, placement, partial(self._stored, job, stamp, announced, done),
                                        partial(self._not_stored, reserved, announced, done))
        except BaseException:
            self._end(announced, done)
            raise
        if placement.too_cold:
            self._state.counters.add("node_too_cold", len(rows) - len(placement.rows))
        await self._guard.result(future, deadline)
        return Kept(tuple(placed), TOO_COLD if placement.too_cold else NO_SLOT if len(placed) < len(rows) else None)

    def _put_job(self, batch: PutBatch, rows: Sequence[int], names: Sequence[bytes], slot_class: SlotClass,
                 placement: Placement) -> WriteJob:
        geometry = self._state.allocator.geometry_for(slot_class)
        generations = self._state.next_generations(len(rows))
        arrival_ms = self._guard.arrivals.now_ms()
        records, start = [], 0
        for slots in placement.ranges:
            stop = start + slots.count
            mine = list(rows[start:stop])
            together = mine[-1] - mine[0] == slots.count - 1
            part = slice(mine[0], mine[-1] + 1) if together else mine
            records.append(Records(geometry, slots.location, batch.headers[part], generations[start:stop], arrival_ms,
                                   batch.payload[part], tuple(names[start:stop])))
            start = stop
        extents = {slots.location >> SLOT_BITS for slots in placement.ranges}
        formats = tuple(Format(extent, slot_class, self._state.unformatted[extent])
                        for extent in sorted(extents) if extent in self._state.unformatted)
        targets = [Slots(geometry, slots.location, slots.count) for slots in placement.ranges]
        formatted = {form.extent for form in formats}
        clears = [*placement.cleared, *(slots for slots in targets if slots.location >> SLOT_BITS not in formatted)]
        return WriteJob(tuple(clears), formats, frozenset(placement.taken), tuple(records), tuple(placement.evicted))

    def _stored(self, job: WriteJob, stamp: int, names: Sequence[bytes], done: asyncio.Future[None],
                entries: Sequence[NDArray[np.uint8]]) -> int:
        self._state.keep(job.records, entries, stamp)
        self._forget_late(job.records)
        self._end(names, done)
        count = sum(part.count for part in job.records)
        self._state.counters.add("node_put_records", count)
        return count

    def _forget_late(self, records: Sequence[Records]) -> None:
        """Of records that were just stored those go at once whose tags were buried meanwhile."""
        if not self._state.buried or not records:
            return
        locations = np.concatenate([part.locations() for part in records])
        rows = [self._state.table(part.location >> SLOT_BITS).entries[part.location & SLOT_MASK :][: part.count]
                for part in records]
        late = self._buried(np.concatenate([np.array(part["tenant_tag"]) for part in rows]))
        if late.any():
            self.forget_at(np.sort(locations[late]))

    def _buried(self, tags: NDArray[np.uint64]) -> NDArray[np.bool_]:
        """(n,) whether records with these tenant tags are refused."""
        if not self._state.buried:
            return np.zeros(len(tags), np.bool_)
        found = [tag for tag in np.unique(tags).tolist() if tag in self._state.buried]
        return np.isin(tags, np.array(found, np.uint64))

    def _not_stored(self, reserved: Sequence[Any], names: Sequence[bytes], done: asyncio.Future[None]) -> None:
        for slots in reserved:
            self._state.allocator.release_range(slots)
        self._end(names, done)

    def _announce(self, names: Sequence[bytes]) -> asyncio.Future[None]:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._state.coming.update(dict.fromkeys(names, done))
        return done

    def _end(self, names: Iterable[bytes], done: asyncio.Future[None]) -> None:
        """The announced records are there, or will not be."""
        deque(map(self._state.coming.pop, names, repeat(None)), maxlen=0)
        if not done.done():
            done.set_result(None)

    async def _make_index_room(self, count: int, deadline: Deadline) -> None:
        """The index is full: evict, and have the index entries deleted."""
        queue = await self._placer.choose(None, max(count, DELETE_BATCH), True, deadline)
        await self.evict(queue.locations, queue.ranks, deadline)

    async def evict(self, locations: Locations, ranks: NDArray[np.uint64], deadline: Deadline) -> int:
        """Evict those of the records that still have these ranks, on disk too; returns how many that were."""
        self._guard.require_writable()
        placement = await self._placer.evict(locations, ranks, deadline)
        job = WriteJob(clears=tuple(placement.cleared), deletes=tuple(placement.evicted))
        evicted = len(placement.evicted)
        future = self.submit_placed(job, placement, lambda _: evicted, lambda: None)
        return await self._guard.result(future, deadline)

    # -- drop and rewrite

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        """See the contract."""
        self._guard.require_writable()
        exact = await self.exact([item.key for item in items], deadline)
        try:
            places = {version.location for item in items if (version := self._to_drop(exact, item)) is not None}
            if not places:
                return 0
            future = self.drop_at(places)
        finally:
            exact.release()
        return await self._guard.result(future, deadline)

    def _to_drop(self, exact: Exact, item: DropItem) -> Version | None:
        """The record that an item means, if it is there and old enough."""
        name = item.key + item.digest
        version = exact.versions.get(name)
        if version is None or version.generation != item.generation:
            return None
        if item.older_than_ms:
            entry = exact.pinned[version.location >> SLOT_BITS].entries[version.location & SLOT_MASK]
            arrival_ms = int(entry["arrival_ms"])
            if name in self._state.renewing or not self._guard.arrivals.at_least(arrival_ms, item.older_than_ms):
                return None
        return version

    def drop_at(self, places: Iterable[int]) -> asyncio.Future[int]:
        """Remove live records, whose tables are in memory, by location."""
        self._guard.require_room(self._guard.writer)
        locations = np.array(sorted(places), np.int64)
        return self.submit(self._forget(locations), lambda _: len(locations))

    def forget_at(self, locations: Locations) -> None:
        """Remove live records, whose tables are in memory, at these ascending locations: from memory now, from the disk
        with the next job."""
        job = self._forget(locations)
        self._state.owe(job.deletes, job.clears)

    def _forget(self, locations: Locations) -> WriteJob:
        """Take records out of memory; what the disk has to be told."""
        state = self._state
        clears = []
        for _, location, count in ranges_of(locations):
            geometry = state.allocator.geometry(location >> SLOT_BITS)
            assert geometry is not None, "a live slot has a geometry"
            clears.append(Slots(geometry, location, count))
        entries = state.forget(locations)
        state.counters.add("node_dropped", len(locations))
        return WriteJob(clears=tuple(clears), deletes=tuple(entries))

    def _use(self, locations: Sequence[int], stamp: int) -> None:
        """A put of what is held is a use of it."""
        self._state.stamps.touch(np.array(locations, np.int64), min(stamp, stamp_of(self._guard.clock.wall())))

    def _renew(self, known: dict[bytes, Version]) -> asyncio.Future[int]:
        """Rewrite the entries of these records, whose tables are in memory, with the arrival of now."""
        renewing = self._state.renewing
        future = self.rewrite([version.location for version in known.values()], self._guard.arrivals.now_ms())
        renewing.update(known.keys())

        def renewed(_: asyncio.Future[int]) -> None:
            for name in known:
                renewing[name] -= 1
                if not renewing[name]:
                    del renewing[name]

        future.add_done_callback(renewed)
        return future

    def rewrite(self, locations: Iterable[int], arrival_ms: int | None) -> asyncio.Future[int]:
        """Write entries anew with the current boot epoch, and a new arrival unless None. Tables must be in memory."""
        records = []
        for _, location, count in ranges_of(np.array(sorted(locations), np.int64)):
            table = self._state.table(location >> SLOT_BITS)
            rows = table.entries[location & SLOT_MASK : (location & SLOT_MASK) + count]
            arrivals = np.array(rows["arrival_ms"], np.uint64) if arrival_ms is None else arrival_ms
            records.append(Records(table.geometry, location, np.array(entry_headers(rows)),
                                   np.array(rows["generation"], np.uint64), arrivals, None, ()))
        job = WriteJob(records=tuple(records))
        return self.submit(job, partial(self._rewritten, job))

    def _rewritten(self, job: WriteJob, entries: Sequence[NDArray[np.uint8]]) -> int:
        """Apply rewritten entries to the records that are still there; returns how many became trusted by it."""
        state = self._state
        trusted = 0
        for part, raw in zip(job.records, entries, strict=True):
            table = state.tables.get(part.location >> SLOT_BITS)
            if table is None or table.geometry != part.geometry:
                continue
            first = part.location & SLOT_MASK
            look = table.look[first : first + part.count]
            same = look["generation"] == part.generations
            below = same & (look["boot_epoch"] < state.boot.unverified_below)
            trusted += int(np.count_nonzero(below))
            if same.all():
                table.fill(first, raw)
                continue
            for row in np.flatnonzero(same).tolist():
                table.fill(first + row, raw[row : row + 1])
        state.unverified -= trusted
        return trusted

    async def exact(self, keys: Sequence[bytes], deadline: Deadline) -> Exact:
        """What is held of the keys: exact until the caller next awaits, which must `release` it."""
        exact = Exact()
        resolution = self._state.watch()
        try:
            while True:
                resolution.changed.clear()
                table = await self._lookups.look_up(keys, deadline)
                places = np.array([*table.location[table.location != ABSENT].tolist(),
                                   *(row.location for row in table.extra)], np.int64)
                complete = await self._pin_all(exact, sorted(set((places >> SLOT_BITS).tolist())), deadline)
                if complete and resolution.changed.isdisjoint(keys):
                    break
        except BaseException:
            exact.release()
            raise
        finally:
            self._state.unwatch(resolution)
        held = np.flatnonzero(table.location != ABSENT)
        found = zip(held.tolist(), table.digest[held], table.location[held].tolist(),
                    table.generation[held].tolist(), table.trusted[held].tolist(), strict=True)
        for row, digest, location, generation, trusted in found:
            exact.versions[keys[row] + digest.tobytes()] = Version(location, generation, trusted)
        for more in table.extra:
            exact.versions[keys[more.row] + more.digest] = Version(more.location, more.generation, more.trusted)
        for name in exact.versions:
            exact.counts[name[:KEY_BYTES]] = exact.counts.get(name[:KEY_BYTES], 0) + 1
        return exact

    async def _pin_all(self, exact: Exact, extents: Sequence[int], deadline: Deadline) -> bool:
        """Pin tables; False when some had to be loaded for it, or are not there."""
        complete = True
        for extent in extents:
            table = self._state.tables.get(extent)
            if table is None:
                complete = False
                await self._lookups.load((extent,), deadline)
                table = self._state.tables.get(extent)
            if table is not None and exact.pinned.get(extent) is not table:
                if extent in exact.pinned:
                    exact.pinned[extent].pins -= 1
                table.pins += 1
                exact.pinned[extent] = table
        return complete

    # -- jobs

    def submit_placed(self, job: WriteJob, placement: Placement, apply: Callable[[list[NDArray[np.uint8]]], R],
                       failed: Callable[[], None]) -> asyncio.Future[R]:
        """Submit the job of a placement, which ends with that."""
        try:
            future = self.submit(job, apply, failed)
        except BaseException:
            self._placer.abandon(placement)
            raise
        placement.unpin()
        return future

    def submit(self, job: WriteJob, apply: Callable[[list[NDArray[np.uint8]]], R],
               failed: Callable[[], None] | None = None) -> asyncio.Future[R]:
        """Queue a job with what is owed. Its tables must be in memory. On the loop, after it ran, either `apply` is
        called with the raw entries of its records, or `failed`. NodeUnavailable, with nothing changed, when the queue
        is full."""
        state = self._state
        self._guard.require_room(self._guard.writer)
        entries, slots = state.take_owed()
        restores = tuple(state.take_restores())
        job = replace(job, restores=restores, clears=(*slots, *job.clears), deletes=(*entries, *job.deletes))
        written: list[Slots | Records | Entries] = [*job.restores, *job.clears, *job.records]
        touched = {part.location >> SLOT_BITS for part in written}
        pinned = [table for extent in touched if (table := state.tables.get(extent)) is not None]
        for table in pinned:
            table.pins += 1
        for extent in touched:
            state.tables.changed(extent)

        def settle(result: list[NDArray[np.uint8]] | None, error: BaseException | None) -> R:
            for table in pinned:
                table.pins -= 1
            for extent in touched:
                state.tables.changed(extent)
            self._placer.settled()
            if error is not None or result is None:
                self._undo(job, error, failed)
                raise self._meaning(job, error) from error
            self._formatted(job)
            state.gone(job.deletes)
            return apply(result)

        work = partial(run_job, job, state.slab, state.index, self._formats, state.boot.epoch, self._durable)
        return self._guard.submit(self._guard.writer, work, settle)

    def _formatted(self, job: WriteJob) -> None:
        """The extents of a job are known to have their format on disk."""
        for form in job.formats:
            if self._state.unformatted.get(form.extent) == form.number:
                del self._state.unformatted[form.extent]
        self._placer.grew(form.extent for form in job.formats)

    def _undo(self, job: WriteJob, error: BaseException | None, failed: Callable[[], None] | None) -> None:
        """The job failed somewhere: memory goes back, the disk is owed the rest."""
        state = self._state
        if failed is not None:
            failed()
        wrote = isinstance(error, JobFailed) and error.wrote
        if wrote:
            self._formatted(job)
        elif job.taken or not isinstance(error, JobFailed):
            # An extent half way between two classes, or nobody knows what.
            state.unsettled = True
        stale = [*job.deletes, *(job.indexed() if wrote else ())]
        slots = [Slots(part.geometry, part.location, part.count) for part in job.records if part.payload is not None]
        state.owe(stale, [*job.clears, *(slots if wrote else ())])
        rewritten = [part.location + row for part in job.records if part.payload is None for row in range(part.count)]
        restored = [part.location + row for part in job.restores for row in range(len(part.raw))]
        state.owe_restores((*rewritten, *restored))
        state.release_unformatted()

    def _meaning(self, job: WriteJob, error: BaseException | None) -> BaseException:
        """What a failed job is to its caller."""
        if not isinstance(error, JobFailed):
            return error if error is not None else RuntimeError("a job ended without a result")
        cause = error.error
        if isinstance(cause, SyncFailed):
            self._state.unsettled = True
            self._guard.turn_read_only(str(cause))
            return NodeReadOnly(self._guard.node_index, str(cause))
        if isinstance(cause, OSError) and cause.errno in NO_SPACE:
            if job.formats:
                self._placer.no_space()
            return self._full(cause.strerror or str(cause))
        return cause

    def _full(self, why: str) -> NodeFull:
        self._state.counters.add("node_full")
        return NodeFull(self._guard.node_index, why)


def _newcomers(slot_class: SlotClass, checked: BatchFields, rows: Sequence[int], stamp: int, repair: bool) -> Newcomers:
    """Rows of a batch that want slots, as used at this stamp."""
    fields = checked.fields[list(rows)]
    ranks = ranks_of(np.full(len(rows), stamp, np.uint32), fields["depth"])
    return Newcomers(slot_class, ranks, ties_of(fields["key"], fields["digest"]), repair)
