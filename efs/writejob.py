"""One piece of work of a node's writer thread: everything that a put, a drop or a rewrite changes on disk, in order.

    0. write entries again that an earlier job may have torn
    1. zero table entries of slots that lost their record or are about to get one
    2. format extents that were given to a class
    3. payload, one write for each contiguous range
    4. table entries, one write for each contiguous range
    5. [power mode: sync of the slab]
    6. index: deletes, then puts
    7. [power mode: sync of the index]

Killed anywhere in it, a slot is either free or whole, and the index never shows a record before its data. A job is
plain data that nobody changes; what it did to the disk is applied to memory on the loop (`efs/nodewriter.py`).

An extent that several queued jobs write to is formatted by the first of them that gets so far: each brings the number
under which the extent was given to its class, and `Formats` remembers which numbers are done.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from efs.extent import Geometry, SlotClass
from efs.index import Index, IndexDamaged, IndexEntry, IndexFull
from efs.shard import wrap_entries
from efs.slab import Slab

NO_SPACE: Final = (errno.ENOSPC, errno.EDQUOT)


class JobFailed(Exception):
    """A job ended with an error. `wrote` tells whether it had begun to write records."""

    def __init__(self, error: Exception, wrote: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.wrote = wrote


class SyncFailed(Exception):
    """Data could not be made durable. What was written before may be lost, whatever a later sync says."""

    def __init__(self, error: OSError) -> None:
        super().__init__(f"sync failed: {error.strerror or error}")


@dataclass(frozen=True, slots=True)
class Slots:
    """Neighbouring slots."""

    geometry: Geometry
    location: int
    count: int


@dataclass(frozen=True, slots=True)
class Records:
    """Table entries of neighbouring slots, and their payload unless that stands already.

    headers: (n, H). generations: (n,). payload: (n, slot bytes) or None. index_keys: n names, () when the index has
    them.
    """

    geometry: Geometry
    location: int
    headers: NDArray[np.uint8]
    generations: NDArray[np.uint64]
    arrivals_ms: int | NDArray[np.uint64]
    payload: NDArray[np.uint8] | None
    index_keys: tuple[bytes, ...]

    @property
    def count(self) -> int:
        return len(self.headers)

    def locations(self) -> NDArray[np.int64]:
        return np.arange(self.location, self.location + self.count, dtype=np.int64)


@dataclass(frozen=True, slots=True)
class Entries:
    """Raw table entries, (n, entry bytes), of neighbouring live slots, as they should stand."""

    geometry: Geometry
    location: int
    raw: NDArray[np.uint8]


@dataclass(frozen=True, slots=True)
class Format:
    """An extent to be given to a class on disk; `number` tells one giving from another."""

    extent: int
    slot_class: SlotClass
    number: int


@dataclass(frozen=True, slots=True)
class WriteJob:
    """See the module docstring. `taken` are extents that other records had before."""

    clears: tuple[Slots, ...] = ()
    formats: tuple[Format, ...] = ()
    taken: frozenset[int] = frozenset()
    records: tuple[Records, ...] = ()
    deletes: tuple[IndexEntry, ...] = ()
    restores: tuple[Entries, ...] = ()

    def indexed(self) -> list[IndexEntry]:
        """The index entries that the job puts."""
        return [IndexEntry(*fields) for part in self.records if part.index_keys
                for fields in zip(part.index_keys, part.locations().tolist(), part.generations.tolist(), strict=True)]


@dataclass(slots=True)
class Formats:
    """What the writer thread has formatted, by extent. Belongs to that thread."""

    done: dict[int, int] = field(default_factory=dict)


def run_job(job: WriteJob, slab: Slab, index: Index, formats: Formats, boot_epoch: int,
            durable: bool) -> list[NDArray[np.uint8]]:
    """Do a job; returns the raw table entries of each of its `records`. JobFailed around an OSError, SyncFailed,
    IndexFull or IndexDamaged."""
    try:
        for part in job.restores:
            slab.write_entries(part.geometry, part.location, part.raw)
        for slots in job.clears:
            slab.clear_entries(slots.geometry, slots.location, slots.count)
        for form in job.formats:
            if formats.done.get(form.extent) != form.number:
                _format(slab, form, durable)
                formats.done[form.extent] = form.number
    except (OSError, SyncFailed) as error:
        raise JobFailed(error, wrote=False) from error
    try:
        entries = _write_records(job, slab, boot_epoch)
        if durable:
            _durable(slab.sync)
        index.delete(job.deletes)
        _put_index(job, index)
        if durable:
            _durable(index.sync)
    except (OSError, SyncFailed, IndexFull, IndexDamaged) as error:
        raise JobFailed(error, wrote=True) from error
    return entries


def _write_records(job: WriteJob, slab: Slab, boot_epoch: int) -> list[NDArray[np.uint8]]:
    for part in job.records:
        if part.payload is not None:
            slab.write_payload(part.geometry, part.location, part.payload)
    entries = [wrap_entries(part.headers, part.generations, part.arrivals_ms, boot_epoch) for part in job.records]
    for part, raw in zip(job.records, entries, strict=True):
        slab.write_entries(part.geometry, part.location, raw)
    return entries


def _put_index(job: WriteJob, index: Index) -> None:
    named = [part for part in job.records if part.index_keys]
    if named:
        index.put([name for part in named for name in part.index_keys],
                  np.concatenate([part.locations() for part in named]),
                  np.concatenate([part.generations for part in named]))


def _format(slab: Slab, form: Format, durable: bool) -> None:
    try:
        slab.assign(form.extent, form.slot_class, durable)
    except OSError as error:
        if durable and error.errno == errno.EIO:
            # It may have been one of the two syncs in there: take it for that.
            raise SyncFailed(error) from error
        raise


def _durable(sync: Callable[[], None]) -> None:
    try:
        sync()
    except OSError as error:
        raise SyncFailed(error) from error
