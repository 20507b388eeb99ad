"""Settings of every test: examples of property tests are not timed, because the machine is shared."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "kvstore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvstore")
