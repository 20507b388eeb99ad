"""The table of counters in docs/operations.md, and the arithmetic of its examples."""

from __future__ import annotations

import re
from typing import Final

import pytest

from efs.exposition import GAUGES, PREFIX
from efs.metrics import COUNTERS, NODE_COUNTERS
from kvstore.layout import V41_FLASH
from tests.support.cli import ROOT

TEXT: Final = (ROOT / "docs" / "operations.md").read_text()
TOKENS_A_DAY: Final = 1_000_000_000
DISK_BYTES: Final = 3.84e12
ON_DISK: Final = 1.26
RAW: Final = 1.4


def rows() -> list[tuple[str, str, str]]:
    section = TEXT.partition("\n## Counters\n")[2].partition("\n## ")[0]
    return re.findall(r"^\| `(\w+)` \| (\w+) \| (.+) \|$", section, flags=re.M)


def test_every_counter_is_explained_once() -> None:
    names = [name for name, _, _ in rows()]
    assert len(names) == len(set(names))
    assert set(names) == set(COUNTERS)


def test_the_counters_of_nodes_are_those_that_servers_show() -> None:
    assert {name for name, by, _ in rows() if by == "node"} == set(NODE_COUNTERS)
    assert {by for _, by, _ in rows()} == {"node", "client", "upkeep"}


@pytest.mark.parametrize("name", [name for name, _ in GAUGES])
def test_every_gauge_is_named(name: str) -> None:
    assert f"`{PREFIX}_{name}`" in TEXT


def test_the_examples_of_sizing_and_endurance_are_right() -> None:
    token_bytes = V41_FLASH.block_bytes / V41_FLASH.block_tokens
    kv_a_day = TOKENS_A_DAY * token_bytes
    blocks_a_day = TOKENS_A_DAY / V41_FLASH.block_tokens
    raw = kv_a_day * 3 * RAW
    written = blocks_a_day * V41_FLASH.block_bytes * ON_DISK
    held = 12 * DISK_BYTES / RAW / token_bytes
    plain = " ".join(TEXT.split())
    for said in (f"{token_bytes:.0f} bytes a token", f"KV a day is {kv_a_day / 1e9:.0f} GB", f"= {raw / 1e9:,.0f} GB",
                 f"a node {raw / 12 / 1e9:.0f} GB", f"{held / 1e9:.0f} billion tokens", f"{blocks_a_day:,.0f} blocks",
                 f"{written / 1e9:,.0f} GB written, {written / 12 / 1e9:.0f} GB a node",
                 f"{written / 12 / DISK_BYTES:.3f} drive writes a day",
                 f"large it is: {ON_DISK / RAW / 3:.2f} for three",
                 f"one day ({ON_DISK / RAW:.2f})"):
        assert said in plain, said
