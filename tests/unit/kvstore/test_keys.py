"""Namespaces and chains: what is in a key (faults 47 and 48), what a chain is, what is refused."""

from __future__ import annotations

from array import array
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from efs.errors import InvalidArgument
from efs.limits import DEPTH_UNKNOWN
from kvstore.keys import Chain, Namespace, run_blocks, run_start
from kvstore.layout import V41_FLASH, BlockLayout, Segment

SECRET = bytes(range(32))
SMALL = BlockLayout.opaque(1_000, 4)
PLAIN = Namespace("model", "weights", SMALL)
OWNED = replace(PLAIN, tenant="acme", secret=SECRET)
TOKENS = list(range(100, 140))


def keys(namespace: Namespace, **extras: Any) -> tuple[bytes, ...]:
    return namespace.chain(TOKENS, **extras).keys


# -- Fault 48: everything that changes KV bytes is in the key ------------------------------------------------------


def test_each_part_of_a_namespace_changes_every_key() -> None:
    variants = [
        PLAIN,
        replace(PLAIN, model="other"),
        replace(PLAIN, weights="other"),
        replace(PLAIN, layout=BlockLayout.opaque(1_001, 4)),
        replace(PLAIN, layout=replace(SMALL, version=2)),
        replace(PLAIN, layout=replace(SMALL, dtype="fp8")),
        replace(PLAIN, layout=replace(SMALL, segments=(Segment("a", 500), Segment("b", 500)))),
        replace(PLAIN, parallel=(0, 2)),
        replace(PLAIN, parallel=(1, 2)),
        replace(PLAIN, parallel=(0, 1, 0, 2)),
        replace(PLAIN, parallel=(0, 1, 1, 2)),
        replace(PLAIN, parallel=(1, 2, 1, 2)),
        replace(PLAIN, group=1),
        replace(PLAIN, secret=SECRET),
        replace(PLAIN, tenant="acme", secret=SECRET),
        replace(PLAIN, tenant="bcme", secret=SECRET),
        replace(PLAIN, tenant="acme", secret=SECRET[::-1]),
        replace(PLAIN, tenant="acme", secret=SECRET, generation=1),
    ]
    for one, other in combinations(variants, 2):
        assert not set(keys(one)) & set(keys(other)), f"{one} and {other} share keys"


def test_block_size_in_tokens_changes_every_key() -> None:
    assert not set(keys(PLAIN)) & set(keys(replace(PLAIN, layout=BlockLayout.opaque(1_000, 8))))


def test_the_same_text_in_another_field_is_another_key() -> None:
    x = "sha256:abc"
    chains = [
        keys(OWNED),
        keys(OWNED, lora=x),
        keys(OWNED, salt=x),
        keys(replace(OWNED, tenant=x)),
        keys(replace(OWNED, model=x)),
        keys(replace(OWNED, weights=x)),
        keys(OWNED, images=[(x, 0)]),
    ]
    for one, other in combinations(chains, 2):
        assert not set(one) & set(other)


def test_neighbouring_texts_do_not_run_together() -> None:
    assert keys(replace(PLAIN, model="ab", weights="c")) != keys(replace(PLAIN, model="a", weights="bc"))
    assert keys(PLAIN, lora="ab", salt="c") != keys(PLAIN, lora="a", salt="bc")
    assert keys(PLAIN, lora="abc") != keys(PLAIN, lora="ab", salt="c")


def test_none_empty_and_absent_are_defined() -> None:
    assert keys(PLAIN, lora=None, salt=None, images=[]) == keys(PLAIN)
    chains = [keys(PLAIN), keys(PLAIN, lora=""), keys(PLAIN, salt=""), keys(PLAIN, lora="", salt="")]
    assert len(set(chains)) == 4
    assert keys(replace(PLAIN, secret=b"")) == keys(PLAIN)
    assert keys(replace(PLAIN, parallel=(0, 1, 0, 1))) == keys(PLAIN)
    assert replace(PLAIN, parallel=(0, 1, 0, 1)) == PLAIN


def test_text_and_its_bytes_are_the_same_value() -> None:
    assert keys(PLAIN, lora="é") == keys(PLAIN, lora="é".encode())
    assert keys(PLAIN, images=[("ab", 3)]) == keys(PLAIN, images=[(b"ab", 3)])


def test_a_token_changes_its_block_and_all_later_ones() -> None:
    changed = list(TOKENS)
    changed[17] += 1
    other = PLAIN.chain(changed).keys
    assert keys(PLAIN)[:4] == other[:4]
    assert not set(keys(PLAIN)[4:]) & set(other[4:])


# -- Images ---------------------------------------------------------------------------------------------------------


def test_an_image_changes_keys_from_the_first_block_that_it_touches() -> None:
    bare, other = keys(PLAIN), keys(PLAIN, images=[("image", 9, 13)])
    assert bare[:2] == other[:2]
    assert not set(bare[2:]) & set(other[2:])


def test_an_image_goes_into_each_block_that_it_overlaps() -> None:
    # It ends in block 3 or in block 4: the same up to block 3, other keys from block 4.
    short, long = keys(PLAIN, images=[("image", 9, 16)]), keys(PLAIN, images=[("image", 9, 17)])
    assert short[:4] == long[:4]
    assert not set(short[4:]) & set(long[4:])


def test_place_and_digest_of_an_image_count_and_its_order_in_the_list_does_not() -> None:
    chains = {keys(PLAIN, images=[("image", 9, 13)]), keys(PLAIN, images=[("image", 8, 13)]),
              keys(PLAIN, images=[("imagf", 9, 13)]), keys(PLAIN, images=[("image", 9, 13), ("second", 20)])}
    assert len(chains) == 4
    assert keys(PLAIN, images=[("a", 20), ("b", 9)]) == keys(PLAIN, images=[("b", 9), ("a", 20)])
    assert keys(PLAIN, images=[("a", 20), ("a", 20)]) == keys(PLAIN, images=[("a", 20)])
    assert keys(PLAIN, images=[("a", 20)]) == keys(PLAIN, images=[("a", 20, 21)])


def test_two_images_in_one_block_do_not_run_together() -> None:
    assert keys(PLAIN, images=[("ab", 8), ("c", 9)]) != keys(PLAIN, images=[("a", 8), ("bc", 9)])


def test_images_behind_the_last_full_block_change_nothing() -> None:
    assert keys(PLAIN, images=[("image", 40), ("far", 2**62, 2**63)]) == keys(PLAIN)


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (("", 0), "image 0 is"),
        (("d", -1), "image 0 is"),
        (("d", 5, 5), "image 0 is"),
        (("d", 1.5), "positions must be integers"),
        (("d",), "has 1 parts"),
        ((7, 0), "digest of image 0 is of type int"),
    ],
)
def test_an_image_that_cannot_be_is_refused(image: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        PLAIN.chain(TOKENS, images=[image])


# -- Fault 47: tenants ---------------------------------------------------------------------------------------------


def test_another_tenant_with_the_same_tokens_has_no_common_key() -> None:
    other = replace(PLAIN, tenant="rival", secret=SECRET[::-1])
    assert not set(keys(OWNED)) & set(keys(other))
    assert not {key[2:] for key in keys(OWNED)} & {key[2:] for key in keys(other)}
    assert OWNED.tenant_tag != other.tenant_tag


def test_without_the_secret_the_name_of_a_tenant_derives_nothing() -> None:
    with pytest.raises(InvalidArgument, match="tenant 'acme' has no secret"):
        replace(PLAIN, tenant="acme")
    guessed = replace(OWNED, secret=bytes(32))
    assert not set(keys(OWNED)) & set(keys(guessed))


def test_purged_generation_cannot_be_derived_from_the_next() -> None:
    assert not set(keys(OWNED)) & set(keys(replace(OWNED, generation=1)))
    assert OWNED.tenant_tag != replace(OWNED, generation=1).tenant_tag


def test_no_tenant_has_a_tag_of_zeros() -> None:
    assert PLAIN.tenant_tag == replace(PLAIN, secret=SECRET).tenant_tag == bytes(8)
    assert OWNED.tenant_tag != bytes(8)
    assert len(OWNED.tenant_tag) == 8


def test_secret_is_not_shown() -> None:
    assert SECRET.hex() not in repr(OWNED)
    assert repr(SECRET) not in repr(OWNED)
    assert "secret" not in repr(OWNED.chain(TOKENS))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": ""}, "model is ''"),
        ({"weights": ""}, "weights is ''"),
        ({"weights": None}, "weights is None"),
        ({"layout": 128}, "layout is of type int"),
        ({"parallel": (1, 1)}, "rank 1 must be 0 or more and below size 1"),
        ({"parallel": (0,)}, r"parallel is \(0,\)"),
        ({"parallel": (0, 1, 2)}, "parallel is"),
        ({"parallel": (0, 1, 2, 2)}, "rank 2"),
        ({"group": -1}, "group is -1"),
        ({"group": 2**32}, "group is 4294967296"),
        ({"generation": 1}, "without a tenant"),
        ({"tenant": "", "secret": SECRET}, "tenant is ''"),
        ({"tenant": "acme", "secret": bytes(15)}, "secret must be 16 to 64 bytes"),
        ({"secret": bytes(65)}, "secret must be 16 to 64 bytes"),
        ({"secret": "x" * 32}, "secret must be 16 to 64 bytes"),
        ({"tenant": "acme", "secret": SECRET, "generation": -1}, "generation is -1"),
    ],
)
def test_a_namespace_that_cannot_be_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message) as caught:
        replace(PLAIN, **change)
    assert "\n" not in str(caught.value)


# -- Tokens ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "tokens",
    [
        tuple(TOKENS),
        range(100, 140),
        array("I", TOKENS),
        array("q", TOKENS),
        memoryview(array("H", TOKENS)),
        np.array(TOKENS, dtype="<u4"),
        np.array(TOKENS, dtype=">u4"),
        np.array(TOKENS, dtype=np.int64),
        np.array(TOKENS, dtype=np.uint64),
        np.array(TOKENS, dtype=np.uint8),
        np.repeat(np.array(TOKENS, dtype=np.uint32), 2)[::2],
        [np.int32(token) for token in TOKENS],
    ],
    ids=lambda tokens: f"{type(tokens).__name__}-{getattr(tokens, 'dtype', '')}",
)
def test_any_sequence_or_buffer_of_integers_gives_the_same_keys(tokens: Any) -> None:
    assert PLAIN.chain(tokens).keys == keys(PLAIN)


def test_a_tensor_of_tokens_gives_the_same_keys() -> None:
    torch = pytest.importorskip("torch")
    assert PLAIN.chain(torch.tensor(TOKENS)).keys == keys(PLAIN)


def test_only_full_blocks_have_keys() -> None:
    assert PLAIN.chain(TOKENS[:39]).keys == keys(PLAIN)[:9]
    assert len(PLAIN.chain(TOKENS[:3])) == 0
    assert len(PLAIN.chain([])) == len(PLAIN.chain(np.zeros(0))) == 0


def test_largest_token_is_accepted() -> None:
    assert len(PLAIN.chain([0, 0, 0, 2**32 - 1])) == 1
    assert PLAIN.chain([0, 0, 0, 2**32 - 1]) == PLAIN.chain(np.array([0, 0, 0, 2**32 - 1]))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([1, 2, -3, 4], "token 2 is -3, must be an integer of 0 to 4294967295"),
        ([1, 2**32], "token 1 is 4294967296, must be an integer of 0 to 4294967295"),
        ([1, 2, 3, 4, "a"], "token 4 is 'a', must be an integer of 0 to 4294967295"),
        ([1.0], "token 0 is 1.0, must be an integer of 0 to 4294967295"),
        ([[1, 2]], r"token 0 is \[1, 2\], must be an integer"),
        (np.array([5, -1]), "token 1 is -1, must be"),
        (np.array([5, 2**32]), "token 1 is 4294967296, must be"),
        (np.array([5, 2**64 - 1], dtype=np.uint64), "token 1 is 18446744073709551615, must be"),
        (np.array([5, 6, -7], dtype=np.int8), "token 2 is -7, must be"),
        (np.zeros((1, 8), dtype=np.uint32), "tokens has 2 dimensions, must have 1"),
        (np.zeros(8), "tokens has elements of type float64, must have integers"),
        (np.zeros(8, dtype=bool), "tokens has elements of type bool, must have integers"),
        (b"12345678", "tokens is of type bytes"),
        ("12345678", "tokens is of type str"),
        (None, "tokens has 0 dimensions"),
    ],
)
def test_tokens_that_are_none_are_refused_with_their_position(tokens: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{message}") as caught:
        PLAIN.chain(tokens)
    assert "\n" not in str(caught.value)


# -- Chains ---------------------------------------------------------------------------------------------------------


def test_slices_keep_namespace_and_position() -> None:
    chain = PLAIN.chain(TOKENS)
    part = chain[3:7]
    assert (part.start, len(part), part.namespace, part.layout) == (3, 4, PLAIN, SMALL)
    assert part.keys == chain.keys[3:7]
    assert part[1:].start == 4
    assert list(part.depths) == [3, 4, 5, 6]
    assert part[0] == chain[3]
    assert part[-1] == chain[6]


def test_slices_with_negative_missing_and_far_bounds_mean_what_they_mean_in_python() -> None:
    chain = PLAIN.chain(TOKENS)
    for bounds in ((None, None), (-3, None), (None, -3), (-100, 100), (5, 2), (10, None), (-1, -1)):
        part = chain[slice(*bounds)]
        assert part.keys == chain.keys[slice(*bounds)]
        assert part.start == slice(*bounds).indices(10)[0]


def test_a_step_is_refused() -> None:
    chain = PLAIN.chain(TOKENS)
    for step in (2, -1):
        with pytest.raises(ValueError, match=f"has step {step}, must be 1"):
            chain[::step]


def test_a_chain_is_an_immutable_value() -> None:
    chain = PLAIN.chain(TOKENS)
    with pytest.raises(AttributeError, match="immutable"):
        chain._start = 5
    with pytest.raises(AttributeError, match="immutable"):
        del chain._keys
    assert chain == PLAIN.chain(TOKENS)
    assert len({chain, PLAIN.chain(TOKENS)}) == 1
    assert chain[2:] != chain[3:]
    assert chain != chain.keys
    assert chain[:0] != replace(PLAIN, group=1).chain([])
    assert chain[2] in chain
    assert list(reversed(chain)) == list(reversed(chain.keys))


def test_a_key_of_another_length_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="key 1 has 31 bytes, must have 32"):
        Chain(PLAIN, [bytes(32), bytes(31)], 0)


# -- Runs -----------------------------------------------------------------------------------------------------------


def test_keys_of_a_run_share_their_group_and_no_more() -> None:
    chain = Namespace("m", "w", V41_FLASH).chain(range(300 * 128))
    groups: dict[int, set[bytes]] = {}
    for block, key in enumerate(chain):
        groups.setdefault(run_start(block, 64), set()).add(key[:2])
    assert all(len(group) == 1 for group in groups.values())
    assert sorted(groups) == [0, 4, 8, 16, 32, 64, 128, 192, 256]
    assert len(set.union(*groups.values())) == len(groups)


def test_run_of_a_large_block_is_short() -> None:
    assert [run_blocks(size) for size in (113_920, 262_144, 262_145, 2_949_120, 2**22, 2**22 + 1, 2**24, 2**26, 1)] == [
        64, 64, 32, 4, 4, 2, 1, 1, 64,
    ]


@given(block=st.integers(0, 10_000), power=st.integers(0, 6))
def test_runs_tile_the_chain(block: int, power: int) -> None:
    most = 1 << power
    start = run_start(block, most)
    assert start <= block < start + most
    assert run_start(start, most) == start
    natural = 0 if block < 4 else min(64, 1 << (block.bit_length() - 1))
    if natural:
        assert start % min(natural, most) == 0
    assert run_start(start + 1, most) == (start if most > 1 else start + 1)


# -- Engine hashes --------------------------------------------------------------------------------------------------

HASHES = [bytes([number]) * 32 for number in range(1, 100)]
WIDE = Namespace("model", "weights", V41_FLASH)


def test_bound_keys_depend_on_namespace_and_hash() -> None:
    chain = WIDE.bind(HASHES)
    assert chain.start == 0
    assert len(set(chain)) == len(HASHES)
    assert not set(chain) & set(replace(WIDE, group=1).bind(HASHES))
    assert not set(chain) & {key[:2] + value[:30] for key, value in zip(chain, HASHES, strict=True)}
    assert [key[:2] for key in chain[:8]] == [chain[0][:2]] * 4 + [chain[4][:2]] * 4


@pytest.mark.parametrize("start", [0, 1, 3, 4, 7, 8, 31, 33, 63, 64, 65, 98])
def test_a_slice_bound_by_itself_has_the_keys_of_the_whole(start: int) -> None:
    whole = WIDE.bind(HASHES)
    first = run_start(start, 64)
    part = WIDE.bind(HASHES[start:], start, run_head=None if first == start else HASHES[first])
    assert part == whole[start:]


def test_a_slice_that_begins_inside_a_run_needs_the_hash_of_its_first_block() -> None:
    with pytest.raises(ValueError, match="block 5 lies inside the run that begins at 4: run_head="):
        WIDE.bind(HASHES[5:], 5)
    with pytest.raises(InvalidArgument, match="block 4 begins a run"):
        WIDE.bind(HASHES[4:], 4, run_head=HASHES[0])
    assert WIDE.bind(HASHES[4:], 4, run_head=HASHES[4]) == WIDE.bind(HASHES)[4:]
    assert WIDE.bind(HASHES[5:7], 5, run_head=HASHES[9]) != WIDE.bind(HASHES[5:7], 5, run_head=HASHES[4])


def test_at_unknown_positions_every_key_is_a_run_of_its_own() -> None:
    chain = WIDE.bind(HASHES, start=None)
    assert chain.start is None
    assert chain[5:].start is None
    assert list(chain[:2].depths) == [DEPTH_UNKNOWN] * 2
    assert [key[2:] for key in chain] == [key[2:] for key in WIDE.bind(HASHES)]
    assert len({key[:2] for key in chain}) > 90
    assert chain[7:9] == WIDE.bind(HASHES[7:9], start=None)
    with pytest.raises(InvalidArgument, match="positions are unknown"):
        WIDE.bind(HASHES, start=None, run_head=HASHES[0])


def test_binding_nothing_gives_an_empty_chain() -> None:
    assert len(WIDE.bind([], start=5)) == 0
    assert WIDE.bind([], start=5).start == 5


@pytest.mark.parametrize(
    ("hashes", "start", "message"),
    [
        ([b"1234567"], 0, "engine hash 0 has 7 bytes, must have 8 to 64"),
        ([HASHES[0], bytes(65)], 0, "engine hash 1 has 65 bytes"),
        ([1234], 0, "engine hash 0 is of type int, must be bytes"),
        (["a" * 32], 0, "engine hash 0 is of type str, must be bytes"),
        (HASHES, -1, "start is -1"),
        (HASHES, 1.0, "start is 1.0"),
    ],
)
def test_hashes_that_cannot_be_bound_are_refused(hashes: Any, start: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        WIDE.bind(hashes, start)


@pytest.mark.parametrize("make", [
    lambda bad: replace(PLAIN, model=bad), lambda bad: replace(PLAIN, weights=bad),
    lambda bad: replace(OWNED, tenant=bad), lambda bad: PLAIN.chain(TOKENS, salt=bad),
    lambda bad: PLAIN.chain(TOKENS, lora=bad), lambda bad: PLAIN.chain(TOKENS, images=[(bad, 0)])])
@pytest.mark.parametrize("bad", ["\udcff", "a\ud800"])
def test_a_text_that_has_no_utf8_is_refused_by_name(make: Any, bad: str) -> None:
    with pytest.raises(InvalidArgument, match=r"(model|weights|tenant|salt|lora|image 0) is .* no text in UTF-8"):
        make(bad)
