"""Spares as an operator sees them: which of them answer, and how one is told of its place.

A spare gets a place in two steps, in this order. The map of the cluster is changed: one write takes it out of the list
and puts it into the place, and is refused when the map is not the one that was read, so no two operators give one spare
to two places. Then its server is told. Between the two it answers nobody as that node, so the place is one whose server
is away; `standing` finds that out, and whoever was interrupted there goes on by telling it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from enum import Enum

from efs.clock import Clock, Deadline
from efs.clusterfile import ClusterConfig, Spare
from efs.endpoint import Endpoint
from efs.errors import EfsError
from efs.handshake import Role, Tokens
from efs.limits import INFO_DEADLINE_MS, STRIPE_SHARDS, TAKE_PLACE_MS, WIRE_HANDSHAKE_MS
from efs.link import Link, RemotePlace
from efs.messages import decode_info, decode_nothing, decode_spare_info, encode_place_given
from efs.metrics import CounterFile
from efs.types import NO_PLACE, SpareInfo
from efs.wire import Kind


class Standing(Enum):
    """How it stands with the node that the map names in a place."""

    SERVED = "served"
    UNTOLD = "untold"
    """It is a spare that was given the place and does not know yet."""
    AWAY = "away"


class NoSpare(EfsError):
    """None of the spares of a cluster answers and is large enough. Start the server of one, or add another."""

    retryable = True


async def ask_spare(config: ClusterConfig, spare: Spare, tokens: Tokens, clock: Clock) -> SpareInfo:
    """What a spare says of itself. EfsError says why it is none, or does not answer."""
    async with _linked(_place_of(config, spare, Role.DATA, tokens), clock) as link:
        return await link.ask(Kind.INFO, b"", Deadline.after_ms(clock, INFO_DEADLINE_MS), decode_spare_info)


async def tell_spare(config: ClusterConfig, number: int, tokens: Tokens, clock: Clock) -> None:
    """Have the spare that the map names in a place be the node of that place. EfsError says why it is not."""
    spare = Spare(config.node_ids[number], config.endpoints[number])
    group, node_index = divmod(number, STRIPE_SHARDS)
    async with _linked(_place_of(config, spare, Role.OPERATOR, tokens), clock) as link:
        await link.ask(Kind.TAKE_PLACE, encode_place_given(group, node_index), Deadline.after_ms(clock, TAKE_PLACE_MS),
                       decode_nothing)


async def standing(config: ClusterConfig, number: int, tokens: Tokens,
                   clock: Clock) -> tuple[Standing, SpareInfo | None]:
    """How it stands with the node in a place, as its server says; and what that says of itself while it is a spare."""
    named = Spare(config.node_ids[number], config.endpoints[number])
    as_node = replace(_place_of(config, named, Role.DATA, tokens), node_index=number % STRIPE_SHARDS)
    with suppress(EfsError):
        async with _linked(as_node, clock) as link:
            if link.ready:
                return Standing.SERVED, None
    with suppress(EfsError):
        return Standing.UNTOLD, await ask_spare(config, named, tokens, clock)
    return Standing.AWAY, None


async def first_spare(config: ClusterConfig, number: int, tokens: Tokens,
                      clock: Clock) -> tuple[Spare, SpareInfo, list[tuple[Spare, str]]]:
    """The first spare of the list that answers and is good for a place, and those before it that are not, with the
    reason. NoSpare names all when none is.

    A group keeps what its smallest node has room for, so one that is smaller than all the others would have them evict
    what they hold: it is passed over. Nodes that do not answer just now do not count."""
    asked = await asyncio.gather(*(ask_spare(config, spare, tokens, clock) for spare in config.spares),
                                 return_exceptions=True)
    least = await _smallest_beside(config, number, tokens, clock)
    skipped: list[tuple[Spare, str]] = []
    for spare, answer in zip(config.spares, asked, strict=True):
        if isinstance(answer, SpareInfo):
            if answer.capacity_bytes >= least:
                return spare, answer, skipped
            skipped.append((spare, f"it has {answer.capacity_bytes} bytes, the other nodes {least} at least"))
        elif isinstance(answer, EfsError):
            skipped.append((spare, why_not(spare.endpoint, answer)))
        else:
            raise answer
    named = "; ".join(f"{spare.node_id} at {spare.endpoint}: {why}" for spare, why in skipped)
    raise NoSpare(f"none of the spares can take the place: {named}")


async def _smallest_beside(config: ClusterConfig, number: int, tokens: Tokens, clock: Clock) -> int:
    """Capacity of the smallest node beside a place of its group, of those that answer; 0 when none does."""
    first = number - number % STRIPE_SHARDS
    others = [beside for beside in range(first, first + STRIPE_SHARDS) if beside != number]

    async def capacity(beside: int) -> int | None:
        place = RemotePlace(config.endpoints[beside], config.cluster_id, config.node_ids[beside],
                            beside % STRIPE_SHARDS, Role.DATA, tokens)
        with suppress(EfsError):
            async with _linked(place, clock) as link:
                soon = Deadline.after_ms(clock, INFO_DEADLINE_MS)
                return (await link.ask(Kind.INFO, b"", soon, decode_info)).capacity_bytes
        return None

    found = await asyncio.gather(*map(capacity, others))
    return min((size for size in found if size is not None), default=0)


def why_not(endpoint: Endpoint, error: EfsError) -> str:
    """The reason alone: who it is about, and where, stands beside it."""
    return str(error).removeprefix("the spare is unavailable: ").removeprefix("a spare at ").removeprefix(
        f"{endpoint}: ")


def _place_of(config: ClusterConfig, spare: Spare, role: Role, tokens: Tokens) -> RemotePlace:
    return RemotePlace(spare.endpoint, config.cluster_id, spare.node_id, NO_PLACE, role, tokens, config.durability)


@asynccontextmanager
async def _linked(place: RemotePlace, clock: Clock) -> AsyncIterator[Link]:
    """A connection, or one that cannot be made and says why when it is asked. HandshakeFailed and IdentityMismatch of
    a server that refuses."""
    link = Link(place, clock, CounterFile.in_memory())
    link.start()
    try:
        with suppress(TimeoutError):
            async with asyncio.timeout(WIRE_HANDSHAKE_MS / 1000):
                await link.settled.wait()
        if link.refusal is not None:
            raise link.refusal
        yield link
    finally:
        await link.close()
