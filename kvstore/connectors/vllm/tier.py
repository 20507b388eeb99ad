"""Tier B: the store behind vLLM's cache in host memory, as a secondary tier of its tiered offloading.

    vllm serve MODEL --prefix-caching-hash-algo sha256_cbor --kv-transfer-config '{
        "kv_connector": "KVStoreOffloadingConnector", "kv_connector_module_path": "kvstore.connectors.vllm",
        "kv_role": "kv_both", "kv_connector_extra_config": {
            "spec_name": "TieringOffloadingSpec", "cpu_bytes_to_use": 17179869184, "secondary_tiers": [{
                "type": "KVStoreTier", "module_path": "kvstore.connectors.vllm",
                "store": "/var/lib/kv", "start": true, "capacity": "100GiB"}]}}'

vLLM copies chunks between the device and its host cache, knows windows, pins what is under way, and decides what is
loaded; the tier sees rows of bytes. It lives in the scheduler's process, and no call of it waits: `ChunkLookups` asks,
`ChunkTransfers` moves, both on threads.

*Why a connector of its own.* A tier is told a model's path and the sizes of its cache, which is not enough to name
blocks by: how vLLM runs the model, how workers lay out pages and which hash made the keys would be missing, and wrong
bytes could be found under right keys. `KVStoreOffloadingConnector` is vLLM's OffloadingConnector, and hands that to the
tier before the first request: the workers' part by vLLM's handshake. It also marks requests that are left alone. Under
vLLM's own connector the tier does nothing, and says so.

A chunk holds the parts of all workers, so parallel sizes are in its layout and no rank is. The chunks of a sliding
window may leave out blocks that no token at their end can see, which is safe where a chunk is one block, so models
with windows are served with one block in a chunk only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from hashlib import blake2b
from itertools import islice
from typing import Any, ClassVar, Final

import numpy as np
import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import (
    Locality,
    LookupResult,
    Medium,
    OffloadingCounterMetadata,
    OffloadingMetricMetadata,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
    get_offload_block_hash,
    get_offload_group_idx,
)
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob
from vllm.v1.kv_offload.tiering.manager import TieringOffloadingManager

from efs.errors import EfsError, InvalidArgument
from efs.limits import MAX_BLOCK_BYTES
from kvstore.connectors.paged.chunklookups import ChunkLookups, Place, RequestChunks
from kvstore.connectors.paged.chunks import ChunkTransfers
from kvstore.connectors.paged.counts import Counts
from kvstore.connectors.paged.hits import Group
from kvstore.connectors.paged.jobs import Span
from kvstore.connectors.paged.link import LazyStore
from kvstore.connectors.paged.pages import layer_rows
from kvstore.connectors.paged.prefills import Prefills
from kvstore.connectors.paged.savings import Savings
from kvstore.connectors.paged.scheduling import BYPASS, left_alone
from kvstore.connectors.paged.settings import read_settings
from kvstore.connectors.vllm.identity import (
    RESET,
    fingerprint,
    group_of,
    kind_of,
    opener,
    tenant_of,
    unsupported,
    weights_name,
)
from kvstore.keys import Namespace
from kvstore.layout import BlockLayout, Segment

_LOG: Final = logging.getLogger(__name__)
COUNTER: Final = "vllm:kvstore"
POSITIONS: Final = "_offload_key_positions"
"""Where vLLM keeps the place of each chunk of a request. Its public way to ask needs a key, and the head of a run is
the key of another chunk, which nobody may have asked for."""


@dataclass
class PageFacts(KVConnectorHandshakeMetadata):
    """A worker to the scheduler: how the pages lie whose bytes its part of a chunk is."""

    text: str


@dataclass(frozen=True, slots=True)
class ChunkSpace:
    """groups, namespaces: by vLLM's number of a KV group; a group's block is a chunk."""

    groups: Mapping[int, Group]
    namespaces: Mapping[int, Namespace]


class KVStoreTier(SecondaryTierManager):
    """See the module docstring. The settings are those of the connector, beside vLLM's own of a tier."""

    medium: ClassVar[Medium] = Medium.STORAGE

    def __init__(self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str,
                 backpressure_detector: Any = None, locality: str | None = None, **settings: Any) -> None:
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if locality is None else Locality(locality)
        self.settings = read_settings(settings)
        self._counts = Counts()
        self.savings = Savings(self._counts)
        self._link: LazyStore | None = None
        self._space: ChunkSpace | None = None
        self._lookups: ChunkLookups | None = None
        self._transfers: ChunkTransfers | None = None
        self._requests: dict[str, RequestChunks] = {}
        self._jobs: dict[int, tuple[str, dict[Place, bytes]]] = {}
        self._refused: list[JobResult] = []
        self._ended = False

    @property
    def spec(self) -> Any:
        """vLLM's description of the offloading that this tier belongs to."""
        return self._offloading_spec

    def begin(self, space: ChunkSpace) -> None:
        """Open the store; from now on it is used."""
        slots = np.asarray(self._primary_kv_view).view(np.uint8)
        self._space = space
        self._link = LazyStore(opener(self.settings), self._counts)
        self._link.open()
        self._lookups = ChunkLookups(self._link, space.groups, space.namespaces, self.settings, self._counts)
        self._transfers = ChunkTransfers(self._link, space.namespaces, slots, self.settings, self._counts)

    def end(self) -> None:
        """The weights may be others than the names of chunks say: from now on, for good, nothing is found or stored."""
        if self._transfers is not None and not self._ended:
            self._counts.add("ended_by_reset")
            self._transfers.give_up()
            _LOG.warning("the KV store is not used any more: %s", RESET)
        self._ended = True
        self._requests.clear()

    # -- requests

    def leaves_alone(self, reason: str) -> None:
        """A request in which the store has no part has come."""
        self._counts.add(f"bypassed_{reason}")

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        if self._lookups is not None and not self._ended and not _bypassed(req_context):
            self._requests[req_context.req_id] = RequestChunks()
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._requests.pop(req_context.req_id, None)

    def lookup(self, key: bytes, req_context: ReqContext) -> LookupResult:
        request = self._requests.get(req_context.req_id)
        if request is None or self._lookups is None:
            return LookupResult.MISS
        place = self._place(key, request, req_context)
        there = None if place is None else self._lookups.lookup(request, place)
        if place is None or there is False:
            return LookupResult.MISS
        return LookupResult.RETRY if there is None else LookupResult.HIT

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        if self._lookups is not None:
            self._lookups.flush()

    def _place(self, key: bytes, request: RequestChunks, req_context: ReqContext) -> Place | None:
        """Where in the sequence a chunk stands; None when it is none of this request's whole chunks."""
        assert self._space is not None
        group = get_offload_group_idx(key)
        end = req_context.get_offload_key_position(key)
        if end is None or end % self._space.groups[group].block_tokens:
            return None
        position = end // self._space.groups[group].block_tokens - 1
        if position >= request.known(group):
            positions: dict[bytes, int] = getattr(req_context, POSITIONS)
            for chunk, tokens in islice(positions.items(), request.seen, None):
                number = get_offload_group_idx(chunk)
                if tokens % self._space.groups[number].block_tokens == 0:
                    request.follow(number, tokens // self._space.groups[number].block_tokens - 1,
                                   get_offload_block_hash(chunk))
            request.seen = len(positions)
        known = position < request.known(group) and request.hash_at((group, position)) == get_offload_block_hash(key)
        return (group, position) if known else None

    # -- jobs

    def submit_load(self, job_metadata: TransferJob) -> None:
        spans = self._spans(job_metadata)
        if self._transfers is None or spans is None:
            self._refused.append(JobResult(job_metadata.job_id, success=False))
            return
        self._counts.add("hit_tokens", self._tokens(_places(spans)))
        self._transfers.load(job_metadata.job_id, spans)

    def submit_store(self, job_metadata: TransferJob) -> None:
        spans = self._spans(job_metadata)
        if self._transfers is None or spans is None:
            self._refused.append(JobResult(job_metadata.job_id, success=False, transfer_time=0.0, transfer_bytes=0))
            return
        self._transfers.save(job_metadata.job_id, spans)

    def _spans(self, job: TransferJob) -> list[Span] | None:
        """The chunks of a job in stretches, by group and position; None when the store has no part in it."""
        request = self._requests.get(job.req_context.req_id)
        if request is None:
            return None
        slots: dict[Place, int] = {}
        hashes: dict[Place, bytes] = {}
        for key, slot in zip(job.keys, job.chunk_ids, strict=True):
            place = self._place(key, request, job.req_context)
            if place is None:
                return None
            slots[place] = int(slot)
            hashes[place] = get_offload_block_hash(key)
        self._jobs[job.job_id] = (job.req_context.req_id, hashes)
        stretches: list[list[Place]] = []
        for group, position in sorted(slots):
            if stretches and stretches[-1][-1] == (group, position - 1):
                stretches[-1].append((group, position))
            else:
                stretches.append([(group, position)])
        return [request.span(*stretch[0], tuple(slots[place] for place in stretch)) for stretch in stretches]

    def get_finished_jobs(self) -> Iterable[JobResult]:
        results, self._refused = self._refused, []
        if self._transfers is None:
            return results
        for ended in self._transfers.finished():
            request_id, hashes = self._jobs.pop(ended.job)
            if self._ended:
                results.append(JobResult(ended.job, False, transfer_time=ended.seconds, transfer_bytes=ended.bytes))
                continue
            keys: list[bytes] = []
            if ended.load and request_id in self._requests:
                if ended.ok:
                    self.savings.loaded(self._tokens(hashes), ended.seconds)
                else:
                    self.savings.failed(ended.seconds)
                lost = {place: chunk for place, chunk in hashes.items() if place not in ended.good}
                self._counts.add("lost_tokens", self._tokens(set(hashes)) - self._tokens(set(ended.good)))
                assert self._lookups is not None
                self._lookups.failed(self._requests, lost)
                keys = [chunk + group.to_bytes(4, "big") for (group, position), chunk in hashes.items()
                        if (group, position) in ended.good]
            results.append(JobResult(ended.job, ended.ok, successful_keys=keys or None, transfer_time=ended.seconds,
                                     transfer_bytes=ended.bytes))
        return results

    def _tokens(self, places: Iterable[Place]) -> int:
        """Tokens of a prefix that these chunks stand for: those of one group that needs every chunk of it."""
        assert self._space is not None
        groups = self._space.groups
        counted = next((number for number, group in groups.items() if group.window_tokens is None), min(groups))
        return sum(groups[counted].block_tokens for group, _ in places if group == counted)

    def has_pending_work(self) -> bool:
        return bool(self._refused) or (self._transfers is not None and self._transfers.busy)

    def drain_jobs(self) -> None:
        if self._transfers is not None:
            self._transfers.drain()

    # -- counts and the end

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingMetricMetadata]:
        return {COUNTER: OffloadingCounterMetadata("Counts of the KV store's connector.", ("what",))}

    def get_stats(self) -> OffloadingConnectorStats | None:
        stats = OffloadingConnectorStats()
        for name, amount in self._counts.take().items():
            stats.increase_counter(COUNTER, amount, (name,))
        return None if stats.is_empty() else stats

    def shutdown(self) -> None:
        """Store what waits, within the drain time; close. A second call does nothing. Raises when a slot is still in
        use: then vLLM must not take the memory away."""
        transfers, self._transfers = self._transfers, None
        lookups, self._lookups = self._lookups, None
        link, self._link = self._link, None
        if lookups is not None:
            lookups.close()
        free = transfers is None or transfers.close()
        if link is not None:
            link.close()
            _LOG.info("the KV store's counts: %s", self._counts.total)
        if not free:
            raise RuntimeError("the KV store still uses vLLM's host cache")


def _places(spans: Iterable[Span]) -> Iterable[Place]:
    return ((span.group, position) for span in spans for position in range(span.start, span.stop))


def _bypassed(req_context: ReqContext) -> bool:
    return bool((req_context.kv_transfer_params or {}).get(BYPASS))


class KVStoreOffloadingConnector(OffloadingConnector):
    """vLLM's OffloadingConnector, which tells a `KVStoreTier` whose chunks it has; see the module docstring."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._facts: PageFacts | None = None
        self._tiers: list[KVStoreTier] = []
        self._measured: dict[str, Any] = {}
        self._prefills = Prefills(self._computed)
        if role == KVConnectorRole.SCHEDULER:
            manager = self.scheduler.manager
            if isinstance(manager, TieringOffloadingManager):
                self._tiers = [tier for tier in manager.secondary_tiers if isinstance(tier, KVStoreTier)]
            if not self._tiers:
                raise InvalidArgument('there is no KVStoreTier: spec_name must be "TieringOffloadingSpec", and '
                                      "secondary_tiers must have one")

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        super().register_kv_caches(kv_caches)
        if unsupported(self._vllm_config, self._kv_cache_config) is not None:
            return
        try:
            self._facts = PageFacts(_facts_of(self._vllm_config, self._kv_cache_config, kv_caches))
        except EfsError as error:
            _LOG.warning("the KV store is not used: %s", error)

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._facts

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        facts = [found.text for _, found in sorted(metadata.items()) if isinstance(found, PageFacts)]
        for tier in self._tiers:
            try:
                tier.begin(_space_of(self._vllm_config, self._kv_cache_config, tier, facts))
            except (EfsError, OSError) as error:
                _LOG.warning("the KV store is not used: %s", error)

    def reset_cache(self) -> bool | None:
        """Empty vLLM's own cache in host memory, and end the use of the store: vLLM asks when weights were replaced."""
        for tier in self._tiers:
            tier.end()
        emptied: bool | None = super().reset_cache()
        return emptied

    def on_new_request(self, request: Any) -> None:
        """Requests that the store must leave alone are marked for the tier, which does not see what they are."""
        reason = left_alone(request)
        if reason is not None:
            for tier in self._tiers:
                tier.leaves_alone(reason)
            request.kv_transfer_params = {**(request.kv_transfer_params or {}), BYPASS: True}
        else:
            self._measured[request.request_id] = request
        super().on_new_request(request)

    # What a load saves is what computing takes, and a tier does not see a prompt being computed.

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        scheduled = scheduler_output.num_scheduled_tokens
        self._prefills.step({name: self._measured[name] for name in scheduled if name in self._measured})
        return super().build_connector_meta(scheduler_output)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._prefills.ended(request.request_id)
        self._measured.pop(request.request_id, None)
        finished: tuple[bool, dict[str, Any] | None] = super().request_finished_all_groups(request, block_ids)
        return finished

    def _computed(self, tokens: int, seconds: float) -> None:
        for tier in self._tiers:
            tier.savings.computed(tokens, seconds)


def _facts_of(config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor]) -> str:
    """How a worker's pages lie, as text: of each layer its group, its kind, the order of a page, and with which other
    layers it shares memory. InvalidArgument when that cannot be told."""
    lines = []
    apart = next((name for name, cache in caches.items() if not isinstance(cache, torch.Tensor)), None)
    if apart is not None:
        raise InvalidArgument(f"layer {apart} has no cache that is one tensor")
    for index, group in enumerate(kv_cache_config.kv_cache_groups):
        for name in group.layer_names:
            rows = layer_rows(name, caches[name], kv_cache_config.num_blocks)
            lines.append(f"{index} {name} {kind_of(config, [name])} {rows.order} {rows.dtype}")
    # Layers of several groups may share memory: then a chunk of one stands where that of the other would.
    shared: dict[int, int] = {}
    for name, cache in sorted(caches.items()):
        lines.append(f"{name} {shared.setdefault(cache.data_ptr(), len(shared))}")
    return "\n".join(lines)


def _space_of(config: Any, kv_cache_config: Any, tier: KVStoreTier, facts: list[str]) -> ChunkSpace:
    """Groups and namespaces of a tier's chunks. InvalidArgument says why the engine is not served."""
    offloading = tier.spec.config
    reason = "the setting bypass" if tier.settings.config.bypass else unsupported(config, kv_cache_config)
    if reason is not None:
        raise InvalidArgument(reason)
    if len(facts) != config.parallel_config.world_size:
        raise InvalidArgument(f"{len(facts)} of {config.parallel_config.world_size} workers can")
    if tier.block_size_bytes > MAX_BLOCK_BYTES:
        raise InvalidArgument(f"a chunk has {tier.block_size_bytes} bytes, more than {MAX_BLOCK_BYTES}")
    if POSITIONS not in {each.name for each in fields(ReqContext)}:
        raise InvalidArgument("this version of vLLM does not say where in a prompt a chunk stands")
    groups: dict[int, Group] = {}
    for each in offloading.groups:
        group = group_of(kv_cache_config.kv_cache_groups[each.group_id].kv_cache_spec)
        assert group is not None
        chunk_tokens = each.tokens_per_block * offloading.cache.blocks_per_chunk
        if group.window_tokens is None:
            groups[each.group_id] = Group(chunk_tokens)
        elif offloading.cache.blocks_per_chunk > 1:
            raise InvalidArgument("a chunk of several blocks, and a group with a sliding window")
        else:
            # As many whole chunks as vLLM wants to see: no part of the one before.
            groups[each.group_id] = Group(chunk_tokens, -(-group.window_tokens // chunk_tokens) * chunk_tokens + 1)
    return ChunkSpace(groups, _namespaces(config, tier, groups, facts))


def _namespaces(config: Any, tier: KVStoreTier, groups: Mapping[int, Group], facts: list[str]) -> dict[int, Namespace]:
    offloading, settings = tier.spec.config, tier.settings
    parallel = offloading.parallel
    told = "\n\n".join([
        f"{parallel.world_size} {parallel.tp_size} {parallel.pp_size} {offloading.cache.blocks_per_chunk} "
        f"{offloading.canonical_layout} {offloading.replicated_layout} {offloading.kv_cache_layout}", *facts,
    ])
    name = blake2b(told.encode(), digest_size=16, person=b"kvstore/chunk").hexdigest()
    weights, tenant = weights_name(config, settings), tenant_of(settings)
    return {
        number: Namespace(
            fingerprint(config), weights,
            BlockLayout(f"vllm-chunk/{name}", "bytes", group.block_tokens, (Segment("chunk", tier.block_size_bytes),),
                        name="vllm chunk"),
            (0, 1), number, None if tenant is None else tenant.name, 0 if tenant is None else tenant.generation,
            None if tenant is None else tenant.secret,
        )
        for number, group in groups.items()
    }
