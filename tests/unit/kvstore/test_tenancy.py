"""Purge and quota of tenants of an open store, with namespaces that were made before (fault 47)."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from efs.contract import PURGED
from efs.errors import InvalidArgument, OpenFailed
from efs.fs import FileSystem
from efs.limits import MIB, STRIPE_SHARDS
from efs.quota import OVER_QUOTA
from efs.tombstones import TOMBSTONES_FILE
from kvstore import BlockLayout, Chain, KVStore, Segment
from kvstore.tenancy import apply_quotas, purge_tenant, uses_of
from kvstore.tenants import add_tenant, find_tenant, list_tenants, set_quota
from tests.support.faultio import FaultIo

pytestmark = pytest.mark.usefixtures("patient")

LAYOUT = BlockLayout("opaque", "bytes", 16, (Segment("all", 5_000),))
BLOCKS = 6
STORED = BLOCKS * STRIPE_SHARDS * 512
DATA = np.frombuffer(random.Random(1).randbytes(BLOCKS * 5_000), np.uint8)


@pytest.fixture
def root(tmp_path: Path) -> str:
    FileSystem.init(str(tmp_path / "store"), STRIPE_SHARDS * 6 * MIB, extent_bytes=MIB // 4)
    for name in ("acme", "other"):
        add_tenant(str(tmp_path / "store"), name)
    return str(tmp_path / "store")


def chain_of(store: KVStore, tenant: str, first: int = 0) -> Chain:
    namespace = store.namespace(model="m", weights="w", layout=LAYOUT, tenant=tenant)
    return namespace.chain(range(first, first + 16 * BLOCKS))


async def test_a_namespace_of_before_a_purge_finds_nothing_and_stores_nothing_any_more(root: str) -> None:
    async with await KVStore.open(root) as store:
        old, theirs = chain_of(store, "acme"), chain_of(store, "other")
        for chain in (old, theirs):
            assert (await store.put(chain, DATA)).acked == BLOCKS
        done = await purge_tenant(store.filesystem, root, "acme")
        assert (done.begun, done.was_stored, done.report.dropped) == (True, STORED, BLOCKS * STRIPE_SHARDS)
        assert await store.match(old, strict=True) == 0
        report = await store.put(old, DATA)
        assert (report.failed, report.why) == (BLOCKS, PURGED)
        new = chain_of(store, "acme")
        assert not set(new.keys) & set(old.keys)
        assert await store.match(new, strict=True) == 0
        assert (await store.put(new, DATA)).acked == BLOCKS
        assert await store.match(theirs, strict=True) == BLOCKS
        by_tag, silent = await store.filesystem.tenant_bytes()
        uses = uses_of(list_tenants(root), by_tag)
        assert silent == ()
        assert {name: use.stored_bytes for name, use in uses.items()} == {"": 0, "acme": STORED, "other": STORED}
        assert uses["acme"].payload_bytes == STORED * 10 // 12


async def test_the_quota_of_a_tenant_is_that_of_its_new_generation_too(root: str) -> None:
    set_quota(root, "acme", STORED)
    async with await KVStore.open(root) as store:
        assert (await store.put(chain_of(store, "acme"), DATA)).acked == BLOCKS
        assert (await store.put(chain_of(store, "acme", 1_000), DATA)).why == OVER_QUOTA
        await purge_tenant(store.filesystem, root, "acme")
        assert (await store.put(chain_of(store, "acme"), DATA)).acked == BLOCKS
        assert (await store.put(chain_of(store, "acme", 1_000), DATA)).why == OVER_QUOTA
        set_quota(root, "acme", None)
        apply_quotas(store.filesystem, root)
        assert (await store.put(chain_of(store, "acme", 1_000), DATA)).acked == BLOCKS


async def test_a_purge_that_cannot_be_noted_goes_on_with_the_next_run(root: str) -> None:
    io = FaultIo()
    filesystem = await FileSystem.open(root, io=io, maintain=False)
    try:
        store = KVStore(filesystem, root)
        old = chain_of(store, "acme")
        assert (await store.put(old, DATA)).acked == BLOCKS
        io.fail("rename", 5, path=TOMBSTONES_FILE)
        with pytest.raises(OpenFailed, match=TOMBSTONES_FILE):
            await purge_tenant(filesystem, root, "acme", unless_empty=True)
        io.verify()
        tenant = find_tenant(root, "acme")
        assert (tenant.generation, tenant.purging) == (1, True)
        done = await purge_tenant(filesystem, root, "acme", unless_empty=True)
        assert (done.begun, done.tenant.generation, done.tenant.purging) == (False, 1, False)
        assert done.report.dropped == BLOCKS * STRIPE_SHARDS
    finally:
        await filesystem.close()


async def test_an_unknown_tenant_is_named_and_nothing_changes(root: str) -> None:
    async with await KVStore.open(root) as store:
        with pytest.raises(InvalidArgument, match="nobody"):
            await purge_tenant(store.filesystem, root, "nobody")
        assert store.filesystem.purged == frozenset()
