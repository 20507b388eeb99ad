"""`python tools/chaos.py --seed N --seconds S`: a store with real processes, hurt in every way at once, by a seed.

One process owns a small store and works on it: writers, readers, collection, sweep, scrub and repair at once.
Beside it `kvstore fsck` runs in a loop. Node directories hang, slow down, fill, fail, rot, vanish and come back with
what they held, are swapped and replaced, and the owner is killed. A model (`tools/chaosrig/model.py`) judges every
read. At most two nodes are damaged at any moment, except where the schedule says `third`: then misses are legal, and
wrong bytes never.

The schedule and what each worker does next follow from the seed; `--plan` prints the schedule and ends. How the
processes interleave follows from the machine, so a seed repeats the same damage, not the same run.

Exit codes: 0 nothing was broken; 1 something was, with what to run again; 2 wrong request; 130 interrupted.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from tools.chaosrig.conduct import Conduct, random_seed
from tools.chaosrig.plan import plan

MOST_SECONDS = 7 * 86_400.0
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    options = _options(arguments)
    seed = random_seed() if options.seed is None else options.seed
    episodes = plan(seed, options.seconds)
    notes = sys.stderr if options.json else sys.stdout

    def say(line: str) -> None:
        print(line, file=notes, flush=True)

    say(f"seed {seed}, {options.seconds:g} s")
    if options.plan:
        for episode in episodes:
            say(episode.line())
        return 0
    directory = tempfile.mkdtemp(prefix="kvstore-chaos-", dir=options.directory)
    try:
        outcome = asyncio.run(Conduct(directory, seed, options.seconds, say).run(episodes))
    except KeyboardInterrupt:
        say(f"interrupted; the store, the journal and the owner's log are in {directory}")
        return INTERRUPTED
    if options.json:
        print(json.dumps(outcome.document(), indent=1))
    else:
        print("\n".join(outcome.lines()))
    if outcome.violations or options.keep:
        say(f"the store, the journal and the owner's log are in {directory}")
    else:
        shutil.rmtree(directory)
    return 1 if outcome.violations else 0


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="chaos", description=(__doc__ or "").partition("\n\n")[2], formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, help="of the schedule and the work; a random one when it is not given")
    parser.add_argument("--seconds", type=_seconds, default=600.0, help="no episode begins later than this (600)")
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
