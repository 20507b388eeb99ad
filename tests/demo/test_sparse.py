"""Ranges of data in sparse files."""

from __future__ import annotations

from pathlib import Path

from kvstore.demo import sparse
from kvstore.demo.sparse import copy_sparse, data_ranges, read_through

MIB = 1 << 20


def test_ranges_cover_the_data_and_leave_out_the_holes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with path.open("wb") as file:
        file.truncate(64 * MIB)
        file.seek(8 * MIB)
        file.write(b"a" * 100)
        file.seek(32 * MIB)
        file.write(b"b" * MIB)
    with path.open("rb", buffering=0) as file:
        ranges = list(data_ranges(file))
    assert any(start <= 8 * MIB and stop >= 8 * MIB + 100 for start, stop in ranges)
    assert any(start <= 32 * MIB and stop >= 33 * MIB for start, stop in ranges)
    assert sum(stop - start for start, stop in ranges) < 4 * MIB


def test_nothing_but_holes_and_nothing_at_all(tmp_path: Path) -> None:
    for name, size in (("hole", MIB), ("empty", 0)):
        path = tmp_path / name
        with path.open("wb") as file:
            file.truncate(size)
        copy_sparse(str(path), str(tmp_path / f"{name}-copy"))
        assert (tmp_path / f"{name}-copy").read_bytes() == bytes(size)


def test_a_range_larger_than_a_piece_is_copied_whole(tmp_path: Path) -> None:
    data = bytes(range(256)) * (3 * sparse.PIECE_BYTES // 256) + b"end"
    (tmp_path / "file").write_bytes(data)
    copy_sparse(str(tmp_path / "file"), str(tmp_path / "copy"))
    assert (tmp_path / "copy").read_bytes() == data


def test_reading_through_reads_everything_below(tmp_path: Path) -> None:
    (tmp_path / "nodes" / "00").mkdir(parents=True)
    (tmp_path / "nodes" / "00" / "slab").write_bytes(b"x" * 9_000)
    (tmp_path / "store.toml").write_bytes(b"y" * 70)
    assert read_through(tmp_path) == 9_070
