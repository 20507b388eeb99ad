"""What must come out of each step of the demonstration, and the comparison with what came out. Pure.

All steps replay one conversation whose answers a run without any store gave before. A step is right when

- the fetch reports exactly the expected number of leading blocks, rebuilt blocks and corrupt shards, and bytes to match
  (no fetch at all counts as zeros: nothing was matched);
- exactly the tokens behind those blocks went through the model, as a hook on the model counted them;
- as many shards were mended as were expected to be found corrupt;
- the put of the computed blocks was acknowledged, or refused, for exactly the expected number of blocks;
- the answer is token for token the one of the run without a store; or, in the negative control, is not.

The demonstration's own store is read into the page cache before each step: a node that answers late is read around,
as it should be, and how many blocks are rebuilt for that reason would be a matter of luck. Of a store of somebody
else that number is not checked.

Where nodes are gone, a block counts as rebuilt when at least one of the lost shards is a data shard; which that are
follows from the block's key alone (`efs.placement`), so the number is known before the step.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from efs.limits import DATA_SHARDS, STRIPE_SHARDS
from efs.placement import node_of_shard, placement_group, rotation_of, shard_of_node
from kvstore.demo.messages import TurnResult


@dataclass(frozen=True, slots=True)
class Expected:
    """What a step must report. acked and failed: blocks of its put, both 0 where nothing is put. mended: shards.
    rebuilt: at least so many blocks; a node that is slow just then is read around, which rebuilds more.
    """

    blocks: int
    rebuilt: int
    corrupt: int
    prefilled_tokens: int
    acked: int = 0
    failed: int = 0
    mended: int = 0
    same_answer: bool = True


@dataclass(frozen=True, slots=True)
class Flip:
    """One byte to turn over: in the payload of data shard `shard` of block `block`, which lies on node `node`."""

    block: int
    shard: int
    node: int


def whole_blocks(tokens: int, block_tokens: int) -> int:
    """Blocks of an input that a later run can reuse: one token at least is left to compute."""
    return max(0, tokens - 1) // block_tokens


def lost_data_blocks(keys: Sequence[bytes], gone: Iterable[int]) -> int:
    """How many blocks have a data shard on one of the nodes that are gone."""
    lost = tuple(gone)
    return sum(
        any(shard_of_node(node, rotation_of(placement_group(key))) < DATA_SHARDS for node in lost) for key in keys
    )


def nodes_to_remove(keys: Sequence[bytes], count: int) -> tuple[int, ...]:
    """`count` nodes that hold data shards of the first block, so that removing them costs it data."""
    rotation = rotation_of(placement_group(keys[0]))
    step = DATA_SHARDS // count
    return tuple(sorted(node_of_shard(shard * step, rotation) for shard in range(count)))


def flips(keys: Sequence[bytes]) -> tuple[Flip, Flip]:
    """Two data shards of two blocks, far apart, on two nodes."""
    first_block, second_block = 0, len(keys) - 1
    first = _flip(keys, first_block, 2)
    for shard in range(5, DATA_SHARDS):
        second = _flip(keys, second_block, shard)
        if second.node != first.node:
            return first, second
    raise AssertionError("five shards of a block lie on five nodes")


def _flip(keys: Sequence[bytes], block: int, shard: int) -> Flip:
    node = node_of_shard(shard, rotation_of(placement_group(keys[block])))
    assert 0 <= node < STRIPE_SHARDS
    return Flip(block, shard, node)


def differences(expected: Expected, found: TurnResult, answer: Sequence[int], block_bytes: int) -> tuple[str, ...]:
    """Every way in which a step came out wrong, one line each; empty when it is right.

    answer: tokens of the same turn of the run without a store.
    """
    report, put = found.get, found.put
    rebuilt = report.rebuilt if report else 0
    pairs = (
        ("blocks loaded", expected.blocks, report.blocks if report else 0),
        ("blocks verified", expected.blocks, sum(report.ok) if report else 0),
        ("corrupt shards", expected.corrupt, report.corrupt if report else 0),
        ("shards mended", expected.mended, found.mended),
        ("bytes delivered", expected.blocks * block_bytes, report.bytes if report else 0),
        ("tokens prefilled", expected.prefilled_tokens, found.prefilled_tokens),
        ("blocks acknowledged", expected.acked, put.acked if put else 0),
        ("blocks already there", 0, put.already if put else 0),
        ("blocks not stored", expected.failed, put.failed if put else 0),
    )
    wrong = [f"{name}: {got}, must be {wanted}" for name, wanted, got in pairs if got != wanted]
    if rebuilt < expected.rebuilt:
        wrong.append(f"blocks rebuilt: {rebuilt}, must be {expected.rebuilt} or more")
    if not answer:
        wrong.append("the run without a store gave no token to compare with")
    elif expected.same_answer and list(answer) != found.answer:
        where = _first_difference(answer, found.answer)
        wrong.append(f"the answer differs from the run without a store at token {where}")
    elif not expected.same_answer and list(answer) == found.answer:
        wrong.append("the answer does not depend on the fetched bytes")
    return tuple(wrong)


def _first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    for position, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return position
    return min(len(one), len(other))
