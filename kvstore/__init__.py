"""A KV cache store for LLM inference: blocks of tokens keyed by hash chains over `efs`."""

from efs.errors import (
    EfsError,
    InvalidArgument,
    Locked,
    StoreClosed,
    StoreNotFound,
)
from efs.types import GetReport, NodeInfo, PutReport
from kvstore.config import Config, Setting, SettingError, parse_size
from kvstore.hit import (
    HitPlan,
    ReplayCost,
    plan_hit,
    replay_cost,
    snapshot_after_decode,
    snapshot_after_prefill,
    snapshot_for_regeneration,
    storable_after_decode,
    storable_after_prefill,
    tokens_to_load,
)
from kvstore.keys import Chain, Image, Namespace
from kvstore.layout import V41_FLASH, BlockLayout, Segment
from kvstore.store import BlockingKVStore, ForkedStore, KVStore, UnsupportedUrl, store_root
from kvstore.tenants import Tenant

__all__ = [
    "V41_FLASH",
    "BlockLayout",
    "BlockingKVStore",
    "Chain",
    "Config",
    "EfsError",
    "ForkedStore",
    "GetReport",
    "HitPlan",
    "Image",
    "InvalidArgument",
    "KVStore",
    "Locked",
    "Namespace",
    "NodeInfo",
    "PutReport",
    "ReplayCost",
    "Segment",
    "Setting",
    "SettingError",
    "StoreClosed",
    "StoreNotFound",
    "Tenant",
    "UnsupportedUrl",
    "parse_size",
    "plan_hit",
    "replay_cost",
    "snapshot_after_decode",
    "snapshot_after_prefill",
    "snapshot_for_regeneration",
    "storable_after_decode",
    "storable_after_prefill",
    "store_root",
    "tokens_to_load",
]
