"""After vLLM has reset a connector, which may mean other weights, the store is not used any more."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from kvstore.connectors.paged.jobs import LoadJob, SaveJob, StepJobs
from tests.support.fakevllm import connectors

pytestmark = pytest.mark.engines

JOBS = StepJobs((LoadJob("r", ()),), (SaveJob("r", ()),), idle=False)
REQUEST = SimpleNamespace(request_id="r", lora_request=None, mm_features=(), kv_transfer_params=None)
CONTEXT = SimpleNamespace(req_id="r", kv_transfer_params=None)


@pytest.fixture(scope="module")
def package() -> Iterator[Any]:
    with connectors() as found:
        yield found


class Scheduling:
    """Promises sixteen tokens, and has a load and a save in every step."""

    def __init__(self) -> None:
        self.allocations = 0

    def matched(self, request: Any, local_tokens: int) -> int:
        return 16

    def allocated(self, request: Any, pages: Any, tokens: int) -> None:
        self.allocations += 1

    def step(self, scheduled: Any, pages_of: Any) -> StepJobs:
        return JOBS


class Transfers:
    """Of chunks or pages; notes what it is told to do."""

    busy = False

    def __init__(self) -> None:
        self.told: list[str] = []

    def load(self, *job: Any) -> None:
        self.told.append("load")

    def save(self, *job: Any) -> None:
        self.told.append("save")

    def give_up(self) -> None:
        self.told.append("give up")

    def finished(self) -> list[Any]:
        return [SimpleNamespace(job=1, load=True, ok=True, good=frozenset(), bytes=1, seconds=0.0)]


def connector(package: Any, tmp_path: Path) -> Any:
    config = SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_load_failure_policy="recompute", kv_connector_extra_config={"store": str(tmp_path / "cluster.toml")}),
        cache_config=SimpleNamespace(prefix_caching_hash_algo="sha256"), speculative_config=None,
        load_config=SimpleNamespace(load_format="auto"),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
    )
    return package.KVStoreConnector(config, "scheduler", SimpleNamespace(kv_cache_groups=[]))


def step(made: Any) -> Any:
    return made.build_connector_meta(SimpleNamespace(
        num_scheduled_tokens={}, kv_connector_block_state=SimpleNamespace(get_block_ids=None)))


def test_a_reset_scheduler_matches_loads_and_saves_nothing_for_good(
    package: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made, scheduling = connector(package, tmp_path), Scheduling()
    made._scheduling = scheduling
    assert made.get_num_new_matched_tokens(REQUEST, 0) == (16, True)
    assert (step(made).jobs, step(made).reset) == (JOBS, False)

    with caplog.at_level(logging.WARNING):
        assert [made.reset_cache(), made.reset_cache()] == [True, True]

    assert [record.getMessage().partition(":")[0] for record in caplog.records] == ["the KV store is not used any more"]
    assert made._counts.take() == {"ended_by_reset": 1}
    for _ in range(2):
        assert made.get_num_new_matched_tokens(REQUEST, 0) == (0, False)
        made.update_state_after_alloc(REQUEST, SimpleNamespace(get_block_ids=tuple), 16)
        assert (step(made).jobs, step(made).reset) == (StepJobs(), True)
    assert scheduling.allocations == 0


def test_a_worker_that_hears_of_a_reset_gives_up_what_is_under_way(package: Any, tmp_path: Path) -> None:
    made, transfers = connector(package, tmp_path), Transfers()
    made._transfers = transfers
    metadata = package.connector.KVStoreMetadata
    for each in (metadata(JOBS), metadata(reset=True)):
        made._get_connector_metadata = lambda each=each: each
        made.start_load_kv(None)
        made.wait_for_save()
    assert transfers.told == ["load", "save", "give up"]


def test_a_reset_of_a_connector_without_a_store_says_nothing(
    package: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert connector(package, tmp_path).reset_cache() is True
    assert caplog.records == []


def test_a_reset_tier_finds_and_stores_nothing_for_good(package: Any, tmp_path: Path) -> None:
    tier = package.KVStoreTier(None, memoryview(b""), "KVStoreTier", store=str(tmp_path / "cluster.toml"))
    transfers = Transfers()
    tier._transfers = transfers
    tier._lookups = SimpleNamespace(lookup=lambda request, place: True)
    tier._place = lambda key, request, context: (0, 0)
    tier.on_new_request(CONTEXT)
    assert tier.lookup(b"key", CONTEXT) == "hit"
    tier._jobs[1] = ("r", {})
    offloading = package.tier.KVStoreOffloadingConnector.__new__(package.tier.KVStoreOffloadingConnector)
    offloading.resets, offloading._tiers = 0, [tier]

    assert [offloading.reset_cache(), offloading.reset_cache()] == [True, True]

    assert offloading.resets == 2
    assert transfers.told == ["give up"]
    assert tier._counts.take() == {"ended_by_reset": 1}
    assert [(result.number, result.ok) for result in tier.get_finished_jobs()] == [(1, False)]
    tier.on_new_request(CONTEXT)
    assert tier.lookup(b"key", CONTEXT) == "miss"
    tier.submit_store(SimpleNamespace(job_id=2, req_context=CONTEXT))
    tier.submit_load(SimpleNamespace(job_id=3, req_context=CONTEXT))
    assert transfers.told == ["give up"]
