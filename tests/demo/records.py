"""Results of a demonstration as its processes would give them, for tests of what is made of them."""

from __future__ import annotations

from dataclasses import replace

from efs.types import GetReport, PutReport
from kvstore.demo.messages import TurnResult
from kvstore.demo.report import DemoReport, Exchange, Step
from kvstore.demo.steps import Expected

BLOCK_BYTES = 1_000

RESUMED = TurnResult(
    prompt_tokens=400, matched_blocks=3, load_seconds=0.1,
    get=GetReport(3, [True] * 3, 0, 0, 0, 0, 0, 3 * BLOCK_BYTES, 0.05),
    prefilled_tokens=16, prefill_seconds=0.2, put=PutReport(0, 0, 0, 0), put_seconds=0.0, mended=0,
    answer=[5, 6, 7], logits="00", keys=["aa"] * 3,
)
RIGHT = Expected(blocks=3, rebuilt=0, corrupt=0, prefilled_tokens=16)


def step(title: str = "turn 2", differences: tuple[str, ...] = ()) -> Step:
    return Step(title, 4242, RIGHT, RESUMED, 2.0, differences)


def report(*steps: Step) -> DemoReport:
    return DemoReport(
        model="Small-1", block_bytes=BLOCK_BYTES, block_tokens=128, segments=2, threads=2, converted=True,
        prepare_seconds=9.0, exchanges=(Exchange("What is [it]?", "It is\na file.", 400, 2.0),), steps=steps,
        store_bytes=12_000, left_out=None, kept=None, seconds=61.0,
    )


def with_get(**changes: object) -> TurnResult:
    assert RESUMED.get is not None
    return replace(RESUMED, get=replace(RESUMED.get, **changes))  # type: ignore[arg-type]
