"""Commands beside a running owner: reading ones work, writing ones are refused with its process id."""

from __future__ import annotations

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from efs.findings import Finding
from efs.fsck import Fsck, Options
from efs.storeview import StoreView
from tests.support.cli import ROOT, environment, run, run_process, write_blocks, write_tokens
from tests.support.laidstore import lay_store

pytestmark = pytest.mark.usefixtures("patient")

OWNER = """
import asyncio, json, random, sys
from efs.metrics import CounterFile
from kvstore import BlockLayout, KVStore, Namespace

root, busy = sys.argv[1], sys.argv[2] == "busy"
layout = BlockLayout.opaque(65536, 16)
source = random.Random(5)

async def put(store):
    chain = Namespace("m", "w", layout).chain(source.choices(range(1 << 20), k=16 * 64))
    report = await store.put(chain, source.randbytes(64 * 65536))
    assert report.acked == 64, report

async def main():
    async with await KVStore.open(root) as store:
        await put(store)
        puts = 1
        say(puts)
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(None, sys.stdin.readline)
        while not asked.done():
            if busy:
                await put(store)
                puts += 1
            else:
                await asyncio.sleep(0.01)
        say(puts)

def say(puts):
    evicted = []
    for node in range(12):
        counters = CounterFile.open(f"{root}/nodes/{node:02}/counters", writable=False)
        evicted.append(counters.get("node_evicted"))
        counters.close()
    print(json.dumps({"puts": puts, "evicted": min(evicted)}), flush=True)

asyncio.run(main())
"""


class Owner:
    """A real process that owns the store; busy ones put until they are told to stop."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.pid = process.pid
        self.said = self._hear()

    def _hear(self) -> dict[str, int]:
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], 60)
        line = self._process.stdout.readline() if ready else ""
        assert line, "the owner said nothing"
        found: dict[str, int] = json.loads(line)
        return found

    def stop(self) -> dict[str, int]:
        """What it did while it ran."""
        assert self._process.stdin is not None
        self._process.stdin.write("stop\n")
        self._process.stdin.flush()
        last = self._hear()
        assert self._process.wait(60) == 0
        return last


@contextmanager
def owning(root: str, how: str) -> Iterator[Owner]:
    with subprocess.Popen(
        [sys.executable, "-c", OWNER, root, how],
        cwd=ROOT,
        env=environment(),
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as process:
        try:
            yield Owner(process)
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture
def root(tmp_path: Path) -> str:
    return lay_store(str(tmp_path / "store"), []).root


def test_reading_commands_work_beside_an_owner(root: str) -> None:
    with owning(root, "idle") as owner:
        seen = run("status", "--json", store=root).document()
        assert (seen["owner_pid"], seen["blocks"], seen["whole"]) == (owner.pid, 64, 64)
        assert {node["state"] for node in seen["nodes"]} == {"serving"}
        assert seen["counters"]["put_acked"] == 64
        keys = [block["key"] for block in run("ls", "--json", store=root).document()["blocks"]]
        assert len(keys) == 64
        assert run("inspect", keys[0], store=root).code == 0
        checked = run("fsck", "--deep", "--json", store=root)
        assert (checked.code, checked.document()["sums"]["beside_owner"]) == (0, True)
        for words in (("config",), ("tenant", "list")):
            assert run(*words, store=root).code == 0
        assert owner.stop()["puts"] == 1
    assert run("status", "--json", store=root).document()["owner_pid"] is None


def test_writing_commands_beside_an_owner_are_refused_with_its_pid(root: str, tmp_path: Path) -> None:
    tokens = write_tokens(tmp_path / "tokens", range(128))
    blocks = write_blocks(tmp_path / "blocks", bytes(4096))
    about = ("--tokens", tokens, "--block-bytes", "4096")
    with owning(root, "idle") as owner:
        for words in (
            ("put", *about, "--blocks", blocks),
            ("get", *about, "--output", str(tmp_path / "out")),
            ("match", *about),
            ("tenant", "add", "acme"),
        ):
            done = run_process(*words, store=root)
            assert done.code == 8, words
            assert f"process {owner.pid}" in done.error_line
        refused = run_process("init", "--capacity", "120MiB", store=root)
        assert refused.code == 2
        assert not (tmp_path / "out").exists()
        owner.stop()
    assert run_process("put", *about, "--blocks", blocks, store=root).code == 0


def test_fsck_in_a_loop_beside_puts_and_eviction_finds_nothing_false(root: str) -> None:
    """Fault 37. Small capacity, so that every put of the owner evicts what an earlier one stored."""
    found: list[Finding] = []
    seen_busy = 0
    with owning(root, "busy") as owner:
        started = owner.said
        for _ in range(8):
            with StoreView.open(root) as view:
                check = Fsck(view, Options(deep=True))
                found += check.run()
                seen_busy += check.sums.beside_owner and check.sums.records > 0
        done = owner.stop()
    assert found == []
    assert seen_busy == 8
    assert done["puts"] > started["puts"] + 8, "the owner put all the while"
    assert done["evicted"] > 0, "and evicted"
    assert run("fsck", "--deep", store=root).code == 0, "and what it left is clean"
