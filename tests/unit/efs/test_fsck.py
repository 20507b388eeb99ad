"""fsck: each kind of damage, made by a plain file edit, is found under its name and nothing else is said."""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from efs.checksum import xxh3_64
from efs.extent import location_of
from efs.findings import OF_BLOCKS, OF_NODES, OF_RECORDS, Finding, Kind
from efs.fsck import Fsck, Options
from efs.index import Index, IndexDamaged, IndexEntry
from efs.indexprobe import unreadable_indexes
from efs.limits import MIB, PAGE_BYTES, STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, NODE_FILE, index_path, slab_path, stamps_path
from efs.nodeview import NodeView
from efs.osio import SystemIo
from efs.shard import header_dtype
from efs.stamps import StampFile, write_stamps
from efs.storeview import StoreView
from efs.warmth import SLACK, STAMP_MS
from tests.support.fsckrun import check, check_deep, of_block, record
from tests.support.laidstore import EXTENT_BYTES, LONG_AGO_MS, SHAPE, LaidBlock, LaidStore, flip, lay_store, make_blocks

BLOCKS = make_blocks(seed=7, count=600)
"""More than one extent and more than half a page of the merge; laid down anew for each test."""


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), BLOCKS)


# -- A clean store --------------------------------------------------------------------------------------------------


def test_a_clean_store_has_no_findings_and_exact_sums(store: LaidStore) -> None:
    found, sums = check(store, Options(deep=True))
    assert found == []
    assert (sums.nodes, sums.versions, sums.readable, sums.at_risk) == (12, 600, 600, 0)
    assert sums.records == sums.index_entries == 600 * STRIPE_SHARDS
    assert sums.live_bytes == 600 * STRIPE_SHARDS * SHAPE.slot_bytes
    assert sums.verified_bytes == 600 * STRIPE_SHARDS * SHAPE.shard_bytes
    assert sums.complete
    assert not sums.beside_owner


def test_a_check_changes_no_file(store: LaidStore) -> None:
    def contents() -> dict[str, tuple[int, bytes]]:
        return {
            str(path): (path.stat().st_mode, path.read_bytes())
            for path in Path(store.root).rglob("*")
            if path.is_file() and path.name != "lock.mdb"
        }

    before = contents()
    check_deep(store)
    assert contents() == before


def test_an_empty_store_is_clean(tmp_path: Path) -> None:
    assert check(lay_store(str(tmp_path / "store"), []))[0] == []


def test_every_kind_belongs_to_one_group() -> None:
    assert set(Kind) == OF_NODES | OF_RECORDS | OF_BLOCKS
    assert len(OF_NODES) + len(OF_RECORDS) + len(OF_BLOCKS) == len(Kind)


# -- Nodes ----------------------------------------------------------------------------------------------------------


def test_a_removed_node_is_one_finding_and_its_blocks_are_counted_at_risk(store: LaidStore) -> None:
    shutil.rmtree(store.node_path(4))
    found, sums = check(store)
    assert found == [Finding(Kind.NODE_ABSENT, 4)]
    assert (sums.readable, sums.at_risk) == (600, 600)


def test_three_removed_nodes_make_every_block_unreadable(store: LaidStore) -> None:
    for node in (0, 5, 11):
        shutil.rmtree(store.node_path(node))
    found, sums = check(store)
    assert found[:3] == [Finding(Kind.NODE_ABSENT, node) for node in (0, 5, 11)]
    assert found[3:] == [
        Finding(Kind.UNREADABLE_BLOCK, None, block.key, block.digest)
        for block in sorted(store.blocks, key=lambda block: block.key)
    ]
    assert (sums.readable, sums.unreadable) == (0, 600)


def test_two_swapped_node_directories_have_the_wrong_identity(store: LaidStore) -> None:
    first, second = store.node_path(2), store.node_path(9)
    os.rename(first, first + ".x")
    os.rename(second, first)
    os.rename(first + ".x", second)
    assert check(store)[0] == [Finding(Kind.WRONG_IDENTITY, 2), Finding(Kind.WRONG_IDENTITY, 9)]


def test_a_node_of_another_store_has_the_wrong_identity(store: LaidStore, tmp_path: Path) -> None:
    other = lay_store(str(tmp_path / "other"), BLOCKS[:1])
    shutil.rmtree(store.node_path(6))
    os.rename(other.node_path(6), store.node_path(6))
    (found,) = check(store)[0]
    assert found == Finding(Kind.WRONG_IDENTITY, 6)
    assert other.config.cluster_id in found.detail or store.config.node_ids[6] in found.detail


def test_a_node_of_another_format_version_has_the_wrong_identity(store: LaidStore) -> None:
    file = Path(store.node_path(1), NODE_FILE)
    file.write_text(file.read_text().replace("format_version = 1", "format_version = 9"))
    assert check(store)[0] == [Finding(Kind.WRONG_IDENTITY, 1)]


def test_a_node_whose_description_is_garbage_is_unreadable(store: LaidStore) -> None:
    Path(store.node_path(1), NODE_FILE).write_bytes(b"\xff\x00 garbage")
    assert check(store)[0] == [Finding(Kind.NODE_UNREADABLE, 1)]


def test_a_lost_index_is_one_finding(store: LaidStore) -> None:
    shutil.rmtree(index_path(store.node_path(8)))
    assert check(store)[0] == [Finding(Kind.INDEX_LOST, 8)]


def test_an_index_that_is_garbage_is_one_finding(store: LaidStore) -> None:
    Path(index_path(store.node_path(8)), "data.mdb").write_bytes(b"not an index" * 1000)
    assert check(store)[0] == [Finding(Kind.INDEX_LOST, 8)]


def test_an_index_that_was_cut_short_is_one_finding(store: LaidStore) -> None:
    os.truncate(Path(index_path(store.node_path(8)), "data.mdb"), 3 * PAGE_BYTES)
    assert check(store)[0] == [Finding(Kind.INDEX_LOST, 8)]


def test_an_index_of_zeros_is_one_finding(store: LaidStore) -> None:
    file = Path(index_path(store.node_path(8)), "data.mdb")
    file.write_bytes(bytes(file.stat().st_size))
    assert check(store)[0] == [Finding(Kind.INDEX_LOST, 8)]


def test_bytes_behind_the_end_of_an_index_or_a_slab_are_nobodys_data(store: LaidStore) -> None:
    for path in (os.path.join(index_path(store.node_path(8)), "data.mdb"), slab_path(store.node_path(8))):
        with open(path, "ab") as file:
            file.write(b"\x5a" * PAGE_BYTES)
    assert check_deep(store) == []


def test_an_index_that_would_end_its_reader_is_one_finding(store: LaidStore) -> None:
    """The place of a node in one of the index's pages is moved behind the end of the file: LMDB follows it, and the
    process gets SIGBUS. A child process meets that first."""
    path = index_path(store.node_path(8))
    file = Path(path, "data.mdb")
    good = file.read_bytes()
    for page in reversed(range(2, len(good) // PAGE_BYTES)):
        at = page * PAGE_BYTES + 17
        file.write_bytes(good[:at] + bytes([good[at] | 0x40]) + good[at + 1 :])
        why = unreadable_indexes([index_path(store.node_path(0)), path, index_path(store.node_path(1))])
        if "SIGBUS" in why.get(1, ""):
            break
    else:
        pytest.fail("no page could be damaged so that reading it is deadly")
    assert list(why) == [1]
    with StoreView.open(store.root, probe=True) as view:
        assert list(Fsck(view).run()) == [Finding(Kind.INDEX_LOST, 8)]


def test_flipped_bits_of_an_index_are_found_and_blamed_on_its_node(store: LaidStore) -> None:
    """Where it matters which bit it is, LMDB or a table notices; where nothing stands, nothing is said."""
    source = random.Random(5)
    path = index_path(store.node_path(4))
    file = Path(path, "data.mdb")
    good = file.read_bytes()
    outcomes: Counter[bool] = Counter()
    for _ in range(15):
        at = source.randrange(len(good))
        file.write_bytes(good[:at] + bytes([good[at] ^ 1 << source.randrange(8)]) + good[at + 1 :])
        if unreadable_indexes([path]):
            outcomes[True] += 1
            continue
        found = check_deep(store)
        outcomes[bool(found)] += 1
        assert all(finding.node in (4, None) for finding in found), at
        assert all(finding.kind is not Kind.UNREADABLE_BLOCK for finding in found), at
    assert outcomes[True] > 3
    file.write_bytes(good)
    assert check_deep(store) == []


def test_an_index_that_breaks_while_it_is_read_costs_its_node_only(
    store: LaidStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Counter[int]()

    def page(view: NodeView, after: bytes | None, limit: int) -> list[IndexEntry]:
        calls[view.node_index] += 1
        if view.node_index == 3:
            raise IndexDamaged("a page is of the wrong type")
        return view.index.page(after, limit)

    monkeypatch.setattr(NodeView, "page", page)
    found, sums = check(store)
    assert found == [Finding(Kind.INDEX_LOST, 3)]
    assert (sums.nodes, sums.readable, sums.at_risk) == (11, 600, 600)
    assert calls[3] == 1


def test_an_index_that_breaks_under_the_tables_costs_its_node_only(
    store: LaidStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    get = Index.get

    def broken(index: Index, keys: Sequence[bytes]) -> list[tuple[int, int] | None]:
        if "/03/" in str(index._path):
            raise IndexDamaged("a page is of the wrong type")
        return get(index, keys)

    monkeypatch.setattr(Index, "get", broken)
    found, sums = check(store)
    assert found == [Finding(Kind.INDEX_LOST, 3)]
    assert (sums.nodes, sums.readable) == (11, 600)


def test_a_lost_slab_is_one_finding(store: LaidStore) -> None:
    os.unlink(slab_path(store.node_path(3)))
    assert check(store)[0] == [Finding(Kind.SLAB_LOST, 3)]


def test_a_slab_of_zeros_lists_every_index_entry_without_data(store: LaidStore) -> None:
    size = os.path.getsize(slab_path(store.node_path(3)))
    os.truncate(slab_path(store.node_path(3)), 0)
    os.truncate(slab_path(store.node_path(3)), size)
    found, sums = check(store)
    expected = {record(Kind.INDEX_WITHOUT_DATA, store, 3, block) for block in range(600)}
    assert set(found) == expected
    assert len(found) == len(expected)
    assert sums.at_risk == 600


def test_a_slab_that_was_cut_short_names_each_extent_that_lost_bytes(store: LaidStore) -> None:
    last = (len(BLOCKS) - 1) // store.geometry.slots
    assert last > 0
    os.truncate(slab_path(store.node_path(3)), last * EXTENT_BYTES + PAGE_BYTES)
    found, sums = check(store)
    named = {finding.location for finding in found}
    assert {finding.kind for finding in found} == {Kind.EXTENT_DAMAGED}
    assert location_of(last, 0) in named
    assert location_of(0, 0) not in named
    assert 0 < sums.at_risk < 600


def test_a_flipped_bit_in_an_extent_header_is_one_finding(store: LaidStore) -> None:
    store.edit_slab(5, 24, flip)
    found, sums = check(store)
    assert found == [Finding(Kind.EXTENT_DAMAGED, 5, None, None, location_of(0, 0))]
    assert sums.at_risk == store.geometry.slots


def test_an_extent_of_another_node_has_the_wrong_identity(store: LaidStore) -> None:
    with open(slab_path(store.node_path(0)), "rb") as file:
        page = file.read(PAGE_BYTES)
    store.edit_slab(7, 0, lambda _: page, PAGE_BYTES)
    assert check(store)[0] == [Finding(Kind.WRONG_IDENTITY, 7, None, None, location_of(0, 0))]


def test_space_beyond_the_limit_is_found(store: LaidStore) -> None:
    Path(store.node_path(2), "ballast").write_bytes(bytes(7 * MIB))
    assert check(store)[0] == [Finding(Kind.OVER_LIMIT, 2)]


def test_a_slab_with_a_hole_where_an_extent_should_be_has_drifted(store: LaidStore) -> None:
    """The slab is copied sparsely: all bytes are right, but space that counts as used was given back."""
    path = Path(slab_path(store.node_path(2)))
    data = path.read_bytes()
    path.unlink()
    with path.open("wb") as file:
        file.truncate(len(data))
        for at in range(0, len(data), PAGE_BYTES):
            if any(data[at : at + PAGE_BYTES]):
                file.seek(at)
                file.write(data[at : at + PAGE_BYTES])
    assert check(store)[0] == [Finding(Kind.ACCOUNTING_DRIFT, 2)]


# -- Records --------------------------------------------------------------------------------------------------------


def test_a_flipped_bit_in_a_table_entry_is_a_bad_entry(store: LaidStore) -> None:
    for at in (0, 40, 90, store.geometry.slot_class.entry_bytes - 1):
        block = at % 7 + 10
        store.edit_slab(4, store.entry_offset(block) + at, flip)
    found, sums = check(store)
    assert found == sorted_by_key(
        [
            record(Kind.BAD_ENTRY, store, 4, block)
            for block in {at % 7 + 10 for at in (0, 40, 90, store.geometry.slot_class.entry_bytes - 1)}
        ]
    )
    assert sums.torn == len(found)


def test_a_zeroed_table_entry_leaves_an_index_entry_without_data(store: LaidStore) -> None:
    store.clear_entry(4, 10)
    assert check(store)[0] == [record(Kind.INDEX_WITHOUT_DATA, store, 4, 10)]


def test_a_record_that_the_index_forgot_is_data_without_index(store: LaidStore) -> None:
    store.drop_index(4, 10)
    assert check(store)[0] == [record(Kind.DATA_WITHOUT_INDEX, store, 4, 10)]


def test_an_index_entry_that_points_elsewhere_leaves_an_orphan_slot(store: LaidStore) -> None:
    free = store.location(599) + 1
    store.put_index(4, IndexEntry(store.index_entry(10).index_key, free, store.generation(10)))
    assert check(store)[0] == [
        record(Kind.ORPHAN_SLOT, store, 4, 10),
        record(Kind.INDEX_WITHOUT_DATA, store, 4, 10, location=free),
    ]


def test_an_index_entry_beyond_the_slab_has_no_data(store: LaidStore) -> None:
    beyond = location_of(100_000, 5)
    laid = make_blocks(seed=99, count=1)[0]
    store.put_index(0, IndexEntry(laid.key + laid.digest, beyond, 5))
    assert check(store)[0] == [
        Finding(Kind.INDEX_WITHOUT_DATA, 0, laid.key, laid.digest, beyond),
        Finding(Kind.HOLLOW_STRIPE, None, laid.key, laid.digest),
    ]


def test_an_index_entry_with_a_stale_generation_has_no_data(store: LaidStore) -> None:
    entry = store.index_entry(10)
    store.put_index(4, IndexEntry(entry.index_key, entry.location, entry.generation - 1))
    assert check(store)[0] == [record(Kind.ORPHAN_SLOT, store, 4, 10), record(Kind.INDEX_WITHOUT_DATA, store, 4, 10)]


def test_two_records_that_changed_slots_are_found_both_ways(store: LaidStore) -> None:
    for block, other in ((10, 11), (11, 10)):
        store.write_entry(4, store.location(block), BLOCKS[other].headers[4], store.generation(other))
    found, _ = check(store)
    expected = [
        record(Kind.ORPHAN_SLOT, store, 4, 11, location=store.location(10)),
        record(Kind.ORPHAN_SLOT, store, 4, 10, location=store.location(11)),
    ]
    expected += sorted_by_key([record(Kind.INDEX_WITHOUT_DATA, store, 4, block) for block in (10, 11)])
    assert found == expected


def test_a_shard_of_another_node_is_in_the_wrong_place(store: LaidStore) -> None:
    store.write_entry(4, store.location(10), BLOCKS[10].headers[5], store.generation(10))
    assert check(store)[0] == [record(Kind.WRONG_PLACE, store, 4, 10)]


def test_a_torn_entry_of_a_free_slot_is_counted_and_no_finding(store: LaidStore) -> None:
    free = store.geometry.entry_position(store.location(599) + 1)
    store.edit_slab(4, free, lambda _: b"EFSRtorn", 8)
    found, sums = check(store)
    assert found == []
    assert sums.torn == 1


@pytest.mark.parametrize("at", [0, 250, SHAPE.shard_bytes - 1])
def test_a_flipped_payload_bit_is_found_only_by_a_deep_check(store: LaidStore, at: int) -> None:
    store.edit_slab(4, store.slot_offset(10) + at, flip)
    assert check(store)[0] == []
    assert check_deep(store) == [record(Kind.BAD_CHECKSUM, store, 4, 10)]


def test_a_flipped_bit_in_the_padding_of_a_slot_is_nobodys_data(store: LaidStore) -> None:
    assert SHAPE.slot_bytes > SHAPE.shard_bytes
    store.edit_slab(4, store.slot_offset(10) + SHAPE.shard_bytes, flip)
    assert check_deep(store) == []


def test_swapped_payloads_of_two_slots_are_two_findings(store: LaidStore) -> None:
    for block, other in ((10, 11), (11, 10)):
        payload = BLOCKS[other].payloads[4]
        store.edit_slab(4, store.slot_offset(block), partial(replaced, payload), len(payload))
    assert check_deep(store) == sorted_by_key([record(Kind.BAD_CHECKSUM, store, 4, block) for block in (10, 11)])


# -- Blocks ---------------------------------------------------------------------------------------------------------


def test_a_record_that_is_gone_in_order_leaves_its_block_at_risk(store: LaidStore) -> None:
    store.drop(4, 10)
    found, sums = check(store)
    assert found == [of_block(Kind.AT_RISK_BLOCK, store, 10)]
    assert sums.at_risk == 1


def test_a_version_on_nine_nodes_is_a_hollow_stripe(store: LaidStore) -> None:
    for node in (1, 4, 9):
        store.drop(node, 10)
    found, sums = check(store)
    assert found == [of_block(Kind.HOLLOW_STRIPE, store, 10)]
    assert (sums.readable, sums.hollow) == (599, 1)


def test_three_corrupt_shards_make_a_block_unreadable(store: LaidStore) -> None:
    for node in (1, 4, 9):
        store.edit_slab(node, store.slot_offset(10), flip)
    assert check_deep(store) == [
        *(record(Kind.BAD_CHECKSUM, store, node, 10) for node in (1, 4, 9)),
        of_block(Kind.UNREADABLE_BLOCK, store, 10),
    ]


def test_two_nodes_away_and_one_corrupt_shard_make_a_block_unreadable(store: LaidStore) -> None:
    shutil.rmtree(store.node_path(0))
    shutil.rmtree(store.node_path(1))
    store.edit_slab(9, store.slot_offset(10), flip)
    found, _ = check(store, Options(deep=True))
    assert found == [
        Finding(Kind.NODE_ABSENT, 0),
        Finding(Kind.NODE_ABSENT, 1),
        record(Kind.BAD_CHECKSUM, store, 9, 10),
        of_block(Kind.UNREADABLE_BLOCK, store, 10),
    ]


def test_a_second_version_beside_a_whole_one_is_hollow_when_few_nodes_hold_it(store: LaidStore) -> None:
    """Different bytes under one key are legal; here five nodes hold some, in slots of their own."""
    other = make_blocks(seed=8, count=1)[0]
    key = BLOCKS[10].key
    free = store.location(599) + 1
    for node in range(5):
        store.write_entry(node, free, rekeyed(header_of_shard(other, BLOCKS[10].headers[node][6]), key), 1 << 41)
        store.put_index(node, IndexEntry(key + other.digest, free, 1 << 41))
    found, sums = check(store)
    assert found == [Finding(Kind.HOLLOW_STRIPE, None, key, other.digest)]
    assert (sums.versions, sums.readable, sums.hollow) == (601, 600, 1)


def test_shards_that_do_not_belong_together_are_inconsistent(store: LaidStore) -> None:
    """A shard with a payload of its own and a header that vouches for it: sound alone, not part of the code word."""
    payload = bytes(SHAPE.shard_bytes)
    header = np.frombuffer(BLOCKS[10].headers[4], np.uint8).copy()
    fields = header.view(header_dtype(2))
    fields["payload_hash"] = xxh3_64(payload)
    fields["header_hash"] = xxh3_64(header[:-8].tobytes())
    store.write_entry(4, store.location(10), header.tobytes(), store.generation(10))
    store.edit_slab(4, store.slot_offset(10), lambda _: payload, len(payload))
    assert check(store)[0] == []
    assert check_deep(store) == [of_block(Kind.INCONSISTENT_STRIPE, store, 10)]


def replaced(new: bytes, before: bytes) -> bytes:
    return new


def rekeyed(header: bytes, key: bytes) -> bytes:
    """The header under another key; its own checksum follows."""
    changed = np.frombuffer(header, np.uint8).copy()
    fields = changed.view(header_dtype(2))
    fields["key"] = np.frombuffer(key, "<u8")
    fields["header_hash"] = xxh3_64(changed[:-8].tobytes())
    return changed.tobytes()


def header_of_shard(block: LaidBlock, shard: int) -> bytes:
    return next(header for header in block.headers if header[6] == shard)


def sorted_by_key(found: list[Finding]) -> list[Finding]:
    return sorted(found, key=lambda finding: finding.key or b"")


# -- Eviction -------------------------------------------------------------------------------------------------------


def evict(store: LaidStore, node: int, block: int) -> None:
    """What a node's eviction leaves behind: the record is gone, and the node counted it and its stamp."""
    store.drop(node, block)
    counters = CounterFile.open(os.path.join(store.node_path(node), COUNTERS_FILE), writable=True)
    counters.add("node_evicted")
    counters.raise_to("node_evicted_stamp", LONG_AGO_MS // STAMP_MS)
    counters.close()


def test_a_record_that_was_evicted_is_counted_and_no_finding(store: LaidStore) -> None:
    evict(store, 4, 10)
    found, sums = check(store)
    assert found == []
    assert (sums.fading, sums.at_risk) == (1, 1)


def test_a_record_warmer_than_what_a_node_has_evicted_was_not_evicted(store: LaidStore) -> None:
    evict(store, 4, 10)
    evicted_at = LONG_AGO_MS // STAMP_MS
    for node in range(STRIPE_SHARDS):
        write_stamps_of(store, node, {10: evicted_at + SLACK})
    assert check(store)[0] == []
    for node in range(STRIPE_SHARDS):
        write_stamps_of(store, node, {10: evicted_at + SLACK + 1})
    assert check(store)[0] == [of_block(Kind.AT_RISK_BLOCK, store, 10)]


def write_stamps_of(store: LaidStore, node: int, stamps: dict[int, int]) -> None:
    row = np.zeros(store.geometry.slots, np.uint32)
    for block, stamp in stamps.items():
        row[block] = stamp
    assert write_stamps(SystemIo(), stamps_path(store.node_path(node)), [StampFile(0, store.geometry, row)]) == []
