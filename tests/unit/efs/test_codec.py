"""Reed-Solomon 10+2: every loss, every backend, equality with pyeclib, and refusals that no library ever sees."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from pyeclib.ec_iface import ECDriver

from efs.codec import (
    MAX_SHARD_BYTES,
    PROOF_PARITY,
    UNLOCK_ROW_BYTES,
    Backend,
    Codec,
    IsalBackend,
    PyeclibBackend,
    Stripes,
    load,
    probe,
)
from efs.errors import CodecError, InvalidArgument

LOADED = [name for name, found in probe().items() if not isinstance(found, CodecError)]
LENGTHS = [1, 2, 7, 13, 79, 80, 81, 251, 1021, 11392]
PAIRS = list(itertools.combinations(range(12), 2))


@pytest.fixture(params=LOADED)
def codec(request: pytest.FixtureRequest) -> Codec:
    return Codec(request.param)


def stripe_of(rows: int, size: int, seed: int = 1) -> NDArray[np.uint8]:
    """(12, rows, size): random data shards, parity by pyeclib itself."""
    stripe = np.random.default_rng(seed).integers(0, 256, (12, rows, size), dtype=np.uint8)
    driver = ECDriver(k=10, m=2, ec_type="isa_l_rs_cauchy")
    for row in range(rows):
        fragments = driver.encode(stripe[:10, row].tobytes())
        for index in range(10):
            assert fragments[index][80:] == stripe[index, row].tobytes()
        for index in (10, 11):
            stripe[index, row] = np.frombuffer(fragments[index][80:], np.uint8)
    return stripe


class SpyBackend:
    """Counts what reaches the library; a refusal must leave the count at zero."""

    name = "spy"
    origin = "test"

    def __init__(self) -> None:
        self.calls = 0

    def transform(self, stripes: Stripes) -> None:
        self.calls += 1


def test_a_bundled_isal_and_pyeclib_load_here() -> None:
    assert {"isal-bundled", "pyeclib"} <= set(LOADED)
    assert Codec().backend == "isal-bundled"
    assert "isal" in Codec().origin


@pytest.mark.parametrize("size", LENGTHS)
def test_parity_equals_pyeclibs(codec: Codec, size: int) -> None:
    stripe = stripe_of(3, size)
    parity = np.zeros((2, 3, size), np.uint8)
    codec.encode(list(stripe[:10]), list(parity))
    assert parity.tobytes() == stripe[10:].tobytes()


@pytest.mark.parametrize("size", LENGTHS)
def test_all_66_two_loss_pairs_and_all_single_losses_rebuild(codec: Codec, size: int) -> None:
    stripe = stripe_of(2, size)
    checked = 0
    for lost in PAIRS:
        present = {index: stripe[index] for index in range(12) if index not in lost}
        assert len(present) == 10
        for wanted_indices in (lost, lost[:1], lost[1:]):
            wanted = {index: np.full((2, size), 0xEE, np.uint8) for index in wanted_indices}
            codec.rebuild(present, wanted)
            for index, array in wanted.items():
                assert array.tobytes() == stripe[index].tobytes(), (lost, index)
            checked += 1
    assert checked == 66 * 3


def test_all_66_subsets_of_ten_give_the_stripe_in_any_order_of_presentation(codec: Codec) -> None:
    stripe = stripe_of(1, 81)
    for subset in itertools.combinations(range(12), 10):
        order = list(subset)[::-1]
        wanted = {index: np.zeros((1, 81), np.uint8) for index in range(11, -1, -1) if index not in subset}
        codec.rebuild({index: stripe[index] for index in order}, wanted)
        whole = {index: stripe[index] for index in subset} | wanted
        assert b"".join(whole[index].tobytes() for index in range(12)) == stripe.tobytes()


@given(size=st.integers(1, 400), rows=st.integers(1, 3), seed=st.integers(0, 2**32 - 1), lost=st.sampled_from(PAIRS))
def test_backends_agree_on_any_length(size: int, rows: int, seed: int, lost: tuple[int, int]) -> None:
    data = np.random.default_rng(seed).integers(0, 256, (10, rows, size), dtype=np.uint8)
    results = []
    for name in LOADED:
        parity = np.zeros((2, rows, size), np.uint8)
        Codec(name).encode(list(data), list(parity))
        whole = np.concatenate([data, parity])
        wanted = {index: np.zeros((rows, size), np.uint8) for index in lost}
        Codec(name).rebuild({index: whole[index] for index in range(12) if index not in lost}, wanted)
        assert all(wanted[index].tobytes() == whole[index].tobytes() for index in lost)
        results.append(parity.tobytes())
    assert len(set(results)) == 1


def test_parity_follows_from_the_field_alone(codec: Codec) -> None:
    """An independent GF(2^8) with polynomial 0x11d and E[i][j] = 1 / (i xor j)."""

    def multiply(a: int, b: int) -> int:
        product = 0
        while b:
            product ^= a if b & 1 else 0
            a = (a << 1) ^ (0x11D if a & 0x80 else 0)
            b >>= 1
        return product

    inverse = {a: next(b for b in range(1, 256) if multiply(a, b) == 1) for a in range(1, 16)}
    data = np.random.default_rng(5).integers(0, 256, (10, 1, 97), dtype=np.uint8)
    parity = np.zeros((2, 1, 97), np.uint8)
    codec.encode(list(data), list(parity))
    for i in (10, 11):
        expected = [
            reduce(lambda x, y: x ^ y, (multiply(inverse[i ^ j], int(data[j, 0, byte])) for j in range(10)))
            for byte in range(97)
        ]
        assert parity[i - 10, 0].tolist() == expected
    proof = bytes(reduce(lambda x, y: x ^ y, (multiply(inverse[i ^ j], j + 1) for j in range(10))) for i in (10, 11))
    assert proof == PROOF_PARITY


def test_strided_views_of_one_block_major_buffer_are_encoded_in_place(codec: Codec) -> None:
    stripe = stripe_of(5, 192)
    blocks = np.ascontiguousarray(stripe[:10].transpose(1, 0, 2))
    views = [blocks[:, index] for index in range(10)]
    assert not views[3].flags.c_contiguous
    parity = np.zeros((5, 2, 192), np.uint8)
    codec.encode(views, [parity[:, 0], parity[:, 1]])
    assert parity.transpose(1, 0, 2).tobytes() == stripe[10:].tobytes()


def test_rebuild_into_the_gaps_of_the_buffer_that_holds_the_present_shards(codec: Codec) -> None:
    stripe = stripe_of(4, 64)
    blocks = np.ascontiguousarray(stripe.transpose(1, 0, 2))
    damaged = blocks.copy()
    damaged[:, [2, 11]] = 0
    present = {index: damaged[:, index] for index in range(12) if index not in (2, 11)}
    codec.rebuild(present, {2: damaged[:, 2], 11: damaged[:, 11]})
    assert damaged.tobytes() == blocks.tobytes()


@pytest.mark.parametrize("size", [1, 15, 31, 33, 63, 100])
def test_no_byte_beside_the_wanted_row_is_written(codec: Codec, size: int) -> None:
    stripe = stripe_of(3, size)
    room = np.full((2, 3, size + 128), 0xA5, np.uint8)
    codec.encode(list(stripe[:10]), [room[0, :, 64 : 64 + size], room[1, :, 64 : 64 + size]])
    assert room[:, :, 64 : 64 + size].tobytes() == stripe[10:].tobytes()
    assert (room[:, :, :64] == 0xA5).all()
    assert (room[:, :, 64 + size :] == 0xA5).all()


def test_rows_above_the_unlocking_size_and_reversed_rows_encode(codec: Codec) -> None:
    stripe = stripe_of(2, UNLOCK_ROW_BYTES + 13)
    parity = np.zeros((2, 2, UNLOCK_ROW_BYTES + 13), np.uint8)
    codec.encode([shard[::-1] for shard in stripe[:10]], [shard[::-1] for shard in parity])
    assert parity.tobytes() == stripe[10:].tobytes()


def test_inputs_may_be_read_only_or_share_one_row_of_padding(codec: Codec) -> None:
    zeros = np.broadcast_to(np.zeros(32, np.uint8), (3, 32))
    assert not zeros.flags.writeable
    first = np.arange(96, dtype=np.uint8).reshape(3, 32)
    parity = np.zeros((2, 3, 32), np.uint8)
    codec.encode([first, *[zeros] * 9], list(parity))
    rebuilt = np.zeros((3, 32), np.uint8)
    codec.rebuild({**dict.fromkeys(range(1, 10), zeros), 11: parity[1]}, {0: rebuilt})
    assert rebuilt.tobytes() == first.tobytes()


def test_no_rows_and_no_wanted_shards_do_nothing() -> None:
    spy = SpyBackend()
    none = np.zeros((0, 16), np.uint8)
    Codec(spy).encode([none] * 10, [none] * 2)
    Codec(spy).rebuild({index: np.zeros((1, 4), np.uint8) for index in range(10)}, {})
    assert spy.calls == 0


# -- Refusals (faults 13 to 17) ------------------------------------------------------------------------------------


def good(count: int, first: int = 0, rows: int = 2, size: int = 79) -> dict[int, Any]:
    return {first + index: np.zeros((rows, size), np.uint8) for index in range(count)}


def replaced(shards: dict[int, Any], index: Any, value: Any) -> dict[Any, Any]:
    return {**shards, index: value}


def view_pair_that_overlaps() -> tuple[Any, Any]:
    buffer = np.zeros(1000, np.uint8)
    return (
        np.lib.stride_tricks.as_strided(buffer, (2, 79), (200, 1)),
        np.lib.stride_tricks.as_strided(buffer[78:], (2, 79), (200, 1)),
    )


BAD_REBUILDS: dict[str, tuple[Callable[[], tuple[Any, Any]], str]] = {
    "nine shards": (lambda: (good(9), good(1, 10)), "9 shards present"),
    "eleven shards": (lambda: (good(11), good(1, 11)), "11 shards present"),
    "none": (lambda: ({}, good(1)), "0 shards present"),
    "index 12": (lambda: ({**good(9), 12: good(1)[0]}, good(1, 10)), "12 is outside"),
    "index -1": (lambda: ({**good(9), -1: good(1)[0]}, good(1, 10)), "-1 is outside"),
    "wanted 12": (lambda: (good(10), good(1, 12)), "12 is outside"),
    "wanted -1": (lambda: (good(10), good(1, -1)), "-1 is outside"),
    "index is a string": (lambda: ({**good(9), "9": good(1)[0]}, good(1, 10)), "'9' is not an integer"),
    "index is a float": (lambda: ({**good(9), 9.0: good(1)[0]}, good(1, 10)), "9.0 is not an integer"),
    "index is a bool": (lambda: (dict(list(good(11).items())[1:]), {False: good(1)[0]}), "False is not an integer"),
    "present and wanted": (lambda: (good(10), good(1, 3)), "shard 3 is both"),
    "pairs instead of a mapping, one twice": (
        lambda: ([(0, good(1)[0]), *good(9).items()], good(1, 10)),
        "present is a list",
    ),
    "a fragment of no bytes": (lambda: (good(10, size=0), good(1, 10, size=0)), "rows of 0 bytes"),
    "a fragment beyond the largest block": (
        lambda: (dict.fromkeys(range(10), np.broadcast_to(np.uint8(0), (1, MAX_SHARD_BYTES + 1))), good(1, 10)),
        "rows of",
    ),
    "one fragment of 78 among 79": (lambda: (replaced(good(10), 4, good(1, size=78)[0]), good(1, 10)), "shard 4 is"),
    "one fragment of 80 among 79": (lambda: (replaced(good(10), 4, good(1, size=80)[0]), good(1, 10)), "shard 4 is"),
    "fewer rows": (lambda: (replaced(good(10), 4, good(1, rows=1)[0]), good(1, 10)), "shard 4 is"),
    "wanted of another length": (lambda: (good(10), good(1, 10, size=81)), "shard 10 is"),
    "bytes": (lambda: (replaced(good(10), 0, bytes(79)), good(1, 10)), "shard 0 is a bytes"),
    "bytearray": (lambda: (replaced(good(10), 9, bytearray(79)), good(1, 10)), "shard 9 is a bytearray"),
    "memoryview": (lambda: (replaced(good(10), 9, memoryview(bytes(79))), good(1, 10)), "shard 9 is a memoryview"),
    "signed bytes": (lambda: (replaced(good(10), 2, np.zeros((2, 79), np.int8)), good(1, 10)), "shard 2 is a int8"),
    "words": (lambda: (replaced(good(10), 2, np.zeros((2, 79), np.uint16)), good(1, 10)), "shard 2 is a uint16"),
    "one dimension": (lambda: (replaced(good(10), 2, np.zeros(79, np.uint8)), good(1, 10)), "shard 2 is a uint8"),
    "every other byte": (
        lambda: (replaced(good(10), 2, np.zeros((2, 158), np.uint8)[:, ::2]), good(1, 10)),
        "not contiguous",
    ),
    "backwards": (lambda: (replaced(good(10), 2, np.zeros((2, 79), np.uint8)[:, ::-1]), good(1, 10)), "not contiguous"),
    "wanted is read-only": (lambda: (good(10), {10: np.broadcast_to(np.uint8(0), (2, 79))}), "not contiguous"),
    "wanted rows overlap": (
        lambda: (good(10), {10: np.lib.stride_tricks.as_strided(np.zeros(200, np.uint8), (2, 79), (78, 1))}),
        "its rows overlap",
    ),
    "wanted in the memory of a present shard": (
        lambda: (replaced(good(10), 7, (pair := view_pair_that_overlaps())[0]), {10: pair[1]}),
        "shard 10 is to be written but overlaps shard 7",
    ),
    "wanted just before the memory of a present shard": (
        lambda: (replaced(good(10), 7, (pair := view_pair_that_overlaps())[1]), {10: pair[0]}),
        "shard 10 is to be written but overlaps shard 7",
    ),
    "wanted shards in one memory": (
        lambda: (good(10), dict(zip((10, 11), view_pair_that_overlaps(), strict=True))),
        "shard 11 is to be written but overlaps shard 10",
    ),
}


@pytest.mark.parametrize("case", BAD_REBUILDS)
def test_rebuild_refuses_before_a_library_is_called(case: str) -> None:
    make, message = BAD_REBUILDS[case]
    present, wanted = make()
    spy = SpyBackend()
    with pytest.raises(CodecError) as refused:
        Codec(spy).rebuild(present, wanted)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert spy.calls == 0


def test_a_read_only_output_is_refused() -> None:
    spy = SpyBackend()
    frozen = np.zeros((2, 79), np.uint8)
    frozen.setflags(write=False)
    with pytest.raises(CodecError, match="shard 10 is to be written but is read-only"):
        Codec(spy).rebuild(good(10), {10: frozen})
    assert spy.calls == 0


def test_the_spy_is_reached_by_a_good_call() -> None:
    spy = SpyBackend()
    Codec(spy).rebuild(good(10), good(1, 10))
    Codec(spy).encode(list(good(10).values()), list(good(2).values()))
    Codec(spy).rebuild({np.int64(index): array for index, array in good(10).items()}, good(2, 10))  # type: ignore[misc]
    assert spy.calls == 3


@pytest.mark.parametrize(
    ("data", "parity", "message"),
    [
        (list(good(9).values()), list(good(2).values()), "9 data shards"),
        (list(good(11).values()), list(good(2).values()), "11 data shards"),
        (list(good(10).values()), list(good(1).values()), "1 parity shards"),
        (list(good(10).values()), list(good(3).values()), "3 parity shards"),
        (good(10), list(good(2).values()), "10 data shards given, encoding takes a sequence"),
        (iter(good(10).values()), list(good(2).values()), "encoding takes a sequence"),
        ([*list(good(9).values()), good(1, size=80)[0]], list(good(2).values()), "shard 9 is"),
        (list(good(10).values()), [good(1)[0], good(1, size=1)[0]], "shard 11 is"),
        (list(good(10).values()), [good(1)[0], None], "shard 11 is a NoneType"),
    ],
)
def test_encode_refuses_before_a_library_is_called(data: Any, parity: Any, message: str) -> None:
    spy = SpyBackend()
    with pytest.raises(CodecError) as refused:
        Codec(spy).encode(data, parity)
    assert message in str(refused.value)
    assert spy.calls == 0


def test_parity_in_the_memory_of_a_data_shard_is_refused() -> None:
    spy = SpyBackend()
    data = list(good(10).values())
    with pytest.raises(CodecError, match="shard 10 is to be written but overlaps shard 6"):
        Codec(spy).encode(data, [data[6], good(1)[0]])
    assert spy.calls == 0


@given(
    one=st.tuples(st.integers(0, 60), st.integers(-40, 40)),
    other=st.tuples(st.integers(0, 60), st.integers(-40, 40)),
    rows=st.integers(1, 4),
    size=st.integers(1, 12),
)
def test_overlap_is_found_exactly(one: tuple[int, int], other: tuple[int, int], rows: int, size: int) -> None:
    buffer = np.zeros(1000, np.uint8)

    def view(place: tuple[int, int]) -> Any:
        return np.lib.stride_tricks.as_strided(buffer[400 + place[0] :], (rows, size), (place[1], 1))

    def cells(place: tuple[int, int]) -> set[int]:
        return {place[0] + row * place[1] + byte for row in range(rows) for byte in range(size)}

    overlap = bool(cells(one) & cells(other)) or len(cells(other)) < rows * size
    present = {index: np.zeros((rows, size), np.uint8) for index in range(1, 10)} | {0: view(one)}
    spy = SpyBackend()
    try:
        Codec(spy).rebuild(present, {11: view(other)})
    except CodecError:
        # Interleaved rows of one output (stride below the row's size) are refused even where no byte coincides.
        assert overlap or (rows > 1 and abs(other[1]) < size)
        assert spy.calls == 0
    else:
        assert not overlap
        assert spy.calls == 1


# -- Loading ---------------------------------------------------------------------------------------------------------


def test_an_unknown_backend_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'isal-magic' is unknown, must be one of isal-bundled"):
        Codec("isal-magic")


def test_when_nothing_loads_the_error_says_what_was_tried() -> None:
    def no_library() -> Backend:
        raise OSError("cannot open shared object file")

    def no_package() -> Backend:
        raise ImportError("No module named 'pyeclib'")

    with pytest.raises(CodecError) as failed:
        load(None, {"first": no_library, "second": no_package})
    assert str(failed.value).endswith(
        "tried first: cannot open shared object file | second: No module named 'pyeclib'"
    )


def test_the_next_backend_is_taken_when_one_does_not_load() -> None:
    def broken() -> Backend:
        raise OSError("cannot open shared object file")

    assert load(None, {"isal-bundled": broken, "pyeclib": PyeclibBackend}).name == "pyeclib"


def test_a_library_with_wrong_results_is_not_used() -> None:
    class WrongParity(PyeclibBackend):
        def transform(self, stripes: Stripes) -> None:
            super().transform(stripes)
            if 11 in stripes.outputs:
                stripes.outputs[11][0, 0] ^= 1

    class WrongRebuild(PyeclibBackend):
        def transform(self, stripes: Stripes) -> None:
            super().transform(stripes)
            if 3 in stripes.outputs:
                stripes.outputs[3][0, 66] ^= 1

    with pytest.raises(CodecError, match="encodes a known stripe to other bytes"):
        load(None, {"wrong": WrongParity})
    with pytest.raises(CodecError, match="rebuilds a known stripe to other bytes"):
        load(None, {"wrong": WrongRebuild})


def test_a_shared_object_without_the_functions_does_not_load() -> None:
    library = next(Path(Codec("isal-bundled").origin).parent.glob("libnullcode*"))
    with pytest.raises(CodecError, match=r"tried null: .*ec_encode_data"):
        load(None, {"null": lambda: IsalBackend("null", str(library))})


def test_the_systems_library_is_found_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "libisal.so.2").symlink_to(Codec("isal-bundled").origin)
    program = (
        "import numpy as np; from efs.codec import Codec; codec = Codec('isal-system');"
        "parity = np.zeros((2, 1, 67), np.uint8);"
        "codec.encode([np.full((1, 67), j + 1, np.uint8) for j in range(10)], list(parity));"
        "print(codec.backend, parity[0, 0, 0], parity[1, 0, 66])"
    )
    environment = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["isal-system", str(PROOF_PARITY[0]), str(PROOF_PARITY[1])]


def test_tables_are_cached_per_loss_pattern_and_bounded() -> None:
    codec = Codec("isal-bundled")
    stripe = stripe_of(1, 16)
    for _ in range(2):
        for lost in PAIRS:
            for indices in (lost, lost[:1], lost[1:]):
                wanted = {index: np.zeros((1, 16), np.uint8) for index in indices}
                codec.rebuild({index: stripe[index] for index in range(12) if index not in lost}, wanted)
    assert isinstance(codec._library, IsalBackend)
    assert len(codec._library._tables) == 66 * 3
