"""An etcd for a test, and the first map of a cluster in it. Tests of etcd are skipped where there is none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from efs.clustermap import ClusterMap, MapPlace
from efs.limits import STRIPE_SHARDS
from tests.support.servers import NODE_CAPACITY_BYTES, ServedCluster, short_directory
from tools.etcdprocess import EtcdProcess, find_etcd


@contextmanager
def etcd_process() -> Iterator[EtcdProcess]:
    program = find_etcd()
    if program is None:
        pytest.skip("there is no etcd: install Debian's etcd-server, or run `make etcd` where apt-get works")
    with short_directory() as directory:
        process = EtcdProcess(program, directory)
        try:
            process.start()
            yield process
        finally:
            process.kill()


def map_of(cluster: ServedCluster, *, upkeep_host: str | None = None) -> ClusterMap:
    """The first version of the map of a cluster of server processes."""
    places = tuple(MapPlace(cluster.config.node_ids[index], cluster.addresses[cluster.group_of[index]], 1)
                   for index in range(STRIPE_SHARDS))
    return ClusterMap(1, cluster.config.cluster_id, cluster.config.durability, str(cluster.root), NODE_CAPACITY_BYTES,
                      cluster.config.extent_bytes, places, upkeep_host)
