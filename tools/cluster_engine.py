"""An engine of the cluster demonstration: stores and reads blocks whose every byte is known beforehand.

    python -m tools.cluster_engine URL

Takes a command a line and answers each with lines of JSON. A conversation is a name: tokens and bytes of all of its
blocks follow from it, so that any engine can check what another one has stored.

    put NAME FIRST COUNT     store blocks: one line with acked, already, failed
    get NAME COUNT ROUNDS    fetch blocks from the first on and compare all bytes: a line for each round with blocks
                             (leading ones that are right), wrong, rebuilt, hedged

    nodes                    one line: how many nodes serve

A wrong byte is counted, never passed over; the conductor ends the demonstration for it.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import numpy as np
from numpy.typing import NDArray

from kvstore import BlockLayout, KVStore, Namespace
from kvstore.keys import Chain
from kvstore.store import BlockingKVStore

LAYOUT: Final = BlockLayout.opaque(56_960, block_tokens=16)
DEADLINE_MS: Final = 20_000.0
MOST_BLOCKS: Final = 4_096


def seed_of(name: str) -> int:
    return int.from_bytes(name.encode()[:8], "big")


def chain_of(name: str, count: int) -> Chain:
    tokens = np.random.default_rng(seed_of(name)).integers(0, 50_000, MOST_BLOCKS * LAYOUT.block_tokens)
    namespace = Namespace(model="cluster-demo", weights="none", layout=LAYOUT)
    return namespace.chain(tokens[: count * LAYOUT.block_tokens].tolist())


def bytes_of(name: str, first: int, count: int) -> NDArray[np.uint8]:
    """(count, block bytes)."""
    rows = [np.random.default_rng((seed_of(name), block)).integers(0, 256, LAYOUT.block_bytes, np.uint8)
            for block in range(first, first + count)]
    return np.stack(rows)


def put(store: BlockingKVStore, name: str, first: int, count: int) -> None:
    report = store.put(chain_of(name, first + count)[first:], bytes_of(name, first, count), deadline_ms=DEADLINE_MS)
    say({"acked": report.acked, "already": report.already, "failed": report.failed})


def get(store: BlockingKVStore, name: str, count: int, rounds: int) -> None:
    chain, expected = chain_of(name, count), bytes_of(name, 0, count)
    for _ in range(rounds):
        out = np.zeros_like(expected)
        report = store.get_into(chain, out.reshape(-1), deadline_ms=DEADLINE_MS)
        delivered = np.flatnonzero(np.array(report.ok))
        wrong = int(np.count_nonzero((out[delivered] != expected[delivered]).any(axis=1)))
        say({"blocks": report.blocks, "wrong": wrong, "rebuilt": report.rebuilt, "hedged": report.hedged})


def say(answer: dict[str, int]) -> None:
    print(json.dumps(answer), flush=True)


def count_nodes(store: BlockingKVStore) -> None:
    say({"nodes": sum(node.state == "serving" for node in store.nodes())})


def main(url: str) -> None:
    with KVStore.blocking(url) as store:
        count_nodes(store)
        for line in sys.stdin:
            what, *words = line.split()
            if what == "nodes":
                count_nodes(store)
            elif what == "put":
                put(store, words[0], *map(int, words[1:]))
            else:
                get(store, words[0], *map(int, words[1:]))


if __name__ == "__main__":
    main(sys.argv[1])
