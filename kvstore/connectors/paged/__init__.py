"""What connectors of engines with paged KV caches share, without knowing any engine.

An engine of this kind keeps the KV of a block of tokens in *pages* that a block table names, has one or several
groups of layers with tables of their own, and names the blocks of a prompt by chained hashes. It is served in two
places: where it schedules (`scheduling`: what is stored, what to load into which pages, what to save) and where it
computes (`transfers`: bytes between pages and store, on threads of their own). The two may be different processes;
the values of `jobs` go between them. `hits` decides without I/O, `pages` knows how bytes lie, `link` reaches the
store.
"""
