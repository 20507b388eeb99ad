"""A client library that swallows a cancellation must not make a follower of the map immortal."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from efs.clustermap import parse_etcd_url
from efs.etcd import EtcdStore


class SwallowingClient:
    """Takes a cancellation that comes while it waits for the end of its own task."""

    def __init__(self) -> None:
        self.entered = asyncio.Event()
        self.swallowed = 0

    async def close(self) -> None:
        await self.get(b"")

    async def get(self, key: bytes) -> None:
        self.entered.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.swallowed += 1


def store_with(client: Any) -> EtcdStore:
    store = EtcdStore(parse_etcd_url("etcd://127.0.0.1:2379/test"))
    store._client = client
    return store


@pytest.mark.parametrize("call", ["close", "servers"])
async def test_a_swallowed_cancellation_still_ends_the_call(call: str) -> None:
    client = SwallowingClient()
    client.get_prefix = client.get  # type: ignore[attr-defined]
    task = asyncio.create_task(getattr(store_with(client), call)())
    await client.entered.wait()
    task.cancel()
    await asyncio.wait((task,))
    assert client.swallowed == 1
    assert task.cancelled()


async def test_a_follower_that_is_cancelled_while_its_connection_closes_ends() -> None:
    client = SwallowingClient()
    store = store_with(client)

    async def nothing(_: object) -> None:
        return

    task = asyncio.create_task(store.follow(nothing))
    await client.entered.wait()
    task.cancel()
    await asyncio.wait((task,), timeout=20)
    assert client.swallowed > 0
    assert task.cancelled()
