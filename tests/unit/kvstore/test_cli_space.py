"""gc and sweep on the command line."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from efs.limits import STRIPE_SHARDS
from tests.support.cli import run
from tests.support.laidstore import LaidStore, lay_store, make_blocks

pytestmark = pytest.mark.usefixtures("patient")

BLOCKS = make_blocks(seed=3, count=12)


@pytest.fixture
def store(tmp_path: Path) -> LaidStore:
    return lay_store(str(tmp_path / "store"), BLOCKS)


def test_a_sweep_removes_hollow_stripes_and_nothing_else(store: LaidStore) -> None:
    for node in range(3):
        store.drop(node, 7)
    store.drop(3, 2)
    shown = run("sweep", "--json", store=store.root)
    document = shown.document()
    assert shown.code == 0
    assert (document["hollow"], document["losing"], document["dropped"], document["spared"]) == (1, 0, 9, 0)
    assert document["records"] == STRIPE_SHARDS * len(BLOCKS) - 4
    again = run("sweep", store=store.root)
    assert again.code == 0
    assert "found      0 hollow stripes, 0 versions that lost" in again.out
    assert "removed    0 records" in again.out
    assert run("fsck", store=store.root).code == 4, "the block with eleven shards is still at risk"


def test_a_sweep_says_which_nodes_are_away_and_spares_what_they_might_hold(store: LaidStore) -> None:
    for node in range(2):
        store.drop(node, 7)
    for node in range(4):
        store.drop(node, 8)
    shutil.rmtree(store.node_path(11))
    shown = run("sweep", store=store.root)
    assert shown.code == 1
    assert "found      1 hollow stripes" in shown.out
    assert "removed    7 records" in shown.out
    assert "away       nodes 11" in shown.out


@pytest.mark.parametrize("words", [("--max-duration", "0"), ("--resume", "abc")])
def test_a_wrong_request_for_a_sweep_is_named(store: LaidStore, words: tuple[str, ...]) -> None:
    shown = run("sweep", *words, store=store.root)
    assert shown.code == 2
    assert words[1] in shown.error_line


def test_gc_of_a_store_with_space_evicts_nothing(store: LaidStore) -> None:
    shown = run("gc", "--json", store=store.root)
    document = shown.document()
    assert shown.code == 0
    assert document["evicted"] == 0
    assert document["missing"] == []
    assert [node["records"] for node in document["nodes"]] == [len(BLOCKS)] * STRIPE_SHARDS


def test_gc_names_the_nodes_that_are_away(store: LaidStore) -> None:
    shutil.rmtree(store.node_path(4))
    shown = run("gc", store=store.root)
    assert shown.code == 1
    assert "not collected: node 4" in shown.err


@pytest.mark.parametrize("name", ["gc", "sweep"])
def test_beside_an_owner_both_are_refused_and_the_owner_is_named(store: LaidStore, name: str) -> None:
    from efs.nodedir import OwnerLock
    from efs.osio import SystemIo

    lock = OwnerLock.take(SystemIo(), store.root)
    shown = run(name, store=store.root)
    lock.release()
    assert shown.code == 8
    assert f"process {os.getpid()}" in shown.error_line
