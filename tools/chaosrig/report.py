"""The outcome of a chaos run: what was injected, what was seen of it, what was broken; as a table and as JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from efs.limits import STRIPE_SHARDS
from tools.chaosrig.model import Told
from tools.chaosrig.watchers import Watchers

VIOLATIONS_SHOWN: Final = 40

EVIDENCE: Final[Mapping[str, tuple[str, ...]]] = {
    "hang_read": ("late_shards", "hedged_shards", "rebuilt_blocks", "node_suspect"),
    "hang_write": ("put_at_risk", "put_failed", "node_suspect"),
    "slow": ("late_shards", "hedged_shards", "rebuilt_blocks", "node_suspect", "put_at_risk"),
    "full": ("node_full", "node_io_errors", "put_at_risk", "put_failed"),
    "eio": ("node_io_errors",),
    "rot_payload": ("corrupt_shards", "node_verify_failed", "scrub_dropped", "repair_corrupt"),
    "rot_entry": ("node_torn_entries", "node_index_mismatch", "scrub_dropped", "repair_rebuilt"),
    "vanish": ("nodes_degraded", "nodes_synced"),
    "replace": ("nodes_synced", "repair_rebuilt"),
    "third": ("get_missed_blocks", "put_failed"),
}
"""Counters of which at least one must grow in an episode of a kind (I6). A swap is refused before anything counts, a
kill is seen as a restart."""


WITHOUT_COUNTERS: Final = {"swap": "refused at the opening", "kill": "restarted", "die_in_put": "restarted",
                           "die_in_get": "restarted", "outage": "no difference"}
"""What is seen of a kind that no counter shows."""


def evidence(kind: str, raised: Mapping[str, int],
             shown_by: Mapping[str, tuple[str, ...]] = EVIDENCE) -> dict[str, int]:
    """Those of a kind's counters that grew."""
    return {name: raised[name] for name in shown_by.get(kind, ()) if raised.get(name)}


@dataclass(slots=True)
class Seen:
    """Of one kind. struck: how often it was really done or met. unseen: episodes in which none of its counters grew."""

    kind: str
    episodes: int = 0
    struck: int = 0
    unseen: int = 0
    counters: Counter[str] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked for. whole: every kind must have been injected. again: how to ask for it again."""

    seed: int
    seconds: float
    whole: bool
    again: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """`totals` are sums over all incarnations of all processes; a run is good when `violations` is empty."""

    request: Request
    seconds: float
    planned: int
    done: int
    kinds: tuple[Seen, ...]
    totals: Mapping[str, int]
    violations: tuple[str, ...]
    ending: Mapping[str, Any]

    @classmethod
    def of(cls, request: Request, seconds: float, planned: int, done: int, kinds: Sequence[Seen], told: Told,
           watchers: Watchers, violations: Sequence[str], ending: Mapping[str, Any], capacity_bytes: int) -> Outcome:
        """Put together what the parts of a run know, and judge the run as a whole (I4, I6, I7)."""
        totals = _totals(told, watchers, ending, capacity_bytes)
        broken = [*told.violations, *violations, *run_violations(kinds, totals, request.whole)]
        return cls(request, seconds, planned, done, tuple(kinds), totals, tuple(broken), ending)

    def document(self) -> dict[str, Any]:
        """For JSON."""
        kinds = {seen.kind: {"episodes": seen.episodes, "struck": seen.struck, "counters": dict(seen.counters)}
                 for seen in self.kinds}
        return {"seed": self.request.seed, "seconds": self.seconds, "episodes_planned": self.planned,
                "episodes_done": self.done, "faults": kinds, "totals": dict(self.totals),
                "violations": list(self.violations), "ending": dict(self.ending)}

    def lines(self) -> list[str]:
        """The table."""
        lines = [f"seed {self.request.seed}: {self.done} of {self.planned} episodes in {self.seconds:.0f} s", "",
                 f"{'fault':<12} {'episodes':>8} {'struck':>8}   seen"]
        for seen in self.kinds:
            counters = ", ".join(f"{name} {count}" for name, count in sorted(seen.counters.items()))
            without = WITHOUT_COUNTERS.get(seen.kind, "nothing")
            what = counters or (without if seen.episodes else "")
            lines.append(f"{seen.kind:<12} {seen.episodes:>8} {seen.struck:>8}   {what}")
        lines += ["", *(f"{name.replace('_', ' '):<28} {value:>12}" for name, value in self.totals.items())]
        lines += ["", *(f"violation: {what}" for what in self.violations[:VIOLATIONS_SHOWN])]
        if len(self.violations) > VIOLATIONS_SHOWN:
            lines.append(f"… and {len(self.violations) - VIOLATIONS_SHOWN} more violations")
        if self.violations:
            lines.append(f"replay with: {self.request.again}")
        else:
            lines.append("no violation")
        return lines


def _totals(told: Told, watchers: Watchers, ending: Mapping[str, Any], capacity_bytes: int) -> dict[str, int]:
    sums = ending.get("sums", {})
    names = ("reads", "hit_blocks", "missed_blocks", "guarded_hits", "rebuilt_blocks", "corrupt_shards", "puts",
             "acked_blocks", "already_blocks", "failed_blocks", "at_risk_blocks", "matches", "collect", "sweep",
             "scrub", "repair", "wrong_blocks", "lost_blocks", "late_calls", "late_with_machine", "loop_stalls",
             "hits_only_when_asked_again", "misses_not_judged", "evicted_on_demand", "claims_tested", "cancelled_reads",
             "buffers_looked_at", "late_bytes")
    return {
        **{name: told.sums[name] for name in names},
        **{name: told.most[name] for name in ("past_deadline_ms", "loop_held_ms", "thread_lag_ms")},
        "restarts": max(0, told.incarnations - 1),
        "puts_cut_by_a_kill": told.cut_puts,
        "fsck_runs": watchers.runs,
        "fsck_runs_in_quiet": watchers.quiet_runs,
        "fsck_true_findings": watchers.true_findings,
        "fsck_false_findings": watchers.false_findings,
        "evicted_records": ending.get("counters", {}).get("node_evicted", 0),
        "collections": ending.get("counters", {}).get("node_collections", 0),
        "highest_du_bytes": watchers.highest_du_bytes,
        "capacity_bytes": capacity_bytes,
        "leaked_bytes": leaked_bytes(sums, ending.get("nodes", ())),
    }


def leaked_bytes(sums: Mapping[str, Any], nodes: Sequence[Mapping[str, Any]]) -> int:
    """Space at the end that no readable block accounts for: slots in tables without an index entry, of hollow stripes,
    beyond twelve a block, and whatever the nodes count otherwise than their tables do."""
    if not sums:
        return 0
    records = sums["records"]
    slot_bytes = sums["live_bytes"] // records if records else 0
    most = STRIPE_SHARDS * sums["readable"]
    astray = max(records - sums["index_entries"], records - most, 0)
    return int(astray * slot_bytes + abs(sum(node["live_bytes"] for node in nodes) - sums["live_bytes"]))


def run_violations(kinds: Sequence[Seen], totals: Mapping[str, int], whole: bool) -> list[str]:
    """What only the whole run can show."""
    broken = [f"{seen.kind}: no counter showed it in {seen.unseen} of {seen.episodes} episodes"
              for seen in kinds if seen.unseen]
    if not any(seen.struck for seen in kinds):
        broken.append("nothing was injected at all")
    broken += [f"{seen.kind} was never injected" for seen in kinds if not seen.struck and (whole or seen.episodes)]
    needed = ["hit_blocks", "guarded_hits", "claims_tested"]
    if whole:
        needed += ["missed_blocks", "fsck_runs_in_quiet", "evicted_records", "cancelled_reads"]
    broken += [f"there were no {name.replace('_', ' ')}" for name in needed if not totals[name]]
    if totals["leaked_bytes"]:
        broken.append(f"{totals['leaked_bytes']} bytes leaked")
    return broken
