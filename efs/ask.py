"""Asking several nodes at once what they hold, without waiting for the slowest more than it is worth.

Every node is asked once. What is in memory is answered at once and costs no task; the rest is awaited together. When
`enough` nodes have answered, the others get the lag grace and are then left out: their answers are simply not there,
which every caller must read as "unknown". Nothing that was asked is still running when the call returns.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from efs.clock import Deadline
from efs.contract import Node, NodeTable
from efs.errors import EfsError
from efs.health import Health
from efs.limits import INITIAL_LAG_GRACE_MS

T = TypeVar("T")


async def tables_of(asks: Mapping[int, tuple[Node, Sequence[bytes]]], health: Health, deadline: Deadline,
                    enough: int) -> tuple[dict[int, NodeTable], set[int]]:
    """The tables that came, by node, and the nodes that refused or failed. Never raises for a node's sake."""
    tables: dict[int, NodeTable] = {}
    failed: set[int] = set()
    later: list[int] = []
    for index, (node, keys) in asks.items():
        try:
            table = node.look_up_now(keys)
        except EfsError as error:
            health.note_failure(index, error)
            failed.add(index)
            continue
        if table is None:
            later.append(index)
        else:
            tables[index] = table
    calls = {index: asks[index][0].look_up(asks[index][1], deadline) for index in later}
    answers, errors = await all_of(calls, deadline, enough - len(tables))
    tables.update(answers)
    for index in answers:
        health.note_answer(index)
    for index, failure in errors.items():
        failed.add(index)
        if not deadline.passed():
            health.note_failure(index, failure)
    return tables, failed


async def all_of(calls: Mapping[int, Coroutine[Any, Any, T]], deadline: Deadline,
                 enough: int) -> tuple[dict[int, T], dict[int, EfsError]]:
    """Await one call for each node: results and EfsErrors by node. What is late is cancelled and in neither.

    Late is what has not ended INITIAL_LAG_GRACE_MS after `enough` calls returned a result, or by the deadline. Other
    exceptions than EfsError are bugs and are raised.
    """
    tasks = {index: asyncio.create_task(call) for index, call in calls.items()}
    pending = set(tasks.values())
    grace = Deadline.after_ms(deadline.clock, INITIAL_LAG_GRACE_MS)
    satisfied = enough <= 0
    try:
        while pending and not deadline.passed():
            left = min(deadline.left(), grace.left()) if satisfied else deadline.left()
            if left <= 0:
                break
            _, pending = await asyncio.wait(pending, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not satisfied:
                good = sum(task.done() and not task.cancelled() and task.exception() is None for task in tasks.values())
                satisfied = good >= enough
                grace = Deadline.after_ms(deadline.clock, INITIAL_LAG_GRACE_MS)
    finally:
        for task in pending:
            task.cancel()
        for task in set(tasks.values()) - pending:
            # Looked at here too, so that a call that was cancelled meanwhile leaves no unread exception behind.
            task.exception()
        if pending:
            await asyncio.wait(pending)
    results: dict[int, T] = {}
    errors: dict[int, EfsError] = {}
    for index, task in tasks.items():
        if task.cancelled():
            continue
        error = task.exception()
        if error is None:
            results[index] = task.result()
        elif isinstance(error, EfsError):
            errors[index] = error
        else:
            raise error
    return results, errors
