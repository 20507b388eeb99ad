"""Storing blocks: the only way that data enters the filesystem.

A put goes through these steps; the first two can end it before a byte is hashed.

1. *Known down.* With two or more nodes that cannot be asked, nothing can reach eleven: every block fails at once.
2. *Survey.* One batched look-up on all nodes (`efs.survey`). A key of which some version is complete (on eleven
   nodes, trusted) is `already`: nothing is stored. With two nodes that cannot be written to, the rest fails here.
   Of new blocks only those that their tenant's quota leaves room for go on (`efs.quota`).
3. *Pieces* (`efs.pieces`). While the nodes' threads write one piece, the next one is hashed and encoded on the loop,
   in slices. Every block is hashed and encoded once, whatever the nodes do.
4. *Versions.* A block whose own digest is on exactly ten trusted nodes only gets its missing shards, and is `already`
   when one of them is stored; the ten are used with it, or they would soon be evicted as what nobody used. A fifth
   version displaces the weakest one, of fewer than ten shards, but not one that is being written: dropping from under a
   running put would take shards that it has counted. What this process writes it knows; for what others write, each
   node keeps records that are younger than the hollow grace (`DropItem`). Where none can be displaced everywhere the
   block fails. So does a block whose digest is not the one that its item demands.
5. *Writing.* One batch per node and piece, from private staging (`efs.staging`). A node has at most PUT_LANE_PIECES
   pieces of a put under way. A single node that keeps the others waiting for the lag grace (as long again as the put
   has taken, PUT_LAG_GRACE_MS at least) is left out of the rest of the put; its blocks are at risk. A node that fails
   is left out too; when fewer than eleven are left, the rest fails.
6. *Acknowledging.* A block is acknowledged when eleven nodes have said before the deadline that they hold its shard.
   The put returns when every block has twelve; or when no block waits for its eleventh and the twelfth has been given
   the lag grace; or at the deadline. An answer after the deadline counts for nothing, even if the shard is stored.

Crash and cancellation. There is no commit record: each node makes a record visible after its data, and a block is
readable from ten shards on. A put that dies anywhere leaves fewer than ten shards of a block (invisible) or a whole
block. Writes that are still under way when a put returns run on in the background, on memory that belongs to them;
when a put is cancelled, their answers are no longer waited for. A writer never waits for another one: 64 writers of
one block write the same records, which a node stores once.

Memory: PUT_BUDGET_BYTES of callers' blocks are admitted at once, WRITE_STAGING_BYTES of staging, and per hung node
ABANDONED_BYTES_PER_NODE and the buffers of one lane. The caller's buffer is not referred to after the return.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial

import numpy as np
from numpy.typing import NDArray

from efs.ask import all_of, tables_of
from efs.clock import Clock, Deadline, stamp_of
from efs.codec import Codec
from efs.contract import Node, PutBatch, PutOutcome
from efs.errors import EfsError, InvalidArgument, NodeFull
from efs.health import Health
from efs.limits import (
    ABANDONED_BYTES_PER_NODE,
    ACK_SHARDS,
    DATA_SHARDS,
    DIGEST_BYTES,
    HOLLOW_GRACE_MS,
    KEY_BYTES,
    MAX_DEADLINE_MS,
    MAX_KEYS_PER_CALL,
    MAX_VERSIONS_PER_KEY,
    PUT_BUDGET_BYTES,
    PUT_LAG_GRACE_MS,
    PUT_LANE_PIECES,
    STRIPE_SHARDS,
)
from efs.metrics import CounterFile
from efs.pieces import Filling, Piece, cut
from efs.placement import placement_group, rotation_of, runs
from efs.quota import OVER_QUOTA, Quotas
from efs.shape import BlockShape
from efs.shard import template_digests
from efs.staging import ByteBudget, Staging
from efs.survey import Survey, weakest
from efs.types import DropItem, PutItem, PutReport

_LOG = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]
Flags = NDArray[np.bool_]
Rows = NDArray[np.intp]


TOO_LATE = "the deadline came first"
TOO_FEW_NODES = f"fewer than {ACK_SHARDS} nodes can be written to"
NODES_REFUSED = "nodes did not take them"
OTHER_BYTES = "their bytes are not those that were meant"
"""`PutReport.why` of failed blocks, where nothing more exact is known."""


class Fate(IntEnum):
    """What became of a block."""

    OPEN = 0
    ACKED = 1
    ALREADY = 2
    FAILED = 3


def check_items(items: Sequence[PutItem]) -> None:
    """Refuse keys, tags and depths that no record can hold, and too many at once."""
    if len(items) > MAX_KEYS_PER_CALL:
        raise InvalidArgument(f"{len(items)} blocks in one call, at most {MAX_KEYS_PER_CALL}")
    for item in items:
        if len(item.key) != KEY_BYTES:
            raise InvalidArgument(f"a key has {len(item.key)} bytes, expected {KEY_BYTES}")
        if len(item.tenant_tag) != 8:
            raise InvalidArgument(f"a tenant tag has {len(item.tenant_tag)} bytes, expected 8")
        if not 0 <= item.depth <= 0xFFFF_FFFF:
            raise InvalidArgument(f"depth {item.depth} does not fit 32 bits")
        if item.digest is not None and len(item.digest) != DIGEST_BYTES:
            raise InvalidArgument(f"a digest has {len(item.digest)} bytes, expected {DIGEST_BYTES}")


class Writer:
    """Puts blocks on twelve nodes. One for a process: it bounds and sees all puts of the process."""

    def __init__(self, nodes: Sequence[Node | None], health: Health, codec: Codec, counters: CounterFile, clock: Clock,
                 staging: Staging | None = None, quotas: Quotas | None = None) -> None:
        self.nodes = tuple(nodes)
        self.health = health
        self.codec = codec
        self.counters = counters
        self.clock = clock
        self.staging = staging if staging is not None else Staging()
        self.quotas = quotas if quotas is not None else Quotas(nodes, clock)
        self.admission = ByteBudget(PUT_BUDGET_BYTES)
        self.writing: Counter[tuple[bytes, bytes]] = Counter()
        self._late: set[asyncio.Task[PutOutcome]] = set()

    async def put(self, items: Sequence[PutItem], shape: BlockShape, blocks: Bytes, deadline: Deadline) -> PutReport:
        """Store len(items) blocks from (n, block_bytes) uint8 memory, which must not change before the return."""
        self.counters.add("put_calls")
        if not items:
            return PutReport(0, 0, 0, 0)
        call = _Put(self, items, shape, blocks, deadline)
        try:
            await call.run()
        except BaseException:
            call.cancel()
            raise
        finally:
            call.leave()
        report = call.report()
        self.counters.add("put_acked", report.acked)
        self.counters.add("put_already", report.already)
        self.counters.add("put_failed", report.failed)
        self.counters.add("put_at_risk", report.at_risk)
        return report

    def keep(self, task: asyncio.Task[PutOutcome]) -> None:
        """Hold a write until it is over, whether or not its put still waits for it."""
        self._late.add(task)
        task.add_done_callback(self._late.discard)

    async def close(self) -> None:
        """Stop waiting for writes that are still under way."""
        tasks = list(self._late)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


@dataclass(slots=True)
class _Write:
    """One batch on its way to one node; rows are those of the put's table of shards."""

    rows: Rows
    buffer: Bytes | None


@dataclass(slots=True)
class _Lane:
    """What one put has under way to one node."""

    node: Node
    open: bool = True
    writes: dict[asyncio.Task[PutOutcome], _Write] = field(default_factory=dict)


class _Put:
    """One call. Row b of every array is block b of the caller; of equal keys only the first is worked on."""

    def __init__(self, writer: Writer, items: Sequence[PutItem], shape: BlockShape, blocks: Bytes,
                 deadline: Deadline) -> None:
        self._writer = writer
        self._items = items
        self._shape = shape
        self._source: Bytes | None = blocks
        self._deadline = deadline
        self._began = writer.clock.monotonic()
        self._keys = [item.key for item in items]
        self._fate = np.zeros(len(items), np.uint8)
        self._stored = np.zeros((len(items), STRIPE_SHARDS), np.bool_)
        self._expected = np.zeros((len(items), STRIPE_SHARDS), np.bool_)
        self._completing = np.zeros(len(items), np.bool_)
        self._at_risk = np.zeros(len(items), np.bool_)
        first: dict[bytes, int] = {}
        self._first = np.array([first.setdefault(key, at) for at, key in enumerate(self._keys)], np.intp)
        self._lanes: dict[int, _Lane] = {}
        self._claimed: list[tuple[bytes, bytes]] = []
        self._admitted = 0
        self._reserved: dict[bytes, int] = {}
        self._why: str | None = None
        self._over = False
        self._bug: BaseException | None = None
        self._changed = asyncio.Event()

    # -- the steps ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """All steps of the module docstring. What is still open afterwards has failed."""
        if not self._enough(len(self._writer.health.readable())):
            return
        try:
            size = len(self._items) * self._shape.block_bytes
            self._admitted = await self._writer.admission.acquire(size, self._deadline)
            survey = await self._survey()
            if survey is None or not self._open_lanes(survey):
                return
            await self._write(survey)
            await self._settle()
        except TimeoutError:
            self._refuse(TOO_LATE)
        self._judge()
        if self._deadline.passed():
            self._writer.counters.add("put_deadline")

    def cancel(self) -> None:
        """Nobody waits for the answers any more. What a node has begun it finishes on its own."""
        for lane in self._lanes.values():
            for task in lane.writes:
                task.cancel()

    def leave(self) -> None:
        """Give back what the call holds, at any point of it; the caller's memory first of all."""
        self._over = True
        self._source = None
        self._writer.admission.release(self._admitted)
        self._admitted = 0
        self._writer.writing.subtract(self._claimed)
        for claim in self._claimed:
            if self._writer.writing[claim] <= 0:
                del self._writer.writing[claim]
        self._claimed = []
        for index, lane in self._lanes.items():
            self._abandon(index, lane)
        self._release_quota()

    def _release_quota(self) -> None:
        """Once nothing of this call is being written any more."""
        if self._over and self._reserved and not any(lane.writes for lane in self._lanes.values()):
            self._writer.quotas.release(self._reserved)
            self._reserved = {}

    def _refuse(self, why: str) -> None:
        """Note why blocks fail; the first reason stays."""
        self._why = self._why or why

    def report(self) -> PutReport:
        fate, at_risk = self._fate[self._first], self._at_risk[self._first]
        repeated = self._first != np.arange(len(fate))
        # The second of two equal keys finds the first one complete.
        fate[repeated & (fate == Fate.ACKED)] = Fate.ALREADY
        acked, already = int((fate == Fate.ACKED).sum()), int((fate == Fate.ALREADY).sum())
        stored = (fate == Fate.ACKED) | (fate == Fate.ALREADY)
        failed = len(fate) - acked - already
        if failed:
            self._refuse(TOO_LATE if self._deadline.passed() else NODES_REFUSED)
        return PutReport(acked, already, failed, int((stored & at_risk).sum()), self._why if failed else None)

    def _enough(self, nodes: int) -> bool:
        if nodes >= ACK_SHARDS:
            return True
        self._refuse(TOO_FEW_NODES)
        self._writer.counters.add("put_refused", int((self._fate[self._first] == Fate.OPEN).sum()))
        return False

    async def _survey(self) -> Survey | None:
        """Ask every node what it holds of the keys; None when too few answered."""
        writer = self._writer
        spans = runs(self._keys)
        turns = [rotation_of(placement_group(self._keys[start])) for start, _ in spans]
        lengths = [stop - start for start, stop in spans]
        self._rotation = np.repeat(np.array(turns, np.uint8), lengths)
        self._run = np.repeat(np.arange(len(spans)), lengths)
        nodes = ((index, writer.nodes[index]) for index in writer.health.readable())
        asks = {index: (node, self._keys) for index, node in nodes if node is not None}
        tables, failed = await tables_of(asks, writer.health, self._deadline, ACK_SHARDS)
        if len(tables) < ACK_SHARDS and self._deadline.passed():
            raise TimeoutError
        if not self._enough(len(asks) - len(failed)) or len(tables) < ACK_SHARDS:
            return None
        survey = Survey(self._rotation, tables)
        self._fate[survey.complete] = Fate.ALREADY
        self._at_risk = survey.complete & (survey.copies == ACK_SHARDS)
        known = np.flatnonzero(survey.complete)
        if len(known):
            stamp = stamp_of(writer.clock.wall())
            keys = [self._keys[row] for row in known.tolist()]
            for index in tables:
                asks[index][0].touch(keys, survey.locations(index, known), stamp)
        return survey

    def _open_lanes(self, survey: Survey) -> bool:
        """A lane for every node that can be written to; False when no block needs one or too few can."""
        writer = self._writer
        for index in writer.health.writable():
            node = writer.nodes[index]
            if node is not None and writer.staging.abandoned_bytes(index) < ABANDONED_BYTES_PER_NODE:
                self._lanes[index] = _Lane(node)
        return not survey.complete.all() and self._enough(len(self._lanes))

    async def _write(self, survey: Survey) -> None:
        """Fill and send piece after piece, as long as eleven lanes are open."""
        first = self._first == np.arange(len(self._first))
        todo = await self._within_quota(np.flatnonzero(first & (self._fate == Fate.OPEN)))
        for piece in cut(todo, self._rotation, self._run, self._shape.block_bytes):
            await self._room()
            if self._open_count() < ACK_SHARDS or self._deadline.passed():
                return
            await self._send_piece(piece, survey)

    async def _within_quota(self, todo: Rows) -> Rows:
        """Those of the blocks that their tenants have room for."""
        if not self._writer.quotas.any:
            return todo
        tags = Counter(self._items[row].tenant_tag for row in todo.tolist())
        stripe_bytes = STRIPE_SHARDS * self._shape.slot_bytes
        wanted = {tag: count * stripe_bytes for tag, count in tags.items()}
        self._reserved = await self._writer.quotas.reserve(wanted, self._deadline)
        refused = sum(count for tag, count in tags.items() if tag not in self._reserved)
        if not refused:
            return todo
        self._refuse(OVER_QUOTA)
        self._writer.counters.add("put_over_quota", refused)
        return np.array([row for row in todo.tolist() if self._items[row].tenant_tag in self._reserved], np.intp)

    # -- one piece ----------------------------------------------------------------------------------------------

    async def _send_piece(self, piece: Piece, survey: Survey) -> None:
        """Fill staging with a piece and start the write of each open lane."""
        staging, source = self._writer.staging, self._source
        assert source is not None
        buffers = await staging.lease([piece.rows * self._shape.slot_bytes] * STRIPE_SHARDS, self._deadline)
        handed = [False] * STRIPE_SHARDS
        try:
            filling = Filling(piece, self._shape, buffers)
            for _ in filling.fill(source, self._writer.codec):
                await asyncio.sleep(0)
                if self._deadline.passed():
                    return
            digests = template_digests(filling.describe(self._items))
            wanted = await self._plan(piece.blocks, [digest.tobytes() for digest in digests], survey)
            for index, lane in self._lanes.items():
                if lane.open:
                    handed[index] = self._send(index, lane, filling, wanted[:, index], buffers[index])
        finally:
            for index, buffer in enumerate(buffers):
                if not handed[index]:
                    staging.give_back(buffer)

    async def _plan(self, blocks: Rows, digests: Sequence[bytes], survey: Survey) -> Flags:
        """(rows, 12): which shards of the piece's rows to send where. Drops what a fifth version displaces."""
        writing = self._writer.writing
        claims = [(self._keys[block], digest) for block, digest in zip(blocks.tolist(), digests, strict=True)]
        writing.update(claims)
        self._claimed += claims
        wanted = np.ones((len(blocks), STRIPE_SHARDS), np.bool_)
        mistaken = self._mistaken(blocks, digests)
        wanted[mistaken] = False
        drops: dict[int, list[DropItem]] = {}
        used: dict[int, list[bytes]] = {}
        displacing: list[int] = []
        for row in np.flatnonzero(survey.held[blocks] & ~mistaken).tolist():
            block, digest = int(blocks[row]), digests[row]
            versions = survey.versions(block)
            mine = versions.get(digest)
            if mine is not None and len(mine.trusted) >= DATA_SHARDS:
                holders = sorted(mine.trusted)
                wanted[row, holders] = False
                self._stored[block, holders] = True
                self._completing[block] = True
                for index in holders:
                    used.setdefault(index, []).append(self._keys[block])
            elif mine is None and len(versions) >= MAX_VERSIONS_PER_KEY:
                key = self._keys[block]
                victim = weakest(versions, {other for other in versions if (key, other) in writing})
                if victim is None:
                    wanted[row] = False
                    continue
                displacing.append(row)
                for index, generation in versions[victim].generations.items():
                    drops.setdefault(index, []).append(DropItem(key, victim, generation, int(HOLLOW_GRACE_MS)))
        stamp = stamp_of(self._writer.clock.wall())
        for index, keys in used.items():
            if (node := self._writer.nodes[index]) is not None:
                node.touch(keys, None, stamp)
        if drops and not await self._drop(drops):
            wanted[displacing] = False
        return wanted

    def _mistaken(self, blocks: Rows, digests: Sequence[bytes]) -> Flags:
        """(rows,): which of the piece's rows have another digest than they must."""
        demanded = [self._items[block].digest for block in blocks.tolist()]
        mistaken = np.array([digest is not None and digest != found
                             for digest, found in zip(demanded, digests, strict=True)], np.bool_)
        if mistaken.any():
            self._refuse(OTHER_BYTES)
        return mistaken

    async def _drop(self, drops: dict[int, list[DropItem]]) -> bool:
        """Whether every node has removed all of its records."""
        nodes = {index: node for index in drops if (node := self._writer.nodes[index]) is not None}
        calls = {index: node.drop(drops[index], self._deadline) for index, node in nodes.items()}
        answers, _ = await all_of(calls, self._deadline, len(calls))
        return all(answers.get(index) == len(items) for index, items in drops.items())

    def _send(self, index: int, lane: _Lane, filling: Filling, wanted: Flags, buffer: Bytes) -> bool:
        """Start one node's write of a piece; False when it has nothing to write. `wanted` is by row of the piece."""
        order = filling.row_of(index)
        keep = np.flatnonzero(wanted[order])
        if not len(keep):
            return False
        headers, payload = filling.headers(index), filling.payload(index)
        if len(keep) < len(order):
            payload[: len(keep)] = payload[keep]
            payload, headers, order = payload[: len(keep)], headers[keep], order[keep]
        blocks = filling.piece.blocks[order]
        keys = [self._keys[block] for block in blocks.tolist()]
        batch = PutBatch(keys, headers, payload, self._shape.shard_bytes, stamp_of(self._writer.clock.wall()))
        self._expected[blocks, index] = True
        task = asyncio.create_task(lane.node.put(batch, self._deadline))
        lane.writes[task] = _Write(blocks, buffer)
        self._writer.keep(task)
        task.add_done_callback(partial(self._finished, index, lane))
        return True

    # -- answers ------------------------------------------------------------------------------------------------

    def _finished(self, index: int, lane: _Lane, task: asyncio.Task[PutOutcome]) -> None:
        """A node's write has ended. Runs also after the call has returned, and then only sees to the buffer."""
        write = lane.writes.pop(task)
        self._expected[write.rows, index] = False
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if write.buffer is not None:
            if error is None or isinstance(error, NodeFull):
                self._writer.staging.give_back(write.buffer)
            else:
                self._writer.staging.abandon(index, write.buffer)
        in_time = not self._over and not self._deadline.passed()
        if error is None:
            self._writer.health.note_answer(index)
            if in_time:
                self._stored[write.rows, index] |= task.result().stored
                why = task.result().why
                if why is not None:
                    self._refuse(why)
        else:
            lane.open = False
            if not isinstance(error, EfsError | asyncio.CancelledError):
                self._bug = error
            elif isinstance(error, EfsError) and in_time:
                self._refuse(str(error))
                _LOG.info("a write to node %d stored nothing: %s", index, error)
                self._writer.health.note_failure(index, error)
        self._changed.set()
        self._release_quota()

    def _open_count(self) -> int:
        return sum(lane.open for lane in self._lanes.values())

    def _abandon(self, index: int, lane: _Lane) -> None:
        """Leave the buffers of a lane's running writes to the node."""
        for write in lane.writes.values():
            if write.buffer is not None:
                self._writer.staging.abandon(index, write.buffer)
                write.buffer = None

    async def _wait(self, seconds: float) -> None:
        """Until something was answered, at most so long."""
        self._changed.clear()
        # A timer instead of a timeout: the traceback of an exception would keep frames, and the caller's memory with
        # them, until the next garbage collection.
        timer = asyncio.get_running_loop().call_later(seconds, self._changed.set)
        try:
            await self._changed.wait()
        finally:
            timer.cancel()
        if self._bug is not None:
            raise self._bug

    async def _room(self) -> None:
        """Wait until every open lane can take a piece; leave out a single one that keeps the others waiting."""
        idle_until: Deadline | None = None
        while not self._deadline.passed():
            open_lanes = [(index, lane) for index, lane in self._lanes.items() if lane.open]
            full = [(index, lane) for index, lane in open_lanes if len(lane.writes) >= PUT_LANE_PIECES]
            if not full:
                return
            seconds = self._deadline.left()
            others_idle = sum(not lane.writes for _, lane in open_lanes) == len(open_lanes) - 1
            if others_idle and len(open_lanes) > ACK_SHARDS:
                idle_until = idle_until or self._lag_grace()
                if idle_until.passed():
                    full[0][1].open = False
                    self._abandon(*full[0])
                    return
                seconds = min(seconds, idle_until.left())
            await self._wait(seconds)

    def _lag_grace(self) -> Deadline:
        """Until when one late node is waited for: as long again as the others took, and PUT_LAG_GRACE_MS at least."""
        clock = self._writer.clock
        elapsed_ms = (clock.monotonic() - self._began) * 1000
        return Deadline.after_ms(clock, min(max(PUT_LAG_GRACE_MS, elapsed_ms), MAX_DEADLINE_MS))

    async def _settle(self) -> None:
        """Wait until no block can gain anything that is worth waiting for."""
        grace: Deadline | None = None
        while not self._deadline.passed():
            if self._bug is not None:
                raise self._bug
            have = self._stored.sum(axis=1)
            reachable = (self._stored | self._expected).sum(axis=1)
            undecided = (self._fate == Fate.OPEN) & (reachable > have)
            if not undecided.any():
                break
            seconds = self._deadline.left()
            if not (undecided & (have < ACK_SHARDS) & (reachable >= ACK_SHARDS)).any():
                if not (undecided & (have >= ACK_SHARDS)).any():
                    break
                grace = grace or self._lag_grace()
                if grace.passed():
                    break
                seconds = min(seconds, grace.left())
            await self._wait(seconds)

    def _judge(self) -> None:
        have = self._stored.sum(axis=1)
        good = (self._fate == Fate.OPEN) & (have >= ACK_SHARDS)
        self._fate[good] = np.where(self._completing[good], np.uint8(Fate.ALREADY), np.uint8(Fate.ACKED))
        self._at_risk[good] = have[good] == ACK_SHARDS
