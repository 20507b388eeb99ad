"""tenant purge and quota on the command line, and what list and status say of them (fault 47)."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from efs.fs import FileSystem
from efs.limits import MIB, STRIPE_SHARDS
from efs.osio import SystemIo
from efs.tombstones import TOMBSTONES_FILE
from kvstore.tenants import begin_purge, find_tenant
from tests.support.cli import Outcome, run, write_blocks, write_tokens
from tests.unit.efs.test_purge import node_path

pytestmark = pytest.mark.usefixtures("patient")

BLOCK_BYTES = 5_000
SLOT_BYTES = 512
"""Of a shard of 500 bytes."""
BLOCK = ("--block-bytes", str(BLOCK_BYTES), "--block-tokens", "16")
BLOCKS = 5
STORED = BLOCKS * STRIPE_SHARDS * SLOT_BYTES


@pytest.fixture
def store(tmp_path: Path) -> str:
    root = str(tmp_path / "store")
    FileSystem.init(root, STRIPE_SHARDS * 6 * MIB, extent_bytes=MIB // 4)
    for name in ("acme", "other"):
        assert run("tenant", "add", name, store=root).code == 0
    return root


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    return write_tokens(tmp_path / "tokens", range(16 * BLOCKS))


@pytest.fixture
def blocks(tmp_path: Path) -> str:
    return write_blocks(tmp_path / "blocks", random.Random(1).randbytes(BLOCKS * BLOCK_BYTES))


def put(store: str, tokens: str, blocks: str, tenant: str) -> Outcome:
    return run("put", "--tokens", tokens, "--blocks", blocks, *BLOCK, "--tenant", tenant, "--json", store=store)


def found(store: str, tokens: str, tenant: str) -> int:
    words = ("match", "--strict", "--tokens", tokens, *BLOCK, "--tenant", tenant, "--json")
    return int(run(*words, store=store).document()["blocks"])


def listed(store: str, name: str) -> dict[str, object]:
    document = run("tenant", "list", "--json", store=store).document()
    assert document["exact"] is True
    (tenant,) = [one for one in document["tenants"] if one["name"] == name]
    return dict(tenant)


def test_purge_needs_a_confirmation_and_removes_one_tenant_alone(store: str, tokens: str, blocks: str) -> None:
    for name in ("acme", "other"):
        assert put(store, tokens, blocks, name).document()["acked"] == BLOCKS
    before = listed(store, "acme")
    assert (before["stored_bytes"], before["payload_bytes"]) == (STORED, STORED * 10 // 12)
    refused = run("tenant", "purge", "acme", store=store)
    assert refused.code == 2
    assert "--yes" in refused.error_line
    assert found(store, tokens, "acme") == BLOCKS
    done = run("tenant", "purge", "acme", "--yes", "--json", store=store)
    assert done.code == 0
    assert (done.document()["dropped"], done.document()["purge_pending"]) == (BLOCKS * STRIPE_SHARDS, [])
    after = listed(store, "acme")
    assert (after["generation"], after["retired"], after["stored_bytes"]) == (1, [before["tag"]], 0)
    assert listed(store, "other")["stored_bytes"] == STORED
    assert (found(store, tokens, "acme"), found(store, tokens, "other")) == (0, BLOCKS)
    assert put(store, tokens, blocks, "acme").document()["acked"] == BLOCKS, "it can store again at once"
    assert (found(store, tokens, "acme"), found(store, tokens, "other")) == (BLOCKS, BLOCKS)
    assert run("fsck", "--deep", store=store).code == 0


def test_a_second_purge_has_nothing_to_do(store: str, tokens: str, blocks: str) -> None:
    put(store, tokens, blocks, "acme")
    assert run("tenant", "purge", "acme", "--yes", store=store).code == 0
    tombstones = (Path(store) / TOMBSTONES_FILE).read_bytes()
    again = run("tenant", "purge", "acme", "--yes", "--json", store=store)
    assert (again.code, again.document()["dropped"], again.document()["generation"]) == (0, 0, 1)
    assert (Path(store) / TOMBSTONES_FILE).read_bytes() == tombstones


def test_a_purge_that_had_only_begun_is_shown_and_finished(store: str, tokens: str, blocks: str) -> None:
    put(store, tokens, blocks, "acme")
    begin_purge(store, "acme")
    assert "unfinished" in run("tenant", "list", store=store).out
    assert found(store, tokens, "acme") == 0
    done = run("tenant", "purge", "acme", "--yes", "--json", store=store).document()
    assert (done["generation"], done["purging"], done["dropped"]) == (1, False, BLOCKS * STRIPE_SHARDS)


def test_what_was_stored_before_a_rotation_is_purged_too(store: str, tokens: str, blocks: str) -> None:
    put(store, tokens, blocks, "acme")
    assert run("tenant", "rotate", "acme", "--yes", store=store).code == 0
    done = run("tenant", "purge", "acme", "--yes", "--json", store=store).document()
    assert (done["generation"], done["dropped"]) == (1, BLOCKS * STRIPE_SHARDS)


def test_nodes_that_were_away_are_listed_until_they_have_been_purged(store: str, tokens: str, blocks: str,
                                                                     tmp_path: Path) -> None:
    put(store, tokens, blocks, "acme")
    os.rename(node_path(store, 9), tmp_path / "away")
    done = run("tenant", "purge", "acme", "--yes", store=store)
    assert done.code == 1
    assert "not purged yet: node 9" in done.err
    assert listed(store, "acme")["purge_pending"] == [9]
    assert run("status", "--json", store=store).document()["purge_pending"] == [9]
    assert "node 9" in run("tenant", "list", store=store).out
    assert "[9]" in run("status", store=store).out
    os.rename(tmp_path / "away", node_path(store, 9))
    assert run("tenant", "purge", "acme", "--yes", store=store).code == 0
    assert listed(store, "acme")["purge_pending"] == []
    assert run("status", "--json", store=store).document()["purge_pending"] == []
    assert run("fsck", store=store).code == 0


def test_a_quota_refuses_new_blocks_and_can_be_lifted(store: str, tokens: str, blocks: str, tmp_path: Path) -> None:
    assert run("tenant", "quota", "acme", str(STORED), store=store).code == 0
    assert listed(store, "acme")["quota_bytes"] == STORED
    assert put(store, tokens, blocks, "acme").document()["acked"] == BLOCKS
    more = write_tokens(tmp_path / "more", range(1_000, 1_000 + 16 * BLOCKS))
    refused = put(store, more, blocks, "acme")
    assert (refused.code, refused.document()["failed"]) == (1, BLOCKS)
    assert "quota" in refused.document()["why"]
    assert put(store, more, blocks, "other").document()["acked"] == BLOCKS
    assert run("status", "--json", store=store).document()["counters"]["put_over_quota"] == BLOCKS
    assert run("tenant", "quota", "acme", "none", store=store).code == 0
    assert find_tenant(store, "acme").quota_bytes is None
    assert put(store, more, blocks, "acme").document()["acked"] == BLOCKS


def test_a_quota_stays_with_the_tenant_over_a_purge(store: str, tokens: str, blocks: str) -> None:
    run("tenant", "quota", "acme", "10GiB", store=store)
    put(store, tokens, blocks, "acme")
    run("tenant", "purge", "acme", "--yes", store=store)
    assert find_tenant(store, "acme", io=SystemIo()).quota_bytes == 10 * 1024**3
    assert "10.0 GiB" in run("tenant", "list", store=store).out
