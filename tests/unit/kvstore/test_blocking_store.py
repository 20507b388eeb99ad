"""The blocking store: the same verbs without a loop; threads, interpreter exit, forks, interrupted callers."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType

import numpy as np
import pytest

from efs.errors import InvalidArgument, StoreClosed, StoreNotFound
from kvstore.config import Config
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout, Segment
from kvstore.store import BlockingKVStore, KVStore, UnsupportedUrl
from kvstore.tenants import add_tenant
from tests.support.memoryfs import MemoryFileSystem, MemoryRoots

pytestmark = pytest.mark.usefixtures("patient")

ROOT = Path(__file__).parents[3]
LAYOUT = BlockLayout("f", "d", 4, (Segment("a", 3), Segment("b", 5)))
CHAIN = Namespace("m", "w", LAYOUT).chain(range(24))
BLOCKS = np.arange(6 * 8, dtype=np.uint8)


@pytest.fixture
def filesystem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> MemoryFileSystem:
    roots = MemoryRoots()
    monkeypatch.setattr("kvstore.store.FileSystem", roots)
    return roots.add(str(tmp_path))


@pytest.fixture
def store(filesystem: MemoryFileSystem, tmp_path: Path) -> Iterator[BlockingKVStore]:
    with KVStore.blocking(tmp_path) as opened:
        yield opened


def threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "kvstore"]


def test_what_was_put_is_fetched(store: BlockingKVStore) -> None:
    assert store.put(CHAIN, BLOCKS).acked == 6
    assert store.match(CHAIN) == 6
    out, fired = bytearray(48), []
    report = store.get_into(CHAIN, out, on_segment=lambda segment, blocks: fired.append((segment, blocks)))
    assert report.blocks == 6
    assert fired == [(0, 6), (1, 6)]
    assert bytes(out) == LAYOUT.to_segments(BLOCKS).tobytes()
    assert store.nodes() == []


def test_namespace_knows_the_tenants(store: BlockingKVStore) -> None:
    tenant = add_tenant(store.root, "acme")
    space = store.namespace(model="m", weights="w", layout=LAYOUT, tenant="acme")
    assert space.secret == tenant.secret


def test_settings_are_passed_on(filesystem: MemoryFileSystem, tmp_path: Path) -> None:
    with KVStore.blocking(str(tmp_path), config=Config(match_deadline_ms=5)) as store:
        store.match(CHAIN)
        assert store.config.match_deadline_ms == 5
    assert filesystem.deadlines_ms == [5]


def test_close_ends_the_thread_and_later_calls_are_refused(filesystem: MemoryFileSystem, tmp_path: Path) -> None:
    store = KVStore.blocking(tmp_path)
    assert len(threads()) == 1
    store.close()
    store.close()
    assert threads() == []
    assert filesystem.closed
    with pytest.raises(StoreClosed, match=r"^the store is closed$"):
        store.match(CHAIN)


def test_a_store_that_cannot_be_opened_leaves_no_thread(filesystem: MemoryFileSystem) -> None:
    with pytest.raises(StoreNotFound, match="no store at /nowhere"):
        KVStore.blocking("/nowhere")
    with pytest.raises(UnsupportedUrl):
        KVStore.blocking("s3://bucket/prefix")
    assert threads() == []


def test_a_forgotten_store_is_closed(filesystem: MemoryFileSystem, tmp_path: Path) -> None:
    KVStore.blocking(tmp_path)
    assert filesystem.closed
    assert threads() == []


def test_a_store_that_is_forgotten_on_its_own_thread_is_closed(filesystem: MemoryFileSystem, tmp_path: Path) -> None:
    filesystem.blocks = dict.fromkeys(CHAIN.keys, bytes(8))
    holder = [KVStore.blocking(tmp_path)]
    running = threads()
    assert holder[0].match(CHAIN) == 6
    loop = holder[0]._thread._loop
    loop.call_soon_threadsafe(holder.clear)
    for thread in running:
        thread.join(10)
    assert threads() == []
    assert holder == []
    assert filesystem.closed


def test_mistakes_of_a_caller_come_back_to_it(store: BlockingKVStore) -> None:
    with pytest.raises(InvalidArgument, match=r"^out has 5 bytes, must have 48$"):
        store.get_into(CHAIN, bytearray(5))
    store.put(CHAIN, BLOCKS)

    def fail(segment: int, blocks: int) -> None:
        raise ZeroDivisionError(segment)

    with pytest.raises(ZeroDivisionError, match="0"):
        store.get_into(CHAIN, bytearray(48), on_segment=fail)
    assert store.match(CHAIN) == 6


def test_a_callback_cannot_wait_for_its_own_thread(store: BlockingKVStore) -> None:
    store.put(CHAIN, BLOCKS)

    def call_back(segment: int, blocks: int) -> None:
        store.match(CHAIN)

    with pytest.raises(InvalidArgument, match=r"^a callback must not call the blocking store"):
        store.get_into(CHAIN, bytearray(48), on_segment=call_back)
    assert store.match(CHAIN) == 6


def test_many_threads_share_one_store(store: BlockingKVStore) -> None:
    def one(number: int) -> bytes:
        chain = Namespace("m", str(number), LAYOUT).chain(range(24))
        store.put(chain, np.full(48, number, dtype=np.uint8))
        out = bytearray(48)
        assert store.get_into(chain, out).blocks == 6
        return bytes(out)

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(1, 65))) == [bytes([number]) * 48 for number in range(1, 65)]


def test_closing_during_a_call_ends_the_call(filesystem: MemoryFileSystem, tmp_path: Path) -> None:
    store = KVStore.blocking(tmp_path)
    filesystem.stall = True
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(store.match, CHAIN)
        assert filesystem.stalled.wait(10)
        store.close()
        with pytest.raises(StoreClosed, match=r"^the store was closed during the call$"):
            running.result(10)
    assert filesystem.cancelled == 1


def test_an_interrupted_caller_leaves_nothing_running(store: BlockingKVStore, filesystem: MemoryFileSystem) -> None:
    class Interrupted(BaseException):
        pass

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise Interrupted

    def when_stalled() -> None:
        assert filesystem.stalled.wait(10)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)

    before = signal.signal(signal.SIGUSR1, interrupt)
    filesystem.stall = True
    killer = threading.Thread(target=when_stalled)
    try:
        killer.start()
        with pytest.raises(Interrupted):
            store.get_into(CHAIN, bytearray(48))
        assert filesystem.cancelled == 1
    finally:
        killer.join(10)
        signal.signal(signal.SIGUSR1, before)
    filesystem.stall = False
    assert store.match(CHAIN) == 0


SCRIPT = """
import asyncio, os, sys, threading
import kvstore.store
from kvstore import KVStore, Namespace, BlockLayout
from tests.support.memoryfs import MemoryRoots

roots = MemoryRoots()
kvstore.store.FileSystem = roots
filesystem = roots.add("/here")
chain = Namespace("m", "w", BlockLayout.opaque(8, 4)).chain(range(24))
store = KVStore.blocking("/here")
store.put(chain, bytes(48))
"""


def run(body: str) -> str:
    # Python 3.12 warns of every fork of a process with threads, which is what one test is about.
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", SCRIPT + body]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def test_an_open_store_is_closed_at_interpreter_exit() -> None:
    body = """
original = filesystem.close
async def close():
    await original()
    print("closed", flush=True)
filesystem.close = close
print(store.match(chain), flush=True)
"""
    assert run(body) == "6\nclosed\n"


def test_exit_does_not_wait_for_a_close_that_hangs() -> None:
    body = """
async def close():
    print("closing", flush=True)
    await asyncio.Event().wait()
filesystem.close = close
print("leaving", flush=True)
"""
    assert run(body) == "leaving\nclosing\n"


def test_exit_does_not_wait_for_a_loop_thread_that_hangs() -> None:
    body = """
entered = threading.Event()
def hang(segment, blocks):
    entered.set()
    threading.Event().wait()
threading.Thread(target=lambda: store.get_into(chain, bytearray(48), on_segment=hang), daemon=True).start()
assert entered.wait(10)
print("leaving", flush=True)
"""
    assert run(body) == "leaving\n"


def test_a_forked_child_is_refused_and_the_parent_goes_on() -> None:
    body = """
child = os.fork()
if child == 0:
    try:
        store.match(chain)
    except kvstore.ForkedStore as error:
        print(str(error).startswith(f"this store was opened by process {os.getppid()}, before a fork"), flush=True)
    store.close()
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
print(store.match(chain), filesystem.closed, flush=True)
"""
    assert run(body).splitlines() == ["True", "6 False"]
