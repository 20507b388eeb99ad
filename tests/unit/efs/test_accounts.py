"""Accounts that cannot drift: after any mix of changes every way of counting says the same, by slot size and by tenant
(fault 32)."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from efs.clock import Deadline, SystemClock, stamp_of
from efs.cluster import read_store_config
from efs.contract import ABSENT, PURGED
from efs.errors import NodeFull
from efs.fs import FileSystem
from efs.limits import KIB, MIB, STRIPE_SHARDS
from efs.node import DirectoryNode
from efs.nodeview import NodeView, tree_bytes
from efs.osio import SystemIo
from efs.types import DropItem
from tests.support.accounts import Account, assert_agree, assert_store_agrees, by_states, of_closed
from tests.support.blocks import Blocks, make_blocks
from tests.support.clock import FakeClock
from tests.support.nodebox import NODE_INDEX, PLACE, NodeBox, crash, flip
from tests.support.records import LARGE, SMALL, Records, make_records

pytestmark = pytest.mark.usefixtures("patient")

TAGS = (bytes(8), b"acme-tag", b"other-tg", b"third-tg")
CAPACITY = 3 * MIB
POOL, ROWS = 24, 40
OPERATIONS = 10_000
CHECK_EVERY = 500


def pool_of(generation: int) -> list[Records]:
    """Records of two sizes and four tenants; another generation has other bytes under the same keys."""
    made = []
    for number in range(POOL):
        shape = LARGE if number % 2 else SMALL
        keys = make_records(ROWS, NODE_INDEX, seed=number, shape=shape).keys
        made.append(make_records(ROWS, NODE_INDEX, seed=number + 1_000 * generation, shape=shape, keys=keys,
                                 tenant_tag=TAGS[number // 2 % len(TAGS)]))
    return made


@dataclass
class Rig:
    """One node under random changes. pools: what may be stored, by generation. buried: tags since the last opening."""

    box: NodeBox
    node: DirectoryNode
    source: random.Random
    pools: list[list[Records]]
    buried: set[bytes] = field(default_factory=set)
    done: Counter[str] = field(default_factory=Counter)
    evicted: int = 0

    def some(self) -> Records:
        records = self.source.choice(self.source.choice(self.pools))
        start = self.source.randrange(ROWS)
        return records.rows(start, start + self.source.randrange(1, 7))

    def tag_of(self, records: Records) -> bytes:
        return records.headers[0, 16:24].tobytes()

    async def put(self) -> None:
        await self._put(self.some(), repair=False)

    async def repair(self) -> None:
        await self._put(self.some(), repair=True)

    async def _put(self, records: Records, repair: bool) -> None:
        stamp = stamp_of(self.box.clock.wall()) - self.source.randrange(1_800)
        try:
            outcome = await self.node.put(replace(records.batch(stamp), repair=repair), self.box.soon())
        except NodeFull:
            self.done["full"] += 1
            return
        if self.tag_of(records) in self.buried:
            assert not outcome.stored.any()
            assert outcome.why == PURGED
            self.done["refused as purged"] += 1
        self.done["stored"] += int(outcome.stored.sum())

    async def get(self) -> None:
        """All versions that are held are versions that were put, byte for byte."""
        records = self.some()
        known = {digest: each.payload[row].tobytes() for pool in self.pools for each in pool
                 if records.keys[0] in each.keys for row, digest in enumerate(each.digests)}
        table = await self.node.look_up(records.keys, self.box.soon())
        held = [(int(table.location[row]), table.digest[row].tobytes())
                for row in np.flatnonzero(table.location != ABSENT).tolist()]
        held += [(row.location, row.digest) for row in table.extra]
        for location, digest in held:
            assert await self.box.payload(self.node, np.array([location]), records.shape) == known[digest]
        self.done["read"] += len(held)

    async def _held(self) -> list[DropItem]:
        records = self.some()
        table = await self.node.look_up(records.keys, self.box.soon())
        rows = np.flatnonzero(table.location != ABSENT).tolist()
        return [DropItem(records.keys[row], table.digest[row].tobytes(), int(table.generation[row])) for row in rows]

    async def drop(self) -> None:
        items = await self._held()
        assert await self.node.drop(items, self.box.soon()) == len(items)
        self.done["dropped"] += len(items)

    async def sweep(self) -> None:
        """What a sweep does on a node: drops by comparing, of what is old enough."""
        items = [replace(item, generation=item.generation + self.source.choice([0, 0, 1]), older_than_ms=120_000)
                 for item in await self._held()]
        self.done["swept"] += await self.node.drop(items, self.box.soon())

    async def verify_rotten(self) -> None:
        for item in (await self._held())[:1]:
            table = await self.node.look_up([item.key], self.box.soon())
            place = int(table.location[0])
            geometry = self.node._state.allocator.geometry(place >> 20)
            assert geometry is not None
            flip(self.box.slab, geometry.slot_position(place))
            assert not await self.node.verify(item.key, item.digest, self.box.soon())
            self.done["rotten"] += 1

    async def collect(self) -> None:
        self.done["collected"] += await self.node.collect(self.box.soon())

    async def purge(self) -> None:
        tag = self.source.choice(TAGS[1:])
        self.buried.add(tag)
        while went := await self.node.bury([tag], self.box.soon()):
            self.done["purged"] += went

    async def tick(self) -> None:
        assert isinstance(self.box.clock, FakeClock)
        self.box.clock.advance(self.source.choice([1, 61, 130]))

    async def restart(self) -> None:
        """Close or die, and compare what lies on the disk of a closed one."""
        self.evicted += self.box.counters.get("node_evicted")
        if self.source.random() < 0.5:
            account = await assert_agree(self.node)
            await self.node.close()
            view = NodeView.open(SystemIo(), self.box.path, PLACE)
            assert of_closed(view) == account
            view.close()
            self.done["compared closed"] += 1
        else:
            await self.node.settled()
            account = by_states(self.node)
            await crash(self.node)
        self.buried.clear()
        self.node = await self.box.open()
        assert by_states(self.node) == account, "an opening counts what the last owner counted"
        self.done["restarted"] += 1


WEIGHTS = {"put": 44, "repair": 6, "get": 16, "drop": 8, "sweep": 4, "verify_rotten": 3, "collect": 2, "tick": 16,
           "purge": 0.15, "restart": 0.4}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", [1])
async def test_no_account_drifts_in_ten_thousand_random_changes_of_a_node(tmp_path: Path, seed: int) -> None:
    source = random.Random(seed)
    box = NodeBox(tmp_path, capacity_bytes=CAPACITY, extent_bytes=256 * KIB)
    rig = Rig(box, await box.open(), source, [pool_of(0), pool_of(1), pool_of(2)])
    names = source.choices(list(WEIGHTS), list(WEIGHTS.values()), k=OPERATIONS)
    for number, name in enumerate(names):
        change: Callable[[], Awaitable[None]] = getattr(rig, name)
        await change()
        assert tree_bytes(box.path) <= CAPACITY, f"operation {number}, {name}"
        if number % CHECK_EVERY == 0:
            await assert_agree(rig.node)
    account = await assert_agree(rig.node)
    assert len({slot_bytes for slot_bytes, _, _ in account}) == 2
    rig.evicted += box.counters.get("node_evicted")
    await rig.node.close()
    view = NodeView.open(SystemIo(), box.path, PLACE)
    assert of_closed(view) == account
    view.close()
    expected = {"stored", "read", "dropped", "swept", "rotten", "purged", "refused as purged", "restarted",
                "compared closed"}
    assert expected <= {name for name, count in rig.done.items() if count >= 2}, rig.done
    assert rig.evicted > 1_000


# -- A store ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def root(tmp_path: Path) -> str:
    FileSystem.init(str(tmp_path / "store"), STRIPE_SHARDS * CAPACITY, extent_bytes=256 * KIB)
    return str(tmp_path / "store")


def nodes_of(filesystem: FileSystem) -> list[DirectoryNode]:
    found = [filesystem.upkeep.node(index) for index in range(STRIPE_SHARDS)]
    return [node for node in found if isinstance(node, DirectoryNode)]


def soon() -> Deadline:
    return Deadline.after_ms(SystemClock(), 20_000)


async def change_store(filesystem: FileSystem, source: random.Random, pool: list[Blocks], done: Counter[str]) -> None:
    blocks = source.choice(pool)
    name = source.choices(["put", "get", "drop", "one node drops", "sweep", "repair", "collect", "purge"],
                          [50, 20, 8, 10, 4, 4, 2, 0.6])[0]
    if name == "put":
        report = await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=20_000)
        done["stored"] += report.acked
        done["refused as purged"] += report.why == PURGED
    elif name == "get":
        out = bytearray(blocks.data.nbytes)
        done["read"] += sum((await filesystem.get_into(blocks.keys, blocks.shape, out, deadline_ms=20_000)).ok)
    elif name == "drop":
        done["dropped"] += await filesystem.drop(blocks.keys[:5], deadline_ms=20_000)
    elif name == "one node drops":
        for node in source.sample(nodes_of(filesystem), source.choice([1, 4])):
            page = await node.list(None, 3, soon())
            items = [DropItem(record.key, record.digest, record.generation) for record in page.records]
            done["lost shards"] += await node.drop(items, soon())
    elif name == "sweep":
        done["swept"] += (await filesystem.upkeep.sweep(grace_ms=0)).dropped
    elif name == "repair":
        done["rebuilt"] += (await filesystem.upkeep.repair()).rebuilt
    elif name == "collect":
        await filesystem.collect(deadline_ms=20_000)
    else:
        done["purged"] += (await filesystem.purge([source.choice(TAGS[2:])])).dropped


@pytest.mark.slow
async def test_no_account_of_a_store_drifts_and_fsck_counts_the_same(root: str) -> None:
    source, done = random.Random(5), Counter[str]()
    shapes = {0: LARGE, 1: SMALL}
    pool = [make_blocks(16, seed=number + 1_000 * version, shape=shapes[number % 2],
                        keys=make_blocks(16, seed=number).keys, tenant_tag=TAGS[number % len(TAGS)])
            for number in range(40) for version in range(2)]
    paths = read_store_config(SystemIo(), root).node_paths
    for _ in range(4):
        filesystem = await FileSystem.open(root, maintain=False)
        for _ in range(100):
            await change_store(filesystem, source, pool, done)
            assert max(map(tree_bytes, paths)) <= CAPACITY
        accounts: dict[int, Account] = {node.node_index: await assert_agree(node) for node in nodes_of(filesystem)}
        done["evicted"] = sum(node._guard.counters.get("node_evicted") for node in nodes_of(filesystem))
        await filesystem.close()
        assert_store_agrees(root, accounts)
    expected = {"stored", "read", "dropped", "lost shards", "swept", "rebuilt", "purged", "refused as purged"}
    assert expected <= {name for name, count in done.items() if count}, done
