"""The store as vLLM's KV cache backend, written for vLLM 0.32: two ways in, one core.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
        "kv_connector": "KVStoreConnector", "kv_connector_module_path": "kvstore.connectors.vllm", "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": "/var/lib/kv", "start": true, "capacity": "100GiB"}}'

`connector`: the store moves bytes between the engine's own pages and its nodes. `tier`: vLLM moves bytes between pages
and a cache of its own in host memory, and the store stands behind that. `identity`: what both know of an engine.
"""

from kvstore.connectors.vllm.connector import KVStoreConnector
from kvstore.connectors.vllm.tier import KVStoreOffloadingConnector, KVStoreTier

__all__ = ["KVStoreConnector", "KVStoreOffloadingConnector", "KVStoreTier"]
