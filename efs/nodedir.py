"""A node directory: what is in it, whose it is, who owns it, and whether it was closed well. Format version 1.

    node.toml       identity and sizes, written once when the node is made
    boot            72 bytes, replaced at each open and close
    lock            flock of the owner, holds its process id in decimal
    counters        `efs/metrics.py`
    index/          `efs/index.py`
    slabs/slab      `efs/slab.py`
    stamps/         `efs/stamps.py`

Directories are 0700 and files 0600; none of them may be a symbolic link.

*Making.* What node.toml will say is written first, as node.toml.new, and gets its name last, so a directory whose
making was interrupted is no node. It is known by node.toml.new and by holding nothing but parts of a node that was
never opened: whoever makes a node there begins anew. Its maker has the directory locked.

*Boot record.* Little-endian:

    offset  bytes  field
    0       4      magic b"EFSB"
    4       2      format version, 1
    6       2      1: the owner closed in order; 2: an owner is mending what a died one left; 0: neither
    8       8      boots: how often the node was opened
    16      4      boot epoch: how many of those boots were unclean
    20      4      unverified below: entries of an earlier boot epoch are untrusted until their payload was checked
    24      40     boot id of the machine when it was written, ASCII, zero-padded
    64      8      xxh3_64 of bytes [0, 64)

An owner writes it at opening, with boots one higher and not clean, before anything else changes, and at closing, clean,
after everything was synced. An open is *unclean* when the record it finds is not clean and of another boot of the
machine: power was lost, or may have been, while the node was open. Not clean but of the same boot is a process that
died: the page cache kept everything. A record that is lost or damaged counts as unclean. *Mending* stands there while
an opening compares the index with the tables. An opening that finds it was preceded by one that died of that, which a
damaged index can bring about (LMDB follows page numbers without checks), and makes the index anew instead.

Slot generations are (boots << 40) + a counter, so none is given out twice, whatever an earlier owner did.
"""

from __future__ import annotations

import os
import struct
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from efs.checksum import xxh3_64
from efs.dirlock import locked_directory
from efs.errors import (
    CorruptRecord,
    FormatUnsupported,
    IdentityMismatch,
    InvalidArgument,
    Locked,
    OpenFailed,
    StoreExists,
)
from efs.extent import require_extent_bytes
from efs.index import Index
from efs.limits import (
    EXTENT_BYTES,
    FORMAT_VERSION,
    INDEX_BUDGET_SHARE,
    MAX_EXTENTS,
    MIN_EXTENT_BYTES,
    MIN_EXTENTS_PER_NODE,
    MIN_INDEX_BUDGET_BYTES,
    PAGE_BYTES,
    RESERVE_BYTES,
    STRIPE_SHARDS,
)
from efs.osio import NEW_SUFFIX, Io, read_file, remove_tree, replace_file, sync_directory, write_file, write_fully
from efs.slab import Slab

NODE_FILE: Final = "node.toml"
BOOT_FILE: Final = "boot"
LOCK_FILE: Final = "lock"
COUNTERS_FILE: Final = "counters"
INDEX_DIRECTORY: Final = "index"
SLABS_DIRECTORY: Final = "slabs"
STAMPS_DIRECTORY: Final = "stamps"
SLAB_FILE: Final = "slab"
MOST_FILE_BYTES: Final = 64 * 1024
ID_HEX_DIGITS: Final = 32
GENERATION_BITS: Final = 40
EXTENTS_WANTED: Final = 16
"""The extent size is halved until this many fit."""
STAMP_SHARE: Final = 1024
"""One byte for stamps in so many of an extent: enough for slots of 4 KiB. Smaller slots lose stamps on a restart."""

_BOOT: Final = struct.Struct("<4sHHQII40sQ")
_BOOT_MAGIC: Final = b"EFSB"
_PARTS: Final = frozenset({SLABS_DIRECTORY, STAMPS_DIRECTORY, INDEX_DIRECTORY, BOOT_FILE, BOOT_FILE + NEW_SUFFIX})
"""What an interrupted making leaves beside the file that is to say whose the directory is."""
_CLOSED: Final = 1
_MENDING: Final = 2
_BOOT_ID_FILE: Final = "/proc/sys/kernel/random/boot_id"


@dataclass(frozen=True, slots=True)
class NodePlace:
    """Where a node belongs: its store, its EC group and its index in the group."""

    cluster_id: str
    group: int
    node_index: int

    def __post_init__(self) -> None:
        require_id("cluster id", self.cluster_id)
        if self.group < 0 or not 0 <= self.node_index < STRIPE_SHARDS:
            raise InvalidArgument(f"no node has group {self.group} and index {self.node_index}")


@dataclass(frozen=True, slots=True)
class NodePlan:
    """How a node's capacity is divided, in bytes; fixed when the node is made."""

    capacity_bytes: int
    extent_bytes: int
    extents: int
    index_bytes: int
    stamp_bytes: int


@dataclass(frozen=True, slots=True)
class NodeConfig:
    """What node.toml says. `node_id` is 32 hex digits."""

    place: NodePlace
    node_id: str
    plan: NodePlan


@dataclass(frozen=True, slots=True)
class BootRecord:
    """See the module docstring."""

    boot_id: str
    clean: bool
    boots: int
    epoch: int
    unverified_below: int
    mending: bool = False


# -- Sizes ----------------------------------------------------------------------------------------------------------


def plan_node(capacity_bytes: int, extent_bytes: int | None = None, index_bytes: int | None = None) -> NodePlan:
    """Divide a node's capacity. InvalidArgument names the smallest capacity where it is too small."""
    share = max(MIN_INDEX_BUDGET_BYTES, int(capacity_bytes * INDEX_BUDGET_SHARE))
    index = share if index_bytes is None else index_bytes
    if index < MIN_INDEX_BUDGET_BYTES:
        raise InvalidArgument(f"the index budget is {index}, must be at least {MIN_INDEX_BUDGET_BYTES} bytes")
    index -= index % PAGE_BYTES
    size = EXTENT_BYTES if extent_bytes is None else extent_bytes
    require_extent_bytes(size)
    if extent_bytes is None:
        while size > MIN_EXTENT_BYTES and _extents(capacity_bytes, size, index) < EXTENTS_WANTED:
            size //= 2
    extents = _extents(capacity_bytes, size, index)
    if extents < MIN_EXTENTS_PER_NODE:
        least = node_bytes(MIN_EXTENTS_PER_NODE, size, index)
        raise InvalidArgument(
            f"{capacity_bytes} bytes a node are too few: the smallest capacity is {least} bytes a node, "
            f"{least * STRIPE_SHARDS} bytes for all {STRIPE_SHARDS}"
        )
    extents = min(extents, MAX_EXTENTS)
    return NodePlan(capacity_bytes, size, extents, index, extents * _stamp_bytes(size))


def node_bytes(extents: int, extent_bytes: int, index_bytes: int) -> int:
    """The smallest capacity of a node that has so many extents."""
    return index_bytes + RESERVE_BYTES + extents * (extent_bytes + _stamp_bytes(extent_bytes))


def _extents(capacity_bytes: int, extent_bytes: int, index_bytes: int) -> int:
    return max(0, capacity_bytes - index_bytes - RESERVE_BYTES) // (extent_bytes + _stamp_bytes(extent_bytes))


def _stamp_bytes(extent_bytes: int) -> int:
    return -(-extent_bytes // STAMP_SHARE // PAGE_BYTES) * PAGE_BYTES


# -- Making and reading ---------------------------------------------------------------------------------------------


def create_directory(io: Io, path: str, place: NodePlace, node_id: str, plan: NodePlan, boot_id: str) -> NodeConfig:
    """Make an empty node in a new or empty directory, or one in which that was interrupted. StoreExists if something
    else is in it, OpenFailed names the path; InvalidArgument while somebody else makes one there."""
    config = NodeConfig(place, node_id, plan)
    prepare_directory(io, path, node_id, plan, boot_id, NODE_FILE, render_config(config))
    return config


def prepare_directory(io: Io, path: str, node_id: str, plan: NodePlan, boot_id: str, name: str,
                      identity: bytes) -> None:
    """Make all of an empty node; last, the file `name` that says whose it is gets its name. Errors as
    `create_directory`."""
    require_id("node id", node_id)
    busy = InvalidArgument(f"{path}: somebody else is making a node there just now")
    try:
        if not os.path.lexists(path):
            io.mkdir(path)
        require_directory(io, path)
        with locked_directory(io, path, lambda error: OpenFailed(path, error), busy):
            require_unused(io, path, name)
            identity_file = os.path.join(path, name)
            for part in sorted(_PARTS.intersection(io.listdir(path))):
                remove_tree(io, os.path.join(path, part))
            write_file(io, identity_file + NEW_SUFFIX, identity)
            sync_directory(io, path)
            _make_parts(io, path, plan, boot_id)
            io.rename(identity_file + NEW_SUFFIX, identity_file)
            sync_directory(io, path)
        sync_directory(io, os.path.dirname(os.path.abspath(path)))
    except OSError as error:
        raise OpenFailed(path, error) from error


def discard_parts(io: Io, path: str, name: str = NODE_FILE) -> None:
    """Remove what `prepare_directory` makes in a directory, and nothing else; the directory stays."""
    for part in sorted((_PARTS | {name, name + NEW_SUFFIX}).intersection(io.listdir(path))):
        remove_tree(io, os.path.join(path, part))


def require_unused(io: Io, path: str, name: str) -> None:
    """StoreExists unless nothing is there, or an empty directory, or one in which the making of a node, or of what else
    the file `name` tells, was interrupted."""
    try:
        if not os.path.lexists(path):
            return
        if os.path.islink(path) or not os.path.isdir(path):
            raise StoreExists(path)
        found = set(io.listdir(path))
        if found and (name + NEW_SUFFIX not in found or found - _PARTS - {name + NEW_SUFFIX}):
            raise StoreExists(path)
    except OSError as error:
        raise OpenFailed(path, error) from error


def _make_parts(io: Io, path: str, plan: NodePlan, boot_id: str) -> None:
    slabs = os.path.join(path, SLABS_DIRECTORY)
    io.mkdir(slabs)
    io.mkdir(os.path.join(path, STAMPS_DIRECTORY))
    Slab.create(io, slab_path(path), plan.extent_bytes, plan.extents)
    sync_directory(io, slabs)
    Index.create(io, index_path(path), plan.index_bytes)
    write_boot(io, path, BootRecord(boot_id, True, 0, 0, 0))


def parse_toml(file: str, data: bytes) -> dict[str, Any]:
    """The tables of a TOML file that was read; CorruptRecord names it."""
    try:
        return tomllib.loads(data.decode())
    except UnicodeDecodeError as error:
        raise CorruptRecord(f"{file}: is no text") from error
    except (ValueError, RecursionError) as error:
        known = isinstance(error, tomllib.TOMLDecodeError)
        raise CorruptRecord(f"{file}: {error if known else 'has a number or a nesting out of all bounds'}") from error


def read_config(io: Io, path: str) -> NodeConfig:
    """Identity and sizes of a node. OpenFailed names what cannot be opened, FormatUnsupported another format version,
    CorruptRecord what is wrong in node.toml."""
    found = read_identity(io, path, NODE_FILE)
    try:
        place = NodePlace(found.text("cluster_id"), found.number("group"), found.number("node_index"))
    except InvalidArgument as error:
        raise CorruptRecord(f"{found.file}: {error}") from error
    return NodeConfig(place, found.node_id(), found.plan())


def read_identity(io: Io, path: str, name: str) -> Identity:
    """What the file `name` of a directory says. Errors as `read_config`."""
    file = os.path.join(path, name)
    try:
        require_directory(io, path)
        data = read_file(io, file, MOST_FILE_BYTES)
    except OSError as error:
        raise OpenFailed(path if error.filename is None else error.filename, error) from error
    values = parse_toml(file, data)
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise FormatUnsupported(file, version, FORMAT_VERSION)
    return Identity(file, values)


def check_place(path: str, found: NodePlace, expected: NodePlace) -> None:
    """IdentityMismatch, with what was found and what was expected, for a directory that belongs elsewhere."""
    for field in ("cluster_id", "group", "node_index"):
        if getattr(found, field) != getattr(expected, field):
            name = field.replace("_", " ")
            raise IdentityMismatch(path, name, getattr(found, field), getattr(expected, field))


def require_directory(io: Io, path: str) -> None:
    """OSError, naming the path, unless it is a directory and no symbolic link."""
    try:
        io.close(io.open(path, os.O_RDONLY | os.O_DIRECTORY))
    except OSError as error:
        error.filename = path
        raise


def index_path(path: str) -> str:
    return os.path.join(path, INDEX_DIRECTORY)


def slab_path(path: str) -> str:
    return os.path.join(path, SLABS_DIRECTORY, SLAB_FILE)


def stamps_path(path: str) -> str:
    return os.path.join(path, STAMPS_DIRECTORY)


def open_slab(io: Io, path: str, config: NodeConfig, *, writable: bool, mapped: bool = False) -> Slab:
    """The slab of a node; needs no lock when it is not writable."""
    _require_part(io, path, SLABS_DIRECTORY)
    plan, node_id = config.plan, bytes.fromhex(config.node_id)
    return Slab.open(io, slab_path(path), node_id, plan.extent_bytes, plan.extents, writable=writable, mapped=mapped)


def require_stamps_directory(io: Io, path: str) -> None:
    """OpenFailed unless `stamps/` is a directory; made anew when it is absent."""
    if not os.path.lexists(stamps_path(path)):
        try:
            io.mkdir(stamps_path(path))
        except OSError as error:
            raise OpenFailed(stamps_path(path), error) from error
    _require_part(io, path, STAMPS_DIRECTORY)


def _require_part(io: Io, path: str, name: str) -> None:
    try:
        require_directory(io, os.path.join(path, name))
    except OSError as error:
        raise OpenFailed(os.path.join(path, name), error) from error


def require_id(what: str, value: str) -> None:
    """InvalidArgument unless it is one."""
    if len(value) != ID_HEX_DIGITS or set(value) - set("0123456789abcdef"):
        raise InvalidArgument(f"{what} is {value!r}, must be {ID_HEX_DIGITS} lower-case hex digits")


def render_config(config: NodeConfig) -> bytes:
    """node.toml."""
    place = config.place
    where = [f"group = {place.group}", f"node_index = {place.node_index}"]
    return render_identity(place.cluster_id, config.node_id, where, config.plan)


def render_identity(cluster_id: str, node_id: str, where: Sequence[str], plan: NodePlan) -> bytes:
    """The file that says whose a directory is. where: the lines that say where it belongs."""
    lines = [
        f"format_version = {FORMAT_VERSION}",
        f'cluster_id = "{cluster_id}"',
        f'node_id = "{node_id}"',
        *where,
        f"capacity_bytes = {plan.capacity_bytes}",
        f"extent_bytes = {plan.extent_bytes}",
        f"extents = {plan.extents}",
        f"index_bytes = {plan.index_bytes}",
        f"stamp_bytes = {plan.stamp_bytes}",
    ]
    return ("\n".join(lines) + "\n").encode()


@dataclass(frozen=True, slots=True)
class Identity:
    """What a file has in it that says whose a directory is. CorruptRecord, naming it, for what it must not say."""

    file: str
    values: dict[str, object]

    def number(self, name: str) -> int:
        value = self.values.get(name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise CorruptRecord(f"{self.file}: {name} is {value!r}, must be a whole number")
        return value

    def text(self, name: str) -> str:
        value = self.values.get(name)
        if not isinstance(value, str):
            raise CorruptRecord(f"{self.file}: {name} is {value!r}, must be a string")
        return value

    def node_id(self) -> str:
        try:
            require_id("node id", self.text("node_id"))
        except InvalidArgument as error:
            raise CorruptRecord(f"{self.file}: {error}") from error
        return self.text("node_id")

    def plan(self) -> NodePlan:
        try:
            require_extent_bytes(self.number("extent_bytes"))
        except InvalidArgument as error:
            raise CorruptRecord(f"{self.file}: {error}") from error
        return NodePlan(self.number("capacity_bytes"), self.number("extent_bytes"), self.number("extents"),
                        self.number("index_bytes"), self.number("stamp_bytes"))


# -- Boots ----------------------------------------------------------------------------------------------------------


def machine_boot_id() -> str:
    """The machine's boot id, the same until it is started again; empty where the kernel tells none."""
    try:
        return Path(_BOOT_ID_FILE).read_text(encoding="ascii").strip()
    except OSError:
        return ""


def read_boot(io: Io, path: str) -> BootRecord | None:
    """The boot record; None when it is lost or damaged. FormatUnsupported for another version, OpenFailed for what
    cannot be read."""
    file = os.path.join(path, BOOT_FILE)
    try:
        data = read_file(io, file, MOST_FILE_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise OpenFailed(file, error) from error
    if len(data) != _BOOT.size:
        return None
    magic, version, state, boots, epoch, unverified_below, boot_id, checksum = _BOOT.unpack(data)
    if magic != _BOOT_MAGIC or checksum != xxh3_64(data[:-8]):
        return None
    if version != FORMAT_VERSION:
        raise FormatUnsupported(file, version, FORMAT_VERSION)
    name = boot_id.rstrip(b"\0").decode("ascii", "replace")
    return BootRecord(name, state == _CLOSED, boots, epoch, unverified_below, state == _MENDING)


def write_boot(io: Io, path: str, record: BootRecord) -> None:
    """Replace the boot record and make it durable. OSError."""
    boot_id = record.boot_id.encode("ascii", "replace")[:40]
    state = _CLOSED if record.clean else _MENDING if record.mending else 0
    head = _BOOT.pack(_BOOT_MAGIC, FORMAT_VERSION, state, record.boots, record.epoch,
                      record.unverified_below, boot_id, 0)[:-8]
    replace_file(io, path, BOOT_FILE, head + xxh3_64(head).to_bytes(8, "little"))


# -- The owner's lock -----------------------------------------------------------------------------------------------


class OwnerLock:
    """Exclusive ownership of a directory, by flock on its `lock` file: it ends with the process at the latest."""

    def __init__(self, io: Io, path: str, fd: int) -> None:
        self._io = io
        self._fd: int | None = fd
        self.path = path

    @classmethod
    def take(cls, io: Io, directory: str) -> OwnerLock:
        """Take it without waiting. Locked names the holder's process id; OpenFailed names the file."""
        file = os.path.join(directory, LOCK_FILE)
        try:
            fd = io.open(file, os.O_RDWR | os.O_CREAT)
        except OSError as error:
            raise OpenFailed(file, error) from error
        try:
            io.lock(fd)
            io.truncate(fd, 0)
            write_fully(io, fd, memoryview(str(os.getpid()).encode()), 0)
        except BlockingIOError as error:
            io.close(fd)
            raise Locked(directory, written_pid(io, directory)) from error
        except OSError as error:
            io.close(fd)
            raise OpenFailed(file, error) from error
        return cls(io, directory, fd)

    def release(self) -> None:
        """Give it up. A second call does nothing."""
        fd, self._fd = self._fd, None
        if fd is not None:
            try:
                self._io.unlock(fd)
            finally:
                self._io.close(fd)


def written_pid(io: Io, directory: str) -> int | None:
    """The process id in the `lock` file: the owner's while there is one, else the last owner's."""
    try:
        text = read_file(io, os.path.join(directory, LOCK_FILE), MOST_FILE_BYTES)
    except OSError:
        return None
    return int(text) if text.isdigit() else None
