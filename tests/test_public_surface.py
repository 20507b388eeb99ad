"""The public names of `kvstore` are final: a name, a parameter or a field that goes, moves or comes shows here."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

import pytest

import kvstore

PUBLIC_NAMES: Final = frozenset({
    "BlockLayout", "BlockingKVStore", "Chain", "Config", "EfsError", "ForkedStore", "GetReport", "HitPlan",
    "Image", "InvalidArgument", "KVStore", "Locked", "Namespace", "NodeInfo", "PutReport", "ReplayCost",
    "Segment", "Setting", "SettingError", "StoreClosed", "StoreNotFound", "Tenant", "UnsupportedUrl",
    "V41_FLASH", "parse_size", "plan_hit", "replay_cost", "snapshot_after_decode", "snapshot_after_prefill",
    "snapshot_for_regeneration", "storable_after_decode", "storable_after_prefill", "store_root",
    "tokens_to_load",
})

MEMBERS: Final = {
    "BlockLayout": (
        "block_bytes block_tokens digest dtype format from_segments name opaque per_layer segment_range "
        "segment_view segments shape to_segments version"
    ),
    "BlockingKVStore": "close config get_into match namespace nodes put root",
    "Chain": "count depths index keys layout namespace start",
    "Config": (
        "bypass capacity durability extent_bytes get_deadline_ms load mapped match_deadline_ms put_deadline_ms "
        "scrub settings sources store"
    ),
    "GetReport": "blocks bytes corrupt hedged missing ok raced rebuilt seconds",
    "HitPlan": "hit matched replay suffix",
    "KVStore": "blocking close config filesystem get_into match namespace nodes open put root",
    "Namespace": "bind chain generation group layout model parallel secret tenant tenant_tag weights",
    "NodeInfo": (
        "capacity_bytes counters extents_total extents_used live_bytes node_id node_index records state unverified"
    ),
    "PutReport": "acked already at_risk failed why",
    "ReplayCost": "bounded exact snapshot",
    "Segment": "bytes name",
    "Setting": "meaning name source value",
    "Tenant": "generation name purging quota_bytes retired secret tag",
}
"""Public attributes of each class, in alphabetical order."""

PARAMETERS: Final = {
    "KVStore.open": "url, *, config=",
    "KVStore.blocking": "url, *, config=",
    "KVStore.namespace": "*, model, weights, layout, parallel=, group=, tenant=",
    "KVStore.match": "chain, *, strict=, deadline_ms=",
    "KVStore.get_into": "chain, out, *, on_segment=, deadline_ms=",
    "KVStore.put": "chain, blocks, *, deadline_ms=",
    "KVStore.nodes": "",
    "KVStore.close": "",
    "Namespace": "model, weights, layout, parallel=, group=, tenant=, generation=, secret=",
    "Namespace.chain": "tokens, *, images=, lora=, salt=",
    "Namespace.bind": "engine_hashes, start=, *, run_head=",
    "BlockLayout": "format, dtype, block_tokens, segments, version=, name=",
    "BlockLayout.opaque": "block_bytes, block_tokens=",
    "BlockLayout.per_layer": "layer_bytes, *, format, dtype, block_tokens=, version=, name=",
    "BlockLayout.to_segments": "blocks, out=",
    "BlockLayout.from_segments": "segments, out=",
    "BlockLayout.segment_range": "segment, blocks",
    "BlockLayout.segment_view": "buffer, segment",
    "Segment": "name, bytes",
    "GetReport": "blocks, ok, rebuilt, hedged, corrupt, missing, raced, bytes, seconds",
    "PutReport": "acked, already, failed, at_risk, why=",
    "HitPlan": "matched, hit, replay, suffix",
    "ReplayCost": "snapshot, bounded, exact",
    "Setting": "name, value, source, meaning",
    "NodeInfo": (
        "node_index, node_id, state, capacity_bytes, live_bytes, extents_used, extents_total, records, "
        "unverified, counters="
    ),
    "Config.load": "path=, *, environ=, arguments=",
    "parse_size": "text, setting=",
    "plan_hit": "length, blocks_present, snapshot_positions",
    "replay_cost": "suffix, keep",
    "snapshot_after_decode": "prompt, final",
    "snapshot_after_prefill": "length",
    "snapshot_for_regeneration": "length",
    "storable_after_decode": "length",
    "storable_after_prefill": "length",
    "store_root": "url",
    "tokens_to_load": "computed, matched",
}
"""Parameters of what callers call; `*` before those that go by name only, `=` behind those that have a default."""


def parameters(function: Callable[..., Any]) -> str:
    written, by_name_only = [], False
    for name, parameter in inspect.signature(function).parameters.items():
        if name == "self":
            continue
        if parameter.kind is parameter.KEYWORD_ONLY and not by_name_only:
            written.append("*")
            by_name_only = True
        assert parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY), name
        written.append(name if parameter.default is parameter.empty else f"{name}=")
    return ", ".join(written)


def resolve(path: str) -> Any:
    found: Any = kvstore
    for name in path.split("."):
        found = getattr(found, name)
    return found


def test_the_public_names_are_these() -> None:
    assert set(kvstore.__all__) == PUBLIC_NAMES
    assert len(set(kvstore.__all__)) == len(kvstore.__all__)


def test_nothing_public_is_left_out_of_all() -> None:
    visible = {
        name for name, value in vars(kvstore).items() if not name.startswith("_") and not isinstance(value, ModuleType)
    }
    assert visible == PUBLIC_NAMES


@pytest.mark.parametrize("name", MEMBERS)
def test_the_members_of_a_class_are_these(name: str) -> None:
    members = [member for member in dir(getattr(kvstore, name)) if not member.startswith("_")]
    assert members == MEMBERS[name].split()


def test_every_public_class_that_is_no_exception_is_in_the_snapshot() -> None:
    classes = {name for name in PUBLIC_NAMES if inspect.isclass(getattr(kvstore, name))}
    assert {name for name in classes if not issubclass(getattr(kvstore, name), Exception)} == set(MEMBERS)


@pytest.mark.parametrize("path", PARAMETERS)
def test_parameters_keep_their_names_and_order(path: str) -> None:
    assert parameters(resolve(path)) == PARAMETERS[path]


def test_every_public_function_is_in_the_snapshot() -> None:
    functions = {name for name in PUBLIC_NAMES if inspect.isfunction(getattr(kvstore, name))}
    assert functions <= set(PARAMETERS)


def test_the_blocking_store_has_the_same_verbs_with_the_same_parameters() -> None:
    for verb in ("namespace", "match", "get_into", "put", "nodes", "close"):
        blocking, waiting = resolve(f"BlockingKVStore.{verb}"), resolve(f"KVStore.{verb}")
        assert parameters(blocking) == parameters(waiting)
        assert not inspect.iscoroutinefunction(blocking)
    assert hasattr(kvstore.KVStore, "__aenter__")
    assert hasattr(kvstore.BlockingKVStore, "__enter__")


def test_open_is_awaited_and_gives_a_context_manager() -> None:
    assert inspect.iscoroutinefunction(kvstore.KVStore.open)
    assert hasattr(kvstore.KVStore, "__aexit__")


def test_all_errors_are_one_tree_with_an_exit_code() -> None:
    errors = [value for name in PUBLIC_NAMES if inspect.isclass(value := getattr(kvstore, name))
              and issubclass(value, Exception)]
    assert len(errors) >= 5
    for error in errors:
        assert issubclass(error, kvstore.EfsError)
        assert error.exit_code in (1, 2, 4, 8)


def test_a_star_import_gives_the_public_names_only() -> None:
    program = "from kvstore import *; print(*sorted(name for name in dir() if not name.startswith('_')))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.split() == sorted(PUBLIC_NAMES)
