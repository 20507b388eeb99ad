"""Connector A: the store behind vLLM's own prefix cache, by vLLM's connector interface (version 1).

vLLM makes one connector in the scheduler's process and one in each worker's. A worker knows how its pages lie, so it
makes the namespaces and hands them to the scheduler in vLLM's handshake. What the two then do stands in
`kvstore.connectors.paged`: `Scheduling` and `PageTransfers`. This module translates.

*Loads are asynchronous and fail as a whole.* With several KV groups vLLM cannot be told single bad blocks, so a failed
load is reported as a failed receive; vLLM forgets the pages and asks again, and `Scheduling` then offers what is left.
That needs kv_load_failure_policy "recompute"; anything else ends requests, and is refused at the start.

*A reset ends the use of the store.* vLLM asks for one when weights were replaced, and the names of blocks hold the
weights of the start. The scheduler then asks, loads and saves nothing more, and tells the workers with the next step:
a load under way counts as failed, and a save that has not begun is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.v1.core.kv_cache_utils import resolve_kv_cache_block_sizes

from efs.errors import EfsError, InvalidArgument
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.jobs import LoadResult, StepJobs
from kvstore.connectors.paged.link import LazyStore
from kvstore.connectors.paged.pages import group_pages
from kvstore.connectors.paged.scheduling import Scheduling, SpaceTable
from kvstore.connectors.paged.settings import read_settings
from kvstore.connectors.paged.transfers import PageSpace, PageTransfers
from kvstore.connectors.vllm.identity import (
    RESET,
    fingerprint,
    group_of,
    kind_of,
    opener,
    parallel_of,
    tenant_of,
    unsupported,
    weights_name,
)
from kvstore.keys import Namespace

_LOG: Final = logging.getLogger(__name__)
IDLE_WAIT_S: Final = 0.005
"""Most that a step with nothing to compute waits for a load: it leaves the processor to the load."""


@dataclass
class KVStoreMetadata(KVConnectorMetadata):
    """Scheduler to workers, every step. reset: the store is not used any more."""

    jobs: StepJobs = field(default_factory=StepJobs)
    reset: bool = False


@dataclass
class KVStoreHandshake(KVConnectorHandshakeMetadata):
    """A worker's namespaces, one for each KV group."""

    namespaces: tuple[Namespace, ...]


@dataclass
class KVStoreReport(KVConnectorWorkerMetadata):
    """Workers to scheduler: loads that failed."""

    failed: tuple[LoadResult, ...]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        assert isinstance(other, KVStoreReport)
        return KVStoreReport(self.failed + other.failed)


class KVStoreStats(KVConnectorStats):
    """Counts of `kvstore.connectors.paged.counts` since the last step."""

    data: dict[str, int]

    def reset(self) -> None:
        self.data = {}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, amount in other.data.items():
            self.data[name] = self.data.get(name, 0) + amount
        return self

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data


class KVStoreMetrics(KVConnectorPromMetrics):
    """One Prometheus counter, a label value for each count."""

    def __init__(self, vllm_config: Any, metric_types: Any, labelnames: list[str],
                 per_engine_labelvalues: dict[int, list[object]]) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counter = self._counter_cls(
            name="vllm:kvstore", documentation="Counts of the KV store's connector.", labelnames=[*labelnames, "what"],
        )

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        for name, amount in transfer_stats_data.items():
            self._counter.labels(*self.per_engine_labelvalues[engine_idx], name).inc(amount)


class KVStoreConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            raise InvalidArgument('kv_load_failure_policy must be "recompute": a miss must not end a request')
        self._settings = read_settings(self._kv_transfer_config.kv_connector_extra_config)
        self._counts = Counts()
        self._store: LazyStore | None = None
        self._scheduling: Scheduling | None = None
        self._transfers: PageTransfers | None = None
        self._spaces: tuple[PageSpace, ...] = ()
        self._failed: list[LoadResult] = []
        self._reset = False
        reason = "the setting bypass" if self._settings.config.bypass else unsupported(vllm_config, kv_cache_config)
        self._active = reason is None
        if reason is not None:
            _LOG.warning("the KV store is not used: %s", reason)

    @property
    def requires_kv_delivery(self) -> bool:
        """A block that was not stored is a miss later, nothing more."""
        return False

    # -- workers

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Make the namespaces and open the store. A cache that cannot be used turns the connector off."""
        if not self._active:
            return
        try:
            spaces = self._page_spaces(kv_caches)
        except (EfsError, OSError) as error:
            _LOG.warning("the KV store is not used: %s", error)
            self._active = False
            return
        self._spaces = spaces
        self._store = LazyStore(opener(self._settings), self._counts)
        self._store.open()
        self._transfers = PageTransfers(self._store, spaces, self._settings, self._counts)

    def _page_spaces(self, kv_caches: Mapping[str, torch.Tensor]) -> tuple[PageSpace, ...]:
        config, settings = self._vllm_config, self._settings
        weights, tenant = weights_name(config, settings), tenant_of(settings)
        spaces = []
        for index, group in enumerate(self._kv_cache_config.kv_cache_groups):
            pages = group_pages(kv_caches, group.layer_names, pages=self._kv_cache_config.num_blocks,
                                block_tokens=group.kv_cache_spec.block_size,
                                kind=kind_of(config, group.layer_names))
            namespace = Namespace(
                fingerprint(config), weights, pages.layout, parallel_of(config), index,
                None if tenant is None else tenant.name, 0 if tenant is None else tenant.generation,
                None if tenant is None else tenant.secret,
            )
            spaces.append(PageSpace(namespace, pages))
        return tuple(spaces)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return KVStoreHandshake(tuple(space.namespace for space in self._spaces)) if self._spaces else None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._get_connector_metadata()
        if self._transfers is not None and isinstance(metadata, KVStoreMetadata):
            if metadata.reset:
                self._transfers.give_up()
            for job in metadata.jobs.loads:
                self._transfers.load(job)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while it is computed with."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Saved are whole blocks, when the step has been computed."""

    def wait_for_save(self) -> None:
        metadata = self._get_connector_metadata()
        if self._transfers is not None and isinstance(metadata, KVStoreMetadata):
            for job in metadata.jobs.saves:
                self._transfers.save(job)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        if self._transfers is None:
            return KVConnectorTransferResults()
        metadata = self._get_connector_metadata()
        idle = isinstance(metadata, KVStoreMetadata) and metadata.jobs.idle
        ended = self._transfers.finished(IDLE_WAIT_S if idle else 0.0)
        self._failed = [result for result in ended if not result.ok]
        return KVConnectorTransferResults(
            finished_recving={result.request_id for result in ended},
            failed_recving={result.request_id for result in self._failed},
        )

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        failed, self._failed = tuple(self._failed), []
        return KVStoreReport(failed) if failed else None

    # -- scheduler

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        specs = [group.kv_cache_spec for group in self._kv_cache_config.kv_cache_groups]
        ranks = [found.namespaces for _, found in sorted(metadata.items())
                 if isinstance(found, KVStoreHandshake) and len(found.namespaces) == len(specs)]
        world = self._vllm_config.parallel_config.world_size
        if not self._active or self._reset or len(ranks) != world:
            _LOG.warning("the KV store is not used: %d of %d workers can", len(ranks), world)
            return
        groups = [group_of(spec) for spec in specs]
        align, hash_tokens = resolve_kv_cache_block_sizes(self._kv_cache_config, self._vllm_config)
        self._store = LazyStore(opener(self._settings), self._counts)
        self._store.open()
        table = SpaceTable(tuple(group for group in groups if group is not None), tuple(ranks), hash_tokens, align)
        self._scheduling = Scheduling(self._store, table, self._settings, self._counts)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        if self._scheduling is None or self._reset:
            return 0, False
        tokens = self._scheduling.matched(request, num_computed_tokens)
        return tokens, bool(tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if self._scheduling is not None and not self._reset:
            self._scheduling.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        if self._scheduling is None or self._reset:
            return KVStoreMetadata(reset=self._reset)
        state = scheduler_output.kv_connector_block_state
        return KVStoreMetadata(self._scheduling.step(scheduler_output.num_scheduled_tokens, state.get_block_ids))

    def update_connector_output(self, connector_output: Any) -> None:
        if self._scheduling is None:
            return
        report = connector_output.kv_connector_worker_meta
        if isinstance(report, KVStoreReport):
            for result in report.failed:
                self._scheduling.failed(result)
        for request_id in connector_output.finished_recving or ():
            self._scheduling.loaded(request_id)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Pages were copied when they were saved: none has to be kept."""
        if self._scheduling is not None:
            self._scheduling.ended(request.request_id)
        return False, None

    def reset_cache(self) -> bool:
        """The weights may be others than the names of blocks say: from now on, for good, the store is not used."""
        if self._scheduling is not None and not self._reset:
            self._counts.add("ended_by_reset")
            _LOG.warning("the KV store is not used any more: %s", RESET)
        self._reset = True
        return True

    # -- both

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        taken = self._counts.take()
        return KVStoreStats(data=taken) if taken else None

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats | None:
        return KVStoreStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(cls, vllm_config: Any, metric_types: Any, labelnames: list[str],
                           per_engine_labelvalues: dict[int, list[object]]) -> KVConnectorPromMetrics | None:
        assert PrometheusCounter in metric_types
        return KVStoreMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    def shutdown(self) -> None:
        """Store what waits, within the drain time; close. A second call does nothing."""
        transfers, self._transfers = self._transfers, None
        scheduling, self._scheduling = self._scheduling, None
        store, self._store = self._store, None
        if transfers is not None:
            transfers.close()
        if scheduling is not None:
            scheduling.close()
        if store is not None:
            store.close()
            _LOG.info("the KV store's counts: %s", self._counts.total)
