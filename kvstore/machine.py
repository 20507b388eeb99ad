"""What this machine offers to a store: file system, system calls, libraries, limits. Reads; changes nothing that stays.

Each check says what was found and what that means. `fail`: a store cannot run here. `warn`: it runs, slower or with
less safety. `ok`: nothing to do. The file that is used for trying system calls is unlinked before it is written.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import lmdb

from efs.codec import Codec
from efs.errors import EfsError, InvalidArgument
from efs.limits import GIB, MIB, PAGE_BYTES, STRIPE_SHARDS

Status = Literal["ok", "warn", "fail"]

LOCAL_FILE_SYSTEMS = frozenset({"ext4", "ext3", "ext2", "xfs", "btrfs", "f2fs", "zfs", "tmpfs", "bcachefs"})
REMOTE_FILE_SYSTEMS = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "afs", "gfs2", "ocfs2"}
)
DESCRIPTORS_WANTED = 1024
"""Twelve nodes take about ten each; connections, files and a margin take the rest."""
_FAST_CLOCKS = frozenset({"tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "xen"})
_FALLOC_FL_KEEP_SIZE = 1


@dataclass(frozen=True, slots=True)
class Check:
    """One fact about the machine and its meaning for a store."""

    name: str
    status: Status
    value: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Mount:
    """The mount that a path lies on."""

    point: str
    kind: str
    options: str


def mount_of(path: Path, mountinfo: str) -> Mount | None:
    """The mount of an absolute path by the text of /proc/self/mountinfo: the longest mount point that holds it, the
    last one where several are stacked."""
    best: Mount | None = None
    for line in mountinfo.splitlines():
        left, separator, right = line.partition(" - ")
        fields, kinds = left.split(), right.split()
        if not separator or len(fields) < 6 or not kinds:
            continue
        point = _unescape(fields[4])
        if (path == Path(point) or Path(point) in path.parents) and (best is None or len(point) >= len(best.point)):
            best = Mount(point, kinds[0], fields[5])
    return best


def _unescape(field: str) -> str:
    """mountinfo writes space, tab, newline and backslash as three octal digits."""
    parts = field.split("\\")
    return parts[0] + "".join(chr(int(part[:3], 8)) + part[3:] for part in parts[1:])


def examine(directory: Path) -> list[Check]:
    """All checks, with `directory` as the place where a store is or shall be. InvalidArgument when it is not there."""
    here = directory.resolve()
    if not here.is_dir():
        raise InvalidArgument(f"{directory}: not a directory")
    checks = [_program(), _file_system(here), _space(here)]
    checks += _system_calls(here)
    checks += [_erasure_code(), _lmdb(), _checksum_library(), _event_loop()]
    checks += [_shared_memory(), _memfd(), _descriptors(), _locked_memory(), _memory(), _clock_source(), _boot_id()]
    return checks


def _program() -> Check:
    return Check(
        "platform",
        "ok" if platform.system() == "Linux" else "fail",
        f"Python {platform.python_version()}, {platform.system()} {platform.release()}, {os.cpu_count()} cores",
        "preadv2, fallocate and flock as the store uses them are Linux system calls",
    )


def _file_system(here: Path) -> Check:
    try:
        mount = mount_of(here, Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace"))
    except OSError as error:
        return Check("file system", "warn", error.strerror or str(error), "cannot tell whether it is a local one")
    if mount is None:
        return Check("file system", "warn", "unknown", "cannot tell whether it is a local one")
    value = f"{mount.kind} at {mount.point}"
    if mount.kind in REMOTE_FILE_SYSTEMS or mount.kind.startswith("fuse"):
        return Check("file system", "fail", value, "locks and mapped files are not dependable here: use a local disk")
    if "ro" in mount.options.split(","):
        return Check("file system", "fail", value + ", read-only", "a store must be able to write")
    if mount.kind == "tmpfs":
        return Check(
            "file system", "warn", value, "blocks live in memory and are gone at a restart; reads go through staging"
        )
    if mount.kind not in LOCAL_FILE_SYSTEMS:
        return Check("file system", "warn", value, "not known to keep locks and mapped files as a local disk does")
    return Check("file system", "ok", value, "local: locks, mapped files and allocation behave as the store needs")


def _space(here: Path) -> Check:
    found = os.statvfs(here)
    free = found.f_bavail * found.f_frsize
    meaning = "capacity counts the bytes of all nodes: 1.35 to 1.4 bytes of disk for a byte of KV"
    return Check("free space", "ok" if free >= GIB else "warn", f"{free / GIB:.1f} GiB", meaning)


def _system_calls(here: Path) -> list[Check]:
    """What has to be tried on a file of that file system."""
    tries: tuple[tuple[str, Callable[[int], Check]], ...] = (
        ("fallocate", _fallocate),
        ("RWF_NOWAIT", _nowait),
        ("flock", _flock),
        ("fdatasync", _fdatasync),
    )
    try:
        with tempfile.TemporaryFile(dir=here) as file:
            os.pwrite(file.fileno(), bytes(16 * PAGE_BYTES), 0)
            return [_tried(name, attempt, file.fileno()) for name, attempt in tries]
    except OSError as error:
        return [Check("write access", "fail", error.strerror or str(error), f"no file can be made in {here}")]


def _tried(name: str, attempt: Callable[[int], Check], fd: int) -> Check:
    try:
        return attempt(fd)
    except OSError as error:
        return Check(name, "fail", error.strerror or str(error), "the system call fails on this file system")


def _fallocate(fd: int) -> Check:
    # posix_fallocate falls back to writing zeros where the file system cannot allocate, so the system call is asked.
    libc = ctypes.CDLL(None, use_errno=True)
    size = ctypes.c_int64
    if libc.fallocate(fd, _FALLOC_FL_KEEP_SIZE, size(0), size(MIB)) == 0:
        return Check("fallocate", "ok", "by the file system", "extents get their space at once and in one piece")
    code = ctypes.get_errno()
    if code in (errno.EOPNOTSUPP, errno.ENOSYS):
        return Check(
            "fallocate", "warn", "emulated", "a new extent is written full of zeros first: slower, and du jumps"
        )
    raise OSError(code, os.strerror(code))


def _nowait(fd: int) -> Check:
    buffer = bytearray(PAGE_BYTES)
    try:
        os.preadv(fd, [buffer], 0, os.RWF_NOWAIT)
    except BlockingIOError:
        pass  # Supported: this page happened not to be in the page cache.
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL):
            raise
        return Check(
            "RWF_NOWAIT", "warn", "not supported", "warm reads go through a thread and private staging: one more copy"
        )
    return Check("RWF_NOWAIT", "ok", "supported", "warm reads go straight from the page cache into the caller's buffer")


def _flock(fd: int) -> Check:
    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return Check("flock", "ok", "supported", "a second owner of a store is refused")


def _fdatasync(fd: int) -> Check:
    started = time.monotonic()
    os.fdatasync(fd)
    took_ms = (time.monotonic() - started) * 1000
    return Check(
        "fdatasync", "ok", f"{took_ms:.1f} ms for 64 KiB", "durability `power` waits for this before it acknowledges"
    )


def _erasure_code() -> Check:
    try:
        backend = Codec().backend
    except EfsError as error:
        return Check("erasure code", "fail", str(error), "no Reed-Solomon library could be loaded: install pyeclib")
    if backend == "pyeclib":
        return Check(
            "erasure code",
            "warn",
            backend,
            "ISA-L was not found directly; pyeclib's own calls are about three times slower",
        )
    return Check("erasure code", "ok", backend, "ISA-L on the caller's memory: 17 GB/s and more on one core")


def _lmdb() -> Check:
    number = lmdb.version()
    return Check(
        "LMDB",
        "ok" if number >= (0, 9, 24) else "warn",
        ".".join(map(str, number)) + f" (binding {lmdb.__version__})",
        "holds the index of each node",
    )


def _checksum_library() -> Check:
    return _package("xxhash", "xxHash", "checks every byte on every read", "fail")


def _event_loop() -> Check:
    return _package("uvloop", "uvloop", "event loop of the command line and of servers", "warn")


def _package(distribution: str, name: str, meaning: str, without: Status) -> Check:
    try:
        return Check(name, "ok", version(distribution), meaning)
    except PackageNotFoundError:
        return Check(name, without, "not installed", meaning)


def _shared_memory() -> Check:
    try:
        found = os.statvfs("/dev/shm")
    except OSError as error:
        return Check(
            "/dev/shm", "warn", error.strerror or str(error), "programs that share memory by path do not work here"
        )
    size = found.f_blocks * found.f_frsize
    small = size < GIB
    meaning = (
        "containers get 64 MiB by default: pools of this store use memfd, other programs need --shm-size"
        if small
        else "large enough for pools by path; those of this store use memfd and do not count here"
    )
    return Check("/dev/shm", "warn" if small else "ok", f"{size / GIB:.2f} GiB", meaning)


def _memfd() -> Check:
    try:
        fd = os.memfd_create("kvstore-doctor", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    except OSError as error:
        return Check(
            "memfd", "warn", error.strerror or str(error), "no sealed shared pool; buffers stay private memory"
        )
    os.close(fd)
    return Check("memfd", "ok", "with seals", "fetched blocks can land in memory that other processes map")


def _descriptors() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    enough = soft >= DESCRIPTORS_WANTED or soft == resource.RLIM_INFINITY
    return Check(
        "open files",
        "ok" if enough else "warn",
        f"{_limit(soft)} (at most {_limit(hard)})",
        f"{STRIPE_SHARDS} nodes, connections and logs fit"
        if enough
        else f"raise it to {DESCRIPTORS_WANTED}: ulimit -n",
    )


def _locked_memory() -> Check:
    soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    enough = soft == resource.RLIM_INFINITY or soft >= GIB
    value = f"{_limit(soft, MIB, ' MiB')} (at most {_limit(hard, MIB, ' MiB')})"
    return Check(
        "locked memory",
        "ok" if enough else "warn",
        value,
        "page-locked pools for a GPU can be registered"
        if enough
        else "a store needs none; page-locked pools for a GPU need more: ulimit -l",
    )


def _limit(value: int, unit: int = 1, name: str = "") -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else f"{value // unit}{name}"


def _memory() -> Check:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    try:
        bound = Path("/sys/fs/cgroup/memory.max").read_text(encoding="ascii").strip()
    except OSError:
        bound = "max"
    if bound.isdigit():
        total = min(total, int(bound))
    return Check(
        "memory",
        "ok" if total >= 2 * GIB else "warn",
        f"{total / GIB:.1f} GiB",
        "what the page cache can hold is read at memory speed",
    )


def _clock_source() -> Check:
    try:
        source = (
            Path("/sys/devices/system/clocksource/clocksource0/current_clocksource").read_text(encoding="ascii").strip()
        )
    except OSError:
        source = "unknown"
    started = time.perf_counter_ns()
    for _ in range(1000):
        time.monotonic()
    each_ns = (time.perf_counter_ns() - started) / 1000
    fast = source in _FAST_CLOCKS or each_ns < 500
    return Check(
        "clock source",
        "ok" if fast else "warn",
        f"{source}, {each_ns:.0f} ns a reading",
        "deadlines and lag estimates read it often" if fast else "each reading is a system call: use tsc or kvm-clock",
    )


def _boot_id() -> Check:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError as error:
        return Check("boot id", "warn", error.strerror or str(error), "every unclean stop counts as a power loss")
    return Check(
        "boot id", "ok", boot, "tells a killed process from a power loss, after which records are checked before use"
    )
