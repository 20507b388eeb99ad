"""Reed-Solomon 10+2 over GF(2^8), polynomial 0x11d, Cauchy matrix of ISA-L (`gf_gen_cauchy1_matrix`).

Hot path: `ec_encode_data` of the ISA-L library that pyeclib bundles, called through ctypes on the caller's memory (no
copy, no header). Where that library is not found, `libisal.so.2` of the system; else pyeclib's own isa_l_rs_cauchy, which
gives byte-identical parity. pyeclib is the reference in tests. Every index, count, length and type is checked
*before* a library is called: pyeclib ends the process on an index it does not like.

Shards are passed as 2-D uint8 arrays (rows, shard bytes): row r of all twelve arrays is one stripe. Rows may lie anywhere
(any row stride) but each row's bytes are contiguous.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

Shards = NDArray[np.uint8]


class Codec:
    """Encoder and rebuilder. `backend` is "isal-bundled", "isal-system" or "pyeclib"; None takes the first that loads."""

    backend: str

    def __init__(self, backend: str | None = None) -> None:
        raise NotImplementedError

    def encode(self, data: Sequence[Shards], parity: Sequence[Shards]) -> None:
        """Fill the two parity arrays from the ten data arrays. CodecError on any mismatch of count, shape or type."""
        raise NotImplementedError

    def rebuild(self, present: Mapping[int, Shards], wanted: Mapping[int, Shards]) -> None:
        """Fill `wanted` shards from exactly ten `present` ones; indices 0–11, disjoint. Nothing here knows whether the
        inputs are right: the caller verifies the result."""
        raise NotImplementedError
