"""Running fsck in tests, and writing down what it must find."""

from __future__ import annotations

from collections.abc import Callable

from efs.clock import Clock
from efs.findings import Finding, Kind, Sums
from efs.fsck import Fsck, Options
from efs.storeview import StoreView
from tests.support.laidstore import LaidStore


def check(
    store: LaidStore,
    options: Options | None = None,
    *,
    clock: Clock | None = None,
    pause: Callable[[float], None] | None = None,
) -> tuple[list[Finding], Sums]:
    """All findings of one run and its sums. A pause that nobody expects fails the test."""

    def never(seconds: float) -> None:
        raise AssertionError("waited without an owner")

    with StoreView.open(store.root) as view:
        run = Fsck(view, options, clock=clock, pause=pause or never)
        return list(run.run()), run.sums


def check_deep(store: LaidStore) -> list[Finding]:
    return check(store, Options(deep=True))[0]


def record(kind: Kind, store: LaidStore, node: int, block: int, location: int | None = None) -> Finding:
    laid = store.blocks[block]
    return Finding(kind, node, laid.key, laid.digest, store.location(block) if location is None else location)


def of_block(kind: Kind, store: LaidStore, block: int) -> Finding:
    return Finding(kind, None, store.blocks[block].key, store.blocks[block].digest)
