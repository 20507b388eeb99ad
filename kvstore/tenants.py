"""Tenants of a store: names, secrets and generations, in the file `tenants.toml` of the store root.

    version = 1

    [[tenant]]
    name = "acme"
    generation = 0
    secret = "…"                 # 64 hex digits, 32 random bytes
    retired = ["…"]              # tags of earlier secrets and generations, 16 hex digits each, oldest first

The file is 0600 and is read only when nobody but its owner has any right to it; it is replaced whole (written beside, synced,
renamed), under a lock on the root directory, so a reader sees the old file or the new one. End users' requests never carry a secret: whoever may read this file
may derive a tenant's keys.

A tenant's *tag* marks its records on disk: the first 8 bytes of BLAKE2b-256 keyed with the secret, person
b"kvstore/tag/1", over two fields (tag, uint32 length, value): 1 the name in UTF-8, 2 the generation as uint64. Without a
tenant the tag is zeros. Raising the generation or changing the secret changes all keys and the tag; the old tag is kept as *retired*, so
that a purge can still name the records that carry it.

Names have 1 to 64 characters of a-z, A-Z, 0-9, ".", "_" and "-", and begin with a letter or a digit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from secrets import token_bytes
from typing import Final

from efs.osio import Io

TENANTS_FILE: Final = "tenants.toml"
SECRET_BYTES: Final = 32
TAG_BYTES: Final = 8
NO_TENANT_TAG: Final = bytes(TAG_BYTES)


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as the file has it."""

    name: str
    secret: bytes = field(repr=False)
    generation: int = 0
    retired: tuple[bytes, ...] = ()

    @property
    def tag(self) -> bytes:
        return tenant_tag(self.name, self.generation, self.secret)


def tenant_tag(name: str | None, generation: int, secret: bytes) -> bytes:
    """8 bytes; zeros when `name` is None."""
    raise NotImplementedError


def list_tenants(root: str, *, io: Io | None = None) -> list[Tenant]:
    """All tenants, by name; none when there is no file. InvalidArgument names a file that is loose, linked or malformed."""
    raise NotImplementedError


def find_tenant(root: str, name: str, *, io: Io | None = None) -> Tenant:
    """One tenant; InvalidArgument when there is no such name."""
    raise NotImplementedError


def add_tenant(root: str, name: str, *, io: Io | None = None,
               random_bytes: Callable[[int], bytes] = token_bytes) -> Tenant:
    """A new tenant with a random secret and generation 0; InvalidArgument for a bad name and one that exists."""
    raise NotImplementedError


def rotate_tenant(root: str, name: str, *, io: Io | None = None,
                  random_bytes: Callable[[int], bytes] = token_bytes) -> Tenant:
    """A new secret and the next generation: nothing stored before can be derived any more. The old tag is kept as retired."""
    raise NotImplementedError
