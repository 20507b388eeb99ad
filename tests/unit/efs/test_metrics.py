"""Counters: exact in the owner, visible at once in another process, and never a reason not to start."""

from __future__ import annotations

import os
import stat
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest

from efs.errors import FormatUnsupported, InvalidArgument, OpenFailed
from efs.metrics import COUNTERS, FILE_BYTES, MAGIC, CounterCollector, CounterFile

READER = """
import sys
from efs.metrics import CounterFile
counters = CounterFile.open(sys.argv[1], writable=False)
for line in sys.stdin:
    print(counters.get(line.strip()), sum(counters.snapshot().values()), flush=True)
"""


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "counters")


@pytest.fixture
def reader(path: str) -> Iterator[subprocess.Popen[str]]:
    CounterFile.open(path, writable=True).close()
    process = subprocess.Popen(
        [sys.executable, "-c", READER, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    yield process
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert process.stdout is not None
    process.stdout.close()


def ask(reader: subprocess.Popen[str], name: str) -> list[int]:
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(name + "\n")
    reader.stdin.flush()
    return [int(number) for number in reader.stdout.readline().split()]


def test_another_process_sees_every_count_while_the_owner_counts(path: str, reader: subprocess.Popen[str]) -> None:
    counters = CounterFile.open(path, writable=True)
    assert ask(reader, "get_calls") == [0, 0]
    for expected in range(1, 101):
        counters.add("get_calls")
        counters.add("get_bytes", 1 << 40)
        assert ask(reader, "get_calls") == [expected, expected + expected * (1 << 40)]
    counters.close()
    assert ask(reader, "get_bytes") == [100 << 40, 100 + (100 << 40)]


def test_counts_survive_a_reopen(path: str) -> None:
    first = CounterFile.open(path, writable=True)
    first.add("put_calls", 7)
    first.add(COUNTERS[-1], 3)
    first.close()
    second = CounterFile.open(path, writable=True)
    second.add("put_calls")
    assert second.snapshot() == {name: {"put_calls": 8, COUNTERS[-1]: 3}.get(name, 0) for name in COUNTERS}
    second.close()


def test_the_file_has_the_documented_bytes_and_mode(path: str) -> None:
    counters = CounterFile.open(path, writable=True)
    for number, name in enumerate(COUNTERS, start=1):
        counters.add(name, number)
    counters.close()
    data = Path(path).read_bytes()
    assert data == b"EFSCNT01" + struct.pack(f"<{len(COUNTERS)}Q", *range(1, len(COUNTERS) + 1))
    assert stat.S_IMODE(os.stat(path).st_mode) == 0o600


def test_the_first_names_keep_their_places() -> None:
    """Format: a name may be appended, none may move."""
    assert COUNTERS[:4] == ("get_calls", "get_blocks", "get_bytes", "get_missed_blocks")
    assert COUNTERS.index("put_calls") == 14
    assert COUNTERS.index("node_put_records") == 21
    assert COUNTERS.index("node_queue_refused") == 36
    assert len(set(COUNTERS)) == len(COUNTERS)


def test_every_block_is_allocated_before_the_file_is_mapped(path: str) -> None:
    CounterFile.open(path, writable=True).close()
    assert os.stat(path).st_blocks * 512 >= FILE_BYTES


def test_a_shorter_file_of_an_older_program_is_lengthened_by_its_owner_only(path: str) -> None:
    older = MAGIC + struct.pack("<3Q", 5, 6, 7)
    Path(path).write_bytes(older)
    reading = CounterFile.open(path, writable=False)
    assert (reading.get("get_bytes"), reading.get("get_missed_blocks"), reading.get(COUNTERS[-1])) == (7, 0, 0)
    assert Path(path).read_bytes() == older
    owner = CounterFile.open(path, writable=True)
    owner.add(COUNTERS[-1], 9)
    assert (owner.get("get_calls"), owner.get(COUNTERS[-1])) == (5, 9)
    assert reading.snapshot()["get_calls"] == 5
    reading.close()
    owner.close()
    assert os.path.getsize(path) == FILE_BYTES


def test_a_longer_file_of_a_newer_program_keeps_what_is_unknown(path: str) -> None:
    Path(path).write_bytes(MAGIC + struct.pack(f"<{len(COUNTERS) + 2}Q", *range(len(COUNTERS) + 2)))
    owner = CounterFile.open(path, writable=True)
    owner.add(COUNTERS[0], 100)
    assert owner.get(COUNTERS[-1]) == len(COUNTERS) - 1
    owner.close()
    words = struct.unpack(f"<{len(COUNTERS) + 2}Q", Path(path).read_bytes()[8:])
    assert words == (100, *range(1, len(COUNTERS) + 2))


@pytest.mark.parametrize("content", [b"", b"EFS", MAGIC[:7], bytes(8), bytes(4096), MAGIC[:5] + bytes(300)])
def test_a_file_that_was_never_finished_starts_at_zero(path: str, content: bytes) -> None:
    Path(path).write_bytes(content)
    reading = CounterFile.open(path, writable=False)
    assert set(reading.snapshot().values()) == {0}
    assert Path(path).read_bytes() == content
    owner = CounterFile.open(path, writable=True)
    owner.add("put_calls")
    owner.close()
    reading.close()
    again = CounterFile.open(path, writable=False)
    assert sum(again.snapshot().values()) == 1
    again.close()


@pytest.mark.parametrize("writable", [True, False])
def test_a_file_of_another_version_is_refused_and_left_alone(path: str, writable: bool) -> None:
    Path(path).write_bytes(b"EFSCNT02" + bytes(400))
    with pytest.raises(FormatUnsupported, match="counters: format version b'EFSCNT02'"):
        CounterFile.open(path, writable=writable)
    assert Path(path).read_bytes() == b"EFSCNT02" + bytes(400)


@pytest.mark.parametrize("head", [b"EFSCNQ01", b"\xff" * 8, b"something else"])
def test_a_damaged_file_starts_at_zero(path: str, head: bytes) -> None:
    """Counters are not worth a node that does not open."""
    Path(path).write_bytes(head + b"\xaa" * 100)
    reader = CounterFile.open(path, writable=False)
    assert sum(reader.snapshot().values()) == 0
    reader.close()
    owner = CounterFile.open(path, writable=True)
    assert sum(owner.snapshot().values()) == 0
    owner.add("get_calls", 3)
    owner.close()
    reader = CounterFile.open(path, writable=False)
    assert reader.get("get_calls") == 3
    reader.close()


def test_errors_at_open_name_the_path(path: str, tmp_path: Path) -> None:
    with pytest.raises(OpenFailed, match="counters: No such file"):
        CounterFile.open(path, writable=False)
    target = tmp_path / "elsewhere"
    target.write_bytes(b"")
    os.symlink(target, path)
    with pytest.raises(OpenFailed, match="counters: "):
        CounterFile.open(path, writable=True)
    assert target.read_bytes() == b""


def test_no_descriptor_is_left_open(path: str) -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    Path(path).write_bytes(b"EFSCNT99")
    before = descriptors()
    for _ in range(3):
        with pytest.raises(FormatUnsupported):
            CounterFile.open(path, writable=True)
    os.unlink(path)
    for _ in range(3):
        CounterFile.open(path, writable=True).close()
    assert descriptors() == before


def test_counting_goes_on_in_memory_after_close(path: str) -> None:
    counters = CounterFile.open(path, writable=True)
    counters.add("put_calls", 2)
    counters.close()
    counters.add("put_calls")
    counters.close()
    assert counters.snapshot()["put_calls"] == 3
    again = CounterFile.open(path, writable=False)
    assert again.get("put_calls") == 2
    again.close()


def test_wrong_counts_are_refused() -> None:
    counters = CounterFile.in_memory()
    with pytest.raises(InvalidArgument, match="no counter 'put_cals'"):
        counters.add("put_cals")
    with pytest.raises(InvalidArgument, match="no counter 'put_cals'"):
        counters.get("put_cals")
    with pytest.raises(InvalidArgument, match="put_calls cannot go down by 1"):
        counters.add("put_calls", -1)
    assert set(counters.snapshot().values()) == {0}


def test_a_read_only_file_cannot_be_counted_in(path: str) -> None:
    CounterFile.open(path, writable=True).close()
    reading = CounterFile.open(path, writable=False)
    with pytest.raises(TypeError):
        reading.add("put_calls")
    reading.close()


def test_prometheus_sees_the_counters_of_every_part_at_collection_time() -> None:
    client, node = CounterFile.in_memory(), CounterFile.in_memory()
    registry = CollectorRegistry()
    registry.register(CounterCollector({("client",): client.snapshot, ("0",): node.snapshot}, prefix="kvstore"))
    client.add("get_calls", 5)
    node.add("node_evicted", 2)
    for expected in (5.0, 6.0):
        assert registry.get_sample_value("kvstore_get_calls_total", {"part": "client"}) == expected
        client.add("get_calls")
    assert registry.get_sample_value("kvstore_get_calls_total", {"part": "0"}) == 0.0
    assert registry.get_sample_value("kvstore_node_evicted_total", {"part": "0"}) == 2.0
    text = generate_latest(registry).decode()
    assert 'kvstore_get_calls_total{part="client"} 7.0' in text
    assert text.count("# TYPE") == len(COUNTERS)
