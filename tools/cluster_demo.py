"""A cluster on this machine that loses servers while two engines use it, and is whole again at the end.

    python -m tools.cluster_demo [--blocks N] [--rounds N] [--without-model] [--without-etcd] [--shared]

    1  make      an etcd, `kvstore cluster init`, twelve `kvstore node serve` processes
    2  fill      two engine processes at once (`tools/cluster_engine.py`), each stores a conversation of its own
    3  stop      both read both conversations; in the middle of that one server is stopped (SIGSTOP). Meanwhile
                 `kvstore demo` resumes a real model's conversation from the same cluster, unless left out
    4  kill      the same with two servers killed (SIGKILL)
    5  return    one of them is started again; both engines go on storing, on eleven nodes
    6  replace   the directory of the other one is lost: `kvstore cluster replace-node` puts an empty one into its
                 place, the engines follow and store on twelve nodes; `kvstore repair` fills it through the servers
    7  check     all servers end when told to, and `kvstore fsck --deep` finds nothing

Where there is no etcd (`make etcd`) the cluster is a cluster.toml, and step 6 follows the end of the servers: `kvstore
node replace`, `kvstore repair`.

Every fetch must deliver every block with the right bytes. The demonstration fails when it does not, and also when a
fault did not happen or no block had to be rebuilt because of it: then it would have shown nothing. However it ends,
also by SIGTERM or SIGINT, no process of it is left.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from tools.etcdprocess import EtcdProcess, find_etcd

NODES: Final = 12
CAPACITY: Final = "3GiB"
STOPPED: Final = 4
KILLED: Final = (2, 9)
"""The first comes back as it was, the other one's disk is lost."""
ANSWER_S: Final = 120.0
MODEL_S: Final = 1_200.0
COMMAND: Final = (sys.executable, "-c", "from kvstore.cli import main; main()")
ROOT: Final = Path(__file__).resolve().parents[1]


class DemoFailed(Exception):
    """Something did not come out as it must; the message says what."""


def require(holds: bool, what: str) -> None:
    if not holds:
        raise DemoFailed(what)


class Interrupted(Exception):
    """Somebody wants the demonstration to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.code = 128 + number


class Processes:
    """All processes that were started, each of which is known from its first moment: an interruption that comes while
    one is being started is raised as soon as it is. As a context: at the end none of them is left."""

    def __init__(self) -> None:
        self._started: list[subprocess.Popen[bytes]] = []
        self._holding = False
        self._came: int | None = None

    def __enter__(self) -> Processes:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        self._holding = True
        for process in self._started:
            if process.poll() is None:
                process.kill()
            process.wait()
            for stream in (process.stdin, process.stdout, process.stderr):
                if stream is not None:
                    stream.close()

    def start(self, words: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        with self.held():
            process = subprocess.Popen(words, cwd=ROOT, **options)
            self._started.append(process)
            return process

    @contextmanager
    def held(self) -> Iterator[None]:
        """Interruptions wait until the end of this."""
        self._holding = True
        try:
            yield
        finally:
            self._holding = False
        if self._came is not None:
            raise Interrupted(self._came)

    def _interrupt(self, number: int, _: object) -> None:
        self._came = number
        if not self._holding:
            raise Interrupted(number)


class LineProcess:
    """A process that answers on standard output, a line of JSON at a time."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.process = process
        self._data = b""

    @classmethod
    def start(cls, processes: Processes, words: Sequence[str]) -> LineProcess:
        return cls(processes.start(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0))

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def answer(self, wait_s: float = ANSWER_S) -> dict[str, Any]:
        assert self.process.stdout is not None
        until = time.monotonic() + wait_s
        while b"\n" not in self._data:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0.0, until - time.monotonic()))
            chunk = os.read(self.process.stdout.fileno(), 65_536) if readable else b""
            require(bool(chunk), f"process {self.process.pid} gave no answer in {wait_s:.0f} s, or ended")
            self._data += chunk
        line, _, self._data = self._data.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Whatever it does: gone."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


def kvstore(*words: str, allowed: Sequence[int] = (0,)) -> Any:
    """Run a command to its end; its JSON document, None when it was refused."""
    done = subprocess.run([*COMMAND, "--json", *words], cwd=ROOT, capture_output=True, text=True, timeout=MODEL_S,
                          check=False)
    said = f"kvstore {' '.join(words)} ended with {done.returncode}: {done.stderr.strip()}"
    require(done.returncode in allowed, said)
    return json.loads(done.stdout) if done.stdout else None


@dataclass(slots=True)
class Cluster:
    """The servers of a cluster below a directory. shared: one process serves all nodes that no fault is meant for.
    etcd: where the map is, None for a cluster.toml."""

    root: Path
    shared: bool
    processes: Processes
    etcd: str | None = None
    servers: dict[int, LineProcess] = field(default_factory=dict)
    """By the first node that each serves."""

    @property
    def url(self) -> str:
        return self.etcd or str(self.root / "cluster.toml")

    def make(self) -> None:
        where = [] if self.etcd is None else ["--etcd", self.etcd]
        kvstore("cluster", "init", str(self.root), "--capacity", CAPACITY, "--listen", "unix", *where)

    def directory(self, node: int) -> Path:
        return self.root / "nodes" / f"{node:02d}"

    def address(self, node: int) -> str:
        return f"unix:{self.root}/sockets/{node:02d}"

    def start_all(self) -> None:
        alone = {STOPPED, *KILLED} if self.shared else set(range(NODES))
        together = [node for node in range(NODES) if node not in alone]
        self.start([*([node] for node in sorted(alone)), *([together] if together else [])])

    def start(self, groups: Sequence[Sequence[int]]) -> None:
        """A process for each group of nodes, all at once."""
        for group in groups:
            words = ["--json", "node", "serve", *(str(self.directory(node)) for node in group)]
            for node in group:
                words += ["--listen", self.address(node)]
            if self.etcd is not None:
                words += ["--register", self.etcd]
            self.servers[group[0]] = LineProcess.start(self.processes, [*COMMAND, *words])
        for group in groups:
            served = [self.servers[group[0]].answer()["node"] for _ in group]
            require(served == list(group), f"nodes {served} are served, not {group}")

    def stop(self, node: int) -> None:
        self.servers[node].process.send_signal(signal.SIGSTOP)
        stat = Path(f"/proc/{self.servers[node].process.pid}/stat")
        until = time.monotonic() + ANSWER_S
        while stat.read_text().rpartition(")")[2].split()[0] != "T":
            require(time.monotonic() < until, f"the server of node {node} was not stopped")

    def go_on(self, node: int) -> None:
        self.servers[node].process.send_signal(signal.SIGCONT)

    def kill(self, node: int) -> None:
        process = self.servers.pop(node)
        process.process.kill()
        require(process.process.wait(ANSWER_S) == -signal.SIGKILL, f"the server of node {node} was not killed")
        process.end()

    def await_serving(self, nodes: int) -> None:
        until = time.monotonic() + ANSWER_S
        while (serving := kvstore("cluster", "status", self.url, allowed=(0, 1))["nodes_serving"]) != nodes:
            require(time.monotonic() < until, f"{serving} nodes serve, not {nodes}")

    def end_all(self) -> None:
        for server in self.servers.values():
            server.process.terminate()
        for node, server in self.servers.items():
            require(server.process.wait(ANSWER_S) == 0, f"the server of node {node} did not end clean")


@dataclass(slots=True)
class Demo:
    """The engines, and what they have stored: blocks by conversation."""

    cluster: Cluster
    rounds: int
    engines: dict[str, LineProcess] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)

    def start_engines(self) -> None:
        for name in ("left", "right"):
            words = [sys.executable, "-m", "tools.cluster_engine", self.cluster.url]
            self.engines[name] = LineProcess.start(self.cluster.processes, words)
            self.stored[name] = 0
        for engine in self.engines.values():
            require(engine.answer()["nodes"] == NODES, "an engine does not find twelve nodes")

    def put(self, count: int) -> None:
        """Both engines at once, each to its own conversation."""
        for name, engine in self.engines.items():
            engine.tell(f"put {name} {self.stored[name]} {count}")
        for name, engine in self.engines.items():
            answer = engine.answer()
            require(answer["acked"] == count, f"engine {name} stored {answer}, not {count} blocks")
            self.stored[name] += count

    def await_nodes(self, count: int) -> None:
        """Both engines use so many nodes."""
        for name, engine in self.engines.items():
            until, serving = time.monotonic() + ANSWER_S, -1
            while serving != count:
                require(time.monotonic() < until, f"engine {name} uses {serving} nodes, not {count}")
                engine.tell("nodes")
                serving = engine.answer()["nodes"]

    def await_writable(self, count: int) -> None:
        """Both engines store; a client that has not found the servers again yet may be refused at first."""
        for name, engine in self.engines.items():
            until, missing = time.monotonic() + ANSWER_S, count
            while missing:
                require(time.monotonic() < until, f"engine {name} cannot store on eleven nodes")
                engine.tell(f"put {name} {self.stored[name]} {count}")
                missing = engine.answer()["failed"]
            self.stored[name] += count

    def read_through(self, *faults: int, how: signal.Signals | None) -> int:
        """Both engines read both conversations; after the first round of the first one the faults happen. How many
        blocks were rebuilt in the rounds after that."""
        for engine in self.engines.values():
            for name, count in self.stored.items():
                engine.tell(f"get {name} {count} {self.rounds}")
        rebuilt = 0
        for number in range(len(self.stored) * self.rounds):
            conversation = list(self.stored)[number // self.rounds]
            for name, engine in self.engines.items():
                answer = engine.answer()
                require(answer["wrong"] == 0, f"engine {name} was given wrong bytes: {answer}")
                require(answer["blocks"] == self.stored[conversation],
                        f"engine {name} found {answer['blocks']} of {self.stored[conversation]} blocks")
                rebuilt += answer["rebuilt"] if number else 0
            if number == 0:
                for node in faults:
                    self.cluster.stop(node) if how is signal.SIGSTOP else self.cluster.kill(node)
        return rebuilt

    def end_engines(self) -> None:
        for engine in self.engines.values():
            assert engine.process.stdin is not None
            engine.process.stdin.close()
            require(engine.process.wait(ANSWER_S) == 0, "an engine did not end clean")


def say(text: str) -> None:
    print(text, flush=True)


def conduct(cluster: Cluster, blocks: int, rounds: int, *, with_model: bool) -> None:
    cluster.make()
    cluster.start_all()
    demo = Demo(cluster, rounds)
    demo.start_engines()
    demo.put(blocks)
    say(f"filled: two engines stored {blocks} blocks each on twelve servers")
    model = begin_model(cluster) if with_model else None
    stop_one(demo)
    if model is not None:
        out, err = model.communicate(timeout=MODEL_S)
        require(model.returncode == 0, f"kvstore demo came out wrong: {out.decode()}\n{err.decode()}")
        say(out.decode())
    kill_two(demo)
    bring_back(demo, blocks)
    if cluster.etcd is not None:
        replace_one(demo, blocks)
    demo.end_engines()
    rebuilt = repair_served(cluster) if cluster.etcd is not None else 0
    cluster.end_all()
    check(cluster, rebuilt or replace_unserved(cluster))


def begin_model(cluster: Cluster) -> subprocess.Popen[bytes]:
    """`kvstore demo` on the cluster, once its first turn over the store has ended."""
    model = cluster.processes.start([*COMMAND, "demo", "--store", cluster.url, "--turns", "2"],
                                    stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert model.stderr is not None
    for line in model.stderr:
        say(f"  kvstore demo: {line.decode().rstrip()}")
        if line.startswith(b"turn 1"):
            return model
    raise DemoFailed("kvstore demo ended before its first turn over the cluster")


def stop_one(demo: Demo) -> None:
    rebuilt = demo.read_through(STOPPED, how=signal.SIGSTOP)
    require(rebuilt > 0, "a server was stopped, and no block was rebuilt")
    demo.cluster.go_on(STOPPED)
    demo.cluster.await_serving(NODES)
    say(f"stopped: node {STOPPED} in the middle of reading; every block was there, {rebuilt} were rebuilt")


def kill_two(demo: Demo) -> None:
    rebuilt = demo.read_through(*KILLED, how=signal.SIGKILL)
    require(rebuilt > 0, "two servers were killed, and no block was rebuilt")
    demo.cluster.await_serving(NODES - len(KILLED))
    say(f"killed: nodes {KILLED[0]} and {KILLED[1]} in the middle of reading; every block was there, {rebuilt} were "
        "rebuilt")


def bring_back(demo: Demo, blocks: int) -> None:
    demo.cluster.start([KILLED[:1]])
    demo.cluster.await_serving(NODES - 1)
    demo.await_writable(blocks)
    demo.read_through(how=None)
    say(f"back: node {KILLED[0]} serves again; {blocks} more blocks each are stored on eleven nodes")


def replace_one(demo: Demo, blocks: int) -> None:
    """Another node in the place of the one that is lost, while both engines go on."""
    cluster, lost = demo.cluster, KILLED[1]
    assert cluster.etcd is not None
    shutil.rmtree(cluster.directory(lost))
    words = ("cluster", "replace-node", str(lost), "--directory", str(cluster.directory(lost)), "--address",
             cluster.address(lost), "--yes")
    until = time.monotonic() + ANSWER_S
    while (replaced := kvstore("--store", cluster.etcd, *words, allowed=(0, 2))) is None:
        require(time.monotonic() < until, f"node {lost} is not replaced: its lease does not end")
        time.sleep(1.0)
    cluster.start([[lost]])
    demo.await_nodes(NODES)
    demo.put(blocks)
    demo.read_through(how=None)
    say(f"replaced: node {lost} is {replaced['node_id'][:8]}…, version {replaced['version']} of the map; both engines "
        f"followed and stored {blocks} blocks each on twelve nodes")


def repair_served(cluster: Cluster) -> int:
    """How many shards were rebuilt through the servers."""
    assert cluster.etcd is not None
    return int(kvstore("--store", cluster.etcd, "repair")["rebuilt"])


def replace_unserved(cluster: Cluster) -> int:
    """The same for a cluster.toml, once all servers have ended."""
    lost, root = KILLED[1], str(cluster.root)
    shutil.rmtree(cluster.directory(lost))
    rebuilt = int(kvstore("--store", root, "node", "replace", str(lost), "--yes")["rebuilt"])
    kvstore("--store", root, "repair")
    return rebuilt


def check(cluster: Cluster, rebuilt: int) -> None:
    require(rebuilt > 0, f"nothing was rebuilt onto node {KILLED[1]}")
    found = kvstore("--store", str(cluster.root), "fsck", "--deep")
    require(found["clean"] and not found["findings"], f"fsck finds {found['findings']}")
    whole = found["sums"]["readable"]
    require(whole > 0 and not found["sums"]["at_risk"], f"blocks are not whole: {found['sums']}")
    say(f"mended: {rebuilt} shards rebuilt onto node {KILLED[1]}; fsck --deep finds all {whole} blocks whole")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--blocks", type=int, default=256, help="blocks of each conversation (default 256)")
    parser.add_argument("--rounds", type=int, default=5, help="times that each is read (default 5)")
    parser.add_argument("--without-model", action="store_true", help="leave `kvstore demo` out")
    parser.add_argument("--without-etcd", action="store_true", help="a cluster.toml, even if there is an etcd")
    parser.add_argument("--shared", action="store_true", help="one process for the nodes that no fault is meant for")
    arguments = parser.parse_args()
    program = None if arguments.without_etcd else find_etcd()
    if program is None:
        say("no etcd: the cluster is a cluster.toml, and a node is replaced when its servers have ended"
            + ("" if arguments.without_etcd else " (`make etcd` fetches one)"))
    base = Path(tempfile.mkdtemp(prefix="kv"))
    etcd = None if program is None else EtcdProcess(program, base)
    try:
        with Processes() as processes:
            if etcd is not None:
                with processes.held():
                    etcd.start()
            cluster = Cluster(base / "c", arguments.shared, processes, None if etcd is None else str(etcd.url))
            conduct(cluster, arguments.blocks, arguments.rounds, with_model=not arguments.without_model)
    except DemoFailed as error:
        sys.exit(f"cluster demo failed: {error}")
    except Interrupted as error:
        say(f"cluster demo ended by {error}")
        sys.exit(error.code)
    finally:
        if etcd is not None:
            etcd.kill()
        shutil.rmtree(base, ignore_errors=True)


if __name__ == "__main__":
    main()
