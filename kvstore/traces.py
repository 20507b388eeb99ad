"""Request traces: what a serving system was asked, request by request, with ids in place of text. Pure but for reading.

A trace is a text file of one JSON object a line, plain or compressed (its first bytes tell: gzip, xz). A request has

    timestamp        ms since the start of the trace
    input_length     tokens of the prompt
    output_length    tokens generated, optional
    hash_ids         ids of the prompt's blocks, in order
    session          text, optional

In hash_ids equal ids are equal prefixes: an id always follows the same id. (One that does not makes the trace
unreadable: a cache model that knows blocks by id would count hits that no prefix cache can have.) Two forms are known:

- 512 tokens an id, the last id of a request for what is left (Mooncake);
- 128 tokens an id, full blocks only.

Which one a file has follows from the first request that only one of them explains; every request must then agree.

Blocks. A store keeps blocks of BLOCK_TOKENS tokens and full ones only, so a request has floor(input_length / 128) of
them. An id of 512 tokens is cut into its four blocks. Ids are numbered anew, in the order in which they come, so that a
block's number times 128 is a token id: two blocks have the same tokens only if they are the same block.
"""

from __future__ import annotations

import gzip
import json
import lzma
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final, TextIO

import numpy as np
from numpy.typing import NDArray

from efs.errors import EfsError

BLOCK_TOKENS: Final = 128
MAX_BLOCKS: Final = (1 << 32) // BLOCK_TOKENS
"""Different blocks of a trace: their tokens are 32-bit numbers."""
_GZIP: Final = b"\x1f\x8b"
_XZ: Final = b"\xfd7zXZ\x00"
_PARTIAL_LAST: Final = {512: True, 128: False}
"""Forms by the tokens of an id: whether the last id of a request may stand for fewer."""


class TraceError(EfsError):
    """A trace file that cannot be read or is no trace; the message names file and line."""

    exit_code = 2


@dataclass(frozen=True, slots=True)
class Request:
    """One request. `ids`: its hash_ids, numbered anew, each of `id_tokens` tokens (the last one perhaps fewer)."""

    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    id_tokens: int
    session: str | None

    @property
    def blocks(self) -> tuple[int, ...]:
        """Numbers of its full blocks of BLOCK_TOKENS tokens; equal numbers are equal prefixes."""
        parts = self.id_tokens // BLOCK_TOKENS
        full = self.input_tokens // BLOCK_TOKENS
        return tuple([number * parts + part for number in self.ids for part in range(parts)][:full])

    def tokens(self) -> NDArray[np.uint32]:
        """Token ids of the full blocks, different for each block number; (128 · blocks,)."""
        numbers = np.asarray(self.blocks, dtype=np.uint32)[:, None] * np.uint32(BLOCK_TOKENS)
        tokens: NDArray[np.uint32] = np.add(numbers, np.arange(BLOCK_TOKENS, dtype=np.uint32), dtype=np.uint32)
        return tokens.reshape(-1)


def read_trace(path: str | os.PathLike[str]) -> Iterator[Request]:
    """The requests of a trace file in their order. OSError when it cannot be opened; TraceError, also in the middle,
    for what is not as the module docstring says."""
    name = os.fspath(path)
    with _open(name) as lines:
        reader = _Reader(name)
        number = 0
        try:
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    yield from reader.take(number, line)
        except (EOFError, lzma.LZMAError, gzip.BadGzipFile, UnicodeDecodeError) as error:
            raise TraceError(f"{name}: damaged after line {number}: {error}") from error
        yield from reader.finish()


def _open(name: str) -> TextIO:
    with open(name, "rb") as file:
        magic = file.read(len(_XZ))
    if magic.startswith(_GZIP):
        return gzip.open(name, "rt", encoding="utf-8")
    if magic == _XZ:
        return lzma.open(name, "rt", encoding="utf-8")
    return open(name, encoding="utf-8")


@dataclass(frozen=True, slots=True)
class _Row:
    line: int
    timestamp_ms: float
    input_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    session: str | None


class _Reader:
    """Turns lines into requests. Rows wait until the form is known."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._numbers: dict[int, int] = {}
        self._before: list[int] = []
        self._waiting: list[_Row] = []
        self._forms = tuple(_PARTIAL_LAST)

    def take(self, line: int, text: str) -> Iterator[Request]:
        row = self._parse(line, text)
        self._forms = tuple(form for form in self._forms if _explains(form, row))
        if not self._forms:
            raise self._wrong(line, f"{len(row.ids)} hash_ids for input_length {row.input_tokens} : with the lines "
                                    "before, neither ids of 512 tokens with a partial last one nor full ones of 128")
        self._waiting.append(row)
        if len(self._forms) == 1:
            yield from self._release()

    def finish(self) -> Iterator[Request]:
        """What still waits because both forms explain all of it: then they give the same blocks, or none."""
        yield from self._release()

    def _release(self) -> Iterator[Request]:
        rows, self._waiting = self._waiting, []
        for row in rows:
            yield Request(row.timestamp_ms, row.input_tokens, row.output_tokens, self._renumbered(row), self._forms[-1],
                          row.session)

    def _renumbered(self, row: _Row) -> tuple[int, ...]:
        before, numbers = -1, []
        for own in row.ids:
            number = self._numbers.setdefault(own, len(self._numbers))
            if number == len(self._before):
                self._before.append(before)
                if (number + 1) * (self._forms[-1] // BLOCK_TOKENS) > MAX_BLOCKS:
                    raise self._wrong(row.line, f"more than {MAX_BLOCKS} different blocks")
            elif self._before[number] != before:
                raise self._wrong(row.line, f"hash id {own} follows another id than before")
            numbers.append(number)
            before = number
        return tuple(numbers)

    def _parse(self, line: int, text: str) -> _Row:
        try:
            row = json.loads(text)
        except ValueError as error:
            raise self._wrong(line, f"no JSON: {error}") from None
        if not isinstance(row, dict):
            raise self._wrong(line, "no JSON object")
        timestamp = self._number(line, row, "timestamp", (int, float))
        input_tokens = int(self._number(line, row, "input_length", (int,)))
        output_tokens = int(self._number(line, {"output_length": 0, **row}, "output_length", (int,)))
        ids, session = row.get("hash_ids"), row.get("session")
        if not isinstance(ids, list) or not all(type(own) is int for own in ids):
            raise self._wrong(line, "hash_ids must be a list of integers")
        if session is not None and not isinstance(session, str):
            raise self._wrong(line, f"session is {session!r}, must be text")
        return _Row(line, timestamp, input_tokens, output_tokens, tuple(ids), session)

    def _number(self, line: int, row: Mapping[str, object], name: str, kinds: tuple[type, ...]) -> float:
        number = row.get(name)
        if isinstance(number, (int, float)) and type(number) in kinds and 0 <= number < float("inf"):
            return number
        kind = "number" if float in kinds else "whole number"
        raise self._wrong(line, f"{name} is {number!r}, must be a {kind}, 0 or more")

    def _wrong(self, line: int, what: str) -> TraceError:
        return TraceError(f"{self._name}, line {line}: {what}")


def _explains(form: int, row: _Row) -> bool:
    tokens = row.input_tokens + (form - 1 if _PARTIAL_LAST[form] else 0)
    return len(row.ids) == tokens // form
