"""The whole filesystem against a dict: put, get, match, drop, reopen, and up to two nodes lost at any time.

The model knows for each version of a block which nodes hold a shard of it. From that follows exactly what every call
has to say: a block with ten shards on the nodes that are there is a hit with the bytes of such a version, every other
one a miss.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Sequence

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from efs.checksum import xxh3_64
from efs.fs import FileSystem
from efs.limits import ACK_SHARDS, DATA_SHARDS, MIB
from efs.shard import block_templates, template_digests
from efs.types import PutReport
from tests.support.blocks import TINY, Blocks, make_blocks

KEYS = 8
VERSIONS = 3
DEADLINE_MS = 30_000
CHAIN_KEYS = make_blocks(KEYS, seed=77, run=3).keys
CHAIN = [make_blocks(KEYS, seed=version, keys=CHAIN_KEYS) for version in range(VERSIONS)]



def digest_of(blocks: Blocks, at: int) -> bytes:
    hashes = [xxh3_64(blocks.block(at)[offset : offset + size])
              for offset, size in zip(TINY.segment_offsets, TINY.segment_bytes, strict=True)]
    template = block_templates([blocks.keys[at]], np.zeros(1, np.uint32), bytes(8), TINY, np.array([hashes], np.uint64))
    return bytes(template_digests(template)[0])


DIGESTS = [{digest_of(CHAIN[version], key): version for version in range(VERSIONS)} for key in range(KEYS)]
"""By key, the version that a digest names."""

Holders = dict[int, set[int]]
"""By version, the nodes that hold a shard of it."""


class StoreModel(RuleBasedStateMachine):
    """`held[k]` is about key k of the chain; `lost` are the nodes whose directories are away, `missed` those that
    missed a change, `gated` those of them that are open."""

    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.root = tempfile.mkdtemp(prefix="efs-model-")
        self.held: list[Holders] = [{} for _ in range(KEYS)]
        self.lost: set[int] = set()
        self.missed: set[int] = set()
        self.gated: set[int] = set()
        self.filesystem: FileSystem | None = None

    @initialize(durability=st.sampled_from(["process", "power"]))
    def make(self, durability: str) -> None:
        FileSystem.init(self.path("store"), 12 * 4 * MIB, durability=durability, extent_bytes=MIB // 4)
        os.mkdir(self.path("away"))
        self.open()

    def open(self) -> None:
        """Open the store; nodes that missed changes stay behind their gates until `sync`."""
        self.filesystem = self.runner.run(FileSystem.open(self.path("store"), maintain=False))
        assert set(self.filesystem.problems) == self.lost
        self.gated = self.missed - self.lost
        assert set(self.filesystem.upkeep.syncing) == self.gated

    def path(self, name: str) -> str:
        return os.path.join(self.root, name)

    def teardown(self) -> None:
        if self.filesystem is not None:
            self.runner.run(self.filesystem.close())
        self.runner.close()
        shutil.rmtree(self.root)

    # -- what the model says

    def there(self, key: int) -> Holders:
        """Versions of a key on nodes that count."""
        present = {version: nodes - self.lost - self.gated for version, nodes in self.held[key].items()}
        return {version: nodes for version, nodes in present.items() if nodes}

    def readable(self, key: int) -> list[int]:
        """The versions that a read may answer with: most shards, at least ten."""
        there = self.there(key)
        most = max(map(len, there.values()), default=0)
        return [version for version, nodes in there.items() if len(nodes) == most >= DATA_SHARDS]

    def chosen(self, start: int, count: int, version: int) -> tuple[list[int], Blocks]:
        keys = list(range(start, min(start + count, KEYS)))
        chain = CHAIN[version]
        return keys, Blocks(TINY, chain.keys[start : start + count], chain.data[start : start + count])

    # -- calls

    @rule(start=st.integers(0, KEYS - 1), count=st.integers(1, KEYS), version=st.integers(0, VERSIONS - 1))
    def put(self, start: int, count: int, version: int) -> None:
        keys, blocks = self.chosen(start, count, version)
        assert self.filesystem is not None
        report = self.runner.run(self.filesystem.put(blocks.items, TINY, blocks.data, deadline_ms=DEADLINE_MS))
        assert report == self.expected_put(keys, version)

    def expected_put(self, keys: Sequence[int], version: int) -> PutReport:
        if len(self.lost) == 1:
            self.missed |= self.lost
        up = set(range(12)) - self.lost - self.gated
        if len(up) < ACK_SHARDS:
            return PutReport(0, 0, len(keys), 0)
        acked = already = at_risk = 0
        for key in keys:
            there = self.there(key)
            complete = max(map(len, there.values()), default=0)
            if complete >= ACK_SHARDS:
                already += 1
                at_risk += complete == ACK_SHARDS
                continue
            already += len(there.get(version, ())) == DATA_SHARDS
            acked += len(there.get(version, ())) != DATA_SHARDS
            self.held[key].setdefault(version, set()).update(up)
            at_risk += len(up) == ACK_SHARDS
        return PutReport(acked, already, 0, at_risk)

    @rule(start=st.integers(0, KEYS - 1), count=st.integers(1, KEYS))
    def get(self, start: int, count: int) -> None:
        keys, blocks = self.chosen(start, count, 0)
        out = bytearray(len(keys) * TINY.block_bytes)
        assert self.filesystem is not None
        report = self.runner.run(self.filesystem.get_into(blocks.keys, TINY, out, deadline_ms=DEADLINE_MS))
        readable = [self.readable(key) for key in keys]
        assert list(report.ok) == [bool(versions) for versions in readable]
        assert report.blocks == [*map(bool, readable), False].index(False)
        assert report.corrupt == 0
        for at, (key, versions) in enumerate(zip(keys, readable, strict=True)):
            got = b"".join(out[len(keys) * offset + at * size : len(keys) * offset + (at + 1) * size]
                           for offset, size in zip(TINY.segment_offsets, TINY.segment_bytes, strict=True))
            if versions:
                assert got in [CHAIN[version].block(key) for version in versions]

    @rule(start=st.integers(0, KEYS - 1), count=st.integers(1, KEYS))
    def match(self, start: int, count: int) -> None:
        keys, blocks = self.chosen(start, count, 0)
        assert self.filesystem is not None
        certain = self.runner.run(self.filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS))
        assert certain == [*(bool(self.readable(key)) for key in keys), False].index(False)
        assert self.runner.run(self.filesystem.match(blocks.keys, deadline_ms=DEADLINE_MS)) >= certain

    @rule(start=st.integers(0, KEYS - 1), count=st.integers(1, 3))
    def drop(self, start: int, count: int) -> None:
        keys, blocks = self.chosen(start, count, 0)
        assert self.filesystem is not None
        dropped = self.runner.run(self.filesystem.drop(blocks.keys, deadline_ms=DEADLINE_MS))
        assert dropped == sum(bool(self.there(key)) for key in keys)
        self.missed |= self.lost
        for key in keys:
            left = {version: nodes & (self.lost | self.gated) for version, nodes in self.held[key].items()}
            self.held[key] = {version: nodes for version, nodes in left.items() if nodes}

    @rule(lost=st.sets(st.integers(0, 11), max_size=2))
    def reopen(self, lost: set[int]) -> None:
        assert self.filesystem is not None
        self.runner.run(self.filesystem.close())
        self.filesystem = None
        for index in self.lost - lost:
            os.rename(self.path(f"away/{index:02d}"), self.path(f"store/nodes/{index:02d}"))
        for index in lost - self.lost:
            os.rename(self.path(f"store/nodes/{index:02d}"), self.path(f"away/{index:02d}"))
        self.lost = set(lost)
        self.open()

    @rule()
    def sync(self) -> None:
        """Gated nodes join. What can be read is then whole on all nodes that are there; what cannot may be gone."""
        assert self.filesystem is not None
        self.runner.run(self.filesystem.upkeep.sync())
        if not self.gated:
            return
        assert self.filesystem.upkeep.syncing == ()
        self.missed -= self.gated
        self.gated = set()
        present = set(range(12)) - self.lost
        for key in range(KEYS):
            reports = self.runner.run(self.filesystem.look_up_all(CHAIN_KEYS[key], deadline_ms=DEADLINE_MS))
            found: Holders = {}
            for report in reports:
                assert report.sound
                assert report.in_place
                found.setdefault(DIGESTS[key][report.record.digest], set()).add(report.node_index)
            before, whole = self.there(key), self.readable(key)
            assert set(found) <= set(before)
            for version, nodes in before.items():
                now = found.get(version, set())
                if len(nodes) < DATA_SHARDS:
                    # The sweep takes what no put of this owner can be about to complete.
                    assert now <= nodes
                else:
                    # Of several versions that can be read only the one that wins is repaired, whichever that is.
                    assert now == nodes or (version in whole and now == present)
                self.held[key][version] = now | (self.held[key][version] & self.lost)
            assert not whole or any(found[version] == present for version in whole)


TestStoreModel = StoreModel.TestCase
TestStoreModel.settings = settings(max_examples=12, stateful_step_count=15, deadline=None,
                                   suppress_health_check=[HealthCheck.too_slow])
