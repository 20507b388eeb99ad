"""What `KVStore` checks and passes on, over a filesystem in memory."""

from __future__ import annotations

import array
import asyncio
import os
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efs.errors import InvalidArgument, StoreClosed, StoreNotFound
from efs.limits import DEPTH_UNKNOWN, GET_DEADLINE_MS, MATCH_DEADLINE_MS
from kvstore.config import Config
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout, Segment
from kvstore.store import ForkedStore, KVStore, UnsupportedUrl, store_root
from kvstore.tenants import add_tenant
from tests.support.memoryfs import MemoryFileSystem, MemoryRoots

pytestmark = pytest.mark.usefixtures("patient")

LAYOUT = BlockLayout("f", "d", 4, (Segment("a", 3), Segment("b", 5)))
CHAIN = Namespace("m", "w", LAYOUT).chain(range(24))
BLOCKS = np.arange(6 * 8, dtype=np.uint8)


@pytest.fixture
async def filesystem() -> MemoryFileSystem:
    return MemoryFileSystem()


@pytest.fixture
async def store(filesystem: MemoryFileSystem, tmp_path: Path) -> AsyncIterator[KVStore]:
    async with KVStore(filesystem, str(tmp_path)) as opened:
        yield opened


async def test_what_was_put_is_fetched_segment_by_segment(store: KVStore) -> None:
    assert (await store.put(CHAIN, BLOCKS)).acked == 6
    assert await store.match(CHAIN) == 6
    out, fired = bytearray(6 * 8), []
    report = await store.get_into(CHAIN, out, on_segment=lambda segment, blocks: fired.append((segment, blocks)))
    assert (report.blocks, list(report.ok), report.bytes) == (6, [True] * 6, 48)
    assert fired == [(0, 6), (1, 6)]
    assert bytes(out) == LAYOUT.to_segments(BLOCKS).tobytes()


async def test_a_slice_reads_what_the_whole_wrote(store: KVStore) -> None:
    await store.put(CHAIN[:4], BLOCKS[:32])
    assert await store.match(CHAIN) == 4
    out = np.zeros(16, dtype=np.uint8)
    report = await store.get_into(CHAIN[3:5], out)
    assert (report.blocks, list(report.ok)) == (1, [True, False])
    assert out[:3].tolist() == BLOCKS[24:27].tolist()


async def test_put_carries_depth_and_tenant_of_each_block(store: KVStore, filesystem: MemoryFileSystem) -> None:
    owned = Namespace("m", "w", LAYOUT, tenant="acme", secret=bytes(32))
    await store.put(owned.chain(range(24))[2:4], BLOCKS[:16])
    tag = owned.tenant_tag
    assert [(item.depth, item.tenant_tag) for item in filesystem.items] == [(2, tag), (3, tag)]
    filesystem.items.clear()
    await store.put(Namespace("m", "w", LAYOUT).bind([bytes(32)], start=None), BLOCKS[:8])
    assert [(item.depth, item.tenant_tag) for item in filesystem.items] == [(DEPTH_UNKNOWN, bytes(8))]


async def test_deadline_comes_from_the_call_or_else_from_the_settings(filesystem: MemoryFileSystem) -> None:
    async with KVStore(filesystem, "/", config=Config(put_deadline_ms=77)) as store:
        await store.put(CHAIN, BLOCKS)
        await store.match(CHAIN)
        await store.get_into(CHAIN, bytearray(48))
        await store.put(CHAIN, BLOCKS, deadline_ms=1.5)
    assert filesystem.deadlines_ms == [77, MATCH_DEADLINE_MS, GET_DEADLINE_MS, 1.5]


@pytest.mark.parametrize("deadline_ms", [0, -1, 60_001, float("nan"), float("inf"), "5"])
async def test_a_deadline_that_cannot_be_is_refused(store: KVStore, deadline_ms: Any) -> None:
    for call in (store.match(CHAIN, deadline_ms=deadline_ms), store.put(CHAIN, BLOCKS, deadline_ms=deadline_ms),
                 store.get_into(CHAIN, bytearray(48), deadline_ms=deadline_ms)):
        with pytest.raises(InvalidArgument, match=r"^deadline_ms is .*, must be above 0 and at most 60000$"):
            await call


async def test_an_empty_chain_is_no_error_and_no_call(store: KVStore, filesystem: MemoryFileSystem) -> None:
    empty = CHAIN[:0]
    assert await store.match(empty) == 0
    assert (await store.put(empty, b"")).acked == 0
    report = await store.get_into(empty, bytearray())
    assert (report.blocks, list(report.ok), report.bytes) == (0, [], 0)
    assert filesystem.deadlines_ms == []


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (bytearray(47), "out has 47 bytes, must have 48"),
        (bytearray(49), "out has 49 bytes, must have 48"),
        (bytes(48), "out is read-only, must be writable"),
        (np.zeros(96, dtype=np.uint8)[::2], "out is not contiguous"),
        ([0] * 48, "out is of type list"),
    ],
)
async def test_a_buffer_that_cannot_be_filled_is_refused_before_anything_is_read(
    store: KVStore, filesystem: MemoryFileSystem, out: Any, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"^{message}"):
        await store.get_into(CHAIN, out)
    assert filesystem.deadlines_ms == []


async def test_blocks_of_another_size_are_refused_before_anything_is_written(
    store: KVStore, filesystem: MemoryFileSystem
) -> None:
    with pytest.raises(InvalidArgument, match=r"^blocks has 40 bytes, must have 48$"):
        await store.put(CHAIN, BLOCKS[:40])
    other = Namespace("m", "w", BlockLayout.opaque(9, 4)).chain(range(24))
    with pytest.raises(InvalidArgument, match=r"^blocks has 48 bytes, must have 54$"):
        await store.put(other, BLOCKS)
    assert filesystem.blocks == {}


async def test_read_only_and_typed_buffers_can_be_put(store: KVStore) -> None:
    for start, blocks in enumerate((bytes(8), memoryview(bytes(8)), array.array("I", [0, 0]), np.zeros(1, "M8[s]"))):
        assert (await store.put(CHAIN[start : start + 1], blocks)).acked == 1


async def test_tensors_are_put_and_filled(store: KVStore) -> None:
    torch = pytest.importorskip("torch")
    blocks = torch.arange(24, dtype=torch.bfloat16)
    await store.put(CHAIN, blocks)
    out = torch.zeros(24, dtype=torch.bfloat16)
    await store.get_into(CHAIN, out)
    assert out.view(torch.uint8).numpy().tobytes() == LAYOUT.to_segments(blocks).tobytes()


async def test_a_list_of_keys_is_no_chain(store: KVStore) -> None:
    keys: Any = list(CHAIN)
    with pytest.raises(InvalidArgument, match=r"^chain is of type list, must be a Chain of a namespace$"):
        await store.match(keys)


async def test_a_closed_store_refuses_every_call(filesystem: MemoryFileSystem) -> None:
    store = KVStore(filesystem, "/")
    await asyncio.gather(store.close(), store.close())
    await store.close()
    assert filesystem.closed
    for call in (store.match(CHAIN), store.put(CHAIN, BLOCKS), store.get_into(CHAIN, bytearray(48)), store.nodes()):
        with pytest.raises(StoreClosed, match=r"^the store is closed$"):
            await call


async def test_another_event_loop_is_refused(store: KVStore) -> None:
    failures: list[BaseException] = []

    def elsewhere() -> None:
        try:
            asyncio.run(store.match(CHAIN))
        except InvalidArgument as error:
            failures.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    await asyncio.to_thread(thread.join)
    assert [str(error) for error in failures] == [
        "the store belongs to another event loop; open one here, or use KVStore.blocking"
    ]


async def test_a_forked_child_is_refused_and_its_close_does_nothing(
    store: KVStore, filesystem: MemoryFileSystem, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(ForkedStore, match=f"opened by process {pid}, before a fork; open it again in {pid + 1}"):
            await store.match(CHAIN)
        await store.close()
    assert not filesystem.closed
    assert await store.match(CHAIN) == 0


# -- Namespaces and tenants -----------------------------------------------------------------------------------------


async def test_namespace_takes_secret_and_generation_from_the_tenants_file(store: KVStore) -> None:
    tenant = add_tenant(store.root, "acme")
    space = store.namespace(model="m", weights="w", layout=LAYOUT, parallel=(1, 2), group=3, tenant="acme")
    assert space == Namespace("m", "w", LAYOUT, (1, 2), 3, "acme", 0, tenant.secret)
    assert store.namespace(model="m", weights="w", layout=LAYOUT) == Namespace("m", "w", LAYOUT)


async def test_an_unknown_tenant_is_refused(store: KVStore) -> None:
    with pytest.raises(InvalidArgument, match=r"^no tenant 'acme' in this store$"):
        store.namespace(model="m", weights="w", layout=LAYOUT, tenant="acme")


async def test_tenant_with_the_tokens_of_another_finds_nothing(store: KVStore) -> None:
    # Fault 47.
    chains: list[Chain] = []
    for name in ("acme", "rival"):
        add_tenant(store.root, name)
        chains.append(store.namespace(model="m", weights="w", layout=LAYOUT, tenant=name).chain(range(24)))
    await store.put(chains[0], BLOCKS)
    assert await store.match(chains[0]) == 6
    assert await store.match(chains[1]) == 0
    assert (await store.get_into(chains[1], bytearray(48))).blocks == 0


# -- URLs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("url", "root"),
    [
        ("/var/lib/kvstore", "/var/lib/kvstore"),
        ("relative/path", "relative/path"),
        ("./a:b", "./a:b"),
        ("a:b", "a:b"),
        (Path("/x/y"), "/x/y"),
        ("file:///var/lib/kv%20store", "/var/lib/kv store"),
        ("file://localhost/x", "/x"),
    ],
)
def test_a_path_and_its_file_url_name_a_root(url: str, root: str) -> None:
    assert store_root(url) == root


@pytest.mark.parametrize(
    ("url", "kind", "message"),
    [
        ("etcd://127.0.0.1:2379", InvalidArgument, "must be etcd://HOST:PORT/NAME"),
        ("s3://bucket/prefix", UnsupportedUrl, "unknown scheme 's3'"),
        ("FILE://x", UnsupportedUrl, "unknown scheme 'FILE'"),
        ("file://host/x", InvalidArgument, "a file URL must be file:// and an absolute path"),
        ("file:x", InvalidArgument, "a file URL must be file:// and an absolute path"),
        ("file:///x?y=1", InvalidArgument, "a file URL must be file:// and an absolute path"),
        ("", InvalidArgument, "the store URL is ''"),
        ("a\0b", InvalidArgument, "the store URL is"),
        (b"/x", InvalidArgument, "the store URL is"),
    ],
)
async def test_a_url_that_names_no_store_is_refused_in_one_line(
    url: Any, kind: type[InvalidArgument], message: str
) -> None:
    with pytest.raises(kind) as caught:
        await KVStore.open(url)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


@pytest.mark.parametrize("url", ["cluster.toml", "file:///nowhere/cluster.toml"])
async def test_a_cluster_file_is_no_root_and_is_looked_for_where_it_is_named(url: str) -> None:
    with pytest.raises(UnsupportedUrl, match="not on a cluster"):
        store_root(url)
    with pytest.raises(StoreNotFound, match=r"cluster\.toml: there is no such file"):
        await KVStore.open(url)


async def test_a_directory_may_be_called_like_a_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "x.toml").mkdir()
    assert store_root(str(tmp_path / "x.toml")) == str(tmp_path / "x.toml")


async def test_open_says_when_there_is_no_store(monkeypatch: pytest.MonkeyPatch) -> None:
    roots = MemoryRoots()
    monkeypatch.setattr("kvstore.store.FileSystem", roots)
    filesystem = roots.add("/here")
    with pytest.raises(StoreNotFound, match="no store at /nowhere"):
        await KVStore.open("/nowhere")
    async with await KVStore.open("file:///here") as store:
        assert store.filesystem is filesystem
        assert store.root == "/here"
    assert filesystem.closed
