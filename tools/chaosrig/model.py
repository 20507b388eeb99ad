"""What the store must and may answer: the oracle of a chaos run, and the journal by which it outlives its process.

*Universe.* Chains of blocks of BLOCK_TOKENS tokens, in three families, told apart by number:

    hot      HOT_CHAINS chains of HOT_BLOCKS blocks, depths from 0
    churn    CHURN_CHAINS chains of which only the blocks at depths CHURN_DEPTHS are used, in several versions
    fresh    chains of one block at depth 0, each put once, guarded while it is one of the last FRESH_KEPT

The payload of a block is SHAKE-128 of seed, chain, block and version: a byte of any other block, version or run shows.

*Wrong bytes (I1).* A block that a read calls ok must be, byte for byte, a version that somebody began to put.

*Lost blocks (I2).* Hot and fresh blocks are *guarded*: put, and then read over and over. Eviction takes the coldest
first, and of equal stamps the deepest; churn is deeper than everything guarded. So a guarded block cannot have been
evicted while no more than `unevictable_blocks` different versions of blocks were put or read since it was itself,
counted from the beginning of that call; that is half of what a collection leaves. Within that a miss is a violation
when at most two nodes are damaged, or at most one if the block was acknowledged at risk and has not been seen on all
twelve nodes since. A hit on a block that may have been evicted shows ten shards and no more, because nodes do not evict
in the same moment: until it is seen whole again it must only be hit with no node damaged. A *damaged* node is one that
an episode touched and that has not been found whole again. A process that was killed leaves no access times of its last
minute: for the next one a block was used last when it was put.

*Late bytes.* A buffer that a read has given back, or left when it was cancelled, does not change any more: its checksum
is taken then and once more when LATE_BUFFERS others have followed.

*Deadlines (I3).* A call returns GRACE_MS after its deadline at the latest, on a machine that does everything at once.
How late a real one is, a probe coroutine on the same loop and a probe thread measure. Added to what is allowed
is what the loop was late behind the deadline, all its ticks together, and LAG_TURNS times the *lag*: the longest that
anything in the process waited for its turn while the call ran, because between its deadline and its return a call takes
a few turns of threads that no probe sees. Calls that needed this are counted. But a loop that was held up more than
STALL_MS longer than LAG_TURNS lags of the thread, its waits for a core not counted, was blocked by its own process,
which is a violation too.

*Journal.* Lines of JSON, appended with one write each, so that a killed process loses none that it wrote: an intent
before each put, its outcome after it, what was hit, running sums of the incarnation, violations. Several processes may
write one (`who`): each follows what all of them have written, so that all have one model, in which everything has
happened in the order of the file.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import Counter, OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from efs.limits import ACK_SHARDS, DATA_SHARDS, STRIPE_SHARDS
from kvstore.keys import Chain, Namespace
from kvstore.layout import BlockLayout

BLOCK_TOKENS: Final = 4
LAYOUT: Final = BlockLayout.per_layer((8_000, 12_345, 19_656), format="chaos", dtype="bytes", block_tokens=BLOCK_TOKENS)
"""Uneven segments, and a size that is no multiple of ten."""
HOT_CHAINS: Final = 3
HOT_BLOCKS: Final = 8
CHURN_CHAINS: Final = 40
CHURN_FIRST: Final = 1_000
CHURN_DEPTHS: Final = range(8, 40)
CHURN_VERSIONS: Final = 3
FRESH_FIRST: Final = 1_000_000
FRESH_KEPT: Final = 12
LATE_BUFFERS: Final = 24
GRACE_MS: Final = 100.0
STALL_MS: Final = 1_500.0
LAG_TURNS: Final = 4

Block = tuple[int, int]
"""Chain and depth."""


# -- The universe ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Universe:
    """All blocks of a run, as a function of its seed."""

    seed: int

    def namespace(self) -> Namespace:
        return Namespace("chaos", f"seed-{self.seed}", LAYOUT)

    def chain(self, chain: int) -> Chain:
        """All blocks of a chain of any family, from depth 0."""
        blocks = HOT_BLOCKS if chain < CHURN_FIRST else CHURN_DEPTHS.stop if chain < FRESH_FIRST else 1
        tokens = [chain * 64 + position for position in range(blocks * BLOCK_TOKENS)]
        return self.namespace().chain(tokens)

    def payload(self, block: Block, version: int) -> bytes:
        """The bytes of a version of a block, block-major."""
        text = f"{self.seed}/{block[0]}/{block[1]}/{version}".encode()
        return hashlib.shake_128(text).digest(LAYOUT.block_bytes)


def guarded(block: Block) -> bool:
    """Whether a block is of a family of which nothing may be lost."""
    return not CHURN_FIRST <= block[0] < FRESH_FIRST


# -- The model ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Claim:
    """A guarded block that was acknowledged. shards: how many of it are known to be there while it is not evicted.
    put_at, used_at: how many uses there had been (`Model.uses`) when the put of it began, and the last put or read."""

    shards: int
    put_at: int
    used_at: int

    def tolerates(self, damaged: int) -> bool:
        """Whether the block must be readable with so many nodes damaged, unless it was evicted."""
        return self.shards - damaged >= DATA_SHARDS


@dataclass(slots=True)
class Model:
    """What was put, and what must be there. Fed by `Journal` lines; see the module docstring."""

    universe: Universe
    unevictable_blocks: int
    versions: dict[Block, set[int]] = field(default_factory=dict)
    claims: dict[Block, Claim] = field(default_factory=dict)
    uses: int = 0
    fresh: int = 0
    _begun: dict[tuple[int, Block], int] = field(default_factory=dict)
    _last_use: OrderedDict[tuple[Block, int], int] = field(default_factory=OrderedDict)

    def opened(self, closed: bool) -> None:
        """A process owns the store. closed: the one before it had closed the store, not died."""
        if not closed:
            for claim in self.claims.values():
                claim.used_at = claim.put_at

    def intend(self, blocks: Sequence[Block], version: int, who: int = 0) -> None:
        """A put of these blocks is about to begin."""
        for block in blocks:
            self.versions.setdefault(block, set()).add(version)
            if guarded(block):
                self._begun[who, block] = self.uses
            if block[0] >= FRESH_FIRST:
                self.fresh = max(self.fresh, block[0] - FRESH_FIRST + 1)
        self._use((block, version) for block in blocks)

    def put(self, blocks: Iterable[Block], acknowledged: bool, at_risk: bool, who: int = 0) -> None:
        """That put returned. Only when all of its blocks were acknowledged anything is known of each."""
        if not acknowledged:
            return
        for block in blocks:
            if guarded(block):
                begun = self._begun.pop((who, block))
                self.claims[block] = Claim(ACK_SHARDS if at_risk else STRIPE_SHARDS, begun, begun)
        kept = self.fresh - FRESH_KEPT + FRESH_FIRST
        for old in [block for block in self.claims if FRESH_FIRST <= block[0] < kept]:
            del self.claims[old]

    def hit(self, found: Mapping[Block, int], begun: int) -> None:
        """These blocks were read, in these versions, by a call that began after so many uses."""
        for block in found:
            if block in self.claims and not self.unevicted(block):
                self.claims[block].shards = DATA_SHARDS
        self._use(found.items())
        for block in found:
            if block in self.claims:
                self.claims[block].used_at = max(begun, self.claims[block].used_at)

    def found_whole(self, blocks: Iterable[Block]) -> None:
        """All twelve shards of these were looked at and are sound."""
        for block in blocks:
            if block in self.claims:
                self.claims[block].shards = STRIPE_SHARDS

    def version_of(self, block: Block, data: bytes) -> int | None:
        """Which of the versions that may be read under a block these bytes are; None when they are wrong."""
        return next((version for version in sorted(self.versions.get(block, ()))
                     if data == self.universe.payload(block, version)), None)

    def must_hit(self, block: Block, damaged: int) -> bool:
        """Whether a miss of a block, now, is a violation."""
        return self.unevicted(block) and self.claims[block].tolerates(damaged)

    def unevicted(self, block: Block) -> bool:
        """Whether a block was acknowledged and cannot have been evicted by now."""
        claim = self.claims.get(block)
        return claim is not None and self._used_since(claim.used_at) <= self.unevictable_blocks

    def forget(self, block: Block) -> None:
        """A block was a miss that may have been evicted: nothing is claimed of it any more."""
        self.claims.pop(block, None)

    def _use(self, names: Iterable[tuple[Block, int]]) -> None:
        for name in names:
            self.uses += 1
            self._last_use[name] = self.uses
            self._last_use.move_to_end(name)
        while len(self._last_use) > 2 * self.unevictable_blocks + 1:
            self._last_use.popitem(last=False)

    def _used_since(self, moment: int) -> int:
        """How many different versions of blocks were used since, as far as that is kept."""
        count = 0
        for used in reversed(self._last_use.values()):
            if used <= moment:
                break
            count += 1
        return count


def lateness_ms(elapsed_ms: float, deadline_ms: float, lost_ms: float, lag_ms: float) -> float:
    """By how much a call missed its deadline beyond what is allowed; 0 when it did not. lost_ms: what the loop was late
    behind the deadline. lag_ms: the lag of the machine while the call ran."""
    return max(0.0, elapsed_ms - deadline_ms - GRACE_MS - lost_ms - LAG_TURNS * lag_ms)


def stalled(loop_held_ms: float, thread_lag_ms: float) -> bool:
    """Whether something held up the loop itself, not the machine."""
    return loop_held_ms > LAG_TURNS * thread_lag_ms + STALL_MS


# -- The journal -------------------------------------------------------------------------------------------------------


class Ledger:
    """The journal of a run as one of its processes has it: what it writes is appended, and the model is always where
    the file ends that the last `write` or `follow` has seen."""

    def __init__(self, path: str, model: Model, who: int = 0) -> None:
        self.model = model
        self.who = who
        self.told = Told()
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._position = 0
        self._rest = b""

    def write(self, **line: Any) -> None:
        """One line, in one write, and it has happened. It begins a line even if somebody was killed in the last one."""
        text = json.dumps({**line, "who": self.who}, separators=(",", ":"))
        os.write(self._fd, b"\n" + text.encode() + b"\n")
        self.follow()

    def follow(self) -> None:
        """Go along with what everybody has written so far."""
        while data := os.pread(self._fd, 1 << 20, self._position):
            self._position += len(data)
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self.told.take(line, self.model)

    def close(self) -> None:
        os.close(self._fd)


@dataclass(slots=True)
class Told:
    """What a journal says beside the model: sums over all incarnations, violations, and puts that kills cut short."""

    sums: Counter[str] = field(default_factory=Counter)
    most: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    incarnations: int = 0
    cut_puts: int = 0
    closed: bool = True
    _running: dict[int, Mapping[str, int]] = field(default_factory=dict)
    """By process, the sums of its incarnation."""
    _open: Counter[int] = field(default_factory=Counter)
    """By process, puts that have not returned."""

    def take(self, text: str | bytes, model: Model) -> None:
        """The next line. One that a kill cut short is passed over."""
        try:
            line = json.loads(text)
        except ValueError:
            return
        kind, who = line["t"], line.get("who", 0)
        blocks = [(int(chain), int(depth)) for chain, depth in line.get("b", ())]
        if kind == "open":
            self._end(who)
            self.incarnations += 1
            if line.get("owns", True):
                model.opened(self.closed)
            self.closed = False
        elif kind == "closed":
            self.closed = True
        elif kind == "intent":
            self._open[who] += 1
            model.intend(blocks, line["v"], who)
        elif kind == "put":
            self._open[who] -= 1
            model.put(blocks, line["acknowledged"], line["at_risk"], who)
        elif kind == "hit":
            model.hit(dict(zip(blocks, line["v"], strict=True)), line["begun"])
        elif kind == "whole":
            model.found_whole(blocks)
        elif kind == "forget":
            for block in blocks:
                model.forget(block)
        elif kind == "sums":
            self._running[who] = line["sums"]
            for name, value in line["most"].items():
                self.most[name] = max(self.most[name], value)
        elif kind == "violation":
            self.violations.append(line["what"])

    def ended(self) -> None:
        """The journal has no more lines."""
        for who in sorted({*self._running, *self._open}):
            self._end(who)

    def _end(self, who: int) -> None:
        """Of an incarnation."""
        self.sums.update(self._running.pop(who, {}))
        self.cut_puts += self._open.pop(who, 0)


def replay(lines: Iterable[str], model: Model) -> Told:
    """Bring a new model to where the journal ends."""
    told = Told()
    for text in lines:
        told.take(text, model)
    told.ended()
    return told
