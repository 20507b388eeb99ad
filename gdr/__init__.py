"""The engine side: KV blocks from host memory into device pages, layer by layer, under a forward pass."""
