"""A node directory as a node: `efs.contract.Node` over one directory, owned by this process.

The parts: `nodedir` (files, identity, lock, boot record), `recovery` (opening), `nodestate` (memory), `nodeguard`
(threads, refusals), `lookups`, `nodereads`, `nodewriter`, `placer`, `verifier`. All memory belongs to the event loop's
thread; the node's reader and writer threads run plain functions on data that was handed to them (`iothread`).

*Closing* stops serving at once and waits for what is under way, but not for an operation older than STUCK_AT_CLOSE_MS.
Then, if nothing hangs and nothing is owed, everything is synced and the boot record marked clean. Where an operation
hangs, the node's files stay open and locked until the process ends: a thread is still inside them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from efs.background import Background
from efs.burial import TAG_BYTES, Burial
from efs.clock import Clock, Deadline, stamp_of
from efs.collector import Collector
from efs.contract import GetSink, Landing, NodeTable, PutBatch, PutOutcome, Span
from efs.debts import Debts
from efs.errors import EfsError, InvalidArgument
from efs.extent import SLOT_BITS, Geometry, ranges_of
from efs.fill import Fill
from efs.gc import Watermarks
from efs.index import IndexEntry
from efs.iothread import IoThread, pass_on
from efs.limits import CLOSE_MS, MAX_KEYS_PER_CALL, STAMP_FLUSH_MS, STUCK_AT_CLOSE_MS
from efs.lookups import Lookups
from efs.metrics import NODE_COUNTERS, CounterFile
from efs.nodedir import (
    COUNTERS_FILE,
    NodeConfig,
    NodePlace,
    OwnerLock,
    check_place,
    create_directory,
    machine_boot_id,
    plan_node,
    read_config,
    stamps_path,
)
from efs.nodeguard import Guard
from efs.nodereads import NodeReads
from efs.nodestate import Locations, NodeState
from efs.nodewriter import NodeWriter
from efs.osio import Io
from efs.placer import Placer
from efs.recovery import OpenOptions, mark_closed, open_state
from efs.shard import check_entries
from efs.sharedslab import SlabPlace, place_of
from efs.slab import Slab
from efs.stamps import StampFile, write_stamps
from efs.types import DropItem, ListedRecord, ListPage, NodeInfo
from efs.verifier import Verifier
from efs.writejob import WriteJob

Durability = Literal["process", "power"]


class DirectoryNode:
    """See the module docstring. Made with `open`; belongs to the loop that opened it."""

    def __init__(self, io: Io, path: str, lock: OwnerLock, state: NodeState, clock: Clock, counters: CounterFile,
                 marks: Watermarks, durable: bool, mapped: bool, own_counters: bool) -> None:
        node_index = state.config.place.node_index
        self._io = io
        self._path = path
        self._lock = lock
        self._state = state
        self._guard = Guard(node_index, clock, counters)
        self._lookups = Lookups(state, self._guard)
        self._reads = NodeReads(state, self._guard, mapped)
        self._verifier = Verifier(state, self._guard)
        self._fill = Fill(state, marks)
        placer = Placer(state, self._guard, self._lookups, self._fill)
        self._writer = NodeWriter(state, self._guard, self._lookups, placer, durable, self._verifier.check)
        self._verifier.writer = self._writer
        debts = Debts(state, self._guard, self._writer)
        self._burial = Burial(state, self._guard, self._lookups, self._writer, debts)
        self._collector = Collector(state, self._guard, placer, self._writer, self._fill)
        self._background = Background()
        self._background.start(f"collect node {node_index}", self._collector.run)
        self._background.start(f"pay node {node_index}", debts.run)
        self._own_counters = own_counters
        self._stamp_timer: asyncio.TimerHandle | None = None

    # -- life

    @staticmethod
    def create(io: Io, path: str, place: NodePlace, node_id: str, capacity_bytes: int, *,
               extent_bytes: int | None = None, index_bytes: int | None = None,
               boot_id: str | None = None) -> NodeConfig:
        """Make an empty node of at most `capacity_bytes` by du. InvalidArgument names the smallest capacity;
        StoreExists
        for a directory that is not empty; OpenFailed names what could not be made."""
        plan = plan_node(capacity_bytes, extent_bytes, index_bytes)
        return create_directory(io, path, place, node_id, plan, machine_boot_id() if boot_id is None else boot_id)

    @classmethod
    async def open(cls, path: str, place: NodePlace, io: Io, clock: Clock, *, counters: CounterFile | None = None,
                   mapped: bool = False, durability: Durability = "process", marks: Watermarks | None = None,
                   boot_id: str | None = None) -> DirectoryNode:
        """Own a node directory.

        place: where the caller expects the node to belong. counters: of the node; None opens its own file. mapped: read
        through a memory map. durability: "power" syncs each job. marks: watermarks other than the default ones.
        boot_id: of the machine; None asks the kernel.
        Locked names the holder's process id; IdentityMismatch what was found and expected; OpenFailed,
        FormatUnsupported and CorruptRecord name the file.
        """
        if durability not in ("process", "power"):
            raise InvalidArgument(f"durability is {durability!r}, must be 'process' or 'power'")
        options = OpenOptions(machine_boot_id() if boot_id is None else boot_id, mapped)
        opening = partial(_open, io, path, place, options, counters)
        thread = IoThread(f"efs-node-{place.node_index}-opening", clock)
        unwanted = asyncio.Event()
        try:
            lock, state, counted = await thread.submit(opening, partial(_hand_over, unwanted))
        finally:
            unwanted.set()
            await thread.close(0)
        return cls(io, path, lock, state, clock, counted, marks or Watermarks(), durability == "power", mapped,
                   counters is None)

    @property
    def slab_place(self) -> SlabPlace:
        """What other processes of this machine need to read the payload by themselves."""
        return place_of(self._state.slab)

    async def close(self) -> None:
        """See the contract and the module docstring. A second call does nothing."""
        if self._guard.closed:
            return
        self._guard.closed = True
        if self._stamp_timer is not None:
            self._stamp_timer.cancel()
        await self._background.close()
        idle = await self._drained()
        if idle:
            idle = await self._finish()
        await asyncio.gather(self._guard.reader.close(0), self._guard.writer.close(0))
        if idle:
            self._state.index.close()
            self._state.slab.close()
            if self._own_counters:
                self._guard.counters.close()
            self._lock.release()

    async def _drained(self) -> bool:
        """Wait until nothing is queued or running. False once an operation has been running for too long to wait."""
        threads = (self._guard.reader, self._guard.writer)
        give_up = asyncio.get_running_loop().time() + CLOSE_MS / 1000
        while any(thread.queued for thread in threads):
            stuck = any(thread.running_ms > STUCK_AT_CLOSE_MS for thread in threads)
            if stuck or asyncio.get_running_loop().time() >= give_up:
                return False
            for thread in threads:
                await thread.drained(STUCK_AT_CLOSE_MS / 1000 / 10)
        return True

    async def _finish(self) -> bool:
        """Tell the disk what it is owed, write the stamps, mark the node clean. False when the writer thread got
        stuck."""
        state, writer = self._state, self._guard.writer
        for _ in range(len(state.owed_entries) + 1):
            if self._guard.read_only is not None or not state.owes:
                break
            settled = self._writer.submit(WriteJob(), lambda _: None)
            await asyncio.wait((settled,), timeout=CLOSE_MS / 1000)
            if not settled.done():
                return False
            if settled.exception() is not None:
                break
        clean = not state.in_debt and self._guard.read_only is None and not self._guard.index_lost
        stamps = state.stamps.take_dirty()
        work = partial(_last_words, self._io, self._path, state, stamps, clean)
        last: asyncio.Future[None] = writer.submit(work, pass_on)
        await asyncio.wait((last,), timeout=CLOSE_MS / 1000)
        if last.done() and last.exception() is not None:
            self._guard.counters.add("node_io_errors")
        return last.done()

    # -- state

    @property
    def node_index(self) -> int:
        return self._guard.node_index

    @property
    def suspect(self) -> bool:
        """See the contract."""
        return self._guard.suspect

    @property
    def read_only(self) -> bool:
        """Whether a failed fsync has stopped writes."""
        return self._guard.read_only is not None

    @property
    def queued(self) -> int:
        """Operations that wait for the node's threads or run on them."""
        return self._guard.reader.queued + self._guard.writer.queued

    @property
    def config(self) -> NodeConfig:
        return self._state.config

    async def info(self, deadline: Deadline) -> NodeInfo:
        """See the contract. Answered from memory."""
        self._guard.require_open()
        allocator, config = self._state.allocator, self._state.config
        return NodeInfo(self.node_index, config.node_id, self._guard.state, config.plan.capacity_bytes,
                        allocator.live_bytes, allocator.extents_used, allocator.extents, allocator.live_slots,
                        self._state.unverified, self._guard.counters.nonzero(NODE_COUNTERS))

    async def tenant_bytes(self, deadline: Deadline) -> Mapping[bytes, int]:
        """See the contract. Answered from memory."""
        self._guard.require_open()
        return {tag.to_bytes(TAG_BYTES, "little"): size for tag, size in self._state.allocator.tag_bytes().items()}

    def audit(self) -> None:
        """CorruptRecord where the accounts in memory disagree. Once no operation is under way the index counts the
        same."""
        self._state.allocator.audit()

    # -- look-ups

    def look_up_now(self, keys: Sequence[bytes]) -> NodeTable | None:
        """See the contract."""
        if self._guard.closed:
            raise self._guard.unavailable("it was closed")
        return self._lookups.look_up_now(keys)

    async def look_up(self, keys: Sequence[bytes], deadline: Deadline) -> NodeTable:
        """See the contract."""
        self._guard.require_serving()
        return await self._lookups.look_up(keys, deadline)

    async def get(self, keys: Sequence[bytes], sink: GetSink, deadline: Deadline) -> None:
        """See the contract. The table only: the rest costs no trip."""
        sink.table_came(await self.look_up(keys, deadline), None)

    def headers_now(self, locations: Locations, generations: NDArray[np.uint64],
                    segments: int) -> NDArray[np.uint8] | None:
        """See the contract."""
        return self._lookups.headers_now(locations, generations, segments)

    async def headers(self, locations: Locations, generations: NDArray[np.uint64], segments: int,
                      deadline: Deadline) -> NDArray[np.uint8]:
        """See the contract."""
        self._guard.require_serving()
        return await self._lookups.headers(locations, generations, segments, deadline)

    async def list(self, after: bytes | None, limit: int, deadline: Deadline) -> ListPage:
        """See the contract."""
        if not 1 <= limit <= MAX_KEYS_PER_CALL:
            raise InvalidArgument(f"limit is {limit}, must be 1 to {MAX_KEYS_PER_CALL}")
        self._guard.require_serving()
        state = self._state
        geometries = {extent: geometry for extent in range(state.allocator.extents)
                      if (geometry := state.allocator.geometry(extent)) is not None}
        reader, slab, index = self._guard.reader, state.slab, state.index
        listing = partial(_list, slab, index.page, geometries, after, limit)
        found, last = await self._guard.result(self._guard.submit(reader, listing, pass_on), deadline)
        locations = np.array([record.location for record in found], np.int64)
        there = state.exists(locations)
        stamps = np.zeros(len(found), np.uint32)
        stamps[there] = state.stamps.get(locations[there])
        records = tuple(_with_stamp(record, stamp) for record, stamp in zip(found, stamps.tolist(), strict=True))
        return ListPage(records, last)

    # -- payload

    def views_now(self, spans: Sequence[Span]) -> Sequence[NDArray[np.uint8] | None] | None:
        """See the contract."""
        return self._reads.views_now(spans)

    def read_now(self, span: Span, landing: Landing) -> bool:
        """See the contract."""
        return self._reads.read_now(span, landing)

    async def read(self, spans: Sequence[tuple[Span, Landing]], landed: Callable[[int], None],
                   deadline: Deadline) -> None:
        """See the contract."""
        await self._reads.read(spans, landed, deadline)

    # -- changes

    async def put(self, batch: PutBatch, deadline: Deadline) -> PutOutcome:
        """See the contract."""
        try:
            return await self._writer.put(batch, deadline)
        finally:
            self._flush_stamps_later()
            self._collector.look()

    async def collect(self, deadline: Deadline) -> int:
        """See the contract."""
        self._guard.require_writable()
        return await self._collector.collect(down_to_low=True, deadline=deadline)

    async def settled(self) -> None:
        """Wait until no collection is under way or due."""
        await self._collector.settled()

    def know_smallest(self, capacity_bytes: int) -> None:
        """The capacity of the smallest node of the group: watermarks hold for what that one could keep."""
        self._fill.know_smallest(capacity_bytes)
        self._collector.look()

    async def drop(self, items: Sequence[DropItem], deadline: Deadline) -> int:
        """See the contract."""
        return await self._writer.drop(items, deadline)

    async def bury(self, tags: Collection[bytes], deadline: Deadline) -> int:
        """See the contract."""
        self._guard.require_serving()
        return await self._burial.bury(tags, deadline)

    async def verify(self, key: bytes, digest: bytes, deadline: Deadline) -> bool:
        """See the contract."""
        self._guard.require_writable()
        return (await self._verifier.check([key + digest], deadline))[0]

    def touch(self, keys: Sequence[bytes], locations: Locations | None, stamp: int) -> None:
        """See the contract. Keys that are not hot are left alone."""
        if self._guard.closed:
            return
        if locations is None:
            places = [place for key in keys for place in self._state.hot.locations(key) or ()]
            locations = np.array(places, np.int64)
        if self._state.stamps.touch(locations, min(stamp, stamp_of(self._guard.clock.wall()))):
            self._flush_stamps_later()

    def _flush_stamps_later(self) -> None:
        if self._stamp_timer is None and not self._guard.closed:
            loop = asyncio.get_running_loop()
            self._stamp_timer = loop.call_later(STAMP_FLUSH_MS / 1000, self._flush_stamps)

    def _flush_stamps(self) -> None:
        self._stamp_timer = None
        files = self._state.stamps.take_dirty()
        if not files or self._guard.closed:
            return
        try:
            self._guard.submit(self._guard.writer, partial(write_stamps, self._io, stamps_path(self._path), files),
                               self._stamps_written)
        except EfsError:
            self._stamps_written([file.extent for file in files], None)

    def _stamps_written(self, failed: Sequence[int] | None, error: BaseException | None) -> None:
        if failed:
            self._state.stamps.put_back(failed)
            self._flush_stamps_later()


def _open(io: Io, path: str, place: NodePlace, options: OpenOptions,
          counters: CounterFile | None) -> tuple[OwnerLock, NodeState, CounterFile]:
    """Everything of opening that may block."""
    config = read_config(io, path)
    check_place(path, config.place, place)
    lock = OwnerLock.take(io, path)
    try:
        counted = CounterFile.open(f"{path}/{COUNTERS_FILE}", writable=True, io=io) if counters is None else counters
        return lock, open_state(io, path, config, options, counted), counted
    except BaseException:
        lock.release()
        raise


def _hand_over(unwanted: asyncio.Event, opened: tuple[OwnerLock, NodeState, CounterFile] | None,
               error: BaseException | None) -> tuple[OwnerLock, NodeState, CounterFile]:
    """The parts of an opened node, which are closed again when whoever wanted them has given up meanwhile."""
    lock, state, counters = pass_on(opened, error)
    if unwanted.is_set():
        state.index.close()
        state.slab.close()
        lock.release()
    return lock, state, counters


def _last_words(io: Io, path: str, state: NodeState, stamps: Sequence[StampFile], clean: bool) -> None:
    write_stamps(io, stamps_path(path), stamps)
    if clean:
        mark_closed(io, path, state)


def _list(slab: Slab, page: Callable[[bytes | None, int], list[IndexEntry]], geometries: dict[int, Geometry],
          after: bytes | None, limit: int) -> tuple[list[ListedRecord], bytes | None]:
    """One page of the listing from index and tables on disk, without stamps. Records in transit are left out."""
    entries = page(after, limit)
    last = entries[-1].index_key if len(entries) == limit else None
    order = sorted(range(len(entries)), key=lambda row: entries[row].location)
    locations = np.array([entries[row].location for row in order], np.int64)
    found: dict[int, ListedRecord] = {}
    for start, location, count in ranges_of(locations):
        geometry = geometries.get(location >> SLOT_BITS)
        if geometry is None or (location & ((1 << SLOT_BITS) - 1)) + count > geometry.slots:
            continue
        rows = slab.read_entries(geometry, location, count)
        valid = check_entries(rows, geometry.slot_class.slot_bytes)
        for at in np.flatnonzero(valid).tolist():
            entry, row = entries[order[start + at]], rows[at]
            name = row["key"].tobytes() + row["digest"].tobytes()
            if int(row["generation"]) == entry.generation and name == entry.index_key:
                found[order[start + at]] = _listed(entry, row)
    return [found[row] for row in sorted(found)], last


def _listed(entry: IndexEntry, row: np.void) -> ListedRecord:
    key, digest = row["key"].tobytes(), row["digest"].tobytes()
    return ListedRecord(key, digest, entry.location, entry.generation, int(row["shard"]), int(row["block_bytes"]),
                        int(row["depth"]), row["tenant_tag"].tobytes(), int(row["arrival_ms"]), 0,
                        int(row["segments"]))


def _with_stamp(record: ListedRecord, stamp: int) -> ListedRecord:
    return ListedRecord(record.key, record.digest, record.location, record.generation, record.shard,
                        record.block_bytes, record.depth, record.tenant_tag, record.arrival_ms, stamp, record.segments)
