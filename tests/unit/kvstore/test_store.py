"""`KVStore` end to end on a store in a temporary directory: real files, real shards."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from efs.errors import InvalidArgument, Locked, StoreNotFound
from efs.fs import FileSystem
from kvstore import V41_FLASH, BlockLayout, Chain, Config, KVStore, Namespace
from kvstore.tenants import add_tenant

pytestmark = pytest.mark.usefixtures("patient")

ROOT = Path(__file__).parents[3]
CAPACITY = 12 * 16 * 1024 * 1024
BLOCKS = 40
NAMESPACE = Namespace("deepseek-v4.1-flash", "sha256:0", V41_FLASH)
CHAIN = NAMESPACE.chain(range(BLOCKS * 128))
SIZE = V41_FLASH.block_bytes


def payload(seed: int, blocks: int = BLOCKS, block_bytes: int = SIZE) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, blocks * block_bytes, dtype=np.uint8)


def lose(root: str, *nodes: int) -> None:
    for node in nodes:
        shutil.rmtree(Path(root) / "nodes" / f"{node:02d}")


async def fetched(store: KVStore, chain: Chain) -> tuple[list[bool], NDArray[np.uint8]]:
    """ok of each block, and the blocks in block order."""
    out = np.zeros(len(chain) * chain.layout.block_bytes, dtype=np.uint8)
    report = await store.get_into(chain, out)
    assert report.blocks == next((row for row, ok in enumerate(report.ok) if not ok), len(chain))
    assert report.bytes == sum(report.ok) * chain.layout.block_bytes
    return list(report.ok), chain.layout.from_segments(out)


@pytest.fixture
def root(tmp_path: Path) -> str:
    path = str(tmp_path / "store")
    FileSystem.init(path, CAPACITY)
    return path


@pytest.mark.parametrize("mapped", [False, True])
async def test_blocks_survive_closing_and_come_back_in_segment_order(root: str, mapped: bool) -> None:
    blocks = payload(1)
    async with await KVStore.open(root) as store:
        assert await store.match(CHAIN) == 0
        put = await store.put(CHAIN, blocks)
        assert (put.acked, put.already, put.failed) == (BLOCKS, 0, 0)
    fired: list[tuple[int, int]] = []
    async with await KVStore.open("file://" + root, config=Config(mapped=mapped)) as store:
        assert await store.match(CHAIN) == await store.match(CHAIN, strict=True) == BLOCKS
        out = np.zeros(blocks.size, dtype=np.uint8)
        report = await store.get_into(CHAIN, out, on_segment=lambda segment, leading: fired.append((segment, leading)))
    assert (report.blocks, report.rebuilt, report.corrupt) == (BLOCKS, 0, 0)
    assert list(report.ok) == [True] * BLOCKS
    assert fired == [(segment, BLOCKS) for segment in range(4)]
    assert (out == V41_FLASH.to_segments(blocks)).all()


async def test_two_nodes_gone_lose_nothing_and_three_lose_all(root: str) -> None:
    blocks = payload(2)
    async with await KVStore.open(root) as store:
        await store.put(CHAIN, blocks)
    lose(root, 3, 8)
    async with await KVStore.open(root) as store:
        out = np.zeros(blocks.size, dtype=np.uint8)
        report = await store.get_into(CHAIN, out)
        assert report.blocks == BLOCKS
        assert report.rebuilt > 0
        assert (V41_FLASH.from_segments(out) == blocks).all()
    lose(root, 5)
    async with await KVStore.open(root) as store:
        ok, _ = await fetched(store, CHAIN)
        assert ok == [False] * BLOCKS
        assert await store.match(CHAIN, strict=True) == 0


async def test_a_hole_ends_the_prefix_and_a_later_put_heals_exactly_the_hole(root: str) -> None:
    # Fault 50.
    blocks = payload(3)
    async with await KVStore.open(root) as store:
        await store.put(CHAIN[:10], blocks[: 10 * SIZE])
        await store.put(CHAIN[12:], blocks[12 * SIZE :])
        assert await store.match(CHAIN) == 10
        ok, got = await fetched(store, CHAIN)
        assert ok == [True] * 10 + [False] * 2 + [True] * (BLOCKS - 12)
        assert (got[: 10 * SIZE] == blocks[: 10 * SIZE]).all()
        put = await store.put(CHAIN, blocks)
        assert (put.acked, put.already, put.failed) == (2, BLOCKS - 2, 0)
        assert await store.match(CHAIN) == BLOCKS
        ok, got = await fetched(store, CHAIN)
        assert all(ok)
        assert (got == blocks).all()


async def test_a_tenant_finds_its_own_blocks_and_no_others(root: str) -> None:
    # Fault 47.
    for name in ("acme", "rival"):
        add_tenant(root, name)
    blocks = payload(4)
    async with await KVStore.open(root) as store:
        acme, rival = (store.namespace(model="m", weights="w", layout=V41_FLASH, tenant=name).chain(range(BLOCKS * 128))
                       for name in ("acme", "rival"))
        put = await store.put(acme, blocks)
        assert (put.acked, put.already, put.failed) == (BLOCKS, 0, 0)
        assert await store.match(acme) == BLOCKS
        assert await store.match(rival, strict=True) == 0
        ok, _ = await fetched(store, rival)
        assert not any(ok)
        # The same tokens and bytes of the other tenant are blocks of their own.
        put = await store.put(rival, blocks)
        assert (put.acked, put.already, put.failed) == (BLOCKS, 0, 0)


async def test_blocks_bound_by_engine_hashes_are_found_by_a_slice_bound_alone(root: str) -> None:
    hashes = [bytes([number]) * 32 for number in range(BLOCKS)]
    blocks = payload(5)
    async with await KVStore.open(root) as store:
        await store.put(NAMESPACE.bind(hashes), blocks)
        part = NAMESPACE.bind(hashes[21:30], 21, run_head=hashes[16])
        assert await store.match(part) == 9
        ok, got = await fetched(store, part)
        assert all(ok)
        assert (got == blocks[21 * SIZE : 30 * SIZE]).all()


async def test_layouts_of_several_sizes_share_a_store(root: str) -> None:
    async with await KVStore.open(root) as store:
        for seed, size in enumerate((1, 79, 1_009, 300_007)):
            layout = BlockLayout.opaque(size, 16)
            chain = Namespace("m", "w", layout).chain(range(5 * 16))
            blocks = payload(seed, 5, size)
            assert (await store.put(chain, blocks)).acked == 5
            ok, got = await fetched(store, chain)
            assert all(ok)
            assert (got == blocks).all()
            with pytest.raises(InvalidArgument, match=rf"^blocks has {5 * size} bytes, must have {4 * size}$"):
                await store.put(chain[:4], blocks)


async def test_a_second_owner_is_refused_and_named(root: str) -> None:
    async with await KVStore.open(root):
        with pytest.raises(Locked, match=f"is owned by process {os.getpid()}"):
            await KVStore.open(root)
    async with await KVStore.open(root) as store:
        assert len(await store.nodes()) == 12


async def test_a_directory_without_a_store_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreNotFound, match=f"no store at {tmp_path}"):
        await KVStore.open(tmp_path)


def test_the_blocking_store_reads_what_it_wrote(root: str) -> None:
    blocks = payload(6)
    with KVStore.blocking(root) as store:
        assert store.put(CHAIN, blocks).acked == BLOCKS
        assert store.match(CHAIN) == BLOCKS
        out = np.zeros(blocks.size, dtype=np.uint8)
        assert store.get_into(CHAIN, out).blocks == BLOCKS
        assert (out == V41_FLASH.to_segments(blocks)).all()
    with KVStore.blocking(root) as store:
        assert store.match(CHAIN) == BLOCKS


def test_a_store_can_be_reopened_while_a_forked_child_lives(root: str) -> None:
    program = f"""
import os, signal
from kvstore import KVStore
store = KVStore.blocking({root!r})
child = os.fork()
if child == 0:
    signal.pause()
store.close()
try:
    with KVStore.blocking({root!r}) as store:
        print(len(store.nodes()))
finally:
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
"""
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "12\n", "")


def test_a_program_that_forgets_to_close_leaves_a_whole_store(root: str) -> None:
    program = f"""
import numpy as np
from kvstore import KVStore, Namespace, V41_FLASH
chain = Namespace("deepseek-v4.1-flash", "sha256:0", V41_FLASH).chain(range({BLOCKS} * 128))
store = KVStore.blocking({root!r})
print(store.put(chain, np.full(len(chain) * V41_FLASH.block_bytes, 7, dtype=np.uint8)).acked)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60,
                          check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"{BLOCKS}\n", "")
    with KVStore.blocking(root) as store:
        out = np.zeros(BLOCKS * SIZE, dtype=np.uint8)
        assert store.get_into(CHAIN, out).blocks == BLOCKS
        assert (out == 7).all()
