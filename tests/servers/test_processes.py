"""`kvstore node serve` and `kvstore cluster` as real processes: starting, refusing, ending, and what they hold."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from efs.clock import Deadline, SystemClock
from efs.contract import PURGED
from efs.endpoint import parse_endpoint
from efs.errors import NodeUnavailable
from efs.handshake import Hello, Role
from efs.link import RemotePlace
from efs.metrics import CounterFile
from efs.nodedir import read_boot, read_config
from efs.osio import SystemIo
from efs.remote import RemoteNode
from efs.tombstones import write_tombstones
from efs.wire import MAX_FRAME_BYTES, Kind, encode_frame
from tests.support.cli import run, run_process
from tests.support.rawclient import NONCE, RawClient
from tests.support.records import LARGE, Records, make_records
from tests.support.servers import ServerProcess, short_directory
from tests.support.waiting import came_true

CAPACITY = "600MiB"
NODE = 4


@pytest.fixture(scope="module")
def made() -> Iterator[Path]:
    with made_cluster() as root:
        yield root


@contextmanager
def made_cluster() -> Iterator[Path]:
    """A cluster on disk, made by the command; nothing is served."""
    with short_directory() as base:
        outcome = run("--json", "cluster", "init", str(base / "c"), "--capacity", CAPACITY, "--listen", "unix")
        assert outcome.code == 0, outcome.err
        document = outcome.document()
        assert document["cluster"] == str(base / "c" / "cluster.toml")
        assert len(document["nodes"]) == len(document["addresses"]) == 12
        yield base / "c"


@pytest.fixture
def fresh() -> Iterator[Path]:
    with made_cluster() as root:
        yield root


def node_path(root: Path, index: int = NODE) -> str:
    return str(root / "nodes" / f"{index:02d}")


@pytest.fixture
def server(made: Path) -> Iterator[ServerProcess]:
    process = ServerProcess([node_path(made)], f"unix:{made}/sockets/{NODE:02d}")
    process.start()
    yield process
    if process.running:
        process.kill()


def place_of(root: Path, process: ServerProcess, role: Role = Role.OPERATOR) -> RemotePlace:
    config = read_config(SystemIo(), node_path(root))
    return RemotePlace(parse_endpoint(process.address), config.place.cluster_id, config.node_id, NODE, role)


async def connect(root: Path, process: ServerProcess) -> RemoteNode:
    return await RemoteNode.open(place_of(root, process), SystemClock(), CounterFile.in_memory(), 20_000)


def soon(milliseconds: int = 20_000) -> Deadline:
    return Deadline.after_ms(SystemClock(), milliseconds)


def records_of(root: Path, seed: int, count: int = 64) -> Records:
    return make_records(count, NODE, seed=seed, shape=LARGE)


# -- Starting --------------------------------------------------------------------------------------------------------


def test_a_line_for_each_node_says_what_is_served_where(made: Path) -> None:
    process = ServerProcess([node_path(made, 1), node_path(made, 2)], f"unix:{made}/both")
    process.start()
    assert [line["node"] for line in process.lines] == [1, 2]
    assert all(line["addresses"] == [f"unix:{made}/both"] and line["pid"] == process.pid for line in process.lines)
    code, err = process.terminate()
    assert (code, err) == (0, "")
    assert not (made / "both").exists()


def test_a_second_owner_is_refused_with_the_pid_of_the_first(made: Path, server: ServerProcess) -> None:
    outcome = run_process("node", "serve", node_path(made), "--listen", f"unix:{made}/other")
    assert outcome.code == 8
    assert f"{node_path(made)} is owned by process {server.pid}" in outcome.error_line
    assert server.running


@pytest.mark.parametrize(
    ("words", "code", "why"),
    [
        (["--listen", "tcp:0.0.0.0:0"], 2, "needs a token file"),
        (["--listen", "udp:1.2.3.4:5"], 2, "must be unix:PATH or tcp:HOST:PORT"),
        (["--listen", "tcp:a..b:7400"], 2, "the host 'a..b' is no name"),
        (["--listen", "unix:x", "--token-file", "/nowhere/token"], 8, "/nowhere/token"),
        (["--listen", "unix:x", "--operator-token-file", "x"], 2, "needs --token-file"),
        (["--listen", "unix:x", "--durability", "maybe"], 2, "must be process or power"),
        (["--listen", "unix:x", "--durability", "power"], 2, "serve it with --durability process"),
        (["--listen", "unix:/nowhere/x"], 8, "/nowhere/x"),
        ([], 2, "--listen"),
    ],
)
def test_what_cannot_be_served_is_one_line_and_an_exit_code(made: Path, words: list[str], code: int, why: str) -> None:
    outcome = run("node", "serve", node_path(made, 3), *words)
    assert outcome.code == code
    assert why in outcome.error_line


def test_a_directory_that_is_no_node_and_one_named_twice_are_refused(made: Path, tmp_path: Path) -> None:
    assert str(tmp_path) in run("node", "serve", str(tmp_path), "--listen", f"unix:{made}/x").error_line
    outcome = run("node", "serve", node_path(made, 3), node_path(made, 3), "--listen", f"unix:{made}/x")
    assert outcome.code == 2
    assert "named twice" in outcome.error_line


@pytest.mark.parametrize(("listen", "why"), [
    ("tcp:127.0.0.1:0", "with the port of node 0"), ("udp", "must be unix:PATH or tcp:HOST:PORT"),
    ("unix:x", "must be unix, or tcp:HOST:PORT"), ("tcp:127.0.0.1:70000", "the last one is 65535"),
    ("tcp:127.0.0.1:65530", "--listen tcp:127.0.0.1:65530: twelve ports from there on are needed"),
])
def test_a_cluster_that_cannot_be_listened_at_is_not_made(tmp_path: Path, listen: str, why: str) -> None:
    outcome = run("cluster", "init", str(tmp_path / "c"), "--capacity", CAPACITY, "--listen", listen)
    assert outcome.code == 2
    assert why in outcome.error_line
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(("listen", "token", "warned"), [
    ("tcp:10.0.0.7:7400", False, True), ("tcp:10.0.0.7:7400", True, False), ("tcp:127.0.0.1:7400", False, False),
])
def test_a_cluster_that_other_machines_reach_is_made_with_a_word_about_the_token_it_needs(
    tmp_path: Path, listen: str, token: bool, warned: bool
) -> None:
    words = ["--token-file", token_file(tmp_path)] if token else []
    outcome = run("--json", "cluster", "init", str(tmp_path / "c"), "--capacity", CAPACITY, "--listen", listen, *words)
    assert outcome.code == 0
    assert any("--token-file" in warning for warning in outcome.document()["warnings"]) == warned


def token_file(directory: Path, mode: int = 0o600, name: str = "token") -> str:
    path = directory / name
    path.write_text(f"{name} of 16 bytes")
    path.chmod(mode)
    return str(path)


def test_a_cluster_with_a_token_that_cannot_be_read_is_not_made(tmp_path: Path) -> None:
    words = ("cluster", "init", str(tmp_path / "c"), "--capacity", CAPACITY, "--listen", "unix", "--token-file")
    absent = run(*words, str(tmp_path / "absent"))
    assert (absent.code, str(tmp_path / "absent") in absent.error_line) == (8, True)
    open_to_all = run(*words, token_file(tmp_path, 0o644))
    assert (open_to_all.code, "chmod 600" in open_to_all.error_line) == (2, True)
    operators = ("--operator-token-file", str(tmp_path / "absent"))
    absent = run(*words, token_file(tmp_path), *operators)
    assert (absent.code, str(tmp_path / "absent") in absent.error_line) == (8, True)
    assert "needs --token-file" in run(*words[:-1], *operators).error_line
    assert not (tmp_path / "c").exists()


def test_operators_find_their_own_token_where_the_cluster_was_made_with_it() -> None:
    with short_directory() as base:
        root = base / "c"
        tokens = ("--token-file", token_file(base), "--operator-token-file", token_file(base, name="operators"))
        done = run("cluster", "init", str(root), "--capacity", CAPACITY, "--listen", "unix", *tokens)
        assert done.code == 0, done.err
        sockets = [f"unix:{root}/sockets/{index:02d}" for index in range(12)]
        more = [word for socket in sockets[1:] for word in ("--listen", socket)]
        process = ServerProcess([node_path(root, index) for index in range(12)], sockets[0], *more, *tokens)
        process.start()
        try:
            file = root / "cluster.toml"
            repaired = run("repair", store=file)
            assert repaired.code == 0, repaired.err
            text = file.read_text()
            file.write_text(text.replace("operator_token_file", "# operator_token_file"))
            refused = run("repair", store=file)
            assert "operator_token_file" in refused.error_line
        finally:
            assert process.terminate()[0] == 0


# -- Ending ----------------------------------------------------------------------------------------------------------


async def test_sigterm_answers_what_is_under_way_and_closes_the_node_clean(made: Path, server: ServerProcess) -> None:
    node = await connect(made, server)
    records = [records_of(made, seed) for seed in range(300, 340)]
    puts = [asyncio.create_task(node.put(some.batch(), soon())) for some in records]
    await asyncio.wait(puts, return_when=asyncio.FIRST_COMPLETED)
    server.signal(signal.SIGTERM)
    outcomes = await asyncio.gather(*puts, return_exceptions=True)
    answered = [outcome for outcome in outcomes if not isinstance(outcome, NodeUnavailable)]
    assert all(not isinstance(outcome, BaseException) and outcome.stored.all() for outcome in answered)
    assert answered
    assert server.abandon(30) == (0, "")
    boot = read_boot(SystemIo(), node_path(made))
    assert boot is not None
    assert boot.clean
    with pytest.raises(NodeUnavailable):
        await node.info(soon(1_000))
    server.start()
    assert await came_true(lambda: not node.suspect)
    for some, outcome in zip(records, outcomes, strict=True):
        if not isinstance(outcome, BaseException):
            assert (await node.look_up(some.keys, soon())).location.min() >= 0
    await node.close()


async def test_a_killed_server_keeps_what_it_acknowledged(made: Path, server: ServerProcess) -> None:
    node = await connect(made, server)
    records = records_of(made, 400)
    assert (await node.put(records.batch(), soon())).stored.all()
    server.kill()
    assert await came_true(lambda: node.suspect)
    with pytest.raises(NodeUnavailable):
        await node.look_up(records.keys, soon())
    server.start()
    assert await came_true(lambda: not node.suspect)
    table = await node.look_up(records.keys, soon())
    assert [row.tobytes() for row in table.digest] == list(records.digests)
    headers = await node.headers(table.location, table.generation, 2, soon())
    assert (headers == records.headers).all()
    await node.close()


async def test_a_stopped_server_is_suspect_and_its_calls_end_by_their_deadline(
    made: Path, server: ServerProcess
) -> None:
    node = await connect(made, server)
    await node.info(soon())
    server.signal(signal.SIGSTOP)
    with pytest.raises(NodeUnavailable, match="no answer by the deadline"):
        await node.info(soon(100))
    assert await came_true(lambda: node.suspect)
    server.signal(signal.SIGCONT)
    assert await came_true(lambda: not node.suspect)
    assert (await node.info(soon())).node_index == NODE
    await node.close()


async def test_a_node_refuses_what_its_store_has_purged(fresh: Path) -> None:
    tag = b"tenant-7"
    process = ServerProcess([node_path(fresh)], f"unix:{fresh}/sockets/{NODE:02d}")
    process.start()
    node = await connect(fresh, process)
    records = make_records(64, NODE, seed=9, shape=LARGE, tenant_tag=tag)
    assert (await node.put(records.batch(), soon())).stored.all()
    assert await node.tenant_bytes(soon()) == {tag: 64 * LARGE.slot_bytes}
    assert process.terminate()[0] == 0
    assert await came_true(lambda: node.suspect)
    write_tombstones(SystemIo(), str(fresh), {tag: frozenset()})
    process.start()
    assert await came_true(lambda: not node.suspect)
    assert await node.tenant_bytes(soon()) == {}
    outcome = await node.put(records.batch(), soon())
    assert not outcome.stored.any()
    assert outcome.why == PURGED
    await node.close()
    assert process.terminate()[0] == 0


# -- What a server holds ---------------------------------------------------------------------------------------------


def descriptors(process: ServerProcess) -> int:
    return len(os.listdir(f"/proc/{process.pid}/fd"))


def memory_bytes(process: ServerProcess, what: str = "VmRSS") -> int:
    (line,) = [row for row in Path(f"/proc/{process.pid}/status").read_text().splitlines() if row.startswith(what)]
    return int(line.split()[1]) * 1024


async def test_a_thousand_connections_and_garbage_leave_a_server_as_it_was(made: Path, server: ServerProcess) -> None:
    config = read_config(SystemIo(), node_path(made))
    endpoint = parse_endpoint(server.address)
    hello = Hello(config.place.cluster_id, config.node_id, NODE, Role.DATA.value, NONCE)
    seed = random.SystemRandom().randrange(1 << 32)
    print(f"seed {seed}")
    source = random.Random(seed)

    async def churn(times: int) -> None:
        for number in range(times):
            if number % 2:
                client = await RawClient.open(endpoint)
                await client.send(source.randbytes(source.randrange(1, 500)))
            else:
                client = await RawClient.admitted(endpoint, hello)
                frame = encode_frame(Kind.LOOK_UP, 1, source.randbytes(32 * 2_000), deadline_ms=1_000)
                await client.send(frame[: source.randrange(1, len(frame))], source.randbytes(200))
            client.close()

    node = await connect(made, server)
    await node.info(soon())
    open_before = descriptors(server)
    await churn(100)
    assert await came_true(lambda: descriptors(server) == open_before)
    memory_before = memory_bytes(server)
    await churn(1_000)
    assert (await node.info(soon())).node_index == NODE
    assert await came_true(lambda: descriptors(server) == open_before)
    assert memory_bytes(server, "VmHWM") - memory_before < 2 * MAX_FRAME_BYTES
    await node.close()


async def test_a_good_client_is_served_while_others_pour_garbage_in(made: Path, server: ServerProcess) -> None:
    endpoint = parse_endpoint(server.address)
    source = random.Random(3)
    stop = asyncio.Event()
    poured = 0

    async def pour() -> None:
        nonlocal poured
        while not stop.is_set():
            # The server may have no room for another connection just now.
            with suppress(OSError):
                client = await RawClient.open(endpoint)
                await client.send(source.randbytes(4_000))
                client.close()
                poured += 1
            await asyncio.sleep(0)

    node = await connect(made, server)
    records = records_of(made, 500)
    assert (await node.put(records.batch(), soon())).stored.all()
    pouring = [asyncio.create_task(pour()) for _ in range(4)]
    for _ in range(100):
        table = await node.look_up(records.keys, soon(5_000))
        assert [row.tobytes() for row in table.digest] == list(records.digests)
    stop.set()
    await asyncio.gather(*pouring)
    assert poured > 50
    assert not node.suspect
    await node.close()


# -- The whole -------------------------------------------------------------------------------------------------------


def test_commands_put_and_get_through_a_cluster_and_its_directory_is_a_store(fresh: Path, tmp_path: Path) -> None:
    """Twelve nodes in one process: `kvstore put`, `get`, `match` and `cluster status` by the file, `fsck` beside it."""
    made = fresh
    process = ServerProcess([node_path(made, index) for index in range(12)], f"unix:{made}/sockets/all")
    text = (made / "cluster.toml").read_text()
    whole = made / "whole.toml"
    for index in range(12):
        text = text.replace(f"unix:sockets/{index:02d}", "unix:sockets/all")
    whole.write_text(text)
    status = run("--json", "cluster", "status", str(whole))
    assert status.code == 1
    assert status.document()["nodes_serving"] == 0
    process.start()
    try:
        status = run("--json", "cluster", "status", str(whole))
        assert (status.code, status.document()["nodes_serving"]) == (0, 12)
        tokens, blocks, out = tmp_path / "tokens", tmp_path / "blocks", tmp_path / "out"
        tokens.write_text(" ".join(map(str, range(128 * 5))))
        data = np.random.default_rng(4).integers(0, 256, 5 * 113_920, np.uint8).tobytes()
        blocks.write_bytes(data)
        address = ["--layout", "v41-flash", "--model", "m", "--weights", "w", "--tokens", str(tokens)]
        put = run("put", *address, "--blocks", str(blocks), store=whole)
        assert put.code == 0, put.err
        assert run("match", *address, store=whole).code == 0
        got = run("get", *address, "--output", str(out), store=whole)
        assert got.code == 0, got.err
        assert out.read_bytes() == data
        assert run("fsck", store=made).code == 0
        assert run("tenant", "add", "acme", store=made).code == 0
        theirs = [*address, "--tenant", "acme"]
        assert run("put", *theirs, "--blocks", str(blocks), store=whole).code == 0
        purged = run("--json", "tenant", "purge", "acme", "--yes", store=whole)
        assert (purged.code, purged.document()["dropped"]) == (0, 5 * 12)
        assert run("get", *theirs, "--output", str(out), store=whole).code == 1
        for words in (["sweep"], ["repair"], ["scrub"], ["gc"]):
            done = run(*words, store=whole)
            assert done.code == 0, done.err
        assert run("ls", store=whole).code == 2
        whole.write_text(text.replace("upkeep_host", "upkeep_host = 'another'\n# "))
        assert "looked after on another" in run("sweep", store=whole).error_line
    finally:
        assert process.terminate()[0] == 0
    assert run("get", *address, "--output", str(out), store=made).code == 0
