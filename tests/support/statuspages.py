"""A client of status pages that says what it got and never hangs: one request over a socket of its own."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from prometheus_client.parser import text_string_to_metric_families

ANSWER_S = 20.0


@dataclass(frozen=True, slots=True)
class Page:
    """A whole answer. status 0: the connection ended without one."""

    status: int
    head: str
    text: str

    def values(self, name: str) -> dict[str, float]:
        """The samples of a metric, by node index."""
        return {sample.labels["node"]: sample.value for family in text_string_to_metric_families(self.text)
                for sample in family.samples if sample.name == name}


async def exchange(address: str, data: bytes) -> Page:
    """Send bytes to tcp:HOST:PORT and read until the server closes."""
    _, host, port = address.split(":")
    async with asyncio.timeout(ANSWER_S):
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            raw = await reader.read()
        except ConnectionError:
            raw = b""
        finally:
            writer.close()
    head, _, text = raw.decode().partition("\r\n\r\n")
    return Page(int(head.split()[1]) if head else 0, head, text)


async def fetch(address: str, path: str, method: str = "GET") -> Page:
    return await exchange(address, f"{method} {path} HTTP/1.1\r\nHost: here\r\n\r\n".encode())
