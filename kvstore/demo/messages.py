"""What the demonstration's processes say to each other: requests and results as JSON files, checked when read.

Result files are written by the worker under a temporary name and renamed, so one that exists is complete.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec

from efs.types import GetReport, PutReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class PrepareRequest:
    """Find or make the converted model."""

    gguf_file: str
    cache_root: str


@dataclass(frozen=True, slots=True)
class PrepareResult:
    """Where it is; see `kvstore.demo.model.Prepared`."""

    directory: str
    weights: str
    converted: bool
    seconds: float


@dataclass(frozen=True, slots=True)
class RunRequest:
    """Answer a prompt, and one more for each of `additions`, each turn with a cache of its own.

    store: None for a run that opens no store. warm: read its files into the page cache first. promised: fetch this
    many blocks without matching first. zero_block: after loading, overwrite this block of the cache with zeros. save:
    put the blocks that were computed. threads: of torch. salt: of the chain.
    """

    model: str
    weights: str
    threads: int
    prompt: list[int]
    additions: list[list[int]]
    answer_tokens: int
    store: str | None = None
    salt: str | None = None
    save: bool = False
    warm: bool = False
    promised: int | None = None
    zero_block: int | None = None


@dataclass(frozen=True, slots=True)
class TurnResult:
    """What one turn did. Seconds are wall time.

    prefilled_tokens: tokens that went through the model before the first answer token, counted at its embedding.
    load_seconds: match, fetch and copying into the cache. get: None when nothing was fetched; put: None when nothing
    was to be put. mended: shards that were put right while the store was open. logits: BLAKE2b of the logits that the
    first answer token was chosen from. keys: of the prompt's full blocks, hexadecimal.
    """

    prompt_tokens: int
    matched_blocks: int
    load_seconds: float
    get: GetReport | None
    prefilled_tokens: int
    prefill_seconds: float
    put: PutReport | None
    put_seconds: float
    mended: int
    answer: list[int]
    logits: str
    keys: list[str]


@dataclass(frozen=True, slots=True)
class RunResult:
    """One process: its turns, and the layout of its blocks."""

    pid: int
    block_bytes: int
    block_tokens: int
    segments: int
    turns: list[TurnResult]


def write_message(path: Path, message: object) -> None:
    making = path.with_suffix(".new")
    making.write_bytes(msgspec.json.encode(message))
    making.rename(path)


def read_message(path: Path, kind: type[T]) -> T:
    """Raises msgspec.ValidationError, one line, for what is not such a message."""
    return msgspec.json.decode(path.read_bytes(), type=kind)
