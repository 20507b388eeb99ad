"""What happens to an engine or its store between two rounds of a test, inside the engine's own process.

Actions: `kill_servers` n: SIGKILL to n server processes of the local set (two nodes each). `kill_all`. `corrupt` n:
every byte of the slabs of n nodes is turned over. `zero_page`: of every load the first page of each group is zeroed
after it was filled. `zero_chunk`: the same with a tier, of every stretch that is loaded. `fail_block` n: every fetch
that covers block n of a sequence delivers only what is before it. `evict` n: what is stored of block n and those
behind it is dropped after the question and before the load. `hang` verb: all servers stand still while the first
question (`match`) or fetch (`get_into`) lasts; what follows finds all nodes serving again. `abort` phase prompt: a
request for this prompt is aborted in a phase of its life. `reset`: vLLM resets the connector, as after a change of
weights. Those that patch the connector end with the round and are
counted: a test whose fault did not happen must fail.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from efs.nodedir import written_pid
from efs.osio import SystemIo
from efs.types import GetReport
from kvstore.connectors.paged.chunks import ChunkTransfers
from kvstore.connectors.paged.jobs import NO_PAGE, Span
from kvstore.connectors.paged.transfers import PageTransfers
from kvstore.keys import Chain
from kvstore.store import BlockingKVStore
from tests.support.waiting import eventually

MOST_STEPS = 10_000
HOLD_S = 60
DROP_MS = 30_000


class Faults:
    """See the module docstring."""

    def __init__(self, llm: LLM, settings: dict[str, Any] | None) -> None:
        self._llm = llm
        self._root = Path(settings["store"]) if settings else Path()
        self._injected = 0
        self._undo: list[Callable[[], None]] = []

    def take(self, action: str, *arguments: Any) -> None:
        getattr(self, f"_{action}")(*arguments)

    def end(self) -> int:
        """Faults that happened since the last end; patches are taken back."""
        for undo in self._undo:
            undo()
        self._undo.clear()
        injected, self._injected = self._injected, 0
        return injected

    def _kill_servers(self, count: int) -> None:
        for pid in self._servers()[:count]:
            os.kill(pid, signal.SIGKILL)
            assert eventually(partial(_ended, pid))
            self._injected += 1

    def _kill_all(self) -> None:
        self._kill_servers(len(self._nodes()))

    def _servers(self) -> list[int]:
        """Processes of the local set that are alive."""
        pids = {pid for node in self._nodes() if (pid := written_pid(SystemIo(), str(node))) is not None}
        return sorted(pid for pid in pids if not _ended(pid))

    def _nodes(self) -> list[Path]:
        return sorted((self._root / "nodes").iterdir())

    def _corrupt(self, count: int) -> None:
        for node in self._nodes()[:count]:
            for slab in (node / "slabs").iterdir():
                with slab.open("r+b") as file:
                    data = file.read()
                    file.seek(0)
                    file.write(bytes(byte ^ 0xFF for byte in data))
                self._injected += 1

    def _zero_page(self) -> None:
        load = PageTransfers._load_span

        def zeroed(transfers: PageTransfers, span: Span) -> None:
            load(transfers, span)
            page = next(page for page in span.pages if page != NO_PAGE)
            with torch.inference_mode():
                for rows in transfers._groups[span.group].pages._rows:
                    rows[page].zero_()
            self._injected += 1

        self._patch(PageTransfers, "_load_span", zeroed)

    def _zero_chunk(self) -> None:
        load = ChunkTransfers._load_piece

        def zeroed(transfers: ChunkTransfers, chain: Chain, slots: Sequence[int]) -> Sequence[bool]:
            there = load(transfers, chain, slots)
            transfers._slots[slots[0]] = 0
            self._injected += 1
            return there

        self._patch(ChunkTransfers, "_load_piece", zeroed)

    def _fail_block(self, block: int) -> None:
        fetch = BlockingKVStore.get_into

        def failing(store: BlockingKVStore, chain: Any, out: Any, **more: Any) -> GetReport:
            report = fetch(store, chain, out, **more)
            at = block - chain.start
            if not 0 <= at < len(chain):
                return report
            self._injected += 1
            return GetReport(blocks=at, ok=[True] * at + [False] * (len(chain) - at), rebuilt=0, hedged=0, corrupt=0,
                             missing=1, raced=0, bytes=at * chain.layout.block_bytes, seconds=0.0)

        self._patch(BlockingKVStore, "get_into", failing)

    def _evict(self, block: int) -> None:
        """In the first fetch that covers this block of a sequence, it and all behind it are dropped before."""
        fetch = BlockingKVStore.get_into

        def late(store: BlockingKVStore, chain: Any, out: Any, **more: Any) -> GetReport:
            at = block - chain.start
            if 0 <= at < len(chain) and not self._injected:
                drop = store._store.filesystem.drop(chain.keys[at:], deadline_ms=DROP_MS)
                self._injected += store._thread.call(drop) == len(chain) - at
            return fetch(store, chain, out, **more)

        self._patch(BlockingKVStore, "get_into", late)

    def _hang(self, verb: str) -> None:
        does = getattr(BlockingKVStore, verb)

        def hangs(store: BlockingKVStore, *arguments: Any, **more: Any) -> Any:
            if self._injected:
                return does(store, *arguments, **more)
            self._injected += 1
            pids = self._servers()
            try:
                for pid in pids:
                    os.kill(pid, signal.SIGSTOP)
                return does(store, *arguments, **more)
            finally:
                for pid in pids:
                    os.kill(pid, signal.SIGCONT)
                assert eventually(lambda: all(node.state == "serving" for node in store.nodes()))

        self._patch(BlockingKVStore, verb, hangs)

    def _reset(self) -> None:
        assert self._llm.reset_prefix_cache(reset_connector=True)
        self._injected += 1

    def _abort(self, phase: str, prompt: list[int]) -> None:
        """A request for this prompt is aborted in the middle of a question, a load, a save, or a prompt that is being
        computed; what it waits for goes on afterwards."""
        held, waiting = threading.Event(), threading.Event()
        verb = {"match": "match", "load": "get_into", "save": "put", "compute": "put"}[phase]
        does = getattr(BlockingKVStore, verb)

        def waits(store: BlockingKVStore, *arguments: Any, **more: Any) -> Any:
            waiting.set()
            if phase != "compute":
                held.wait(HOLD_S)
            return does(store, *arguments, **more)

        self._patch(BlockingKVStore, verb, waits)
        name = f"aborted-{phase}"
        engine = self._llm.llm_engine
        engine.add_request(name, {"prompt_token_ids": prompt}, SamplingParams(max_tokens=4, detokenize=False))
        for _ in range(MOST_STEPS):
            outputs = engine.step()
            assert not any(output.outputs[0].token_ids for output in outputs), "it was too late to abort it"
            if waiting.is_set():
                break
        assert waiting.is_set()
        engine.abort_request([name])
        engine.step()
        held.set()
        self._injected += 1
        self._undo.pop()()

    def _patch(self, owner: type, name: str, value: Any) -> None:
        was = getattr(owner, name)
        setattr(owner, name, value)
        self._undo.append(lambda: setattr(owner, name, was))


def _ended(pid: int) -> bool:
    """Gone, or only waiting to be collected."""
    return not os.path.exists(f"/proc/{pid}/exe")
