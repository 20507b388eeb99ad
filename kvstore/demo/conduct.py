"""Conducts the demonstration: prepares a store, starts one process after the other, breaks things between them.

    1  model       found in the cache or converted
    2  baseline    one process, no store open: all turns, each prefilled from nothing
    3  turns       a process each: match, fetch, prefill the rest in the same 128-token chunks, put, answer
    4  faults      from a copy of the state after 3, the last turn once more in a process each: a fetched block zeroed
                   in memory (negative control), two nodes gone, two bytes flipped, once more after that, three nodes
                   gone

Prompts of 3 are made of the answers of 3; that they are those of 2 is what is checked. A process that fails ends the
demonstration with DemoFailed; a step that comes out wrong is reported, and the rest is done all the same.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, TypeVar

from efs.clock import Clock, SystemClock
from efs.errors import EfsError, InvalidArgument
from efs.fs import FileSystem
from efs.limits import GIB
from kvstore.demo.conversation import MAX_TURNS, TURNS, next_prompt, user_additions
from kvstore.demo.damage import copy_store, disk_bytes, flip_shard, remove_nodes, replace_store
from kvstore.demo.messages import (
    PrepareRequest,
    PrepareResult,
    RunRequest,
    RunResult,
    TurnResult,
    read_message,
    write_message,
)
from kvstore.demo.report import DemoReport, Exchange, Step
from kvstore.demo.source import MODEL_NAME, cache_root, gguf_path, require_extras
from kvstore.demo.steps import Expected, differences, flips, lost_data_blocks, nodes_to_remove, whole_blocks

CAPACITY_BYTES: Final = 1 * GIB
"""Of the demonstration's own store; sparse, so that only what is stored takes space: about 110 MB after three turns."""
ANSWER_TOKENS: Final = 32
MAX_THREADS: Final = 8
"""More do not make a model of this size faster."""
WORKER_SECONDS: Final = 600.0
NOT_OURS: Final = "nodes were not removed and bytes not flipped: this store is not the demo's own"

Remark = Callable[[str], None]
T = TypeVar("T")


class DemoFailed(EfsError):
    """A process of the demonstration ended without a result; the message has its last line."""


def run(
    *,
    workdir: str | None = None,
    keep: bool = False,
    store: str | None = None,
    turns: int = 3,
    remark: Remark = lambda _text: None,
    clock: Clock | None = None,
    rng: random.Random | None = None,
) -> DemoReport:
    """Run the whole demonstration, two to three minutes on two cores.

    workdir: an absent or empty directory, else a temporary one; removed at the end unless `keep`. store: an existing
    store for the turns instead of one made for the occasion; it is used under keys of this run alone (drawn from
    `rng`), and it is not damaged, so the fault steps are left out. turns: 1 to 6. remark: takes a line for a person
    now and then. MissingExtra when packages are missing, DemoFailed when a process dies, InvalidArgument.
    """
    require_extras()
    if not 1 <= turns <= MAX_TURNS:
        raise InvalidArgument(f"turns is {turns}, must be 1 to {MAX_TURNS}")
    place = _make_place(workdir)
    try:
        salt = None if store is None else f"demo-{(rng or random.SystemRandom()).randbytes(8).hex()}"
        conductor = Conductor(place, gguf_path(), cache_root(), remark, clock or SystemClock(), salt)
        return conductor.conduct(store, turns, str(place) if keep else None)
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _make_place(workdir: str | None) -> Path:
    if workdir is None:
        return Path(tempfile.mkdtemp(prefix="kvstore-demo-"))
    place = Path(workdir)
    place.mkdir(parents=True, exist_ok=True, mode=0o700)
    if any(place.iterdir()):
        raise InvalidArgument(f"{place} is not empty; nothing was changed")
    return place.resolve()


@dataclass(slots=True)
class Conductor:
    """One demonstration in a directory of its own: the steps done so far. salt: of all chains in somebody's store."""

    place: Path
    gguf_file: Path
    cache: Path
    remark: Remark
    clock: Clock
    salt: str | None
    threads: int = field(default_factory=lambda: min(MAX_THREADS, len(os.sched_getaffinity(0))))
    processes: int = 0
    steps: list[Step] = field(default_factory=list)

    def conduct(self, store: str | None, turns: int, kept: str | None) -> DemoReport:
        started = self.clock.monotonic()
        self.remark("preparing the model (converted once, then cached) …")
        prepared = self.process("prepare", PrepareRequest(str(self.gguf_file), str(self.cache)), PrepareResult)
        how = "converted" if prepared.converted else "found in the cache"
        self.remark(f"{MODEL_NAME} {how} in {prepared.seconds:.1f} s")
        encode, decode = _tokenizer(Path(prepared.directory))
        additions = user_additions(encode, turns)
        baseline = self.baseline(prepared, additions)
        root = self.place / "store"
        if store is None:
            FileSystem.init(str(root), CAPACITY_BYTES)
        final = self.turns(prepared, additions, baseline, store or str(root))
        store_bytes = None
        if store is None:
            store_bytes = disk_bytes(root)
            self.faults(root, final, baseline)
        else:
            self.control(final, baseline)
        return DemoReport(
            model=MODEL_NAME, block_bytes=baseline.block_bytes, block_tokens=baseline.block_tokens,
            segments=baseline.segments, threads=self.threads, converted=prepared.converted,
            prepare_seconds=prepared.seconds, exchanges=_exchanges(baseline, decode), steps=tuple(self.steps),
            store_bytes=store_bytes, left_out=None if store is None else NOT_OURS, kept=kept,
            seconds=self.clock.monotonic() - started,
        )

    # -- The parts

    def baseline(self, prepared: PrepareResult, additions: list[list[int]]) -> RunResult:
        self.remark("without a store: every turn prefilled from nothing …")
        request = RunRequest(
            model=prepared.directory, weights=prepared.weights, threads=self.threads, prompt=additions[0],
            additions=additions[1:], answer_tokens=ANSWER_TOKENS,
        )
        result = self.process("converse", request, RunResult)
        for number, turn in enumerate(result.turns, 1):
            self.remark(f"  turn {number}: {turn.prefilled_tokens:,} tokens prefilled in {turn.prefill_seconds:.1f} s")
        return result

    def turns(self, prepared: PrepareResult, additions: list[list[int]], baseline: RunResult, store: str) -> RunRequest:
        """One process a turn; returns the request of the last one."""
        prompt: list[int] = additions[0]
        known = 0
        request = None
        for number, turn in enumerate(baseline.turns):
            if request is not None:
                prompt = next_prompt(prompt, self.steps[-1].found.answer, additions[number])
            request = RunRequest(
                model=prepared.directory, weights=prepared.weights, threads=self.threads, prompt=prompt, additions=[],
                answer_tokens=ANSWER_TOKENS, store=store, salt=self.salt, save=True, warm=self.salt is None,
            )
            full = len(prompt) // baseline.block_tokens
            expected = Expected(
                blocks=known, rebuilt=0, corrupt=0,
                prefilled_tokens=len(prompt) - known * baseline.block_tokens, acked=full - known,
            )
            what = "compute and put" if number == 0 else "from the store"
            self.step(f"turn {number + 1}: {what}", request, expected, turn, baseline.block_bytes)
            known = full
        assert request is not None
        return request

    def faults(self, root: Path, final: RunRequest, baseline: RunResult) -> None:
        """The last turn again and again, each time from the whole state and something broken."""
        turn = baseline.turns[-1]
        blocks = whole_blocks(len(final.prompt), baseline.block_tokens)
        keys = [bytes.fromhex(key) for key in self.steps[-1].found.keys][:blocks]
        rest = len(final.prompt) - blocks * baseline.block_tokens
        whole = self.place / "whole"
        copy_store(root, whole)
        self.control(final, baseline)

        gone = nodes_to_remove(keys, 2)
        replace_store(root, whole)
        remove_nodes(root, gone)
        self.step(
            f"nodes {_named(gone)} deleted", final,
            Expected(blocks, lost_data_blocks(keys, gone), 0, rest), turn, baseline.block_bytes)

        replace_store(root, whole)
        for flip in flips(keys):
            flip_shard(root, flip.node, keys[flip.block], flip.shard)
        self.step("2 shards: 1 byte flipped", final, Expected(blocks, 2, 2, rest, mended=2), turn, baseline.block_bytes)
        self.step("once more: both mended", final, Expected(blocks, 0, 0, rest), turn, baseline.block_bytes)

        gone = nodes_to_remove(keys, 3)
        replace_store(root, whole)
        remove_nodes(root, gone)
        full = len(final.prompt) // baseline.block_tokens
        # Promised before the damage: the fetch is made, and finds nothing that it may deliver.
        self.step(
            f"nodes {_named(gone)} deleted", replace(final, promised=blocks),
            Expected(0, 0, 0, len(final.prompt), failed=full), turn, baseline.block_bytes)

    def control(self, final: RunRequest, baseline: RunResult) -> None:
        """Negative control: without it, equal answers could mean that fetched bytes do not matter."""
        blocks = whole_blocks(len(final.prompt), baseline.block_tokens)
        zeroed = blocks // 2
        request = replace(final, save=False, zero_block=zeroed)
        expected = Expected(
            blocks, 0, 0, len(final.prompt) - blocks * baseline.block_tokens, same_answer=False)
        self.step(
            f"control: block {zeroed} zeroed", request, expected, baseline.turns[-1],
            baseline.block_bytes)

    # -- Processes

    def step(self, title: str, request: RunRequest, expected: Expected, turn: TurnResult, block_bytes: int) -> None:
        """Run one turn in a process of its own and compare it with the turn of the baseline."""
        result = self.process("converse", request, RunResult)
        found = result.turns[0]
        wrong = differences(expected, found, turn.answer, block_bytes)
        self.steps.append(Step(title, result.pid, expected, found, turn.prefill_seconds, wrong))
        loaded = found.get.blocks if found.get else 0
        verdict = "ok" if not wrong else "WRONG: " + "; ".join(wrong)
        self.remark(f"{title}: {loaded} blocks loaded, {found.prefilled_tokens:,} tokens prefilled: {verdict}")

    def process(self, task: str, request: object, kind: type[T]) -> T:
        """Start a worker, wait for it, read its result."""
        self.processes += 1
        asked = self.place / f"{self.processes:02d}-request.json"
        answered = self.place / f"{self.processes:02d}-result.json"
        write_message(asked, request)
        command = [sys.executable, "-m", "kvstore.demo.worker", task, str(asked), str(answered)]
        try:
            done = subprocess.run(
                command, env=_worker_environment(), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                errors="replace", timeout=WORKER_SECONDS, check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise DemoFailed(f"process {self.processes} ({task}) gave no result in {WORKER_SECONDS:.0f} s") from error
        if done.returncode != 0:
            lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or ["nothing on standard error"]
            raise DemoFailed(f"process {self.processes} ({task}) ended with {done.returncode}: {lines[-1]}")
        return read_message(answered, kind)


def _worker_environment() -> dict[str, str]:
    """Ours, with this package found where it was found here, and nothing fetched from anywhere.

    Threads of torch sleep while they wait: spinning ones take the cores away from the store and from everybody else.
    """
    packages = str(Path(__file__).resolve().parents[2])
    paths = [packages, *filter(None, [os.environ.get("PYTHONPATH")])]
    ours = {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_WAIT_POLICY": "PASSIVE"}
    return {**os.environ, **ours, "PYTHONPATH": os.pathsep.join(paths)}


def _tokenizer(directory: Path) -> tuple[Callable[[str], list[int]], Callable[[list[int]], str]]:
    """Encode and decode of the model's tokenizer. Imported here: a store without the extra has no tokenizers."""
    from tokenizers import Tokenizer

    loaded = Tokenizer.from_file(str(directory / "tokenizer.json"))

    def encode(text: str) -> list[int]:
        return list(loaded.encode(text, add_special_tokens=False).ids)

    def decode(tokens: list[int]) -> str:
        return str(loaded.decode(tokens))

    return encode, decode


def _exchanges(baseline: RunResult, decode: Callable[[list[int]], str]) -> tuple[Exchange, ...]:
    return tuple(
        Exchange(asked.question, decode(turn.answer), turn.prompt_tokens, turn.prefill_seconds)
        for asked, turn in zip(TURNS, baseline.turns, strict=False)
    )


def _named(nodes: tuple[int, ...]) -> str:
    return ", ".join(f"{node:02d}" for node in nodes)
