"""Reed-Solomon 10+2 over GF(2^8), polynomial 0x11d, Cauchy matrix of ISA-L (`gf_gen_cauchy1_matrix`).

Hot path: `ec_encode_data` of the ISA-L library that pyeclib bundles, called through ctypes on the caller's memory (no
copy, no header). Where that library is not found, `libisal.so.2` of the system; else pyeclib's own isa_l_rs_cauchy,
which gives byte-identical parity. pyeclib is the reference in tests. Every index, count, length and type is checked
*before* a library is called: pyeclib ends the process on an index it does not like.

Shards are passed as 2-D uint8 arrays (rows, shard bytes): row r of all twelve arrays is one stripe. Rows may lie
anywhere (any row stride) but each row's bytes are contiguous. Rows that are written may not overlap any other row;
inputs may share memory (padding is often one row of zeros for all).

Matrix. Row i of the 12 × 10 matrix E makes shard i from the ten data shards: rows 0–9 are the identity,
E[i][j] = 1 / (i xor j) for rows 10 and 11. Ten present shards P are E[P] · data, so wanted shard w is
E[w] · E[P]⁻¹ · P. Any ten rows of E are independent. There are 66 choices of P and at most three of w for each, so the
cache of decode tables holds 198 at most.

Cost. One foreign call per row on addresses that numpy computed for all rows at once: under 1 µs of Python per row. The
calls keep the interpreter lock (`PyDLL`) below UNLOCK_ROW_BYTES and drop it (`CDLL`) from there on.

A library is used only after it encoded and rebuilt a stripe whose bytes are known.
"""

from __future__ import annotations

import ctypes
import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from efs.errors import CodecError, InvalidArgument
from efs.limits import DATA_SHARDS, MAX_BLOCK_BYTES, MIB, PARITY_SHARDS, STRIPE_SHARDS

Shards = NDArray[np.uint8]

MAX_SHARD_BYTES: Final = -(-MAX_BLOCK_BYTES // DATA_SHARDS)
UNLOCK_ROW_BYTES: Final = 2 * MIB
"""Beside a busy Python thread, getting the lock back takes up to the interpreter's switch interval (5 ms), however
short the call was: measured 5 ms a row without the lock against 0.15 ms with it at 256 KiB. A row of 2 MiB shards runs
for 1 to 2 ms, about what the event loop may be kept from its next step."""
SYSTEM_LIBRARY: Final = "libisal.so.2"
PYECLIB_HEADER_BYTES: Final = 80
TABLE_BYTES: Final = 32
"""Bytes of `ec_init_tables` for one coefficient, in its widest layout."""
PROOF_PARITY: Final = b"\x35\xaa"
"""Parity of the bytes 1 to 10 under E; the tests work it out from the field alone."""


class Place(NamedTuple):
    """Where a shard's rows lie: address of row 0, distance of rows, and the range that holds them all."""

    address: int
    stride: int
    low: int
    high: int


@dataclass(frozen=True, slots=True)
class Stripes:
    """Checked arguments: `rows` stripes of shards of `size` bytes; ten inputs and what is to be made of them, each in
    order of index. `places` has those of the inputs, then those of the outputs, and is empty when there are no rows."""

    inputs: Mapping[int, Shards]
    outputs: Mapping[int, Shards]
    rows: int
    size: int
    places: tuple[Place, ...]


class Backend(Protocol):
    """A library behind `Codec`. It trusts its arguments: only `Codec` calls it, after its checks."""

    @property
    def name(self) -> str: ...

    @property
    def origin(self) -> str:
        """The path or module that does the work, for `doctor`."""
        ...

    def transform(self, stripes: Stripes) -> None:
        """Fill the output shards of every row from the ten input shards; there is at least one row and one output."""
        ...


class Codec:
    """Encoder and rebuilder. `backend` is "isal-bundled", "isal-system" or "pyeclib"; None takes the first that loads.

    A `Backend` of the caller's own may be given instead. CodecError lists what was tried when none loads;
    InvalidArgument for an unknown name. Usable from several threads.
    """

    backend: str
    origin: str

    def __init__(self, backend: str | Backend | None = None) -> None:
        self._library = load(backend) if backend is None or isinstance(backend, str) else backend
        self.backend = self._library.name
        self.origin = self._library.origin

    def encode(self, data: Sequence[Shards], parity: Sequence[Shards]) -> None:
        """Fill the two parity arrays from the ten data arrays. CodecError on any mismatch of count, shape or type."""
        if not isinstance(data, Sequence) or len(data) != DATA_SHARDS:
            raise CodecError(f"{_count(data)} data shards given, encoding takes a sequence of {DATA_SHARDS}")
        if not isinstance(parity, Sequence) or len(parity) != PARITY_SHARDS:
            raise CodecError(f"{_count(parity)} parity shards given, encoding takes a sequence of {PARITY_SHARDS}")
        self._run(dict(enumerate(data)), dict(enumerate(parity, start=DATA_SHARDS)))

    def rebuild(self, present: Mapping[int, Shards], wanted: Mapping[int, Shards]) -> None:
        """Fill `wanted` shards from exactly ten `present` ones; indices 0–11, disjoint. Nothing here knows whether the
        inputs are right: the caller verifies the result."""
        for name, shards in (("present", present), ("wanted", wanted)):
            if not isinstance(shards, Mapping):
                raise CodecError(f"{name} is a {type(shards).__name__}, must be a mapping from index to shards")
        for index in (*present, *wanted):
            if isinstance(index, bool) or not isinstance(index, int | np.integer):
                raise CodecError(f"shard index {index!r} is not an integer")
            if not 0 <= index < STRIPE_SHARDS:
                raise CodecError(f"shard index {index} is outside 0 to {STRIPE_SHARDS - 1}")
        if len(present) != DATA_SHARDS:
            raise CodecError(f"{len(present)} shards present, rebuilding takes exactly {DATA_SHARDS}")
        if both := sorted(present.keys() & wanted.keys()):
            raise CodecError(f"shard {both[0]} is both present and wanted")
        self._run(
            {int(index): present[index] for index in sorted(present)},
            {int(index): wanted[index] for index in sorted(wanted)},
        )

    def _run(self, inputs: dict[int, Shards], outputs: dict[int, Shards]) -> None:
        stripes = _checked(inputs, outputs)
        if stripes.rows and outputs:
            self._library.transform(stripes)


# -- Checks: everything a library would not survive ----------------------------------------------------------------


def _count(shards: object) -> str:
    return str(len(shards)) if isinstance(shards, Sequence | Mapping) else f"a {type(shards).__name__} as"


def _checked(inputs: Mapping[int, Shards], outputs: Mapping[int, Shards]) -> Stripes:
    """CodecError unless all arrays are alike and no written row overlaps another one."""
    rows, size = _common_shape({**inputs, **outputs})
    if rows == 0:
        return Stripes(inputs, outputs, 0, size, ())
    places: dict[int, Place] = {index: _place(array, rows, size) for index, array in inputs.items()}
    for index, array in outputs.items():
        if not array.flags.writeable:
            raise CodecError(f"shard {index} is to be written but is read-only")
        place = _place(array, rows, size)
        if rows > 1 and abs(place.stride) < size:
            raise CodecError(f"shard {index} is to be written but its rows overlap")
        for other, there in places.items():
            if place.low < there.high and there.low < place.high and _rows_overlap(place, there, rows, size):
                raise CodecError(f"shard {index} is to be written but overlaps shard {other}")
        places[index] = place
    return Stripes(inputs, outputs, rows, size, tuple(places.values()))


def _common_shape(shards: Mapping[int, Shards]) -> tuple[int, int]:
    """(rows, bytes of a row) of all the arrays."""
    shape: tuple[int, ...] = ()
    for index, array in shards.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.uint8 or array.ndim != 2:
            raise CodecError(f"shard {index} is {_describe(array)}, must be a 2-D uint8 array")
        if not shape:
            shape = array.shape
            if not 1 <= shape[1] <= MAX_SHARD_BYTES:
                raise CodecError(f"shard {index} has rows of {shape[1]} bytes, must be 1 to {MAX_SHARD_BYTES}")
        elif array.shape != shape:
            raise CodecError(f"shard {index} is {_describe(array)}, the others have shape {shape}")
        if array.strides[1] != 1 and shape[1] > 1 and shape[0] > 0:
            raise CodecError(f"shard {index}: the bytes of a row are not contiguous")
    return shape[0], shape[1]


def _describe(array: object) -> str:
    if isinstance(array, np.ndarray):
        return f"a {array.dtype} array of shape {array.shape}"
    return f"a {type(array).__name__}"


def _place(array: Shards, rows: int, size: int) -> Place:
    address, stride = array.ctypes.data, array.strides[0]
    last = address + (rows - 1) * stride
    return Place(address, stride, min(address, last), max(address, last) + size)


def _rows_overlap(one: Place, other: Place, rows: int, size: int) -> bool:
    """Whether any row of one shares a byte with any row of the other."""
    if one.stride == other.stride != 0:
        # Views of one buffer: rows that start in disjoint parts of the stride never meet.
        apart = (other.address - one.address) % abs(one.stride)
        if size <= apart <= abs(one.stride) - size:
            return False
    steps = np.arange(rows, dtype=np.int64)
    starts = np.sort(one.address + steps * one.stride)
    probes = other.address + steps * other.stride
    above = np.searchsorted(starts, probes)
    gap_above = starts[np.minimum(above, rows - 1)] - probes
    gap_below = probes - starts[np.maximum(above, 1) - 1]
    return bool(np.any((above < rows) & (gap_above < size)) or np.any((above > 0) & (gap_below < size)))


# -- ISA-L -----------------------------------------------------------------------------------------------------------


class IsalBackend:
    """ISA-L through ctypes. OSError when the library does not load, AttributeError when a function is missing."""

    def __init__(self, name: str, path: str) -> None:
        self.name = name
        self.origin = path
        locked = ctypes.PyDLL(path)
        self._locked: Callable[..., None] = _declare(locked.ec_encode_data)
        self._unlocked: Callable[..., None] = _declare(ctypes.CDLL(path).ec_encode_data)
        self._init_tables: Callable[..., None] = locked.ec_init_tables
        self._invert: Callable[..., int] = locked.gf_invert_matrix
        self._multiply: Callable[..., int] = locked.gf_mul
        locked.gf_mul.argtypes = [ctypes.c_ubyte, ctypes.c_ubyte]
        locked.gf_mul.restype = ctypes.c_ubyte
        matrix = (ctypes.c_ubyte * (STRIPE_SHARDS * DATA_SHARDS))()
        locked.gf_gen_cauchy1_matrix(matrix, STRIPE_SHARDS, DATA_SHARDS)
        self._matrix = bytes(matrix)
        # Two threads that miss at once store the same table twice: no lock needed.
        self._tables: dict[tuple[tuple[int, ...], tuple[int, ...]], ctypes.Array[ctypes.c_ubyte]] = {}

    def transform(self, stripes: Stripes) -> None:
        rows, size, count = stripes.rows, stripes.size, len(stripes.outputs)
        pattern = (tuple(stripes.inputs), tuple(stripes.outputs))
        table = self._tables.get(pattern)
        if table is None:
            table = self._tables[pattern] = self._make_table(*pattern)
        addresses = np.array([place.address for place in stripes.places], np.int64)
        strides = np.array([place.stride for place in stripes.places], np.int64)
        pointers = addresses + np.arange(rows, dtype=np.int64)[:, None] * strides
        call = self._locked if size < UNLOCK_ROW_BYTES else self._unlocked
        to_outputs = DATA_SHARDS * pointers.itemsize
        first, step = pointers.ctypes.data, pointers.strides[0]
        coefficients = ctypes.addressof(table)
        for row in range(first, first + rows * step, step):
            call(size, DATA_SHARDS, count, coefficients, row, row + to_outputs)

    def _make_table(self, present: Sequence[int], wanted: Sequence[int]) -> ctypes.Array[ctypes.c_ubyte]:
        """Expanded coefficients of E[wanted] · E[present]⁻¹."""
        square = b"".join(self._row(index) for index in present)
        inverse = (ctypes.c_ubyte * (DATA_SHARDS * DATA_SHARDS))()
        if self._invert(ctypes.create_string_buffer(square, len(square)), inverse, DATA_SHARDS) != 0:
            raise CodecError(f"shards {list(present)} do not determine the others")
        product = bytearray()
        for index in wanted:
            row = self._row(index)
            for column in range(DATA_SHARDS):
                total = 0
                for inner in range(DATA_SHARDS):
                    total ^= self._multiply(row[inner], inverse[inner * DATA_SHARDS + column])
                product.append(total)
        table = (ctypes.c_ubyte * (TABLE_BYTES * len(product)))()
        self._init_tables(DATA_SHARDS, len(wanted), ctypes.create_string_buffer(bytes(product), len(product)), table)
        return table

    def _row(self, index: int) -> bytes:
        return self._matrix[index * DATA_SHARDS : (index + 1) * DATA_SHARDS]


def _declare(function: Any) -> Callable[..., None]:
    function.argtypes = [ctypes.c_int] * 3 + [ctypes.c_void_p] * 3
    function.restype = None
    return function  # type: ignore[no-any-return]


# -- pyeclib ---------------------------------------------------------------------------------------------------------


class PyeclibBackend:
    """pyeclib's isa_l_rs_cauchy, a row at a time through copies: two to four times slower, byte-identical."""

    name = "pyeclib"

    def __init__(self) -> None:
        from pyeclib import ec_iface

        self.origin = str(ec_iface.__file__)
        self._driver_error = ec_iface.ECDriverError
        try:
            self._driver = ec_iface.ECDriver(k=DATA_SHARDS, m=PARITY_SHARDS, ec_type="isa_l_rs_cauchy")
        except ec_iface.ECDriverError as error:
            raise CodecError(f"isa_l_rs_cauchy is not available: {error}") from error

    def transform(self, stripes: Stripes) -> None:
        try:
            fragments = self._driver.encode(bytes(DATA_SHARDS * stripes.size))
            headers = [fragment[:PYECLIB_HEADER_BYTES] for fragment in fragments]
            for row in range(stripes.rows):
                self._transform_row(stripes, row, headers)
        except self._driver_error as error:
            raise CodecError(f"pyeclib: {error}") from error

    def _transform_row(self, stripes: Stripes, row: int, headers: Sequence[bytes]) -> None:
        rows = {index: array[row].tobytes() for index, array in stripes.inputs.items()}
        if max(rows) < DATA_SHARDS:
            block = b"".join(rows.values())
        else:
            # The header depends on the size and the index alone, so a stripe that was stored without gets it back.
            block = self._driver.decode([headers[index] + shard for index, shard in rows.items()])
        fragments = self._driver.encode(block) if max(stripes.outputs) >= DATA_SHARDS else ()
        for index, array in stripes.outputs.items():
            if index < DATA_SHARDS:
                shard = block[index * stripes.size : (index + 1) * stripes.size]
            else:
                shard = fragments[index][PYECLIB_HEADER_BYTES:]
            if len(shard) != stripes.size:
                raise CodecError(f"pyeclib made a shard of {len(shard)} bytes, expected {stripes.size}")
            array[row] = np.frombuffer(shard, np.uint8)


# -- Loading ---------------------------------------------------------------------------------------------------------


def _load_bundled() -> Backend:
    tried: list[str] = []
    for path in _bundled_libraries():
        try:
            return IsalBackend("isal-bundled", str(path))
        except (OSError, AttributeError) as error:
            tried.append(f"{path}: {error}")
    raise CodecError("; ".join(tried) or "pyeclib is not installed or bundles no library with isal in its name")


def _bundled_libraries() -> Iterator[Path]:
    """Shared objects named like ISA-L, where a wheel keeps its libraries, then beside the module."""
    spec = importlib.util.find_spec("pyeclib_c")
    if spec is not None and spec.origin is not None:
        site = Path(spec.origin).parent
        for folder in (site / "pyeclib.libs", site):
            yield from sorted(folder.glob("*isal*.so*"))


def _load_system() -> Backend:
    return IsalBackend("isal-system", SYSTEM_LIBRARY)


LOADERS: Final[Mapping[str, Callable[[], Backend]]] = {
    "isal-bundled": _load_bundled,
    "isal-system": _load_system,
    "pyeclib": PyeclibBackend,
}


def load(name: str | None = None, loaders: Mapping[str, Callable[[], Backend]] = LOADERS) -> Backend:
    """The backend of this name, or the first of all that loads and proves itself. CodecError says what was tried."""
    if name is not None and name not in loaders:
        raise InvalidArgument(f"codec backend {name!r} is unknown, must be one of {', '.join(loaders)}")
    tried: list[str] = []
    for candidate in loaders if name is None else (name,):
        try:
            backend = loaders[candidate]()
            _prove(backend)
        except (OSError, AttributeError, ImportError, CodecError) as error:
            tried.append(f"{candidate}: {error}")
        else:
            return backend
    raise CodecError(f"no Reed-Solomon library could be loaded; tried {' | '.join(tried)}")


def probe() -> dict[str, Backend | CodecError]:
    """Each known backend, or why it does not load."""
    found: dict[str, Backend | CodecError] = {}
    for name in LOADERS:
        try:
            found[name] = load(name)
        except CodecError as error:
            found[name] = error
    return found


def _prove(backend: Backend) -> None:
    """Encode a stripe with known parity and rebuild two shards of it; a library of another field or layout fails."""
    size = 67
    stripe = np.repeat(np.arange(1, STRIPE_SHARDS + 1, dtype=np.uint8), size).reshape(STRIPE_SHARDS, 1, size)
    data = {index: stripe[index] for index in range(DATA_SHARDS)}
    backend.transform(_checked(data, {10: stripe[10], 11: stripe[11]}))
    if stripe[10].tobytes() != PROOF_PARITY[:1] * size or stripe[11].tobytes() != PROOF_PARITY[1:] * size:
        raise CodecError(f"{backend.origin} encodes a known stripe to other bytes")
    rebuilt = np.zeros((2, 1, size), np.uint8)
    present = {index: stripe[index] for index in range(STRIPE_SHARDS) if index not in (3, 10)}
    backend.transform(_checked(present, {3: rebuilt[0], 10: rebuilt[1]}))
    if rebuilt[0].tobytes() != stripe[3].tobytes() or rebuilt[1].tobytes() != stripe[10].tobytes():
        raise CodecError(f"{backend.origin} rebuilds a known stripe to other bytes")
