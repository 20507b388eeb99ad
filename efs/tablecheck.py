"""The first pass of fsck: one node's extents, table entries, and the index entries that must stand for them.

`suspect` and `look_again` return suspicions; whether they are findings is for `efs/fsck.py` to decide.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Final

import numpy as np

from efs.errors import EfsError, IdentityMismatch
from efs.extent import Geometry, extent_of, location_of
from efs.findings import Finding, Kind, Sums
from efs.nodeview import NodeView, Records, Slot

TABLE_ROWS: Final = 8192
"""Table entries read at a time."""


class TableCheck:
    """The tables of one node. `agreeing` counts sound entries that the index has at their slot."""

    def __init__(self, view: NodeView, sums: Sums) -> None:
        self.agreeing = 0
        self.used_extents = 0
        self._view = view
        self._sums = sums
        boot = view.boot()
        self._unverified_below = boot.unverified_below if boot is not None else 0

    def suspect(self, extent: int) -> list[Finding]:
        """Suspicions about one extent; adds to the sums."""
        geometry = self._view.geometry(extent)
        if geometry is None:
            return self._damaged(extent)
        self.used_extents += 1
        try:
            return self._check_slots(extent, geometry)
        except OSError as error:
            return [read_error(self._view, location_of(extent, 0), error)]

    def look_again(self, suspected: Collection[Finding]) -> list[Finding]:
        """What still is to be said of the slots and extents of some suspicions."""
        slots = [finding.location for finding in suspected if finding.key is not None]
        records = self._view.records(np.array(slots, np.int64), again=True)
        found = self._without_index(records[records["status"] == Slot.LIVE])
        for finding in suspected:
            if finding.key is None and finding.location is not None:
                extent = extent_of(finding.location)
                geometry = self._view.geometry(extent, again=True)
                if finding.kind is Kind.READ_ERROR:
                    found += self._readable(extent, geometry)
                elif geometry is None:
                    found += self._damaged(extent)
        return found

    def _check_slots(self, extent: int, geometry: Geometry) -> list[Finding]:
        suspected: list[Finding] = []
        for start in range(0, geometry.slots, TABLE_ROWS):
            records = self._view.table_rows(extent, geometry, start, min(TABLE_ROWS, geometry.slots - start))
            live = records[records["status"] == Slot.LIVE]
            without = self._without_index(live)
            suspected += without
            self.agreeing += len(live) - len(without)
            self._sums.records += len(live)
            self._sums.live_bytes += len(live) * geometry.slot_class.slot_bytes
            self._sums.torn += int(np.count_nonzero(records["status"] == Slot.TORN))
            self._sums.unverified += int(np.count_nonzero(live["boot_epoch"] < self._unverified_below))
        return suspected

    def _without_index(self, live: Records) -> list[Finding]:
        """Sound entries that the index does not have, or has elsewhere."""
        index_keys = [key + digest for key, digest in zip(live["key"].tolist(), live["digest"].tolist(), strict=True)]
        held = self._view.index.get(index_keys)
        places = zip(live["location"].tolist(), live["generation"].tolist(), strict=True)
        found = []
        for index_key, place, entry in zip(index_keys, places, held, strict=True):
            if entry == place:
                continue
            kind, detail = Kind.DATA_WITHOUT_INDEX, "the index does not have this record"
            if entry is not None:
                kind, detail = Kind.ORPHAN_SLOT, f"the index has this version at slot {entry[0]}, generation {entry[1]}"
            found.append(Finding(kind, self._view.node_index, index_key[:32], index_key[32:], place[0], detail))
        return found

    def _damaged(self, extent: int) -> list[Finding]:
        damage = self._view.damage(extent)
        return [] if damage is None else [extent_finding(self._view, extent, damage)]

    def _readable(self, extent: int, geometry: Geometry | None) -> list[Finding]:
        try:
            if geometry is not None:
                self._view.table_rows(extent, geometry, 0, geometry.slots)
        except OSError as error:
            return [read_error(self._view, location_of(extent, 0), error)]
        return []


def extent_finding(view: NodeView, extent: int, damage: EfsError) -> Finding:
    kind = Kind.WRONG_IDENTITY if isinstance(damage, IdentityMismatch) else Kind.EXTENT_DAMAGED
    return Finding(kind, view.node_index, None, None, location_of(extent, 0), str(damage))


def read_error(view: NodeView, location: int, error: OSError) -> Finding:
    return Finding(Kind.READ_ERROR, view.node_index, None, None, location, error.strerror or str(error))
