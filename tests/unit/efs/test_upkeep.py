"""Upkeep of a store on disk: nodes that come back or are replaced, scrub and its cursor (faults 4, 11, 20, 29)."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from efs.clock import Deadline, SystemClock
from efs.cluster import read_store_config
from efs.errors import IdentityMismatch, InvalidArgument, Locked, OpenFailed, StoreExists
from efs.fs import FileSystem
from efs.limits import MIB
from efs.nodedir import open_slab, read_config
from efs.nodeview import NodeView
from efs.osio import SystemIo
from efs.progress import Cursor, Progress, read_progress, write_progress
from efs.replace import prepare_node
from efs.shard import entry_headers, wrap_entries
from efs.storeview import StoreView
from efs.types import DropItem, GetReport, PutReport
from tests.support.blocks import Blocks, make_blocks
from tests.support.faultio import FaultIo

pytestmark = pytest.mark.usefixtures("patient")

CAPACITY = 12 * 8 * MIB
DEADLINE_MS = 20_000
NODE = 4


@pytest.fixture
def root(tmp_path: Path) -> str:
    FileSystem.init(str(tmp_path / "store"), CAPACITY, extent_bytes=MIB // 2)
    return str(tmp_path / "store")


@asynccontextmanager
async def opened(root: str, *, io: FaultIo | None = None, maintain: bool = False) -> AsyncIterator[FileSystem]:
    filesystem = await FileSystem.open(root, io=io, maintain=maintain)
    try:
        yield filesystem
    finally:
        await filesystem.close()


async def put(filesystem: FileSystem, blocks: Blocks) -> PutReport:
    return await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=DEADLINE_MS)


async def get(filesystem: FileSystem, blocks: Blocks) -> GetReport:
    """Fetch, and check the bytes of every block that is ok. A strict match goes before, so that no node is slower than
    the others because it has to fetch its index and tables first."""
    await filesystem.match(blocks.keys, strict=True, deadline_ms=DEADLINE_MS)
    count, shape = len(blocks.keys), blocks.shape
    out = bytearray(count * shape.block_bytes)
    report = await filesystem.get_into(blocks.keys, shape, out, deadline_ms=DEADLINE_MS)
    for at, ok in enumerate(report.ok):
        got = b"".join(out[count * offset + at * size : count * offset + (at + 1) * size]
                       for offset, size in zip(shape.segment_offsets, shape.segment_bytes, strict=True))
        assert not ok or got == blocks.block(at)
    return report


def node_path(root: str, index: int) -> str:
    return read_store_config(SystemIo(), root).node_paths[index]


def image_of(root: str, index: int) -> dict[bytes, tuple[bytes, bytes]]:
    """Header and payload of every record that a closed node's index lists, by key and digest."""
    found: dict[bytes, tuple[bytes, bytes]] = {}
    with StoreView.open(root) as view:
        (node,) = [one for one in view.views if one.node_index == index]
        for entry in node.index.scan():
            found[entry.index_key] = header_and_payload(node, entry.location)
    return found


def header_and_payload(node: NodeView, location: int) -> tuple[bytes, bytes]:
    geometry = node.geometry(location >> 20)
    assert geometry is not None
    raw = node.slab.read_entries(geometry, location, 1).tobytes()
    entry = node.entry(location)
    assert entry is not None
    payload = node.slab.read_payload(geometry, location, 1)[0][: entry.header.shape.shard_bytes]
    return raw[32:], payload.tobytes()


async def filled(root: str, count: int = 96) -> Blocks:
    blocks = make_blocks(count)
    async with opened(root) as filesystem:
        assert (await put(filesystem, blocks)).acked == count
    return blocks


def flip_payload(root: str, index: int, key: bytes) -> None:
    """Turn one bit of the payload of the only record of a key on a closed node."""
    with StoreView.open(root) as view:
        (node,) = [one for one in view.views if one.node_index == index]
        (entry,) = node.versions([key])
        geometry = node.geometry(entry.location >> 20)
        assert geometry is not None
        place = geometry.slot_position(entry.location)
        path = node.slab.path
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 0x20]))


# -- A node that comes back ------------------------------------------------------------------------------------------


async def test_a_node_that_missed_changes_counts_for_nothing_until_it_has_synced(root: str, tmp_path: Path) -> None:
    """Fault 20."""
    old, fresh = make_blocks(40, seed=1), make_blocks(20, seed=2)
    async with opened(root) as filesystem:
        await put(filesystem, old)
    away = tmp_path / "away"
    os.rename(node_path(root, NODE), away)
    async with opened(root) as filesystem:
        assert await put(filesystem, fresh) == PutReport(20, 0, 0, 20)
    assert read_progress(SystemIo(), root).syncing == {NODE: None}
    os.rename(away, node_path(root, NODE))
    async with opened(root) as filesystem:
        assert list(filesystem.upkeep.syncing) == [NODE]
        assert [info.state for info in await filesystem.nodes()].count("syncing") == 1
        assert (await get(filesystem, old)).missing > 0, "its old records are not read, sound as they are"
        late = make_blocks(4, seed=3)
        assert await put(filesystem, late) == PutReport(4, 0, 0, 4), "it is not counted for an acknowledgement"
        report = await filesystem.upkeep.sync()
        assert report is not None
        assert not filesystem.upkeep.syncing
        assert filesystem.counters.get("repair_rebuilt") == 24
        assert filesystem.counters.get("nodes_synced") == 1
        for blocks in (old, fresh, late):
            got = await get(filesystem, blocks)
            assert (got.rebuilt, got.missing, got.blocks) == (0, 0, len(blocks.keys))
        assert await put(filesystem, make_blocks(4, seed=4)) == PutReport(4, 0, 0, 0)
    assert read_progress(SystemIo(), root).syncing == {}


async def test_what_the_others_gave_up_meanwhile_does_not_come_back(root: str, tmp_path: Path) -> None:
    """Fault 20: fewer than ten hold it, so the returning node drops it too."""
    blocks = make_blocks(20)
    async with opened(root) as filesystem:
        await put(filesystem, blocks)
    away = tmp_path / "away"
    os.rename(node_path(root, NODE), away)
    async with opened(root) as filesystem:
        assert await filesystem.drop(blocks.keys[:8], deadline_ms=DEADLINE_MS) == 8
    os.rename(away, node_path(root, NODE))
    make_old(root, NODE)
    async with opened(root) as filesystem:
        assert len(await records(filesystem, NODE)) == 20
        await filesystem.upkeep.sync()
        assert len(await records(filesystem, NODE)) == 12
        got = await get(filesystem, blocks)
        assert [at for at, ok in enumerate(got.ok) if not ok] == list(range(8))
        assert await filesystem.match(blocks.keys[8:], strict=True, deadline_ms=DEADLINE_MS) == 12


def make_old(root: str, index: int) -> None:
    """A sweep leaves alone what arrived in the last minutes: rewrite the arrivals of a closed node."""
    path, io = node_path(root, index), SystemIo()
    slab = open_slab(io, path, read_config(io, path), writable=True)
    for state in slab.scan():
        if state.geometry is not None:
            entries = slab.read_table(state.extent, state.geometry)
            for slot in np.flatnonzero(entries["generation"]).tolist():
                rows = entries[slot : slot + 1]
                raw = wrap_entries(np.array(entry_headers(rows)), np.array(rows["generation"], np.uint64), 1, 0)
                slab.write_entries(state.geometry, state.extent << 20 | slot, raw)
    slab.close()


async def records(filesystem: FileSystem, index: int) -> list[DropItem]:
    node = filesystem.upkeep.node(index)
    assert node is not None
    page = await node.list(None, 10_000, Deadline.after_ms(SystemClock(), DEADLINE_MS))
    return [DropItem(record.key, record.digest, record.generation) for record in page.records]


async def test_a_node_that_missed_nothing_counts_at_once(root: str, tmp_path: Path) -> None:
    blocks = await filled(root, 20)
    os.rename(node_path(root, NODE), tmp_path / "away")
    async with opened(root) as filesystem:
        assert (await get(filesystem, blocks)).blocks == 20
    os.rename(tmp_path / "away", node_path(root, NODE))
    async with opened(root) as filesystem:
        assert not filesystem.upkeep.syncing
        assert (await get(filesystem, blocks)).missing == 0


async def test_a_node_joins_in_the_background_while_calls_go_on(root: str, tmp_path: Path) -> None:
    old, fresh = make_blocks(40, seed=1), make_blocks(20, seed=2)
    async with opened(root) as filesystem:
        await put(filesystem, old)
    os.rename(node_path(root, NODE), tmp_path / "away")
    async with opened(root) as filesystem:
        await put(filesystem, fresh)
    os.rename(tmp_path / "away", node_path(root, NODE))
    async with opened(root, maintain=True) as filesystem:
        for _ in range(2_000):
            assert (await get(filesystem, old)).blocks == 40
            if not filesystem.upkeep.syncing:
                break
            await asyncio.sleep(0.005)
        assert not filesystem.upkeep.syncing
        assert (await get(filesystem, fresh)).missing == 0


async def test_nothing_is_stored_while_a_node_is_away_and_that_cannot_be_noted(root: str, tmp_path: Path) -> None:
    os.rename(node_path(root, NODE), tmp_path / "away")
    io = FaultIo()
    async with opened(root, io=io) as filesystem:
        fault = io.fail("open", errno.ENOSPC, path="upkeep.new", times=None)
        assert await put(filesystem, make_blocks(4)) == PutReport(0, 0, 4, 0)
        assert fault.count > 0
        fault.disarm()
        assert await put(filesystem, make_blocks(4)) == PutReport(4, 0, 0, 4)


# -- Replacing -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("elsewhere", [False, True])
async def test_an_empty_directory_becomes_the_node_again_byte_for_byte(root: str, tmp_path: Path,
                                                                       elsewhere: bool) -> None:
    """Fault 29."""
    blocks = await filled(root)
    before = image_of(root, NODE)
    assert len(before) == len(blocks.keys)
    shutil.rmtree(node_path(root, NODE))
    path = str(tmp_path / "disk" / "kv") if elsewhere else None
    if path is not None:
        os.mkdir(os.path.dirname(path))
    old_id = read_store_config(SystemIo(), root).node_ids[NODE]
    prepared = prepare_node(SystemIo(), root, NODE, path)
    assert not prepared.resumed
    assert read_store_config(SystemIo(), root).node_ids[NODE] == prepared.node_id != old_id
    assert node_path(root, NODE) == prepared.path
    async with opened(root) as filesystem:
        assert (await get(filesystem, blocks)).blocks == len(blocks.keys), "readable while the node is empty"
        report = await filesystem.upkeep.sync()
        assert report is not None
        assert not filesystem.upkeep.syncing
    assert image_of(root, NODE) == before
    with pytest.raises(InvalidArgument, match="in use"):
        prepare_node(SystemIo(), root, NODE)


async def test_the_old_directory_is_refused_where_the_new_one_belongs(root: str, tmp_path: Path) -> None:
    """Fault 21."""
    await filled(root, 8)
    os.rename(node_path(root, NODE), tmp_path / "old")
    prepare_node(SystemIo(), root, NODE)
    shutil.rmtree(node_path(root, NODE))
    os.rename(tmp_path / "old", node_path(root, NODE))
    with pytest.raises(IdentityMismatch, match="node id"):
        await FileSystem.open(root)


async def test_replacing_refuses_what_it_must_not_touch(root: str, tmp_path: Path) -> None:
    """Fault 57: nothing that is in use or not empty is taken."""
    await filled(root, 4)
    with pytest.raises(InvalidArgument, match="in use"):
        prepare_node(SystemIo(), root, NODE)
    with pytest.raises(InvalidArgument, match="no node has index 12"):
        prepare_node(SystemIo(), root, 12)
    full = tmp_path / "full"
    full.mkdir()
    (full / "slabs").mkdir()
    with pytest.raises(StoreExists):
        prepare_node(SystemIo(), root, NODE, str(full))
    assert os.listdir(full) == ["slabs"]
    with pytest.raises(InvalidArgument, match="node 5 is at"):
        prepare_node(SystemIo(), root, NODE, node_path(root, 5))
    shutil.rmtree(node_path(root, NODE))
    with pytest.raises(OpenFailed, match="above"):
        prepare_node(SystemIo(), root, NODE, str(tmp_path / "no" / "such"))
    async with opened(root):
        with pytest.raises(Locked):
            prepare_node(SystemIo(), root, NODE)
    for index in (0, 1):
        shutil.rmtree(node_path(root, index))
    with pytest.raises(InvalidArgument, match="only 9 other nodes"):
        prepare_node(SystemIo(), root, NODE)


# -- Scrub -----------------------------------------------------------------------------------------------------------


async def test_a_scrub_finds_a_flipped_bit_and_has_it_mended(root: str) -> None:
    """Fault 11, in the payload of a record that nobody reads."""
    blocks = await filled(root, 24)
    before = [image_of(root, index) for index in range(12)]
    flip_payload(root, 2, blocks.keys[5])
    flip_payload(root, 9, blocks.keys[17])
    assert [image_of(root, index) for index in (2, 9)] != [before[2], before[9]]
    async with opened(root) as filesystem:
        report = await filesystem.upkeep.scrub()
        assert (report.records, report.unsound, report.rebuilt, report.finished) == (24 * 12, 2, 2, True)
        assert filesystem.counters.get("scrub_dropped") == 2
        again = await filesystem.upkeep.scrub()
        assert (again.records, again.unsound) == (24 * 12, 0)
    assert [image_of(root, index) for index in range(12)] == before


async def test_a_scrub_goes_on_where_its_store_was_closed(root: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("efs.scrub.SCRUB_PAGE_RECORDS", 7)
    await filled(root, 12)
    seen, places, rounds = 0, [], 0
    while rounds < 200:
        rounds += 1
        async with opened(root) as filesystem:
            start = filesystem.upkeep.progress.scrub
            report = await filesystem.upkeep.scrub(max_seconds=1e-9)
        seen += report.records
        places.append((start.node, start.after or b""))
        if report.finished:
            break
    assert seen == 12 * 12, "each record once"
    assert places == sorted(places)
    assert len(places) == 24
    assert read_progress(SystemIo(), root).scrub == Cursor()


async def test_a_scrub_passes_over_nodes_that_are_away(root: str, tmp_path: Path) -> None:
    await filled(root, 6)
    os.rename(node_path(root, 0), tmp_path / "away")
    async with opened(root) as filesystem:
        report = await filesystem.upkeep.scrub()
    assert (report.records, report.missing, report.finished) == (6 * 11, (0,), True)


async def test_the_background_scrub_mends_without_being_asked(root: str) -> None:
    blocks = await filled(root, 12)
    flip_payload(root, 3, blocks.keys[4])
    filesystem = await FileSystem.open(root, scrub=True)
    try:
        for _ in range(4_000):
            if filesystem.counters.get("scrub_runs"):
                break
            await asyncio.sleep(0.005)
        assert filesystem.counters.get("scrub_runs") == 1
        assert filesystem.counters.get("scrub_dropped") == 1
        assert (await get(filesystem, blocks)).corrupt == 0
    finally:
        await filesystem.close()


# -- The note --------------------------------------------------------------------------------------------------------


def test_what_is_noted_is_read_back(tmp_path: Path) -> None:
    progress = Progress(Cursor(7, b"k" * 48), {3: None, 11: b"x" * 32}, {3: "a" * 32})
    write_progress(SystemIo(), str(tmp_path), progress)
    assert read_progress(SystemIo(), str(tmp_path)) == progress
    assert os.stat(tmp_path / "upkeep").st_mode & 0o777 == 0o600


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"null", b'{"format_version": 2}', b"\xff\xfe",
                                  b'{"format_version":1,"scrub":{"node":12,"after":null},"syncing":{},"making":{}}',
                                  b'{"format_version":1,"scrub":{"node":1,"after":"zz"},"syncing":{},"making":{}}'])
def test_a_damaged_note_counts_as_empty(tmp_path: Path, data: bytes, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "upkeep").write_bytes(data)
    assert read_progress(SystemIo(), str(tmp_path)) == Progress()
    assert "counts as empty" in caplog.text


def test_a_note_that_is_not_there_is_an_empty_one(tmp_path: Path) -> None:
    assert read_progress(SystemIo(), str(tmp_path)) == Progress()
