"""vLLM's tiered offloading on a machine without a GPU: chunks are copied between pages and host cache by `memcpy`.

vLLM refuses its offloading worker on CPUs. Everything else of it runs, so tests put this worker in its place: it has
the same memory (`SharedOffloadRegion`), the same order of bytes, and the same answers, only sooner.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class MemcpyTieringSpec(TieringOffloadingSpec):
    """TieringOffloadingSpec, with a worker that needs no GPU."""

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        region = SharedOffloadRegion(
            engine_id=self._engine_id, num_chunks=self.num_chunks, rank=self.config.parallel.rank,
            kv_bytes_per_chunk=self.kv_bytes_per_chunk, cpu_page_size=self.cpu_page_size_per_worker,
        )
        return MemcpyWorker(kv_caches, self.blocks_per_chunk, region)


class MemcpyWorker(OffloadingWorker):
    """Copies at once; vLLM learns of it in its next step."""

    def __init__(self, kv_caches: Any, blocks_per_chunk: int, region: SharedOffloadRegion) -> None:
        self._region = region
        self._blocks_per_chunk = blocks_per_chunk
        self._refs = kv_caches.group_data_refs
        self._pages = [tensor.tensor.view(torch.int8).view(-1, tensor.page_size_bytes) for tensor in kv_caches.tensors]
        self._chunks = [region.create_next_worker_view(tensor.page_size_bytes * blocks_per_chunk)
                        for tensor in kv_caches.tensors]
        self._ended: list[TransferResult] = []

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, to_chunks=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, dst_spec, src_spec, to_chunks=False)

    def _copy(self, job_id: int, pages: Any, chunks: Any, *, to_chunks: bool) -> bool:
        page_ids, chunk_ids = list(map(int, pages.block_ids)), list(map(int, chunks.block_ids))
        size = 0
        with torch.inference_mode():
            for refs, count, first in zip(self._refs, pages.group_sizes, pages.block_indices, strict=True):
                skipped = first % self._blocks_per_chunk
                for at in range(count):
                    chunk, part = divmod(skipped + at, self._blocks_per_chunk)
                    for ref in refs:
                        page = self._pages[ref.tensor_idx][page_ids[at]]
                        row = self._chunks[ref.tensor_idx][chunk_ids[chunk]]
                        row = row[part * len(page) : part * len(page) + ref.page_size_bytes]
                        page = page[: ref.page_size_bytes]
                        _ = row.copy_(page) if to_chunks else page.copy_(row)
                        size += ref.page_size_bytes
                page_ids = page_ids[count:]
                chunk_ids = chunk_ids[-(-(count + skipped) // self._blocks_per_chunk) if count else 0 :]
        self._ended.append(TransferResult(job_id, True, size, 0.0))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None:
        """Nothing is under way."""

    def shutdown(self) -> None:
        self._pages.clear()
        self._chunks.clear()
        self._region.cleanup()
