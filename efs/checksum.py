"""Checksums: xxh3 against accidents. None of them protects against somebody who can write to the disk.

`xxh3_64` guards segments, shards, headers and table entries; `xxh3_128` makes the block digest, the identity of a
version. Both with seed 0, as 64- and 128-bit integers or big-endian bytes of the xxHash specification.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest as xxh3_64
from xxhash import xxh3_128_digest as xxh3_128

__all__ = ["xxh3_64", "xxh3_128"]
