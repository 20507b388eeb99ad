"""A directory node whose disk misbehaves: order of writes, full, failing, short, hanging."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from efs.clock import Deadline
from efs.contract import ABSENT, Landing
from efs.errors import NodeFull, NodeReadOnly, NodeUnavailable
from efs.extent import SLOT_BITS
from efs.limits import HUNG_MS, NODE_QUEUE_OPERATIONS
from efs.node import DirectoryNode, Durability
from efs.nodedir import read_boot
from efs.osio import SystemIo
from tests.support.faultio import FaultIo, Gate
from tests.support.nodebox import NODE_INDEX, NodeBox, crash, index_agrees
from tests.support.records import LARGE, SMALL, Records, make_records
from tests.support.waiting import came_true

CHANGES = ("allocate", "pwrite", "pwritev", "fdatasync", "fsync", "index_commit", "index_sync")


@pytest.fixture
def box(tmp_path: Path) -> NodeBox:
    return NodeBox(tmp_path)


async def entered(gate: Gate) -> None:
    """Wait until a thread hangs in the gate."""
    assert await asyncio.to_thread(gate.entered.wait, 20), "nothing hung"


def hang_for_long(box: NodeBox) -> None:
    box.clock.advance(HUNG_MS / 1000 + 0.001)  # type: ignore[attr-defined]


# -- The order of writes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("durability", "expected"),
    [
        ("process", ["clear", "payload", "entries", "index_commit"]),
        ("power", ["clear", "payload", "entries", "fdatasync", "index_commit", "index_sync"]),
    ],
)
async def test_data_is_written_before_the_index_names_it(
    tmp_path: Path, durability: Durability, expected: list[str]
) -> None:
    box = NodeBox(tmp_path, durability=durability)
    node = await box.open()
    await box.store(node, make_records(32, NODE_INDEX, seed=1))
    since = box.io.operations
    table = await box.store(node, make_records(32, NODE_INDEX, seed=2))
    geometry = node._state.allocator.geometry(int(table.location[0]) >> 20)
    assert geometry is not None
    first = int(table.location[0])
    places = {(geometry.entry_position(first), 32 * geometry.slot_class.entry_bytes): "clear",
              (geometry.slot_position(first), 32 * SMALL.slot_bytes): "payload"}
    steps = []
    for step in [entry for entry in box.io.log if entry.number > since and entry.name != "preadv"]:
        name = places.get((step.offset, step.size), step.name) if step.name == "pwrite" else step.name
        steps.append("entries" if name == "clear" and "clear" in steps else name)
    assert steps == expected
    await node.close()


@pytest.mark.parametrize("durability", ["process", "power"])
async def test_a_new_extent_is_allocated_and_formatted_before_it_is_used(
    tmp_path: Path, durability: Durability
) -> None:
    box = NodeBox(tmp_path, durability=durability)
    node = await box.open()
    since = box.io.operations
    await box.store(node, make_records(32, NODE_INDEX))
    names = [name for name in box.io.names(since=since) if name != "preadv"]
    synced = ["fdatasync"] if durability == "power" else []
    end = ["index_sync"] if durability == "power" else []
    header_and_table = ["pwrite", "pwrite", *synced, "pwrite", *synced]
    assert names == ["allocate", *header_and_table, "pwrite", "pwrite", *synced, "index_commit", *end]
    await node.close()


async def test_a_dropped_record_is_zeroed_before_it_leaves_the_index(box: NodeBox) -> None:
    records = make_records(10, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    since = box.io.operations
    assert await node.drop(records.drop_items(table.generation), box.soon()) == 10
    assert box.io.names(since=since) == ["pwrite", "index_commit"]
    await node.close()


async def test_neighbours_are_written_in_one_piece(box: NodeBox) -> None:
    node = await box.open()
    await box.store(node, make_records(64, NODE_INDEX, seed=1))
    since = box.io.operations
    await box.store(node, make_records(640, NODE_INDEX, seed=2))
    payload = [entry.size for entry in box.io.log if entry.number > since and entry.size == 640 * SMALL.slot_bytes]
    assert payload == [640 * SMALL.slot_bytes]
    assert box.io.names(since=since).count("index_commit") == 1
    await node.close()


# -- No space -------------------------------------------------------------------------------------------------------


async def changes_of_a_put(path: Path, durability: Durability) -> int:
    """How many operations of CHANGES the put of `probing` records makes."""
    box = NodeBox(path, durability=durability)
    node = await box.open()
    await box.store(node, make_records(40, NODE_INDEX, seed=1))
    since = box.io.operations
    await box.store(node, make_records(80, NODE_INDEX, seed=2, shape=LARGE))
    count = sum(name in CHANGES for name in box.io.names(since=since))
    await node.close()
    return count


@pytest.mark.parametrize("done_bytes", [0, 1, 90, 5_000])
async def test_no_space_at_any_call_fails_one_put_cleanly_and_writes_resume(tmp_path: Path, done_bytes: int) -> None:
    (tmp_path / "probe").mkdir()
    steps = await changes_of_a_put(tmp_path / "probe", "process")
    assert steps >= 12
    for step in range(steps):
        place = tmp_path / f"step-{step}"
        place.mkdir()
        box = NodeBox(place)
        node = await box.open()
        old, failing = make_records(40, NODE_INDEX, seed=1), make_records(80, NODE_INDEX, seed=2, shape=LARGE)
        await box.store(node, old)
        box.io.fail_after(CHANGES, done_bytes, errno.ENOSPC, skip=step)
        with pytest.raises(NodeFull, match="No space left"):
            await node.put(failing.batch(), box.soon())
        box.io.clear()
        assert box.counters.get("node_full") == 1
        assert (await box.holds(node, old)).all()
        assert not (await box.holds(node, failing)).any()
        await box.store(node, make_records(20, NODE_INDEX, seed=3))
        box.clock.advance(1)  # type: ignore[attr-defined]
        await box.store(node, failing)
        assert (await box.holds(node, failing)).all()
        assert index_agrees(node), f"step {step}"
        await node.close()
        node = await box.open()
        for records in (old, failing, make_records(20, NODE_INDEX, seed=3)):
            assert (await box.holds(node, records)).all(), f"step {step}"
        assert index_agrees(node), f"step {step}"
        assert box.du() <= box.config.plan.capacity_bytes
        await node.close()


async def test_a_disk_without_room_for_another_extent_still_takes_new_records(box: NodeBox) -> None:
    node = await box.open()
    first = make_records(700, NODE_INDEX, seed=1)
    await box.store(node, first, stamp=1)
    fault = box.io.fail("allocate", errno.ENOSPC, times=None)
    with pytest.raises(NodeFull):
        await node.put(make_records(600, NODE_INDEX, seed=2).batch(5), box.soon())
    newer = make_records(600, NODE_INDEX, seed=3)
    await box.store(node, newer, stamp=5)
    assert fault.count == 1
    assert box.counters.get("node_evicted") >= 300
    assert (await box.holds(node, newer)).all()
    fault.disarm()
    box.clock.advance(60)  # type: ignore[attr-defined]
    before = box.counters.get("node_evicted")
    await box.store(node, make_records(600, NODE_INDEX, seed=4), stamp=6)
    assert box.counters.get("node_evicted") == before
    assert index_agrees(node)
    await node.close()


# -- Failing --------------------------------------------------------------------------------------------------------


async def test_a_failing_read_is_an_unavailable_node_and_passes(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    buffer = bytearray(64 * SMALL.shard_bytes)
    box.io.fail("preadv", errno.EIO, path="slab", times=2)
    span, landing = box.spans(table.location, SMALL, buffer)[0]
    assert not node.read_now(span, landing)
    with pytest.raises(NodeUnavailable, match="Input/output error"):
        await node.read([(span, landing)], lambda _: pytest.fail("landed"), box.soon())
    box.io.clear()
    assert not any(buffer)
    assert box.counters.get("node_io_errors") == 1
    assert (await box.holds(node, records)).all()
    await node.close()


async def test_a_table_that_cannot_be_read_is_an_unavailable_node(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    node._state.tables.remove(0)
    box.io.fail("preadv", errno.EIO, path="slab")
    with pytest.raises(NodeUnavailable, match="Input/output error"):
        await node.look_up(records.keys, box.soon())
    box.io.clear()
    assert (await box.holds(node, records)).all()
    await node.close()


async def test_a_record_is_not_dropped_because_its_disk_refuses_to_be_read(box: NodeBox) -> None:
    records = make_records(1, NODE_INDEX)
    node = await box.open()
    await box.store(node, records)
    box.io.fail("preadv", errno.EIO, path="slab")
    with pytest.raises(NodeUnavailable):
        await node.verify(records.keys[0], records.digests[0], box.soon())
    box.io.clear()
    assert (await box.holds(node, records)).all()
    await node.close()


@pytest.mark.parametrize("code", [errno.EIO, errno.EROFS, errno.EACCES])
async def test_a_failing_write_fails_the_put_and_nothing_else(box: NodeBox, code: int) -> None:
    old, new = make_records(10, NODE_INDEX, seed=1), make_records(10, NODE_INDEX, seed=2)
    node = await box.open()
    await box.store(node, old)
    box.io.fail("pwrite", code, path="slab", skip=1)
    with pytest.raises(NodeUnavailable, match=os.strerror(code)):
        await node.put(new.batch(), box.soon())
    box.io.clear()
    assert (await box.holds(node, old)).all()
    assert not (await box.holds(node, new)).any()
    await box.store(node, new)
    assert index_agrees(node)
    await node.close()


async def test_an_idle_node_tells_its_disk_what_a_failed_put_left_behind(
    box: NodeBox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("efs.debts.PAY_EVERY_MS", 5.0)
    node = await box.open()
    await box.store(node, make_records(10, NODE_INDEX, seed=1))
    box.io.fail("index_commit", errno.EIO, times=None)
    with pytest.raises(NodeUnavailable):
        await node.put(make_records(10, NODE_INDEX, seed=2).batch(), box.soon())
    assert await came_true(lambda: node._state.owes), "also between two attempts to pay"
    failed = box.io.names().count("index_commit")
    assert await came_true(lambda: box.io.names().count("index_commit") > failed), "it tries again while the disk fails"
    box.io.clear()
    assert await came_true(lambda: not node._state.owes and index_agrees(node))
    await node.close()


@pytest.mark.parametrize("name", ["fdatasync", "index_sync"])
async def test_a_failed_sync_makes_the_node_read_only_until_it_is_opened_again(tmp_path: Path, name: str) -> None:
    box = NodeBox(tmp_path, durability="power")
    old, new = make_records(10, NODE_INDEX, seed=1), make_records(10, NODE_INDEX, seed=2)
    node = await box.open()
    await box.store(node, old)
    box.io.fail(name, errno.EIO)
    with pytest.raises(NodeReadOnly):
        await node.put(new.batch(), box.soon())
    box.io.clear()
    since = box.io.operations
    for call in (node.put(new.batch(), box.soon()), node.drop([], box.soon()),
                 node.verify(old.keys[0], old.digests[0], box.soon())):
        with pytest.raises(NodeReadOnly):
            await call
    assert (await box.holds(node, old)).all()
    assert not (await box.holds(node, new)).any()
    assert box.counters.get("node_read_only") == 1
    assert (await node.info(box.soon())).state == "read-only"
    await node.close()
    assert set(box.io.names("slab", since)) <= {"preadv", "close", "pwrite"}
    boot = read_boot(SystemIo(), box.path)
    assert boot is not None
    assert not boot.clean
    node = await box.open()
    assert (await box.holds(node, old)).all()
    await box.store(node, new)
    await node.close()


async def test_short_reads_and_writes_are_made_whole(tmp_path: Path) -> None:
    box = NodeBox(tmp_path)
    records = make_records(200, NODE_INDEX, shape=LARGE)
    io = FaultIo()
    io.shorten(("preadv", "pwrite"), 1_000)
    node = await box.open(io=io)
    await box.store(node, records)
    assert (await box.holds(node, records)).all()
    await node.close()
    io.clear()
    io = FaultIo()
    io.shorten("preadv", 777)
    node = await box.open(io=io)
    assert (await box.holds(node, records)).all()
    await node.close()
    io.clear()


async def test_a_partly_cached_span_is_not_taken_for_read(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    buffer = bytearray(64 * SMALL.shard_bytes)
    span, landing = box.spans(table.location, SMALL, buffer)[0]
    box.io.shorten("preadv", 4_000, times=1)
    assert not node.read_now(span, landing)
    box.io.clear()
    box.io.fail("preadv", errno.EAGAIN)
    assert not node.read_now(span, landing)
    box.io.clear()
    box.io.fail("preadv", errno.ENOTSUP)
    assert not node.read_now(span, landing)
    box.io.clear()
    assert (await box.holds(node, records)).all()
    await node.close()


async def test_more_operations_than_the_queue_holds_are_refused_and_counted(box: NodeBox) -> None:
    records = make_records(4, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    gate = box.io.hang("preadv", path="slab")
    buffer = bytearray(400)
    reads = [asyncio.ensure_future(node.read(box.spans(table.location, SMALL, buffer), lambda _: None, box.soon()))
             for _ in range(NODE_QUEUE_OPERATIONS + 10)]
    await entered(gate)
    gate.release()
    ended = await asyncio.gather(*reads, return_exceptions=True)
    refused = [error for error in ended if error is not None]
    assert len(refused) == 10
    assert all(isinstance(error, NodeUnavailable) for error in refused)
    assert box.counters.get("node_queue_refused") == 10
    await node.close()


# -- Hanging --------------------------------------------------------------------------------------------------------


async def test_a_hung_read_returns_by_its_deadline_and_lands_nothing_later(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    buffer = bytearray(b"\x5a" * 64 * SMALL.shard_bytes)
    spans = box.spans(table.location, SMALL, buffer)
    gate = box.io.hang("preadv", path="slab")
    with pytest.raises(NodeUnavailable, match="no answer by the deadline"):
        await node.read(spans, lambda _: pytest.fail("landed"), Deadline.after_ms(box.clock, 50))
    await entered(gate)
    assert not node.suspect
    hang_for_long(box)
    assert node.suspect
    assert not node.read_now(*spans[0])
    for call in (node.look_up(records.keys, box.soon()), node.read(spans, lambda _: None, box.soon()),
                 node.put(make_records(1, NODE_INDEX, seed=9).batch(), box.soon())):
        with pytest.raises(NodeUnavailable, match="hangs"):
            await call
    assert box.counters.get("node_suspect") == 1
    assert (await node.info(box.soon())).state == "suspect"
    gate.release()
    await node._guard.reader.drained(20)
    assert not node.suspect
    assert buffer == b"\x5a" * len(buffer)
    assert (await box.holds(node, records)).all()
    await node.close()


async def test_a_cancelled_read_lands_nothing_when_it_is_released(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    buffer = bytearray(b"\x5a" * 64 * SMALL.shard_bytes)
    gate = box.io.hang("preadv", path="slab")
    task = asyncio.ensure_future(
        node.read(box.spans(table.location, SMALL, buffer), lambda _: pytest.fail("landed"), box.soon())
    )
    await entered(gate)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    gate.release()
    assert await node._guard.reader.drained(20)
    assert buffer == b"\x5a" * len(buffer)
    await node.close()


async def test_a_landing_revoked_while_its_read_hangs_stays_untouched(box: NodeBox) -> None:
    records = make_records(64, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    buffer = bytearray(64 * SMALL.shard_bytes)
    spans = box.spans(table.location, SMALL, buffer)
    gate = box.io.hang("preadv", path="slab")
    task = asyncio.ensure_future(node.read(spans, lambda _: pytest.fail("landed"), box.soon()))
    await entered(gate)
    landing: Landing = spans[0][1]
    landing.revoked = True
    gate.release()
    await task
    assert not any(buffer)
    await node.close()


@pytest.mark.parametrize("skip", [0, 1, 2])
async def test_a_hung_write_returns_by_its_deadline_and_its_record_is_stored_later(box: NodeBox, skip: int) -> None:
    old, new = make_records(32, NODE_INDEX, seed=1), make_records(32, NODE_INDEX, seed=2)
    node = await box.open()
    await box.store(node, old)
    gate = box.io.hang("pwrite", path="slab", skip=skip)
    with pytest.raises(NodeUnavailable, match="no answer by the deadline"):
        await node.put(new.batch(), Deadline.after_ms(box.clock, 500))
    await entered(gate)
    assert (await node.look_up(new.keys, box.soon())).location.max() < 0
    hang_for_long(box)
    with pytest.raises(NodeUnavailable, match="hangs"):
        await node.put(make_records(1, NODE_INDEX, seed=9).batch(), box.soon())
    gate.release()
    assert await node._guard.writer.drained(20)
    assert (await box.holds(node, new)).all()
    assert (await box.holds(node, old)).all()
    assert index_agrees(node)
    await node.close()


async def test_what_is_in_memory_is_served_while_the_disk_hangs(box: NodeBox) -> None:
    records = make_records(32, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    gate = box.io.hang("pwrite", path="slab")
    put = asyncio.ensure_future(node.put(make_records(8, NODE_INDEX, seed=2).batch(), box.soon()))
    await entered(gate)
    hang_for_long(box)
    now = node.look_up_now(records.keys)
    assert now is not None
    assert (now.location == table.location).all()
    headers = node.headers_now(table.location, table.generation, 1)
    assert headers is not None
    assert (headers == records.headers).all()
    gate.release()
    assert (await put).stored.all()
    await node.close()


@pytest.mark.parametrize("name", ["preadv", "pwrite"])
async def test_closing_does_not_wait_for_a_hung_operation(box: NodeBox, name: str) -> None:
    records = make_records(32, NODE_INDEX)
    node = await box.open()
    table = await box.store(node, records)
    gate = box.io.hang(name, path="slab")
    buffer = bytearray(32 * SMALL.shard_bytes)
    if name == "preadv":
        call = node.read(box.spans(table.location, SMALL, buffer), lambda _: None, Deadline.after_ms(box.clock, 20))
    else:
        call = node.put(make_records(8, NODE_INDEX, seed=2).batch(), Deadline.after_ms(box.clock, 500))  # type: ignore[assignment]
    with pytest.raises(NodeUnavailable):
        await call
    await entered(gate)
    hang_for_long(box)
    await asyncio.wait_for(node.close(), 20)
    gate.release()
    for thread in (node._guard.reader, node._guard.writer):
        assert await thread.drained(20)
    boot = read_boot(SystemIo(), box.path)
    assert boot is not None
    assert not boot.clean
    await crash(node)


HANGING = """
import asyncio, sys
from efs.clock import Deadline, SystemClock
from efs.errors import NodeUnavailable
from tests.support.faultio import FaultIo
from tests.support.nodebox import NODE_INDEX, NodeBox
from tests.support.records import SMALL, make_records
from pathlib import Path

async def main():
    clock = SystemClock()
    box = NodeBox(Path(sys.argv[1]), clock=clock)
    node = await box.open()
    table = await box.store(node, make_records(32, NODE_INDEX))
    gates = [box.io.hang(name, path="slab") for name in ("preadv", "pwrite")]
    buffer = bytearray(32 * SMALL.shard_bytes)
    new = make_records(8, NODE_INDEX, seed=2)
    await node.look_up(new.keys, box.soon())
    soon = Deadline.after_ms(clock, 1_000)
    calls = [node.read(box.spans(table.location, SMALL, buffer), lambda _: None, soon), node.put(new.batch(), soon)]
    ended = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(error) for error in ended] == [NodeUnavailable] * 2, ended
    assert all(gate.entered.is_set() for gate in gates)
    while not node.suspect:
        await asyncio.sleep(0.01)
    await node.close()
    print("leaving", flush=True)

asyncio.run(main())
"""


def test_a_process_exits_while_a_read_and_a_write_hang(tmp_path: Path) -> None:
    child = subprocess.Popen([sys.executable, "-c", HANGING, str(tmp_path)], stdout=subprocess.PIPE,
                             stderr=subprocess.PIPE, text=True)
    with child:
        assert child.stdout is not None
        assert child.stderr is not None
        try:
            assert child.stdout.readline() == "leaving\n", child.stderr.read()
            assert child.wait(timeout=1) == 0
        finally:
            child.kill()


# -- Reuse of slots -------------------------------------------------------------------------------------------------


async def full_of(box: NodeBox, node: DirectoryNode, seed: int, stamp: int) -> Records:
    """Fill a node to the last slot."""
    space = node._state.allocator.geometry_for(node._state.allocator.classes()[0]).slots * box.config.plan.extents
    records = make_records(space, NODE_INDEX, seed=seed, shape=LARGE)
    assert (await node.put(records.batch(stamp), box.soon())).stored.sum() >= space - 64
    return records


async def test_a_slot_reused_during_a_slow_read_shows_in_its_generation(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 << 20)
    node = await box.open()
    old = make_records(40, NODE_INDEX, seed=1, shape=LARGE)
    table = await box.store(node, old, stamp=1)
    await full_of(box, node, seed=2, stamp=2)
    newer = make_records(200, NODE_INDEX, seed=3, shape=LARGE)
    await node.look_up(newer.keys, box.soon())
    buffer = bytearray(40 * LARGE.shard_bytes)
    gate = box.io.hang("preadv", path="slab")
    reading = asyncio.ensure_future(
        node.read(box.spans(table.location, LARGE, buffer), lambda _: None, box.soon())
    )
    await entered(gate)
    assert (await node.put(newer.batch(3), box.soon())).stored.all()
    states = node._state.allocator.states(table.location)
    gate.release()
    await reading
    assert not (await node.headers(table.location, table.generation, 2, box.soon())).any()
    assert (await node.look_up(old.keys, box.soon())).location.max() < 0
    assert buffer != old.payload.tobytes(), "no slot was reused while the read waited"
    assert states.any()
    assert (await box.holds(node, newer)).all()
    await node.close()


async def test_a_late_drop_does_not_take_the_record_that_reused_the_slot(tmp_path: Path) -> None:
    box = NodeBox(tmp_path, capacity_bytes=4 << 20)
    node = await box.open()
    old = make_records(40, NODE_INDEX, seed=1, shape=LARGE)
    table = await box.store(node, old, stamp=1)
    await full_of(box, node, seed=2, stamp=2)
    newer = make_records(400, NODE_INDEX, seed=3, shape=LARGE)
    await box.store(node, newer, stamp=3)
    await node.settled()
    assert node._state.exists(table.location).any()
    assert not (await box.holds(node, old)).any()
    held = (await node.info(box.soon())).records
    assert await node.drop(old.drop_items(table.generation), box.soon()) == 0
    assert (await node.info(box.soon())).records == held
    assert (await box.holds(node, newer)).all()
    await node.close()


async def test_a_record_that_was_forgotten_does_not_come_back_before_the_disk_is_told(box: NodeBox) -> None:
    node = await box.open()
    records = make_records(8, NODE_INDEX, seed=1)
    locations = (await box.store(node, records)).location
    node._writer.forget_at(np.sort(locations))
    state = node._state
    assert len(state.owed_entries) == 8
    # As when other tables have taken its place in the cache: what is on disk is read again.
    for extent in np.unique(locations >> SLOT_BITS).tolist():
        state.tables.remove(extent)
    assert (await node.look_up(records.keys, box.soon())).location.max() == ABSENT
    assert (await node.put(records.batch(), box.soon())).stored.all()
    found = (await node.look_up(records.keys, box.soon())).location
    assert state.exists(found).all()
    assert (await box.holds(node, records)).all()
    node.audit()
    await node.close()
