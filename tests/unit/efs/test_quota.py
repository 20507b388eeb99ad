"""Quotas: the rule for puts, exact among puts at once (`efs/quota.py`)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator

import pytest

from efs.codec import Codec
from efs.errors import InvalidArgument
from efs.fs import FileSystem
from efs.limits import STRIPE_SHARDS
from efs.metrics import CounterFile
from efs.quota import OVER_QUOTA
from efs.types import DropItem, PutReport
from tests.support.bench import Bench, make_bench
from tests.support.blocks import TINY, Blocks, make_blocks

ACME, OTHER = b"acme-tag", b"other-tg"
BLOCK = STRIPE_SHARDS * TINY.slot_bytes
"""Bytes that one block takes."""


@pytest.fixture
def bench() -> Bench:
    return make_bench()


@pytest.fixture
async def filesystem(bench: Bench) -> AsyncIterator[FileSystem]:
    opened = FileSystem(bench.nodes, codec=Codec(), counters=CounterFile.in_memory(), clock=bench.clock)
    yield opened
    await opened.close()


async def put(filesystem: FileSystem, blocks: Blocks, deadline_ms: float = 20_000) -> PutReport:
    return await filesystem.put(blocks.items, blocks.shape, blocks.data, deadline_ms=deadline_ms)


async def held(filesystem: FileSystem, tag: bytes = ACME) -> int:
    return (await filesystem.tenant_bytes())[0].get(tag, 0)


async def test_a_put_above_the_quota_stores_nothing_and_says_so(filesystem: FileSystem) -> None:
    filesystem.quotas.limit({ACME: 25 * BLOCK})
    first, second = make_blocks(20, seed=1, tenant_tag=ACME), make_blocks(6, seed=2, tenant_tag=ACME)
    assert await put(filesystem, first) == PutReport(20, 0, 0, 0)
    refused = await put(filesystem, second)
    assert (refused.acked, refused.failed, refused.why) == (0, 6, OVER_QUOTA)
    assert await held(filesystem) == 20 * BLOCK
    assert filesystem.counters.get("put_over_quota") == 6
    assert await put(filesystem, make_blocks(5, seed=3, tenant_tag=ACME)) == PutReport(5, 0, 0, 0), "exactly full"
    assert await held(filesystem) == 25 * BLOCK
    assert await put(filesystem, first) == PutReport(0, 20, 0, 0), "what is stored already costs nothing"
    mixed = Blocks(TINY, (*first.keys, *second.keys[:1]), make_blocks(21).data, ACME)
    report = await put(filesystem, mixed)
    assert (report.already, report.failed, report.why) == (20, 1, OVER_QUOTA)


async def test_other_tenants_and_blocks_without_one_are_not_limited(filesystem: FileSystem) -> None:
    filesystem.quotas.limit({ACME: 0})
    assert (await put(filesystem, make_blocks(3, seed=1, tenant_tag=ACME))).why == OVER_QUOTA
    assert (await put(filesystem, make_blocks(3, seed=2, tenant_tag=OTHER))).acked == 3
    assert (await put(filesystem, make_blocks(3, seed=3))).acked == 3
    filesystem.quotas.limit({})
    assert (await put(filesystem, make_blocks(3, seed=1, tenant_tag=ACME))).acked == 3
    with pytest.raises(InvalidArgument):
        filesystem.quotas.limit({ACME: -1})


async def test_room_comes_back_with_what_goes(filesystem: FileSystem) -> None:
    filesystem.quotas.limit({ACME: 10 * BLOCK})
    first, second = make_blocks(10, seed=1, tenant_tag=ACME), make_blocks(10, seed=2, tenant_tag=ACME)
    assert (await put(filesystem, first)).acked == 10
    assert (await put(filesystem, second)).failed == 10
    assert await filesystem.drop(first.keys[:4], deadline_ms=5_000) == 4
    assert (await put(filesystem, second)).failed == 10, "all or nothing"
    assert await filesystem.drop(first.keys[4:], deadline_ms=5_000) == 6
    assert (await put(filesystem, second)).acked == 10


@pytest.mark.parametrize("seed", range(4))
async def test_puts_at_once_never_bring_a_tenant_above_its_quota(filesystem: FileSystem, bench: Bench,
                                                                  seed: int) -> None:
    """Some are cancelled before they write, some blocks are dropped meanwhile."""
    source = random.Random(seed)
    limit = 60 * BLOCK
    filesystem.quotas.limit({ACME: limit})
    highest = accepted = refused = 0

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, sum(stored.slot_bytes for twin in bench.twins for stored in twin.slots.values()))
            await asyncio.sleep(0)

    async def writer(number: int) -> None:
        nonlocal accepted, refused
        for turn in range(6):
            blocks = make_blocks(source.randrange(1, 12), seed=100 * number + turn, tenant_tag=ACME)
            report = await put(filesystem, blocks)
            accepted += report.acked
            refused += report.failed
            assert report.why in (None, OVER_QUOTA)
            if source.random() < 0.4:
                await filesystem.drop(blocks.keys, deadline_ms=20_000)

    watching = asyncio.create_task(watch())
    await asyncio.gather(*(writer(number) for number in range(12)))
    watching.cancel()
    assert 0.8 * limit < highest <= limit
    assert accepted > 60
    assert refused > 10, "the quota was never met"
    assert await held(filesystem) <= limit
    room = (limit - await held(filesystem)) // BLOCK
    last = make_blocks(room, seed=9_999, tenant_tag=ACME)
    assert (await put(filesystem, last)).acked == room, "no reservation was left behind"


async def test_a_cancelled_put_gives_its_reservation_back(filesystem: FileSystem, bench: Bench) -> None:
    filesystem.quotas.limit({ACME: 10 * BLOCK})
    source = random.Random(1)
    for turn in range(40):
        running = asyncio.create_task(put(filesystem, make_blocks(8, seed=turn, tenant_tag=ACME)))
        for _ in range(source.randrange(30)):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        while filesystem._writer._late:
            await asyncio.sleep(0)
        for twin in bench.twins:
            items = [DropItem(stored.header.key, stored.header.digest, stored.generation)
                     for stored in twin.slots.values()]
            for item in items:
                twin._forget(twin.records[item.key][item.digest])
    assert (await put(filesystem, make_blocks(10, seed=999, tenant_tag=ACME))).acked == 10


async def test_a_silent_node_counts_like_the_fullest_of_the_others(filesystem: FileSystem, bench: Bench) -> None:
    filesystem.quotas.limit({ACME: 10 * BLOCK})
    assert (await put(filesystem, make_blocks(6, seed=1, tenant_tag=ACME))).acked == 6
    bench.twins[3].down = "it is away"
    assert (await put(filesystem, make_blocks(5, seed=2, tenant_tag=ACME))).why == OVER_QUOTA
    report = await put(filesystem, make_blocks(4, seed=3, tenant_tag=ACME))
    assert (report.acked, report.at_risk) == (4, 4)
