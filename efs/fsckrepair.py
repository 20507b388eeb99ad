"""`fsck --repair`: mending what fsck found, in a store that nobody owns.

*First* the files of nodes, one by one and without running anything (`prepare`): a lost slab or index is made anew and
empty, the header page of a damaged extent is zeroed, which frees the extent, and a node with any other finding is
marked as one whose process died. Opening such a node verifies every table entry, frees torn ones and orphans, and
makes its index say what its tables say (`efs/recovery.py`).

*Then*, with the store open, what is left of the findings (`mend`): damaged payloads are checked by their nodes and
dropped, shards that contradict each other are sorted out (`efs/culprit.py`), a sweep without grace removes what fewer
than ten nodes hold, a repair gives back what ten sound shards determine, and one more sweep removes what the repair
found to be hopeless. There is no grace because nobody can be writing.

Nothing here is decided on a finding alone: each step looks again. Killed anywhere, the next run finds what is left and
goes on; once nothing is found nothing is opened. A directory that is absent, of another store, or that the system
refuses to read is not mended here: that takes an operator (`kvstore node replace`).
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from efs.clock import Clock, Deadline, SystemClock
from efs.cluster import StoreConfig, check_node_id, read_store_config
from efs.codec import Codec
from efs.contract import Node
from efs.culprit import wrong_shards
from efs.errors import EfsError, OpenFailed
from efs.extent import extent_of
from efs.findings import Finding, Kind
from efs.fs import FileSystem
from efs.index import Index
from efs.limits import PAGE_BYTES, REPAIR_CALL_MS, STRIPE_SHARDS
from efs.nodedir import (
    NodeConfig,
    OwnerLock,
    index_path,
    machine_boot_id,
    read_boot,
    read_config,
    slab_path,
    write_boot,
)
from efs.osio import Io, write_fully
from efs.placement import placement_group, rotation_of, shard_of_node
from efs.slab import Slab
from efs.stripe import records_of, sound_shards
from efs.types import DropItem

NOT_MENDED: Final = frozenset({Kind.NODE_ABSENT, Kind.NODE_UNREADABLE, Kind.READ_ERROR, Kind.OVER_LIMIT})
"""Findings that nothing here can do anything about."""


@dataclass(frozen=True, slots=True)
class MendReport:
    """What was done. dropped: records that were removed, by their node or by a sweep. rebuilt: shards that were stored.
    indexes, extents, slabs: that were made anew or freed. checked: nodes whose tables and index were compared."""

    dropped: int
    rebuilt: int
    indexes: int
    extents: int
    slabs: int
    checked: int


@dataclass(slots=True)
class _Files:
    indexes: int = 0
    extents: int = 0
    slabs: int = 0
    checked: int = 0


async def mend_store(io: Io, root: str, findings: Sequence[Finding], torn: bool,
                     clock: Clock | None = None) -> MendReport:
    """Mend a store after a run of fsck. torn: check every node, for torn entries of free slots too. Locked names the
    owner's process id when there is one; other errors of opening a store as `FileSystem.open` has them."""
    clock = clock or SystemClock()
    root = os.path.abspath(root)
    lock = OwnerLock.take(io, root)
    try:
        files = prepare(io, read_store_config(io, root), findings, torn)
    finally:
        lock.release()
    filesystem = await FileSystem.open(root, io=io, clock=clock, maintain=False)
    try:
        dropped, rebuilt = await mend(filesystem, findings, clock)
    finally:
        await filesystem.close()
    return MendReport(dropped, rebuilt, files.indexes, files.extents, files.slabs, files.checked)


# -- Files -------------------------------------------------------------------------------------------------------------


def prepare(io: Io, config: StoreConfig, findings: Iterable[Finding], torn: bool) -> _Files:
    """See the module docstring. Nodes that cannot be prepared are left as they are: the next fsck names them."""
    files = _Files()
    by_node: dict[int, list[Finding]] = {index: [] for index in range(STRIPE_SHARDS)} if torn else {}
    for finding in findings:
        if finding.node is not None:
            by_node.setdefault(finding.node, []).append(finding)
    for index, found in sorted(by_node.items()):
        path = config.node_paths[index]
        try:
            check_node_id(io, path, config.node_ids[index])
            _prepare_node(io, path, read_config(io, path), found, files)
        except EfsError:
            continue
        except OSError:
            continue
    return files


def _prepare_node(io: Io, path: str, config: NodeConfig, found: Collection[Finding], files: _Files) -> None:
    plan = config.plan
    kinds = {finding.kind for finding in found}
    if Kind.SLAB_LOST in kinds and not os.path.lexists(slab_path(path)):
        Slab.create(io, slab_path(path), plan.extent_bytes, plan.extents)
        Index.create(io, index_path(path), plan.index_bytes)
        files.slabs += 1
    elif Kind.INDEX_LOST in kinds:
        Index.create(io, index_path(path), plan.index_bytes)
        files.indexes += 1
    damaged = {extent_of(finding.location) for finding in found if finding.location is not None
               and finding.kind in (Kind.EXTENT_DAMAGED, Kind.WRONG_IDENTITY)}
    if damaged:
        _free_extents(io, slab_path(path), damaged, plan.extent_bytes, plan.extents)
        files.extents += len(damaged)
    if kinds <= NOT_MENDED and found:
        return
    boot = read_boot(io, path)
    if boot is not None and boot.clean:
        write_boot(io, path, replace(boot, clean=False, boot_id=machine_boot_id()))
    files.checked += 1


def _free_extents(io: Io, path: str, extents: Collection[int], extent_bytes: int, count: int) -> None:
    """Zero header pages, in a file that is made full size first."""
    try:
        fd = io.open(path, os.O_RDWR)
    except OSError as error:
        raise OpenFailed(path, error) from error
    try:
        if io.size(fd) < extent_bytes * count:
            io.truncate(fd, extent_bytes * count)
        for extent in extents:
            write_fully(io, fd, memoryview(bytes(PAGE_BYTES)), extent * extent_bytes)
        io.fsync(fd)
    finally:
        io.close(fd)


# -- The open store ----------------------------------------------------------------------------------------------------


async def mend(filesystem: FileSystem, findings: Sequence[Finding], clock: Clock) -> tuple[int, int]:
    """See the module docstring; records that were dropped, and shards that were stored."""
    upkeep = filesystem.upkeep
    dropped = 0
    for finding in findings:
        if finding.kind is Kind.BAD_CHECKSUM and finding.node is not None:
            dropped += await _check_record(upkeep.node(finding.node), finding, clock)
        elif finding.kind is Kind.INCONSISTENT_STRIPE and finding.key is not None and finding.digest is not None:
            nodes = {index: node for index in range(STRIPE_SHARDS) if (node := upkeep.node(index)) is not None}
            dropped += await sort_out(nodes, finding.key, finding.digest, clock)
    dropped += (await upkeep.sweep(grace_ms=0)).dropped
    report = await upkeep.repair()
    dropped += report.corrupt + report.misplaced
    if report.corrupt or report.hopeless or report.misplaced:
        dropped += (await upkeep.sweep(grace_ms=0)).dropped
    return dropped, report.rebuilt


async def _check_record(node: Node | None, finding: Finding, clock: Clock) -> int:
    """Have a node check a record; 1 when it was dropped."""
    if node is None or finding.key is None or finding.digest is None:
        return 0
    deadline = Deadline.after_ms(clock, REPAIR_CALL_MS)
    try:
        return 0 if await node.verify(finding.key, finding.digest, deadline) else 1
    except EfsError:
        return 0


async def sort_out(nodes: dict[int, Node], key: bytes, digest: bytes, clock: Clock) -> int:
    """Drop the shards of a version that contradict the others, or all of them; returns how many. With fewer than ten
    sound ones nothing is done: the sweep decides."""
    deadline = Deadline.after_ms(clock, REPAIR_CALL_MS)
    rotation = rotation_of(placement_group(key))
    records = {index: record for index, listed in (await records_of(nodes, key, deadline, len(nodes))).items()
               for record in listed if record.digest == digest and record.shard == shard_of_node(index, rotation)}
    sound = await sound_shards(nodes, records, deadline, len(records))
    by_shard = {shard.record.shard: shard for shard in sound.values()}
    if len(by_shard) < STRIPE_SHARDS - 2:
        return 0
    header = next(iter(by_shard.values())).header
    wrong = wrong_shards(Codec(), header, {shard: source.payload for shard, source in by_shard.items()})
    dropped = 0
    for shard in by_shard if wrong is None else wrong:
        source = by_shard[shard]
        item = DropItem(key, digest, source.record.generation)
        dropped += await nodes[source.node_index].drop([item], deadline)
    return dropped
