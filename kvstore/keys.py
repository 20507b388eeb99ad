"""Keys: namespaces, hash chains, runs. Pure. This docstring is the format; golden vectors in the tests pin it.

A key is 32 bytes: 2 bytes of *placement group* and 30 bytes of *digest*. All hashing is BLAKE2b with 32 bytes of output
(digest_size 32), cut to the first 30; H(person, message) below is keyed with the namespace's secret unless it
says unkeyed, and `person` is the domain string, at most 16 bytes, padded by BLAKE2b itself.

A message is a sequence of fields, each: tag (1 byte), length of the value in bytes (uint32), value. Integers are
little-endian. A text is its UTF-8 bytes, taken as they are (no normalisation); text and bytes of the same bytes are
the same value. A field that is absent (None) is not written, so None is not "": an empty lora or salt is a value of
its own. Model, weights digest and tenant must not be empty, where they are given.

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

Only full blocks have keys; an image without a stop counts as one token long, at its start. The same image given twice
counts once. Images behind the last full block change nothing.

*Runs.* Consecutive blocks share a placement in runs of 4, 4, 8, 16, 32, then 64 blocks, none of them more than the
largest power of two of blocks whose bytes fit 16 MiB (at least one block). Runs begin at fixed positions of the
chain. The placement group of a run is the first two bytes of the unkeyed H("kvstore/pg/1", digest of the run's first
block); the message is the bare 30 bytes. For an engine's hashes that digest is bound[i] of the run's first block,
which is why a slice that begins inside a run has to bring the engine's hash of the run's first block (`run_head`):
the same group follows on every machine. With start=None the position is unknown and every key is a run of its own.
The group is a part of the key: a block bound with and without its position has two keys, so all users of a namespace
must bind in one way.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from operator import index as as_integer
from struct import Struct
from typing import Any, Final, overload

import numpy as np

from efs.errors import InvalidArgument
from efs.limits import DEPTH_UNKNOWN, KEY_BYTES
from kvstore.layout import BlockLayout
from kvstore.tenants import MAX_GENERATION, tenant_tag

RUN_BYTES: Final = 16 * 1024 * 1024
MAX_RUN_BLOCKS: Final = 64
HEAD_RUN_BLOCKS: Final = 4
MAX_TOKEN: Final = 0xFFFF_FFFF
UNSIGNED_UP_TO_32: Final = tuple(np.dtype(name) for name in ("u1", "u2", "u4"))
MIN_SECRET_BYTES: Final = 16
MAX_SECRET_BYTES: Final = 64

DIGEST_BYTES: Final = 30
MIN_ENGINE_HASH_BYTES: Final = 8
"""Shorter ones collide by accident."""
MAX_ENGINE_HASH_BYTES: Final = 64

ROOT_PERSON: Final = b"kvstore/root/1"
BLOCK_PERSON: Final = b"kvstore/block/1"
BIND_PERSON: Final = b"kvstore/bind/1"
GROUP_PERSON: Final = b"kvstore/pg/1"

assert max(map(len, (ROOT_PERSON, BLOCK_PERSON, BIND_PERSON, GROUP_PERSON))) <= blake2b.PERSON_SIZE
assert DIGEST_BYTES + 2 == KEY_BYTES

HEAD: Final = Struct("<BI")

Image = tuple[bytes | str, int] | tuple[bytes | str, int, int]
"""An image's digest, the position of its first token and, where known, the position behind its last one."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """All that changes KV bytes beside the tokens; an immutable value. Keys of different namespaces never meet.

    model, weights: name and digest of the weights, not empty. parallel: (rank, size) of the tensor-parallel part that
    these bytes are, or (rank, size, pipeline rank, pipeline size). group: KV group of a model that has several.
    tenant: whose blocks these are; needs `secret`, 16 to 64 bytes, which keys every hash (a secret without a tenant
    is allowed). generation: of the tenant, raised by a purge. InvalidArgument names the field that is wrong.
    """

    model: str
    weights: str
    layout: BlockLayout
    parallel: tuple[int, ...] = (0, 1)
    group: int = 0
    tenant: str | None = None
    generation: int = 0
    secret: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        for name in ("model", "weights"):
            _text_field(name, getattr(self, name))
        if not isinstance(self.layout, BlockLayout):
            raise InvalidArgument(f"layout is of type {type(self.layout).__name__}, must be a BlockLayout")
        object.__setattr__(self, "parallel", _parallel(self.parallel))
        _integer_field("group", self.group, 0xFFFF_FFFF)
        _integer_field("generation", self.generation, MAX_GENERATION)
        secret = b"" if self.secret is None else self.secret
        if not isinstance(secret, bytes) or (secret and not MIN_SECRET_BYTES <= len(secret) <= MAX_SECRET_BYTES):
            raise InvalidArgument(f"secret must be {MIN_SECRET_BYTES} to {MAX_SECRET_BYTES} bytes")
        object.__setattr__(self, "secret", secret or None)
        if self.tenant is not None:
            _text_field("tenant", self.tenant)
            if not secret:
                raise InvalidArgument(f"tenant {self.tenant!r} has no secret")
        elif self.generation:
            raise InvalidArgument(f"generation is {self.generation} without a tenant, must be 0")

    @property
    def tenant_tag(self) -> bytes:
        """8 bytes that mark a tenant's records on disk (`kvstore.tenants.tenant_tag`); zeros without a tenant."""
        return tenant_tag(self.tenant, self.generation, self.secret or b"")

    def chain(self, tokens: Any, *, images: Iterable[Image] = (), lora: str | bytes | None = None,
              salt: str | bytes | None = None) -> Chain:
        """The keys of all full blocks of a token sequence that starts at position 0.

        tokens: one-dimensional; a sequence of ints, or any buffer or array of an integer type. Each in [0, 2^32);
        InvalidArgument names the position of the first that is not.
        """
        data = memoryview(_token_bytes(tokens))
        block_tokens = self.layout.block_tokens
        blocks = len(data) // 4 // block_tokens
        extras = _image_fields(images, block_tokens, blocks)
        digests = self._block_digests(data, blocks, extras, self._root(lora, salt))
        return Chain(self, _with_groups(digests, 0, self.layout.block_bytes), 0)

    def bind(self, engine_hashes: Sequence[bytes], start: int | None = 0, *, run_head: bytes | None = None) -> Chain:
        """Keys from an engine's own block hashes (8 to 64 bytes each), of which the first is block `start` of its
        chain.

        run_head: the engine's hash of the first block of the run that contains `start`, needed when that is not `start`
        itself. InvalidArgument (a ValueError) when it is missing, or given where it has no meaning.
        """
        prefix = _field(1, self._root(None, None))
        digests = [self._bound(prefix, value, f"engine hash {i}") for i, value in enumerate(engine_hashes)]
        if start is None:
            if run_head is not None:
                raise InvalidArgument("run_head is given, but start=None says that positions are unknown")
            return Chain(self, [_group_of(digest) + digest for digest in digests], None)
        _integer_field("start", start, DEPTH_UNKNOWN - 1)
        if not digests:
            return Chain(self, (), start)
        head = None
        first = run_start(start, run_blocks(self.layout.block_bytes))
        if first == start:
            if run_head is not None and run_head != engine_hashes[0]:
                raise InvalidArgument(f"block {start} begins a run, so run_head can only be its own hash")
        elif run_head is None:
            raise InvalidArgument(f"block {start} lies inside the run that begins at {first}: run_head= must give "
                                  f"the engine's hash of block {first}")
        else:
            head = self._bound(prefix, run_head, "run_head")
        return Chain(self, _with_groups(digests, start, self.layout.block_bytes, head), start)

    def _root(self, lora: str | bytes | None, salt: str | bytes | None) -> bytes:
        message = [
            _field(1, self.model.encode()),
            _field(2, self.weights.encode()),
            _field(3, self.layout.digest),
            _field(4, b"".join(value.to_bytes(4, "little") for value in self.parallel)),
            _field(5, self.group.to_bytes(4, "little")),
        ]
        if self.tenant is not None:
            message += [_field(6, self.tenant.encode()), _field(7, self.generation.to_bytes(8, "little"))]
        if lora is not None:
            message.append(_field(8, _bytes_of("lora", lora)))
        if salt is not None:
            message.append(_field(9, _bytes_of("salt", salt)))
        return self._keyed(ROOT_PERSON, b"".join(message))

    def _keyed(self, person: bytes, message: bytes) -> bytes:
        return blake2b(message, digest_size=32, key=self.secret or b"", person=person).digest()[:DIGEST_BYTES]

    def _bound(self, prefix: bytes, engine_hash: bytes, what: str) -> bytes:
        if not isinstance(engine_hash, bytes):
            raise InvalidArgument(f"{what} is of type {type(engine_hash).__name__}, must be bytes")
        if not MIN_ENGINE_HASH_BYTES <= len(engine_hash) <= MAX_ENGINE_HASH_BYTES:
            raise InvalidArgument(f"{what} has {len(engine_hash)} bytes, must have {MIN_ENGINE_HASH_BYTES} to "
                                  f"{MAX_ENGINE_HASH_BYTES}")
        return self._keyed(BIND_PERSON, prefix + _field(2, engine_hash))

    def _block_digests(self, data: memoryview, blocks: int, extras: dict[int, bytes], digest: bytes) -> list[bytes]:
        """The chain's loop: 781 rounds for 100,000 tokens, so nothing in it that could stand outside."""
        size = 4 * self.layout.block_tokens
        before, between = HEAD.pack(1, DIGEST_BYTES), HEAD.pack(2, size)
        secret = self.secret or b""
        digests = []
        for block in range(blocks):
            tokens = data[block * size : (block + 1) * size]
            message = b"".join((before, digest, between, tokens, extras.get(block, b"")))
            digest = blake2b(message, digest_size=32, key=secret, person=BLOCK_PERSON).digest()[:DIGEST_BYTES]
            digests.append(digest)
        return digests


class Chain(Sequence[bytes]):
    """An immutable sequence of 32-byte keys of consecutive blocks; knows its namespace and the position of its first
    block.

    chain[i] is a key; chain[a:b] is a Chain that keeps namespace and position, with the usual meaning of negative and
    missing bounds. A step other than 1 is a ValueError: the result would not be consecutive. Equal when namespace,
    position and keys are.
    """

    __slots__ = ("_keys", "_namespace", "_start")

    _keys: tuple[bytes, ...]
    _namespace: Namespace
    _start: int | None

    def __init__(self, namespace: Namespace, keys: Sequence[bytes], start: int | None) -> None:
        for position, key in enumerate(keys):
            if len(key) != KEY_BYTES:
                raise InvalidArgument(f"key {position} has {len(key)} bytes, must have {KEY_BYTES}")
        object.__setattr__(self, "_namespace", namespace)
        object.__setattr__(self, "_keys", tuple(keys))
        object.__setattr__(self, "_start", start)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Chain is immutable, {name} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Chain is immutable, {name} cannot be deleted")

    @property
    def namespace(self) -> Namespace:
        """What the keys were made in."""
        return self._namespace

    @property
    def layout(self) -> BlockLayout:
        """The namespace's layout: what a block's bytes look like."""
        return self._namespace.layout

    @property
    def start(self) -> int | None:
        """Position of the first block in its chain, None when unknown. A slice's start is its own first block's."""
        return self._start

    @property
    def keys(self) -> tuple[bytes, ...]:
        """The keys as a plain tuple."""
        return self._keys

    @property
    def depths(self) -> Sequence[int]:
        """Position of each block in its chain; `efs.limits.DEPTH_UNKNOWN` where unknown."""
        if self._start is None:
            return [DEPTH_UNKNOWN] * len(self._keys)
        return range(self._start, self._start + len(self._keys))

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> Chain: ...

    def __getitem__(self, index: int | slice) -> bytes | Chain:
        if not isinstance(index, slice):
            return self._keys[index]
        first, stop, step = index.indices(len(self._keys))
        if step != 1:
            raise InvalidArgument(f"a slice of a Chain has step {step}, must be 1: blocks stay consecutive")
        start = None if self._start is None else self._start + first
        return Chain(self._namespace, self._keys[first:stop], start)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Chain):
            return NotImplemented
        return (self._start, self._keys, self._namespace) == (other._start, other._keys, other._namespace)

    def __hash__(self) -> int:
        return self._namespace.__hash__() ^ self._keys.__hash__()

    def __repr__(self) -> str:
        where = "at unknown positions" if self._start is None else f"from block {self._start}"
        return f"<Chain of {len(self._keys)} keys {where}, model {self._namespace.model}>"


def run_blocks(block_bytes: int) -> int:
    """Most blocks in a run: the largest power of two whose bytes fit 16 MiB, between 1 and 64."""
    fitting = max(1, RUN_BYTES // block_bytes)
    return min(MAX_RUN_BLOCKS, 1 << (fitting.bit_length() - 1))


def run_start(block: int, most: int) -> int:
    """Position of the first block of the run that contains position `block`, for runs of at most `most` blocks.

    From block 4 on a run of 2^j blocks begins at each position 2^j (so the chain is cut at powers of two), until 64.
    """
    size = max(HEAD_RUN_BLOCKS, 1 << max(0, block.bit_length() - 1))
    return block - block % min(size, most)


def _with_groups(digests: Sequence[bytes], start: int, block_bytes: int, head: bytes | None = None) -> list[bytes]:
    """Keys of consecutive digests from position `start`. head: digest of the first block of the run that `start` is
    in."""
    most = run_blocks(block_bytes)
    group = None if head is None else _group_of(head)
    keys = []
    for block, digest in enumerate(digests, start):
        if group is None or run_start(block, most) == block:
            group = _group_of(digest)
        keys.append(group + digest)
    return keys


def _group_of(digest: bytes) -> bytes:
    """The placement group of the run that begins with this digest."""
    return blake2b(digest, digest_size=32, person=GROUP_PERSON).digest()[:2]


def _field(tag: int, value: bytes) -> bytes:
    return HEAD.pack(tag, len(value)) + value


def _bytes_of(what: str, value: str | bytes) -> bytes:
    if isinstance(value, str):
        return _utf8(what, value)
    if isinstance(value, bytes):
        return value
    raise InvalidArgument(f"{what} is of type {type(value).__name__}, must be str or bytes")


def _text_field(what: str, value: object) -> None:
    if not isinstance(value, str) or not value:
        raise InvalidArgument(f"{what} is {value!r}, must be a non-empty string")
    _utf8(what, value)


def _utf8(what: str, text: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"{what} is {text!r}, which is no text in UTF-8") from None


def _integer_field(what: str, value: object, most: int) -> None:
    if type(value) is not int or not 0 <= value <= most:
        raise InvalidArgument(f"{what} is {value!r}, must be an integer of 0 to {most}")


def _parallel(values: Sequence[int]) -> tuple[int, ...]:
    """Checked; a pipeline of one stage is left out, so that (rank, size) and (rank, size, 0, 1) are the same value."""
    pairs = tuple(values)
    if len(pairs) not in (2, 4) or any(type(value) is not int for value in pairs):
        raise InvalidArgument(f"parallel is {values!r}, must be (rank, size) or these and two of the pipeline")
    for rank, size in zip(pairs[::2], pairs[1::2], strict=True):
        if not 0 <= rank < size <= 0xFFFF_FFFF:
            raise InvalidArgument(f"parallel is {values!r}: rank {rank} must be 0 or more and below size {size}")
    return pairs[:2] if pairs[2:] == (0, 1) else pairs


def _token_bytes(tokens: Any) -> memoryview | bytes:
    """Token ids as little-endian uint32, flat; without a copy where they are that already."""
    if isinstance(tokens, (str, bytes, bytearray)):
        raise InvalidArgument(f"tokens is of type {type(tokens).__name__}, must be a sequence or array of integers")
    if isinstance(tokens, (list, tuple, range)):
        return _listed_tokens(tokens)
    try:
        ids = np.asarray(tokens)
    except (TypeError, ValueError, RuntimeError) as error:
        raise InvalidArgument(f"tokens of type {type(tokens).__name__} cannot be read: {error}") from error
    if ids.dtype == object and isinstance(tokens, Sequence):
        return _listed_tokens(tokens)
    if ids.ndim != 1:
        raise InvalidArgument(f"tokens has {ids.ndim} dimensions, must have 1")
    if ids.dtype.kind not in "iu":
        if ids.size == 0:
            return b""
        raise InvalidArgument(f"tokens has elements of type {ids.dtype}, must have integers")
    if ids.size and ids.dtype.newbyteorder("=") not in UNSIGNED_UP_TO_32:
        wrong = np.flatnonzero((ids < 0) | (ids > MAX_TOKEN))
        if wrong.size:
            raise _bad_token(int(wrong[0]), int(ids[wrong[0]]))
    return np.ascontiguousarray(ids, dtype="<u4").data.cast("B") if ids.size else b""


def _listed_tokens(tokens: Sequence[Any]) -> bytes:
    try:
        ids = array("I", tokens)
    except (TypeError, OverflowError, ValueError) as error:
        for position, token in enumerate(tokens):
            try:
                value = as_integer(token)
            except TypeError:
                raise _bad_token(position, token) from None
            if not 0 <= value <= MAX_TOKEN:
                raise _bad_token(position, value) from None
        raise InvalidArgument(f"tokens cannot be read: {error}") from error
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def _bad_token(position: int, value: object) -> InvalidArgument:
    return InvalidArgument(f"token {position} is {value!r}, must be an integer of 0 to {MAX_TOKEN}")


def _image_fields(images: Iterable[Image], block_tokens: int, blocks: int) -> dict[int, bytes]:
    """For each block that images overlap its fields 3, by start of the image, then digest."""
    placed = set()
    for number, image in enumerate(images):
        if len(image) not in (2, 3):
            raise InvalidArgument(f"image {number} has {len(image)} parts, must be (digest, start[, stop])")
        digest = _bytes_of(f"digest of image {number}", image[0])
        try:
            start = as_integer(image[1])
            stop = as_integer(image[2]) if len(image) == 3 else start + 1
        except TypeError:
            raise InvalidArgument(f"image {number} is {image!r}, its positions must be integers") from None
        if not digest or not 0 <= start < stop:
            raise InvalidArgument(f"image {number} is {image!r}, must have a digest and 0 <= start < stop")
        placed.add((start, digest, stop))
    fields: dict[int, bytes] = {}
    for start, digest, stop in sorted(placed):
        for block in range(start // block_tokens, min(blocks, (stop - 1) // block_tokens + 1)):
            offset = start - block * block_tokens
            fields[block] = fields.get(block, b"") + _field(3, offset.to_bytes(8, "little", signed=True) + digest)
    return fields
