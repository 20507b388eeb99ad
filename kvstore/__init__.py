"""A KV cache store for LLM inference: blocks of tokens keyed by hash chains over `efs`."""
