"""Tenants of a store: names, secrets and generations, in the file `tenants.toml` of the store root.

    version = 1

    [[tenant]]
    name = "acme"
    generation = 0
    secret = "…"                 # 64 hex digits, 32 random bytes
    retired = ["…"]              # tags of earlier secrets and generations, 16 hex digits each, oldest first
    quota_bytes = 10737418240    # what its blocks may take of the store's capacity; left out: no quota
    purging = true               # a purge has begun and has not been noted by the store; left out: none

The file is 0600 and is read only when nobody but its owner has any right to it; it is replaced whole (written beside,
synced, renamed), under a lock on the root directory, so a reader sees the old file or the new one. End users'
requests never carry a secret: whoever may read this file may derive a tenant's keys.

A tenant's *tag* marks its records on disk: the first 8 bytes of BLAKE2b-256 keyed with the secret, person
b"kvstore/tag/1", over two fields (tag, uint32 length, value): 1 the name in UTF-8, 2 the generation as uint64.
Without a tenant the tag is zeros. Raising the generation or changing the secret changes all keys and the tag; the old
tag is kept as *retired*, so that a purge can still name the records that carry it. A purge begins with that, in one
write of this file (`begin_purge`), and a purge that was killed is seen by `purging`.

Names have 1 to 64 characters of a-z, A-Z, 0-9, ".", "_" and "-", and begin with a letter or a digit.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from secrets import token_bytes
from typing import Any, Final

from efs.dirlock import locked_directory
from efs.errors import InvalidArgument, Locked, StoreNotFound
from efs.osio import Io, SystemIo, read_exactly, replace_file
from kvstore.config import toml_reason

TENANTS_FILE: Final = "tenants.toml"
SECRET_BYTES: Final = 32
TAG_BYTES: Final = 8
NO_TENANT_TAG: Final = bytes(TAG_BYTES)
FILE_VERSION: Final = 1
MAX_FILE_BYTES: Final = 4 * 1024 * 1024
"""Some 20,000 tenants; a larger file is not one of ours."""
MAX_GENERATION: Final = 2**63 - 1
"""What a TOML integer holds."""
NAME_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FIELDS: Final = frozenset({"name", "generation", "secret", "retired", "quota_bytes", "purging"})


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant as the file has it; InvalidArgument for a field out of its range, never showing the secret."""

    name: str
    secret: bytes = field(repr=False)
    generation: int = 0
    retired: tuple[bytes, ...] = ()
    quota_bytes: int | None = None
    purging: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not NAME_PATTERN.fullmatch(self.name):
            raise InvalidArgument(
                f"tenant name {self.name!r} must be 1 to 64 of a-z A-Z 0-9 . _ - and begin with a letter or digit"
            )
        if len(self.secret) != SECRET_BYTES:
            raise InvalidArgument(f"tenant {self.name}: secret has {len(self.secret)} bytes, must have {SECRET_BYTES}")
        if not 0 <= self.generation <= MAX_GENERATION:
            raise InvalidArgument(f"tenant {self.name}: generation is {self.generation}, must be 0 to {MAX_GENERATION}")
        if any(len(tag) != TAG_BYTES for tag in self.retired):
            raise InvalidArgument(f"tenant {self.name}: a retired tag does not have {TAG_BYTES} bytes")
        if self.quota_bytes is not None and not 0 <= self.quota_bytes <= MAX_GENERATION:
            raise InvalidArgument(f"tenant {self.name}: quota_bytes is {self.quota_bytes}, must be 0 to "
                                  f"{MAX_GENERATION}")

    @property
    def tag(self) -> bytes:
        """What marks this tenant's records of this generation."""
        return tenant_tag(self.name, self.generation, self.secret)


def tenant_tag(name: str | None, generation: int, secret: bytes) -> bytes:
    """8 bytes; zeros when `name` is None."""
    if name is None:
        return NO_TENANT_TAG
    fields = ((1, name.encode()), (2, generation.to_bytes(8, "little")))
    message = b"".join(bytes([tag]) + len(value).to_bytes(4, "little") + value for tag, value in fields)
    return blake2b(message, digest_size=32, key=secret, person=b"kvstore/tag/1").digest()[:TAG_BYTES]


def list_tenants(root: str, *, io: Io | None = None) -> list[Tenant]:
    """All tenants, by name; none when there is no file. InvalidArgument names a file that is loose, linked or
    malformed."""
    path = os.path.join(root, TENANTS_FILE)
    try:
        data = _read(io or SystemIo(), path)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise InvalidArgument(f"{path}: {error.strerror or error}") from error
    try:
        table = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(f"{path}: {toml_reason(error)}") from None
    try:
        return _parse(table)
    except ValueError as error:
        raise InvalidArgument(f"{path}: {_reason(error)}") from error


def find_tenant(root: str, name: str, *, io: Io | None = None) -> Tenant:
    """One tenant; InvalidArgument when there is no such name."""
    return _find(list_tenants(root, io=io), name)


def add_tenant(root: str, name: str, *, io: Io | None = None,
               random_bytes: Callable[[int], bytes] = token_bytes) -> Tenant:
    """A new tenant with a random secret and generation 0; InvalidArgument for a bad name and one that exists."""
    io = io or SystemIo()
    added = Tenant(name, random_bytes(SECRET_BYTES))
    with _exclusive(io, root):
        tenants = list_tenants(root, io=io)
        if any(tenant.name == name for tenant in tenants):
            raise InvalidArgument(f"tenant {name} exists already")
        _write(io, root, [*tenants, added])
    return added


def rotate_tenant(root: str, name: str, *, io: Io | None = None,
                  random_bytes: Callable[[int], bytes] = token_bytes) -> Tenant:
    """A new secret and the next generation: nothing stored before can be derived any more. The old tag is kept as
    retired."""
    return _change(io or SystemIo(), root, name, lambda old: _rotated(old, random_bytes(SECRET_BYTES)))


def begin_purge(root: str, name: str, *, io: Io | None = None,
                random_bytes: Callable[[int], bytes] = token_bytes) -> Tenant:
    """The first step of a purge: as `rotate_tenant`, noted as a purge that goes on. One that has begun already and was
    not ended is left as it is."""

    def begun(old: Tenant) -> Tenant:
        return old if old.purging else replace(_rotated(old, random_bytes(SECRET_BYTES)), purging=True)

    return _change(io or SystemIo(), root, name, begun)


def end_purge(root: str, name: str, *, io: Io | None = None) -> Tenant:
    """The last step of a purge: the store has noted every retired tag."""
    return _change(io or SystemIo(), root, name, lambda old: replace(old, purging=False))


def set_quota(root: str, name: str, quota_bytes: int | None, *, io: Io | None = None) -> Tenant:
    """What the tenant's blocks may take of the store's capacity, None without a limit. A store that is open goes on
    with the quota that it has read."""
    return _change(io or SystemIo(), root, name, lambda old: replace(old, quota_bytes=quota_bytes))


def _rotated(old: Tenant, secret: bytes) -> Tenant:
    return replace(old, secret=secret, generation=old.generation + 1, retired=(*old.retired, old.tag))


def _change(io: Io, root: str, name: str, change: Callable[[Tenant], Tenant]) -> Tenant:
    """Replace one tenant in the file; InvalidArgument when there is no such name."""
    with _exclusive(io, root):
        tenants = list_tenants(root, io=io)
        old = _find(tenants, name)
        new = change(old)
        if new != old:
            _write(io, root, [new if tenant.name == name else tenant for tenant in tenants])
    return new


def _find(tenants: list[Tenant], name: str) -> Tenant:
    for tenant in tenants:
        if tenant.name == name:
            return tenant
    raise InvalidArgument(f"no tenant {name!r} in this store")


def _exclusive(io: Io, root: str) -> AbstractContextManager[None]:
    """Nobody else changes the file meanwhile."""
    return locked_directory(io, root, lambda error: StoreNotFound(root, error.strerror or str(error)),
                            Locked(os.path.join(root, TENANTS_FILE), None))


def _read(io: Io, path: str) -> bytes:
    """The file's bytes, after a look at the very file that was opened: its kind, its owner's and others' rights, its
    size."""
    fd = io.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        status = os.fstat(fd)
        mode = stat.S_IMODE(status.st_mode)
        if not stat.S_ISREG(status.st_mode):
            raise InvalidArgument(f"{path} is not a regular file")
        if mode & 0o077:
            raise InvalidArgument(f"{path} has mode {mode:04o}; it holds secrets, make it 0600")
        if status.st_size > MAX_FILE_BYTES:
            raise InvalidArgument(f"{path} has {status.st_size} bytes, at most {MAX_FILE_BYTES} are read")
        data = bytearray(status.st_size)
        if data:
            read_exactly(io, fd, memoryview(data), 0)
        return bytes(data)
    finally:
        io.close(fd)


def _write(io: Io, root: str, tenants: list[Tenant]) -> None:
    # What a crash left of an earlier write may have any mode, and its mode would stay.
    leftover = os.path.join(root, TENANTS_FILE + ".new")
    if os.path.lexists(leftover):
        io.unlink(leftover)
    lines = [f"version = {FILE_VERSION}"]
    for tenant in sorted(tenants, key=lambda tenant: tenant.name):
        retired = ", ".join(f'"{tag.hex()}"' for tag in tenant.retired)
        lines += ["", "[[tenant]]", f'name = "{tenant.name}"', f"generation = {tenant.generation}",
                  f'secret = "{tenant.secret.hex()}"', f"retired = [{retired}]"]
        lines += [f"quota_bytes = {tenant.quota_bytes}"] if tenant.quota_bytes is not None else []
        lines += ["purging = true"] if tenant.purging else []
    data = ("\n".join(lines) + "\n").encode()
    if len(data) > MAX_FILE_BYTES:
        raise InvalidArgument(f"{TENANTS_FILE} would have {len(data)} bytes, at most {MAX_FILE_BYTES} are read")
    replace_file(io, root, TENANTS_FILE, data)


def _parse(table: dict[str, Any]) -> list[Tenant]:
    if table.get("version") != FILE_VERSION:
        raise ValueError(f"version is {table.get('version')!r}, this program reads {FILE_VERSION}")
    unknown = sorted(table.keys() - {"version", "tenant"})
    if unknown:
        raise ValueError(f"unknown entry {unknown[0]!r}")
    rows = table.get("tenant", [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ValueError("tenants must stand in tables [[tenant]]")
    tenants = [_tenant(row, position) for position, row in enumerate(rows)]
    names = [tenant.name for tenant in tenants]
    for position, name in enumerate(names):
        if name in names[:position]:
            raise ValueError(f"tenant {name} stands twice")
    return sorted(tenants, key=lambda tenant: tenant.name)


def _tenant(row: dict[str, Any], position: int) -> Tenant:
    where = f"tenant {row.get('name', position)}"
    unknown = sorted(row.keys() - FIELDS)
    if unknown:
        raise ValueError(f"{where}: unknown entry {unknown[0]!r}")
    missing = sorted({"name", "generation", "secret"} - row.keys())
    if missing:
        raise ValueError(f"{where}: {missing[0]} is missing")
    if type(row["generation"]) is not int:
        raise ValueError(f"{where}: generation is no integer")
    if type(row.get("quota_bytes", 0)) is not int or type(row.get("purging", False)) is not bool:
        raise ValueError(f"{where}: quota_bytes is no integer, or purging neither true nor false")
    try:
        secret = bytes.fromhex(row["secret"])
        retired = tuple(bytes.fromhex(tag) for tag in row.get("retired", []))
    except (ValueError, TypeError):
        # Without the cause: its text could show a part of the secret.
        raise ValueError(f"{where}: secret or retired is no hex text") from None
    return Tenant(row["name"], secret, row["generation"], retired, row.get("quota_bytes"), row.get("purging", False))


def _reason(error: Exception) -> str:
    """One line of a parser's complaint."""
    return str(error).splitlines()[0] if str(error) else type(error).__name__
