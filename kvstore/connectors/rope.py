"""Kinds of rotary positions in a model's configuration: with which of them a token's KV depends on its position alone.

Some kinds choose their frequencies by the length of a sequence, of those before it, or of the longest one that an
engine takes. No key of a block holds that, so who names blocks must know.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

STATIC_ROPE: Final = frozenset({"default", "linear", "llama3", "yarn", "proportional"})
"""Frequencies that the configuration alone decides. Of a kind that is not here nothing is known."""


def length_bound_rope(settings: Mapping[str, Any]) -> list[str]:
    """Kinds of rotary positions in a configuration, and in those nested in it, that are not static; sorted."""
    return sorted(_kinds_in(settings) - STATIC_ROPE)


def _kinds_in(settings: Mapping[str, Any]) -> set[str]:
    found: set[str] = set()
    for name, value in settings.items():
        if isinstance(value, Mapping):
            found |= _kinds_of(value) if name in ("rope_parameters", "rope_scaling") else _kinds_in(value)
    return found


def _kinds_of(rope: Mapping[str, Any]) -> set[str]:
    """Kinds in one table of rotary parameters, which may have a table for each type of layer."""
    kind = rope.get("rope_type", rope.get("type"))
    found = set() if kind is None else {str(kind)}
    for value in rope.values():
        if isinstance(value, Mapping):
            found |= _kinds_of(value)
    return found
