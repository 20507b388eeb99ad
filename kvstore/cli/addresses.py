"""The addresses of nodes, as the options --listen and --address give them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Final

from efs.endpoint import MOST_PORT, Endpoint, parse_endpoint
from efs.limits import STRIPE_SHARDS
from kvstore.cli.failures import UsageMistake

SOCKETS: Final = "sockets"
"""Directory of a root in which nodes that listen at `unix` have their sockets."""


def listening(listen: str, root: str) -> list[str]:
    """The address of each of twelve nodes for --listen, relative to the root; refused before anything is made."""
    if listen == "unix":
        addresses = [f"unix:{SOCKETS}/{index:02d}" for index in range(STRIPE_SHARDS)]
    else:
        first = parse_endpoint(listen)
        if first.path is not None or first.port == 0:
            raise UsageMistake(f"--listen {listen}: must be unix, or tcp:HOST:PORT with the port of node 0")
        if first.port + STRIPE_SHARDS - 1 > MOST_PORT:
            raise UsageMistake(f"--listen {listen}: twelve ports from there on are needed, the last one is {MOST_PORT}")
        host = f"[{first.host}]" if ":" in first.host else first.host
        addresses = [f"tcp:{host}:{first.port + index}" for index in range(STRIPE_SHARDS)]
    for address in addresses:
        parse_endpoint(address, root)
    return addresses


def of_a_group(listen: str | None, given: Sequence[str], root: str) -> list[str]:
    """The full address of each of twelve nodes: for --listen, or as --address gives them, one for all or twelve."""
    if (listen is None) == (not given):
        raise UsageMistake("say where the servers listen: either --listen, or --address once or twelve times")
    if listen is not None:
        given = listening(listen, root)
    if len(given) not in (1, STRIPE_SHARDS):
        raise UsageMistake(f"{len(given)} addresses given, a group has {STRIPE_SHARDS} nodes: one for all, or one each")
    endpoints = [parse_endpoint(address, root) for address in given]
    for endpoint in endpoints:
        if endpoint.path is None and endpoint.port == 0:
            raise UsageMistake(f"--address {endpoint}: clients need the port")
    return [str(endpoint) for endpoint in endpoints] * (STRIPE_SHARDS // len(endpoints))


def address_with_port(address: str) -> Endpoint:
    """What --address gives for one node: where clients find it."""
    endpoint = parse_endpoint(address, os.getcwd())
    if endpoint.path is None and endpoint.port == 0:
        raise UsageMistake(f"--address {address}: clients need the port")
    return endpoint
