"""Connectors: the few functions that move an engine's KV between its own memory and the store.

Each connector is a module that imports its engine; importing this package imports none of them.
"""
