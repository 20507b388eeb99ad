"""Which rotary positions of a configuration depend on more than the place of a token."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.connectors.rope import length_bound_rope


@pytest.mark.parametrize(("settings", "kinds"), [
    ({}, []),
    ({"rope_scaling": None, "rope_theta": 1e4}, []),
    ({"rope_parameters": {"rope_theta": 1e4}}, []),
    ({"rope_parameters": {"rope_type": "llama3", "type": "mrope"}}, []),
    ({"rope_scaling": {"type": "yarn", "factor": 4.0}}, []),
    ({"rope_scaling": {"type": "su"}}, ["su"]),
    ({"rope_scaling": {"rope_type": "dynamic"}}, ["dynamic"]),
    ({"rope_parameters": {"full_attention": {"rope_type": "longrope"}, "sliding_attention": None}}, ["longrope"]),
    ({"text_config": {"rope_parameters": {"rope_type": "longrope"}}, "rope_scaling": {"type": "ntk"}},
     ["longrope", "ntk"]),
])
def test_kinds_that_are_not_static_are_found(settings: dict[str, Any], kinds: list[str]) -> None:
    assert length_bound_rope(settings) == kinds
