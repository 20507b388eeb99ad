"""status, ls, inspect, fsck: looking at a store through its files, whole and damaged."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from efs.extent import location_of
from efs.limits import STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.nodedir import COUNTERS_FILE, OwnerLock, index_path
from efs.osio import SystemIo
from efs.placement import placement_group, rotation_of
from efs.storeview import StoreView
from kvstore.cli.status_cmd import count_blocks
from tests.support.cli import run
from tests.support.laidstore import LONG_AGO_MS, SHAPE, LaidStore, flip, lay_store, make_blocks

pytestmark = pytest.mark.usefixtures("patient")

BLOCKS = make_blocks(seed=11, count=40)
KEYS = sorted(block.key.hex() for block in BLOCKS)


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), BLOCKS)


# -- status ---------------------------------------------------------------------------------------------------------


def test_status_counts_nodes_blocks_and_space(store: LaidStore) -> None:
    seen = run("status", "--json", store=store.root).document()
    assert (seen["nodes_readable"], seen["owner_pid"], seen["exact"]) == (12, None, True)
    assert (seen["blocks"], seen["whole"], seen["at_risk"], seen["unreadable"], seen["incomplete"]) == (40, 40, 0, 0, 0)
    assert seen["capacity_bytes"] == store.config.capacity_bytes
    assert seen["live_bytes"] == 40 * STRIPE_SHARDS * SHAPE.slot_bytes
    assert {node["state"] for node in seen["nodes"]} == {"closed"}
    assert all(node["records"] == 40 for node in seen["nodes"])
    assert all(node["disk_bytes"] <= node["capacity_bytes"] for node in seen["nodes"])


def test_status_says_which_nodes_a_server_holds(store: LaidStore) -> None:
    held = (3, 7)
    locks = [OwnerLock.take(SystemIo(), store.node_path(node)) for node in held]
    try:
        states = [node["state"] for node in run("status", "--json", store=store.root).document()["nodes"]]
    finally:
        for lock in locks:
            lock.release()
    assert states == ["serving" if node in held else "closed" for node in range(STRIPE_SHARDS)]


@pytest.mark.parametrize(("lost", "at_risk", "unreadable"), [(1, 40, 0), (2, 40, 0), (3, 0, 40)])
def test_status_works_with_nodes_missing(store: LaidStore, lost: int, at_risk: int, unreadable: int) -> None:
    for node in range(lost):
        shutil.rmtree(store.node_path(node))
    done = run("status", "--json", store=store.root)
    seen = done.document()
    assert done.code == 0
    assert seen["nodes_readable"] == 12 - lost
    assert (seen["blocks"], seen["at_risk"], seen["unreadable"]) == (40, at_risk, unreadable)
    assert [node["state"] for node in seen["nodes"][:lost]] == ["absent"] * lost
    assert "absent" in run("status", store=store.root).out


def test_status_says_why_a_node_cannot_be_read(store: LaidStore) -> None:
    shutil.rmtree(index_path(store.node_path(2)))
    first, second = store.node_path(5), store.node_path(6)
    os.rename(first, first + ".x")
    os.rename(second, first)
    os.rename(first + ".x", second)
    nodes = run("status", "--json", store=store.root).document()["nodes"]
    assert [nodes[node]["state"] for node in (2, 5, 6, 7)] == [
        "index_lost",
        "wrong_identity",
        "wrong_identity",
        "closed",
    ]
    assert nodes[5]["disk_bytes"] is None


def test_status_shows_blocks_at_risk_and_incomplete_ones(store: LaidStore) -> None:
    store.drop(3, 7)
    for node in range(4):
        store.drop(node, 8)
    seen = run("status", "--json", store=store.root).document()
    assert (seen["blocks"], seen["whole"], seen["at_risk"], seen["incomplete"]) == (40, 38, 1, 1)


def test_status_sums_the_counters_of_client_and_nodes(store: LaidStore) -> None:
    for where, name, count in (
        (store.root, "get_calls", 3),
        (store.node_path(1), "node_evicted", 5),
        (store.node_path(2), "node_evicted", 6),
    ):
        counters = CounterFile.open(os.path.join(where, COUNTERS_FILE), writable=True)
        counters.add(name, count)
        counters.close()
    seen = run("status", "--json", store=store.root).document()["counters"]
    assert (seen["get_calls"], seen["node_evicted"], seen["put_calls"]) == (3, 11, 0)
    assert "node_evicted 11" in run("status", store=store.root).out


def test_status_estimates_when_it_may_not_count_everything(tmp_path: Path) -> None:
    store = lay_store(str(tmp_path / "store"), make_blocks(seed=12, count=3000))
    with StoreView.open(store.root) as view:
        exact, estimated = count_blocks(view, 60.0), count_blocks(view, 0.0)
    assert (exact.blocks, exact.covered) == (3000, 1.0)
    assert 0 < estimated.covered < 1
    assert abs(estimated.blocks - 3000) < 300
    assert "about " in run("status", "--seconds", "0", store=store.root).out


# -- ls -------------------------------------------------------------------------------------------------------------


def test_ls_lists_every_block_in_order_of_keys(store: LaidStore) -> None:
    seen = run("ls", "--json", store=store.root).document()
    assert [block["key"] for block in seen["blocks"]] == KEYS
    assert seen["more"] is False
    by_key = {block.key.hex(): (block.digest.hex(), depth) for depth, block in enumerate(BLOCKS)}
    for block in seen["blocks"]:
        assert (block["digest"], block["depth"]) == by_key[block["key"]]
        assert (block["nodes"], block["block_bytes"], block["tenant"]) == (12, SHAPE.block_bytes, None)
        assert block["arrival_ms"] == LONG_AGO_MS


def test_ls_stops_at_its_limit_and_goes_on_behind_a_key(store: LaidStore) -> None:
    head = run("ls", "--limit", "15", "--json", store=store.root).document()
    assert (len(head["blocks"]), head["more"]) == (15, True)
    tail = run("ls", "--after", head["blocks"][-1]["key"], "--json", store=store.root).document()
    assert [block["key"] for block in head["blocks"] + tail["blocks"]] == KEYS
    text = run("ls", "--limit", "2", store=store.root)
    assert [line.split()[0] for line in text.out.splitlines()] == ["key", *KEYS[:2]]
    assert "--after" in text.err


def test_ls_shows_a_block_whose_first_holders_are_damaged(store: LaidStore) -> None:
    for node in range(11):
        store.clear_entry(node, 0)
    seen = run("ls", "--json", store=store.root).document()["blocks"]
    (block,) = [block for block in seen if block["key"] == BLOCKS[0].key.hex()]
    assert (block["nodes"], block["block_bytes"]) == (12, SHAPE.block_bytes)
    store.clear_entry(11, 0)
    seen = run("ls", "--json", store=store.root).document()["blocks"]
    assert [block["block_bytes"] for block in seen if block["key"] == BLOCKS[0].key.hex()] == [None]
    assert run("ls", store=store.root).code == 0


# -- inspect --------------------------------------------------------------------------------------------------------


def test_inspect_shows_every_shard_of_a_block(store: LaidStore) -> None:
    block = BLOCKS[20]
    done = run("inspect", block.key.hex(), "--json", store=store.root)
    seen = done.document()
    rotation = rotation_of(placement_group(block.key))
    assert done.code == 0
    assert (seen["key"], seen["rotation"], seen["block_bytes"]) == (block.key.hex(), rotation, SHAPE.block_bytes)
    assert [segment["bytes"] for segment in seen["segments"]] == list(SHAPE.segment_bytes)
    assert [shard["node"] for shard in seen["shards"]] == list(range(12))
    for shard in seen["shards"]:
        assert (shard["node"] - rotation) % 12 == shard["shard"]
        assert (shard["state"], shard["digest"], shard["arrival_ms"]) == ("sound", block.digest.hex(), LONG_AGO_MS)
        assert location_of(shard["extent"], shard["slot"]) == store.location(20)
        assert shard["generation"] == store.generation(20)
        assert len(shard["payload_hash"]) == 16


def test_inspect_takes_the_beginning_of_a_key(store: LaidStore) -> None:
    for length in (8, 9, 63, 64):
        shown = run("inspect", KEYS[3][:length].upper(), store=store.root)
        assert shown.code == 0
        assert KEYS[3] in shown.out
        assert "12 of 12 shards sound" in shown.out


def test_inspect_tells_damaged_absent_and_away_shards_apart(store: LaidStore) -> None:
    store.edit_slab(0, store.slot_offset(20), flip)
    store.edit_slab(1, store.entry_offset(20) + 50, flip)
    store.clear_entry(2, 20)
    store.drop(3, 20)
    store.write_entry(4, store.location(20), BLOCKS[20].headers[5], store.generation(20))
    store.write_entry(5, store.location(20), BLOCKS[21].headers[5], store.generation(21))
    shutil.rmtree(store.node_path(6))
    done = run("inspect", BLOCKS[20].key.hex(), "--json", store=store.root)
    states = [shard["state"] for shard in done.document()["shards"]]
    assert done.code == 4
    assert states[0] == "bad checksum"
    assert states[1].startswith("bad entry")
    assert states[2:4] == ["slot is free", "absent"]
    assert states[4].startswith("holds shard ")
    assert states[5:7] == ["slot holds another record", "away"]
    assert states[7:] == ["sound"] * 5


@pytest.mark.parametrize("key", ["deadbeef", "f" * 64, "0000"])
def test_inspect_of_an_unknown_key_names_it(store: LaidStore, key: str) -> None:
    done = run("inspect", key, store=store.root)
    assert done.code == 2
    assert key in done.error_line


@pytest.mark.parametrize("key", ["xyz", "abc", "", "0" * 65, "déadbeef"])
def test_inspect_of_something_that_is_no_key_says_so(store: LaidStore, key: str) -> None:
    done = run("inspect", key, store=store.root)
    assert done.code == 2
    assert "not a key" in done.error_line


def test_inspect_of_an_ambiguous_beginning_names_two_keys(tmp_path: Path) -> None:
    blocks = make_blocks(seed=13, count=3000)
    store = lay_store(str(tmp_path / "store"), blocks)
    beginnings = [block.key.hex()[:4] for block in blocks]
    shared = next(start for start in beginnings if beginnings.count(start) > 1)
    done = run("inspect", shared, store=store.root)
    assert done.code == 2
    assert f"keys begin with {shared}" in done.error_line


# -- fsck -----------------------------------------------------------------------------------------------------------


def test_fsck_of_a_clean_store_is_exit_code_0(store: LaidStore) -> None:
    done = run("fsck", "--deep", store=store.root)
    assert (done.code, done.err) == (0, "")
    assert "found    nothing" in done.out
    report = run("fsck", "--deep", "--json", store=store.root).document()
    assert (report["findings"], report["clean"], report["sums"]["versions"]) == ([], True, 40)


def test_fsck_names_damage_with_exit_code_4_and_mends_nothing(store: LaidStore) -> None:
    store.edit_slab(4, store.slot_offset(10), flip)
    shutil.rmtree(store.node_path(9))
    assert run("fsck", store=store.root).code == 4
    for _ in range(2):
        done = run("fsck", "--deep", "--json", store=store.root)
        report = done.document()
        assert done.code == 4
        assert [finding["kind"] for finding in report["findings"]] == ["node_absent", "bad_checksum"]
        bad = report["findings"][1]
        assert (bad["node"], bad["key"], bad["digest"]) == (4, BLOCKS[10].key.hex(), BLOCKS[10].digest.hex())
        assert bad["location"] == store.location(10)
        assert (report["clean"], report["sums"]["found"]) == (False, {"node_absent": 1, "bad_checksum": 1})
    text = run("fsck", "--deep", store=store.root).out
    assert f"bad_checksum  node 4  key {BLOCKS[10].key.hex()}  extent 0 slot 10" in text


def test_fsck_that_cannot_run_is_exit_code_8(store: LaidStore) -> None:
    description = Path(store.root, "store.toml")
    description.write_text(description.read_text().replace("format_version = 1", "format_version = 7"))
    done = run("fsck", store=store.root)
    assert done.code == 8
    assert "format version 7" in done.error_line


def test_fsck_that_was_stopped_says_where_to_go_on(tmp_path: Path) -> None:
    store = lay_store(str(tmp_path / "store"), make_blocks(seed=14, count=1500))
    done = run("fsck", "--max-duration", "0.000001", "--json", store=store.root)
    assert done.code == 8
    assert done.document()["clean"] is False
    rest = run("fsck", "--resume", done.document()["sums"]["resume"], "--json", store=store.root)
    assert (rest.code, rest.document()["clean"]) == (0, True)
    assert done.document()["sums"]["versions"] + rest.document()["sums"]["versions"] == 1500


@pytest.mark.parametrize(
    "words", [("--resume", "xyz"), ("--max-duration", "0"), ("--max-duration", "-1"), ("--repair",)]
)
def test_a_wrong_fsck_is_exit_code_2(store: LaidStore, words: tuple[str, ...]) -> None:
    done = run("fsck", *words, store=store.root)
    assert done.code == 2
    assert words[-1] in done.error_line
