"""What a node server tells a monitoring system of its nodes: metrics in Prometheus' text format, and whether all is
well. Pure: what it tells was looked up by somebody else.

Nothing here comes from a block: only numbers, node ids and states.

*Metrics.* Each of a node's own counters (`efs.metrics.NODE_COUNTERS`) as `kvstore_<name>_total`, and gauges of the
moment as `kvstore_node_<name>`, with the labels `node` (its index) and `node_id`. `kvstore_server_draining` is 1 once
the server has been told to end.

*Health.* 200 when every node serves, 503 when one does not or the server is draining; the body says why in one line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from efs.metrics import NODE_COUNTERS, CounterCollector
from efs.types import NodeInfo

if TYPE_CHECKING:
    from prometheus_client import Metric

PREFIX: Final = "kvstore"
LABELS: Final = ("node", "node_id")
SERVING: Final = "serving"
_WORDS: Final = {"suspect": "hung: an operation of its disk does not end",
                 "read-only": "read-only: its disk lost writes",
                 "index-lost": "without its index: restart its server"}


@dataclass(frozen=True, slots=True)
class NodeSample:
    """A served node at one moment. connections, in_flight: of clients, and their requests that are not answered yet.
    queued: operations that wait for its disk. counters: all of them."""

    info: NodeInfo
    connections: int
    in_flight: int
    queued: int
    counters: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class ServerSample:
    """A server and its nodes at one moment."""

    nodes: Sequence[NodeSample]
    draining: bool


GAUGES: Final = (
    ("node_serving", "whether the node takes reads and writes"),
    ("node_capacity_bytes", "bytes that the node may occupy"),
    ("node_live_bytes", "bytes of slots that hold a record"),
    ("node_fill_ratio", "live bytes of capacity"),
    ("node_extents_used", "extents given to a slot size"),
    ("node_extents", "extents in all"),
    ("node_records", "records held"),
    ("node_unverified_records", "records of earlier boots whose payload was not checked yet"),
    ("node_connections", "connections of clients"),
    ("node_in_flight", "requests that are not answered yet"),
    ("node_queued", "operations that wait for the disk or run on it"),
)


def _values(sample: NodeSample) -> tuple[float, ...]:
    """In the order of GAUGES."""
    info = sample.info
    return (float(info.state == SERVING), info.capacity_bytes, info.live_bytes,
            info.live_bytes / info.capacity_bytes if info.capacity_bytes else 0.0, info.extents_used,
            info.extents_total, info.records, info.unverified, sample.connections, sample.in_flight, sample.queued)


def _labels(sample: NodeSample) -> tuple[str, str]:
    return str(sample.info.node_index), sample.info.node_id


class _Gauges:
    """The gauges of a sample, for prometheus-client."""

    def __init__(self, sample: ServerSample) -> None:
        self._sample = sample

    def collect(self) -> Iterable[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        values = [(_labels(node), _values(node)) for node in self._sample.nodes]
        for place, (name, what) in enumerate(GAUGES):
            family = GaugeMetricFamily(f"{PREFIX}_{name}", what, labels=LABELS)
            for labels, row in values:
                family.add_metric(labels, row[place])
            yield family
        yield GaugeMetricFamily(f"{PREFIX}_server_draining", "whether the server was told to end",
                                value=float(self._sample.draining))


def metrics_text(sample: ServerSample) -> bytes:
    """The exposition, in UTF-8."""
    from prometheus_client import CollectorRegistry
    from prometheus_client.exposition import generate_latest

    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Gauges(sample))
    sources: dict[tuple[str, ...], Callable[[], Mapping[str, int]]] = {
        _labels(node): partial(dict[str, int], node.counters) for node in sample.nodes}
    registry.register(CounterCollector(sources, PREFIX, labels=LABELS, names=NODE_COUNTERS))
    return generate_latest(registry)


def why_not_healthy(sample: ServerSample) -> str | None:
    """One line, None when all is well."""
    if sample.draining:
        return "draining"
    wrong = [f"node {node.info.node_index} is {_WORDS.get(node.info.state, node.info.state)}"
             for node in sample.nodes if node.info.state != SERVING]
    return "; ".join(wrong) or None
