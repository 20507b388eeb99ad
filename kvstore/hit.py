"""The hit policy: how much of an input needs no computing, and where window snapshots may end. Pure.

Block KV decides the hit length; a window (SWA) snapshot decides only whether the last block is replayed. For an input
of length L, with floor128(x) = x // 128 * 128:

1. cap = L - 134 (window 128 and 6 tokens that may be rolled back). Below 128 there is no hit.
2. matched = 128 * leading blocks present, lowered to floor128(cap). When 0 there is no hit.
3. The largest snapshot position s, a positive multiple of 128, with matched - 128 <= s <= matched: hit = s, no replay.
4. Otherwise hit = matched - 128, and [hit, matched) is replayed: its block KV is reused as stored, the replay rebuilds
   window KV only. When matched is 128 that is hit 0, replay (0, 128).

The suffix to compute is L - hit tokens. The rule, its numbers and the worked cases are those of the model's
specification, sections 3 to 6.

The last sampled token of a sequence has no KV yet: a sequence of n tokens that is being decoded has KV for n - 1, so a
prompt of 100 and 28 sampled tokens fill no block; one more step makes one.

All lengths and positions are tokens, counted from 0; intervals are [start, stop).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from efs.errors import InvalidArgument

BLOCK_TOKENS: Final = 128
WINDOW_TOKENS: Final = 128
ROLLBACK_TOKENS: Final = 6
RING_TOKENS: Final = WINDOW_TOKENS + ROLLBACK_TOKENS
ENCODER_LAYERS: Final = 20
DECODER_LAYERS: Final = 20


@dataclass(frozen=True, slots=True)
class HitPlan:
    """What to reuse, what to replay and what to compute of one input.

    matched: tokens whose block KV is loaded, a multiple of 128. hit: tokens that need no computing. replay: the
    (start, stop) of the matched tokens that run again to rebuild window KV, None with a snapshot or without a match.
    suffix: tokens to compute, length - hit.
    """

    matched: int
    hit: int
    replay: tuple[int, int] | None
    suffix: int


@dataclass(frozen=True, slots=True)
class ReplayCost:
    """Work of one prefill in layer x token, by what is left of the window KV (specification, section 5)."""

    snapshot: int
    bounded: int
    exact: int


def plan_hit(length: int, blocks_present: int, snapshot_positions: Iterable[int]) -> HitPlan:
    """The plan for an input of `length` tokens with `blocks_present` leading blocks in the store.

    snapshot_positions: where usable snapshots of this very prefix end, in any order; positions that are not positive
    multiples of 128 are no snapshots and are passed over. InvalidArgument for a negative length or count.
    """
    _not_negative("length", length)
    _not_negative("blocks_present", blocks_present)
    cap = length - RING_TOKENS
    matched = min(blocks_present * BLOCK_TOKENS, _floor_block(cap)) if cap >= BLOCK_TOKENS else 0
    if matched == 0:
        return HitPlan(matched=0, hit=0, replay=None, suffix=length)
    lowest = matched - BLOCK_TOKENS
    usable = [s for s in snapshot_positions if s > 0 and lowest <= s <= matched and s % BLOCK_TOKENS == 0]
    if usable:
        hit = max(usable)
        return HitPlan(matched=matched, hit=hit, replay=None, suffix=length - hit)
    return HitPlan(matched=matched, hit=lowest, replay=(lowest, matched), suffix=length - lowest)


def tokens_to_load(computed: int, matched: int) -> int:
    """Tokens to fetch when the engine already holds `computed` and the store has `matched`; never below zero."""
    _not_negative("computed", computed)
    _not_negative("matched", matched)
    return max(0, matched - computed)


def snapshot_after_prefill(length: int) -> int:
    """Where the snapshot ends that a prefill of `length` tokens stores: floor128(length - 1); 0: nothing to store."""
    _not_negative("length", length)
    return _floor_block(max(0, length - 1))


def snapshot_for_regeneration(length: int) -> int:
    """Where a second snapshot ends that serves a repeat of the same prompt: floor128(length - 134); 0: none."""
    _not_negative("length", length)
    return _floor_block(max(0, length - RING_TOKENS))


def snapshot_after_decode(prompt: int, final: int) -> int | None:
    """Where the snapshot ends that decoding from `prompt` to `final` tokens leaves, None when the KV of the sequence
    (its length - 1) crossed no multiple of 128 while decoding."""
    _not_negative("prompt", prompt)
    if final < prompt:
        raise InvalidArgument(f"final is {final}, below prompt {prompt}")
    position = snapshot_after_prefill(final)
    return position if position > snapshot_after_prefill(prompt) else None


def storable_after_prefill(length: int) -> int:
    """Whole blocks with complete KV after a prefill of `length` tokens."""
    _not_negative("length", length)
    return length // BLOCK_TOKENS


def storable_after_decode(length: int) -> int:
    """Whole blocks with complete KV of a sequence of `length` tokens whose last one was sampled and has no KV yet."""
    _not_negative("length", length)
    return max(0, length - 1) // BLOCK_TOKENS


def replay_cost(suffix: int, keep: int) -> ReplayCost:
    """Cost of computing `suffix` tokens when the decoder layers keep the last `keep`: with a snapshot, with bounded
    replay (128 more tokens), and with an exact rebuild of every layer's window."""
    _not_negative("suffix", suffix)
    _not_negative("keep", keep)
    encoder, decoder, window = ENCODER_LAYERS, DECODER_LAYERS, WINDOW_TOKENS
    replayed = suffix + window
    return ReplayCost(
        snapshot=encoder * suffix + decoder * min(keep, suffix),
        bounded=encoder * replayed + decoder * min(keep, replayed),
        exact=encoder * (suffix + (encoder + decoder) * window) + decoder * decoder * window,
    )


def _floor_block(tokens: int) -> int:
    return tokens // BLOCK_TOKENS * BLOCK_TOKENS


def _not_negative(name: str, value: int) -> None:
    if value < 0:
        raise InvalidArgument(f"{name} is {value}, must not be negative")
