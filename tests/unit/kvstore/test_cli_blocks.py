"""init, put, get, match: files to blocks and back, through the command line."""

from __future__ import annotations

import errno
import io
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from efs.cluster import read_store_config
from efs.osio import SystemIo
from kvstore.cli.session import pieces
from kvstore.layout import V41_FLASH
from tests.support.cli import ROOT, Outcome, environment, run, run_process, write_blocks, write_tokens
from tests.support.laidstore import lay_store

pytestmark = pytest.mark.usefixtures("patient")

BLOCK_BYTES = 4096
BLOCK = ("--block-bytes", str(BLOCK_BYTES))


@pytest.fixture
def store(tmp_path: Path) -> Path:
    root = tmp_path / "store"
    lay_store(str(root), [])
    return root


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    """700 tokens: five full blocks and a rest."""
    return write_tokens(tmp_path / "tokens.txt", random.Random(1).choices(range(1 << 32), k=700))


@pytest.fixture
def data() -> bytes:
    return random.Random(2).randbytes(5 * BLOCK_BYTES)


@pytest.fixture
def blocks(tmp_path: Path, data: bytes) -> str:
    return write_blocks(tmp_path / "blocks.bin", data)


def put(store: Path, tokens: str, blocks: str, *more: str) -> Outcome:
    return run("put", "--tokens", tokens, "--blocks", blocks, *BLOCK, "--json", *more, store=store)


def get(store: Path, tokens: str, output: Path, *more: str) -> Outcome:
    return run("get", "--tokens", tokens, "--output", str(output), *BLOCK, "--json", *more, store=store)


# -- init -----------------------------------------------------------------------------------------------------------


def test_init_makes_a_store_of_the_given_capacity_and_warns_about_one_device(tmp_path: Path) -> None:
    root = tmp_path / "store"
    done = run("init", str(root), "--capacity", "0.1GB", "--durability", "power")
    assert done.code == 0
    assert "one device" in done.err
    config = read_store_config(SystemIo(), str(root))
    assert (config.capacity_bytes, config.durability) == (100_000_000, "power")
    assert run("status", store=root).code == 0


def test_init_takes_twelve_node_directories_and_a_root(tmp_path: Path) -> None:
    nodes = [str(tmp_path / f"disk{index}") for index in range(12)]
    done = run("init", "--store", str(tmp_path / "store"), "--capacity", "120MiB", "--json", *nodes)
    assert done.code == 0
    assert read_store_config(SystemIo(), str(tmp_path / "store")).node_paths == tuple(nodes)
    assert done.document()["capacity_bytes"] == 120 << 20


def test_init_takes_the_root_from_the_environment_and_capacity_from_a_setting(tmp_path: Path) -> None:
    root = tmp_path / "store"
    assert run("--set", "capacity=120MiB", "init", store=root).code == 0
    assert read_store_config(SystemIo(), str(root)).capacity_bytes == 120 << 20


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--capacity", "1e3"), "'1e3'"),
        (("--capacity", "-1"), "'-1'"),
        (("--capacity", "0"), "'0'"),
        (("--capacity", "abc"), "'abc'"),
        (("--capacity", "10G"), "'10G'"),
        (("--capacity", "10 XB"), "XB"),
        (("--capacity", "1MB"), "smallest capacity"),
        ((), "--capacity"),
        (("--capacity", "1GiB", "--durability", "eventual"), "eventual"),
        (("--capacity", "1GiB", "--extent-bytes", "1000"), "extent_bytes"),
        (("--capacity", "1GiB", "--store", "/elsewhere"), "/elsewhere"),
        (("--capacity", "1GiB", "another"), "2 paths"),
    ],
)
def test_init_refuses_a_wrong_request_and_makes_nothing(tmp_path: Path, words: tuple[str, ...], named: str) -> None:
    done = run("init", str(tmp_path / "store"), *words)
    assert done.code == 2
    assert named in done.error_line
    assert not (tmp_path / "store").exists()


def test_init_refuses_a_directory_that_is_not_empty_and_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("mine")
    done = run("init", str(tmp_path), "--capacity", "120MiB")
    assert done.code == 2
    assert str(tmp_path) in done.error_line
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


@pytest.mark.parametrize("words", [("init",), ("cluster", "init", "--listen", "unix")])
def test_an_init_that_fails_leaves_nothing_so_that_the_next_one_can_be_made(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    root = tmp_path / "new" / "store"
    done = run(*words, str(root), "--capacity", "8388607TB")
    assert done.code == 8
    assert str(root) in done.error_line
    assert list(tmp_path.iterdir()) == []
    assert run(*words, str(root), "--capacity", "120MiB").code == 0


def test_a_cluster_whose_description_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_words: object, **_named: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "cluster.toml")

    monkeypatch.setattr("kvstore.cli.cluster_cmd.write_cluster", refused)
    assert run("cluster", "init", str(tmp_path / "root"), "--listen", "unix", "--capacity", "120MiB").code == 8
    assert list(tmp_path.iterdir()) == []


def test_decimal_and_binary_units_differ(tmp_path: Path) -> None:
    for unit, size in (("100MB", 100 * 10**6), ("100MiB", 100 * 2**20)):
        root = tmp_path / unit
        assert run("init", str(root), "--capacity", unit).code == 0
        assert read_store_config(SystemIo(), str(root)).capacity_bytes == size


# -- put, match, get ------------------------------------------------------------------------------------------------


def test_blocks_come_back_as_they_were_put(store: Path, tokens: str, blocks: str, data: bytes, tmp_path: Path) -> None:
    stored = put(store, tokens, blocks)
    assert (stored.code, stored.document()["acked"], stored.document()["already"]) == (0, 5, 0)
    again = put(store, tokens, blocks).document()
    assert (again["acked"], again["already"], again["failed"]) == (0, 5, 0)
    matched = run("match", "--tokens", tokens, *BLOCK, "--json", store=store).document()
    assert (matched["blocks"], matched["full_blocks"], matched["matched_tokens"], matched["tokens"]) == (5, 5, 640, 700)
    assert len(set(matched["keys"])) == 5
    fetched = get(store, tokens, tmp_path / "out.bin")
    assert (fetched.code, fetched.document()["blocks"], fetched.document()["bytes"]) == (0, 5, len(data))
    assert (tmp_path / "out.bin").read_bytes() == data


def test_strict_match_and_plain_text_answers(store: Path, tokens: str, blocks: str) -> None:
    put(store, tokens, blocks)
    done = run("match", "--tokens", tokens, *BLOCK, "--strict", "--keys", store=store)
    first, *keys = done.out.splitlines()
    assert first == "5 of 5 full blocks, 640 of 700 tokens"
    assert all(len(key) == 64 for key in keys)
    assert len(keys) == 5


def test_two_nodes_away_still_give_every_block(
    store: Path, tokens: str, blocks: str, data: bytes, tmp_path: Path
) -> None:
    put(store, tokens, blocks)
    shutil.rmtree(store / "nodes" / "00")
    shutil.rmtree(store / "nodes" / "01")
    fetched = get(store, tokens, tmp_path / "out.bin")
    assert (fetched.code, fetched.document()["blocks"]) == (0, 5)
    assert fetched.document()["rebuilt"] > 0
    assert (tmp_path / "out.bin").read_bytes() == data


def test_three_nodes_away_is_a_clean_miss_with_exit_code_1(
    store: Path, tokens: str, blocks: str, tmp_path: Path
) -> None:
    put(store, tokens, blocks)
    for index in range(3):
        shutil.rmtree(store / "nodes" / f"{index:02}")
    fetched = get(store, tokens, tmp_path / "out.bin")
    assert (fetched.code, fetched.document()["blocks"], fetched.document()["asked"]) == (1, 0, 5)
    assert (tmp_path / "out.bin").read_bytes() == b""
    failed = put(store, tokens, blocks)
    assert (failed.code, failed.document()["failed"]) == (1, 5)
    assert run("match", "--tokens", tokens, *BLOCK, "--json", store=store).document()["blocks"] == 0


def test_a_hole_ends_what_is_fetched(store: Path, tokens: str, data: bytes, tmp_path: Path) -> None:
    head = write_blocks(tmp_path / "head.bin", data[: 2 * BLOCK_BYTES])
    tail = write_blocks(tmp_path / "tail.bin", data[3 * BLOCK_BYTES :])
    assert put(store, tokens, head, "--count", "2").document()["acked"] == 2
    assert put(store, tokens, tail, "--first", "3").document()["acked"] == 2
    fetched = get(store, tokens, tmp_path / "out.bin")
    assert (fetched.code, fetched.document()["blocks"]) == (1, 2)
    assert (tmp_path / "out.bin").read_bytes() == data[: 2 * BLOCK_BYTES]
    behind = get(store, tokens, tmp_path / "out.bin", "--first", "3", "--count", "2")
    assert behind.code == 0
    assert (tmp_path / "out.bin").read_bytes() == data[3 * BLOCK_BYTES :]


@pytest.mark.parametrize(
    "other",
    [
        ("--model", "another"),
        ("--weights", "another"),
        ("--lora", "x"),
        ("--salt", "x"),
        ("--salt", ""),
        ("--block-bytes", "8192"),
        ("--block-tokens", "64"),
    ],
)
def test_whatever_changes_the_bytes_changes_the_keys(
    store: Path, tokens: str, blocks: str, other: tuple[str, str]
) -> None:
    put(store, tokens, blocks)
    words = [*BLOCK, *other] if other[0] != "--block-bytes" else list(other)
    assert run("match", "--tokens", tokens, *words, "--json", store=store).document()["blocks"] == 0


def test_a_tenants_blocks_are_found_by_that_tenant_only(store: Path, tokens: str, blocks: str) -> None:
    assert run("tenant", "add", "acme", store=store).code == 0
    assert run("tenant", "add", "other", store=store).code == 0
    assert put(store, tokens, blocks, "--tenant", "acme").document()["acked"] == 5

    def found(*more: str) -> int:
        return int(run("match", "--tokens", tokens, *BLOCK, "--json", *more, store=store).document()["blocks"])

    assert found("--tenant", "acme") == 5
    assert found("--tenant", "other") == 0
    assert found() == 0
    assert run("tenant", "rotate", "acme", "--yes", store=store).code == 0
    assert found("--tenant", "acme") == 0
    unknown = run("match", "--tokens", tokens, *BLOCK, "--tenant", "nobody", store=store)
    assert unknown.code == 2
    assert "nobody" in unknown.error_line


def test_a_known_layout_is_used_by_name(store: Path, tmp_path: Path) -> None:
    data = random.Random(3).randbytes(2 * V41_FLASH.block_bytes)
    blocks = write_blocks(tmp_path / "v41.bin", data)
    text = tmp_path / "text"
    text.write_bytes(b"x" * 300)
    words = ("--text", str(text), "--layout", "v41-flash")
    assert run("put", *words, "--blocks", blocks, store=store).code == 0
    assert run("get", *words, "-o", str(tmp_path / "out"), store=store).code == 0
    assert (tmp_path / "out").read_bytes() == data, "segments are put back into block order"


def test_standard_output_carries_the_bytes_alone(store: Path, tokens: str, blocks: str, data: bytes) -> None:
    put(store, tokens, blocks)
    done = run_process("get", "--tokens", tokens, "--output", "-", *BLOCK, store=store)
    assert done.code == 0
    assert "5 of 5 blocks" in done.err
    assert done.raw == data


def test_a_fifo_gets_the_bytes_and_stays_a_fifo(
    store: Path, tokens: str, blocks: str, data: bytes, tmp_path: Path
) -> None:
    put(store, tokens, blocks)
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    try:
        assert get(store, tokens, fifo).code == 0
        assert stat.S_ISFIFO(fifo.lstat().st_mode)
        assert os.read(reader, 2 * len(data)) == data
    finally:
        os.close(reader)


def test_a_link_is_followed_and_an_old_file_keeps_its_mode(
    store: Path, tokens: str, blocks: str, data: bytes, tmp_path: Path
) -> None:
    put(store, tokens, blocks)
    (tmp_path / "away").mkdir()
    old, link = tmp_path / "away" / "old.bin", tmp_path / "link.bin"
    old.write_bytes(b"old")
    old.chmod(0o640)
    link.symlink_to("away/old.bin")
    assert get(store, tokens, link).code == 0
    assert link.is_symlink()
    assert old.read_bytes() == data
    assert stat.S_IMODE(old.stat().st_mode) == 0o640
    old.unlink()
    assert get(store, tokens, link).code == 0
    assert old.read_bytes() == data, "a link to nothing names the new file"
    assert [path.name for path in old.parent.iterdir()] == ["old.bin"]


def test_a_new_file_is_for_its_owner_alone(store: Path, tokens: str, blocks: str, tmp_path: Path) -> None:
    put(store, tokens, blocks)
    assert get(store, tokens, tmp_path / "new.bin").code == 0
    assert stat.S_IMODE((tmp_path / "new.bin").stat().st_mode) == 0o600


@pytest.mark.parametrize(("name", "reason"), [(".", "Is a directory"), ("", "No such file"), ("new/", "No such file"),
                                              ("none/new", "No such file")])
def test_an_output_that_is_no_file_is_refused_before_the_store_is_opened(
    tokens: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    done = run("get", "--tokens", tokens, "--output", name, *BLOCK, store="nowhere")
    assert done.code == 2
    assert reason in done.error_line
    assert name in done.error_line


def test_an_error_leaves_the_old_file_and_nothing_beside_it(store: Path, tokens: str, tmp_path: Path) -> None:
    old = tmp_path / "kept" / "old.bin"
    old.parent.mkdir()
    old.write_bytes(b"old")
    assert get(store, tokens, old, "--first", "99").code == 2
    assert old.read_bytes() == b"old"
    assert list(old.parent.iterdir()) == [old]


_IN_A_WRITE = """
import sys, time
from kvstore.cli import get_cmd, main
def hang(*_):
    print("there", file=sys.stderr, flush=True)
    time.sleep(60)
get_cmd._write = hang
main()
"""
_IN_A_CALL = """
import asyncio, sys
from kvstore.cli import main
from kvstore.store import KVStore
async def hang(*_):
    print("there", file=sys.stderr, flush=True)
    await asyncio.sleep(60)
KVStore.get_into = hang
main()
"""


@pytest.mark.parametrize(("program", "number", "code"), [
    (_IN_A_WRITE, signal.SIGTERM, 143), (_IN_A_CALL, signal.SIGTERM, 143), (_IN_A_CALL, signal.SIGINT, 130)])
def test_a_fetch_that_is_told_to_end_leaves_nothing_behind(
    store: Path, tokens: str, tmp_path: Path, program: str, number: int, code: int
) -> None:
    place = tmp_path / "place"
    place.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", program, "get", "--tokens", tokens, "--output", str(place / "out"), *BLOCK],
        cwd=ROOT, env=environment(store), stderr=subprocess.PIPE,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.default_int_handler))
    assert process.stderr is not None
    assert process.stderr.readline() == b"there\n"
    assert [path.suffix for path in place.iterdir()] == [".partial"]
    process.send_signal(number)
    _, said = process.communicate(timeout=30)
    assert process.returncode == code
    assert b"Traceback" not in said
    assert list(place.iterdir()) == []


def test_a_large_file_goes_in_pieces(store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstore.cli.put_cmd.STAGING_PIECE_BYTES", 3 * BLOCK_BYTES)
    monkeypatch.setattr("kvstore.cli.get_cmd.STAGING_PIECE_BYTES", 4 * BLOCK_BYTES)
    tokens = write_tokens(tmp_path / "many.txt", range(128 * 20))
    data = random.Random(4).randbytes(20 * BLOCK_BYTES)
    blocks = write_blocks(tmp_path / "many.bin", data)
    assert put(store, tokens, blocks).document()["acked"] == 20
    assert get(store, tokens, tmp_path / "out.bin").document()["blocks"] == 20
    assert (tmp_path / "out.bin").read_bytes() == data


@pytest.mark.parametrize(
    ("blocks", "block_bytes", "expected"),
    [
        (0, 10, []),
        (5, 10, [(0, 5)]),
        (130, 1, [(0, 64), (64, 128), (128, 130)]),
        (3, 1000, [(0, 1), (1, 2), (2, 3)]),
    ],
)
def test_pieces_are_whole_runs_where_they_are_large(
    blocks: int, block_bytes: int, expected: list[tuple[int, int]]
) -> None:
    assert pieces(blocks, block_bytes, 100) == expected


# -- Token files ----------------------------------------------------------------------------------------------------


def test_every_token_format_makes_the_same_keys(store: Path, tmp_path: Path) -> None:
    ids = random.Random(5).choices(range(1 << 32), k=260)
    array = np.array(ids, np.uint32)
    (tmp_path / "a.u32").write_bytes(array.astype("<u4").tobytes())
    np.save(tmp_path / "a.npy", array)
    (tmp_path / "a.json").write_text(str(ids))
    (tmp_path / "a.csv").write_text(",\n".join(map(str, ids)))
    data = random.Random(6).randbytes(2 * BLOCK_BYTES)
    stored = put(store, write_tokens(tmp_path / "a.txt", ids), write_blocks(tmp_path / "b", data))
    assert stored.document()["acked"] == 2
    for name in ("a.u32", "a.npy", "a.json", "a.csv"):
        assert run("match", "--tokens", str(tmp_path / name), *BLOCK, "--json", store=store).document()["blocks"] == 2
    piped = run_process("match", "--tokens", "-", *BLOCK, "--json", store=store, stdin=str(ids).encode())
    assert piped.document()["blocks"] == 2


@pytest.mark.parametrize("data", [b"PK\x03\x04" + b"garbage" * 10, b"", b"\x93NUMPY\x01\x00\x04\x00((((",
                                  b"PK\x05\x06" + bytes(18)])
def test_a_file_that_is_no_array_is_refused(store: Path, tmp_path: Path, data: bytes) -> None:
    (tmp_path / "bad.npy").write_bytes(data)
    done = run("match", "--tokens", str(tmp_path / "bad.npy"), *BLOCK, store=store)
    assert done.code == 2
    assert "bad.npy: not a NumPy array: " in done.error_line


def test_text_is_its_bytes_as_tokens(store: Path, tmp_path: Path) -> None:
    text = "prefix caching, naïvely. " * 20
    (tmp_path / "text").write_text(text, encoding="utf-8")
    ids = list(text.encode())
    count = len(ids) // 128
    blocks = write_blocks(tmp_path / "b", random.Random(7).randbytes(count * BLOCK_BYTES))
    assert run("put", "--text", str(tmp_path / "text"), "--blocks", blocks, *BLOCK, store=store).code == 0
    listed = write_tokens(tmp_path / "ids.txt", ids)
    assert run("match", "--tokens", listed, *BLOCK, "--json", store=store).document()["blocks"] == count


def test_fewer_tokens_than_a_block_match_nothing(store: Path, tmp_path: Path) -> None:
    short = write_tokens(tmp_path / "short.txt", range(127))
    done = run("match", "--tokens", short, *BLOCK, "--json", store=store).document()
    assert (done["full_blocks"], done["blocks"], done["tokens"]) == (0, 0, 127)


def npy(array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


@pytest.mark.parametrize(
    ("name", "content", "named"),
    [
        ("t.txt", b"1 2 three", "token 2 is 'three'"),
        ("t.txt", b"1 -2", "token 1 is '-2'"),
        ("t.txt", b"4294967296", "token 0 is '4294967296'"),
        ("t.txt", b"1 2.0", "token 1 is '2.0'"),
        ("t.txt", b"\xff\xfe", "token 0"),
        ("t.u32", b"12345", "5 bytes"),
        ("t.npy", b"garbage", "not a NumPy array"),
        ("t.npy", npy(np.zeros((2, 2), np.int64)), "one-dimensional"),
        ("t.npy", npy(np.zeros(3)), "integers"),
        ("t.npy", npy(np.array([1, -1])), "token 1 is -1"),
        ("t.npy", npy(np.array([1 << 32], np.uint64)), "token 0 is 4294967296"),
    ],
)
def test_a_wrong_token_file_is_named_with_what_is_wrong(
    store: Path, tmp_path: Path, name: str, content: bytes, named: str
) -> None:
    (tmp_path / name).write_bytes(content)
    done = run("match", "--tokens", str(tmp_path / name), *BLOCK, store=store)
    assert done.code == 2
    assert str(tmp_path / name) in done.error_line
    assert named in done.error_line


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--tokens", "T", "--blocks", "/nowhere"), "/nowhere"),
        (("--tokens", "/nowhere", "--blocks", "B"), "/nowhere"),
        (("--blocks", "B"), "--tokens"),
        (("--tokens", "T", "--text", "T", "--blocks", "B"), "--text"),
        (("--tokens", "T", "--blocks", "B", "--count", "4"), "20480 bytes, 4 blocks of 4096 are 16384"),
        (("--tokens", "T", "--blocks", "B", "--first", "1"), "4 blocks"),
        (("--tokens", "T", "--blocks", "B", "--first", "6"), "5 full blocks"),
        (("--tokens", "T", "--blocks", "B", "--first", "-1"), "negative"),
        (("--tokens", "T", "--blocks", "B", "--deadline-ms", "0"), "put_deadline_ms"),
        (("--tokens", "T", "--blocks", "B", "--deadline-ms", "1e3"), "put_deadline_ms"),
        (("--tokens", "T", "--blocks", "B", "--layout", "v41-flash"), "--layout"),
        (("--tokens", "T", "--blocks", "B", "--block-tokens", "0"), "block_tokens"),
    ],
)
def test_a_wrong_put_is_refused_and_stores_nothing(
    store: Path, tokens: str, blocks: str, words: tuple[str, ...], named: str
) -> None:
    done = run(
        "put",
        *BLOCK,
        *(word.replace("T", tokens) if word == "T" else blocks if word == "B" else word for word in words),
        store=store,
    )
    assert done.code == 2
    assert named in done.error_line
    assert run("status", "--json", store=store).document()["blocks"] == 0


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--block-bytes", "0"), "--block-bytes"),
        (("--block-bytes", "1GiB"), "block_bytes"),
        (("--block-bytes", "4K"), "'4K'"),
        (("--layout", "nosuch"), "nosuch"),
        ((), "--layout"),
        (("--layout", "v41-flash", "--block-tokens", "64"), "--block-tokens"),
    ],
)
def test_a_wrong_layout_is_refused(store: Path, tokens: str, words: tuple[str, ...], named: str) -> None:
    done = run("match", "--tokens", tokens, *words, store=store)
    assert done.code == 2
    assert named in done.error_line


def test_output_and_json_cannot_share_standard_output(store: Path, tokens: str) -> None:
    done = run("get", "--tokens", tokens, "-o", "-", *BLOCK, "--json", store=store)
    assert done.code == 2
    assert "--json" in done.error_line


def test_a_fetch_that_fails_leaves_no_file(store: Path, tokens: str, tmp_path: Path) -> None:
    done = run("get", "--tokens", tokens, "-o", str(tmp_path / "no" / "out"), *BLOCK, store=store)
    assert done.code == 2
    assert "no/out" in done.error_line
    refused = run("get", "--tokens", tokens, "-o", str(tmp_path / "out"), *BLOCK, "--first", "9", store=store)
    assert refused.code == 2
    assert not list(tmp_path.glob("out*"))
