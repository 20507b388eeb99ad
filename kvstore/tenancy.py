"""Tenants of an open store: what each takes, its quota, its purge. The names are in the tenants file, the store knows
tags.

*Purge* goes in this order, so that it can be killed anywhere and run again:

1. `begin_purge`: a new secret and generation, and the old tag retired, in one write. From here on nobody can derive a
   key of what is stored.
2. The store notes every retired tag as purged and drops the records (`efs/purge.py`). From here on any opening of the
   store finishes it.
3. `end_purge`.

A purge that finds `purging` set goes on at step 2. Retired tags of earlier rotations are purged along.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from efs.groups import AnyFileSystem
from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.osio import Io
from efs.purge import PurgeReport
from kvstore.tenants import NO_TENANT_TAG, Tenant, begin_purge, end_purge, find_tenant, list_tenants

ENOUGH_NODES = STRIPE_SHARDS - DATA_SHARDS + 1
"""Nodes of a group without a record of a tag that prove that no block of it can be read there: nine others are too
few."""


@dataclass(frozen=True, slots=True)
class TenantUse:
    """What blocks take: stored_bytes of slots on all nodes, as capacity and quotas count, and payload_bytes of blocks
    before coding, padding of shards included (ten of twelve shards)."""

    stored_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.stored_bytes * DATA_SHARDS // STRIPE_SHARDS


@dataclass(frozen=True, slots=True)
class Purged:
    """What a purge did. begun: whether the tenant has another secret and generation for it. was_stored: bytes of slots
    of it that were seen before."""

    tenant: Tenant
    report: PurgeReport
    begun: bool
    was_stored: int


def uses_of(tenants: list[Tenant], by_tag: Mapping[bytes, int]) -> dict[str, TenantUse]:
    """By tenant what the blocks of its generation take; and under "" those without a tenant."""
    tags = {"": NO_TENANT_TAG, **{tenant.name: tenant.tag for tenant in tenants}}
    return {name: TenantUse(by_tag.get(tag, 0)) for name, tag in tags.items()}


def apply_quotas(filesystem: AnyFileSystem, root: str) -> None:
    """Have the store hold the quotas of the tenants file as it is now. InvalidArgument names a file that is wrong."""
    filesystem.quotas.limit({tenant.tag: tenant.quota_bytes for tenant in list_tenants(root)
                             if tenant.quota_bytes is not None})


async def purge_tenant(filesystem: AnyFileSystem, root: str, name: str, *, unless_empty: bool = False,
                       io: Io | None = None) -> Purged:
    """Purge all that was ever stored under a tenant's name; it can store again at once, under new keys. Namespaces that
    were made before still have the old secret: what is put through them is refused.

    unless_empty: when nothing of the present generation is stored, keep it, and only finish what is left of earlier
    purges. Only for an owner that has no puts under way. InvalidArgument for an unknown name; OpenFailed when the purge
    could not be noted: run it again.
    """
    tenant = find_tenant(root, name, io=io)
    held, silent = await filesystem.tenant_bytes()
    stored = sum(held.get(tag, 0) for tag in (tenant.tag, *tenant.retired))
    most_silent = max(Counter(node // STRIPE_SHARDS for node in silent).values(), default=0)
    empty = not held.get(tenant.tag) and STRIPE_SHARDS - most_silent >= ENOUGH_NODES
    if unless_empty and empty and not tenant.purging:
        return Purged(tenant, await filesystem.purge(tenant.retired), False, stored)
    begun = not tenant.purging
    tenant = begin_purge(root, name, io=io)
    apply_quotas(filesystem, root)
    report = await filesystem.purge(tenant.retired)
    return Purged(end_purge(root, name, io=io), report, begun, stored)
