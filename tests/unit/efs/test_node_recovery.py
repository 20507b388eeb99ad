"""A node that was not closed: died processes, unclean boots, lost or stale indexes, flipped bits."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from efs.clock import stamp_of
from efs.errors import EfsError, Locked, NodeUnavailable
from efs.node import DirectoryNode
from efs.nodedir import index_path, read_boot, write_boot
from efs.osio import SystemIo
from tests.support.clock import FakeClock
from tests.support.faultio import FaultIo
from tests.support.nodebox import NODE_INDEX, NodeBox, change, crash, flip, geometry_of, index_agrees
from tests.support.records import LARGE, make_keys, make_records


@pytest.fixture
def box(tmp_path: Path) -> NodeBox:
    return NodeBox(tmp_path)


def lose_index(box: NodeBox, how: str) -> None:
    place = index_path(box.path)
    if how == "deleted":
        shutil.rmtree(place)
    elif how == "files deleted":
        for name in os.listdir(place):
            os.unlink(os.path.join(place, name))
    elif how == "garbage":
        Path(place, "data.mdb").write_bytes(b"\x17" * 40_000)
    else:
        os.truncate(os.path.join(place, "data.mdb"), 4_096)


LOSSES = ["deleted", "files deleted", "garbage", "cut"]


# -- Died processes, same boot --------------------------------------------------------------------------------------


async def test_a_died_process_loses_nothing_and_rebuilds_nothing(box: NodeBox) -> None:
    records = make_records(300, NODE_INDEX)
    node = await box.open()
    before = await box.store(node, records)
    await crash(node)
    node = await box.open()
    assert (await box.holds(node, records)).all()
    after = await node.look_up(records.keys, box.soon())
    assert (after.generation == before.generation).all()
    assert after.trusted.all()
    assert box.counters.get("node_index_rebuilt") == 0
    assert index_agrees(node)
    new = await box.store(node, make_records(5, NODE_INDEX, seed=2))
    assert int(new.generation.min()) > int(before.generation.max())
    await node.close()


async def test_what_was_stored_last_is_not_taken_for_coldest_when_its_process_died(tmp_path: Path) -> None:
    clock = FakeClock()
    box = NodeBox(tmp_path, clock=clock)
    old, stays, new = (make_records(60, NODE_INDEX, seed=seed) for seed in (1, 2, 3))
    node = await box.open()
    before = await box.store(node, old, stamp=stamp_of(clock.wall()))
    await box.store(node, stays, stamp=stamp_of(clock.wall()))
    await node.close()
    node = await box.open()
    clock.advance(500.0)
    assert await node.drop(old.drop_items(before.generation), box.soon()) == 60
    placed = await box.store(node, new, stamp=stamp_of(clock.wall()))
    assert set(placed.location.tolist()) & set(before.location.tolist()), "no slot was used again"
    await crash(node)
    node = await box.open()
    stamps = {record.key: record.stamp for record in (await node.list(None, 1000, box.soon())).records}
    assert {stamps[key] for key in new.keys} == {stamp_of(clock.wall())}
    assert {stamps[key] for key in stays.keys} == {stamp_of(clock.wall() - 500.0)}
    await node.close()


@pytest.mark.parametrize("how", LOSSES)
@pytest.mark.parametrize("ending", ["closed", "died"])
async def test_a_lost_index_is_rebuilt_from_the_tables(box: NodeBox, how: str, ending: str) -> None:
    small, large = make_records(300, NODE_INDEX, seed=1), make_records(70, NODE_INDEX, seed=2, shape=LARGE)
    versions = make_records(20, NODE_INDEX, seed=3, keys=small.keys[:20])
    node = await box.open()
    for records in (small, large, versions):
        await box.store(node, records)
    dropped = await node.look_up(large.keys[:5], box.soon())
    assert await node.drop(large.rows(0, 5).drop_items(dropped.generation), box.soon()) == 5
    await (node.close() if ending == "closed" else crash(node))
    lose_index(box, how)
    node = await box.open()
    assert box.counters.get("node_index_rebuilt") == 1
    assert (await box.holds(node, large)).tolist() == [False] * 5 + [True] * 65
    table = await node.look_up(small.keys, box.soon())
    assert table.trusted.all()
    assert len(table.extra) == 20
    assert (await node.info(box.soon())).records == 385
    assert index_agrees(node)
    await node.close()
    node = await box.open()
    assert box.counters.get("node_index_rebuilt") == 0
    await node.close()


async def test_a_table_that_is_newer_than_the_index_wins(box: NodeBox) -> None:
    """Killed between the entries of a put and its index commit, with slots that were in use before."""
    old, new = make_records(32, NODE_INDEX, seed=1), make_records(32, NODE_INDEX, seed=2)
    node = await box.open()
    await box.store(node, old)
    kept = await box.store(node, make_records(32, NODE_INDEX, seed=3))
    index = index_path(box.path)
    shutil.copytree(index, index + ".before")
    table = await node.look_up(old.keys, box.soon())
    await node.drop(old.drop_items(table.generation), box.soon())
    again = await box.store(node, new)
    assert (again.location == table.location).all(), "the slots were not reused"
    await crash(node)
    shutil.rmtree(index)
    shutil.move(index + ".before", index)
    node = await box.open()
    assert box.counters.get("node_index_mismatch") == 32
    assert box.counters.get("node_index_rebuilt") == 0
    assert (await box.holds(node, new)).all()
    assert not (await box.holds(node, old)).any()
    assert (await node.look_up(make_records(32, NODE_INDEX, seed=3).keys, box.soon())).generation.tolist() == \
        kept.generation.tolist()
    assert index_agrees(node)
    await node.close()


async def test_an_entry_that_rots_under_a_hot_key_is_not_taken_for_another_one(box: NodeBox) -> None:
    """Its table leaves memory, its entry rots, the table comes back while the key is still hot."""
    records = make_records(40, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    assert node.look_up_now(records.keys) is not None
    node._state.tables.remove(0)
    flip(box.slab, geometry_of(node, 0).entry_position(int(table.location[11])) + 60)
    await node.headers(table.location[:1], table.generation[:1], 1, box.soon())
    assert node.look_up_now(records.keys) is None
    assert (await box.holds(node, records)).tolist() == [row != 11 for row in range(40)]
    other = await box.store(node, make_records(1, NODE_INDEX, seed=2))
    assert int(other.location[0]) == int(table.location[11]), "the slot was not reused"
    assert (await node.look_up(records.keys, box.soon())).location[11] < 0
    assert index_agrees(node)
    await node.close()


def damage_index(box: NodeBox) -> None:
    """Pages of the tree lose their headers; the file still opens."""
    file = os.path.join(index_path(box.path), "data.mdb")
    for page in range(2, os.stat(file).st_size // 4096):
        change(file, page * 4096 + 8, bytes(8))


@pytest.mark.parametrize("ending", ["died", "closed"])
async def test_an_index_that_opens_but_cannot_be_read_is_made_anew_at_the_next_opening(
    box: NodeBox, ending: str
) -> None:
    records = make_records(300, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await (node.close() if ending == "closed" else crash(node))
    damage_index(box)
    node = await box.open()
    if ending == "closed":
        with pytest.raises(NodeUnavailable):
            await node.look_up(records.keys, box.soon())
        with pytest.raises(NodeUnavailable, match="index"):
            await node.put(make_records(1, NODE_INDEX, seed=2).batch(), box.soon())
        await node.close()
        node = await box.open()
    assert box.counters.get("node_index_rebuilt") == 1
    assert (await box.holds(node, records)).all()
    assert (await node.look_up(records.keys, box.soon())).trusted.all()
    assert index_agrees(node)
    await node.close()


async def test_an_index_of_which_an_opening_died_is_made_anew_without_distrust(box: NodeBox) -> None:
    records = make_records(30, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await crash(node)
    boot = read_boot(SystemIo(), box.path)
    assert boot is not None
    write_boot(SystemIo(), box.path, replace(boot, mending=True))
    node = await box.open()
    assert box.counters.get("node_index_rebuilt") == 1
    assert (await box.holds(node, records)).all()
    assert (await node.look_up(records.keys, box.soon())).trusted.all()
    boot = read_boot(SystemIo(), box.path)
    assert boot is not None
    assert (boot.mending, boot.epoch) == (False, 0)
    await node.close()


async def test_an_opening_that_was_given_up_leaves_the_node_to_the_next(box: NodeBox) -> None:
    io = FaultIo()
    gate = io.hang("preadv", path="slab")
    opening = asyncio.ensure_future(box.open(io=io))
    assert await asyncio.to_thread(gate.entered.wait, 20)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    with pytest.raises(Locked):
        await box.open()
    gate.release()
    deadline = asyncio.get_running_loop().time() + 20
    while io.open_files:
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0)
    node = await box.open()
    await node.close()


async def test_a_torn_entry_is_a_free_slot(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    geometry = geometry_of(node, int(table.location[0]))
    await crash(node)
    change(box.slab, geometry.entry_position(int(table.location[7])) + 70, b"\x55" * 30)
    change(box.slab, geometry.entry_position(int(table.location[20])), bytes(8))
    node = await box.open()
    expected = [row not in (7, 20) for row in range(64)]
    assert (await box.holds(node, records)).tolist() == expected
    assert box.counters.get("node_torn_entries") == 2
    assert index_agrees(node)
    await box.store(node, records)
    assert index_agrees(node)
    await node.close()


@pytest.mark.parametrize("boot_id", ["boot-1", "boot-2"])
async def test_an_entry_torn_while_it_was_rewritten_keeps_its_record(box: NodeBox, boot_id: str) -> None:
    """A put of what is held gives it a new arrival. Where that dies half way, the record must not go with it, except
    where the payload does not agree (row 9), or the entry was being removed (row 20)."""
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    geometry = geometry_of(node, int(table.location[0]))
    await crash(node)
    for row in (7, 9):
        change(box.slab, geometry.entry_position(int(table.location[row])) + 8, b"\x55\xaa")
    change(box.slab, geometry.entry_position(int(table.location[20])), bytes(8))
    flip(box.slab, geometry.slot_position(int(table.location[9])))
    box.boot_id = boot_id
    node = await box.open()
    expected = [row not in (9, 20) for row in range(64)]
    assert (await box.holds(node, records)).tolist() == expected
    assert box.counters.get("node_torn_entries") == 3
    assert index_agrees(node)
    found = await node.look_up(records.keys, box.soon())
    assert found.trusted[7]
    assert found.generation[7] > table.generation.max()
    more = await box.store(node, make_records(3, NODE_INDEX, seed=2))
    assert more.generation.min() > found.generation[7], "a generation was given out twice"
    await crash(node)
    node = await box.open()
    assert (await box.holds(node, records)).tolist() == expected
    assert box.counters.get("node_torn_entries") == 0
    await node.close()


async def test_a_damaged_extent_header_costs_its_records_only(box: NodeBox) -> None:
    small, large = make_records(64, NODE_INDEX, seed=1), make_records(10, NODE_INDEX, seed=2, shape=LARGE)
    node = await box.open()
    await box.store(node, small)
    table = await box.store(node, large)
    await node.close()
    flip(box.slab, (int(table.location[0]) >> 20) * box.config.plan.extent_bytes + 33)
    node = await box.open()
    assert (await box.holds(node, small)).all()
    assert not (await box.holds(node, large)).any()
    assert index_agrees(node)
    await box.store(node, large)
    await node.close()


@pytest.mark.parametrize("size", [0, 300_000])
async def test_a_slab_that_was_cut_short_keeps_what_is_left(box: NodeBox, size: int) -> None:
    small, large = make_records(64, NODE_INDEX, seed=1), make_records(10, NODE_INDEX, seed=2, shape=LARGE)
    node = await box.open()
    await box.store(node, small)
    await box.store(node, large)
    await node.close()
    os.truncate(box.slab, size)
    node = await box.open()
    assert (await box.holds(node, small)).all() == (size > 0)
    assert not (await box.holds(node, large)).any()
    assert index_agrees(node)
    await box.store(node, large)
    await node.close()


async def test_a_zero_filled_slab_holds_nothing(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await node.close()
    size = os.stat(box.slab).st_size
    os.truncate(box.slab, 0)
    os.truncate(box.slab, size)
    node = await box.open()
    assert not (await box.holds(node, records)).any()
    assert index_agrees(node)
    await box.store(node, records)
    await node.close()


# -- Unclean boots --------------------------------------------------------------------------------------------------


async def lose_power(box: NodeBox, node: DirectoryNode) -> None:
    """The machine goes down with the node open. What had reached the disk is for the test to say."""
    await crash(node)
    box.boot_id += "+"


def zero_payload(box: NodeBox, node: DirectoryNode, locations: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
    for location in locations.tolist():
        geometry = geometry_of(node, location)
        change(box.slab, geometry.slot_position(location), bytes(geometry.slot_class.slot_bytes))


async def test_after_an_unclean_boot_records_are_untrusted_until_they_were_checked(box: NodeBox) -> None:
    records = make_records(40, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await lose_power(box, node)
    node = await box.open()
    assert box.counters.get("node_index_rebuilt") == 1
    table = await node.look_up(records.keys, box.soon())
    assert (table.location >= 0).all()
    assert not table.trusted.any()
    now = node.look_up_now(records.keys)
    assert now is not None
    assert not now.trusted.any()
    assert (await node.info(box.soon())).unverified == 40
    for row in range(3):
        assert await node.verify(records.keys[row], records.digests[row], box.soon())
    table = await node.look_up(records.keys, box.soon())
    assert table.trusted.tolist() == [True] * 3 + [False] * 37
    assert box.counters.get("node_unverified_checked") == 3
    assert (await node.info(box.soon())).unverified == 37
    fresh = await box.store(node, make_records(5, NODE_INDEX, seed=2))
    assert fresh.trusted.all()
    await node.close()
    node = await box.open()
    table = await node.look_up(records.keys, box.soon())
    assert table.trusted.tolist() == [True] * 3 + [False] * 37
    assert (await node.info(box.soon())).unverified == 37
    assert box.counters.get("node_index_rebuilt") == 0
    await node.close()


async def test_records_whose_payload_is_zeros_after_power_loss_are_never_trusted(box: NodeBox) -> None:
    """Fault 60: the index lists them, the tables list them, their payload never reached the disk."""
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    zero_payload(box, node, table.location[::2])
    await lose_power(box, node)
    node = await box.open()
    assert not (await node.look_up(records.keys, box.soon())).trusted.any()
    outcome = await node.put(records.batch(), box.soon())
    assert outcome.stored.all()
    assert box.counters.get("node_put_known") == 32
    assert box.counters.get("node_put_records") == 32
    assert box.counters.get("node_verify_failed") == 32
    assert box.counters.get("node_unverified_checked") == 32
    assert (await box.holds(node, records)).all()
    assert (await node.look_up(records.keys, box.soon())).trusted.all()
    assert (await node.info(box.soon())).unverified == 0
    assert index_agrees(node)
    await node.close()


async def test_verification_drops_a_record_whose_payload_is_zeros(box: NodeBox) -> None:
    records = make_records(8, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    zero_payload(box, node, table.location[3:4])
    await lose_power(box, node)
    node = await box.open()
    assert not await node.verify(records.keys[3], records.digests[3], box.soon())
    assert (await node.look_up(records.keys, box.soon())).location[3] < 0
    assert (await node.info(box.soon())).records == 7
    assert index_agrees(node)
    await node.close()


async def test_slabs_zeroed_under_a_live_index_serve_nothing(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await lose_power(box, node)
    size = os.stat(box.slab).st_size
    os.truncate(box.slab, 0)
    os.truncate(box.slab, size)
    node = await box.open()
    assert not (await box.holds(node, records)).any()
    assert (await node.info(box.soon())).records == 0
    await node.close()


async def test_a_lost_boot_record_is_an_unclean_boot_and_generations_still_rise(box: NodeBox) -> None:
    records = make_records(10, NODE_INDEX)
    for _ in range(3):
        node = await box.open()
        await node.close()
    node = await box.open()
    before = await box.store(node, records)
    await node.close()
    flip(os.path.join(box.path, "boot"), 20)
    node = await box.open()
    assert not (await node.look_up(records.keys, box.soon())).trusted.any()
    after = await box.store(node, make_records(10, NODE_INDEX, seed=2))
    assert int(after.generation.min()) > int(before.generation.max())
    await node.close()


async def test_a_second_unclean_boot_distrusts_what_the_first_one_had_checked(box: NodeBox) -> None:
    records = make_records(4, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await lose_power(box, node)
    node = await box.open()
    assert await node.verify(records.keys[0], records.digests[0], box.soon())
    await lose_power(box, node)
    node = await box.open()
    assert not (await node.look_up(records.keys, box.soon())).trusted.any()
    boot = read_boot(SystemIo(), box.path)
    assert boot is not None
    assert (boot.epoch, boot.unverified_below) == (2, 2)
    await node.close()


async def test_a_node_whose_records_were_all_checked_forgets_the_unclean_boot(box: NodeBox) -> None:
    records = make_records(4, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await lose_power(box, node)
    node = await box.open()
    for key, digest in zip(records.keys, records.digests, strict=True):
        assert await node.verify(key, digest, box.soon())
    await node.close()
    boot = read_boot(SystemIo(), box.path)
    assert boot is not None
    assert (boot.epoch, boot.unverified_below, boot.clean) == (1, 0, True)


async def test_of_two_entries_of_one_record_the_younger_wins(box: NodeBox) -> None:
    """Power loss undid the zeroing of an old entry while its record was stored again elsewhere."""
    records, other = make_records(32, NODE_INDEX, seed=1), make_records(32, NODE_INDEX, seed=2)
    node = await box.open()
    first = await box.store(node, records)
    geometry = geometry_of(node, int(first.location[0]))
    size = 32 * geometry.slot_class.entry_bytes
    position = geometry.entry_position(int(first.location[0]))
    with open(box.slab, "rb") as file:
        file.seek(position)
        entries = file.read(size)
    await node.drop(records.drop_items(first.generation), box.soon())
    await box.store(node, other)
    second = await box.store(node, records)
    assert (second.location != first.location).all()
    held = await node.look_up(other.keys, box.soon())
    await node.drop(other.drop_items(held.generation), box.soon())
    await lose_power(box, node)
    change(box.slab, position, entries)
    node = await box.open()
    found = await node.look_up(records.keys, box.soon())
    assert (found.generation == second.generation).all()
    assert (await node.info(box.soon())).records == 32
    assert index_agrees(node)
    await node.close()
    with open(box.slab, "rb") as file:
        file.seek(position)
        assert not any(file.read(size))


async def test_an_opening_that_dies_half_way_is_finished_by_the_next(box: NodeBox) -> None:
    records = make_records(500, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    await crash(node)
    box.boot_id = "boot-2"
    steps = 0
    while True:
        place = Path(box.path).parent / f"copy-{steps}"
        shutil.copytree(box.path, place / "node")
        copy = NodeBox.at(place, box.durability, box.boot_id)
        died = await dies_at(copy, steps)
        node = await copy.open()
        assert (await copy.holds(node, records)).all()
        assert not (await node.look_up(records.keys, copy.soon())).trusted.any()
        assert (await node.info(copy.soon())).unverified == 500
        assert index_agrees(node)
        await node.close()
        if not died:
            break
        steps += 1
    assert steps >= 5


async def dies_at(box: NodeBox, step: int) -> bool:
    """Open, and fail for good at the given change. False when the opening made fewer changes."""
    io = FaultIo()
    changes = ("open", "pwrite", "fsync", "rename", "index_commit", "index_sync", "unlink")
    fault = io.fail(changes, errno.EIO, skip=step, times=None)
    try:
        node = await box.open(io=io)
    except (EfsError, OSError):
        return True
    fault.disarm()
    await crash(node)
    return fault.count > 0


def test_keys_of_these_tests_are_different() -> None:
    assert len({*make_keys(300, 1), *make_keys(300, 2), *make_keys(300, 3)}) == 900
