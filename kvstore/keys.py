"""Keys: namespaces, hash chains, runs. Pure. This docstring is the format; golden vectors in the tests pin it.

A key is 32 bytes: 2 bytes of *placement group* and 30 bytes of *digest*. All hashing is BLAKE2b with 32 bytes of output
(digest_size 32), cut to the first 30; H(person, message) below is keyed with the namespace's secret unless it
says unkeyed, and `person` is the domain string, at most 16 bytes, padded by BLAKE2b itself.

A message is a sequence of fields, each: tag (1 byte), length of the value in bytes (uint32), value. Integers are
little-endian. A text is its UTF-8 bytes, taken as they are (no normalisation); text and bytes of the same bytes are the
same value. A field that is absent (None) is not written, so None is not "": an empty lora or salt is a value of its own.
Model, weights digest and tenant must not be empty, where they are given.

    root    = H("kvstore/root/1", fields)
        1   model, text
        2   weights digest, text
        3   layout digest, 32 bytes
        4   parallel: rank and size, uint32 each; then pipeline rank and size when the pipeline has more than one stage
        5   KV group, uint32
        6   tenant, text                     absent without a tenant
        7   generation of the tenant, uint64 absent without a tenant
        8   LoRA digest, text or bytes       absent when None
        9   salt, text or bytes              absent when None
    digest[i] = H("kvstore/block/1", fields)
        1   digest[i - 1], or root for i = 0; 30 bytes
        2   the block's token ids, uint32 each
        3   an image that overlaps the block, one field each, by start, then digest: position of the image's first token
            minus position of the block's first token (int64, below zero when it began in an earlier block), then
            its digest, bytes or text
    bound[i]  = H("kvstore/bind/1", fields)
        1   root
        2   the engine's own hash of the block

Only full blocks have keys; an image without a stop counts as one token long, at its start. The same image given twice counts
once. Images behind the last full block change nothing.

*Runs.* Consecutive blocks share a placement in runs of 4, 4, 8, 16, 32, then 64 blocks, none of them more than the
largest power of two of blocks whose bytes fit 16 MiB (at least one block). Runs begin at fixed positions of the chain. The placement group of a run is the
first two bytes of the unkeyed H("kvstore/pg/1", digest of the run's first block); the message is the bare 30 bytes.
For an engine's hashes that digest is bound[i] of the run's first block, which is why a slice that begins inside a run has to
bring the engine's hash of the run's first block (`run_head`): the same group follows on every machine. With start=None
the position is unknown and every key is a run of its own. The group is a part of the key: a block bound with
and without its position has two keys, so all users of a namespace must bind in one way.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, overload

from kvstore.layout import BlockLayout

RUN_BYTES: Final = 16 * 1024 * 1024
MAX_RUN_BLOCKS: Final = 64
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 64

Image = tuple[bytes | str, int] | tuple[bytes | str, int, int]
"""An image's digest, the position of its first token and, where known, the position behind its last one."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that changes KV bytes beside the tokens; an immutable value. Keys of different namespaces never meet.

    model, weights: name and digest of the weights, not empty. parallel: (rank, size) of the tensor-parallel
    part that these bytes are, or (rank, size, pipeline rank, pipeline size). group: KV group of a model that has several.
    tenant: whose blocks these are; needs `secret`, 16 to 64 bytes, which keys every hash (a secret without a tenant is
    allowed). generation: of the tenant, raised by a purge. InvalidArgument names the field that is wrong.
    """

    model: str
    weights: str
    layout: BlockLayout
    parallel: tuple[int, ...] = (0, 1)
    group: int = 0
    tenant: str | None = None
    generation: int = 0
    secret: bytes | None = field(default=None, repr=False)

    @property
    def tenant_tag(self) -> bytes:
        """8 bytes that mark a tenant's records on disk (`kvstore.tenants.tenant_tag`); zeros without a tenant."""
        raise NotImplementedError

    def chain(self, tokens: Any, *, images: Iterable[Image] = (), lora: str | bytes | None = None,
              salt: str | bytes | None = None) -> Chain:
        """The keys of all full blocks of a token sequence that starts at position 0.

        tokens: one-dimensional; a sequence of ints, or any buffer or array of an integer type. Each in [0, 2^32);
        InvalidArgument names the position of the first that is not.
        """
        raise NotImplementedError

    def bind(self, engine_hashes: Sequence[bytes], start: int | None = 0, *, run_head: bytes | None = None) -> Chain:
        """Keys from an engine's own block hashes (8 to 64 bytes each), of which the first is block `start` of its chain.

        run_head: the engine's hash of the first block of the run that contains `start`, needed when that is not `start`
        itself. InvalidArgument (a ValueError) when it is missing, or given where it has no meaning.
        """
        raise NotImplementedError


class Chain(Sequence[bytes]):
    """An immutable sequence of 32-byte keys of consecutive blocks; knows its namespace and the position of its first block.

    chain[i] is a key; chain[a:b] is a Chain that keeps namespace and position, with the usual meaning of negative and
    missing bounds. A step other than 1 is a ValueError: the result would not be consecutive. Equal when namespace, position
    and keys are.
    """

    __slots__ = ("_keys", "_namespace", "_start")

    def __init__(self, namespace: Namespace, keys: Sequence[bytes], start: int | None) -> None:
        raise NotImplementedError

    @property
    def namespace(self) -> Namespace:
        raise NotImplementedError

    @property
    def layout(self) -> BlockLayout:
        raise NotImplementedError

    @property
    def start(self) -> int | None:
        """Position of the first block in its chain, None when unknown. A slice's start is its own first block's."""
        raise NotImplementedError

    @property
    def keys(self) -> tuple[bytes, ...]:
        raise NotImplementedError

    @property
    def depths(self) -> Sequence[int]:
        """Position of each block in its chain; `efs.limits.DEPTH_UNKNOWN` where unknown."""
        raise NotImplementedError

    def __len__(self) -> int:
        raise NotImplementedError

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Chain: ...

    def __getitem__(self, index: int | slice) -> bytes | Chain:
        raise NotImplementedError


def run_blocks(block_bytes: int) -> int:
    """Most blocks in a run: the largest power of two whose bytes fit 16 MiB, between 1 and 64."""
    raise NotImplementedError


def run_start(block: int, most: int) -> int:
    """Position of the first block of the run that contains position `block`, for runs of at most `most` blocks."""
    raise NotImplementedError
