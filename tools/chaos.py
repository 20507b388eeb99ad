"""`python tools/chaos.py --seed N --seconds S`: a store with real processes, hurt in every way at once, by a seed.

One process owns a small store and works on it: writers, readers, collection, sweep, scrub and repair at once.
Beside it `kvstore fsck` runs in a loop. Node directories hang, slow down, fill, fail, rot, vanish and come back with
what they held, are swapped and replaced, and the owner is killed. A model (`tools/chaosrig/model.py`) judges every
read. At most two nodes are damaged at any moment, except where the schedule says `third`: then misses are legal, and
wrong bytes never.

The schedule and what each worker does next follow from the seed; `--plan` prints the schedule and ends. How the
processes interleave follows from the machine, so a seed repeats the same damage, not the same run.

With `--servers` the store is twelve `kvstore node serve` processes with several clients at once, some of them behind a
proxy that drips, delays, garbles and cuts; servers and clients are stopped and killed, and etcd, where there is one,
goes away for longer than every lease.

Exit codes: 0 nothing was broken; 1 something was, with what to run again; 2 wrong request; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.chaosrig.conduct import Conduct, random_seed
from tools.chaosrig.plan import EVERY_KIND_SECONDS, plan
from tools.chaosrig.report import Outcome, Request
from tools.chaosrig.serverconduct import ServerConduct
from tools.chaosrig.serverplan import EVERY_SERVER_KIND_SECONDS, server_plan
from tools.etcdprocess import find_etcd

MOST_SECONDS = 7 * 86_400.0
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _options(arguments)
    seed = random_seed() if options.seed is None else options.seed
    etcd = find_etcd() if options.servers and not options.without_etcd else None
    episodes = server_plan(seed, options.seconds, etcd is not None) if options.servers else plan(seed, options.seconds)
    notes = sys.stderr if options.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=notes, flush=True)

    say(f"seed {seed}, {options.seconds:g} s")
    if options.servers and etcd is None:
        say("no etcd: the map is in a cluster.toml, no node is replaced, and etcd has no outage"
            + ("" if options.without_etcd else " (`make etcd` fetches one)"))
    if options.plan:
        for episode in episodes:
            say(episode.line())
        return 0
    directory = tempfile.mkdtemp(prefix="kvstore-chaos-", dir=options.directory)
    try:
        outcome = asyncio.run(_until_told(_conduct(options, seed, directory, etcd, say).run(episodes)))
    except (KeyboardInterrupt, asyncio.CancelledError):
        say(f"interrupted; the store, the journal and the log are in {directory}")
        return INTERRUPTED
    if options.json:
        print(json.dumps(outcome.document(), indent=1))
    else:
        print("\n".join(outcome.lines()))
    if outcome.violations or options.keep:
        say(f"the store, the journal and the log are in {directory}")
    else:
        shutil.rmtree(directory)
    return 1 if outcome.violations else 0


async def _until_told(run: Coroutine[Any, Any, Outcome]) -> Outcome:
    """Its result; SIGTERM ends it as SIGINT does, and its processes with it."""
    task = asyncio.ensure_future(run)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await task


def _conduct(options: argparse.Namespace, seed: int, directory: str, etcd: str | None,
             say: Callable[[str], None]) -> Conduct | ServerConduct:
    again = f"make chaos SEED={seed} SECONDS={options.seconds:g}"
    if not options.servers:
        return Conduct(directory, Request(seed, options.seconds, options.seconds >= EVERY_KIND_SECONDS, again), say)
    whole = options.seconds >= EVERY_SERVER_KIND_SECONDS
    if options.without_etcd:
        again = f"python tools/chaos.py --seed {seed} --seconds {options.seconds:g} --servers --without-etcd"
    else:
        again += " SERVERS=1"
    return ServerConduct(directory, Request(seed, options.seconds, whole, again), etcd, say)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos", description=(__doc__ or "").partition("\n\n")[2], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the schedule and the work; a random one when it is not given")
    parser.add_argument("--seconds", type=_seconds, default=600.0, help="no episode begins later than this (600)")
    parser.add_argument("--servers", action="store_true", help="nodes at servers, several clients")
    parser.add_argument("--without-etcd", action="store_true", help="a cluster.toml, even if there is an etcd")
    parser.add_argument("--json", action="store_true", help="print one JSON document, notes to standard error")
    parser.add_argument("--plan", action="store_true", help="print the schedule and do nothing")
    parser.add_argument("--keep", action="store_true", help="keep the store's directory, as after a violation")
    parser.add_argument("--directory", help="make the store's directory in this one")
    return parser.parse_args(arguments)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 1 <= seconds <= MOST_SECONDS:
        raise argparse.ArgumentTypeError(f"{text} is not 1 to {MOST_SECONDS:.0f} seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
