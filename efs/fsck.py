"""fsck: is what lies on the twelve nodes what the formats and the design say? Reads only; yields findings
(`efs/findings.py`).

Two passes, both in bounded memory, whatever the size of the store:

1. *Tables* (`efs/tablecheck.py`), node by node, extent by extent: header pages, every table entry, and the index
   entry that must stand for it. Orphan slots and data without index show here; so do the sums.
2. *Stripes* (`efs/stripecheck.py`): the twelve indexes, each sorted by key, are merged page by page. Of each key the
   table entries behind all its index entries are read and checked, deep also every payload; then `efs/verdict.py`
   judges its versions. Deep, the shards of a version are checked against each other once: ten of them must give the
   others and the segments of the header.

The second pass can be cut short by a duration and continued at the key where it stopped; the first one reads metadata
only and is always made anew.

*Beside a running owner* nothing stands still: a slot may be between its payload and its index entry, an eviction
between table and index, a put between its first node and its twelfth. So every suspicion is looked at once more with
fresh reads; with an owner again and again, until it is gone or has stood unchanged for RECHECK_MS, longer than a step
of a writer takes. With an owner, versions younger than the hollow grace are not judged, and sums are not compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from efs.clock import Clock, SystemClock
from efs.codec import Codec
from efs.errors import InvalidArgument
from efs.findings import Finding, Kind, Sums
from efs.index import IndexDamaged, IndexEntry
from efs.limits import DATA_SHARDS, HOLLOW_GRACE_MS, KEY_BYTES, MIB, PLACEMENT_GROUPS, STRIPE_SHARDS
from efs.nodeview import NodeView
from efs.placement import placement_group
from efs.storeview import StoreView, last_key
from efs.stripecheck import Judged, StripeCheck
from efs.tablecheck import TableCheck

SUSPICIONS_KEPT: Final = 1024
RECHECK_MS: Final = 10_000
RECHECK_PAUSE_MS: Final = 100
TABLE_SHARE: Final = 0.2
"""Of the progress that is shown."""
ALLOCATION_SLACK_BYTES: Final = 1 * MIB
"""What the file system may count for a slab beside its extents."""

Progress = Callable[[float], None]
LookAgain = Callable[[Collection[Finding]], Collection[Finding]]


@dataclass(frozen=True, slots=True)
class Options:
    """deep: read every payload. max_duration_s: stop the second pass after this. resume: key (hex digits) behind
    which the second pass begins, from `Sums.resume` of an earlier run."""

    deep: bool = False
    max_duration_s: float | None = None
    resume: str | None = None

    def __post_init__(self) -> None:
        if self.max_duration_s is not None and not self.max_duration_s > 0:
            raise InvalidArgument(f"max duration is {self.max_duration_s} s, must be above 0")
        resume_key(self.resume)


def resume_key(text: str | None) -> bytes | None:
    """The key that a resume point names; InvalidArgument when it is not 64 hex digits."""
    if text is None:
        return None
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise InvalidArgument(f"resume point {text!r} is not {2 * KEY_BYTES} hex digits")
    return key


class Fsck:
    """One run over a store. `run` yields findings as they are certain; `sums` is complete when it has ended."""

    def __init__(
        self,
        store: StoreView,
        options: Options | None = None,
        *,
        clock: Clock | None = None,
        pause: Callable[[float], None] = time.sleep,
        progress: Progress = lambda share: None,
    ) -> None:
        self.sums = Sums()
        self._store = store
        self._options = options or Options()
        self._clock = clock or SystemClock()
        self._pause = pause
        self._progress = progress
        self._stripes = StripeCheck(store.views, Codec() if self._options.deep else None)
        self._tables: dict[int, TableCheck] = {}
        self._agreeing = {view.node_index: 0 for view in store.views}
        self._problems_told = 0
        self._ends_at: float | None = None

    def run(self) -> Iterator[Finding]:
        """All findings: nodes first, then records by node and extent, then blocks by key, then sums."""
        started = self._clock.monotonic()
        if self._options.max_duration_s is not None:
            self._ends_at = started + self._options.max_duration_s
        self.sums.beside_owner = self._store.owner() is not None
        for finding in self._findings():
            self.sums.found[finding.kind.value] += 1
            self.sums.seconds = self._clock.monotonic() - started
            yield finding
        self.sums.seconds = self._clock.monotonic() - started

    def _findings(self) -> Iterator[Finding]:
        yield from self._new_problems()
        views = tuple(self._store.views)
        for position, view in enumerate(views):
            for finding in self._check_tables(view):
                self._stripes.note(finding)
                yield finding
            yield from self._new_problems()
            self._progress(TABLE_SHARE * (position + 1) / len(views))
        for finding in self._check_stripes():
            yield from self._new_problems()
            yield finding
        yield from self._new_problems()
        yield from self._check_sums()
        self.sums.nodes = len(self._store.views)

    def _new_problems(self) -> Iterator[Finding]:
        """Nodes that cannot be read, also those whose index turned out to be damaged on the way."""
        while self._problems_told < len(self._store.problems):
            self._problems_told += 1
            yield self._store.problems[self._problems_told - 1]

    def _certain(self, suspected: Collection[Finding], look_again: LookAgain) -> list[Finding]:
        """Those of the suspicions that are still there when every running step of a writer must have ended."""
        standing = list(suspected)
        waited_ms = 0
        while standing:
            seen = set(look_again(standing))
            standing = [finding for finding in standing if finding in seen]
            if not standing or self._store.owner() is None or waited_ms >= RECHECK_MS:
                break
            self._pause(RECHECK_PAUSE_MS / 1000)
            waited_ms += RECHECK_PAUSE_MS
        return standing

    # -- first pass

    def _check_tables(self, view: NodeView) -> Iterator[Finding]:
        table = self._tables[view.node_index] = TableCheck(view, self.sums)
        suspected: list[Finding] = []
        try:
            for extent in range(view.slab.extents):
                suspected += table.suspect(extent)
                if len(suspected) >= SUSPICIONS_KEPT:
                    yield from self._certain(suspected, table.look_again)
                    suspected = []
            yield from self._certain(suspected, table.look_again)
        except IndexDamaged as error:
            self._store.lose(view, error)

    # -- second pass

    def _check_stripes(self) -> Iterator[Finding]:
        after = resume_key(self._options.resume)
        while batch := self._store.next_entries(after):
            judged = self._stripes.judge(batch, self._young_after())
            self._add(batch, judged)
            yield from self._certain(judged.findings, self._look_at_keys)
            after = last_key(batch)
            self._progress(TABLE_SHARE + (1 - TABLE_SHARE) * placement_group(after) / PLACEMENT_GROUPS)
            if self._ends_at is not None and self._clock.monotonic() >= self._ends_at:
                self.sums.resume = after.hex()
                return
        self.sums.complete = self._options.resume is None
        self._progress(1.0)

    def _look_at_keys(self, suspected: Collection[Finding]) -> list[Finding]:
        keys = sorted({finding.key for finding in suspected if finding.key is not None})
        return self._stripes.judge(self._store.entries_of(keys), self._young_after(), again=True).findings

    def _young_after(self) -> int | None:
        return None if self._store.owner() is None else int(self._clock.wall() * 1000 - HOLLOW_GRACE_MS)

    def _add(self, batch: dict[int, list[IndexEntry]], judged: Judged) -> None:
        sums = self.sums
        sums.index_entries += sum(map(len, batch.values()))
        sums.verified_bytes += judged.verified_bytes
        for index, agreeing in judged.agreeing.items():
            self._agreeing[index] += agreeing
        for verdict in judged.verdicts:
            sums.versions += 1
            sums.young += verdict.state == "young"
            sums.fading += verdict.fading
            sums.unreadable += verdict.state == "unreadable"
            sums.hollow += verdict.state == "hollow"
            sums.readable += verdict.sound >= DATA_SHARDS
            sums.at_risk += DATA_SHARDS <= verdict.sound < STRIPE_SHARDS

    # -- sums

    def _check_sums(self) -> Iterator[Finding]:
        for view in self._store.views:
            found = self._sums_of(view, self._tables[view.node_index])
            if found and not self.sums.beside_owner and self._store.owner() is None:
                yield from found

    def _sums_of(self, view: NodeView, table: TableCheck) -> Sequence[Finding]:
        space = view.space()
        self.sums.allocated_bytes += space.allocated
        self.sums.total_bytes += space.total
        index, found = view.node_index, []
        if self.sums.complete and table.agreeing != self._agreeing[index]:
            found.append(
                Finding(
                    Kind.ACCOUNTING_DRIFT,
                    index,
                    detail=f"{table.agreeing} table entries agree with the "
                    f"index, {self._agreeing[index]} index entries agree with the tables",
                )
            )
        least, most = table.used_extents * view.slab.extent_bytes, view.slab.extents * view.slab.extent_bytes
        if not least <= space.allocated <= most + ALLOCATION_SLACK_BYTES:
            found.append(
                Finding(
                    Kind.ACCOUNTING_DRIFT,
                    index,
                    detail=f"the slab occupies {space.allocated} bytes, its "
                    f"{table.used_extents} used extents are {least}, all extents are {most}",
                )
            )
        if space.total > self._store.node_capacity:
            found.append(
                Finding(
                    Kind.OVER_LIMIT,
                    index,
                    detail=f"the directory occupies {space.total} bytes, the limit is {self._store.node_capacity}",
                )
            )
        return found
