"""Opens what a crash left of a node and looks whether the promises hold. Every failure is an AssertionError.

1. Before the opening (killed processes only): whatever the index names has its data, unless it was on its way out.
2. The node opens, or is none yet, because its making was interrupted. Every other time after power loss something is
   put at once that may be held and damaged: it must not be taken for stored unseen (fault 60). Headers are those that
   were stored. A trusted record has the bytes that were stored (I1); one that is not trusted is verified, and then the
   node's word for it is right, or it is gone.
3. What must be there is there, and nothing that may not be. In `process` mode power loss may take anything, except
   from a node that was closed, and may bring back anything that was ever stored.
4. Index, tables and allocator name the same records, each slot once.
5. The process dies again at once: the next opening finds the same records and has nothing to mend.
6. What was under way is put again, and new records of each class: all of it is stored and right, and no record that was
   there before is damaged by it, so no slot was given out twice.
7. The node is closed and opened: nothing to mend, same records; fsck's pass over its tables finds nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from efs.clock import stamp_of
from efs.errors import OpenFailed
from efs.findings import Sums
from efs.gc import Watermarks
from efs.node import DirectoryNode
from efs.nodeview import NodeView, Slot, locations_of
from efs.osio import SystemIo
from efs.shape import BlockShape
from efs.tablecheck import TableCheck
from tests.support.crashio.crashes import Crash
from tests.support.crashio.disk import Disk
from tests.support.crashio.life import Life, Names, Promise, names_of
from tests.support.nodebox import NODE_INDEX, PLACE, NodeBox, crash, index_agrees
from tests.support.records import Records, make_records

MENDING = ("node_torn_entries", "node_index_mismatch", "node_index_rebuilt", "node_verify_failed", "node_io_errors")
"""Counters of what an opening mends, or meets."""
LATER_BOOT = "boot-after-power-loss"
ALMOST_FULL = Watermarks(0.999, 0.999_999, 1.0)
"""No collector gives up what is being looked at."""
AGAIN_MOST = 6
"""Records put again after a crash: a small node has no room for more of its largest class."""


@dataclass(frozen=True, slots=True)
class Seen:
    """One record as a node shows it. exact: whether its payload is what was stored."""

    location: int
    generation: int
    trusted: bool
    exact: bool


class Oracle:
    """Judges crashes of one life. Images are made below `place`."""

    def __init__(self, life: Life, place: Path) -> None:
        self._life = life
        self._place = place
        self._number = 0
        self.looked = 0
        self.must = 0
        """Records that had to be there, over all crashes."""

    async def judge(self, crash_: Crash) -> None:
        """AssertionError, naming the crash, when a promise is broken."""
        self._number += 1
        image = self._place / f"image-{self._number}"
        crash_.disk.put_down(str(image))
        promise = self._life.promise(crash_.position)
        try:
            await self._judge(image, crash_, promise)
        except Exception as error:
            raise AssertionError(f"{crash_.what}, during {promise.step}: {error!r}") from error
        shutil.rmtree(image)
        self.looked += 1

    async def _judge(self, image: Path, crash_: Crash, promise: Promise) -> None:
        if not is_node(crash_.disk):
            assert not promise.must, "the node is gone"
            await self._is_refused(image)
            return
        closed = promise.step == "after close"
        anything = crash_.power and self._life.durability == "process" and not closed
        must: Names = frozenset() if anything else promise.must
        may = frozenset(self._life.known) if anything else promise.may
        self.must += len(must)
        if not crash_.power:
            self._data_before_index(image, promise)
        box = NodeBox.at(image, self._life.durability, LATER_BOOT if crash_.power else self._life.boot_id)
        box.clock, box.marks = self._life.clock, ALMOST_FULL
        node = await box.open()
        if crash_.power and self._number % 2:
            for records in _rows_of(self._life, sorted(promise.must)[:AGAIN_MOST]):
                await self._put(box, node, records)
        seen = await self.settle(box, node)
        assert must <= seen.keys(), f"{len(must - seen.keys())} of {len(must)} records are lost"
        assert seen.keys() <= may, f"{len(seen.keys() - may)} records came back"
        assert index_agrees(node), "index and tables differ"
        await crash(node)
        node = await box.open()
        self._nothing_to_mend(box)
        assert await self.settle(box, node) == seen, "a second opening shows other records"
        seen = await self._use(box, node, seen, promise)
        await node.close()
        await self._is_in_order(box, image, seen)

    async def _is_refused(self, image: Path) -> None:
        """A node whose making was interrupted is no node."""
        try:
            await NodeBox.at(image, self._life.durability, self._life.boot_id).open()
        except OpenFailed:
            return
        raise AssertionError("half a node was opened")

    # -- 1: before anything was opened

    def _data_before_index(self, image: Path, promise: Promise) -> None:
        if promise.step == "open":
            return  # What an earlier crash left is being mended.
        view = NodeView.open(SystemIo(), str(image / "node"), PLACE)
        try:
            entries = view.page(None, 10_000)
            records = view.records(locations_of(entries))
        finally:
            view.close()
        for entry, record in zip(entries, records, strict=True):
            name = bytes(record["key"]) + bytes(record["digest"])
            status = int(record["status"])
            stands = (status == Slot.LIVE and int(record["generation"]) == entry.generation
                      and name == entry.index_key)
            rewritten = status == Slot.TORN and entry.index_key not in promise.under_way
            assert stands or rewritten or entry.index_key in promise.leaving, "the index is ahead of data"

    # -- 2 and 3: what the node shows

    async def settle(self, box: NodeBox, node: DirectoryNode) -> dict[bytes, Seen]:
        """All records of a node; those that it does not trust are verified first."""
        seen = await self._look(box, node)
        for record in seen.values():
            assert record.exact or not record.trusted, "a wrong byte in a record that is trusted"
        doubtful = [name for name, record in seen.items() if not record.trusted]
        for name in doubtful:
            sound = await node.verify(name[:32], name[32:], box.soon())
            assert sound == seen[name].exact, "a verification was wrong"
        if not doubtful:
            return seen
        after = await self._look(box, node)
        assert after.keys() == {name for name, record in seen.items() if record.exact}
        assert all(record.exact and record.trusted for record in after.values())
        return after

    async def _look(self, box: NodeBox, node: DirectoryNode, only: bytes | None = None) -> dict[bytes, Seen]:
        """All records that a node shows, or all versions of one key."""
        known = self._life.known
        keys = sorted({name[:32] for name in known}) if only is None else [only]
        if not keys:
            return {}
        table = await node.look_up(keys, box.soon())
        rows = np.flatnonzero(table.location >= 0).tolist()
        found = [(keys[row] + table.digest[row].tobytes(), int(table.location[row]), int(table.generation[row]),
                  bool(table.trusted[row])) for row in rows]
        found += [(keys[more.row] + more.digest, more.location, more.generation, more.trusted) for more in table.extra]
        seen: dict[bytes, Seen] = {}
        shapes: dict[BlockShape, list[tuple[bytes, int, int, bool]]] = {}
        for version in found:
            assert version[0] in known, "a record that was never stored"
            shapes.setdefault(known[version[0]][0].shape, []).append(version)
        for shape, versions in shapes.items():
            stored = [known[name] for name, *_ in versions]
            places = np.array([location for _, location, _, _ in versions])
            generations = np.array([generation for _, _, generation, _ in versions], np.uint64)
            headers = await node.headers(places, generations, len(shape.segment_bytes), box.soon())
            assert (headers == np.array([records.headers[row] for records, row in stored])).all(), \
                "a header that was never stored"
            payload = np.frombuffer(await box.payload(node, places, shape), np.uint8).reshape(len(places), -1)
            exact = (payload == np.array([records.payload[row] for records, row in stored])).all(axis=1)
            for (name, location, generation, trusted), right in zip(versions, exact.tolist(), strict=True):
                seen[name] = Seen(location, generation, trusted, right)
        assert len({record.location for record in seen.values()}) == len(seen), "two records in one slot"
        return seen

    # -- 5 to 7: what can be done with it

    def _nothing_to_mend(self, box: NodeBox) -> None:
        mended = {name: count for name in MENDING if (count := box.counters.get(name))}
        assert not mended, f"the second opening had something to mend: {mended}"

    async def _use(self, box: NodeBox, node: DirectoryNode, seen: dict[bytes, Seen],
                   promise: Promise) -> dict[bytes, Seen]:
        """Put again what was under way, and something new of each class."""
        again = sorted(promise.under_way or promise.must)[:AGAIN_MOST]
        put: set[bytes] = set(again)
        for records in _rows_of(self._life, again):
            await self._put(box, node, records)
        for number, shape in enumerate(sorted({records.shape for records, _ in self._life.known.values()},
                                              key=lambda shape: shape.block_bytes)):
            new = make_records(1, NODE_INDEX, seed=10_000 + number, shape=shape)
            self._life.known.setdefault(names_of(new)[0], (new, 0))
            put.add(names_of(new)[0])
            await self._put(box, node, new)
        await node.settled()
        after = await self._look(box, node)
        assert all(record.exact and record.trusted for record in after.values()), "a wrong byte after new puts"
        assert after.keys() <= seen.keys() | put, "a record came back with new puts"
        if not box.counters.get("node_evicted"):
            assert after.keys() == seen.keys() | put, "a record is lost with new puts"
        assert index_agrees(node), "index and tables differ after new puts"
        return after

    async def _put(self, box: NodeBox, node: DirectoryNode, records: Records) -> None:
        """Put one record."""
        # Used now: what the crashed process stored last counts as used when it arrived.
        outcome = await node.put(records.batch(stamp_of(box.clock.wall())), box.soon())
        assert outcome.stored.all(), f"a put after the crash was refused: {outcome.why}"
        seen = (await self._look(box, node, records.keys[0])).get(names_of(records)[0])
        assert seen is not None, "a put after the crash is lost"
        assert seen.exact, "a put was answered with a record that is damaged"
        assert seen.trusted, "a put was answered with a record that nobody checked"

    async def _is_in_order(self, box: NodeBox, image: Path, seen: dict[bytes, Seen]) -> None:
        node = await box.open()
        self._nothing_to_mend(box)
        assert await self._look(box, node) == seen, "closing changed what is there"
        await node.close()
        view, sums = NodeView.open(SystemIo(), str(image / "node"), PLACE), Sums()
        try:
            check = TableCheck(view, sums)
            found = [finding for extent in range(view.slab.extents) for finding in check.suspect(extent)]
        finally:
            view.close()
        assert not found, f"fsck finds {found}"
        assert (sums.torn, sums.records, check.agreeing) == (0, len(seen), len(seen))


def is_node(disk: Disk) -> bool:
    """Whether there is a node; making it may have been interrupted."""
    return "node" in disk.directories and "node/node.toml" in disk.names


def _rows_of(life: Life, names: Iterable[bytes]) -> list[Records]:
    """Single records, in the order of their names."""
    return [records.rows(row, row + 1) for records, row in map(life.known.__getitem__, names)]
