"""The accounts of a node, counted in five ways that must agree: its counters, its slot states, its index, the tables on
its disk, and fsck. Each count is of records by slot bytes, entry bytes and tenant tag."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from efs.clock import Deadline, SystemClock
from efs.extent import SLOT_BITS
from efs.findings import Kind, Sums
from efs.fsck import Fsck, Options
from efs.node import DirectoryNode
from efs.nodedir import node_bytes
from efs.nodeview import NodeView, Slot, allocated_bytes, tree_bytes
from efs.shard import check_entries
from efs.storeview import StoreView
from efs.tablecheck import TableCheck

Account = Counter[tuple[int, int, int]]


def bytes_of(account: Mapping[tuple[int, int, int], int]) -> int:
    return sum(count * slot_bytes for (slot_bytes, _, _), count in account.items())


def by_tag(account: Mapping[tuple[int, int, int], int]) -> dict[bytes, int]:
    held: Counter[bytes] = Counter()
    for (slot_bytes, _, tag), count in account.items():
        held[tag.to_bytes(8, "little")] += count * slot_bytes
    return dict(held)


def by_states(node: DirectoryNode) -> Account:
    """Of the slot states in memory."""
    allocator, account = node._state.allocator, Account()
    for extent in range(allocator.extents):
        geometry = allocator.geometry(extent)
        if geometry is not None:
            places = allocator.live_slots_of(extent) + (extent << SLOT_BITS)
            for tag in allocator.tags(places).tolist():
                account[geometry.slot_class.slot_bytes, geometry.slot_class.entry_bytes, tag] += 1
    return account


def by_index(node: DirectoryNode) -> Account:
    """Of the index, each entry with the table entry on disk that it leads to, which must be that record."""
    state, account = node._state, Account()
    for entry in state.index.scan():
        geometry = state.allocator.geometry(entry.location >> SLOT_BITS)
        assert geometry is not None, "an index entry leads to a free extent"
        row = state.slab.read_entries(geometry, entry.location, 1)[0]
        assert row["key"].tobytes() + row["digest"].tobytes() == entry.index_key
        assert int(row["generation"]) == entry.generation
        account[geometry.slot_class.slot_bytes, geometry.slot_class.entry_bytes, int(row["tenant_tag"])] += 1
    return account


def by_tables(node: DirectoryNode) -> Account:
    """Of the tables as they stand on disk now."""
    state, account = node._state, Account()
    for extent in range(state.allocator.extents):
        geometry = state.slab.read_class(extent) if extent in state.allocated else None
        if geometry is None or state.allocator.geometry(extent) is None:
            continue
        entries = state.slab.read_table(extent, geometry)
        for tag in entries["tenant_tag"][check_entries(entries, geometry.slot_class.slot_bytes)].tolist():
            account[geometry.slot_class.slot_bytes, geometry.slot_class.entry_bytes, tag] += 1
    return account


async def assert_agree(node: DirectoryNode) -> Account:
    """All that an open node says of itself, once nothing is under way and nothing is owed."""
    await node.settled()
    assert not node._state.owes, "the disk is owed something that no failure explains"
    node.audit()
    states = by_states(node)
    assert by_index(node) == states
    assert by_tables(node) == states
    deadline = Deadline.after_ms(SystemClock(), 20_000)
    info = await node.info(deadline)
    assert (info.records, info.live_bytes) == (states.total(), bytes_of(states))
    assert await node.tenant_bytes(deadline) == by_tag(states)
    assert node._state.index.entries == states.total()
    return states


def of_closed(view: NodeView) -> Account:
    """Of the tables of a closed node, through fsck's eyes; its own sums and those of its index must be the same."""
    sums, account = Sums(), Account()
    check = TableCheck(view, sums)
    suspicions = [suspicion for extent in range(view.slab.extents) for suspicion in check.suspect(extent)]
    assert suspicions == []
    for extent in range(view.slab.extents):
        geometry = view.geometry(extent)
        if geometry is not None:
            rows = view.table_rows(extent, geometry, 0, geometry.slots)
            tags, counts = np.unique(rows["tenant_tag"][rows["status"] == Slot.LIVE], return_counts=True)
            for tag, count in zip(tags.tolist(), counts.tolist(), strict=True):
                account[geometry.slot_class.slot_bytes, geometry.slot_class.entry_bytes, tag] += count
    assert (sums.records, sums.live_bytes, sums.torn) == (account.total(), bytes_of(account), 0)
    assert check.agreeing == view.index.entries == account.total()
    assert_space(view, sums)
    return account


def assert_space(view: NodeView, sums: Sums) -> None:
    """du = extents + index + the overhead of `efs.nodedir.node_bytes`, never above the capacity."""
    plan, slab = view.config.plan, allocated_bytes(view.slab.path)
    used = sum(view.geometry(extent) is not None for extent in range(view.slab.extents))
    assert slab >= used * plan.extent_bytes
    assert slab % plan.extent_bytes < plan.extent_bytes // 2, "the slab occupies extents and nothing else"
    total = tree_bytes(view.path)
    overhead = node_bytes(plan.extents, plan.extent_bytes, plan.index_bytes) - plan.extents * plan.extent_bytes
    assert slab <= total <= slab + overhead
    assert total <= plan.capacity_bytes


def assert_store_agrees(root: str, accounts: Mapping[int, Account]) -> None:
    """A closed store: fsck finds nothing but blocks that lack shards, and its sums are those of the open nodes."""
    with StoreView.open(root) as view:
        for node in view.views:
            assert of_closed(node) == accounts[node.node_index]
        run = Fsck(view, Options(deep=True))
        found = {finding.kind for finding in run.run()}
    assert found <= {Kind.AT_RISK_BLOCK, Kind.HOLLOW_STRIPE}, found
    assert run.sums.complete
    assert run.sums.records == run.sums.index_entries == sum(account.total() for account in accounts.values())
    assert run.sums.live_bytes == sum(map(bytes_of, accounts.values()))
