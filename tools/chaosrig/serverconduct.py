"""The conductor of a chaos run against servers: starts etcd, servers, clients, hurts them by the schedule, and judges.

*Order in an episode.* All clients are told how many nodes are damaged before anything is done to them, and that none is
only after the store was found whole through the servers. Then:

1. The damage is done: faults below a server that runs, signals, directories changed while their server is down (ended
   or killed), etcd stopped or killed.
2. The hold: proxies do their faults one after the other, killed servers are started again in the middle of it, clients
   are killed in the middle of a call and replaced by new ones. It lasts until every fault was met and a counter has
   shown it.
3. Faults end, directories come back with what they held, everything runs. A server whose tables rotted is killed and
   started once more: a node that was closed in order takes entries at their word until they are used, and the index
   entry of one that was evicted unread is found at the next opening only.
4. Healing: every client uses all twelve nodes, a scrub and a repair through the servers have come to the end, and every
   guarded block has twelve sound shards.
5. A quiet look: one whole fsck beside all the work, which finds nothing but blocks that damage explains.

*The end.* Clients and servers end when they are told to, all with exit code 0. Then the root is a store like any other,
and ends as that of a run without servers (`tools/chaosrig/ending.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from tools.chaosrig import client, damage
from tools.chaosrig.ending import judge_end
from tools.chaosrig.judge import Window
from tools.chaosrig.model import Model, Universe, replay
from tools.chaosrig.patience import Patience
from tools.chaosrig.plan import Damage, Episode
from tools.chaosrig.probes import LagProbes
from tools.chaosrig.processes import ObedientProcess, ProcessLost, kvstore
from tools.chaosrig.report import Outcome, Request, Seen, evidence
from tools.chaosrig.serverplan import CLIENT_KINDS, DISK_KINDS, kinds_of
from tools.chaosrig.servers import Servers
from tools.chaosrig.smallstore import CAPACITY_BYTES, UNEVICTABLE_BLOCKS
from tools.chaosrig.watchers import Watchers
from tools.chaosrig.wireproxy import WIRE_KINDS
from tools.etcdprocess import EtcdProcess

CLIENTS: Final = 3
KEEPER: Final = 0
STOP_S: Final = 15.0
STOP_LAGS: Final = 50
HEAL_S: Final = 90.0
HEAL_LOOKS: Final = 40
STRIKE_S: Final = 20.0
STRIKE_LOOKS: Final = 100
FILL_S: Final = 3.0
LEASE_S: Final = 60.0
"""A replacement is refused until the lease of a killed server has ended, 10 s; the rest is the machine's."""

SERVER_EVIDENCE: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("drip", "delay", "late", "deaf", "mute", "stop", "slow", "hang_write"), (
        "rebuilt_blocks", "hedged_shards", "remote_late", "remote_lost", "node_suspect", "put_at_risk", "put_failed")),
    "garble": ("remote_lost", "wire_lost", "corrupt_shards", "missing_shards"),
    **dict.fromkeys(("repeat", "cut", "kill", "vanish", "swap"), ("remote_lost",)),
    "full": ("node_full", "node_io_errors", "put_at_risk", "put_failed"),
    "eio": ("node_io_errors",),
    "rot_payload": ("corrupt_shards", "node_verify_failed", "scrub_dropped", "repair_corrupt"),
    "rot_entry": ("node_torn_entries", "node_index_mismatch", "scrub_dropped", "repair_rebuilt"),
    "replace": ("places_changed",),
    "third": ("get_missed_blocks", "put_failed"),
}
"""As `tools/chaosrig/report.py` has it. A client that died is seen as a restart; an outage of etcd must not be seen."""


class ServerConduct:
    """One run in an empty directory. etcd: its program, None for a cluster.toml."""

    def __init__(self, directory: str, request: Request, etcd: str | None, say: Callable[[str], None]) -> None:
        self._root = os.path.join(directory, "store")
        self._journal = os.path.join(directory, "journal")
        self._log = os.path.join(directory, "log")
        self._away = os.path.join(directory, "away")
        self._sockets = tempfile.mkdtemp(prefix="kv")
        self._request = request
        self._say = say
        self._universe = Universe(request.seed)
        self._etcd: EtcdProcess | None = None
        if etcd is not None:
            os.mkdir(os.path.join(directory, "etcd"))
            self._etcd = EtcdProcess(etcd, Path(directory, "etcd"))
        url = None if self._etcd is None else self._etcd.url
        self._servers = Servers(self._root, self._sockets, self._log, url, request.seed)
        self._clients: dict[int, ObedientProcess] = {}
        self._incarnations = 0
        self._damaged = 0
        self._violations: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._done = 0
        self._watchers = Watchers(self._root, CAPACITY_BYTES, self._violations)
        self._probes = LagProbes()

    async def run(self, episodes: tuple[Episode, ...]) -> Outcome:
        """The whole run; never raises for what the store does."""
        began = time.monotonic()
        ending: dict[str, Any] = {}
        try:
            await self._begin()
            first = time.monotonic()
            for episode in episodes:
                if time.monotonic() - first >= self._request.seconds and not episode.first_deck:
                    break
                await self._episode(episode)
            await self._watchers.stop()
            ending = await self._end()
        except ProcessLost as error:
            self._violations.append(f"a process was lost: {error}")
        finally:
            await self._give_back()
        return self._outcome(episodes, ending, time.monotonic() - began)

    async def _begin(self) -> None:
        os.mkdir(self._away)
        if self._etcd is not None:
            await asyncio.to_thread(self._etcd.start)
        await self._servers.make()
        await self._servers.start()
        await self._start_client(KEEPER)
        await asyncio.gather(*(self._start_client(who) for who in range(CLIENTS) if who != KEEPER))
        self._watchers.start(fsck=False)
        await asyncio.sleep(FILL_S)
        await self._heal()

    async def _give_back(self) -> None:
        await self._watchers.stop()
        for process in self._clients.values():
            await process.kill()
        await self._servers.kill()
        if self._etcd is not None:
            self._etcd.kill()
        shutil.rmtree(self._sockets, ignore_errors=True)

    # -- clients

    async def _start_client(self, who: int) -> None:
        options = client.Options(self._servers.url, self._journal, self._request.seed, who, CLIENTS, self._incarnations,
                                 UNEVICTABLE_BLOCKS, self._damaged, who == KEEPER)
        self._incarnations += 1
        started = await ObedientProcess.start("tools.chaosrig.client", asdict(options), self._log)
        if started.refused is not None:
            raise ProcessLost(f"client {who} was refused: {started.refused}")
        self._clients[who] = started

    async def _tell(self, do: str, **arguments: Any) -> list[dict[str, Any]]:
        """Every client; their answers."""
        return await asyncio.gather(*(each.command(do, **arguments) for each in self._clients.values()))

    async def _note_damaged(self, nodes: int) -> None:
        self._damaged = nodes
        await self._tell("damaged", nodes=nodes)

    async def _close(self, process: ObedientProcess) -> None:
        began = time.monotonic()
        if not await process.stop(STOP_S, lambda: STOP_LAGS * self._probes.thread_ms(began) / 1000):
            self._violations.append(f"a client did not close within {STOP_S:.0f} s")
        elif process.exit_code != 0:
            self._violations.append(f"a client ended with {process.exit_code}; see the log")

    async def _counters(self) -> dict[str, Mapping[str, int]]:
        """Those of nodes and keeper from their files, of other clients by asking them."""
        found: dict[str, Mapping[str, int]] = dict(damage.counters(self._root))
        for who, process in self._clients.items():
            if who != KEEPER:
                found[f"client {who} {id(process)}"] = (await process.command("counters"))["counters"]
        return found

    # -- an episode

    async def _episode(self, episode: Episode) -> None:
        self._say(episode.line())
        before = await self._counters()
        window = Window("kill", -1, time.monotonic())
        self._watchers.windows.append(window)
        await self._note_damaged(len(episode.nodes))
        struck: Counter[str] = Counter()
        for fault in episode.damages:
            await self._hurt(fault, episode, struck)
        await self._hold(episode, before, struck)
        await self._relent(episode, struck)
        relented = time.monotonic()
        await self._heal()
        window.ended = time.monotonic()
        self._say(f"  whole again after {window.ended - relented:.1f} s")
        self._note(episode, damage.raised(before, await self._counters()), struck)
        await self._watchers.quiet_look(fsck=False)
        self._done += 1

    async def _hurt(self, fault: Damage, episode: Episode, struck: Counter[str]) -> None:
        third, kind = "third" in episode.kinds, fault.kind
        if kind in WIRE_KINDS or kind in CLIENT_KINDS:
            return  # In the hold.
        if kind == "outage":
            assert self._etcd is not None
            self._etcd.signal(signal.SIGSTOP if fault.choice < 0.5 else signal.SIGKILL)
        elif kind == "stop":
            self._servers.nodes[fault.node].signal(signal.SIGSTOP)
        elif kind in DISK_KINDS:
            if kind == "full":  # Found so by a server that starts.
                await self._hurt_without_server(fault, episode)
            await self._servers.nodes[fault.node].arm(kind)
            return  # Counted where it strikes.
        else:
            await self._hurt_without_server(fault, episode)
        struck["third" if third else kind] += 1

    async def _hurt_without_server(self, fault: Damage, episode: Episode) -> None:
        """What needs the server down; it is up again afterwards where it can be."""
        server, place = self._servers.nodes[fault.node], damage.node_path(self._root, fault.node)
        if fault.kind == "kill" or not episode.clean_stop:
            await server.kill()
        elif (code := await server.terminate()) != 0:
            self._violations.append(f"the server of node {fault.node} ended with {code}")
        if fault.kind == "full":
            await server.start()
        elif fault.kind == "vanish":
            os.rename(place, os.path.join(self._away, f"{fault.node:02d}"))
        elif fault.kind in ("rot_payload", "rot_entry"):
            damage.rot(self._root, fault.node, self._universe, fault.choice, payload=fault.kind == "rot_payload")
            await server.start()
        elif fault.kind == "replace":
            shutil.rmtree(place)
            await self._replace(fault.node, place)
            await server.start()
        elif fault.kind == "swap" and fault.node == episode.damages[-1].node:
            one, other = (each.node for each in episode.damages)
            damage.swap(self._root, one, other)
            for node in (one, other):
                await self._servers.nodes[node].start()

    async def _replace(self, node: int, place: str) -> None:
        """A new node in a place of the map. While the old server's lease lasts that is refused."""
        until = time.monotonic() + LEASE_S
        while True:
            run = await kvstore(self._servers.url, "cluster", "replace-node", str(node), "--directory", place,
                                "--address", str(self._servers.addresses[node]), "--yes")
            if run.code == 0:
                return
            if "is being served" not in run.error or time.monotonic() > until:
                raise ProcessLost(f"replace-node ended with {run.code}: {run.error[-300:]}")
            await asyncio.sleep(0.5)

    async def _hold(self, episode: Episode, before: Mapping[str, Mapping[str, int]], struck: Counter[str]) -> None:
        """As long as the episode says, and until its faults were met and counters have shown them."""
        began = time.monotonic()
        ways: list[Coroutine[Any, Any, None]] = []
        for node in self._servers.proxies:
            faults = [fault.kind for fault in episode.damages if fault.node == node and fault.kind in WIRE_KINDS]
            if faults:
                ways.append(self._hurt_wire(node, faults, episode.hold_s / len(faults), struck))
        ways += [self._kill_client(fault, struck, episode) for fault in episode.damages if fault.kind in CLIENT_KINDS]
        ways += [self._start_again(fault.node, began + episode.hold_s / 2) for fault in episode.damages
                 if fault.kind == "kill" and "third" not in episode.kinds]
        await asyncio.gather(*ways)
        await asyncio.sleep(max(0.0, began + episode.hold_s - time.monotonic()))
        patience = Patience(STRIKE_S, STRIKE_LOOKS)
        while not patience.ended:
            raised = damage.raised(before, await self._counters())
            shown = all(evidence(kind, raised, SERVER_EVIDENCE) for kind in episode.kinds if kind in SERVER_EVIDENCE)
            met = [(await self._servers.nodes[fault.node].struck())[fault.kind] for fault in episode.damages
                   if fault.kind in DISK_KINDS]
            if shown and all(met):
                break
            await patience.pause()
        for fault in episode.damages:
            if fault.kind == "swap":
                await self._require_left_alone(fault.node)

    async def _hurt_wire(self, node: int, kinds: Sequence[str], each_s: float, struck: Counter[str]) -> None:
        proxy = self._servers.proxies[node]
        for kind in kinds:
            before = proxy.struck[kind]
            proxy.hurt(kind)
            until, patience = time.monotonic() + each_s, Patience(STRIKE_S, STRIKE_LOOKS)
            while time.monotonic() < until or (proxy.struck[kind] == before and not patience.ended):
                await patience.pause()
            struck[kind] += proxy.struck[kind] - before
        proxy.heal()

    async def _kill_client(self, fault: Damage, struck: Counter[str], episode: Episode) -> None:
        """A client kills itself in the middle of a call, and another one takes its place: at once, or, because a store
        is not opened without etcd, when that is back."""
        who = int(fault.choice * CLIENTS)
        process = self._clients.pop(who)
        try:
            await process.command("die", call=fault.kind.removeprefix("die_in_"))
        except ProcessLost:
            code = await process.ended()
            if code != -signal.SIGKILL:
                raise ProcessLost(f"client {who} ended with {code}") from None
            struck[fault.kind] += 1
        if "outage" not in episode.kinds:
            await self._start_client(who)

    async def _start_again(self, node: int, at: float) -> None:
        await asyncio.sleep(max(0.0, at - time.monotonic()))
        await self._servers.nodes[node].start()

    async def _require_left_alone(self, node: int) -> None:
        """Of a server that has another node's directory."""
        for answer in await self._tell("nodes"):
            if (state := answer["nodes"][node]["state"]) == "serving":
                self._violations.append(f"a client uses node {node}, whose directory is another's: {state}")

    async def _relent(self, episode: Episode, struck: Counter[str]) -> None:
        if any(fault.kind == "outage" for fault in episode.damages):
            assert self._etcd is not None
            if self._etcd.running:
                self._etcd.signal(signal.SIGCONT)
            else:
                await asyncio.to_thread(self._etcd.start)
            for who in set(range(CLIENTS)) - self._clients.keys():
                await self._start_client(who)
        swapped = [fault.node for fault in episode.damages if fault.kind == "swap"]
        if swapped:
            for node in swapped:
                await self._servers.nodes[node].kill()
            damage.swap(self._root, *swapped)
        for fault in episode.damages:
            if fault.kind == "vanish":
                os.rename(os.path.join(self._away, f"{fault.node:02d}"), damage.node_path(self._root, fault.node))
            elif fault.kind == "stop":
                self._servers.nodes[fault.node].signal(signal.SIGCONT)
            elif fault.kind == "rot_entry":
                await self._servers.nodes[fault.node].kill()
            elif fault.kind in DISK_KINDS:
                struck[fault.kind] += (await self._servers.nodes[fault.node].disarm())[fault.kind]
        await asyncio.gather(*(server.start() for server in self._servers.nodes if not server.running))

    async def _heal(self) -> None:
        """Until the store is whole. A violation when it does not get there."""
        patience = Patience(HEAL_S, HEAL_LOOKS)
        await self._tell("pause")
        missing: dict[str, Any] = {}
        keeper = self._clients[KEEPER]
        while not patience.ended:
            await patience.pause()
            states = [{node["node_index"]: node["state"] for node in answer["nodes"] if node["state"] != "serving"}
                      for answer in await self._tell("nodes")]
            missing = {"states": states}
            for node in {node for seen in states for node, state in seen.items() if state == "read-only"}:
                await self._servers.nodes[node].kill()
                await self._servers.nodes[node].start()
            if not any(states):
                scrub, repair, look = [await keeper.command(do) for do in ("scrub", "repair", "look")]
                missing = {"scrub": scrub, "repair": repair, "look": look}
                failed = any("error" in answer for answer in (scrub, repair, look))
                if not (failed or scrub["missing"] or repair["missing"] or look["lacking"]):
                    break
                self._say(f"  not whole yet: {missing}")
        else:
            self._violations.append(f"the store was not whole {HEAL_S:.0f} s after its servers were: {missing}")
        await self._note_damaged(0)
        await self._tell("resume")

    def _note(self, episode: Episode, raised: dict[str, int], struck: Counter[str]) -> None:
        for kind in dict.fromkeys(episode.kinds):
            seen = self._seen.setdefault(kind, Seen(kind))
            seen.episodes += 1
            seen.struck += struck[kind]
            found = evidence(kind, raised, SERVER_EVIDENCE)
            seen.counters.update(found)
            seen.unseen += not found and kind in SERVER_EVIDENCE

    # -- the end

    async def _end(self) -> dict[str, Any]:
        for process in self._clients.values():
            await self._close(process)
        unclean = await self._servers.terminate()
        if unclean:
            self._violations.append(f"the servers of nodes {unclean} did not end clean")
        ending = await judge_end(self._root, self._journal, self._request.seed, self._incarnations, self._log,
                                 self._close, self._violations)
        self._watchers.measure()
        return ending

    def _outcome(self, episodes: tuple[Episode, ...], ending: dict[str, Any], seconds: float) -> Outcome:
        model = Model(self._universe, UNEVICTABLE_BLOCKS)
        lines: list[str] = []
        if os.path.exists(self._journal):
            with open(self._journal, encoding="ascii") as journal:
                lines = journal.readlines()
        told = replay(lines, model)
        if os.path.exists(self._log):
            with open(self._log, encoding="utf-8", errors="replace") as log:
                traces = Counter(line.strip() for line in log if line.startswith(("Traceback", "Task exception")))
            self._violations += [f"the log has {count} × {line!r}" for line, count in traces.items()]
        return Outcome.of(self._request, seconds, len(episodes), self._done,
                          [self._seen.get(kind, Seen(kind)) for kind in kinds_of(self._etcd is not None)], told,
                          self._watchers, self._violations, ending, CAPACITY_BYTES)
