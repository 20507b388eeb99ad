"""Fault 23: keys are pinned, byte for byte, in this process and in others with another PYTHONHASHSEED."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.keys import Namespace
from kvstore.layout import BlockLayout
from tests.support.keyvectors import CASES, Case, second_keys, show

ROOT = Path(__file__).parents[3]
GOLDEN = json.loads((ROOT / "tests" / "data" / "golden_keys.json").read_text())
SPEC = json.loads((ROOT / "tests" / "data" / "golden.json").read_text())


@pytest.mark.parametrize("position", range(len(CASES)), ids=[case.name for case in CASES])
def test_keys_are_those_of_the_golden_vectors(position: int) -> None:
    assert show(CASES[position]) == GOLDEN[position]


def test_every_golden_vector_has_its_case() -> None:
    assert [case.name for case in CASES] == [vector["name"] for vector in GOLDEN]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_keys_are_those_of_a_second_implementation(case: Case) -> None:
    assert list(case.chain()) == second_keys(case)


@pytest.mark.parametrize("seed", ["0", "4242"])
def test_keys_do_not_depend_on_process_or_hash_seed(seed: str) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run([sys.executable, "-m", "tests.support.keyvectors"], cwd=ROOT, env=environment,
                          capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(done.stdout) == GOLDEN


def test_runs_are_those_of_the_specification() -> None:
    chain = CASES[0].chain()
    starts = [0] + [block for block in range(1, len(chain)) if chain[block][:2] != chain[block - 1][:2]]
    assert starts[: len(SPEC["runs"]["starts"])] == SPEC["runs"]["starts"]


@settings(max_examples=60)
@given(
    block_bytes=st.sampled_from([1, 100_000, 300_000, 600_000, 1_100_000, 2_200_000, 5_000_000, 9_000_000]),
    blocks=st.integers(0, 150),
    block_tokens=st.integers(1, 3),
    secret=st.one_of(st.none(), st.binary(min_size=16, max_size=64)),
    lora=st.one_of(st.none(), st.text(max_size=3)),
    images=st.lists(st.tuples(st.binary(min_size=1, max_size=3), st.integers(0, 300), st.integers(1, 9)), max_size=4),
)
def test_both_implementations_agree(block_bytes: int, blocks: int, block_tokens: int, secret: bytes | None,
                                    lora: str | None, images: list[tuple[bytes, int, int]]) -> None:
    layout = BlockLayout.opaque(block_bytes, block_tokens)
    placed = tuple({(digest, start, start + size) for digest, start, size in images})
    case = Case("drawn", Namespace("m", "w", layout, secret=secret), range(blocks * block_tokens), (), placed, lora)
    assert list(case.chain()) == second_keys(case)
