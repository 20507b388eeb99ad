"""The states that a crash can leave of a log: by kill -9 at any operation, by power loss at any operation.

*Kill.* What was written is there. One state before each operation that changes something, one at the end; and for the
write under way each cut at a 4 KiB border, at a 512 B border, and at single bytes (all of them up to BYTE_BY_BYTE).

*Power.* Of what was not synced any part may be there, in sectors, in any order. At each operation: nothing of it; all;
all but one operation; one operation alone; one file alone; all but one file; the last write in part, with and without
the rest; subsets of sectors drawn with a seed. "One file alone" includes the dangerous state in which the system
happened to write the pages of the index and not yet those of the slab.

`thorough` is all of that. Otherwise every kill between operations, and for each operation some cuts, the loss of all
that is unsynced, and some of the other losses, drawn with the seed. States that are the same and promise the same come
once.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from efs.checksum import xxh3_64
from tests.support.crashio.disk import Disk, History, borders_in, part_of, sectors_of
from tests.support.crashio.log import SYNCS, Kind, Op

PAGE = 4096
SECTOR = 512
BYTE_BY_BYTE = 512
RANDOM_SUBSETS = 4
"""At each operation, when thorough."""


@dataclass(frozen=True, slots=True)
class Choice:
    """Which states are looked at. cuts, losses: how many of the many at one operation when not thorough, beside the
    state before it in which nothing unsynced is left."""

    thorough: bool = False
    seed: int = 1
    cuts: int = 1
    losses: int = 1
    every: int = 1
    """Only each so-manieth operation is looked at, and the end."""


@dataclass(frozen=True, slots=True)
class Crash:
    """One state. position: operations of the log that had returned. what: in words, for a failure's message. disk: as
    it is until the next crash is asked for."""

    position: int
    power: bool
    what: str
    disk: Disk


def kills(before: Disk, ops: list[Op], choice: Choice) -> Iterator[Crash]:
    """What kill -9 can leave of this log."""
    source = random.Random(choice.seed)
    history = History.begin(before, ops)
    while True:
        op = ops[history.position] if history.position < len(ops) else None
        looked_at = history.position % choice.every == 0
        if op is None or (looked_at and op.kind not in SYNCS):
            yield Crash(history.position, False, f"killed before operation {history.position} ({op})", history.live)
        if op is None:
            return
        if looked_at and op.kind is Kind.WRITE and op.cuttable:
            for cut in _cuts(op, choice, source):
                part = part_of(op, op.offset, cut)
                yield Crash(history.position, False, f"killed in operation {history.position} ({op}) at byte {cut}",
                            history.live.with_ops([part]))
        history.step()


def power_losses(before: Disk, ops: list[Op], choice: Choice) -> Iterator[Crash]:
    """What power loss can leave of this log."""
    source = random.Random(choice.seed)
    history = History.begin(before, ops)
    while True:
        if history.position % choice.every == 0 or history.position == len(ops):
            losses = _losses(history.pending)
            for number in range(RANDOM_SUBSETS):
                losses[f"subset {number}"] = _subset(history.pending, source)
            nothing, *others = losses
            if not choice.thorough:
                others = source.sample(others, min(choice.losses, len(others)))
            for what in (nothing, *others):
                yield _lost(history, what, losses[what])
        if history.position == len(ops):
            return
        history.step()


def drawn(crashes: Callable[[], Iterator[Crash]], most: int, seed: int) -> Iterator[Crash]:
    """Some of the crashes, in order. They are made twice rather than kept: a store is large."""
    number = sum(1 for _ in crashes())
    chosen = set(random.Random(seed).sample(range(number), min(most, number)))
    return (one for at, one in enumerate(crashes()) if at in chosen)


def distinct(crashes: Iterator[Crash], promises: Sequence[int]) -> Iterator[Crash]:
    """Crashes without repetitions. promises: for each position a number that differs where other things are
    promised."""
    seen: set[tuple[int, bool, int]] = set()
    for crash in crashes:
        state = (_hash(crash.disk), crash.power, promises[crash.position])
        if state not in seen:
            seen.add(state)
            yield crash


def _cuts(op: Op, choice: Choice, source: random.Random) -> list[int]:
    """Positions in the file at which a killed process can leave a write."""
    end = op.offset + len(op.data)
    bytewise = list(range(op.offset + 1, end)) if len(op.data) <= BYTE_BY_BYTE else [op.offset + 1, end - 1]
    pages, sectors = borders_in(op, PAGE), borders_in(op, SECTOR)
    if choice.thorough:
        return sorted({*bytewise, *pages, *sectors})
    groups = [group for group in (pages, sectors, bytewise) if group]
    return sorted({source.choice(group) for group in source.sample(groups, min(choice.cuts, len(groups)))})


def _losses(pending: list[Op]) -> dict[str, list[Op]]:
    """By a description what is left of the unsynced operations; the first is nothing."""
    found: dict[str, list[Op]] = {"nothing unsynced is left": [], "everything is left": pending}
    for number, op in enumerate(pending):
        found[f"all but unsynced operation {number} ({op})"] = pending[:number] + pending[number + 1 :]
        found[f"unsynced operation {number} ({op}) alone"] = [op]
    for inode in {op.inode for op in pending if op.inode >= 0}:
        mine = [op for op in pending if op.inode == inode]
        found[f"{mine[-1].path} alone"] = mine
        found[f"all but {mine[-1].path}"] = [op for op in pending if op.inode != inode]
    last = max((number for number, op in enumerate(pending) if op.kind is Kind.WRITE), default=None)
    if last is not None:
        found.update(_torn(pending, last))
    return found


def _torn(pending: list[Op], number: int) -> dict[str, list[Op]]:
    """One unsynced write in part: up to a border, and from it on."""
    found = {}
    op, rest = pending[number], pending[:number]
    end = op.offset + len(op.data)
    for cut in {*borders_in(op, PAGE), *borders_in(op, SECTOR)}:
        head, tail = part_of(op, op.offset, cut), part_of(op, cut, end)
        found[f"all, of {op} up to byte {cut}"] = [*rest, head]
        found[f"all, of {op} from byte {cut} on"] = [*rest, tail]
        found[f"of {op} up to byte {cut} alone"] = [head]
        found[f"of {op} from byte {cut} on alone"] = [tail]
    return found


def _subset(pending: list[Op], source: random.Random) -> list[Op]:
    """Any sectors of any of the unsynced operations."""
    share = source.random()
    pieces = [piece for op in pending for piece in (sectors_of(op, SECTOR) if op.kind is Kind.WRITE else [op])]
    return [piece for piece in pieces if source.random() < share]


def _lost(history: History, what: str, left: list[Op]) -> Crash:
    return Crash(history.position, True, f"power lost before operation {history.position}: {what}",
                 history.durable.with_ops(left))


def _hash(disk: Disk) -> int:
    files = [f"{name} {xxh3_64(bytes(disk.files[inode]))}" for name, inode in sorted(disk.names.items())]
    return xxh3_64("\n".join([*files, *sorted(disk.directories)]).encode())
