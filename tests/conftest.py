"""Settings of every test: examples of property tests are not timed, because the machine is shared; and `patient`."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

import efs.ask
import efs.fetch
import efs.hedge
import efs.writer
from efs.limits import MAX_DEADLINE_MS

settings.register_profile(
    "kvstore", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("kvstore")

_GRACES = (
    (efs.ask, "INITIAL_LAG_GRACE_MS"),
    (efs.fetch, "INITIAL_LAG_GRACE_MS"),
    (efs.hedge, "INITIAL_LAG_GRACE_MS"),
    (efs.hedge, "MIN_LAG_GRACE_MS"),
    (efs.hedge, "MAX_LAG_GRACE_MS"),
    (efs.writer, "PUT_LAG_GRACE_MS"),
)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No node is late: reads and puts of this process wait for each until their deadline.

    For tests that count what was rebuilt, hedged or at risk, over nodes that work: on a loaded machine one of them
    would be read around now and then, which is right and spoils the count.
    """
    for module, name in _GRACES:
        monkeypatch.setattr(module, name, float(MAX_DEADLINE_MS))
