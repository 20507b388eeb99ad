"""Inputs of the key golden vectors, and a straight-line second implementation of the format of `kvstore.keys`.

`python -m tests.support.keyvectors` prints what the package gives for the inputs as JSON: a test runs it in other
processes and compares with the pinned file.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvstore.keys import Chain, Namespace
from kvstore.layout import V41_FLASH, BlockLayout, Segment

SECRET = bytes(range(32))
TINY = BlockLayout("format", "dtype", 2, (Segment("one", 3), Segment("two", 2_900_000)), 7, "tiny")


@dataclass(frozen=True)
class Case:
    """A chain and where to look at it."""

    name: str
    namespace: Namespace
    tokens: Sequence[int]
    shown: tuple[int, ...]
    images: tuple[tuple[bytes | str, int, int], ...] = ()
    lora: str | bytes | None = None
    salt: str | bytes | None = None
    engine_hashes: tuple[bytes, ...] = field(default=())

    def chain(self) -> Chain:
        if self.engine_hashes:
            return self.namespace.bind(self.engine_hashes)
        return self.namespace.chain(self.tokens, images=self.images, lora=self.lora, salt=self.salt)


CASES = (
    Case("v41", Namespace("deepseek-v4.1-flash", "sha256:0", V41_FLASH), range(300 * 128), (0, 3, 4, 63, 64, 299)),
    Case("v41-tenant", Namespace("deepseek-v4.1-flash", "sha256:0", V41_FLASH, tenant="acme", secret=SECRET),
         range(10 * 128), (0, 4, 9)),
    Case("all-fields", Namespace("modèle", "w", TINY, (1, 2, 0, 3), 5, "acme", 2**40, SECRET), [2**32 - 1, 0] * 10,
         (0, 3, 4, 9), (("image", 3, 9), (b"\x00\xff", 0, 1)), "lora", b"salt"),
    Case("empty-texts", Namespace("m", "w", TINY), [0] * 20, (0, 9), lora="", salt=""),
    Case("bound", Namespace("m", "w", TINY, tenant="acme", secret=SECRET), (), (0, 3, 4, 9),
         engine_hashes=tuple(bytes([number]) * 32 for number in range(10))),
)


def show(case: Case) -> dict[str, object]:
    chain = case.chain()
    return {
        "name": case.name,
        "keys": {str(block): chain[block].hex() for block in case.shown},
        "all": hashlib.sha256(b"".join(chain)).hexdigest(),
        "tenant_tag": case.namespace.tenant_tag.hex(),
        "layout": case.namespace.layout.digest.hex(),
    }


def second_keys(case: Case) -> list[bytes]:
    """The keys of a case, written from the format's description alone and without a thought of speed."""
    space = case.namespace
    root = _digest(space, b"kvstore/root/1", _root_message(case))
    digests = []
    if case.engine_hashes:
        for value in case.engine_hashes:
            digests.append(_digest(space, b"kvstore/bind/1", _tagged(1, root) + _tagged(2, value)))
    else:
        size = space.layout.block_tokens
        before = root
        for block in range(len(case.tokens) // size):
            tokens = case.tokens[block * size : (block + 1) * size]
            message = _tagged(1, before) + _tagged(2, b"".join(struct.pack("<I", token) for token in tokens))
            for start, digest in sorted((start, _raw(digest)) for digest, start, stop in case.images
                                        if start < (block + 1) * size and stop > block * size):
                message += _tagged(3, struct.pack("<q", start - block * size) + digest)
            before = _digest(space, b"kvstore/block/1", message)
            digests.append(before)
    most = 64
    while most > 1 and most * space.layout.block_bytes > 16 * 2**20:
        most //= 2
    keys: list[bytes] = []
    while len(keys) < len(digests):
        run = min(most, _natural(len(keys)))
        group = hashlib.blake2b(digests[len(keys)], digest_size=32, person=b"kvstore/pg/1").digest()[:2]
        keys += [group + digest for digest in digests[len(keys) : len(keys) + run]]
    return keys


def _natural(start: int) -> int:
    """Size of the uncapped run that begins at or spans `start`."""
    for first, size in ((0, 4), (4, 4), (8, 8), (16, 16), (32, 32)):
        if first <= start < first + size:
            return size
    return 64


def _root_message(case: Case) -> bytes:
    space = case.namespace
    message = _tagged(1, space.model.encode()) + _tagged(2, space.weights.encode()) + _tagged(3, space.layout.digest)
    message += _tagged(4, struct.pack(f"<{len(space.parallel)}I", *space.parallel))
    message += _tagged(5, struct.pack("<I", space.group))
    if space.tenant is not None:
        message += _tagged(6, space.tenant.encode()) + _tagged(7, struct.pack("<Q", space.generation))
    if case.lora is not None:
        message += _tagged(8, _raw(case.lora))
    if case.salt is not None:
        message += _tagged(9, _raw(case.salt))
    return message


def _digest(space: Namespace, person: bytes, message: bytes) -> bytes:
    return hashlib.blake2b(message, digest_size=32, key=space.secret or b"", person=person).digest()[:30]


def _tagged(tag: int, value: bytes) -> bytes:
    return struct.pack("<BI", tag, len(value)) + value


def _raw(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


if __name__ == "__main__":
    print(json.dumps([show(case) for case in CASES], indent=1))
