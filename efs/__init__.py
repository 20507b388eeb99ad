"""An erasure-coded, hedged, verified object store over twelve nodes. Knows keys and shards; nothing of tokens."""
