"""Admission by bytes, and buffers that a hung write keeps."""

from __future__ import annotations

import asyncio
import gc
import random

import numpy as np
import pytest

from efs.clock import Deadline, SystemClock
from efs.limits import KIB, MIB
from efs.staging import ByteBudget, Staging


def soon(milliseconds: float = 2_000) -> Deadline:
    return Deadline.after_ms(SystemClock(), milliseconds)


async def test_a_large_request_is_served_before_a_small_one_that_came_later() -> None:
    budget = ByteBudget(100)
    assert await budget.acquire(60, soon()) == 60
    order: list[str] = []

    async def ask(name: str, amount: int) -> None:
        await budget.acquire(amount, soon())
        order.append(name)

    large = asyncio.create_task(ask("large", 80))
    await asyncio.sleep(0)
    small = asyncio.create_task(ask("small", 10))
    await asyncio.sleep(0)
    assert not large.done()
    assert not small.done(), "30 bytes are free, but the large one came first"
    budget.release(60)
    await asyncio.gather(large, small)
    assert order == ["large", "small"]
    assert budget.free_bytes == 10


async def test_more_than_there_is_takes_everything() -> None:
    budget = ByteBudget(100)
    assert await budget.acquire(1_000, soon()) == 100
    assert budget.free_bytes == 0
    budget.release(100)
    assert budget.free_bytes == 100


async def test_a_late_waiter_leaves_and_lets_the_next_one_in() -> None:
    budget = ByteBudget(100)
    await budget.acquire(90, soon())
    late = asyncio.create_task(budget.acquire(100, soon(20)))
    await asyncio.sleep(0)
    small = asyncio.create_task(budget.acquire(10, soon()))
    with pytest.raises(TimeoutError):
        await late
    assert await small == 10
    assert budget.waiting == 0
    assert budget.free_bytes == 0


async def test_no_byte_is_lost_when_waiters_are_cancelled_at_any_moment() -> None:
    seed = 20
    source = random.Random(seed)
    budget = ByteBudget(1_000)
    held: list[int] = []
    waited = 0

    async def use(amount: int) -> None:
        taken = await budget.acquire(amount, soon())
        held.append(taken)
        try:
            await asyncio.sleep(0)
        finally:
            held.remove(taken)
            budget.release(taken)

    for _ in range(300):
        tasks = [asyncio.create_task(use(source.randint(1, 700))) for _ in range(6)]
        for _ in range(source.randint(0, 5)):
            await asyncio.sleep(0)
        waited += budget.waiting
        for task in source.sample(tasks, 3):
            task.cancel()
        await asyncio.wait(tasks)
        assert not held
        assert budget.free_bytes == 1_000, f"seed {seed}"
        assert budget.waiting == 0
    assert waited > 100, "the budget was never short"


async def test_a_buffer_that_came_back_is_used_again() -> None:
    staging = Staging(MIB, MIB)
    first, = await staging.lease([100 * KIB], soon())
    assert len(first) == 128 * KIB
    staging.give_back(first)
    again, = await staging.lease([120 * KIB], soon())
    assert again is first
    assert staging.budget.free_bytes == MIB - 128 * KIB


async def test_kept_memory_is_bounded_and_follows_the_sizes_in_use() -> None:
    staging = Staging(8 * MIB, 2 * MIB)
    for buffer in await staging.lease([MIB, MIB, MIB], soon()):
        staging.give_back(buffer)
    assert staging.kept_bytes == 2 * MIB
    large, = await staging.lease([2 * MIB], soon())
    staging.give_back(large)
    assert staging.kept_bytes == 2 * MIB
    again, = await staging.lease([2 * MIB], soon())
    assert again is large


async def test_an_abandoned_buffer_is_booked_on_its_node_until_nobody_refers_to_it() -> None:
    staging = Staging(MIB, MIB)
    buffer, other = await staging.lease([256 * KIB, 256 * KIB], soon())
    view = buffer[:1_024].reshape(2, 512)
    staging.abandon(3, buffer)
    staging.give_back(other)
    assert staging.budget.free_bytes == MIB, "a hung node does not take the budget of the others"
    assert staging.abandoned_bytes(3) == 256 * KIB
    assert staging.abandoned_bytes(4) == 0
    del buffer
    gc.collect()
    assert staging.abandoned_bytes(3) == 256 * KIB, "the write still has its view"
    fresh, = await staging.lease([256 * KIB], soon())
    assert not np.shares_memory(fresh, view)
    del view
    gc.collect()
    assert staging.abandoned_bytes(3) == 0
