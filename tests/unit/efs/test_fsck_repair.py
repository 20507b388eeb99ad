"""fsck with repair: each kind of damage, made by a plain file edit, is mended or dropped, and a second run has nothing
to do (faults 11, 18, 57)."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from efs.checksum import xxh3_64
from efs.codec import Codec
from efs.culprit import wrong_shards
from efs.errors import IdentityMismatch, Locked
from efs.extent import location_of
from efs.findings import Finding, Kind
from efs.fs import FileSystem
from efs.fsck import Fsck, Options
from efs.fsckrepair import MendReport, mend_store
from efs.index import IndexEntry
from efs.limits import PAGE_BYTES, STRIPE_SHARDS
from efs.nodedir import NODE_FILE, index_path, slab_path
from efs.osio import SystemIo
from efs.shard import header_dtype, parse_header
from efs.storeview import StoreView
from tests.support.laidstore import SHAPE, LaidStore, UnsyncedIo, flip, lay_store, make_blocks

pytestmark = pytest.mark.usefixtures("patient")

BLOCKS = make_blocks(seed=7, count=60)
ALL = range(STRIPE_SHARDS)
Damage = Callable[[LaidStore], None]


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), BLOCKS)


def find(store: LaidStore) -> tuple[list[Finding], bool]:
    with StoreView.open(store.root, probe=True) as view:
        run = Fsck(view, Options(deep=True))
        return list(run.run()), run.sums.torn > 0


def mend(store: LaidStore) -> MendReport:
    found, torn = find(store)
    assert found or torn, "nothing was damaged"
    return asyncio.run(mend_store(UnsyncedIo(), store.root, found, torn))


def image_of(store: LaidStore) -> dict[tuple[int, bytes], tuple[bytes, bytes]]:
    """Header and payload of every record, by node and key ‖ digest."""
    image: dict[tuple[int, bytes], tuple[bytes, bytes]] = {}
    with StoreView.open(store.root) as view:
        for node in view.views:
            for entry in node.index.scan():
                geometry = node.geometry(entry.location >> 20, again=True)
                assert geometry is not None
                raw = node.slab.read_entries(geometry, entry.location, 1).tobytes()
                slot = node.slab.read_payload(geometry, entry.location, 1)[0]
                image[node.node_index, entry.index_key] = (raw[32:], slot[: SHAPE.shard_bytes].tobytes())
    return image


def laid(without: Collection[int] = ()) -> dict[tuple[int, bytes], tuple[bytes, bytes]]:
    """The image of the whole store, without some blocks."""
    return {(node, block.key + block.digest): (block.headers[node], block.payloads[node])
            for at, block in enumerate(BLOCKS) if at not in without for node in ALL}


# -- Damages ---------------------------------------------------------------------------------------------------------


def lose_index(store: LaidStore) -> None:
    shutil.rmtree(index_path(store.node_path(8)))


def cut_index(store: LaidStore) -> None:
    os.truncate(Path(index_path(store.node_path(8)), "data.mdb"), 3 * PAGE_BYTES)


def lose_slab(store: LaidStore) -> None:
    os.unlink(slab_path(store.node_path(3)))


def zero_slab(store: LaidStore) -> None:
    size = os.path.getsize(slab_path(store.node_path(3)))
    os.truncate(slab_path(store.node_path(3)), 0)
    os.truncate(slab_path(store.node_path(3)), size)


def cut_slab(store: LaidStore) -> None:
    os.truncate(slab_path(store.node_path(3)), PAGE_BYTES + 100)


def flip_extent_header(store: LaidStore) -> None:
    store.edit_slab(5, 24, flip)


def foreign_extent(store: LaidStore) -> None:
    with open(slab_path(store.node_path(0)), "rb") as file:
        page = file.read(PAGE_BYTES)
    store.edit_slab(7, 0, lambda _: page, PAGE_BYTES)


def flip_entry(store: LaidStore) -> None:
    for at in (0, 40, 90):
        store.edit_slab(4, store.entry_offset(10 + at % 7) + at, flip)


def clear_entry(store: LaidStore) -> None:
    store.clear_entry(4, 10)


def forget_in_index(store: LaidStore) -> None:
    store.drop_index(4, 10)


def point_elsewhere(store: LaidStore) -> None:
    free = store.location(len(BLOCKS) - 1) + 1
    store.put_index(4, IndexEntry(store.index_entry(10).index_key, free, store.generation(10)))


def stale_index_entry(store: LaidStore) -> None:
    stranger = make_blocks(seed=99, count=1)[0]
    store.put_index(0, IndexEntry(stranger.key + stranger.digest, location_of(100_000, 5), 5))


def stale_generation(store: LaidStore) -> None:
    entry = store.index_entry(10)
    store.put_index(4, IndexEntry(entry.index_key, entry.location, entry.generation - 1))


def wrong_place(store: LaidStore) -> None:
    store.write_entry(4, store.location(10), BLOCKS[10].headers[5], store.generation(10))


def torn_entry(store: LaidStore) -> None:
    free = store.geometry.entry_position(store.location(len(BLOCKS) - 1) + 1)
    store.edit_slab(4, free, lambda _: b"EFSRtorn", 8)


def flip_payload(store: LaidStore) -> None:
    store.edit_slab(4, store.slot_offset(10), flip)
    store.edit_slab(5, store.slot_offset(10) + 7, flip)


def at_risk(store: LaidStore) -> None:
    store.drop(4, 10)
    store.drop(9, 10)


def inconsistent(store: LaidStore) -> None:
    contradict(store, [4])


def contradict(store: LaidStore, nodes: Collection[int]) -> None:
    """Shards with a payload of their own and headers that vouch for it."""
    for node in nodes:
        payload = bytes([node]) * SHAPE.shard_bytes
        header = np.frombuffer(BLOCKS[10].headers[node], np.uint8).copy()
        fields = header.view(header_dtype(2))
        fields["payload_hash"] = xxh3_64(payload)
        fields["header_hash"] = xxh3_64(header[:-8].tobytes())
        store.write_entry(node, store.location(10), header.tobytes(), store.generation(10))
        store.edit_slab(node, store.slot_offset(10), lambda _, new=payload: new, len(payload))  # type: ignore[misc]


MENDED: Mapping[str, tuple[Damage, Kind | None]] = {
    "index lost": (lose_index, Kind.INDEX_LOST),
    "index cut short": (cut_index, Kind.INDEX_LOST),
    "slab lost": (lose_slab, Kind.SLAB_LOST),
    "slab of zeros": (zero_slab, Kind.INDEX_WITHOUT_DATA),
    "slab cut short": (cut_slab, Kind.EXTENT_DAMAGED),
    "extent header flipped": (flip_extent_header, Kind.EXTENT_DAMAGED),
    "extent of another node": (foreign_extent, Kind.WRONG_IDENTITY),
    "table entries flipped": (flip_entry, Kind.BAD_ENTRY),
    "table entry zeroed": (clear_entry, Kind.INDEX_WITHOUT_DATA),
    "forgotten by the index": (forget_in_index, Kind.DATA_WITHOUT_INDEX),
    "index points elsewhere": (point_elsewhere, Kind.ORPHAN_SLOT),
    "index entry of nothing": (stale_index_entry, Kind.HOLLOW_STRIPE),
    "index generation stale": (stale_generation, Kind.ORPHAN_SLOT),
    "shard in a wrong place": (wrong_place, Kind.WRONG_PLACE),
    "torn entry of a free slot": (torn_entry, None),
    "payload bits flipped": (flip_payload, Kind.BAD_CHECKSUM),
    "two shards gone": (at_risk, Kind.AT_RISK_BLOCK),
    "shards that contradict": (inconsistent, Kind.INCONSISTENT_STRIPE),
}


@pytest.mark.parametrize("name", MENDED)
def test_damage_is_mended_byte_for_byte_and_a_second_run_has_nothing_to_do(store: LaidStore, name: str) -> None:
    damage, kind = MENDED[name]
    damage(store)
    assert kind is None or kind in {finding.kind for finding in find(store)[0]}
    mend(store)
    assert find(store) == ([], False)
    assert image_of(store) == laid()


def test_all_of_it_at_once_on_different_nodes(store: LaidStore) -> None:
    for damage in (lose_index, flip_extent_header, flip_entry):
        damage(store)
    report = mend(store)
    assert (report.indexes, report.extents) == (1, 1)
    assert find(store) == ([], False)
    assert image_of(store) == laid()


# -- What cannot be mended is dropped --------------------------------------------------------------------------------


def test_a_hollow_stripe_is_dropped(store: LaidStore) -> None:
    for node in (1, 4, 9):
        store.drop(node, 10)
    assert mend(store).dropped == 9
    assert find(store) == ([], False)
    assert image_of(store) == laid(without=[10])


def test_a_block_with_three_corrupt_shards_is_dropped(store: LaidStore) -> None:
    for node in (1, 4, 9):
        store.edit_slab(node, store.slot_offset(10), flip)
    assert mend(store).dropped == 12
    assert find(store) == ([], False)
    assert image_of(store) == laid(without=[10])


def test_a_block_of_which_no_ten_shards_agree_is_dropped(store: LaidStore) -> None:
    contradict(store, [1, 4, 9])
    assert mend(store).dropped == 12
    assert find(store) == ([], False)
    assert image_of(store) == laid(without=[10])


def test_nothing_is_dropped_that_absent_nodes_may_complete(store: LaidStore, tmp_path: Path) -> None:
    """Fault 26: three nodes away, one more shard damaged; what is left is left until they are back."""
    for node in (0, 1, 2):
        os.rename(store.node_path(node), tmp_path / f"away{node}")
    flip_entry(store)
    mend(store)
    found, _ = find(store)
    assert {finding.kind for finding in found} >= {Kind.NODE_ABSENT}
    for node in (0, 1, 2):
        os.rename(tmp_path / f"away{node}", store.node_path(node))
    found, torn = find(store)
    if found or torn:
        mend(store)
    assert find(store) == ([], False)
    assert image_of(store) == laid()


# -- What is left ----------------------------------------------------------------------------------------------------


def test_an_absent_node_is_left_and_the_rest_is_mended(store: LaidStore) -> None:
    shutil.rmtree(store.node_path(6))
    store.edit_slab(4, store.slot_offset(10), flip)
    assert mend(store).rebuilt == 1
    assert find(store)[0] == [Finding(Kind.NODE_ABSENT, 6)]


def test_a_swapped_node_keeps_the_store_closed_and_is_not_touched(store: LaidStore) -> None:
    file = Path(store.node_path(1), NODE_FILE)
    before = file.read_text()
    file.write_text(before.replace(store.config.node_ids[1], "0" * 32))
    with pytest.raises(IdentityMismatch):
        mend(store)
    assert file.read_text() == before.replace(store.config.node_ids[1], "0" * 32)


def test_a_store_with_an_owner_is_left_alone(store: LaidStore) -> None:
    flip_payload(store)
    found, torn = find(store)

    async def beside() -> None:
        filesystem = await FileSystem.open(store.root, maintain=False)
        try:
            with pytest.raises(Locked, match=str(os.getpid())):
                await mend_store(SystemIo(), store.root, found, torn)
        finally:
            await filesystem.close()

    asyncio.run(beside())
    assert find(store)[0] == found


# -- The culprit -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [10, 11, 12])
def test_up_to_two_wrong_shards_are_told_apart(count: int) -> None:
    block = BLOCKS[0]
    headers = {header[6]: header for header in block.headers}
    good = {header[6]: np.frombuffer(payload, np.uint8) for header, payload in
            zip(block.headers, block.payloads, strict=True) if header[6] < count}
    header = parse_header(headers[0])
    assert wrong_shards(Codec(), header, good) == set()
    tried = 0
    for wrong in combinations(range(count), min(2, count - 10) or 1):
        bad = {shard: payload ^ np.uint8(1) if shard in wrong else payload for shard, payload in good.items()}
        told = wrong_shards(Codec(), header, bad)
        assert told == (set(wrong) if count > 10 else None)
        tried += 1
    assert tried >= 10
