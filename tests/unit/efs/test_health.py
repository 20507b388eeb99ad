"""Which nodes are asked, and for how long a failed one is left alone."""

from __future__ import annotations

import pytest

from efs.contract import Node
from efs.errors import EfsError, NodeFull, NodeReadOnly, NodeUnavailable
from efs.health import Health, NodeState
from efs.limits import MAX_PROBE_BACKOFF_MS, PROBE_BACKOFF_MS
from tests.support.clock import FakeClock
from tests.support.memorynode import MemoryNode


def make_health(absent: tuple[int, ...] = ()) -> tuple[Health, list[MemoryNode], FakeClock]:
    clock = FakeClock()
    twins = [MemoryNode(index, clock) for index in range(12)]
    nodes: list[Node | None] = [None if twin.node_index in absent else twin for twin in twins]
    return Health(nodes, clock), twins, clock


def test_a_node_without_history_serves() -> None:
    health, _, _ = make_health()
    assert health.readable() == health.writable() == list(range(12))


def test_an_absent_node_is_offline() -> None:
    health, _, _ = make_health(absent=(4,))
    assert health.state(4) is NodeState.OFFLINE
    assert 4 not in health.readable()
    assert 4 not in health.writable()


def test_a_hung_node_is_suspect_exactly_as_long_as_it_says_so() -> None:
    health, twins, _ = make_health()
    twins[3].hanging = True
    assert health.state(3) is NodeState.SUSPECT
    twins[3].hanging = False
    assert health.state(3) is NodeState.SERVING


def test_the_back_off_doubles_with_each_failure_in_a_row_up_to_its_bound() -> None:
    health, _, clock = make_health()
    expected = PROBE_BACKOFF_MS
    for _ in range(12):
        health.note_failure(2, NodeUnavailable(2, "its disk fails"))
        clock.advance((expected - 1) / 1000)
        assert health.state(2) is NodeState.SUSPECT
        clock.advance(2 / 1000)
        assert health.state(2) is NodeState.SERVING
        expected = min(2 * expected, MAX_PROBE_BACKOFF_MS)
    assert expected == MAX_PROBE_BACKOFF_MS


def test_calls_that_fail_together_are_one_failure() -> None:
    health, _, clock = make_health()
    for _ in range(50):
        health.note_failure(2, NodeUnavailable(2, "its disk fails"))
    clock.advance((PROBE_BACKOFF_MS + 1) / 1000)
    assert health.state(2) is NodeState.SERVING


def test_an_answer_ends_the_back_off_and_its_history() -> None:
    health, _, clock = make_health()
    for _ in range(4):
        health.note_failure(2, NodeUnavailable(2, "its disk fails"))
        clock.advance(MAX_PROBE_BACKOFF_MS / 1000)
    health.note_answer(2)
    health.note_failure(2, NodeUnavailable(2, "its disk fails"))
    clock.advance((PROBE_BACKOFF_MS + 1) / 1000)
    assert health.state(2) is NodeState.SERVING


def test_a_read_only_node_is_read_and_not_written() -> None:
    health, _, clock = make_health()
    health.note_failure(5, NodeReadOnly(5, "fsync failed"))
    clock.advance(1_000)
    health.note_answer(5)
    assert health.state(5) is NodeState.READ_ONLY
    assert 5 in health.readable()
    assert 5 not in health.writable()


@pytest.mark.parametrize("error", [NodeFull(1, "no space"), EfsError("something about the request")])
def test_errors_about_a_request_say_nothing_about_the_node(error: EfsError) -> None:
    health, _, _ = make_health()
    health.note_failure(1, error)
    assert health.state(1) is NodeState.SERVING
