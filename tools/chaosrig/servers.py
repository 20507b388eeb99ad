"""The servers of a chaos run: twelve processes, some at Unix sockets and some at TCP ports, some behind a proxy."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, Final

from efs.clusterfile import CLUSTER_FILE
from efs.clustermap import EtcdUrl
from efs.endpoint import Endpoint
from efs.etcd import EtcdStore
from efs.limits import STRIPE_SHARDS
from tools.chaosrig.damage import node_path
from tools.chaosrig.processes import CHECKOUT, COMMAND_S, LINE_BYTES, READY_S, ProcessLost, end, environment, kvstore
from tools.chaosrig.serverplan import PROXIED
from tools.chaosrig.smallstore import CAPACITY_BYTES, EXTENT_BYTES
from tools.chaosrig.wireproxy import WireProxy
from tools.etcdprocess import free_port

OVER_TCP: Final = range(6, STRIPE_SHARDS)
NOT_MAPPED: Final = range(1, STRIPE_SHARDS, 2)
"""Servers that read slabs with calls, not through memory maps."""


class NodeServer:
    """The server of one node; each start is a new process."""

    def __init__(self, directory: str, address: Endpoint, log: str, more: Sequence[str]) -> None:
        self._words = ["--json", "node", "serve", directory, "--listen", str(address), *more]
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    async def start(self) -> None:
        """Start it and wait until it serves. ProcessLost when it does not come up."""
        with open(self._log, "ab") as errors:
            process = self._process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "tools.chaosrig.diskserver", *self._words, cwd=CHECKOUT,
                env=environment(), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors,
                limit=LINE_BYTES)
        await self._line(process, READY_S)

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.returncode is None

    async def arm(self, kind: str) -> None:
        """From now on, until `disarm` or the end of the process."""
        await self._tell({"do": "arm", "kind": kind})

    async def disarm(self) -> Counter[str]:
        """End all faults; how often they struck since the process was started."""
        return await self._tell({"do": "disarm"})

    async def struck(self) -> Counter[str]:
        """The same while they go on."""
        return await self._tell({"do": "look"})

    async def _tell(self, command: Mapping[str, str]) -> Counter[str]:
        process = self._process
        assert process is not None
        assert process.stdin is not None
        process.stdin.write(json.dumps(command).encode() + b"\n")
        return Counter((await self._line(process, COMMAND_S))["struck"])

    async def _line(self, process: asyncio.subprocess.Process, wait_s: float) -> dict[str, Any]:
        assert process.stdout is not None
        try:
            document: dict[str, Any] = json.loads(await asyncio.wait_for(process.stdout.readline(), wait_s))
        except (TimeoutError, ValueError) as error:
            await end(process)
            raise ProcessLost(f"a server says nothing; see {self._log}") from error
        return document

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    async def kill(self) -> None:
        """SIGKILL, stopped or not. Nothing when it does not run."""
        if self._process is not None:
            await end(self._process)

    async def terminate(self) -> int | None:
        """SIGTERM; the exit code, None when it had to be killed."""
        assert self._process is not None
        self.signal(signal.SIGTERM)
        try:
            return await asyncio.wait_for(self._process.wait(), COMMAND_S)
        except TimeoutError:
            await end(self._process)
            return None


class Servers:
    """All of a cluster. sockets: a directory with a short name. etcd: where the map is to be, None for a cluster.toml.
    `proxies` by node; `addresses` are what clients know."""

    def __init__(self, root: str, sockets: str, log: str, etcd: EtcdUrl | None, seed: int) -> None:
        self._root = root
        self._etcd = etcd
        more = () if etcd is None else ("--register", str(etcd))
        self.url = os.path.join(root, CLUSTER_FILE) if etcd is None else str(etcd)
        self.addresses = [_endpoint(sockets, node, "") for node in range(STRIPE_SHARDS)]
        self.proxies: dict[int, WireProxy] = {}
        self.nodes: list[NodeServer] = []
        for node, address in enumerate(self.addresses):
            own = _endpoint(sockets, node, "-behind") if node in PROXIED else address
            words = (*more, "--no-mapped") if node in NOT_MAPPED else more
            self.nodes.append(NodeServer(node_path(root, node), own, log, words))
            if node in PROXIED:
                self.proxies[node] = WireProxy(address, own, seed=seed)

    async def make(self) -> None:
        """The cluster, empty, and not served yet."""
        where = () if self._etcd is None else ("--etcd", str(self._etcd))
        made = await kvstore(None, "cluster", "init", self._root, "--capacity", str(CAPACITY_BYTES), "--extent-bytes",
                             str(EXTENT_BYTES), "--listen", "unix", *where)
        if made.code != 0:
            raise ProcessLost(f"cluster init ended with {made.code}: {made.error}")
        if self._etcd is None:
            self._change_file()
        else:
            await self._change_map(self._etcd)

    def _change_file(self) -> None:
        with open(self.url, encoding="utf-8") as file:
            text = file.read()
        for node, address in enumerate(self.addresses):
            text = text.replace(f'"unix:sockets/{node:02d}"', json.dumps(str(address)))
        with open(self.url, "w", encoding="utf-8") as file:
            file.write(text)

    async def _change_map(self, url: EtcdUrl) -> None:
        store = EtcdStore(url)
        try:
            for node, address in enumerate(self.addresses):
                held = await store.read()
                await store.change(held, held.map.with_address(node, str(address)))
        finally:
            await store.close()

    async def start(self) -> None:
        """All of them, and the proxies."""
        for proxy in self.proxies.values():
            await proxy.start()
        await asyncio.gather(*(node.start() for node in self.nodes))

    async def terminate(self) -> list[int]:
        """End all; the nodes whose servers did not end clean."""
        codes = await asyncio.gather(*(node.terminate() for node in self.nodes))
        return [node for node, code in enumerate(codes) if code != 0]

    async def kill(self) -> None:
        """Whatever runs still."""
        for node in self.nodes:
            await node.kill()
        for proxy in self.proxies.values():
            await proxy.stop()


def _endpoint(sockets: str, node: int, suffix: str) -> Endpoint:
    if node in OVER_TCP:
        return Endpoint(host="127.0.0.1", port=free_port())
    return Endpoint(path=os.path.join(sockets, f"{node:02d}{suffix}"))
