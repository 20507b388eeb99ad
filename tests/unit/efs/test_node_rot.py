"""A node whose bytes changed by themselves: bits flipped in tables, payload and index, records in wrong places."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from efs.index import Index, IndexEntry
from efs.nodedir import index_path
from efs.osio import SystemIo
from efs.shard import LOCAL_BYTES
from tests.support.nodebox import NODE_INDEX, NodeBox, change, crash, flip, geometry_of, index_agrees
from tests.support.records import SMALL, Records, make_records


@pytest.fixture
def box(tmp_path: Path) -> NodeBox:
    return NodeBox(tmp_path)


IN_AN_ENTRY = [0, 9, 17, 22, 25, LOCAL_BYTES, LOCAL_BYTES + 6, LOCAL_BYTES + 40, LOCAL_BYTES + 70, 143]


@pytest.mark.parametrize("byte", IN_AN_ENTRY)
@pytest.mark.parametrize("ending", ["closed", "died"])
async def test_a_flipped_bit_in_a_table_entry_never_changes_a_record(box: NodeBox, byte: int, ending: str) -> None:
    records = make_records(40, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    geometry = geometry_of(node, int(table.location[11]))
    await (node.close() if ending == "closed" else crash(node))
    flip(box.slab, geometry.entry_position(int(table.location[11])) + byte)
    node = await box.open()
    # After a process that died, an entry may be torn where it was rewritten: its record, which proves itself, is kept
    # under a new generation.
    kept = ending == "died" and byte < LOCAL_BYTES
    assert (await box.holds(node, records)).tolist() == [row != 11 or kept for row in range(40)]
    headers = await node.headers(table.location, table.generation, 1, box.soon())
    assert not headers[11].any()
    assert (await node.info(box.soon())).records == 39 + kept
    await box.store(node, records)
    assert (await box.holds(node, records)).all()
    assert index_agrees(node)
    await node.close()
    node = await box.open()
    assert (await box.holds(node, records)).all()
    await node.close()


async def test_a_flipped_bit_in_a_payload_is_found_by_verification(box: NodeBox) -> None:
    records = make_records(10, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    flip(box.slab, geometry_of(node, 0).slot_position(int(table.location[4])) + 99)
    results = [await node.verify(key, digest, box.soon())
               for key, digest in zip(records.keys, records.digests, strict=True)]
    assert results == [row != 4 for row in range(10)]
    assert box.counters.get("node_verify_failed") == 1
    assert (await node.info(box.soon())).records == 9
    assert index_agrees(node)
    await node.close()


async def rewrite_index(box: NodeBox, old: IndexEntry, new: IndexEntry) -> None:
    index = Index.open(SystemIo(), index_path(box.path), box.config.plan.index_bytes)
    assert index.delete([old]) == 1
    index.put([new.index_key], np.array([new.location], np.int64), np.array([new.generation], np.uint64))
    index.close()


@pytest.mark.parametrize("what", ["location", "generation", "far location", "digest", "key"])
async def test_a_wrong_index_entry_is_overruled_by_the_table(box: NodeBox, what: str) -> None:
    records = make_records(40, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    await node.close()
    place, generation = int(table.location[9]), int(table.generation[9])
    name = records.keys[9] + records.digests[9]
    wrong = {"location": IndexEntry(name, place + 1, generation),
             "generation": IndexEntry(name, place, generation ^ 4),
             "far location": IndexEntry(name, place | 1 << 62, generation),
             "digest": IndexEntry(name[:-1] + bytes([name[-1] ^ 1]), place, generation),
             "key": IndexEntry(bytes([name[0] ^ 1]) + name[1:], place, generation)}[what]
    await rewrite_index(box, IndexEntry(name, place, generation), wrong)
    node = await box.open()
    asked = Records(SMALL, (*records.keys, wrong.index_key[:32]), (*records.digests, wrong.index_key[32:]),
                    np.concatenate((records.headers, records.headers[9:10])),
                    np.concatenate((records.payload, records.payload[9:10])))
    found = await node.look_up(asked.keys, box.soon())
    assert (found.location >= 0).tolist() == [row != 9 for row in range(40)] + [False]
    assert box.counters.get("node_index_mismatch") == 1
    await box.store(node, records)
    await node.close()
    node = await box.open()
    assert (await box.holds(node, records)).all()
    assert index_agrees(node)
    await node.close()


async def test_a_listing_shows_no_record_that_the_table_does_not_have(box: NodeBox) -> None:
    records = make_records(20, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    await node.close()
    name = records.keys[9] + records.digests[9]
    old = IndexEntry(name, int(table.location[9]), int(table.generation[9]))
    await rewrite_index(box, old, IndexEntry(name, old.location, old.generation + 1))
    node = await box.open()
    page = await node.list(None, 100, box.soon())
    assert sorted(record.key for record in page.records) == sorted(set(records.keys) - {records.keys[9]})
    await node.close()


async def test_an_index_that_lost_entries_in_a_clean_node_is_completed(box: NodeBox) -> None:
    records = make_records(40, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    await node.close()
    index = Index.open(SystemIo(), index_path(box.path), box.config.plan.index_bytes)
    entries = [IndexEntry(key + digest, int(place), int(generation)) for key, digest, place, generation in
               zip(records.keys, records.digests, table.location, table.generation, strict=True)]
    assert index.delete(entries[5:15]) == 10
    index.close()
    node = await box.open()
    assert (await box.holds(node, records)).all()
    assert index_agrees(node)
    await node.close()


async def test_swapped_entries_of_two_records_are_both_rejected(box: NodeBox) -> None:
    """Right checksums in the wrong places (fault 12): payload of one record under the entry of another."""
    records = make_records(10, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    geometry, size = geometry_of(node, 0), SMALL.slot_bytes
    await node.close()
    one, two = (geometry.slot_position(int(place)) for place in table.location[:2])
    content = Path(box.slab).read_bytes()
    change(box.slab, one, content[two : two + size])
    change(box.slab, two, content[one : one + size])
    node = await box.open()
    for row in range(2):
        assert not await node.verify(records.keys[row], records.digests[row], box.soon())
    assert (await box.holds(node, records)).tolist() == [False, False] + [True] * 8
    await node.close()
