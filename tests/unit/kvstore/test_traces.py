"""The trace reader: both forms, three ways of packing, and what it refuses."""

from __future__ import annotations

import gzip
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvstore import traces
from kvstore.traces import BLOCK_TOKENS, Request, TraceError, read_trace
from tests.support.traces import AGENT, SYNTHETIC, TraceFile


def row(tokens: int, *ids: int, timestamp: Any = 0, **more: Any) -> dict[str, Any]:
    return {"timestamp": timestamp, "input_length": tokens, "output_length": 1, "hash_ids": list(ids), **more}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., list[Request]]:
    """Write rows (or raw lines) as a trace and read it back."""

    def write_and_read(*rows: dict[str, Any] | str) -> list[Request]:
        path = tmp_path / "trace.jsonl"
        path.write_text("".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in rows))
        return list(read_trace(path))

    return write_and_read


# -- Forms -----------------------------------------------------------------------------------------------------------


def test_an_id_of_512_tokens_becomes_four_blocks_and_partial_blocks_are_left_out(read: Any) -> None:
    first, second = read(row(1000, 7, 9), row(1100, 7, 9, 3))
    assert first.id_tokens == 512
    assert first.ids == (0, 1)
    assert first.blocks == (0, 1, 2, 3, 4, 5, 6)
    assert second.blocks == (0, 1, 2, 3, 4, 5, 6, 7)


def test_an_id_of_128_tokens_is_a_block(read: Any) -> None:
    first, second = read(row(300, 40, 41), row(639, 40, 41, 50, 51))
    assert first.id_tokens == 128
    assert first.blocks == (0, 1)
    assert second.blocks == (0, 1, 2, 3)


def test_requests_that_both_forms_explain_wait_for_one_that_decides(read: Any) -> None:
    short, decisive = read(row(200, 5), row(513, 5, 6))
    assert (short.id_tokens, decisive.id_tokens) == (512, 512)
    assert (short.blocks, decisive.blocks) == ((0,), (0, 1, 2, 3))
    short, decisive = read(row(200, 5), row(513, 5, 6, 7, 8))
    assert (short.id_tokens, decisive.id_tokens) == (128, 128)
    assert (short.blocks, decisive.blocks) == ((0,), (0, 1, 2, 3))


def test_a_trace_that_nothing_decides_is_read_all_the_same(read: Any) -> None:
    assert [request.blocks for request in read(row(200, 5), row(128, 6), row(200, 5))] == [(0,), (1,), (0,)]
    assert read() == []


def test_a_prompt_below_a_block_has_none(read: Any) -> None:
    tiny, _ = read(row(100, 1), row(512, 2))
    assert tiny.blocks == ()
    assert tiny.tokens().shape == (0,)


def test_tokens_differ_exactly_where_blocks_do(read: Any) -> None:
    first, second = read(row(1024, 1, 2), row(1024, 1, 3))
    one, other = (request.tokens().reshape(-1, BLOCK_TOKENS) for request in (first, second))
    assert one.dtype == np.uint32
    assert (one == other).all(axis=1).tolist() == [True] * 4 + [False] * 4
    assert len(np.unique(one)) == one.size


def test_fields_that_may_be_absent(read: Any) -> None:
    (request,) = read({"timestamp": 12.5, "input_length": 512, "hash_ids": [1], "session": "a", "other": None})
    assert (request.timestamp_ms, request.output_tokens, request.session) == (12.5, 0, "a")


# -- Files -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trace", "requests", "tokens", "asked", "unique"),
    [(SYNTHETIC, 3_993, 61_194_628, 476_279, 165_035), (AGENT, 402, 2_629_813, 20_337, 1_314)],
    ids=["synthetic", "agent"],
)
def test_the_real_traces(trace: TraceFile, requests: int, tokens: int, asked: int, unique: int) -> None:
    found = list(read_trace(trace.path))
    assert len(found) == requests
    assert {request.id_tokens for request in found} == {trace.id_tokens}
    assert sum(request.input_tokens for request in found) == tokens
    blocks = [request.blocks for request in found]
    assert sum(map(len, blocks)) == asked
    assert len({block for numbers in blocks for block in numbers}) == unique


@pytest.mark.parametrize("pack", [lambda data: data, gzip.compress, lzma.compress], ids=["plain", "gzip", "xz"])
def test_packing_is_told_by_content(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "no-suffix"
    path.write_bytes(pack(json.dumps(row(512, 1)).encode() + b"\n\n"))
    assert [request.blocks for request in read_trace(str(path))] == [(0, 1, 2, 3)]


@pytest.mark.parametrize("pack", [gzip.compress, lzma.compress], ids=["gzip", "xz"])
def test_a_packed_file_that_was_cut_short_is_named(tmp_path: Path, pack: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "cut.jsonl"
    whole = pack(b"".join(json.dumps(row(512, number)).encode() + b"\n" for number in range(2_000)))
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TraceError, match=r"cut\.jsonl: damaged after line \d+"):
        list(read_trace(path))


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "noise"
    path.write_bytes(b"\xff\xfe\x00noise")
    with pytest.raises(TraceError, match="noise: damaged after line 0"):
        list(read_trace(path))


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        list(read_trace(tmp_path / "nothing"))


# -- Refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("second", "named"),
    [
        ("{", "line 2: no JSON"),
        ("[]", "line 2: no JSON object"),
        (row(512, 1, timestamp="now"), "timestamp is 'now', must be a number"),
        (row(512, 1, timestamp=-1), "timestamp is -1"),
        (row(512, 1, timestamp=float("nan")), "timestamp is nan"),
        (row(512.0, 1), "input_length is 512.0, must be a whole number"),  # type: ignore[arg-type]
        (row(True, 1), "input_length is True"),
        ({"timestamp": 0, "hash_ids": []}, "input_length is None"),
        (row(512, 1, output_length=-3), "output_length is -3"),
        (row(512, hash_ids="1"), "hash_ids must be a list"),
        (row(512, hash_ids=[1.0]), "hash_ids must be a list"),
        (row(512, 1, session=4), "session is 4, must be text"),
        (row(600, 1), "1 hash_ids for input_length 600"),
        (row(512, 1, 2), "2 hash_ids for input_length 512"),
        (row(1024, 2, 2), "hash id 2 follows another id than before"),
        (row(1024, 2, 1), "hash id 1 follows another id than before"),
    ],
)
def test_a_line_that_is_no_request_is_named(read: Any, second: dict[str, Any] | str, named: str) -> None:
    with pytest.raises(TraceError) as caught:
        read(row(512, 1), second)
    assert "trace.jsonl, line 2: " in str(caught.value)
    assert named in str(caught.value)
    assert caught.value.exit_code == 2


def test_more_blocks_than_tokens_can_tell_apart_are_refused(read: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_BLOCKS", 8)
    assert len(read(row(512, 1), row(512, 2))) == 2
    with pytest.raises(TraceError, match="line 3: more than 8 different blocks"):
        read(row(512, 1), row(512, 2), row(512, 3))
