"""What the package shows: names and signatures that others build on. A change here changes the public interface."""

from __future__ import annotations

import inspect
import subprocess
import sys

import kvstore
from kvstore import BlockingKVStore, BlockLayout, GetReport, HitPlan, KVStore, Namespace, PutReport

SURFACE = {
    "BlockLayout", "BlockingKVStore", "Chain", "Config", "EfsError", "ForkedStore", "GetReport", "HitPlan", "Image",
    "InvalidArgument", "KVStore", "Locked", "Namespace", "NodeInfo", "PutReport", "ReplayCost", "Segment", "Setting",
    "SettingError", "StoreClosed", "StoreNotFound", "Tenant", "UnsupportedUrl", "V41_FLASH", "parse_size", "plan_hit",
    "replay_cost", "snapshot_after_decode", "snapshot_after_prefill", "snapshot_for_regeneration",
    "storable_after_decode", "storable_after_prefill", "store_root", "tokens_to_load",
}  # fmt: skip


def parameters(function: object) -> list[str]:
    signature = inspect.signature(function)  # type: ignore[arg-type]
    return [f"{'*' if parameter.kind is parameter.KEYWORD_ONLY else ''}{name}"
            for name, parameter in signature.parameters.items() if name != "self"]


def test_public_names() -> None:
    assert set(kvstore.__all__) == SURFACE
    assert all(hasattr(kvstore, name) for name in SURFACE)


def test_verbs_of_both_stores_take_the_same_arguments() -> None:
    for store in (KVStore, BlockingKVStore):
        assert parameters(store.match) == ["chain", "*strict", "*deadline_ms"]
        assert parameters(store.get_into) == ["chain", "out", "*on_segment", "*deadline_ms"]
        assert parameters(store.put) == ["chain", "blocks", "*deadline_ms"]
        assert parameters(store.namespace) == ["*model", "*weights", "*layout", "*parallel", "*group", "*tenant"]
        assert parameters(store.close) == []
    assert parameters(KVStore.open) == parameters(KVStore.blocking) == ["url", "*config"]


def test_arguments_of_keys_and_plans() -> None:
    assert parameters(Namespace) == [
        "model", "weights", "layout", "parallel", "group", "tenant", "generation", "secret",
    ]  # fmt: skip
    assert parameters(Namespace.chain) == ["tokens", "*images", "*lora", "*salt"]
    assert parameters(Namespace.bind) == ["engine_hashes", "start", "*run_head"]
    assert parameters(BlockLayout.opaque) == ["block_bytes", "block_tokens"]
    assert parameters(kvstore.plan_hit) == ["length", "blocks_present", "snapshot_positions"]


def test_fields_of_reports() -> None:
    assert parameters(HitPlan) == ["matched", "hit", "replay", "suffix"]
    assert parameters(PutReport) == ["acked", "already", "failed", "at_risk", "why"]
    assert parameters(GetReport) == [
        "blocks", "ok", "rebuilt", "hedged", "corrupt", "missing", "raced", "bytes", "seconds",
    ]  # fmt: skip


def test_the_store_does_not_import_torch() -> None:
    check = "import sys, kvstore; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0
