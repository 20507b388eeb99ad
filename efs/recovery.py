"""Opening a node: from what is on disk to a `NodeState`. Runs on a thread, or wherever blocking is allowed.

The tables say what is there; the index is only compared with them. Depending on how the node was last left:

- *closed*: tables are taken at their word (an entry with a generation is live, its checksums are verified when it is
  first used), the index as it is, provided that both count the same number of records.
- *its process died*, the machine did not (boot record not clean, same boot id), or the counts differ: every entry is
  verified. The index is brought in line with them: records that it lacks are added, entries that name no record are
  deleted. It is not rebuilt, unless an opening died of it (`efs/nodedir.py`, mending).
- *unclean boot* (not clean, another boot id, or the boot record is lost): the same with a new, empty index. The boot
  epoch goes up, so all records of before are untrusted until their payload was checked once.

An index that is lost or damaged is made anew in each of these cases. Where two entries are of the same key and digest,
the higher generation wins and the other slot is freed. Torn entries are zeroed: free slots. Where only node-local
fields are torn, because a record that is held was being given a new arrival or epoch, and its payload agrees with its
header, the record stands: it gets an entry of this boot, with a new generation. An extent whose header page is damaged
is free, and what was in it is lost; a slab whose extents all belong to another node is refused.

*Lost stamps.* A process that died has not written the stamps of its last STAMP_FLUSH_MS, and the file still has those
of what lay in the slots before: what was acknowledged last would look coldest and be evicted first. So unless the node
was closed, records that arrived in that time before the newest one are stamped with their arrival at least. A record
that was repaired in that time comes out hotter than its sources; that is the smaller evil.

*Crash argument.* The boot record, not clean and with the new epoch, is durable before anything is changed. Whatever an
interrupted opening leaves is what a died process leaves: tables that are right and an index that lacks entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from efs.allocator import Allocator
from efs.checksum import xxh3_64
from efs.errors import FormatUnsupported, IdentityMismatch, OpenFailed
from efs.eviction import Eviction
from efs.extent import SLOT_BITS, SLOT_MASK, Geometry
from efs.gc import ties_of
from efs.index import Index, IndexDamaged, IndexEntry, IndexFull
from efs.limits import DATA_SHARDS, STAMP_FLUSH_MS, STAMP_SECONDS
from efs.metrics import CounterFile
from efs.nodedir import (
    GENERATION_BITS,
    BootRecord,
    NodeConfig,
    index_path,
    open_slab,
    read_boot,
    require_stamps_directory,
    stamps_path,
    write_boot,
)
from efs.nodestate import NodeState
from efs.osio import Io, sync_directory
from efs.shard import check_entries, entry_headers, free_entries, headers_stand, wrap_entries
from efs.slab import Slab
from efs.stamps import Stamps, load_stamps
from efs.tables import Table, Tables

Live = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class OpenOptions:
    """How a node is opened. `boot_id` is the machine's."""

    boot_id: str
    mapped: bool


@dataclass(slots=True)
class _Scan:
    """What the tables say. live: by extent, (slots,) bool. generations: by extent, (slots,), 0 where not live. torn:
    locations of entries that are neither free nor valid, when entries were verified. salvaged: how many of these are
    valid again, with the first generations of this boot."""

    geometries: dict[int, Geometry] = field(default_factory=dict)
    live: dict[int, Live] = field(default_factory=dict)
    generations: dict[int, NDArray[np.uint64]] = field(default_factory=dict)
    torn: list[int] = field(default_factory=list)
    highest_epoch: int = 0
    latest_arrival_ms: int = 0
    salvaged: int = 0


    @property
    def records(self) -> int:
        return sum(int(np.count_nonzero(row)) for row in self.live.values())

    @property
    def highest_generation(self) -> int:
        return max((int(row.max(initial=0)) for row in self.generations.values()), default=0)


def open_state(io: Io, path: str, config: NodeConfig, options: OpenOptions, counters: CounterFile) -> NodeState:
    """Open everything below a node directory, whose lock is held. OpenFailed, IdentityMismatch, FormatUnsupported."""
    before = read_boot(io, path)
    require_stamps_directory(io, path)
    slab = open_slab(io, path, config, writable=True, mapped=options.mapped)
    index: Index | None = None
    try:
        same_boot = before is not None and before.boot_id == options.boot_id != ""
        closed = before is not None and before.clean
        tables = Tables(config.plan.extents)
        scan = _scan(slab, tables, verify=not closed)
        boot = _next_boot(before, options.boot_id, unclean=not (closed or same_boot), scan=scan)
        write_boot(io, path, replace(boot, mending=not closed))
        anew = not closed and (not same_boot or before is None or before.mending)
        index = _open_index(io, path, config, counters, anew)
        if not closed or index.entries != scan.records:
            if closed:
                scan = _scan(slab, tables, verify=True)
                write_boot(io, path, replace(boot, mending=True))
            counters.add("node_torn_entries", len(scan.torn))
            _salvage(slab, tables, scan, boot)
            index = _mend(io, path, config, slab, index, tables, scan, counters)
            write_boot(io, path, boot)
        return _assemble(io, path, config, boot, slab, index, tables, scan, counters, closed)
    except OSError as error:
        _close(slab, index)
        raise OpenFailed(error.filename or path, error) from error
    except BaseException:
        _close(slab, index)
        raise


def _close(slab: Slab, index: Index | None) -> None:
    slab.close()
    if index is not None:
        index.close()


def _next_boot(before: BootRecord | None, boot_id: str, unclean: bool, scan: _Scan) -> BootRecord:
    if before is None:
        boots, epoch, below = scan.highest_generation >> GENERATION_BITS, scan.highest_epoch, 0
    else:
        boots, epoch, below = before.boots, before.epoch, before.unverified_below
    if unclean:
        epoch += 1
        below = epoch
    return BootRecord(boot_id, False, boots + 1, epoch, below)


def _open_index(io: Io, path: str, config: NodeConfig, counters: CounterFile, anew: bool) -> Index:
    """The index as it is; an empty one when asked for, or when it is lost."""
    place = index_path(path)
    if not anew:
        try:
            return Index.open(io, place, config.plan.index_bytes)
        except IndexDamaged:
            pass
    Index.create(io, place, config.plan.index_bytes)
    sync_directory(io, path)
    counters.add("node_index_rebuilt")
    return Index.open(io, place, config.plan.index_bytes)


# -- Tables ---------------------------------------------------------------------------------------------------------


def _scan(slab: Slab, tables: Tables, verify: bool) -> _Scan:
    """Read all tables. `verify`: check every entry's checksums instead of looking at its generation only."""
    scan = _Scan()
    foreign: list[IdentityMismatch] = []
    for state in slab.scan():
        if isinstance(state.problem, FormatUnsupported):
            raise state.problem
        if isinstance(state.problem, IdentityMismatch):
            foreign.append(state.problem)
        if state.geometry is not None:
            _scan_extent(slab, tables, scan, state.extent, state.geometry, verify)
    if foreign and not scan.geometries:
        raise foreign[0]
    return scan


def _scan_extent(slab: Slab, tables: Tables, scan: _Scan, extent: int, geometry: Geometry, verify: bool) -> None:
    entries = slab.read_table(extent, geometry)
    generations = np.array(entries["generation"], np.uint64)
    live: Live = generations != 0
    if verify:
        live = check_entries(entries, geometry.slot_class.slot_bytes)
        scan.torn += (np.flatnonzero(~live & ~free_entries(entries)) + (extent << SLOT_BITS)).tolist()
        generations[~live] = 0
    epochs = entries["boot_epoch"][live]
    scan.highest_epoch = max(scan.highest_epoch, int(epochs.max(initial=0)))
    arrivals = entries["arrival_ms"][live]
    scan.latest_arrival_ms = max(scan.latest_arrival_ms, int(arrivals.max(initial=0)))
    scan.geometries[extent] = geometry
    scan.live[extent] = live
    scan.generations[extent] = generations
    tables.remove(extent)
    tables.add((Table(extent, geometry, entries),), (extent,))


def _salvage(slab: Slab, tables: Tables, scan: _Scan, boot: BootRecord) -> None:
    """Records whose entries are torn in node-local fields only, and whose payload stands, get an entry of this boot. It
    counts as arrived with the last of the others: a sweep takes no record for older than it is."""
    left = []
    for location in scan.torn:
        extent, slot = location >> SLOT_BITS, location & SLOT_MASK
        geometry = scan.geometries[extent]
        entry = slab.read_entries(geometry, location, 1)
        if not _stands_whole(slab, geometry, location, entry):
            left.append(location)
            continue
        scan.salvaged += 1
        generation = (boot.boots << GENERATION_BITS) + scan.salvaged
        raw = wrap_entries(entry_headers(entry), np.array([generation], np.uint64), scan.latest_arrival_ms, boot.epoch)
        slab.write_entries(geometry, location, raw)
        scan.live[extent][slot] = True
        scan.generations[extent][slot] = generation
        table = tables.get(extent)
        if table is not None:
            table.fill(slot, raw)
    scan.torn = left


def _stands_whole(slab: Slab, geometry: Geometry, location: int, entry: NDArray[np.void]) -> bool:
    """Whether a torn entry has a valid header and the slot holds the payload that it names."""
    if not headers_stand(entry, geometry.slot_class.slot_bytes)[0]:
        return False
    try:
        payload = slab.read_payload(geometry, location, 1)[0]
    except OSError:
        return False
    shard_bytes = -(-int(entry["block_bytes"][0]) // DATA_SHARDS)
    return xxh3_64(payload[:shard_bytes]) == int(entry["payload_hash"][0])


# -- Index ----------------------------------------------------------------------------------------------------------


def _mend(io: Io, path: str, config: NodeConfig, slab: Slab, index: Index, tables: Tables, scan: _Scan,
          counters: CounterFile) -> Index:
    """Zero torn entries and make the index say what the tables say; made anew if it cannot be read. Returns it."""
    _free(slab, tables, scan, scan.torn)
    try:
        _align(slab, index, tables, scan, counters)
        return index
    except IndexDamaged:
        index.close()
    index = _open_index(io, path, config, counters, anew=True)
    try:
        _align(slab, index, tables, scan, counters)
    except BaseException:
        index.close()
        raise
    return index


def _align(slab: Slab, index: Index, tables: Tables, scan: _Scan, counters: CounterFile) -> None:
    """Add what the index lacks, delete what it should not have, free the losers where a record stands twice."""
    for extent in sorted(scan.live):
        _align_extent(slab, index, tables, scan, extent)
    if index.entries != scan.records:
        stale = [entry for entry in index.scan() if not _stands(scan, entry)]
        counters.add("node_index_mismatch", len(stale))
        index.delete(stale)


def _align_extent(slab: Slab, index: Index, tables: Tables, scan: _Scan, extent: int) -> None:
    slots = np.flatnonzero(scan.live[extent])
    if not len(slots):
        return
    rows = _entries_of(slab, tables, scan, extent)[slots]
    names = [row.tobytes() for row in np.concatenate((rows["key"], rows["digest"]), axis=1).astype("<u8")]
    generations = scan.generations[extent][slots]
    locations = slots + (extent << SLOT_BITS)
    younger: dict[bytes, int] = {}
    losers = []
    for row in np.argsort(generations, kind="stable").tolist():
        if names[row] in younger:
            losers.append(int(locations[younger[names[row]]]))
        younger[names[row]] = row
    missing = []
    rows_left = sorted(younger.values())
    for row, known in zip(rows_left, index.get([names[row] for row in rows_left]), strict=True):
        place, generation = int(locations[row]), int(generations[row])
        if known == (place, generation):
            continue
        if known is not None and _stands(scan, IndexEntry(names[row], *known)):
            if known[1] > generation:
                losers.append(place)
                continue
            losers.append(known[0])
        missing.append(row)
    try:
        index.put([names[row] for row in missing], locations[missing], generations[missing])
    except IndexFull:
        losers += locations[missing].tolist()
    _free(slab, tables, scan, losers)


def _entries_of(slab: Slab, tables: Tables, scan: _Scan, extent: int) -> NDArray[np.void]:
    table = tables.get(extent)
    return table.entries if table is not None else slab.read_table(extent, scan.geometries[extent])


def _stands(scan: _Scan, entry: IndexEntry) -> bool:
    """Whether a live record with this generation is at this location. Generations are unique, so it is that record."""
    row = scan.generations.get(entry.location >> SLOT_BITS)
    slot = entry.location & SLOT_MASK
    return row is not None and slot < len(row) and entry.generation != 0 and int(row[slot]) == entry.generation


def _free(slab: Slab, tables: Tables, scan: _Scan, locations: Sequence[int]) -> None:
    for location in locations:
        extent, slot = location >> SLOT_BITS, location & SLOT_MASK
        slab.clear_entries(scan.geometries[extent], location, 1)
        scan.live[extent][slot] = False
        scan.generations[extent][slot] = 0
        table = tables.get(extent)
        if table is not None:
            table.clear(np.array([slot]))


# -- Memory ---------------------------------------------------------------------------------------------------------


def _assemble(io: Io, path: str, config: NodeConfig, boot: BootRecord, slab: Slab, index: Index, tables: Tables,
              scan: _Scan, counters: CounterFile, closed: bool) -> NodeState:
    plan = config.plan
    allocator = Allocator(plan.extent_bytes, plan.extents)
    stamps = Stamps(plan.extents, plan.stamp_bytes)
    eviction = Eviction(allocator, stamps)
    kept = load_stamps(io, stamps_path(path), scan.geometries, remove_others=True)
    unverified = 0
    arrivals: list[tuple[NDArray[np.int64], NDArray[np.uint64]]] = []
    for extent, geometry in sorted(scan.geometries.items()):
        allocator.assign(extent, geometry.slot_class)
        stamps.attach(extent, geometry, kept.get(extent))
        slots = np.flatnonzero(scan.live[extent])
        if len(slots):
            locations = slots + (extent << SLOT_BITS)
            rows = _entries_of(slab, tables, scan, extent)[slots]
            allocator.mark_live(locations, np.array(rows["tenant_tag"]))
            eviction.note(locations, np.array(rows["depth"]), ties_of(rows["key"], rows["digest"]))
            unverified += int(np.count_nonzero(rows["boot_epoch"] < boot.unverified_below))
            arrivals.append((locations, rows["arrival_ms"].astype(np.uint64)))
    if not closed:
        _stamp_arrivals(stamps, arrivals)
    state = NodeState(config, boot, slab, index, allocator, stamps, eviction, tables, counters, unverified)
    state.allocated.update(scan.geometries)
    state.next_generations(scan.salvaged)  # They are given out.
    return state


def _stamp_arrivals(stamps: Stamps, arrivals: Sequence[tuple[NDArray[np.int64], NDArray[np.uint64]]]) -> None:
    """See "lost stamps" in the module docstring."""
    newest_ms = max((int(arrived.max()) for _, arrived in arrivals), default=0)
    for locations, arrived in arrivals:
        late = arrived >= max(0, newest_ms - int(STAMP_FLUSH_MS))
        least = (arrived[late] // (1000 * STAMP_SECONDS)).astype(np.uint32)
        stamps.set(locations[late], np.maximum(stamps.get(locations[late]), least))


def mark_closed(io: Io, path: str, state: NodeState) -> None:
    """Sync everything and write that the node was closed in order. Nothing may be owed."""
    state.slab.sync()
    state.index.sync()
    boot = replace(state.boot, clean=True)
    if not state.unverified:
        boot = replace(boot, unverified_below=0)
    write_boot(io, path, boot)
