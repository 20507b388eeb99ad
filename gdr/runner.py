"""Runs a model's layers over pages, each layer behind the swap-in of its segment.

Forward pre-hooks on the decoder's layers are the only place where compute meets swap-in: before layer i runs, its
stream waits for the event of layer i's segment, and for nothing else. Later segments are still being copied then. A
hook that finds the prefix shortened or the request aborted raises out of the model; the pass is abandoned and leaves
nothing behind but bytes that the next one overwrites.

One thread runs passes at a time; hooks act only while it does.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from gdr.device import Device, Event, Stream
from gdr.errors import Aborted, InvalidEngineArgument
from gdr.formats import KvFormat
from gdr.limits import SHORTEST_WAIT_MS
from gdr.pagedcache import PagedCache
from gdr.prefix import PrefixLoad
from gdr.timeline import Timeline


@dataclass(slots=True)
class _Pass:
    """What the hooks need to know of the pass that is running."""

    stream: Stream
    load: PrefixLoad | None
    aborted: threading.Event
    marks: dict[int, Event] = field(default_factory=dict)


class LayerRunner:
    """The model with its hooks; `close` takes them off."""

    def __init__(self, model: PreTrainedModel, kv_format: KvFormat, device: Device, *,
                 timeline: Timeline | None = None) -> None:
        self.timeline = timeline
        self._model = model
        self._format = kv_format
        self._device = device
        self._running: _Pass | None = None
        parameters = inspect.signature(model.forward).parameters
        # transformers 5 renamed it on the way.
        self._cache_argument = "cache" if "cache" in parameters else "past_key_values"
        layers = decoder_layers(model)
        if len(layers) != kv_format.layers:
            raise InvalidEngineArgument(f"the model has {len(layers)} layers, the layout {kv_format.layers}")
        self._hooks = [
            hook
            for index, layer in enumerate(layers)
            for hook in (
                layer.register_forward_pre_hook(lambda _module, _args, index=index: self._before(index)),
                layer.register_forward_hook(lambda _module, _args, _output, index=index: self._after(index)),
            )
        ]

    def run(self, cache: PagedCache, tokens: Sequence[int], load: PrefixLoad | None,
            aborted: threading.Event) -> torch.Tensor:
        """Compute `tokens` behind the cache; logits (vocabulary,) of the last one. What the hooks raise comes out."""
        if aborted.is_set():
            raise Aborted("the request was aborted")
        stream = self._device.compute_stream()
        ids = self._device.integers(tokens, stream).unsqueeze(0)
        self._running = _Pass(stream, load, aborted)
        arguments: dict[str, Any] = {"input_ids": ids, self._cache_argument: cache, "use_cache": True,
                                     "logits_to_keep": 1}
        try:
            with torch.inference_mode():
                output = self._model(**arguments)
        finally:
            self._running = None
        cache.advance(len(tokens))
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()

    def _before(self, layer: int) -> None:
        running = self._running
        if running is None:
            return
        if running.aborted.is_set():
            raise Aborted("the request was aborted")
        if running.load is not None:
            begun = self.timeline.now() if self.timeline is not None else 0.0
            running.load.wait_segment(self._format.segment_of(layer), running.stream)
            if self.timeline is not None and self.timeline.now() - begun >= SHORTEST_WAIT_MS:
                self.timeline.host("wait", f"layer {layer}", begun, self.timeline.now())
        if self.timeline is not None:
            running.marks[layer] = running.stream.record(timed=True)

    def _after(self, layer: int) -> None:
        running = self._running
        if running is not None and self.timeline is not None and layer in running.marks:
            self.timeline.device("compute", f"layer {layer}", running.marks[layer], running.stream.record(timed=True))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder's layers in the order in which they run."""
    untyped: Any = model
    layers = getattr(untyped.get_decoder(), "layers", None)
    if not isinstance(layers, nn.ModuleList):
        raise InvalidEngineArgument(f"{type(model).__name__} has no list of decoder layers")
    return list(layers)
