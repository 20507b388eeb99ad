"""An erasure-coded, hedged, verified object store over twelve nodes. Knows keys, shards and nodes; nothing of tokens."""
