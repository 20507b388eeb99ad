"""The conductor of a chaos run: starts the owner and the watchers, hurts nodes by the schedule, heals them, and judges.

*Order in an episode.* The owner is told how many nodes are damaged before anything is done to them, and that none is
only after the store was found whole: the model claims least while it knows least. Then:

1. What is done while the owner runs: armed faults, bytes that rot, directories that are moved away under it (it goes on
   in the moved ones, as a process does on a disk that was unmounted lazily).
2. What needs it down, closed or killed: a restart that meets absent nodes and rotten tables, swaps (it must be
   refused until they are undone), replacements by `kvstore node replace` (some killed on the way, then repeated).
3. The hold, with kills. After each start live faults are armed again; it lasts until each of them was met.
4. Faults end, directories come back with what they held; a restart lets their nodes sync.
5. Healing: all nodes serve, a scrub and a repair have come to the end, and every guarded block has twelve sound shards.
6. A quiet look: one whole fsck beside all the work that finds nothing.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, Final

from efs.fs import FileSystem
from efs.limits import STRIPE_SHARDS
from tools.chaosrig import damage
from tools.chaosrig.ending import judge_end
from tools.chaosrig.judge import DOWN, Window
from tools.chaosrig.model import Model, Told, Universe, replay
from tools.chaosrig.owner import Options
from tools.chaosrig.patience import Patience
from tools.chaosrig.plan import KINDS, LIVE_KINDS, Damage, Episode
from tools.chaosrig.probes import LagProbes
from tools.chaosrig.processes import CommandRun, ObedientProcess, ProcessLost, kvstore
from tools.chaosrig.report import Outcome, Request, Seen, evidence
from tools.chaosrig.smallstore import CAPACITY_BYTES, EXTENT_BYTES, UNEVICTABLE_BLOCKS
from tools.chaosrig.watchers import Watchers

STOP_S: Final = 15.0
"""A store closes in 5 s with nodes that hang; the rest is the machine's. A slower one has STOP_LAGS lags more."""
STOP_LAGS: Final = 50
HEAL_S: Final = 90.0
HEAL_LOOKS: Final = 40
STRIKE_S: Final = 20.0
STRIKE_LOOKS: Final = 150
"""A hold goes on until every armed fault was met, for so long at most: a slow machine does little in two seconds."""
FILL_S: Final = 3.0


class Conduct:
    """One run in an empty directory."""

    def __init__(self, directory: str, request: Request, say: Callable[[str], None]) -> None:
        self._root = os.path.join(directory, "store")
        self._journal = os.path.join(directory, "journal")
        self._log = os.path.join(directory, "owner.log")
        self._away = os.path.join(directory, "away")
        self._request = request
        self._say = say
        self._universe = Universe(request.seed)
        self._owner: ObedientProcess | None = None
        self._incarnations = 0
        self._damaged = 0
        self._armed: list[Damage] = []
        self._violations: list[str] = []
        self._seen: dict[str, Seen] = {}
        self._probes = LagProbes()
        self._done = 0
        self._watchers = Watchers(self._root, CAPACITY_BYTES, self._violations)

    async def run(self, episodes: tuple[Episode, ...]) -> Outcome:
        """The whole run; never raises for what the store does."""
        began = time.monotonic()
        os.mkdir(self._away)
        FileSystem.init(self._root, CAPACITY_BYTES, extent_bytes=EXTENT_BYTES)
        ending: dict[str, Any] = {}
        try:
            await self._must_come_up()
            self._watchers.start()
            await asyncio.sleep(FILL_S)
            await self._heal()
            first = time.monotonic()
            for episode in episodes:
                if time.monotonic() - first >= self._request.seconds and not episode.first_deck:
                    break
                await self._episode(episode)
            await self._watchers.stop()
            ending = await self._judge_end()
        except ProcessLost as error:
            self._violations.append(f"the owner was lost: {error}")
        finally:
            await self._watchers.stop()
            if self._owner is not None and self._owner.running:
                await self._owner.kill()
        return self._outcome(episodes, ending, time.monotonic() - began)

    # -- the owner

    async def _up(self) -> str | None:
        """Start an owner and arm what is armed; why it was refused."""
        options = Options(self._root, self._journal, self._request.seed, self._incarnations, UNEVICTABLE_BLOCKS, 0.0,
                          True, self._damaged)
        self._incarnations += 1
        owner = await ObedientProcess.start("tools.chaosrig.owner", asdict(options), self._log)
        if owner.refused is not None:
            return owner.refused
        self._owner = owner
        for fault in self._armed:
            await self._command("arm", kind=fault.kind, directory=damage.node_path(self._root, fault.node))
        return None

    async def _must_come_up(self) -> None:
        refused = await self._up()
        if refused is not None:
            raise ProcessLost(f"it was refused: {refused}")

    async def _down(self, clean: bool) -> None:
        assert self._owner is not None
        if not clean:
            await self._owner.kill()
        else:
            await self._close(self._owner)

    async def _close(self, owner: ObedientProcess) -> None:
        began = time.monotonic()
        if not await owner.stop(STOP_S, lambda: STOP_LAGS * self._probes.thread_ms(began) / 1000):
            self._violations.append(f"the owner did not close within {STOP_S:.0f} s")
        elif owner.exit_code != 0:
            self._violations.append(f"the owner ended with {owner.exit_code}; see its log")

    async def _command(self, do: str, **arguments: Any) -> dict[str, Any]:
        assert self._owner is not None
        return await self._owner.command(do, **arguments)

    # -- an episode

    async def _episode(self, episode: Episode) -> None:
        self._say(episode.line())
        before = damage.counters(self._root)
        windows = [Window(fault.kind, fault.node, time.monotonic()) for fault in episode.damages]
        windows += [Window(kind, -1, time.monotonic()) for kind in episode.kinds if kind in ("kill", "third")]
        restarts = any(fault.kind in ("vanish", "rot_entry", "swap", "replace") for fault in episode.damages)
        if restarts:
            windows.append(Window(DOWN, -1, time.monotonic()))
        self._watchers.windows += windows
        self._damaged = len(episode.nodes)
        await self._command("damaged", nodes=self._damaged)
        await self._hurt(episode)
        if restarts:
            await self._down(episode.clean_stop)
            for fault in episode.damages:
                await self._hurt_without_owner(fault)
            await self._must_come_up()
        await self._hold(episode, before)
        await self._relent(episode)
        relented = time.monotonic()
        await self._heal()
        healed = time.monotonic()
        self._say(f"  whole again after {healed - relented:.1f} s")
        for window in windows:
            window.ended = healed
        self._note(episode, damage.raised(before, damage.counters(self._root)))
        await self._watchers.quiet_look()
        self._done += 1

    async def _hurt(self, episode: Episode) -> None:
        for fault in episode.damages:
            place = damage.node_path(self._root, fault.node)
            if fault.kind in LIVE_KINDS:
                self._armed.append(fault)
                await self._command("arm", kind=fault.kind, directory=place)
            elif fault.kind in ("rot_payload", "rot_entry"):
                flipped = damage.rot(self._root, fault.node, self._universe, fault.choice,
                                     payload=fault.kind == "rot_payload")
                self._see(fault.kind).struck += flipped
            elif fault.kind == "vanish":
                os.rename(place, os.path.join(self._away, f"{fault.node:02d}"))
                self._see(fault.kind).struck += 1

    async def _hurt_without_owner(self, fault: Damage) -> None:
        if fault.kind == "swap":
            other = (fault.node + 1 + int(fault.choice * (STRIPE_SHARDS - 1))) % STRIPE_SHARDS
            damage.swap(self._root, fault.node, other)
            refused = await self._up()
            if refused is None:
                self._violations.append(f"a store with nodes {fault.node} and {other} swapped was opened")
                await self._down(False)
            elif not refused.startswith("IdentityMismatch"):
                self._violations.append(f"with nodes {fault.node} and {other} swapped the owner said: {refused}")
            damage.swap(self._root, fault.node, other)
            self._see("swap").struck += 1
        elif fault.kind == "replace":
            shutil.rmtree(damage.node_path(self._root, fault.node))
            arguments = ("node", "replace", str(fault.node), "--yes")
            if fault.choice < 0.5:
                await kvstore(self._root, *arguments, kill_after_s=0.5 + 2 * fault.choice)
            run = await kvstore(self._root, *arguments)
            if run.code != 0 and not _is_in_use(run):
                self._violations.append(f"node replace ended with {run.code}: {run.error[-300:]}")
            self._see("replace").struck += 1

    async def _hold(self, episode: Episode, before: Mapping[str, Mapping[str, int]]) -> None:
        """As long as the episode says, and until its faults were met and their counters have shown it."""
        began = time.monotonic()
        for share in episode.kills:
            await asyncio.sleep(max(0.0, began + share * episode.hold_s - time.monotonic()))
            await self._down(False)
            self._see("kill").struck += 1
            await self._must_come_up()
        await asyncio.sleep(max(0.0, began + episode.hold_s - time.monotonic()))
        wanted = {fault.kind for fault in self._armed}
        patience = Patience(STRIKE_S, STRIKE_LOOKS)
        while not patience.ended:
            raised = damage.raised(before, damage.counters(self._root))
            shown = all(evidence(kind, raised) for kind in wanted | set(episode.kinds) & {"third"})
            if shown and wanted <= set((await self._command("struck"))["kinds"]):
                break
            await patience.pause()

    async def _relent(self, episode: Episode) -> None:
        self._armed.clear()
        await self._command("disarm")
        back = [fault.node for fault in episode.damages if fault.kind == "vanish"]
        for node in back:
            os.rename(os.path.join(self._away, f"{node:02d}"), damage.node_path(self._root, node))
        if back:
            await self._down(episode.clean_stop)
            await self._must_come_up()

    async def _heal(self) -> None:
        """Until the store is whole. A violation when it does not get there."""
        patience = Patience(HEAL_S, HEAL_LOOKS)
        await self._command("pause")
        missing: dict[str, Any] = {}
        while not patience.ended:
            await patience.pause()
            nodes = (await self._command("nodes"))["nodes"]
            states = {node["node_index"]: node["state"] for node in nodes if node["state"] != "serving"}
            missing = {"states": states}
            if "read-only" in states.values():
                await self._down(True)
                await self._must_come_up()
                await self._command("pause")
            elif not states:
                scrub, repair = await self._command("scrub"), await self._command("repair")
                look = await self._command("look")
                missing = {"scrub": scrub, "repair": repair, "look": look}
                failed = any("error" in answer for answer in (scrub, repair, look))
                if not (failed or scrub["missing"] or repair["missing"] or look["lacking"]):
                    break
                self._say(f"  not whole yet: {missing}")
        else:
            self._violations.append(f"the store was not whole {HEAL_S:.0f} s after its nodes were: {missing}")
        self._damaged = 0
        await self._command("damaged", nodes=0)
        await self._command("resume")

    def _see(self, kind: str) -> Seen:
        return self._seen.setdefault(kind, Seen(kind))

    def _note(self, episode: Episode, raised: dict[str, int]) -> None:
        for kind in episode.kinds:
            seen = self._see(kind)
            seen.episodes += 1
            if kind == "third":
                seen.struck += len(episode.damages)
            found = evidence(kind, raised)
            seen.counters.update(found)
            seen.unseen += not found and kind not in ("swap", "kill")

    # -- the end

    async def _judge_end(self) -> dict[str, Any]:
        await self._down(True)
        self._incarnations += 1
        ending = await judge_end(self._root, self._journal, self._request.seed, self._incarnations - 1, self._log,
                                 self._close, self._violations)
        self._watchers.measure()
        return ending

    def _outcome(self, episodes: tuple[Episode, ...], ending: dict[str, Any], seconds: float) -> Outcome:
        model = Model(self._universe, UNEVICTABLE_BLOCKS)
        told = Told()
        if os.path.exists(self._journal):
            with open(self._journal, encoding="ascii") as lines:
                told = replay(lines, model)
        for kind in LIVE_KINDS:
            if kind in self._seen:
                self._seen[kind].struck += told.sums[f"struck_{kind}"]
        if os.path.exists(self._log):
            with open(self._log, encoding="utf-8", errors="replace") as log:
                traces = Counter(line.strip() for line in log if line.startswith(("Traceback", "Task exception")))
            self._violations += [f"the owner's log has {count} × {line!r}" for line, count in traces.items()]
        return Outcome.of(self._request, seconds, len(episodes), self._done,
                          [self._seen.get(kind, Seen(kind)) for kind in KINDS], told, self._watchers, self._violations,
                          ending, CAPACITY_BYTES)


def _is_in_use(run: CommandRun) -> bool:
    """The run before this one was killed too late: the node was complete."""
    return run.code == 2 and "in use" in run.error


def random_seed() -> int:
    """For whoever gives none."""
    return random.SystemRandom().randrange(1 << 31)
