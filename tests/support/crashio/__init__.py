"""Crash consistency: what a store's life did to its files, and everything that a crash could have left of it.

`log` records, `disk` is a model of files that lose what was not synced, `crashes` says which states a crash at some
operation can leave, `life` says what must and what may be there, `oracle` opens such a state and looks.
"""
