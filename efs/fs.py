"""The client: one erasure-coded filesystem over the twelve nodes of a store directory, embedded in this process.

It ties together what stands above it: `efs.cluster` (whose directories these are), `efs.reader`, `efs.writer`,
`efs.match`, and `efs.mend` in the background. It knows keys and bytes, nothing of tokens or models.

Ownership. `open` takes the store's lock and every node's, and gives back whatever it has taken if it fails. One
process owns a store; a second one is refused with the holder's process id. A node that is not there is left out
(`problems` says why) and counted; reads and writes go on without it as far as ten or eleven nodes allow.

Closing. No call is admitted any more; background work ends; every node syncs and marks itself clean. A node that
hangs is waited for CLOSE_MS at most and then left to its daemon threads: its mark stays unclean, which its next owner
sees. The store's lock goes last.

All methods belong to the event loop on which the filesystem was opened.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import Counter
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from efs.ask import all_of, tables_of
from efs.background import Background
from efs.batch import require_keys
from efs.burial import words_of
from efs.clock import Clock, Deadline, SystemClock
from efs.cluster import (
    StoreConfig,
    absent_because,
    check_node_id,
    init_store,
    read_store_config,
    tolerable,
)
from efs.codec import Codec
from efs.contract import ABSENT, Node
from efs.errors import EfsError, NodeReadOnly, NodeUnavailable, StoreClosed
from efs.health import Health, NodeState
from efs.joining import JoiningNode
from efs.limits import (
    ACK_SHARDS,
    CLOSE_MS,
    DATA_SHARDS,
    DROP_WAIT_SHARE,
    INFO_DEADLINE_MS,
    STRIPE_SHARDS,
    STUCK_AT_CLOSE_MS,
)
from efs.match import Matcher
from efs.memory import flat_bytes
from efs.mend import Mender
from efs.metrics import CounterFile
from efs.node import DirectoryNode
from efs.nodedir import COUNTERS_FILE, OwnerLock
from efs.osio import Io, SystemIo
from efs.pace import Traffic
from efs.progress import Progress, read_progress
from efs.purge import Purger, PurgeReport, buried
from efs.quota import Quotas
from efs.reader import Reader
from efs.shape import BlockShape
from efs.stripe import ShardReport, shards_of
from efs.sweep import SweepReport
from efs.target import Part
from efs.tombstones import Tombstones, read_tombstones, write_tombstones
from efs.types import DropItem, GetReport, NodeInfo, PutItem, PutReport
from efs.upkeep import Upkeep
from efs.writer import Writer, check_items

__all__ = ["FileSystem", "OnSegment", "PutItem"]

OnSegment = Callable[[int, int], None]

_LOG = logging.getLogger(__name__)


class FileSystem:
    """Get, put, match and drop by key."""

    def __init__(self, nodes: Sequence[Node | None], *, codec: Codec, counters: CounterFile, clock: Clock,
                 config: StoreConfig | None = None, lock: OwnerLock | None = None,
                 problems: Mapping[int, str] | None = None, progress: Progress | None = None, io: Io | None = None,
                 tombstones: Tombstones | None = None, maintain: bool = True, scrub: bool = False,
                 root: str | None = None, notes: str | None = None, quotas: Quotas | None = None) -> None:
        """Over nodes that are open already; `open` is the way to a store on disk. Must run on the loop.

        root: the directory of what belongs to the store as a whole, such as the tenants file.
        progress, tombstones: what the store's root notes of its upkeep and of purged tenants, whose records the nodes
        refuse already; with io both are kept up to date in the directory `notes`, by default that of the lock.
        quotas: of the store of which these nodes are one group."""
        progress = progress or Progress()
        gates = {index: JoiningNode(node) for index in progress.syncing if (node := nodes[index]) is not None}
        ungated, nodes = nodes, [gates.get(index, node) for index, node in enumerate(nodes)]
        self._nodes = tuple(nodes)
        self._clock = clock
        self._config = config
        self._lock = lock
        self._closed = False
        self.root = root
        self.counters = counters
        self.problems = dict(problems or {})
        self._draining: set[int] = set()
        self.health = Health(nodes, clock, self._draining)
        self.mender = Mender(nodes, self.health, codec, counters, clock)
        self._reader = Reader(nodes, codec, counters, clock, self.mender.report)
        if notes is None and lock is not None:
            notes = lock.path
        self._purger = Purger(ungated, counters, clock, tombstones or {}, io, notes)
        self.quotas = quotas if quotas is not None else Quotas(ungated, clock)
        self._writer = Writer(nodes, self.health, codec, counters, clock, quotas=self.quotas)
        self._matcher = Matcher(nodes, self.health)
        self._traffic = Traffic()
        self.upkeep = Upkeep(ungated, gates, codec, counters, clock, self._traffic, progress, self._purger, io, notes,
                             self._draining)
        self._background = Background()
        self._background.start("mend", self.mender.run)
        if gates and maintain:
            self._background.start("sync", self.upkeep.sync_until_done)
        if maintain:
            self._background.start("sweep", self.upkeep.sweep_for_ever)
        if scrub and maintain:
            self._background.start("scrub", self.upkeep.scrub_for_ever)

    @classmethod
    def init(cls, root: str, capacity_bytes: int, *, node_paths: Sequence[str] | None = None,
             durability: str = "process", extent_bytes: int | None = None, index_bytes: int | None = None,
             io: Io | None = None, clock: Clock | None = None) -> list[str]:
        """Make a store; returns warnings (such as: all nodes share one device).

        index_bytes: of each node's capacity, what its index may take; blocks of a few KiB need more than the default.

        StoreExists for a place that is not empty, InvalidArgument for a capacity that is too small or a wrong setting,
        OpenFailed for a path that cannot be made; nothing is left of a store that could not be made.
        """
        return init_store(io or SystemIo(), root, capacity_bytes, node_paths=node_paths, durability=durability,
                          extent_bytes=extent_bytes, index_bytes=index_bytes)

    @classmethod
    async def open(cls, root: str, *, io: Io | None = None, clock: Clock | None = None,
                   mapped: bool = False, maintain: bool = True, scrub: bool = False) -> FileSystem:
        """Own the store and its node directories. An absent node directory is a degraded node, never made anew.

        mapped: read slabs through memory maps (a failing disk then ends the process with SIGBUS) instead of preadv.
        maintain: bring nodes that missed changes up to date, and sweep now and then, in the background; else only
        `upkeep` does when asked.
        scrub: read and check everything, round after round, in the background too.
        StoreNotFound, Locked, IdentityMismatch, FormatUnsupported, CorruptRecord or OpenFailed name the path.
        """
        io, clock = io or SystemIo(), clock or SystemClock()
        root = os.path.abspath(root)
        config = read_store_config(io, root)
        lock = OwnerLock.take(io, root)
        counters: CounterFile | None = None
        nodes: dict[int, Node] = {}
        try:
            codec = Codec()
            counters = CounterFile.open(os.path.join(root, COUNTERS_FILE), writable=True, io=io)
            progress = read_progress(io, root)
            tombstones = read_tombstones(io, root)
            problems = await _open_nodes(config, io, clock, mapped, nodes)
            left = await _bury(nodes, tombstones, problems, io, root, clock)
            counters.add("nodes_degraded", len(problems))
            placed = [nodes.get(index) for index in range(STRIPE_SHARDS)]
            return cls(placed, codec=codec, counters=counters, clock=clock, config=config, lock=lock, problems=problems,
                       progress=progress, tombstones=left, io=io, maintain=maintain, scrub=scrub, root=root)
        except BaseException:
            await _close_nodes(list(nodes.values()))
            if counters is not None:
                counters.close()
            lock.release()
            raise

    # -- blocks -------------------------------------------------------------------------------------------------

    async def get_into(self, keys: Sequence[bytes], shape: BlockShape, out: Any, *, on_segment: OnSegment | None = None,
                       deadline_ms: float) -> GetReport:
        """Fetch blocks into a segment-major buffer of len(keys) · block_bytes.

        on_segment(i, leading_blocks) runs once for each segment, in order, when it is settled. Bytes of blocks that are
        not ok are undefined. InvalidArgument for a wrong key, deadline or buffer; a missing block is a value.
        """
        deadline = self._begin(keys, deadline_ms)
        target = flat_bytes(out, "out", len(keys) * shape.block_bytes, writable=True)
        with self._traffic.call():
            return await self._reader.get_into(keys, shape, target.data, on_segment, deadline)

    async def get_part(self, keys: Sequence[bytes], shape: BlockShape, out: NDArray[np.uint8], part: Part, *,
                       on_segment: OnSegment | None = None, deadline_ms: float) -> GetReport:
        """`get_into` for blocks that are a part of those for which `out` has its places."""
        deadline = self._begin(keys, deadline_ms)
        with self._traffic.call():
            return await self._reader.get_into(keys, shape, out.data, on_segment, deadline, part)

    async def read_items(self, keys: Sequence[bytes], shape: BlockShape, out: NDArray[np.uint8], *,
                         deadline_ms: float) -> dict[int, PutItem]:
        """Fetch blocks as `get_into` does, to put them elsewhere as they are: the items of those that are now in `out`,
        by their place in the call, with their digests. No fetch of a user's: it is not counted as one."""
        deadline = self._begin(keys, deadline_ms)
        described: dict[int, PutItem] = {}
        report = await self._reader.get_into(keys, shape, out.data, None, deadline, described=described)
        return {at: item for at, item in described.items() if report.ok[at]}

    async def put(self, items: Sequence[PutItem], shape: BlockShape, blocks: Any, *, deadline_ms: float) -> PutReport:
        """Store blocks from a block-major buffer of len(items) · block_bytes.

        The buffer must not change before the return and is not referred to after it. InvalidArgument for a wrong item,
        deadline or buffer; a block that could not be stored is counted in the report.
        """
        self._require_open()
        deadline = Deadline.after_ms(self._clock, deadline_ms)
        check_items(items)
        source = flat_bytes(blocks, "blocks", len(items) * shape.block_bytes)
        if not self._may_change():
            return PutReport(acked=0, already=0, failed=len(items), at_risk=0, why="a node is away: no note of it")
        with self._traffic.call():
            return await self._writer.put(items, shape, source.reshape(len(items), shape.block_bytes), deadline)

    async def match(self, keys: Sequence[bytes], *, strict: bool = False, deadline_ms: float) -> int:
        """How many leading keys are present, by metadata alone: a promise that the fetch may correct."""
        deadline = self._begin(keys, deadline_ms)
        with self._traffic.call():
            found = await self._matcher.match(keys, strict, deadline)
        self.counters.add("match_calls")
        self.counters.add("match_blocks", found)
        return found

    async def present(self, keys: Sequence[bytes], *, strict: bool = False, deadline_ms: float) -> NDArray[np.bool_]:
        """(n,): which of the keys are present, each for itself, as `match` sees it."""
        deadline = self._begin(keys, deadline_ms)
        with self._traffic.call():
            return await self._matcher.present(keys, strict, deadline)

    async def drop(self, keys: Sequence[bytes], *, deadline_ms: float) -> int:
        """Remove every version of these blocks from the nodes that can be reached; returns how many blocks were
        removed: one node at least has dropped what it held of the block, and all but two at most of those that held
        some. What other nodes hold stays; as long as they are at most two, it is not readable. When no node has dropped
        anything and one refuses to, its error is raised."""
        return sum((await self.drop_keys(keys, deadline_ms=deadline_ms)).values())

    async def drop_keys(self, keys: Sequence[bytes], *, deadline_ms: float) -> dict[bytes, bool]:
        """`drop`; returns of each key of which a node held something whether it was removed."""
        deadline = self._begin(keys, deadline_ms)
        self._may_change(dropping=True)
        nodes = self._reachable()
        looking = Deadline.after_ms(self._clock, DROP_WAIT_SHARE * deadline_ms)
        tables, _ = await tables_of({index: (node, keys) for index, node in nodes.items()}, self.health, looking,
                                    len(nodes))
        held: dict[int, set[bytes]] = {}
        calls: dict[int, Coroutine[Any, Any, int]] = {}
        for index, table in tables.items():
            rows = [row for row, location in enumerate(table.location.tolist()) if location != ABSENT]
            items = [DropItem(keys[row], table.digest[row].tobytes(), int(table.generation[row])) for row in rows]
            items += [DropItem(keys[row.row], row.digest, row.generation) for row in table.extra]
            if items:
                held[index] = {item.key for item in items}
                calls[index] = nodes[index].drop(items, deadline)
        done, errors = await all_of(calls, deadline, len(calls))
        if not done:
            _raise_refusal(errors.values())
        holders = Counter(key for some in held.values() for key in some)
        gone = Counter(key for index in done for key in held[index])
        return {key: 0 < gone[key] >= count - (STRIPE_SHARDS - DATA_SHARDS) for key, count in holders.items()}

    # -- space ----------------------------------------------------------------------------------------------------

    async def collect(self, *, deadline_ms: float) -> dict[int, int]:
        """Have every node free space down to its low watermark now; how many records each has evicted. A node that
        cannot, or not by the deadline, is not in the result."""
        self._require_open()
        deadline = Deadline.after_ms(self._clock, deadline_ms)
        calls = {index: node.collect(deadline) for index, node in self._reachable().items()}
        evicted, _ = await all_of(calls, deadline, len(calls))
        return evicted

    async def sweep(self, *, after: bytes | None = None, max_seconds: float | None = None,
                    purged: Collection[bytes] = ()) -> SweepReport:
        """Remove hollow stripes and losing versions now (`efs.sweep`), and all records of purged tenants and of the
        tenant tags in `purged`.

        after: a key; only what stands behind it is swept. max_seconds: stop about then; the report says where."""
        self._require_open()
        return await self.upkeep.sweep(after=after, max_seconds=max_seconds, purged=purged)

    # -- tenants --------------------------------------------------------------------------------------------------

    async def purge(self, tags: Collection[bytes]) -> PurgeReport:
        """Remove every record of these tenant tags of 8 bytes and refuse them from now on, also after a restart
        (`efs.purge`). OpenFailed or InvalidArgument when that could not be noted; then nothing was changed."""
        self._require_open()
        words_of(tags)
        return await self._purger.purge(tags)

    @property
    def purged(self) -> frozenset[bytes]:
        """The tenant tags that were purged."""
        return self._purger.tags

    @property
    def purging(self) -> dict[bytes, frozenset[int]]:
        """Those of them of which some node may still hold records, and these nodes."""
        return self._purger.pending

    async def tenant_bytes(self, *, deadline_ms: float = INFO_DEADLINE_MS) -> tuple[dict[bytes, int], tuple[int, ...]]:
        """Bytes of live slots by tenant tag, the sum over the nodes that are open, and the nodes that did not say."""
        self._require_open()
        deadline = Deadline.after_ms(self._clock, deadline_ms)
        calls = {index: node.tenant_bytes(deadline) for index, node in enumerate(self._nodes) if node is not None}
        answers, _ = await all_of(calls, deadline, len(calls))
        total: Counter[bytes] = Counter()
        for held in answers.values():
            total.update(held)
        return dict(total), tuple(index for index in range(STRIPE_SHARDS) if index not in answers)

    # -- looking closer -----------------------------------------------------------------------------------------

    async def look_up_all(self, key: bytes, *, deadline_ms: float) -> tuple[ShardReport, ...]:
        """Every record under a key on every node that can be reached, its payload read and checked."""
        deadline = self._begin([key], deadline_ms)
        return await shards_of(self._reachable(), key, self.health, deadline)

    async def nodes(self) -> list[NodeInfo]:
        """The twelve nodes: identity, fill, and state as `efs.health` names it. A node that is absent or does not
        answer has zeros for what only it could say."""
        self._require_open()
        deadline = Deadline.after_ms(self._clock, INFO_DEADLINE_MS)
        present = {index: node for index, node in enumerate(self._nodes) if node is not None}
        calls = {index: node.info(deadline) for index, node in present.items()}
        answers, _ = await all_of(calls, deadline, len(calls))
        return [self._described(index, answers.get(index)) for index in range(STRIPE_SHARDS)]

    def _described(self, index: int, info: NodeInfo | None) -> NodeInfo:
        state = self.health.state(index)
        if info is None:
            node_id = self._config.node_ids[index] if self._config is not None else ""
            silent = NodeState.SUSPECT if state is NodeState.SERVING else state
            return NodeInfo(index, node_id, silent, 0, 0, 0, 0, 0, 0)
        own = info.state if state is NodeState.SERVING else state
        return replace(info, state=own)

    # -- places that change ---------------------------------------------------------------------------------------

    def attend(self, name: str, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Have `work()` run in the background until the filesystem is closed."""
        self._require_open()
        self._background.start(name, work)

    def note_replaced(self, node_index: int, node_id: str, path: str) -> None:
        """Another node is in a place, or the same one elsewhere: its node object goes on with that one."""
        if self._config is not None:
            ids, paths = list(self._config.node_ids), list(self._config.node_paths)
            ids[node_index], paths[node_index] = node_id, path
            self._config = replace(self._config, node_ids=tuple(ids), node_paths=tuple(paths))
        self.health.note_replaced(node_index)
        self._purger.note_replaced(node_index)

    def drain(self, draining: Collection[int]) -> None:
        """From now on nothing new goes to these nodes; they answer reads."""
        self._draining.clear()
        self._draining.update(draining)

    # -- the end ------------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Sync, mark clean and give everything back, in bounded time. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            await self._background.close()
            await self._writer.close()
            await self.upkeep.close(STUCK_AT_CLOSE_MS / 1000)
            await _close_nodes([node for node in self._nodes if node is not None])
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

    def _may_change(self, dropping: bool = False) -> bool:
        """Note which nodes miss what is about to change; False when that cannot be noted."""
        if len(self.problems) > STRIPE_SHARDS - ACK_SHARDS and not dropping:
            return True  # Nothing can be stored anyhow.
        try:
            self.upkeep.missed_by(self.problems)
        except EfsError as error:
            _LOG.warning("nothing is stored while a node is away and that cannot be noted: %s", error)
            return False
        return True

    def _reachable(self) -> dict[int, Node]:
        return {index: node for index in self.health.readable() if (node := self._nodes[index]) is not None}


def _raise_refusal(errors: Iterable[EfsError]) -> None:
    """Raise the first of these that says that a node does not do what it is asked; not that it cannot be reached."""
    for error in errors:
        if isinstance(error, NodeReadOnly) or not isinstance(error, NodeUnavailable):
            raise error


async def _open_nodes(config: StoreConfig, io: Io, clock: Clock, mapped: bool,
                      opened: dict[int, Node]) -> dict[int, str]:
    """Open all nodes at once into `opened`; returns why others are left out. Raises what is not tolerable, and then too
    every node that was opened is in `opened`."""
    problems: dict[int, str] = {}
    made: dict[int, DirectoryNode] = {}

    async def one(index: int, path: str) -> None:
        why = absent_because(path)
        if why is not None:
            problems[index] = why
            return
        try:
            check_node_id(io, path, config.node_ids[index])
            made[index] = opened[index] = await DirectoryNode.open(
                path, config.place(index), io=io, clock=clock, durability=config.durability, mapped=mapped)
        except EfsError as error:
            if not tolerable(error):
                raise
            problems[index] = str(error)

    tasks = [asyncio.create_task(one(index, path)) for index, path in enumerate(config.node_paths)]
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        # A thread that is opening a node cannot be stopped; what it takes must be known, to be given back.
        await asyncio.wait(tasks)
        raise
    for error in [task.exception() for task in tasks]:
        if error is not None:
            raise error
    for node in made.values():
        node.know_smallest(min(other.config.plan.capacity_bytes for other in made.values()))
    for index, why in sorted(problems.items()):
        _LOG.warning("the store is opened without node %d: %s", index, why)
    return problems


async def _bury(nodes: dict[int, Node], tombstones: Tombstones, problems: dict[int, str], io: Io, root: str,
                clock: Clock) -> Tombstones:
    """Have nodes that were just opened drop what was purged, before they serve: one that cannot is closed again and
    becomes a problem. Returns the tombstones as they are now."""
    if not tombstones:
        return tombstones
    placed = [nodes.get(index) for index in range(STRIPE_SHARDS)]
    results = await buried(placed, dict.fromkeys(range(STRIPE_SHARDS), tuple(tombstones)), clock)
    for index, (_, complete) in results.items():
        if not complete:
            await _close_nodes([nodes.pop(index)])
            problems[index] = "records of purged tenants could not be dropped from it"
    left = {tag: pending - nodes.keys() for tag, pending in tombstones.items()}
    if left != tombstones:
        write_tombstones(io, root, left)
    return left


async def _close_nodes(nodes: Sequence[Node]) -> None:
    """Close nodes side by side, for CLOSE_MS at most; what hangs is left behind."""
    tasks = [asyncio.create_task(node.close()) for node in nodes]
    if not tasks:
        return
    _, late = await asyncio.wait(tasks, timeout=CLOSE_MS / 1000)
    for task in late:
        task.cancel()
    for task, node in zip(tasks, nodes, strict=True):
        if task.done() and not task.cancelled() and (error := task.exception()) is not None:
            _LOG.warning("node %d was not closed cleanly: %s", node.node_index, error)
